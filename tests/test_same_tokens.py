"""However the work is cut - stages, chunks, pages, company - the tokens are those of the plain
loop.
"""

import asyncio
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from examples import examples
from harness import GREEDY, PROMPTS, random_ids, run_in_process, run_prompts, scheduler_for
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import CLOSE_CALL, Expected, assert_same_tokens, greedy, reference_logits
from tiny_models import random_model, split_model, tiny_args, tiny_plan

from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import Layout, RandomWeights, WeightSource
from tramontane.proto.presets import PRESETS, tiny_variant
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch, StepResult
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.sequence import Sequence
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights.random_checkpoint import write_random_checkpoint

WINDOW = 24  # eight layers see 8 * 23 positions back; prompts reach 600
KINDS = {
    "mixtral": tiny_args(window=WINDOW),
    "mistral": tiny_args(window=WINDOW, moe=False),
    "full": tiny_args(window=None, moe=False),
    "interleaved": tiny_args(windows=(None, WINDOW, 7, WINDOW) * 2),
}


@cache
def _expected(kind: str, index: int, guess: tuple[int, ...]) -> Expected:
    """Of one prompt. Nearly always the guess is right, and the same again for the next case."""
    return greedy(_weights(kind), KINDS[kind], PROMPTS[index], GREEDY.max_tokens, guess)


@cache
def _weights(kind: str) -> dict[str, torch.Tensor]:
    return random_model(KINDS[kind]).state_dict()


# Every value of every dimension at least once, the interesting pairs together; not the full
# product.
CASES = [
    ("mixtral", 1, 4096, 16, True),
    ("mixtral", 2, 64, 16, True),
    ("mixtral", 4, 7, 1, True),
    ("mixtral", 8, 64, 64, True),
    ("mixtral", 8, 7, 16, True),
    ("mixtral", 4, 64, 16, False),
    ("mixtral", 1, 1, 1, False),
    ("mistral", 2, 4096, 1, True),
    ("mistral", 2, 1, 16, True),
    ("mistral", 1, 7, 64, False),
    ("full", 2, 64, 16, True),
    ("full", 4, 4096, 64, False),
    ("interleaved", 4, 64, 16, True),
    ("interleaved", 1, 7, 1, True),
]


@pytest.mark.parametrize(("kind", "stages", "budget", "page_size", "together"), CASES)
def test_same_tokens(kind: str, stages: int, budget: int, page_size: int, together: bool) -> None:
    args = KINDS[kind]
    chosen = [
        i for i, p in enumerate(PROMPTS) if budget > 7 or len(p) <= (130 if budget == 7 else 65)
    ]
    plan = tiny_plan(args, stages, page_size)
    workers = split_model(random_model(args), plan)
    outputs = run_in_process(
        plan, workers, [PROMPTS[i] for i in chosen], budget=budget, together=together
    )
    for i, output in zip(chosen, outputs, strict=True):
        assert_same_tokens(
            f"{kind}, prompt of {len(PROMPTS[i])}", output, _expected(kind, i, tuple(output))
        )


@pytest.mark.parametrize("kind", ["full", "interleaved"])
@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(max_tokens=8, temperature=1.0, seed=5)]
)
def test_same_tokens_where_sequences_are_preempted(kind: str, sampling: SamplingParams) -> None:
    """Short prompts with pages for their prompts, but not for their answers: some give theirs back
    and are computed again.
    """
    args = KINDS[kind]
    prompts = [random_ids(12, seed) for seed in range(12)]
    longer = SamplingParams(40, sampling.temperature, seed=sampling.seed)
    roomy = tiny_plan(args, 2, 4)
    classes = tuple(
        replace(c, num_pages=c.num_pages if c.window else 150) for c in roomy.cache.classes
    )
    scarce = replace(
        roomy,
        stages=tuple(replace(s, cache=replace(s.cache, classes=classes)) for s in roomy.stages),
    )
    model = random_model(args)
    outputs = []
    for plan in (roomy, scarce):
        scheduler = scheduler_for(plan, 64)
        chain = LocalStageChain(split_model(model, plan))
        outputs.append(asyncio.run(run_prompts(chain, scheduler, prompts, longer)))
        chain.close()
    assert scheduler.num_preempted > 0
    assert outputs[0] == outputs[1]


@settings(max_examples=examples(40, least=5), deadline=None, derandomize=True)
@given(
    window=st.one_of(st.none(), st.integers(1, 40)),
    other_window=st.one_of(st.none(), st.integers(1, 40)),
    page_size=st.sampled_from([1, 2, 3, 8, 16, 64]),
    budget=st.integers(1, 80),
    stages=st.integers(1, 2),
    max_in_flight=st.integers(1, 4),
    max_num_seqs=st.integers(1, 5),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
)
def test_any_geometry(
    window: int | None,
    other_window: int | None,
    page_size: int,
    budget: int,
    stages: int,
    max_in_flight: int,
    max_num_seqs: int,
    lengths: list[int],
) -> None:
    args = tiny_args(n_layers=2, windows=(window, other_window), max_seq_len=100)
    prompts = [random_ids(n, seed) for seed, n in enumerate(lengths)]
    model = random_model(args)
    plan = tiny_plan(args, stages, page_size, max_num_seqs)
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    outputs = run_in_process(
        plan,
        split_model(model, plan),
        prompts,
        sampling,
        budget=budget,
        max_in_flight=max_in_flight,
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same_tokens(
            f"prompt of {len(prompt)}", output, greedy(model.state_dict(), args, prompt, 4, output)
        )


@pytest.mark.parametrize("name", ["mistral-7b-v0.1", "mixtral-8x7b"])
def test_random_weights_give_the_tokens_of_the_random_checkpoint_on_any_number_of_stages(
    tmp_path: Path, name: str
) -> None:
    args = tiny_variant(PRESETS[name])
    write_random_checkpoint(tmp_path / "model", args, Layout.HUGGING_FACE)
    sources: tuple[WeightSource, ...] = (tmp_path / "model", RandomWeights())
    outputs = []
    for stages in (1, 2, 4):
        plan = tiny_plan(args, stages)
        for weights in sources:
            workers = [StageWorker.load(stage, weights) for stage in plan.stages]
            outputs.append(run_in_process(plan, workers, PROMPTS[:12]))
    assert all(output == outputs[0] for output in outputs)


def test_seeded_sampling_is_the_same_however_it_is_cut() -> None:
    """Random draws belong to (seed, choice, position), not to the batch they happen in."""
    args = KINDS["mixtral"]
    prompts = [p for p in PROMPTS if len(p) <= 65]
    sampling = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, top_k=40, seed=11)
    outputs = [
        _sampled(args, prompts, sampling, *cut)
        for cut in ((1, 4096, True), (4, 7, True), (2, 64, False))
    ]
    assert outputs[0] == outputs[1] == outputs[2]
    other = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, top_k=40, seed=12)
    assert _sampled(args, prompts, other, 1, 4096, True) != outputs[0]


def _sampled(
    args: ModelArgs,
    prompts: list[list[int]],
    sampling: SamplingParams,
    stages: int,
    budget: int,
    together: bool,
) -> list[list[int]]:
    plan = tiny_plan(args, stages)
    workers = split_model(random_model(args), plan)
    return run_in_process(plan, workers, prompts, sampling, budget=budget, together=together)


@settings(max_examples=examples(60, least=5), deadline=None, derandomize=True)
@given(
    window=st.sampled_from([None, 1, 5, 24]),
    page_size=st.sampled_from([1, 3, 16]),
    sizes=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=5), min_size=2, max_size=4),
)
def test_chunks_of_many_sequences_in_one_micro_batch(
    window: int | None, page_size: int, sizes: list[list[int]]
) -> None:
    """Any interleaving of chunks, also ones our scheduler would not make: several prompts continue
    in the same step.

    ``sizes[s][i]`` tokens of sequence s go into micro-batch i; every chunk's next token must be the
    reference's.
    """
    args = tiny_args(n_layers=2, window=window, max_seq_len=256)
    plan = tiny_plan(args, 1, page_size)
    model = random_model(args)
    (worker,) = split_model(model, plan)
    worker.fence(0)
    allocator = PageAllocator(plan.cache)
    prompts = [random_ids(sum(size), seed=s) for s, size in enumerate(sizes)]
    sequences = [Sequence(s, tuple(p), GREEDY, len(p) + 1) for s, p in enumerate(prompts)]
    assert all(allocator.reserve_for_admission(s) for s in sequences)
    best = {s: reference_logits(model.state_dict(), args, p) for s, p in enumerate(prompts) if p}
    for step in range(max(map(len, sizes))):
        going = [
            (s, size[step])
            for s, size in zip(sequences, sizes, strict=True)
            if step < len(size) and size[step]
        ]
        chunks = [_next_chunk(sequence, allocator, num_tokens) for sequence, num_tokens in going]
        batch = MicroBatch(
            0, worker.next_step_id, tuple(sorted(chunks, key=lambda c: c.num_tokens == 1))
        )
        if not chunks:
            continue
        result = worker.step(batch, None)
        assert isinstance(result, StepResult)
        for chunk, token_id in zip(batch.chunks, result.token_ids, strict=True):
            logits = best[chunk.seq_id][chunk.start + chunk.num_tokens - 1]
            assert logits.max() - logits[token_id] < CLOSE_CALL


def _next_chunk(sequence: Sequence, allocator: PageAllocator, num_tokens: int) -> Chunk:
    start, end = sequence.num_dispatched, sequence.num_dispatched + num_tokens
    sequence.num_dispatched = end
    return Chunk(
        sequence.seq_id,
        start,
        sequence.known_ids(start, end),
        allocator.allocate(sequence, start, end),
        GREEDY if start == 0 else None,
        needs_sample=True,
    )
