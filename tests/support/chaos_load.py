"""Steady mixed load: streams and plain requests, each of which must return the same tokens as
without faults.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
from close_calls import close_call
from rich.text import Text
from targets import Target, none_of

SPEECH = "ROMEO speak my lord what news from Rome and the tribunes good morrow neighbour "
WORDS = f"{SPEECH} who is there".split()


def bodies(num_requests: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return mixed requests: short and long, greedy and seeded, one choice or two, streamed (four
    of five) or not.
    """
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


CLIENT_TIMEOUT_S = 1800.0  # one answer can meet many faults if they follow each other at once
Tokens = list[list[int]]  # of each choice


@dataclass
class Load:
    """Clients that send one request after the other until ``is_over`` is set."""

    url: str
    requests: list[dict[str, Any]]
    expected: list[Tokens]
    num_done: int = 0
    num_tokens: int = 0  # of streams, ended or not
    failed: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    close_calls: list[str] = field(default_factory=list)  # differences due to rounding
    unfinished: int = 0  # streams that have returned some tokens but not all
    last_piece_at: dict[int, float] = field(default_factory=dict)  # of running streams, by client
    # the longest of each running stream since the last ``watch``
    pauses: dict[int, float] = field(default_factory=dict)
    # time to the first piece, of those that came since the last ``watch``
    waits: list[float] = field(default_factory=list)
    longest_s: float = 0.0  # of an answered request
    min_unfinished: float = math.inf  # the fewest unfinished streams at any fault
    is_over: bool = False
    pause_s: float = 0.0  # of a client between two requests, where what a test waits for is a clock

    async def run(self, num_clients: int) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=CLIENT_TIMEOUT_S, limits=limits
        ) as client:
            await asyncio.gather(
                *(
                    self._request_in_turn(client, number, num_clients)
                    for number in range(num_clients)
                )
            )

    def watch(self) -> None:
        """Start to measure the pauses of the running streams."""
        self.pauses = dict.fromkeys(self.last_piece_at, 0.0)
        self.waits = []

    async def _request_in_turn(self, client: httpx.AsyncClient, number: int, step: int) -> None:
        while not self.is_over:
            request = number % len(self.requests)
            number += step + 1  # each request runs next to different ones each time
            sent_at = time.monotonic()
            try:
                tokens = await tokens_of(client, self.requests[request], self, number)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.failed.append(f"request {request}: {error!r}")
            else:
                self.num_done += 1
                self.longest_s = max(self.longest_s, time.monotonic() - sent_at)
                if tokens != self.expected[request]:
                    await note_difference(self, request, tokens)
            await asyncio.sleep(self.pause_s)


async def until(
    condition: Callable[[], bool | Awaitable[bool]],
    what: str,
    timeout_s: float = 180.0,
    poll_s: float = 0.02,
) -> None:
    """Wait until the condition holds. Raises TimeoutError."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        holds = condition()
        if await holds if isinstance(holds, Awaitable) else holds:
            return
        if time.monotonic() > give_up_at:
            raise TimeoutError(what)
        await asyncio.sleep(poll_s)


def requests_of(*loads: Load) -> dict[str, Any]:
    """Return how many requests there were, and those that failed or had other tokens."""
    return {
        "requests": sum(load.num_done + len(load.failed) for load in loads),
        "failed": [text for load in loads for text in load.failed],
        "different": [text for load in loads for text in load.different],
    }


def request_targets(report: Mapping[str, Any]) -> list[Target]:
    """Return the targets of what ``requests_of`` returns."""
    return [none_of(f"{title} requests", report[title]) for title in ("failed", "different")]


def request_lines(report: Mapping[str, Any]) -> list[Text]:
    """Return what ``requests_of`` returns as text, with the first few of each kind."""
    return [
        Text(f"{title}: {len(report[title])} of {report['requests']} requests")
        + Text("".join(f"\n  {each}" for each in report[title][:5]))
        for title in ("failed", "different")
    ]


async def tokens_of(
    client: httpx.AsyncClient, body: dict[str, Any], load: Load | None = None, number: int = 0
) -> Tokens:
    """Send a request and return its tokens.

    Raises httpx.HTTPError, and ValueError for an error or for a stream without its final event.
    """
    if not body["stream"]:
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code != httpx.codes.OK:
            raise ValueError(answer.text)
        return [choice["token_ids"] for choice in answer.json()["choices"]]
    tokens: Tokens = [[] for _ in range(body["n"])]
    is_complete, sent_at = False, time.monotonic()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    is_complete = True
                    continue
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    tokens[choice["index"]] += choice["token_ids"]
                    if load is not None:
                        load.num_tokens += len(choice["token_ids"])
                _note_piece(load, number, sent_at)
    finally:
        if load is not None and load.last_piece_at.pop(number, None) is not None:
            load.unfinished -= 1
    if not is_complete:
        raise ValueError("the stream ended without its final event")
    return tokens


def _note_piece(load: Load | None, number: int, sent_at: float) -> None:
    if load is None:
        return
    now = time.monotonic()
    if (last := load.last_piece_at.get(number)) is None:
        load.unfinished += 1
        load.waits.append(now - sent_at)
    elif number in load.pauses:
        load.pauses[number] = max(load.pauses[number], now - last)
    load.last_piece_at[number] = now


async def baseline_tokens(
    url: str, requests: list[dict[str, Any]], num_clients: int
) -> list[Tokens]:
    """Return the expected tokens: those of the same requests without faults, ``num_clients`` at a
    time.
    """
    slots = asyncio.Semaphore(num_clients)

    async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> Tokens:
        async with slots:
            return await tokens_of(client, body)

    async with httpx.AsyncClient(
        base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)
    ) as client:
        return list(await asyncio.gather(*(one(client, body) for body in requests)))


class ExpectedAnswers(Protocol):
    """Requests, their expected tokens, and the differences that were found."""

    requests: list[dict[str, Any]]
    expected: list[Tokens]
    different: list[str]
    close_calls: list[str]


async def note_difference(load: ExpectedAnswers, request: int, tokens: Tokens) -> bool:
    """Record the first difference of every choice; returns True if all of them are close calls."""
    expected, are_close = load.expected[request], len(tokens) == len(load.expected[request])
    if not are_close:
        load.different.append(f"request {request}: {len(tokens)} choices of {len(expected)}")
    for choice, (got, wanted) in enumerate(zip(tokens, expected, strict=False)):
        if got == wanted:
            continue
        first = next(
            (n for n, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b),
            min(len(got), len(wanted)),
        )
        text = (
            f"request {request}, choice {choice}: {len(got)} tokens of {len(wanted)}, different"
            f" from {first} on"
        )
        call = await asyncio.to_thread(
            close_call, load.requests[request], choice, first, got, wanted
        )
        (load.close_calls if call else load.different).append(f"{text}; {call}" if call else text)
        are_close &= bool(call)
    return are_close
