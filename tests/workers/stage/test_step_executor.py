"""Steps on a GPU, where the next is prepared while one is computed: with a fake device that
computes when a test lets it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from harness import PROMPTS, run_in_process
from tiny_models import random_model, split_model, tiny_args, tiny_plan

from tramontane.proto.errors import StaleEpochError
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, DecodeColumns, MicroBatch, StepResult
from tramontane.workers.attention.sdpa_backend import cpu_kernels
from tramontane.workers.device.cuda import DeviceEvent
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.stage import stage_worker
from tramontane.workers.stage.cuda_graphs import Compute
from tramontane.workers.stage.device_backend import DeviceBackend
from tramontane.workers.stage.hidden_states import HiddenStates, StageOutput
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.stage.step_executor import OverlappedExecutor, SerialExecutor

ARGS = tiny_args(n_layers=2)


class Device:
    """Comes to its marks in their order, when it is let; ``fails``: with what it does instead."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.num_marks = self.num_reached = 0
        self.fails: Exception | None = None

    def mark(self) -> "DeviceMark":
        with self.condition:
            self.num_marks += 1
            self.condition.notify_all()
            return DeviceMark(self, self.num_marks)

    def finish(self, num_marks: int) -> None:
        with self.condition:
            self.num_reached = num_marks
            self.condition.notify_all()

    def has_been_given(self, num_marks: int) -> None:
        """Waits for it: three to a step, when it begins, ends and has been delivered."""
        with self.condition:
            assert self.condition.wait_for(lambda: self.num_marks >= num_marks, timeout=60)


class DeviceMark:
    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number = device, number

    def wait(self) -> None:
        with self.device.condition:
            assert self.device.condition.wait_for(
                lambda: self.device.num_reached >= self.number or self.device.fails, timeout=60
            )
        if self.device.fails:
            raise self.device.fails

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, DeviceMark)
        return float(self.number - earlier.number)


def _worker(device: Device) -> StageWorker:
    model: StageModel = random_model(ARGS)
    worker = StageWorker(
        tiny_plan(ARGS, 1).stages[0],
        model,
        backend=DeviceBackend(cpu_kernels(), make_event=device.mark),
    )
    worker.fence(0)
    return worker


def _batch(step_id: int, epoch: int = 0) -> MicroBatch:
    sampling = SamplingParams(temperature=0.0) if step_id == 0 else None
    return MicroBatch(
        epoch,
        step_id,
        (Chunk(0, step_id, (1,), ((0,),) if step_id == 0 else ((),), sampling, True),),
    )


def _nothing() -> HiddenStates | None:
    return None


class Calls:
    """Steps, each submitted by a thread of its own."""

    def __init__(self) -> None:
        self.device = Device()
        self.worker = _worker(self.device)
        self.steps = OverlappedExecutor(self.worker, 2)
        self.threads = ThreadPoolExecutor(8)

    def submit(self, step_id: int, epoch: int = 0) -> "Future[StageOutput]":
        return self.threads.submit(self.steps.step, _batch(step_id, epoch), _nothing)


@pytest.fixture
def calls() -> Iterator[Calls]:
    calls = Calls()
    yield calls
    calls.steps.interrupt()
    calls.device.finish(10**6)
    calls.threads.shutdown()


def test_the_next_step_is_prepared_while_one_is_computed(calls: Calls) -> None:
    submitted = [calls.submit(step_id) for step_id in range(3)]
    calls.device.has_been_given(6)  # two steps
    with calls.device.condition:
        assert not calls.device.condition.wait_for(
            lambda: calls.device.num_marks > 6, timeout=0.3
        ), "and no third one"
    assert not any(future.done() for future in submitted)
    calls.device.finish(2)
    assert not submitted[0].done(), "it is not delivered"
    calls.device.finish(3)
    assert isinstance(submitted[0].result(60), StepResult)
    calls.device.has_been_given(9)
    assert not submitted[1].done()
    calls.device.finish(9)
    assert [future.result(60).timings[0].busy_s for future in submitted] == [
        1.0,
        1.0,
        1.0,
    ], "the device's time, not the host's"


class _AtOnce:
    """A ``Recorder`` of a device that needs none."""

    def __call__(self, compute: Compute) -> Compute:
        return compute


@pytest.mark.parametrize("is_recorded", [False, True])
def test_what_the_host_prepares_is_no_time_of_the_device(
    is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of a step's two marks comes between its inputs and its layers."""
    device, seen = Device(), []
    device.finish(10**6)
    index_of = stage_worker.build_attention_metadata

    def noted(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def noting(*args: object) -> object:
            seen.append(name)
            return call(*args)

        return noting

    backend = DeviceBackend(
        cpu_kernels(),
        graph_capture=_AtOnce() if is_recorded else None,
        make_event=noted("mark", device.mark),
    )  # type: ignore[arg-type]
    worker = StageWorker(tiny_plan(ARGS, 1).stages[0], random_model(ARGS), backend=backend)
    if worker.graphs is not None:
        monkeypatch.setattr(
            worker.graphs, "_copy_inputs", noted("inputs", worker.graphs._copy_inputs)
        )
    monkeypatch.setattr(stage_worker, "build_attention_metadata", noted("inputs", index_of))
    monkeypatch.setattr(worker.model, "embed", noted("layers", worker.model.embed))
    worker.fence(0)
    worker.step(_batch(0), None)
    assert seen == ["inputs", "mark", "layers", "mark"]
    for step_id in (1, 2):  # which is not the first of its size
        seen.clear()
        worker.step(MicroBatch(0, step_id, (), (), DecodeColumns((0,), (step_id,), (1,))), None)
    assert seen == ["inputs", "mark", "layers", "mark"]


def test_steps_begin_in_their_order_however_they_come(calls: Calls) -> None:
    late = [calls.submit(step_id) for step_id in (2, 1)]
    calls.device.finish(10**6)
    with pytest.raises(TimeoutError):
        late[0].result(0.05)
    assert calls.worker.next_step_id == 0
    tokens = [f.result(60).token_ids for f in (calls.submit(0), late[1], late[0])]  # type: ignore[union-attr]
    calls.worker.fence(1)
    assert tokens == [calls.worker.step(_batch(i, 1), None).token_ids for i in range(3)]  # type: ignore[union-attr]


def test_a_fence_waits_for_no_device_and_ends_what_waits(calls: Calls) -> None:
    begun = calls.submit(0)
    calls.device.has_been_given(3)
    waiting = calls.submit(5)
    calls.threads.submit(calls.steps.fence, 1).result(60)
    with pytest.raises(StaleEpochError):
        waiting.result(60)
    after = calls.submit(0, epoch=1)
    calls.device.has_been_given(6)
    calls.device.finish(6)
    assert begun.result(60).timings[0].num_tokens == after.result(60).timings[0].num_tokens == 1
    with pytest.raises(StaleEpochError):
        calls.submit(1, epoch=0).result(60)
    with pytest.raises(StaleEpochError):
        calls.steps.fence(1)


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_nothing_is_received_for_a_step_of_another_epoch(is_overlapped: bool) -> None:
    """The hidden states that come next are those of a step of this epoch."""
    worker = _worker(Device())
    executor = OverlappedExecutor(worker, 2) if is_overlapped else SerialExecutor(worker, 1)
    worker.fence(3)

    def receive() -> HiddenStates | None:
        raise AssertionError("something was received")

    for epoch in (2, 4):
        with pytest.raises(StaleEpochError, match="is at epoch 3"):
            executor.step(_batch(0, epoch), receive)
    with pytest.raises(AssertionError, match="0 was due"):  # others wait for their turn
        SerialExecutor(worker, 1).step(_batch(1, 3), receive)
    assert worker.next_step_id == 0


def test_what_fails_on_the_device_fails_the_step_that_is_read(calls: Calls) -> None:
    submitted = calls.submit(0)
    calls.device.has_been_given(3)
    calls.device.fails = RuntimeError("an illegal memory access")
    calls.device.finish(0)
    with pytest.raises(RuntimeError, match="illegal"):
        submitted.result(60)


def test_computing_is_what_the_device_does_and_not_waiting_for_a_neighbor(calls: Calls) -> None:
    let_go = threading.Event()

    def slow_neighbor() -> HiddenStates | None:
        let_go.wait(60)
        return None

    submitted = calls.threads.submit(calls.steps.step, _batch(0), slow_neighbor)
    while not calls.steps._has_turn:
        time.sleep(0.001)
    assert calls.steps.busy_for_s == 0
    let_go.set()
    calls.device.has_been_given(3)
    while not calls.steps.busy_for_s:
        time.sleep(0.001)
    calls.device.finish(3)
    submitted.result(60)
    assert calls.steps.busy_for_s == 0


def test_the_same_tokens_as_without_a_device() -> None:
    device = Device()
    device.finish(10**6)
    plan = tiny_plan(ARGS, 1)
    expected = run_in_process(plan, split_model(random_model(ARGS), plan), PROMPTS[:8], budget=64)
    worker = StageWorker(
        plan.stages[0],
        random_model(ARGS),
        backend=DeviceBackend(cpu_kernels(), make_event=device.mark),
    )
    assert run_in_process(plan, [worker], PROMPTS[:8], budget=64) == expected
    assert torch.get_num_threads() >= 1
