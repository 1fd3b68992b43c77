"""The activity log that the router fills, and the data that it returns."""

from types import SimpleNamespace
from typing import Any

import pytest
from event_loops import in_event_loop
from running_router import new_scheduler, running
from scripted_chain import ScriptedChain

from tramontane.proto.request import Request, SamplingParams
from tramontane.proto.step import Chunk, DecodeColumns, MicroBatch, StageTiming, StepResult
from tramontane.router.engine import activity_log as activity_module
from tramontane.router.engine.active_request import ActiveRequest
from tramontane.router.engine.activity_log import ActivityLog, Percentiles
from tramontane.router.engine.router import Router
from tramontane.router.scheduling.sequence import Sequence


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def _batch(
    step: int = 0, num_stages: int = 2, prefill: int = 3, decodes: int = 2, busy_s: float = 0.5
) -> tuple[Any, Any]:
    chunk = Chunk(9, 0, (1,) * prefill, ((),), None, needs_sample=True)
    seq_ids = tuple(range(decodes))
    batch = MicroBatch(
        1, step, (chunk,) if prefill else (), (), DecodeColumns(seq_ids, seq_ids, seq_ids)
    )
    timings = tuple(
        StageTiming(stage, 990.0 + stage, busy_s, 7, elapsed_s=2 * busy_s)
        for stage in range(num_stages)
    )
    return batch, StepResult(1, step, (5,) * (decodes + bool(prefill)), timings)


def _numbers(data: dict[str, Any]) -> list[int]:
    return [batch.number for batch in data["micro_batches"]]


def test_a_micro_batch_is_logged_as_it_was() -> None:
    clock = Clock()
    log = ActivityLog(clock)
    log.record(*_batch(step=4))
    data = log.as_data(2)
    stages = [(0, 990.0, 0.5, 1.0), (1, 991.0, 0.5, 1.0)]
    expected = {
        "number": 1,
        "step": 4,
        "epoch": 1,
        "prefill_tokens": 3,
        "decodes": 2,
        "stages": stages,
    }
    assert [batch.model_dump() for batch in data["micro_batches"]] == [expected]
    assert data["last"] == 1
    assert data["first_token_s"] is data["inter_token_s"] is None


def test_repeated_queries_return_every_new_micro_batch_once() -> None:
    clock = Clock()
    log = ActivityLog(clock)
    for step in range(3):
        log.record(*_batch(step))
    assert _numbers(log.as_data(2, after=1)) == [2, 3]
    nothing = log.as_data(2, after=3)
    assert (nothing["micro_batches"], nothing["last"]) == ([], 3)
    assert _numbers(log.as_data(2, after=77)) == [1, 2, 3], "the log has been begun anew since"
    clock.now += 6
    assert _numbers(log.as_data(2)) == [], "of the last seconds"
    assert _numbers(log.as_data(2, after=0)) == [1, 2, 3]


def test_a_response_is_bounded_and_the_next_continues_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activity_module, "MAX_RETURNED", 4)
    log = ActivityLog(Clock())
    for step in range(10):
        log.record(*_batch(step))
    assert _numbers(log.as_data(2)) == [7, 8, 9, 10], "the newest"
    seen, last = [], 0
    while more := _numbers(data := log.as_data(2, after=last)):
        seen += more
        last = data["last"]
    assert seen == list(range(1, 11))


@pytest.mark.parametrize(("num_stages", "num_kept"), [(0, 100), (1, 50), (3, 25)])
def test_what_is_kept_is_bounded_by_stages(
    monkeypatch: pytest.MonkeyPatch, num_stages: int, num_kept: int
) -> None:
    monkeypatch.setattr(activity_module, "MAX_RECORDS", 100)
    log = ActivityLog(Clock())
    for step in range(200):
        log.record(*_batch(step, num_stages))
    assert _numbers(log.as_data(num_stages, after=0)) == list(range(201 - num_kept, 201))
    assert len(log._batches) == num_kept


def test_shares_are_of_the_last_ten_seconds() -> None:
    clock = Clock()
    log = ActivityLog(clock)
    log.record(*_batch(busy_s=3.0))
    clock.now += 8
    log.record(*_batch(num_stages=1, busy_s=1.0, prefill=0))
    young = log.as_data(2)
    assert (young["busy"], young["tokens_per_s"]) == ([4 / 8, 3 / 8], 5 / 8), "it is 8 s old"
    clock.now += 4
    data = log.as_data(2)
    assert (data["busy"], data["tokens_per_s"]) == ([0.1, 0.0], 0.2)
    clock.now += 10
    idle = log.as_data(2)
    assert (idle["busy"], idle["tokens_per_s"]) == ([0.0, 0.0], 0.0)


def test_shares_are_of_what_is_kept_where_that_is_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_module, "MAX_RECORDS", 8)
    clock = Clock()
    log = ActivityLog(clock)
    for step in range(100):
        clock.now += 0.5
        log.record(*_batch(step, num_stages=1, busy_s=0.25))
    assert log.as_data(1)["busy"] == [pytest.approx(4 * 0.25 / 1.5)]


def _request(
    now: float, *, num_choices: int = 1, output_ids: tuple[int, ...] = ()
) -> ActiveRequest:
    sampling = SamplingParams(max_tokens=9)
    sequences = [
        Sequence(i, (1, 2), sampling, 16, output_ids=list(output_ids)) for i in range(num_choices)
    ]
    return ActiveRequest(sequences, lambda _: None, now)


def test_waits_for_tokens() -> None:
    """Pauses of a request with several sequences are not attributed; a resumed request had its
    first token elsewhere.
    """
    clock = Clock()
    log = ActivityLog(clock)
    requests = [_request(0.0), _request(1.0, num_choices=2), _request(2.0, output_ids=(7,))]
    for now in (4.0, 4.5, 6.0):
        log.record_tokens(requests, now)
        for request in requests:
            request.deliver([], now)
    data = log.as_data(0)
    assert data["first_token_s"] == Percentiles(p50=3.0, p95=4.0)
    assert sorted(seconds for _, seconds in log._later_tokens) == [0.5, 0.5, 1.5, 1.5, 2.0]
    clock.now += 61
    assert log.as_data(0)["first_token_s"] is None, "of the last minute"


@pytest.mark.parametrize(
    ("num", "p50", "p95"),
    [(1, 1, 1), (2, 1, 2), (3, 2, 3), (20, 10, 19), (100, 50, 95), (101, 51, 96)],
)
def test_percentiles(num: int, p50: int, p95: int) -> None:
    log = ActivityLog(Clock())
    log.record_tokens(
        [SimpleNamespace(last_token_at=float(num - i), is_single=True) for i in range(num)],
        num + 1.0,
    )  # type: ignore[misc]
    assert log.as_data(0)["inter_token_s"] == Percentiles(p50=p50, p95=p95)


@in_event_loop
async def test_the_router_notes_what_comes_back() -> None:
    log = ActivityLog()
    driven = Router(new_scheduler(budget=4), ScriptedChain(), activity=log)
    async with running(driven) as router:
        async for _ in router.generate(Request.of((1,) * 10, SamplingParams(max_tokens=4))):
            pass
        data = log.as_data(2)
    assert [(b.prefill_tokens, b.decodes) for b in data["micro_batches"]] == [
        (4, 0),
        (4, 0),
        (2, 0),
    ] + [(0, 1)] * 3
    assert len(log._first_tokens) == 1
    assert len(log._later_tokens) == 3
    assert data["tokens_per_s"] > 0
