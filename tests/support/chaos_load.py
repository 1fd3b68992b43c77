"""Steady mixed load: streams and plain requests, each of which must get exactly what it got without faults."""

import asyncio
import json
import math
import random
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
from close_calls import close_call

WORDS = "ROMEO speak my lord what news from Rome and the tribunes good morrow neighbour who is there".split()  # noqa: SIM905


def bodies(num_requests: int, rng: random.Random) -> list[dict[str, Any]]:
    """Different ones: short and long, greedy and seeded, one choice or two, streamed (four of five) or not."""
    return [
        {
            "prompt": f"{number}. " + " ".join(rng.choices(WORDS, k=rng.choice((3, 30, 120)))),
            "max_tokens": rng.randint(60, 200),
            "temperature": rng.choice((0.0, 0.8)),
            "seed": number,
            "n": rng.choice((1, 1, 1, 2)),
            "stream": number % 5 != 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for number in range(num_requests)
    ]


CLIENT_TIMEOUT_S = 1800.0  # where faults follow each other at once, many fall upon one answer
Tokens = list[list[int]]  # of each choice


@dataclass
class Load:
    """``clients`` ask one request after the other, in turn, until they are told to stop."""

    url: str
    requests: list[dict[str, Any]]
    expected: list[Tokens]
    num_done: int = 0
    failed: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    close_calls: list[str] = field(default_factory=list)  # differences that are rounding's
    unfinished: int = 0  # streams that have told tokens, and will tell more
    last_piece_at: dict[int, float] = field(default_factory=dict)  # of streams that are on their way, by client
    pauses: dict[int, float] = field(default_factory=dict)  # the longest of each of those since the last ``watch``
    waits: list[float] = field(default_factory=list)  # of streams for their first piece, where it came since the last ``watch``
    longest_s: float = 0.0  # of a request that was answered
    min_unfinished: float = math.inf  # of the unfinished ones, when a fault came
    is_over: bool = False

    async def run(self, num_clients: int) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=CLIENT_TIMEOUT_S, limits=limits) as client:
            await asyncio.gather(*(self._ask_in_turn(client, number, num_clients) for number in range(num_clients)))

    def watch(self) -> None:
        """Measure from now on how long the streams that are on their way pause."""
        self.pauses = dict.fromkeys(self.last_piece_at, 0.0)
        self.waits = []

    async def _ask_in_turn(self, client: httpx.AsyncClient, number: int, step: int) -> None:
        while not self.is_over:
            request = number % len(self.requests)
            number += step + 1  # another partner each time
            asked_at = time.monotonic()
            try:
                tokens = await tokens_of(client, self.requests[request], self, number)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.failed.append(f"request {request}: {error!r}")
            else:
                self.num_done += 1
                self.longest_s = max(self.longest_s, time.monotonic() - asked_at)
                if tokens != self.expected[request]:
                    await note_difference(self, request, tokens)


async def tokens_of(client: httpx.AsyncClient, body: dict[str, Any], load: Load | None = None, number: int = 0) -> Tokens:
    """Raises httpx.HTTPError, and ValueError for a stream that ends without its end or with an error."""
    if not body["stream"]:
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code != httpx.codes.OK:
            raise ValueError(answer.text)
        return [choice["token_ids"] for choice in answer.json()["choices"]]
    tokens: Tokens = [[] for _ in range(body["n"])]
    is_whole, asked_at = False, time.monotonic()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    is_whole = True
                    continue
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    tokens[choice["index"]] += choice["token_ids"]
                _note_piece(load, number, asked_at)
    finally:
        if load is not None and load.last_piece_at.pop(number, None) is not None:
            load.unfinished -= 1
    if not is_whole:
        raise ValueError("the stream ended without its end")
    return tokens


def _note_piece(load: Load | None, number: int, asked_at: float) -> None:
    if load is None:
        return
    now = time.monotonic()
    if (last := load.last_piece_at.get(number)) is None:
        load.unfinished += 1
        load.waits.append(now - asked_at)
    elif number in load.pauses:
        load.pauses[number] = max(load.pauses[number], now - last)
    load.last_piece_at[number] = now


async def baseline_tokens(url: str, requests: list[dict[str, Any]], num_clients: int) -> list[Tokens]:
    """The oracle: the same requests without faults, so many at once."""
    places = asyncio.Semaphore(num_clients)

    async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> Tokens:
        async with places:
            return await tokens_of(client, body)

    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        return list(await asyncio.gather(*(one(client, body) for body in requests)))


class ExpectedAnswers(Protocol):
    """Requests, what they should be answered, and what was different."""

    requests: list[dict[str, Any]]
    expected: list[Tokens]
    different: list[str]
    close_calls: list[str]


async def note_difference(load: ExpectedAnswers, request: int, tokens: Tokens) -> bool:
    """Of every choice where the first one is. Returns whether all are close calls."""
    expected, are_close = load.expected[request], len(tokens) == len(load.expected[request])
    if not are_close:
        load.different.append(f"request {request}: {len(tokens)} choices of {len(expected)}")
    for choice, (got, wanted) in enumerate(zip(tokens, expected, strict=False)):
        if got == wanted:
            continue
        place = next((n for n, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
        told = f"request {request}, choice {choice}: {len(got)} tokens of {len(wanted)}, different from {place} on"
        call = await asyncio.to_thread(close_call, load.requests[request], choice, place, got, wanted)
        (load.close_calls if call else load.different).append(f"{told}; {call}" if call else told)
        are_close &= bool(call)
    return are_close
