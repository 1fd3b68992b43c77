"""The pause between two messages of a router to an ingress, in which tokens gather."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from tramontane.cluster.serving import router_replica
from tramontane.cluster.serving.router_replica import MAX_MESSAGE_PAUSE_S, message_pause_s, with_pauses
from tramontane.cluster.serving.token_channel import IngressStream
from tramontane.proto import wire
from tramontane.proto.request import RequestOutput, RequestTimings, TokenEvent


@pytest.mark.parametrize(
    ("num_sequences", "num_ingresses", "pause_s"), [(0, 0, 0.0), (1, 1, 0.001), (64, 1, 0.064), (64, 2, 0.032), (2000, 4, 0.1)]
)
def test_a_pause_is_a_small_part_of_the_time_between_two_writes_of_a_stream(
    num_sequences: int, num_ingresses: int, pause_s: float
) -> None:
    assert message_pause_s(num_sequences, num_ingresses) == pause_s
    if num_ingresses:
        most_often = router_replica_writes(num_sequences, num_ingresses)
        assert pause_s <= min(most_often / 2, MAX_MESSAGE_PAUSE_S)


def router_replica_writes(num_sequences: int, num_ingresses: int) -> float:
    """Return the seconds between two writes of one stream, where an ingress may write most often."""
    from tramontane.cluster.serving.ingress import MAX_WRITES

    return num_sequences / num_ingresses / MAX_WRITES


def test_tokens_of_many_steps_travel_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine steps in one pause are one message; the first token waits for none."""
    monkeypatch.setattr(router_replica.asyncio, "sleep", _Sleep())

    async def scenario() -> None:
        stream = IngressStream()
        stream.num_requests = 1
        async with aclosing(with_pauses(stream.messages(), lambda: 1.0)) as messages:
            assert await anext(messages) == b"", "opened"
            stream.put(0, _token(1))
            assert wire.decode_outputs(await anext(messages)) == [(0, _token(1))]
            _Sleep.during = lambda: [stream.put(0, _token(token)) for token in range(2, 11)]
            assert wire.decode_outputs(await anext(messages)) == [(0, _token(token)) for token in range(2, 11)]

    asyncio.run(scenario())


class _Sleep:
    """In place of ``asyncio.sleep``: something happens in this time, which does not pass."""

    during = staticmethod(lambda: None)

    async def __call__(self, _seconds: float) -> None:
        type(self).during()


def _token(token_id: int) -> RequestOutput:
    return RequestOutput((TokenEvent(0, token_id),), RequestTimings(0.0, 0.0, 0.0))


def test_a_stream_that_is_cancelled_in_a_pause_is_closed() -> None:
    is_closed = []

    async def messages() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"message"
        finally:
            is_closed.append(True)

    async def read() -> None:
        async for _ in with_pauses(messages(), lambda: 3600.0):
            pass

    async def scenario() -> None:
        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert is_closed

    asyncio.run(scenario())
