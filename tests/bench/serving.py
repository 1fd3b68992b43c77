"""Benchmark of what serving costs, on this machine.

    python tests/bench/serving.py http [--rounds 3] [--tokens 128]
    python tests/bench/serving.py apis [--rounds 200]

Both have ``--json``.

**HTTP**: the engine alone against the engine behind the ingress. Rounds alternate between both, so
that a slow moment of the machine affects both.

**APIs**: the time to first token over Responses and Messages against that over chat completions.
One API server without Ray or network, whose tokens are there at once, in one process: what is
measured is what the endpoints do before and with the first token. Requests of the same conversation
alternate between the three endpoints, once a short one and once with 63 messages and 16 tools.
Figures are medians, in milliseconds: of the time over chat completions, and of how much longer the
other two took in the same round.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from bench_parts import (
    Part,
    Report,
    conclude_part,
    figures_table,
    in_rounds,
    median_ratio,
    run_program,
    table_of,
)
from scripted_token_source import ScriptedSource, http_app_for
from serve_process import TRAMONTANE, running_server, send_completion, starting_server, when_ready
from starlette.types import ASGIApp, Message
from targets import at_least, at_most
from tokenizer_files import SENTENCEPIECE

from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate

PORT = 8766
PROMPTS = [f"KING: speak, my lord number {i}, what news?" for i in range(64)]
MAX_READY_S, MAX_ADDED_MS, MIN_RATIO = 25.0, 20.0, 0.85
CHAT, RESPONSES, MESSAGES = PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
MAX_MORE_MS = 2.0  # than over chat completions
NUM_MESSAGES, NUM_TOOLS = 63, 16
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("town", "day", "unit")},
}


# ---- HTTP


@dataclass(frozen=True, slots=True)
class Reply:
    first_s: float  # from sending to the first event
    usage: dict[str, int]
    timings: dict[str, float]
    num_reads: int


async def request(prompt: str, num_tokens: int) -> Reply:
    """Send one streamed completion."""
    sampling = {"max_tokens": num_tokens, "temperature": 0.8, "seed": 0, "ignore_eos": True}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    reader, writer = await send_completion(PORT, {"prompt": prompt, **sampling, **streamed})
    sent_at = time.perf_counter()
    received, first_s, num_reads = b"", 0.0, 0
    while part := await reader.read(2**16):
        received += part
        num_reads += 1
        if not first_s and b"data:" in received:
            first_s = time.perf_counter() - sent_at
    writer.close()
    last = next(line for line in reversed(received.split(b"\n")) if b'"timings"' in line)
    event = json.loads(last.removeprefix(b"data: "))
    return Reply(first_s, event["usage"], event["timings"], num_reads)


async def serve_round(num_clients: int, num_tokens: int) -> tuple[float, list[Reply]]:
    """Return the tokens per second of ``num_clients`` clients at once."""
    started = time.perf_counter()
    replies = await asyncio.gather(
        *(request(prompt, num_tokens) for prompt in PROMPTS[:num_clients])
    )
    return sum(r.usage["completion_tokens"] for r in replies) / (
        time.perf_counter() - started
    ), list(replies)


def generate_round(num_tokens: int) -> float:
    """Return the tokens per second that ``tramontane generate`` reports for the same prompts."""
    flags = f"generate --json --max-tokens {num_tokens} --stages 2"
    figure: float = json.loads(run_program([*TRAMONTANE, *flags.split(), *PROMPTS]))["tokens_per_s"]
    return figure


@dataclass(frozen=True, slots=True)
class HttpCost:
    """``alone_per_s`` and ``behind_per_s`` are tokens per second of each round, by the engine and
    behind HTTP.
    """

    ready_s: float
    first_token_s: float
    added_ms: float  # to the first token, one client
    alone_per_s: list[float]
    behind_per_s: list[float]
    tokens_per_read: float


def measure_http(rounds: int, num_tokens: int) -> HttpCost:
    started = time.perf_counter()
    alone, behind, replies = [], [], list[Reply]()
    with starting_server(PORT, "--stages", "2") as server:
        ready = when_ready(server)
        asyncio.run(request("ROMEO:", 1))
        first_token_s = time.perf_counter() - started
        singles = [asyncio.run(request("ROMEO: speak", 4)) for _ in range(50)]
    for _, way in in_rounds(rounds, ("generate", "64 streaming clients")):
        if way == "generate":
            alone.append(generate_round(num_tokens))
            continue
        with running_server(PORT, "--stages", "2"):
            asyncio.run(serve_round(8, 8))
            figure, replies = asyncio.run(serve_round(64, num_tokens))
            behind.append(figure)
    added_s = statistics.median(
        r.first_s - r.timings["queue_s"] - r.timings["prefill_s"] for r in singles
    )
    per_read = 64 * num_tokens / sum(r.num_reads for r in replies)
    return HttpCost(ready["ready_after_s"], first_token_s, 1000 * added_s, alone, behind, per_read)


def http(options: argparse.Namespace) -> Report:
    """the first token, and 64 streaming clients against generate"""
    found = measure_http(options.rounds, options.tokens)
    ratio = median_ratio(found.behind_per_s, found.alone_per_s)
    added = "added to the first token, 1 client (median of 50)"
    targets = [
        at_most("serve to first token", found.first_token_s, MAX_READY_S, "s"),
        at_most(added, found.added_ms, MAX_ADDED_MS, "ms"),
        at_least("64 streaming clients / generate, median of the rounds", ratio, MIN_RATIO, "x"),
    ]
    rows = {
        "serve to ready": f"{found.ready_s:.1f} s",
        "generate, 64 prompts, tokens/s": " ".join(f"{x:.0f}" for x in found.alone_per_s),
        "64 streaming clients, tokens/s": " ".join(f"{x:.0f}" for x in found.behind_per_s),
        "tokens per read of the socket": f"{found.tokens_per_read:.1f}",
    }
    return Report(targets, [figures_table(rows)], asdict(found))


# ---- APIs


async def measure_apis(rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds by conversation and path: over chat, and how many more over the others.
    The first tenth of the rounds warms up.
    """
    tokenizer = SentencePieceTokenizer(SENTENCEPIECE["v3"])
    model = ServedModel("tiny", tokenizer, 32_768, 16, tokenizer.vocab_size)
    source = ScriptedSource(tokenizer.encode("Good morrow, my lord.")[1:])
    chat = MistralChatTemplate.from_sentencepiece(SENTENCEPIECE["v3"])
    app = http_app_for(source, model, chat=chat, max_body_bytes=2**20).app()
    figures: dict[str, dict[str, float]] = {}
    for name, (num_messages, num_tools) in {
        "short": (1, 0),
        "long, with tools": (NUM_MESSAGES, NUM_TOOLS),
    }.items():
        bodies = {
            path: json.dumps(body).encode()
            for path, body in requests(num_messages, num_tools).items()
        }
        times: dict[str, list[float]] = {path: [] for path in PATHS}
        for number in range(rounds + rounds // 10):
            for path in PATHS[number % 3 :] + PATHS[: number % 3]:
                seconds = await first_token_s(app, path, bodies[path])
                if number >= rounds // 10:
                    times[path].append(1000 * seconds)
        figures[name] = {CHAT: statistics.median(times[CHAT])}
        for path in (RESPONSES, MESSAGES):
            figures[name][path] = statistics.median(
                own - chats for own, chats in zip(times[path], times[CHAT], strict=True)
            )
    return figures


def requests(num_messages: int, num_tools: int) -> dict[str, dict[str, Any]]:
    """Return the same conversation as the body of each endpoint."""
    roles = [("user", "assistant")[index % 2] for index in range(num_messages)]
    messages = [
        {"role": role, "content": f"What news of town {index}? " * 8}
        for index, role in enumerate(roles)
    ]
    functions = [
        {"name": f"f{index}", "description": "of a town", "parameters": SCHEMA}
        for index in range(num_tools)
    ]
    anthropic = [
        {"name": each["name"], "description": "of a town", "input_schema": SCHEMA}
        for each in functions
    ]
    tools = {
        CHAT: [{"type": "function", "function": each} for each in functions],
        RESPONSES: [{"type": "function", **each} for each in functions],
        MESSAGES: anthropic,
    }
    limits = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
    return {
        path: {
            ("input" if path == RESPONSES else "messages"): messages,
            limits[path]: 8,
            "stream": True,
        }
        | ({"tools": tools[path]} if num_tools else {})
        for path in PATHS
    }


async def first_token_s(app: ASGIApp, path: str, body: bytes) -> float:
    """Return the seconds from a request to the first part of its stream, which has the first
    token.
    """
    first_at, parts = 0.0, iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        part = next(parts, None)
        return part if part is not None else await asyncio.Future()

    async def send(message: Message) -> None:
        nonlocal first_at
        if message["type"] == "http.response.start" and message["status"] != 200:
            raise RuntimeError(f"{path} answered {message['status']}")
        if message["type"] == "http.response.body" and not first_at:
            first_at = time.perf_counter()

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [],
        "query_string": b"",
        "root_path": "",
    }
    started = time.perf_counter()
    await app(scope, receive, send)
    return first_at - started


def apis(options: argparse.Namespace) -> Report:
    """time to first token over Responses and Messages, against chat completions"""
    figures = asyncio.run(measure_apis(options.rounds))
    targets = [
        at_most(f"ms more than over chat, {name}, {path}", ttft_ms[path], MAX_MORE_MS)
        for name, ttft_ms in figures.items()
        for path in (RESPONSES, MESSAGES)
    ]
    rows = [
        (name, *(f"{ttft_ms[path]:.2f}" for path in PATHS)) for name, ttft_ms in figures.items()
    ]
    columns = ("conversation", CHAT, f"more over {RESPONSES}", f"more over {MESSAGES}")
    table = table_of(columns, rows, "time to first token, ms")
    return Report(targets, [table], {"ttft_ms": figures})


PARTS = {
    "http": Part(http, {"--rounds": 3, "--tokens": 128}),
    "apis": Part(apis, {"--rounds": 200}),
}


def main() -> None:
    conclude_part(__doc__, PARTS)


if __name__ == "__main__":
    main()
