"""``tramontane bench --url``: load on an OpenAI-compatible server, by independent streaming
clients.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import httpx

from tramontane.cluster.bench.report import BenchDisplay
from tramontane.cluster.bench.results import (
    BenchMetrics,
    BenchRequest,
    BenchResult,
    Failure,
    RequestTrace,
    Round,
    RoundPlan,
    Workload,
    arrivals,
)
from tramontane.cluster.console.server_client import base_url, no_answer, raise_if_unauthorized
from tramontane.proto.errors import ConfigError, PipelineError

TIMEOUT = httpx.Timeout(600, connect=10)  # between two pieces of an answer
# a connection pool would delay requests
UNLIMITED = httpx.Limits(max_connections=None, max_keepalive_connections=None)


@dataclass(frozen=True, slots=True)
class LoadPattern:
    """The load on the server. ``max_concurrency`` bounds the running requests; others wait, and
    their times count.
    """

    request_rate: float = float("inf")
    max_concurrency: int | None = None
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("--max-concurrency", self.max_concurrency),
            ("--vocab-size", self.vocab_size),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")


def make_client(url: str, headers: Mapping[str, str]) -> httpx.AsyncClient:
    """Return a client of the server. Raises ConfigError as ``base_url`` does."""
    return httpx.AsyncClient(
        base_url=base_url(url), headers=dict(headers), timeout=TIMEOUT, limits=UNLIMITED
    )


async def bench_online(
    client: httpx.AsyncClient,
    workload: Workload,
    traffic: LoadPattern,
    rounds: RoundPlan,
    display: BenchDisplay,
) -> BenchResult:
    """Run all rounds.

    Raises ConnectionLostError if the server does not answer, ConfigError if it is not an API
    server, PipelineError if all requests of a round fail.
    """
    due = arrivals(workload.num_prompts, traffic.request_rate, workload.seed)
    async with client:
        model, vocab_size = await _fetch_model(client)
        if (vocab_size := traffic.vocab_size or vocab_size) is None:
            display.note(
                "the server does not report its vocabulary size, so prompts are text; --vocab-size"
                " gives it"
            )
        generator = LoadGenerator(client, model, traffic.max_concurrency, display.advance)

        async def run_one(number: int) -> Round:
            requests = workload.requests(number, vocab_size)
            display.begin_round(number, rounds, sum(request.num_new_tokens for request in requests))
            traces = await generator.send_all(requests, due)
            if not (figures := BenchMetrics.of(traces)).num_completed:
                worst = figures.failures[0]
                raise PipelineError(
                    f"all {len(traces)} requests failed, {worst.count} with {worst.kind}:"
                    f" {worst.example}"
                )
            return Round(traces)

        return await rounds.run(run_one)


async def _fetch_model(client: httpx.AsyncClient) -> tuple[str, int | None]:
    """Return the first model's name, and the size of its vocabulary if the server reports it."""
    try:
        answer = await client.get("/v1/models")
        raise_if_unauthorized(client, answer)
        answer.raise_for_status()
        entry = answer.json()["data"][0]
        return str(entry["id"]), entry.get("vocab_size")
    except httpx.TransportError as error:
        raise no_answer(client, error) from error
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"--url {client.base_url} lists no model at /v1/models; is it an OpenAI-compatible"
            " server?"
        ) from error


class LoadGenerator:
    """Sends each request when it is due, whether or not earlier ones have been answered."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        model: str,
        max_concurrency: int | None,
        advance: Callable[[int], None],
    ) -> None:
        self._client, self._model, self._advance = client, model, advance
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()

    async def send_all(
        self, requests: Sequence[BenchRequest], due: Sequence[float]
    ) -> list[RequestTrace]:
        """Send each request at its time, in seconds from now, and wait for all answers."""
        begin = time.perf_counter()
        sent = (
            self._send_when_due(request, begin + after)
            for request, after in zip(requests, due, strict=True)
        )
        return await asyncio.gather(*sent)

    async def _send_when_due(self, request: BenchRequest, due_at: float) -> RequestTrace:
        await asyncio.sleep(due_at - time.perf_counter())
        async with self._slots:
            answer = _StreamTimes()
            failure = await self._send(request, answer)
        num_new = answer.usage.get("completion_tokens", len(answer.pieces_at))
        self._advance(request.num_new_tokens - len(answer.pieces_at))
        num_prompt = answer.usage.get("prompt_tokens", request.num_prompt_tokens)
        return RequestTrace(due_at, num_prompt, num_new, tuple(answer.pieces_at), failure)

    async def _send(self, request: BenchRequest, answer: "_StreamTimes") -> Failure | None:
        try:
            async with self._client.stream(
                "POST", "/v1/completions", json=self._body(request)
            ) as response:
                if response.status_code != httpx.codes.OK:
                    return Failure(f"HTTP {response.status_code}", _message(await response.aread()))
                async for event in _events(response):
                    if (error := event.get("error")) is not None:
                        return Failure("an error in the stream", str(error.get("message", error)))
                    if answer.take(event, time.perf_counter()):
                        self._advance(1)
        except httpx.HTTPError as error:
            return Failure(type(error).__name__, str(error))
        except (ValueError, AttributeError) as error:
            return Failure("no event of OpenAI's", str(error))
        return None if answer.pieces_at else Failure("no token", "the answer was empty")

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        sampling = {"max_tokens": request.num_new_tokens, "temperature": 0, "ignore_eos": True}
        prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        return {
            "model": self._model,
            "prompt": prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling,
        }


class _StreamTimes:
    """Arrival times of the pieces of one answer, and its usage."""

    def __init__(self) -> None:
        self.pieces_at: list[float] = []
        self.usage: dict[str, int] = {}

    def take(self, event: dict[str, Any], now: float) -> bool:
        """Record an event. Return True if it has text: the last event has only the usage."""
        self.usage = event.get("usage") or self.usage
        if event.get("choices"):
            self.pieces_at.append(now)
        return bool(event.get("choices"))


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of the stream. Raises RemoteProtocolError if it ends early."""
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return
        if line.startswith("data:"):
            yield json.loads(line.removeprefix("data:"))
    raise httpx.RemoteProtocolError("the stream broke off")


def _message(body: bytes) -> str:
    """Return the message of OpenAI's error object, else the start of the body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")[:200].strip() or "without a word"
