"""What a stage on a GPU computes before it is ready, here on a CPU."""

from dataclasses import replace

import pytest
import torch
from tiny_models import random_model, split_model, tiny_args, tiny_plan

from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import StagePlan
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch, StepResult
from tramontane.workers.stage import stage_worker
from tramontane.workers.stage.hidden_states import HiddenStates, StageOutput
from tramontane.workers.stage.stage_worker import NOT_FENCED, StageWorker
from tramontane.workers.stage.step_record import PendingStep
from tramontane.workers.stage.warm_up import warm_up_runs

FULL = tiny_args(n_layers=2, windows=(None, 24), max_seq_len=100)


def _plan(args: ModelArgs = FULL, **changes: object) -> StagePlan:
    return tiny_plan(args, 1, **changes).stages[0]  # type: ignore[arg-type]


def _lengths(plan: StagePlan) -> list[tuple[int, ...]]:
    """Of the chunks of each step; each run begins with a new list."""
    return [
        tuple(chunk.num_tokens for chunk in batch.chunks)
        for run in warm_up_runs(plan, 0)
        for batch in run
    ]


def test_prompts_of_every_length_come_alone_in_chunks_and_among_decodes() -> None:
    alone = [(n,) for n in (16, 16, 32, 32, 64, 64, 100, 100)]
    dense = _plan(tiny_args(n_layers=2, windows=(None, 24), max_seq_len=100, moe=False))
    assert _lengths(dense) == [*alone, (50,), (50,), (1, 1), (50,)]
    last = warm_up_runs(dense, 0)[-1][-1]
    assert last.decodes.seq_ids == (0, 1)
    samplings = {
        chunk.sampling.temperature > 0
        for run in warm_up_runs(_plan(), 0)
        for chunk in run[0].chunks
        if chunk.sampling
    }
    assert samplings == {True, False}
    assert all(
        chunk.needs_sample
        for run in warm_up_runs(_plan(), 0)
        for batch in run
        for chunk in batch.chunks
    )


@pytest.mark.parametrize(
    ("max_len", "longest"), [(10**6, 4096), (4096, 4096), (4000, 4000), (15, 16), (1, 16)]
)
def test_no_prompt_is_longer_than_a_sequence_may_be(max_len: int, longest: int) -> None:
    cache = replace(
        _plan().cache, classes=(replace(_plan().cache.classes[0], ring_pages=-(-max_len // 16)),)
    )
    assert (
        max(
            _lengths(
                replace(
                    _plan(replace(FULL, max_seq_len=10**6), max_num_batched_tokens=4096),
                    cache=cache,
                )
            )
        )[0]
        == longest
    )


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 20, 99])
def test_no_step_is_larger_than_a_micro_batch_may_be(max_tokens: int) -> None:
    plan = _plan(max_num_batched_tokens=max_tokens)
    sizes = [batch.num_tokens for run in warm_up_runs(plan, 0) for batch in run]
    assert max(sizes) == max_tokens
    assert min(length for lengths in _lengths(plan) for length in lengths) > 0


def test_a_cache_with_few_pages_has_all_that_are_written() -> None:
    """Fewer than a sequence of the greatest length has, as sequences share them: some are written
    twice.
    """
    plan = _plan()
    few = replace(
        plan,
        cache=replace(
            plan.cache, classes=tuple(replace(each, num_pages=3) for each in plan.cache.classes)
        ),
    )
    for number in range(len(few.cache.classes)):
        chunks = [chunk for run in warm_up_runs(few, 0) for batch in run for chunk in batch.chunks]
        assert {page for chunk in chunks for page in chunk.new_pages[number]} == {0, 1, 2}


def test_a_server_of_one_sequence_has_no_decodes_next_to_a_prompt() -> None:
    assert not any(
        batch.decodes.seq_ids and batch.chunks
        for run in warm_up_runs(_plan(max_num_seqs=1), 0)
        for batch in run
    )


@pytest.mark.parametrize("num_stages", [1, 2])
def test_nothing_remains_of_it(num_stages: int) -> None:
    """The stage takes its first fence, and computes the same bits as one that was not warmed up."""
    model, plan = random_model(FULL), tiny_plan(FULL, num_stages, max_num_seqs=3)
    warm, cold = split_model(model, plan), split_model(model, plan)
    for worker in warm:
        worker.warm_up()
        assert worker.epoch == NOT_FENCED
        assert worker.table.slots == {}
        assert not any(map(sum, worker.model.expert_load.values()))
    results = []
    for workers in (warm, cold):
        incoming = None
        for worker in workers:
            worker.fence(0)
            pages = tuple((0, 1) for _ in worker.plan.cache.classes)
            chunk = Chunk(
                0,
                0,
                tuple(range(20)),
                pages,
                SamplingParams(temperature=0.8, logprobs=5),
                needs_sample=True,
            )
            incoming = worker.step(MicroBatch(0, 0, (chunk,)), incoming)  # type: ignore[arg-type]
        assert isinstance(incoming, StepResult)
        results.append((incoming.token_ids, incoming.logprobs))
    assert results[0] == results[1]


def test_prompts_for_which_there_is_no_memory_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = tiny_plan(FULL, max_num_seqs=3)
    (worker,) = split_model(random_model(FULL), plan)
    computed, step = list[int](), StageWorker.step

    def with_little_memory(
        self: StageWorker, batch: MicroBatch, incoming: HiddenStates | None
    ) -> StageOutput:
        if batch.num_tokens > 60:
            raise torch.OutOfMemoryError("CUDA out of memory")
        computed.append(batch.num_tokens)
        return step(self, batch, incoming)

    monkeypatch.setattr(StageWorker, "step", with_little_memory)
    worker.warm_up()
    assert computed == [16, 16, 32, 32, 50, 50, 2, 52, 16, 1, 32, 1]
    assert [record.args for record in caplog.records] == [
        (plan.stages[0].label, n) for n in (64, 64, 100, 100, 64, 100)
    ]
    worker.fence(0)
    assert worker.table.slots == {}


@pytest.mark.parametrize(
    ("device", "experts_inside", "warms_up"),
    [("cuda", True, 1), ("cuda", False, 0), ("cpu", True, 0)],
)
def test_a_stage_on_a_gpu_warms_up_when_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, device: str, experts_inside: bool, warms_up: int
) -> None:
    """Unless its experts are on actors, which may not be there yet."""
    warmed: list[StageWorker] = []
    watched: list[str] = []
    monkeypatch.setattr(stage_worker, "report_compilations", watched.append)
    monkeypatch.setattr(StageWorker, "warm_up", lambda self: warmed.append(self))
    monkeypatch.setattr(stage_worker, "check_batch_invariance", lambda *_: False)
    monkeypatch.setattr(stage_worker, "stage_numerics", lambda *_, **__: None)
    args = tiny_args(n_layers=1)
    assert args.moe
    plan = replace(tiny_plan(args).stages[0], experts_inside=experts_inside)
    real = StageWorker.__init__

    def on_that_device(self: StageWorker, *given: object, **more: object) -> None:
        real(self, *given[:2], "cpu", **{})  # type: ignore[arg-type, misc]
        self.device = torch.device(device)

    monkeypatch.setattr(StageWorker, "__init__", on_that_device)
    monkeypatch.setattr(StageWorker, "prepare", lambda _: None)
    StageWorker.load(plan, RandomWeights(), "cpu")
    assert len(warmed) == warms_up
    assert watched == ([plan.label] if device == "cuda" else [])


def test_prompts_and_decodes_that_want_expert_choices_are_computed_without_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that is asked for them first must not compile what its graphs have made needless."""
    args = tiny_args(n_layers=2, max_seq_len=1000)
    assert args.moe
    (worker,) = split_model(random_model(args), tiny_plan(args, 1, max_num_seqs=3))
    computed, launch = list[tuple[int, bool]](), StageWorker.launch

    def with_recorder(
        self: StageWorker, batch: MicroBatch, incoming: HiddenStates | None
    ) -> PendingStep:
        done = launch(self, batch, incoming)
        if self.table.expert_layers:
            computed.append((batch.num_tokens, bool(batch.chunks)))
        return done

    monkeypatch.setattr(StageWorker, "launch", with_recorder)
    worker.warm_up()
    longest = max(n for n, _ in computed)
    lengths = [n for n in (16, 32, 64, 128, 256) if n < longest] + [longest]
    assert computed == [each for n in lengths for each in ((n, True), (1, False))]
    dense = tiny_args(n_layers=2, moe=False)
    assert not any(
        chunk.sampling and chunk.sampling.return_experts
        for run in warm_up_runs(_plan(dense), 0)
        for batch in run
        for chunk in batch.chunks
    )
