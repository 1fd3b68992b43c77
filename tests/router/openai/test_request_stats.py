"""What routers and ingresses count for metrics."""

import asyncio
from contextlib import aclosing, suppress
from dataclasses import dataclass

import pytest
from scripted_token_source import ScriptedSource

from tramontane.proto.errors import (
    DeadlineExceededError,
    DrainingError,
    OverloadedError,
    PipelineError,
    QueueFullError,
)
from tramontane.proto.request import (
    FinishReason,
    Identity,
    Request,
    RequestOutput,
    RequestTimings,
    SamplingParams,
    TokenEvent,
)
from tramontane.proto.step import Chunk, DecodeColumns, MicroBatch, StageTiming, StepResult
from tramontane.router.engine.stats import PipelineStats, SampleBuffer
from tramontane.router.openai.completion import prepare_completion
from tramontane.router.openai.completion_request import parse_completion
from tramontane.router.openai.request_context import RequestStats, RequestTokenSource
from tramontane.router.openai.served_model import ServedModel

TIMES = RequestTimings(queue_s=0.25, prefill_s=0.0, decode_s=0.0)


def _batch(tokens: int = 0, decodes: int = 0) -> MicroBatch:
    chunks = (Chunk(0, 0, tuple(range(tokens)), (), None, False),) if tokens else ()
    ids = tuple(range(1, decodes + 1))
    return MicroBatch(0, 0, chunks, decodes=DecodeColumns(ids, ids, ids))


def _result(*spans: tuple[float, float], tokens: int = 0) -> StepResult:
    timings = [
        StageTiming(stage, start, end - start, tokens, end - start)
        for stage, (start, end) in enumerate(spans)
    ]
    return StepResult(0, 0, (), tuple(timings))


def test_recent_values_are_taken_once_and_bounded() -> None:
    recent = SampleBuffer(max_samples=3)
    for value in (1.0, 2.0, 3.0, 4.0):
        recent.add(value)
    assert recent.take() == [2.0, 3.0, 4.0]
    assert recent.take() == []


def test_a_pipelines_time_is_work_waiting_or_idleness() -> None:
    """Two micro-batches, one behind the other; then nothing for 90 s, which counts for no stage;
    then a third.
    """
    counts = PipelineStats(2)
    counts.on_submit(10.0)
    counts.on_submit(10.5)
    counts.on_complete(_batch(tokens=5), _result((0.0, 2.0), (2.5, 3.5), tokens=5), 14.0, 1)
    counts.on_complete(
        _batch(tokens=2, decodes=3), _result((2.0, 3.0), (3.6, 4.0), tokens=5), 15.0, 0
    )
    assert (counts.active_s, counts.busy_s, counts.stage_tokens) == (
        5.0,
        [3.0, pytest.approx(1.4)],
        [10, 10],
    )
    assert [counts.waiting_s(0), counts.waiting_s(1)] == [2.0, pytest.approx(3.6)]
    assert (counts.num_micro_batches, counts.prefill_tokens, counts.decode_tokens) == (2, 7, 3)
    assert counts.micro_batch_tokens.take() == [5, 5]
    assert counts.hops_s[0].take() == []
    assert counts.hops_s[1].take() == [0.5, pytest.approx(0.1)], (
        "the second one found the stage busy until 3.5"
    )
    counts.on_submit(105.0)
    counts.on_complete(
        _batch(decodes=1), _result((100.0, 100.5), (100.4, 101.0), tokens=1), 106.0, 0
    )
    assert counts.active_s == 6.0
    assert counts.hops_s[1].take() == [0.0], "clocks that disagree do not make time go back"


def test_what_a_failure_took_is_not_work() -> None:
    counts = PipelineStats(1)
    counts.on_submit(1.0)
    counts.reset()
    counts.on_submit(50.0)
    counts.on_complete(_batch(decodes=1), _result((0.0, 1.0)), 51.0, 0)
    assert counts.active_s == 1.0


@dataclass
class Choice:
    finish: FinishReason | None = None
    num_tokens: int = 0


class Clock:
    def __init__(self, *times: float) -> None:
        self._times = list(times)

    def __call__(self) -> float:
        return self._times.pop(0)


def _tokens(*choices: int) -> RequestOutput:
    return RequestOutput(tuple(TokenEvent(choice, 7) for choice in choices), TIMES)


def test_a_request_that_ends_well() -> None:
    counts = RequestStats(Clock(11.0, 11.5, 12.5))
    choices = [Choice(), Choice()]
    with counts.track(10.0, 40, choices, has_begun=False) as counted:
        counted.observe(_tokens(0, 1))
        counted.observe(_tokens(0))
        choices[0].finish, choices[1].finish = FinishReason.STOP, FinishReason.LENGTH
    assert (counts.prompt_tokens, counts.generation_tokens) == (40, 3)
    assert {reason.value: n for reason, n in counts.finished.items()} == {
        "stop": 1,
        "length": 1,
        "abort": 0,
        "error": 0,
    }
    seen = (
        counts.first_token_s.take(),
        counts.inter_token_s.take(),
        counts.whole_s.take(),
        counts.queue_s.take(),
    )
    assert seen == ([1.0], [0.5], [2.5], [0.25])


def test_a_request_that_another_ingress_began_has_no_first_token_here() -> None:
    counts = RequestStats(Clock(11.0, 12.0))
    with counts.track(10.0, 40, [Choice(FinishReason.STOP)], has_begun=True) as counted:
        counted.observe(_tokens(0))
    assert (counts.prompt_tokens, counts.first_token_s.take(), counts.queue_s.take()) == (0, [], [])
    assert counts.generation_tokens == counts.finished[FinishReason.STOP] == 1


@pytest.mark.parametrize(
    ("error", "has_begun", "refused", "reason"),
    [
        (QueueFullError("full", 1), False, {"full": 1}, None),
        (OverloadedError("too much", 1), False, {"overloaded": 1}, None),
        (DrainingError("draining"), False, {"draining": 1}, None),
        (DrainingError("ended"), True, {}, FinishReason.ERROR),
        (PipelineError("lost"), False, {}, FinishReason.ERROR),
        (asyncio.CancelledError(), False, {}, FinishReason.ABORT),
        (GeneratorExit(), False, {}, FinishReason.ABORT),
        (DeadlineExceededError("too late"), False, {}, FinishReason.ABORT),
    ],
)
def test_a_request_that_does_not(
    error: BaseException, has_begun: bool, refused: dict[str, int], reason: FinishReason | None
) -> None:
    counts = RequestStats(lambda: 0.0)
    with (
        suppress(type(error)),
        counts.track(0.0, 1, [Choice(), Choice(FinishReason.STOP)], has_begun=has_begun),
    ):
        raise error
    assert {name: number for name, number in counts.refused.items() if number} == refused
    assert counts.finished[FinishReason.STOP] == 1, "what had finished has"
    assert {
        kind: n for kind, n in counts.finished.items() if n and kind is not FinishReason.STOP
    } == ({reason: 1} if reason else {})
    assert counts.whole_s.take() == []


def test_every_completion_is_counted_by_its_model() -> None:
    model = ServedModel("m", None, max_model_len=64, max_sequences=8, vocab_size=100)

    async def complete() -> None:
        request = parse_completion(b'{"prompt": [1, 2, 3], "max_tokens": 2}')
        await (await prepare_completion(model, request, arrived_at=0.0)).run(ScriptedSource((7, 7)))

    asyncio.run(complete())
    counts = model.counts
    assert (
        counts.prompt_tokens,
        counts.generation_tokens,
        counts.finished[FinishReason.LENGTH],
    ) == (3, 2, 1)
    assert [
        len(each.take()) for each in (counts.first_token_s, counts.inter_token_s, counts.whole_s)
    ] == [1, 1, 1]


def test_what_an_ingress_refuses_before_it_parses_is_counted_too() -> None:
    counts, full = RequestStats(), ScriptedSource((7, 7), refusal=QueueFullError("full", 1))
    source = RequestTokenSource(full, Identity(), counts=counts)

    async def tokens() -> list[RequestOutput]:
        async with aclosing(source.generate(Request.of((1,), SamplingParams()))) as batches:
            return [batch async for batch in batches]

    events = [event for output in asyncio.run(tokens()) for event in output.events]
    assert events == [TokenEvent(0, 7), TokenEvent(0, 7, FinishReason.STOP)]
    with pytest.raises(QueueFullError):
        source.check_capacity(1)
    assert counts.refused["full"] == 1
