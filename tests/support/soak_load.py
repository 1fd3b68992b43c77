"""A crowd of clients, few of whom behave: what each of them does, and what it may be told."""

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
from grpc_fuzz import METHODS, REFUSALS, end_of, hostile_messages
from rude_clients import Rude, Unexpected

from tramontane.client import AsyncClient
from tramontane.proto.errors import DeadlineExceededError, TramontaneError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_BODY = 2**20  # that the server is started with
CONTEXT = 2048
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Romeo", "Juliet"]}, "age": {"type": "integer"}},
    "required": ["name"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
HELLO = b'"messages": [{"role": "user", "content": "O"}]'
CONVERSATION = {"messages": [{"role": "user", "content": "What news from Rome?"}], "ignore_eos": True}
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
        b'{"messages": [{"role": "user", "content": "O"}], "tools": [{"type": "function", "function": {"name": "f"}}]}',
        400,
    ),
    ("POST", CHAT, json.dumps({"messages": [{"role": "user", "content": "O " * 4 * CONTEXT}]}).encode(), 400),
    ("GET", "/v1/nothing/of/the/kind", b"", 404),
    ("DELETE", COMPLETIONS, b"", 405),
]
LOOKS = ("/health", "/v1/models", "/experts", "/openapi.json")
ENDED = {"stop", "length"}


def requests(rng: random.Random) -> list[dict[str, Any]]:
    """Those whose tokens are known: as under faults, and prompts of ids, and answers that follow a schema."""
    same = {"ignore_eos": True, "return_token_ids": True, "n": 1, "max_tokens": 80}
    prompts = [rng.choices(range(3, 1000), k=rng.choice((5, 300))) for _ in range(6)]
    ids = [{**same, "prompt": prompt, "seed": n, "stream": n % 2 == 0} for n, prompt in enumerate(prompts)]
    formed = [{**same, "prompt": "KING:", "response_format": FORMAT, "seed": n, "stream": n % 2 == 0, "n": 2} for n in range(6)]
    return [*bodies(28, rng), *ids, *({**body, "ignore_eos": False} for body in formed)]


@dataclass
class Crowd:
    """``outcomes`` counts what became of each kind of thing that was done; what must not happen is in the lists."""

    port: int
    grpc_port: int
    metrics: str
    requests: list[dict[str, Any]]
    expected: list[Tokens]
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    close_calls: list[str] = field(default_factory=list)  # differences that are rounding's
    is_over: bool = False

    async def run(self, rngs: list[random.Random]) -> None:
        """A client for each, one thing after the other until it is over. Connections that are kept end with it."""
        url, limits = f"http://127.0.0.1:{self.port}", httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http,
            AsyncClient(f"127.0.0.1:{self.grpc_port}") as client,
            grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel,
        ):
            await asyncio.gather(*(self._one_after_the_other(_Member(self, http, client, channel, rng)) for rng in rngs))

    async def _one_after_the_other(self, member: "_Member") -> None:
        acts = member.acts()
        while not self.is_over:
            kind = member.rng.choices(list(acts), [weight for weight, _ in acts.values()])[0]
            try:
                self.outcomes[kind, await acts[kind][1]()] += 1
            except (httpx.HTTPError, OSError, ValueError, KeyError, TramontaneError, grpc.aio.AioRpcError) as error:
                self.failed.append(f"{kind}: {error!r:.500}")


Act = Callable[[], Awaitable[str]]


@dataclass
class _Member:
    """One client. Every act returns how it ended, and raises where that may not be."""

    crowd: Crowd
    http: httpx.AsyncClient
    client: AsyncClient
    channel: grpc.aio.Channel
    rng: random.Random

    def acts(self) -> dict[str, tuple[float, Act]]:
        """With how often they are done."""
        rude = Rude(self.crowd.port, self.rng)
        return {
            "known request": (30, self.known),
            "stream left": (14, lambda: rude.leave(self._body() | {"stream": True, "max_tokens": 400})),
            "request left": (6, lambda: rude.leave(self._body() | {"stream": False, "max_tokens": 400})),
            "half a request": (6, lambda: rude.half(self._body())),
            "slow reader": (1, rude.read_slowly),
            "mistake": (10, self.mistake),
            "deadline": (7, self.deadline),
            "chat": (6, self.chat),
            "several choices": (3, self.several),
            "gRPC": (5, self.grpc_whole),
            "gRPC, left": (6, self.grpc_left),
            "gRPC, deadline": (3, self.grpc_deadline),
            "gRPC, hostile": (3, self.grpc_hostile),
            "look": (5, self.look),
        }

    def _body(self) -> dict[str, Any]:
        return self.rng.choice(self.crowd.requests)

    async def known(self) -> str:
        number = self.rng.randrange(len(self.crowd.requests))
        tokens = await tokens_of(self.http, self.crowd.requests[number])
        if tokens != self.crowd.expected[number]:
            return "a close call" if await note_difference(self.crowd, number, tokens) else "different"
        return "the same tokens"

    async def mistake(self) -> str:
        method, path, body, status = self.rng.choice(MISTAKES)
        answer = await self.http.request(method, path, content=body, headers={"content-type": "application/json"})
        return _is(answer, status)

    async def deadline(self) -> str:
        """Mostly too short."""
        body = self._body() | {"max_tokens": 300}
        seconds = self.rng.choice((0.001, 0.05, 0.3, 1.0))
        answer = await self.http.post(COMPLETIONS, json=body, headers={"x-request-timeout": str(seconds)})
        if answer.status_code == httpx.codes.OK:
            return "200, deadline in the stream" if '"deadline_exceeded"' in answer.text else "200, in time"
        return _is(answer, 504)

    async def chat(self) -> str:
        body = CONVERSATION | {"max_tokens": self.rng.randint(1, 120), "seed": 1, "stream": self.rng.random() < 0.5}
        answer = await self.http.post(CHAT, json=body | ({"response_format": FORMAT} if self.rng.random() < 0.3 else {}))
        if body["stream"] and not answer.text.endswith("data: [DONE]\n\n"):
            raise Unexpected(answer.text[-200:])
        return _is(answer, 200)

    async def several(self) -> str:
        body = {"prompt": ["O", "KING:"], "n": self.rng.randint(2, 6), "max_tokens": self.rng.randint(1, 60), "logprobs": 5}
        answer = await self.http.post(COMPLETIONS, json=body)
        status = _is(answer, 200)
        choices = answer.json()["choices"]
        if len(choices) != 2 * body["n"] or {choice["finish_reason"] for choice in choices} - ENDED:
            raise Unexpected(answer.text[:200])
        return status

    async def look(self) -> str:
        place = self.rng.choice((*LOOKS, "/tokenize", "metrics"))
        if place == "metrics":
            return _is(await self.http.get(self.crowd.metrics), 200)
        if place == "/tokenize":
            return _is(await self.http.post(place, json={"prompt": "What news?"}), 200)
        return _is(await self.http.get(place), 200)

    async def grpc_whole(self) -> str:
        pieces = [piece async for piece in self.client.generate("ROMEO:", max_tokens=60, n=2, seed=3, ignore_eos=True)]
        if sum(len(piece.token_ids) for piece in pieces) != 120:
            raise Unexpected(f"{pieces[-2:]}")
        return "whole"

    async def grpc_left(self) -> str:
        num_pieces = self.rng.randrange(30)
        async with aclosing(self.client.generate("JULIET:", max_tokens=400, n=2, ignore_eos=True)) as pieces:
            async for _ in pieces:
                num_pieces -= 1
                if num_pieces < 0:
                    return "left"
        return "whole"

    async def grpc_deadline(self) -> str:
        try:
            seconds = self.rng.choice((0.01, 0.3, 1.0))
            async for _ in self.client.generate("O", max_tokens=400, ignore_eos=True, timeout_s=seconds):
                pass
        except DeadlineExceededError:
            return "deadline"
        return "whole"

    async def grpc_hostile(self) -> str:
        code, said = await end_of(self.channel, self.rng.choice(METHODS), self.rng.choice(HOSTILE), 60)
        if code not in {*REFUSALS, grpc.StatusCode.OK}:
            raise Unexpected(f"{code}: {said}")
        return code.name


HOSTILE = tuple(hostile_messages())


def _is(answer: httpx.Response, status: int) -> str:
    if answer.status_code != status:
        asked = f"{answer.request.method} {answer.request.url.path}"
        raise Unexpected(f"{asked}: {answer.status_code}, not {status}: {answer.text[:300]}")
    return str(status)
