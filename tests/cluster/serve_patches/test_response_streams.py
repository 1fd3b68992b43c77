"""How messages of responses get through Ray Serve: as with its own classes, which are the
reference, and with less work.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.exceptions import RequestCancelledError
from ray.serve.handle import DeploymentResponseGenerator

from tramontane.cluster.ray_internals.accessors import (
    replace_response_generators,
    replace_response_queues,
)
from tramontane.cluster.ray_internals.table import MESSAGE_QUEUE, RESPONSE_GENERATOR

Outcome = tuple[list[Any], str]


def _of_ray(replaced: type) -> type:
    """Ray's class, also where an earlier test of this process has replaced it."""
    return next(each for each in replaced.__mro__ if each.__module__.startswith("ray."))


@pytest.fixture(params=["Ray Serve's", "ours"])
def is_ours(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Ray Serve's own classes, and then those that replace them."""
    with (
        MESSAGE_QUEUE.replaced(_of_ray(MESSAGE_QUEUE.value)),
        RESPONSE_GENERATOR.replaced(_of_ray(RESPONSE_GENERATOR.value)),
    ):
        if request.param == "ours":
            replace_response_queues(lambda _: None)
            replace_response_generators()
        yield request.param == "ours"


async def _outcome(messages: AsyncGenerator[Any, None]) -> Outcome:
    """Return what came, and how it ended."""
    got: list[Any] = []
    try:
        async for each in messages:
            got.append(each)
    except BaseException as error:
        return got, type(error).__name__
    return got, "end"


async def _turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


Put = Callable[[str], None]


async def _answer(put: Put) -> None:
    put("a")
    await _turns()
    put("b")
    put("c")
    await _turns()
    put("d")  # and it ends in the same turn


async def _answer_of_nothing(_put: Put) -> None:
    await _turns()


async def _failure_after_messages(put: Put) -> None:
    put("a")
    await _turns()
    put("b")
    raise KeyError("a failure")


async def _cancelled(put: Put) -> None:
    put("a")
    await _turns()
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (_answer, ([["a"], ["b", "c"], ["d"]], "end")),
        (_answer_of_nothing, ([], "end")),
        (_failure_after_messages, ([["a"], ["b"]], "KeyError")),
        (_cancelled, ([["a"]], "CancelledError")),
    ],
)
def test_a_queue_passes_on_what_a_call_sends_and_how_it_ends(
    is_ours: bool, call: Callable[[Put], Awaitable[None]], expected: Outcome
) -> None:
    async def scenario() -> Outcome:
        queue: Any = MESSAGE_QUEUE.value()
        return await _outcome(
            queue.fetch_messages_from_queue(asyncio.ensure_future(call(queue.put_nowait)))
        )

    assert asyncio.run(scenario()) == expected


def test_what_a_call_sends_at_its_end_while_its_reader_is_busy_is_read(is_ours: bool) -> None:
    async def scenario() -> list[Any]:
        queue: Any = MESSAGE_QUEUE.value()
        got = []
        async for messages in queue.fetch_messages_from_queue(
            asyncio.ensure_future(_answer(queue.put_nowait))
        ):
            got += messages
            await _turns(20)  # the call continues, and ends
        return got

    assert asyncio.run(scenario()) == ["a", "b", "c", "d"]


def test_a_queue_that_is_not_read_any_more_cancels_its_call(is_ours: bool) -> None:
    async def scenario() -> bool:
        queue: Any = MESSAGE_QUEUE.value()
        call = asyncio.ensure_future(asyncio.Event().wait())
        queue.put_nowait("a")
        messages = queue.fetch_messages_from_queue(call)
        await anext(messages)
        await messages.aclose()
        await _turns()
        return call.cancelled()

    assert asyncio.run(scenario())


class _Result:
    """A replica's result: messages with pauses, and what ``cancel`` does to one that is waited for,
    as with gRPC.
    """

    def __init__(self, messages: list[Any]) -> None:
        self._messages, self._waiting = messages, asyncio.get_running_loop().create_future()
        self.num_cancelled = 0

    async def __anext__(self) -> Any:
        await asyncio.sleep(0)
        if not self._messages:
            raise StopAsyncIteration
        message = self._messages.pop(0)
        if message == "forever":
            await self._waiting
        if isinstance(message, Exception):
            raise message
        return message

    def cancel(self) -> None:
        self.num_cancelled += 1
        self._waiting.cancel()


class _Proxy:
    """What a proxy has of one request: its result, the task that ends when the client leaves, and
    the generator between.
    """

    def __init__(
        self, messages: list[Any], timeout_s: float | None = None, is_assigned: bool = True
    ) -> None:
        self.result, self._left = _Result(messages), asyncio.Event()
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if is_assigned:
            self.future.set_result(self.result)
        metadata: Any = SimpleNamespace(request_id="an id")
        response: Any = DeploymentResponseGenerator(
            self.future, metadata, _is_router_running_in_separate_loop=False
        )
        self._leaving = asyncio.ensure_future(self._left.wait())
        arguments = {
            "timeout_s": timeout_s,
            "disconnected_task": self._leaving,
            "result_callback": str.upper,
        }
        self.messages: Any = RESPONSE_GENERATOR.value(response, **arguments)

    def leave_soon(self) -> None:
        self._left.set()

    async def leave(self) -> None:
        self.leave_soon()
        await _turns()


def test_a_proxy_reads_messages_until_their_end(is_ours: bool) -> None:
    async def scenario() -> list[Outcome]:
        ends = [[], [KeyError("a failure")]]
        return [await _outcome(_Proxy(["a", "b", *end]).messages) for end in ends]

    assert asyncio.run(scenario()) == [(["A", "B"], "end"), (["A", "B"], "KeyError")]


@pytest.mark.parametrize("is_assigned", [True, False])
def test_a_client_that_leaves_while_its_response_is_waited_for_ends_the_call(
    is_ours: bool, is_assigned: bool
) -> None:
    async def scenario() -> tuple[Outcome, int]:
        proxy = _Proxy(["a", "forever"], is_assigned=is_assigned)
        reading = asyncio.ensure_future(_outcome(proxy.messages))
        await _turns(20)
        await proxy.leave()
        return await reading, proxy.result.num_cancelled

    assert asyncio.run(scenario()) == ((["A"] * is_assigned, "CancelledError"), int(is_assigned))


def test_a_client_that_leaves_as_its_call_is_assigned_gets_no_message(is_ours: bool) -> None:
    """Ray Serve cannot cancel the call in this turn; what reads it ends all the same."""

    async def scenario() -> Outcome:
        proxy = _Proxy(["a", "forever", "b"], is_assigned=False)
        reading = asyncio.ensure_future(_outcome(proxy.messages))
        await _turns(10)
        proxy.leave_soon()
        await asyncio.sleep(0)
        proxy.future.set_result(proxy.result)
        return await asyncio.wait_for(reading, 10)

    assert asyncio.run(scenario()) == ([], "CancelledError")


def test_a_replica_that_was_cancelled_itself_is_a_failure(is_ours: bool) -> None:
    """The client is there: it is to be answered."""

    async def scenario() -> list[Outcome]:
        error = RequestCancelledError("an id")
        return [await _outcome(_Proxy([*before, error]).messages) for before in ([], ["a"])]

    name = "RequestCancelledError"
    assert asyncio.run(scenario()) == [([], name), (["A"], name)]


def test_a_client_that_leaves_while_it_is_written_to_ends_the_call(is_ours: bool) -> None:
    async def scenario() -> tuple[Outcome, int]:
        proxy = _Proxy(["a", "forever"])
        assert await anext(proxy.messages) == "A"
        await proxy.leave()
        return await _outcome(proxy.messages), proxy.result.num_cancelled

    assert asyncio.run(scenario()) == (([], "CancelledError"), 1)


def test_after_the_last_message_a_client_may_leave(is_ours: bool) -> None:
    """Ray Serve then stops watching for it: the call ends by itself."""

    async def scenario() -> tuple[Outcome, int]:
        proxy = _Proxy(["a"])
        assert await anext(proxy.messages) == "A"
        proxy.messages.stop_checking_for_disconnect()
        await proxy.leave()
        return await _outcome(proxy.messages), proxy.result.num_cancelled

    assert asyncio.run(scenario()) == (([], "end"), 0)


def test_a_proxy_with_a_time_limit_keeps_it(is_ours: bool) -> None:
    async def scenario() -> Outcome:
        proxy = _Proxy(["forever"], timeout_s=0.01)
        return await asyncio.wait_for(_outcome(proxy.messages), 10)

    assert asyncio.run(scenario()) == ([], "TimeoutError")


def test_no_task_is_made_for_a_message(is_ours: bool) -> None:
    """Ray Serve makes one for each on both sides, which is most of what they do in Python. Ours
    makes one in a proxy for the first message.
    """

    async def scenario() -> int:
        queue: Any = MESSAGE_QUEUE.value()
        proxy = _Proxy(["a"] * 10)
        call = asyncio.ensure_future(_answer(queue.put_nowait))
        num_tasks = 0

        def count(
            loop: asyncio.AbstractEventLoop, work: Any, **options: Any
        ) -> "asyncio.Task[Any]":
            nonlocal num_tasks
            num_tasks += 1
            return asyncio.Task(work, loop=loop, **options)

        asyncio.get_running_loop().set_task_factory(count)
        await _outcome(queue.fetch_messages_from_queue(call))
        await _outcome(proxy.messages)
        return num_tasks

    assert asyncio.run(scenario()) == (1 if is_ours else 11 + 3)
