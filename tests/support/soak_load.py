"""The load of the soak test: clients with random actions, most of them faulty, and the answers that
they may get.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
from chaos_load import Tokens, bodies, note_difference, tokens_of
from faulty_clients import FaultyClient, UnexpectedResponseError
from grpc_fuzz import METHODS, REFUSALS, end_of, hostile_messages

from tramontane.client import AsyncClient
from tramontane.proto.errors import DeadlineExceededError, TramontaneError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_BODY = 2**20  # setting of the server
CONTEXT = 2048
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Romeo", "Juliet"]}, "age": {"type": "integer"}},
    "required": ["name"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
HELLO = b'"messages": [{"role": "user", "content": "O"}]'
CONVERSATION = {
    "messages": [{"role": "user", "content": "What news from Rome?"}],
    "ignore_eos": True,
}
MISTAKES: list[tuple[str, str, bytes, int]] = [
    ("POST", COMPLETIONS, b'{"prompt": "O", ', 400),
    ("POST", COMPLETIONS, b"\xff\xfe\x00", 400),
    ("POST", COMPLETIONS, b'{"prompt": "O", "temperature": -1}', 400),
    ("POST", COMPLETIONS, b'{"prompt": "O", "nothing_like_it": 1}', 400),
    ("POST", COMPLETIONS, b'{"prompt": "O", "model": "another"}', 404),
    ("POST", COMPLETIONS, json.dumps({"prompt": [5] * (CONTEXT + 1)}).encode(), 400),
    ("POST", COMPLETIONS, b" " * (MAX_BODY + 1), 413),
    ("POST", CHAT, b'{"messages": []}', 400),
    (
        "POST",
        CHAT,
        (
            b'{"messages": [{"role": "user", "content": "O"}], "tools": [{"type": "function",'
            b' "function": {"name": "f"}}]}'
        ),
        400,
    ),
    (
        "POST",
        CHAT,
        json.dumps({"messages": [{"role": "user", "content": "O " * 4 * CONTEXT}]}).encode(),
        400,
    ),
    ("GET", "/v1/nothing/of/the/kind", b"", 404),
    ("DELETE", COMPLETIONS, b"", 405),
]
GET_PATHS = ("/", "/health", "/version", "/v1/models", "/experts", "/openapi.json")
ENDED = {"stop", "length"}


def requests(rng: random.Random) -> list[dict[str, Any]]:
    """Return the requests with known tokens: those of ``chaos_load``, prompts of token ids, and
    answers with a schema.
    """
    same = {"ignore_eos": True, "return_token_ids": True, "n": 1, "max_tokens": 80}
    prompts = [rng.choices(range(3, 1000), k=rng.choice((5, 300))) for _ in range(6)]
    ids = [
        {**same, "prompt": prompt, "seed": n, "stream": n % 2 == 0}
        for n, prompt in enumerate(prompts)
    ]
    formed = [
        {
            **same,
            "prompt": "KING:",
            "response_format": FORMAT,
            "seed": n,
            "stream": n % 2 == 0,
            "n": 2,
        }
        for n in range(6)
    ]
    return [*bodies(28, rng), *ids, *({**body, "ignore_eos": False} for body in formed)]


@dataclass
class SoakLoad:
    """Clients that run concurrently. ``outcomes`` counts results by kind of action; unexpected
    results are in the lists.
    """

    port: int
    grpc_port: int
    metrics: str
    requests: list[dict[str, Any]]
    expected: list[Tokens]
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    close_calls: list[str] = field(default_factory=list)  # differences due to rounding
    is_over: bool = False

    async def run(self, rngs: list[random.Random]) -> None:
        """Run one client per random generator, each with one action after the other, until
        ``is_over`` is set.
        """
        url, limits = f"http://127.0.0.1:{self.port}", httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http,
            AsyncClient(f"127.0.0.1:{self.grpc_port}") as client,
            grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel,
        ):
            await asyncio.gather(
                *(self._run_client(_SoakClient(self, http, client, channel, rng)) for rng in rngs)
            )

    async def _run_client(self, client: "_SoakClient") -> None:
        actions = client.actions()
        while not self.is_over:
            kind = client.rng.choices(list(actions), [weight for weight, _ in actions.values()])[0]
            try:
                self.outcomes[kind, await actions[kind][1]()] += 1
            except (
                httpx.HTTPError,
                OSError,
                ValueError,
                KeyError,
                TramontaneError,
                grpc.aio.AioRpcError,
            ) as error:
                self.failed.append(f"{kind}: {error!r:.500}")


Action = Callable[[], Awaitable[str]]


@dataclass
class _SoakClient:
    """One client. Every action returns its outcome, and raises if the outcome is not allowed."""

    load: SoakLoad
    http: httpx.AsyncClient
    client: AsyncClient
    channel: grpc.aio.Channel
    rng: random.Random

    def actions(self) -> dict[str, tuple[float, Action]]:
        """Return all actions by kind, with their weights."""
        faulty = FaultyClient(self.load.port, self.rng)
        return {
            "known request": (30, self.known),
            "stream left": (
                14,
                lambda: faulty.leave(self._body() | {"stream": True, "max_tokens": 400}),
            ),
            "request left": (
                6,
                lambda: faulty.leave(self._body() | {"stream": False, "max_tokens": 400}),
            ),
            "half a request": (6, lambda: faulty.half(self._body())),
            "slow reader": (1, faulty.read_slowly),
            "mistake": (10, self.mistake),
            "deadline": (7, self.deadline),
            "chat": (6, self.chat),
            "several choices": (3, self.several),
            "gRPC": (5, self.grpc_whole),
            "gRPC, left": (6, self.grpc_left),
            "gRPC, deadline": (3, self.grpc_deadline),
            "gRPC, hostile": (3, self.grpc_hostile),
            "GET": (5, self.get),
        }

    def _body(self) -> dict[str, Any]:
        return self.rng.choice(self.load.requests)

    async def known(self) -> str:
        number = self.rng.randrange(len(self.load.requests))
        tokens = await tokens_of(self.http, self.load.requests[number])
        if tokens != self.load.expected[number]:
            return (
                "a close call" if await note_difference(self.load, number, tokens) else "different"
            )
        return "the same tokens"

    async def mistake(self) -> str:
        method, path, body, status = self.rng.choice(MISTAKES)
        answer = await self.http.request(
            method, path, content=body, headers={"content-type": "application/json"}
        )
        return _is(answer, status)

    async def deadline(self) -> str:
        """Send a request with a deadline that is mostly too short."""
        body = self._body() | {"max_tokens": 300}
        seconds = self.rng.choice((0.001, 0.05, 0.3, 1.0))
        answer = await self.http.post(
            COMPLETIONS, json=body, headers={"x-request-timeout": str(seconds)}
        )
        if answer.status_code == httpx.codes.OK:
            return (
                "200, deadline in the stream"
                if '"deadline_exceeded"' in answer.text
                else "200, in time"
            )
        return _is(answer, 504)

    async def chat(self) -> str:
        body = CONVERSATION | {
            "max_tokens": self.rng.randint(1, 120),
            "seed": 1,
            "stream": self.rng.random() < 0.5,
        }
        answer = await self.http.post(
            CHAT, json=body | ({"response_format": FORMAT} if self.rng.random() < 0.3 else {})
        )
        if body["stream"] and not answer.text.endswith("data: [DONE]\n\n"):
            raise UnexpectedResponseError(answer.text[-200:])
        return _is(answer, 200)

    async def several(self) -> str:
        body = {
            "prompt": ["O", "KING:"],
            "n": self.rng.randint(2, 6),
            "max_tokens": self.rng.randint(1, 60),
            "logprobs": 5,
        }
        answer = await self.http.post(COMPLETIONS, json=body)
        status = _is(answer, 200)
        choices = answer.json()["choices"]
        if len(choices) != 2 * body["n"] or {choice["finish_reason"] for choice in choices} - ENDED:
            raise UnexpectedResponseError(answer.text[:200])
        return status

    async def get(self) -> str:
        path = self.rng.choice((*GET_PATHS, "/tokenize", "metrics"))
        if path == "metrics":
            return _is(await self.http.get(self.load.metrics), 200)
        if path == "/tokenize":
            return _is(await self.http.post(path, json={"prompt": "What news?"}), 200)
        return _is(await self.http.get(path), 200)

    async def grpc_whole(self) -> str:
        pieces = [
            piece
            async for piece in self.client.generate(
                "ROMEO:", max_tokens=60, n=2, seed=3, ignore_eos=True
            )
        ]
        if sum(len(piece.token_ids) for piece in pieces) != 120:
            raise UnexpectedResponseError(f"{pieces[-2:]}")
        return "whole"

    async def grpc_left(self) -> str:
        num_pieces = self.rng.randrange(30)
        async with aclosing(
            self.client.generate("JULIET:", max_tokens=400, n=2, ignore_eos=True)
        ) as pieces:
            async for _ in pieces:
                num_pieces -= 1
                if num_pieces < 0:
                    return "left"
        return "whole"

    async def grpc_deadline(self) -> str:
        try:
            seconds = self.rng.choice((0.01, 0.3, 1.0))
            async for _ in self.client.generate(
                "O", max_tokens=400, ignore_eos=True, timeout_s=seconds
            ):
                pass
        except DeadlineExceededError:
            return "deadline"
        return "whole"

    async def grpc_hostile(self) -> str:
        code, details = await end_of(
            self.channel, self.rng.choice(METHODS), self.rng.choice(HOSTILE), 60
        )
        if code not in {*REFUSALS, grpc.StatusCode.OK}:
            raise UnexpectedResponseError(f"{code}: {details}")
        return code.name


HOSTILE = tuple(hostile_messages())


def _is(answer: httpx.Response, status: int) -> str:
    if answer.status_code != status:
        request = f"{answer.request.method} {answer.request.url.path}"
        raise UnexpectedResponseError(
            f"{request}: {answer.status_code}, not {status}: {answer.text[:300]}"
        )
    return str(status)
