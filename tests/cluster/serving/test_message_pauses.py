"""The pause between two messages of a router to an ingress, in which tokens gather."""

import asyncio

import pytest
from event_loops import in_event_loop
from fixed_load import FixedLoad
from running_router import new_scheduler
from scripted_chain import Gate, ScriptedChain
from virtual_time import in_virtual_time

from tramontane.cluster.serving.token_stream import (
    DONE,
    KEEPALIVE,
    TokenStream,
    TokenStreams,
    _RequestSink,
    model_key,
)
from tramontane.proto import wire
from tramontane.proto.errors import PipelineError, TramontaneError
from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.proto.request import (
    FinishReason,
    Request,
    RequestOutput,
    RequestTimings,
    SamplingParams,
    TokenEvent,
    fingerprint_output,
)
from tramontane.proto.step import MicroBatch
from tramontane.router.engine.router import Router

STEP_S = 0.03


async def _at_once(_batch: MicroBatch) -> None:
    pass


def _router(step: Gate = _at_once) -> Router:
    cache = CachePlan(16, (WindowClass(64, 5, 40),))
    return Router(new_scheduler(cache, in_flight=1), ScriptedChain(step))


@pytest.mark.parametrize(
    ("write_interval_s", "num_requests", "num_ended", "pause_s"),
    [
        (0.0025, 1, 0, 0.001),
        (0.16, 16, 0, 0.064),
        (0.16, 16, 15, 0.004),
        (5.0, 8, 0, 0.5),
        (5.0, 8, 7, 0.25),
        (0.0, 64, 0, 0.064),
        (0.0, 64, 61, 0.003),
        (0.0, 500, 0, 0.1),
        (0.0, 500, 500, 0.0),
    ],
)
def test_a_pause_is_a_part_of_the_time_between_two_writes_of_a_stream(
    write_interval_s: float, num_requests: int, num_ended: int, pause_s: float
) -> None:
    """And at least 1 ms per request, up to 0.1 s: answers that are not streamed are not written."""
    stream = TokenStream()
    for _ in range(num_requests):
        stream.accept(write_interval_s)
    for _ in range(num_ended):
        stream.release()
    assert stream.pause_s == pytest.approx(pause_s)


@pytest.mark.parametrize(
    ("level", "sent_at"),
    [
        (0.0, [0.03, 0.06, 0.09, 0.12]),
        (0.1, [0.03, 0.08, 0.13, 0.13]),
        (1.0, [0.03, 0.53, 0.53, 0.53]),
    ],
)
@in_virtual_time
async def test_a_pause_is_shorter_while_there_is_time(level: float, sent_at: list[float]) -> None:
    """Where there is time for anything, the tokens of each step travel at once."""
    stream, now, received = (
        TokenStream(FixedLoad(level)),
        asyncio.get_running_loop().time,
        list[float](),
    )
    for _ in range(8):
        stream.accept(5.0)

    async def read() -> None:
        async for message in stream.messages():
            received.extend(
                round(now(), 3)
                for _ in (wire.decode_outputs(message) if message != KEEPALIVE else ())
            )

    reading = asyncio.create_task(read())
    for _ in range(4):
        await asyncio.sleep(STEP_S)
        stream.put(0, _token(1))
    await asyncio.sleep(1.0)
    reading.cancel()
    assert received == pytest.approx(sent_at)


@in_event_loop
async def test_a_router_measures_its_load_while_it_has_requests() -> None:
    load = FixedLoad()
    streams = TokenStreams("replica", load=load)

    async def read() -> None:
        async for _ in streams.subscribe("ingress", "replica"):
            pass

    reading, router = asyncio.create_task(read()), _router()
    driving = asyncio.create_task(router.run())
    await asyncio.sleep(0)
    spec = wire.encode_request(Request.of((1, 2, 3), SamplingParams(max_tokens=4)))
    assert load.counts == []
    assert await streams.generate(router, "ingress", 0, spec, model_key(""), True, 1.0) == DONE
    assert load.counts == [1, 0]
    for task in (reading, driving):
        task.cancel()


@pytest.mark.parametrize("urgent", [None, 0.07, 0.21])
@in_virtual_time
async def test_tokens_of_many_steps_travel_in_one_message_unless_one_is_urgent(
    urgent: float | None,
) -> None:
    """What is urgent waits at most for the shorter pause; the first token waits for none."""
    stream, now, received = (
        TokenStream(),
        asyncio.get_running_loop().time,
        list[tuple[float, int]](),
    )
    stream.accept(1.0)
    assert stream.pause_s == 0.4

    async def read() -> None:
        async for message in stream.messages():
            received.append(
                (round(now(), 2), len(wire.decode_outputs(message)) if message != KEEPALIVE else 0)
            )

    reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    for number in range(8):
        stream.put(0, _token(number))
        await asyncio.sleep(0.07)
        if urgent is not None and round(now(), 2) == urgent:
            stream.put(0, PipelineError("a failure"), is_urgent=True)
    await asyncio.sleep(0.2)
    reading.cancel()
    second = {None: (0.4, 5), 0.07: (0.1, 2), 0.21: (0.21, 4)}[urgent]
    assert received[:2] == [(0.0, 0), (0.0, 1)]
    assert received[2] == second


@in_virtual_time
async def test_the_first_token_and_the_last_wait_less_than_those_between() -> None:
    """Of 40 tokens, one each 30 ms, where pauses are 0.4 s."""

    async def step(_batch: MicroBatch) -> None:
        await asyncio.sleep(STEP_S)

    router = _router(step)
    driving, streams = asyncio.create_task(router.run()), TokenStreams("replica")
    now, received, began = asyncio.get_running_loop().time, list[tuple[float, int]](), 1.0

    async def read() -> None:
        async for message in streams.subscribe("ingress", "replica"):
            outputs = (
                [output for _, output in wire.decode_outputs(message)]
                if message != KEEPALIVE
                else []
            )
            received.append((round(now() - began, 3), sum(map(_num_tokens, outputs))))

    reading = asyncio.create_task(read())
    await asyncio.sleep(began)
    spec = wire.encode_request(Request.of((1, 2, 3), SamplingParams(max_tokens=40)))
    assert await streams.generate(router, "ingress", 0, spec, model_key(""), True, 1.0) == DONE
    await asyncio.sleep(0.2)
    for task in (reading, driving):
        task.cancel()
    await asyncio.gather(reading, driving, return_exceptions=True)
    assert streams.num_open == 0, "it was cancelled in a pause"
    assert [each for each in received if each[1]] == [(0.1, 3), (0.5, 13), (0.9, 13), (1.2, 11)]


def _read_sink(num_sequences: int) -> tuple[_RequestSink, list[float], "asyncio.Task[None]"]:
    """Return where a request's outputs go, the times at which each of them arrives, and who reads
    them.
    """
    stream, now, received = TokenStream(), asyncio.get_running_loop().time, list[float]()
    stream.accept(1.0)

    async def read() -> None:
        async for message in stream.messages():
            received.extend(
                round(now(), 2)
                for _ in (wire.decode_outputs(message) if message != KEEPALIVE else ())
            )

    return _RequestSink(stream, 0, num_sequences), received, asyncio.create_task(read())


@pytest.mark.parametrize(
    ("second", "arrives"),
    [
        (TokenEvent(0, 7), 0.4),
        (TokenEvent(0, 7, FinishReason.STOP), 0.2),
        (PipelineError("a failure"), 0.2),
    ],
)
@in_virtual_time
async def test_the_end_of_one_of_several_sequences_and_a_failure_are_urgent(
    second: TokenEvent | TramontaneError, arrives: float
) -> None:
    delivery, received, reading = _read_sink(2)
    delivery.put(_token(1))
    await asyncio.sleep(0.2)
    delivery.put(
        second if isinstance(second, TramontaneError) else RequestOutput((second,), _token(1).times)
    )
    await asyncio.sleep(0.3)
    reading.cancel()
    assert received == [0.0, arrives]


@in_virtual_time
async def test_the_first_tokens_are_urgent_whatever_was_announced_before_them() -> None:
    delivery, received, reading = _read_sink(1)
    for output in (fingerprint_output("a"), fingerprint_output("b"), _token(1), _token(2)):
        delivery.put(output)
        await asyncio.sleep(0.12)
    await asyncio.sleep(0.5)
    reading.cancel()
    assert received == [0.0, 0.12, 0.24, 0.64]


@in_virtual_time
async def test_what_is_urgent_while_a_message_is_being_sent_waits_for_the_shorter_pause() -> None:
    stream, now = TokenStream(), asyncio.get_running_loop().time
    stream.accept(1.0)
    messages = stream.messages()
    assert await anext(messages) == KEEPALIVE
    stream.put(0, _token(1))
    await anext(messages)
    stream.put(0, _token(2), is_urgent=True)
    await anext(messages)
    assert now() == pytest.approx(0.1)


def _token(token_id: int) -> RequestOutput:
    return RequestOutput((TokenEvent(0, token_id),), RequestTimings(0.0, 0.0, 0.0))


def _num_tokens(output: RequestOutput | TramontaneError) -> int:
    assert isinstance(output, RequestOutput)
    return len(output.events)
