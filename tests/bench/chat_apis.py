"""Benchmark of the time to first token over Responses and Messages against that over chat
completions.

    python tests/bench/chat_apis.py [--rounds 200]

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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from rich.table import Table
from scripted_token_source import ScriptedSource, http_app_for
from starlette.types import ASGIApp, Message
from targets import at_most, conclude
from tokenizer_files import SENTENCEPIECE

from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate

CHAT, RESPONSES, MESSAGES = PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
MAX_MORE_MS = 2.0  # than over chat completions
NUM_MESSAGES, NUM_TOOLS = 63, 16
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("town", "day", "unit")},
}

# milliseconds by conversation and path: over chat, and how many more over the others
Figures = dict[str, dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="figures as JSON on standard output")
    options = parser.parse_args()
    figures = asyncio.run(measure(options.rounds))
    table = Table(
        "conversation",
        CHAT,
        f"more over {RESPONSES}",
        f"more over {MESSAGES}",
        title="time to first token, ms",
    )
    targets = []
    for conversation, ttft_ms in figures.items():
        table.add_row(conversation, *(f"{ttft_ms[path]:.2f}" for path in PATHS))
        for path in (RESPONSES, MESSAGES):
            targets.append(
                at_most(
                    f"ms more than over chat, {conversation}, {path}", ttft_ms[path], MAX_MORE_MS
                )
            )
    conclude(targets, table, data={"ttft_ms": figures}, as_json=options.json)


async def measure(rounds: int) -> Figures:
    """Return the figures of each conversation; the first tenth of the rounds warms up."""
    tokenizer = SentencePieceTokenizer(SENTENCEPIECE["v3"])
    model = ServedModel("tiny", tokenizer, 32_768, 16, tokenizer.vocab_size)
    source = ScriptedSource(tokenizer.encode("Good morrow, my lord.")[1:])
    chat = MistralChatTemplate.from_sentencepiece(SENTENCEPIECE["v3"])
    app = http_app_for(source, model, chat=chat, max_body_bytes=2**20).app()
    figures: Figures = {}
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


if __name__ == "__main__":
    main()
