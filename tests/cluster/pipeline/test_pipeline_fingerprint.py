"""A pipeline's fingerprint changes with all that a request's tokens may depend on, and with nothing
else.
"""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from event_loops import in_event_loop
from local_expert_actors import expert_plan
from ray.exceptions import ActorUnavailableError
from tiny_models import tiny_args, tiny_plan

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.pipeline import stage_chain as fingerprints
from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.cluster.pipeline.stage_chain import (
    ObjectStoreStageChain,
    pipeline_fingerprint,
    weights_name,
)
from tramontane.proto.errors import PipelineError
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.weight_format import Quantization
from tramontane.workers.device.numerics import Numerics
from tramontane.workers.experts.expert_worker import ExpertWorker
from tramontane.workers.stage.stage_worker import StageWorker

ARGS = tiny_args(n_layers=4, windows=(24, None, 24, None))
PARTS = {"attention": "C 1", "device": "a processor", "norms": "C 2", "products of float32": "C 3"}
ALIKE = Numerics(tuple(PARTS.items()), is_batch_invariant=True)
needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None, reason="only kernels in C are batch-invariant"
)
EXPERT = Numerics(
    tuple((part, PARTS[part]) for part in ("device", "norms", "products of float32")),
    is_batch_invariant=True,
)
OTHER = Numerics(tuple((PARTS | {"device": "another"}).items()), is_batch_invariant=True)
LOOSE = replace(ALIKE, is_batch_invariant=False)


def _of(
    numerics: Numerics | Sequence[Numerics] = ALIKE,
    num_stages: int = 2,
    experts: Sequence[Numerics] = (),
    weights: str = "weights",
    plan: PipelinePlan | None = None,
) -> str:
    stages = (plan or tiny_plan(ARGS, num_stages)).stages
    each = [numerics] * len(stages) if isinstance(numerics, Numerics) else numerics
    return pipeline_fingerprint(weights, list(zip(stages, each, strict=True)), experts)


def _quantized(quantize: Quantization) -> str:
    return _of(plan=tiny_plan(ARGS, 2, quantize=quantize))


CHANGES: dict[str, Callable[[], str]] = {
    "dtype": lambda: _of(plan=tiny_plan(ARGS, 2, dtype="bfloat16")),
    "int8": lambda: _quantized(Quantization.INT8),
    "w8a8": lambda: _quantized(Quantization.W8A8),
    "weights": lambda: _of(weights="others"),
    "geometry": lambda: _of(plan=tiny_plan(replace(ARGS, rope_theta=1e6), 2)),
    **{
        part: lambda part=part: _of(Numerics(tuple((PARTS | {part: "another"}).items()), True))
        for part in PARTS
    },  # type: ignore[misc]
}


def test_it_is_short_and_always_the_same() -> None:
    assert _of() == _of()
    assert _of().startswith("fp_")
    assert len(_of()) == 19
    assert _of().isascii()


def test_it_changes_with_everything_that_decides_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"nothing": _of()} | {name: make() for name, make in CHANGES.items()}
    monkeypatch.setattr(fingerprints, "version", lambda _: "0.0.1")
    found["version"] = _of()
    assert len(set(found.values())) == len(found), found


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("num_experts", [0, 1, 3])
def test_invariant_workers_that_are_alike_may_be_any_number(
    num_stages: int, num_experts: int
) -> None:
    assert _of(num_stages=num_stages, experts=[EXPERT] * num_experts) == _of()


def test_pages_and_sequences_do_not_count() -> None:
    assert _of(plan=tiny_plan(ARGS, 2, page_size=3, max_num_seqs=5)) == _of()


def test_a_part_that_one_worker_alone_has_counts_wherever_it_is() -> None:
    """As products of a head that is not quantized: the last stage has them, whatever else it
    has.
    """
    last = Numerics((*ALIKE.parts, ("products of int8", "C 3")), is_batch_invariant=True)
    assert _of([ALIKE, last]) == _of([last], 1) == _of([ALIKE] * 3 + [last], 4) != _of()


def _uneven() -> PipelinePlan:
    first, second = tiny_plan(ARGS, 2).stages
    return replace(
        tiny_plan(ARGS, 2), stages=(replace(first, last_layer=1), replace(second, first_layer=1))
    )


def test_the_split_counts_where_stages_are_not_invariant() -> None:
    splits = [
        _of(LOOSE, 1),
        _of(LOOSE, 2),
        _of(LOOSE, 4),
        _of(LOOSE, plan=_uneven()),
        _of(LOOSE, experts=[EXPERT]),
        _of(),
    ]
    assert len(set(splits)) == len(splits)
    assert _of(LOOSE, 2) == _of(LOOSE, 2)
    assert _of(plan=_uneven()) == _of(), "of invariant ones it does not count"
    assert _of([ALIKE, LOOSE]) != _of()
    assert _of(experts=[replace(EXPERT, is_batch_invariant=False)]) != _of()


def test_the_split_counts_where_workers_are_unlike() -> None:
    splits = [
        _of([ALIKE, OTHER]),
        _of([OTHER, ALIKE]),
        _of([ALIKE, OTHER], plan=_uneven()),
        _of(),
        _of(OTHER),
    ]
    splits += [_of(experts=[EXPERT, OTHER]), _of(experts=[OTHER, EXPERT])]
    assert len(set(splits)) == len(splits)


def test_weights_are_named_by_their_files() -> None:
    files = (("config.json", "1"), ("model.safetensors", "2"))
    changed = (files[0], ("model.safetensors", "3"))
    random, model = RandomWeights(), Path("mixtral-8x7b")
    names = [
        weights_name(Path("/a"), files, Path("/a")),
        weights_name(Path("/a"), changed, Path("/a")),
    ]
    names += [
        weights_name(random, files[:1], model),
        weights_name(random, (), model),
        weights_name(random, (), Path("mistral-7b")),
    ]
    assert len(set(names)) == len(names)
    assert weights_name(Path("/b"), files, Path("/b")) == names[0], "whatever the folder is called"
    assert weights_name(random, files[:1], Path("/b")) == names[2]


# ---- of real workers


def _load(num_stages: int, page_size: int = 16, **changes: Any) -> str:  # of the plan
    plan = tiny_plan(ARGS, num_stages, page_size, **changes)
    chain = LocalStageChain(
        [StageWorker.load(stage, RandomWeights()) for stage in plan.stages], "weights"
    )
    try:
        return asyncio.run(chain.fingerprint())
    finally:
        chain.close()


@needs_compiler
def test_of_real_stages_it_depends_on_no_number_of_stages_threads_pages_or_expert_actors() -> None:
    expected, threads = _load(1), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert _load(2, 3) == _load(4) == expected
    finally:
        torch.set_num_threads(threads)
    actors = expert_plan(ARGS, 2)
    experts = [ExpertWorker.load(actors, number, RandomWeights()).numerics for number in (0, 1)]
    plans = [replace(stage, experts_inside=False) for stage in tiny_plan(ARGS, 2).stages]
    loaded = [(plan, StageWorker.load(plan, RandomWeights()).numerics) for plan in plans]
    assert pipeline_fingerprint("weights", loaded, experts) == expected
    assert _load(1, dtype="bfloat16") != expected


def test_of_real_stages_that_need_not_be_invariant_it_depends_on_the_split() -> None:
    assert len({_load(number, batch_invariant=False) for number in (1, 2)}) == 2


# ---- of a pipeline on Ray, with actors that answer what the test wants


class _Actor:
    """An actor whose health has these numerics, or which raises this error."""

    def __init__(self, answer: Numerics | Exception | None) -> None:
        self.answer = answer
        self.health = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._health))

    async def _health(self) -> SimpleNamespace:
        if isinstance(self.answer, Exception):
            raise self.answer
        return SimpleNamespace(numerics=self.answer)


def _chain(
    monkeypatch: pytest.MonkeyPatch, stages: list[_Actor], experts: list[_Actor]
) -> ObjectStoreStageChain:
    plan = tiny_plan(ARGS, len(stages))
    if experts:
        plan = replace(plan, experts=expert_plan(ARGS, len(experts)))
        found = dict(enumerate(experts))
        monkeypatch.setattr(
            "tramontane.cluster.pipeline.stage_chain.find_expert_actors", lambda _: found
        )
    spec = PipelineSpec("test", plan, RandomWeights(), threads_per_stage=1, use_gpus=False)
    actors: Any = stages
    return ObjectStoreStageChain(actors, actors[0], "router", spec=spec)


@in_event_loop
async def test_a_stage_that_comes_back_on_an_unlike_node_changes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages = [_Actor(ALIKE), _Actor(ALIKE)]
    chain = _chain(monkeypatch, stages, [])
    before = await chain.fingerprint()
    assert before == await chain.fingerprint() != ""
    stages[1].answer = OTHER
    assert await chain.fingerprint() not in ("", before)
    for unknown in (None, ActorUnavailableError("it restarts", b"a" * 16)):
        stages[1].answer = unknown
        assert await chain.fingerprint() == ""
    stages[1].answer = ALIKE
    assert await chain.fingerprint() == before


@in_event_loop
async def test_an_expert_actor_that_restarts_counts_as_before_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experts = [_Actor(EXPERT), _Actor(None)]
    chain = _chain(monkeypatch, [_Actor(ALIKE)], experts)
    assert await chain.fingerprint() == "", "the second has not loaded yet"
    experts[1].answer = EXPERT
    before = await chain.fingerprint()
    assert before == await _chain(monkeypatch, [_Actor(ALIKE)], []).fingerprint(), (
        "alike and invariant"
    )
    for away in (ActorUnavailableError("it restarts", b"a" * 16), None):
        experts[0].answer = away
        assert await chain.fingerprint() == before
    experts[0].answer = OTHER
    assert await chain.fingerprint() not in ("", before)


def test_without_a_specification_nothing_is_known() -> None:
    actors: Any = [_Actor(PipelineError("not asked"))]
    assert asyncio.run(ObjectStoreStageChain(actors, actors[0], "router").fingerprint()) == ""
