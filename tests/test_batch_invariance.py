"""A request's tokens and log-probabilities have the same bits, whatever else is computed, and
however its prompt is cut.
"""

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from checked_once import checked_once
from exact_values import SAMPLING, Values, exact_values
from examples import examples
from harness import random_ids, run_answers, scheduler_for
from hypothesis import given, settings
from hypothesis import strategies as st
from local_expert_actors import ExpertActors, expert_plan, ping_pong_chain, without_experts
from tiny_models import (
    latent_args,
    random_model,
    sparse_args,
    tiny_args,
    tiny_plan,
    write_checkpoint,
)

from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.proto.model_args import MoeArgs
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.request import SamplingParams
from tramontane.router.scheduling.policy import FixedInFlightPolicy
from tramontane.workers.stage.stage_worker import StageWorker

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None, reason="batch invariance needs kernels in C, and they a C compiler"
)
# Widths that fill no last panel of a product's columns and no last unit of its inputs.
WIDE = {"dim": 90, "hidden_dim": 210, "vocab_size": 300}
KINDS = {
    "mixtral": replace(tiny_args(n_layers=4, window=24, max_seq_len=200), **WIDE),  # type: ignore[arg-type]
    "three experts": replace(
        tiny_args(n_layers=4, window=24, max_seq_len=200), **WIDE, moe=MoeArgs(5, 3)
    ),  # type: ignore[arg-type]
    "interleaved": replace(
        tiny_args(n_layers=4, windows=(None, 24, 7, None), max_seq_len=200), **WIDE
    ),  # type: ignore[arg-type]
    "dense": replace(tiny_args(n_layers=4, window=None, moe=False, max_seq_len=200), **WIDE),  # type: ignore[arg-type]
    "latent": replace(latent_args(n_layers=4, max_seq_len=200), **WIDE),  # type: ignore[arg-type]
    "sparse": replace(sparse_args(max_seq_len=200), **WIDE),  # type: ignore[arg-type]
    "latent, sigmoid": replace(latent_args(n_layers=4, max_seq_len=200, is_sigmoid=True), **WIDE),  # type: ignore[arg-type]
}


@dataclass(frozen=True)
class Case:
    """How prompts are computed."""

    stages: int = 1
    page_size: int = 16
    budget: int = 4096
    max_in_flight: int = 1
    max_num_seqs: int = 8
    is_scarce: bool = False  # whether there are pages for the prompts, but not for all answers
    together: bool = True


@pytest.fixture(autouse=True, scope="module")
def _checked_once() -> Iterator[None]:
    with checked_once():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        kind: write_checkpoint(tmp_path_factory.mktemp("models") / "m", args, random_model(args))
        for kind, args in KINDS.items()
    }


def _plan(kind: str, dtype: str, case: Case) -> PipelinePlan:
    plan = tiny_plan(
        KINDS[kind],
        case.stages,
        case.page_size,
        case.max_num_seqs,
        dtype=dtype,
        batch_invariant=True,
    )
    if not case.is_scarce:
        return plan
    longest = -(-plan.max_model_len // case.page_size)
    classes = tuple(replace(c, num_pages=min(c.num_pages, 2 * longest)) for c in plan.cache.classes)
    return replace(
        plan, stages=tuple(replace(s, cache=replace(s.cache, classes=classes)) for s in plan.stages)
    )


def _answers(
    folder: Path,
    plan: PipelinePlan,
    prompts: Sequence[list[int]],
    case: Case,
    sampling: SamplingParams = SAMPLING,
) -> tuple[list[Values], int]:
    """Return the values of each answer, and how many sequences were preempted."""
    return _run(
        [StageWorker.load(stage, folder) for stage in plan.stages], plan, prompts, case, sampling
    )


def _run(
    stages: Sequence[StageWorker],
    plan: PipelinePlan,
    prompts: Sequence[list[int]],
    case: Case,
    sampling: SamplingParams,
) -> tuple[list[Values], int]:
    chain = LocalStageChain(stages)
    scheduler = scheduler_for(
        plan, case.budget, FixedInFlightPolicy(case.max_in_flight, case.budget)
    )
    try:
        answers = asyncio.run(
            run_answers(chain, scheduler, prompts, sampling, together=case.together)
        )
    finally:
        chain.close()
    return list(map(exact_values, answers)), scheduler.num_preempted


@cache
def _only_stage(folder: Path, kind: str, dtype: str) -> StageWorker:
    return StageWorker.load(_plan(kind, dtype, Case()).stages[0], folder)


@cache
def _alone(
    folder: Path, kind: str, dtype: str, length: int, seed: int, sampling: SamplingParams = SAMPLING
) -> Values:
    """Of a prompt that has the only stage of a pipeline for itself."""
    case = Case(together=False)
    stages = [_only_stage(folder, kind, dtype)]
    return _run(stages, _plan(kind, dtype, case), [random_ids(length, seed)], case, sampling)[0][0]


CASES = st.builds(
    Case,
    stages=st.sampled_from([1, 2, 4]),
    page_size=st.sampled_from([1, 3, 16]),
    # then a step may have more tokens than a block of a product, 252
    budget=st.one_of(st.integers(1, 80), st.just(700)),
    max_in_flight=st.integers(1, 4),
    max_num_seqs=st.integers(1, 6),
    is_scarce=st.booleans(),
)
LENGTHS = st.lists(st.sampled_from([1, 2, 7, 16, 33, 60, 100]), min_size=1, max_size=6)


@settings(max_examples=examples(6, least=2), deadline=None, derandomize=True)
@given(case=CASES, lengths=LENGTHS, threads=st.integers(1, 3))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_cut_and_preempted_in_any_way(
    folders: dict[str, Path], kind: str, dtype: str, case: Case, lengths: list[int], threads: int
) -> None:
    expected = [
        _alone(folders[kind], kind, dtype, length, seed) for seed, length in enumerate(lengths)
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        prompts = [random_ids(length, seed) for seed, length in enumerate(lengths)]
        got, _ = _answers(folders[kind], _plan(kind, dtype, case), prompts, case)
    finally:
        torch.set_num_threads(before)
    assert got == expected


def test_sequences_that_are_preempted_are_among_them(folders: dict[str, Path]) -> None:
    case = Case(page_size=1, budget=64, max_num_seqs=12, is_scarce=True)
    plan = _plan("dense", "bfloat16", case)
    classes = tuple(replace(c, num_pages=220) for c in plan.cache.classes)
    plan = replace(
        plan, stages=tuple(replace(s, cache=replace(s.cache, classes=classes)) for s in plan.stages)
    )
    got, num_preempted = _answers(
        folders["dense"], plan, [random_ids(16, seed) for seed in range(12)], case
    )
    assert num_preempted > 0
    assert got == [_alone(folders["dense"], "dense", "bfloat16", 16, seed) for seed in range(12)]


# Of more tokens than PyTorch sums in one thread, 32768.
LARGE_VOCABULARY = replace(tiny_args(n_layers=2, window=24, max_seq_len=64), vocab_size=33_003)
WISHES = (
    SamplingParams(9, 0.0, logprobs=5, prompt_logprobs=2),
    SamplingParams(
        8, 0.8, top_p=0.9, seed=3, logprobs=20, prompt_logprobs=20, frequency_penalty=0.3
    ),
    SamplingParams(7, 1.0, top_k=50, seed=4, logprobs=0, prompt_logprobs=7),
    SamplingParams(
        8,
        1.2,
        min_p=0.01,
        seed=5,
        logprobs=3,
        presence_penalty=0.6,
        repetition_penalty=1.2,
        logit_bias=((3, 2.0),),
    ),
    SamplingParams(9, 0.7, top_p=0.5, top_k=7, seed=6, prompt_logprobs=0),
    SamplingParams(9, 1.0, seed=7),
    SamplingParams(9, 0.0, logprobs=2, frequency_penalty=0.5),
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_requests_of_other_sampling_parameters(tmp_path: Path, dtype: str) -> None:
    """Each gets what it gets alone, with more than one thread."""
    folder = write_checkpoint(tmp_path / "m", LARGE_VOCABULARY, random_model(LARGE_VOCABULARY))
    prompts = [
        random_ids(length, seed, LARGE_VOCABULARY.vocab_size)
        for seed, length in enumerate((16, 5, 33, 1, 20, 9, 12))
    ]
    before, found = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        for num_stages, budget, together in ((1, 512, False), (1, 512, True), (2, 9, True)):
            plan = tiny_plan(LARGE_VOCABULARY, num_stages, dtype=dtype, batch_invariant=True)
            chain = LocalStageChain([StageWorker.load(stage, folder) for stage in plan.stages])
            try:
                answers = asyncio.run(
                    run_answers(
                        chain, scheduler_for(plan, budget), prompts, WISHES, together=together
                    )
                )
            finally:
                chain.close()
            found.append(list(map(exact_values, answers)))
    finally:
        torch.set_num_threads(before)
    alone, *in_company = found
    assert [len(token_ids) for token_ids, _ in alone] == [wish.max_tokens for wish in WISHES]
    for each in in_company:
        assert each == alone


@settings(max_examples=examples(6, least=2), deadline=None, derandomize=True)
@given(case=CASES, length=st.sampled_from([1, 16, 33, 60]), num_known=st.integers(0, 11))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["mixtral", "interleaved", "latent"])
def test_an_answer_that_is_computed_again_from_any_of_its_tokens(
    folders: dict[str, Path], kind: str, dtype: str, case: Case, length: int, num_known: int
) -> None:
    """What was decoded is then a part of the prompt. Without penalties, which count the answer's
    tokens only.
    """
    sampling = replace(SAMPLING, frequency_penalty=0.0, ignore_eos=True)
    prompt = random_ids(length, seed=5)
    token_ids, logprobs = _alone(folders[kind], kind, dtype, length, 5, sampling)
    known, more = (
        [*prompt, *token_ids[:num_known]],
        replace(sampling, max_tokens=len(token_ids) - num_known),
    )
    ((again, logprobs_again),), _ = _answers(
        folders[kind], _plan(kind, dtype, case), [known], case, more
    )
    assert again == token_ids[num_known:]
    assert all(
        logprobs_again[position] == logprobs[position]
        for position in range(len(known), len(prompt) + len(token_ids))
    )


@settings(max_examples=examples(4, least=2), deadline=None, derandomize=True)
@given(
    num_actors=st.integers(1, 8),
    replicas=st.integers(1, 2),
    stages=st.sampled_from([1, 2, 4]),
    budget=st.integers(3, 80),
    lengths=LENGTHS,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["mixtral", "three experts", "latent, sigmoid", "sparse"])
def test_experts_on_actors(
    folders: dict[str, Path],
    kind: str,
    dtype: str,
    num_actors: int,
    replicas: int,
    stages: int,
    budget: int,
    lengths: list[int],
) -> None:
    experts = expert_plan(KINDS[kind], num_actors, min(replicas, num_actors), dtype=dtype)
    plan = without_experts(_plan(kind, dtype, Case(stages)), experts)
    actors = ExpertActors(experts, folders[kind])
    prompts = [random_ids(length, seed) for seed, length in enumerate(lengths)]
    with ping_pong_chain(plan, folders[kind], actors) as chain:
        scheduler = scheduler_for(plan, budget, FixedInFlightPolicy(2, budget))
        answers = asyncio.run(run_answers(chain, scheduler, prompts, SAMPLING))
    expected = [
        _alone(folders[kind], kind, dtype, length, seed) for seed, length in enumerate(lengths)
    ]
    assert list(map(exact_values, answers)) == expected
