"""When a worker's process ends itself, and when not."""

import threading
from types import SimpleNamespace

import pytest
import torch

from tramontane.cluster.actors.stage_actor import StageActor
from tramontane.cluster.actors.worker_actor import (
    MAX_ABANDONED,
    MAX_FAILURES,
    FailureGuard,
    device_self_test,
)
from tramontane.proto.errors import LinkError
from tramontane.workers.links.gpu_channel import ABANDONED, num_abandoned_operations


class Ended(Exception):
    """Instead of the process."""


def _end() -> None:
    raise Ended


def _fail(failures: FailureGuard, error: Exception, epoch: int | None = None) -> None:
    with pytest.raises(type(error)), failures.guard(epoch):
        raise error


def test_failures_in_a_row_end_the_process() -> None:
    failures = FailureGuard("Stage 1/2", "cpu", _end)
    for _ in range(3):
        for _ in range(MAX_FAILURES - 1):
            _fail(failures, ValueError("a request made it fail"))
        with failures.guard():
            pass  # a success resets the count
    for _ in range(MAX_FAILURES - 1):
        _fail(failures, MemoryError())
    with pytest.raises(Ended), failures.guard():
        raise MemoryError


def test_steps_that_were_under_way_when_one_failed_count_as_one() -> None:
    failures = FailureGuard("Stage 1/2", "cpu", _end)
    for epoch in range(MAX_FAILURES - 1):
        for _ in range(2 * MAX_FAILURES):
            _fail(failures, ValueError("pieces of the same prompt"), epoch)
    with pytest.raises(Ended), failures.guard(MAX_FAILURES):
        raise ValueError


def test_what_others_do_is_no_failure_of_its_own() -> None:
    failures = FailureGuard("Stage 1/2", "cpu", _end)
    for _ in range(2 * MAX_FAILURES):
        _fail(failures, LinkError("the stage before is gone"))


def test_a_device_that_computes_no_more_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_self_test("cpu")

    def sticky(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "ones", sticky)
    with pytest.raises(Ended), FailureGuard("Stage 1/2", "cuda", _end).guard():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_threads_that_were_left_in_calls_that_do_not_end_end_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One may be due to a neighbor that died just then; where two GPUs can never be connected there
    is one after another.
    """
    assert num_abandoned_operations() == 0
    failures, over = FailureGuard("Stage 1/2", "cpu", _end), threading.Event()
    threads = [
        threading.Thread(target=over.wait, name=ABANDONED, daemon=True)
        for _ in range(MAX_ABANDONED)
    ]
    try:
        for thread in threads:
            with pytest.raises(LinkError), failures.guard_connect():
                raise LinkError("could not be linked")
            thread.start()
        with failures.guard_connect():
            pass
        with pytest.raises(Ended), failures.guard_connect():
            raise LinkError("could not be linked")
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert (
        "3 threads were left in the first operation of a channel: could not be linked"
        in caplog.text
    )


def test_a_stage_is_guarded_while_it_is_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_inlet: object) -> None:
        raise LinkError("could not be linked")

    monkeypatch.setattr(
        "tramontane.workers.links.gpu_channel.num_abandoned_operations", lambda: MAX_ABANDONED
    )
    stage = object.__new__(StageActor)
    monkeypatch.setattr(stage, "_fenced_worker", lambda _epoch: None, raising=False)
    monkeypatch.setattr(stage, "_link", SimpleNamespace(connect=refuse), raising=False)
    monkeypatch.setattr(
        stage, "_failure_guard", FailureGuard("Stage 1/2", "cpu", _end), raising=False
    )
    with pytest.raises(Ended):
        stage.connect(0, None)
