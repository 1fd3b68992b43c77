"""Ingress replicas that die, as Ray Serve's proxy sees it: a response that never ends or never
begins. Without Ray.
"""

import asyncio
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from scripted_token_source import ScriptedSource, scores_by_position
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tramontane.cluster.common.node_watch import DeadNodeWatcher
from tramontane.cluster.http.failover import MESSAGE_NODE, SCOPE_RESUME, FailoverMiddleware


class FailingIngresses:
    """Ingress replicas of which the n-th sends ``lives[n]`` messages of its answer and dies at the
    next one.

    Replicas after the last of ``lives`` do not die. Messages between proxy and ingress are pickled,
    as with Ray.
    """

    def __init__(self, ingress: ASGIApp, lives: Sequence[int] = ()) -> None:
        self._ingress, self._lives = ingress, lives
        self.num_calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        life = self._lives[self.num_calls] if self.num_calls < len(self._lives) else None
        self.num_calls += 1
        dead, num_sent = asyncio.Event(), 0

        async def send_alive(message: Message) -> None:
            nonlocal num_sent
            if num_sent == life and message["type"] != MESSAGE_NODE:
                dead.set()
                await asyncio.Event().wait()
            num_sent += message["type"] != MESSAGE_NODE
            await send(pickle.loads(pickle.dumps(message)))

        scope = (
            {**scope, SCOPE_RESUME: pickle.loads(pickle.dumps(scope[SCOPE_RESUME]))}
            if SCOPE_RESUME in scope
            else scope
        )
        tasks = [
            asyncio.ensure_future(self._ingress(scope, receive, send_alive)),
            asyncio.ensure_future(dead.wait()),
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def relay_to(ingress: ASGIApp, dead: Callable[[], set[str]] = set) -> FailoverMiddleware:
    """Return the proxy's middleware before an ingress; ``dead`` returns nodes that have died."""
    return FailoverMiddleware(ingress, DeadNodeWatcher(dead))


@dataclass
class Client:
    """The client of one request as an ASGI server presents it. It stays connected until
    ``disconnects`` is set.
    """

    body: bytes
    messages: list[Message] = field(default_factory=list)
    disconnects: asyncio.Event = field(default_factory=asyncio.Event)
    _num_sent: int = 0

    async def receive(self) -> Message:
        """Return the next message; the body comes in two parts."""
        self._num_sent += 1
        half = len(self.body) // 2
        match self._num_sent:
            case 1:
                return {"type": "http.request", "body": self.body[:half], "more_body": True}
            case 2:
                return {"type": "http.request", "body": self.body[half:], "more_body": False}
        await self.disconnects.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    async def send_to(self, app: ASGIApp, path: str, **headers: str) -> None:
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": encoded,
            "query_string": b"",
            "root_path": "",
        }
        await app(scope, self.receive, self.send)

    @property
    def is_answered(self) -> bool:
        """Whether the answer began once and ended once, with nothing in between that a server would
        not understand.
        """
        is_last = [not message.get("more_body", False) for message in self.messages[1:]]
        return self.is_answered_so_far and is_last.index(True) == len(is_last) - 1

    @property
    def is_answered_so_far(self) -> bool:
        first, *rest = (message["type"] for message in self.messages)
        keys = {key for message in self.messages for key in message}
        assert keys <= {"type", "status", "headers", "trailers", "body", "more_body"}
        return first == "http.response.start" and set(rest) == {"http.response.body"}

    @property
    def status(self) -> int:
        status: int = self.messages[0]["status"]
        return status

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.messages).decode()


async def post_json(
    app: ASGIApp, path: str, body: dict[str, Any], headers: Mapping[str, str] = MappingProxyType({})
) -> Client:
    client = Client(json.dumps(body).encode())
    await client.send_to(app, path, **headers)
    return client


def resumable_source(token_ids: Sequence[int], **options: Any) -> ScriptedSource:
    """Return a source whose answers show where they are continued: every choice and every position
    has values of its own. ``options`` are those of ``ScriptedSource``.
    """
    return ScriptedSource(token_ids, by_choice=True, scores=scores_by_position, **options)


def seeds_of(source: ScriptedSource) -> set[int]:
    return {spec.sampling.seed for specs in source.requested for spec in specs}
