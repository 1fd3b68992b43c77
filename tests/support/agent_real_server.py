"""The server of ``make agents --real``: ``tramontane serve`` with two stages and a small random
model, behind a recorder that passes requests on to it, and what a whole answer of it has.

A random model almost never ends an answer, so the tokens that end answers, texts and objects are
made likely, and so is the one that begins a call: answers have some dozens of tokens.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from agent_server import (
    GENERATES,
    MESSAGES,
    MODEL_NAME,
    RESPONSES,
    AgentServer,
    Exchange,
    Recorder,
    served,
    write_tekken,
)
from free_ports import free_port
from safetensors.torch import load_file, save_file
from serve_process import running_server
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tramontane.proto.foreign_folders import SINGLE_NAMES
from tramontane.proto.model_folder import Layout
from tramontane.proto.presets import PRESETS, tiny_variant
from tramontane.router.tokenization.loader import require_tokenizer
from tramontane.workers.weights.random_checkpoint import write_random_checkpoint

# 4 layers of width 64; prompts of agents have more than 20,000 tokens of so small a vocabulary
MODEL = replace(
    tiny_variant(PRESETS["mistral-7b-v0.1"]),
    vocab_size=7000,
    max_seq_len=2**17,
    windows=(512,) * 4,
)
ENDS = ('"', "}", "]")
# the one number that all embeddings have in common, and its weights for the likely tokens
COMMON = 8.0
WEIGHTS = {"</s>": 1.4, "[TOOL_CALLS]": 1.6}
END_WEIGHT = 1.6
STALLED_S = 45  # without a part of an answer
HOP_HEADERS = frozenset((b"host", b"connection", b"accept-encoding", b"transfer-encoding"))
COMPLETE = frozenset(("completed", "incomplete"))  # the second at the largest number of tokens


def write_model(folder: Path, version: str) -> None:
    """Write a checkpoint with random weights, and a tokenizer of this version."""
    write_random_checkpoint(folder, MODEL, Layout.HUGGING_FACE)
    write_tekken(folder, version)
    tokenizer = require_tokenizer(folder, MODEL.vocab_size)
    weights = {tokenizer.control_id(name): weight for name, weight in WEIGHTS.items()}
    weights |= {tokenizer.encode(text)[-1]: END_WEIGHT for text in ENDS}
    path = folder / SINGLE_NAMES[Layout.HUGGING_FACE.value]
    state = load_file(path)
    state["model.embed_tokens.weight"][:, 0] = COMMON
    for token_id, weight in weights.items():
        state["lm_head.weight"][token_id, 0] = weight
    save_file(state, path, metadata={"format": "pt"})


class Forward:
    """An application that passes requests on to a server, and the parts of its answers as they
    come.
    """

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request as the server does. Raises httpx.HTTPError if an answer breaks off."""
        request = Request(scope, receive)
        kept = [(name, value) for name, value in scope["headers"] if name not in HOP_HEADERS]
        sent = self._client.build_request(
            request.method,
            f"{request.url.path}?{request.url.query}",
            headers=[*kept, (b"accept-encoding", b"identity")],
            content=await request.body(),
        )
        try:
            answer = await self._client.send(sent, stream=True)
        except httpx.HTTPError as error:
            response: Response = PlainTextResponse(f"no connection: {error!r}", 502)
            await response(scope, receive, send)
            return
        response = StreamingResponse(answer.aiter_raw(), answer.status_code)
        response.raw_headers = [
            (name.lower(), value)
            for name, value in answer.headers.raw
            if name.lower() not in HOP_HEADERS
        ]
        try:
            await response(scope, receive, send)
        finally:
            await answer.aclose()


@contextmanager
def running_real_server(version: str, folder: Path) -> Iterator[AgentServer]:
    """Run ``tramontane serve`` during the block, and the recorder on another port."""
    model, port = folder / f"model-{version}", free_port()
    write_model(model, version)
    flags = ("--model", str(model), "--served-model-name", MODEL_NAME, "--stages", "2")
    with running_server(port, *flags):
        recorder = Recorder(Forward(f"http://127.0.0.1:{port}"))
        with served(recorder) as url:
            yield AgentServer(url, recorder)


def unanswered(exchanges: Sequence[Exchange]) -> str:
    """Return what is wrong with the answers to a program, "" if nothing is. A program may leave
    before an answer is whole, but not every time.
    """
    asked = [each for each in exchanges if each.path in GENERATES]
    problems = [problem for each in asked if (problem := problem_of(each))]
    if problems:
        return problems[0]
    if not asked:
        return "it has asked for nothing"
    return "" if any(each.is_whole for each in asked) else "no answer was whole before it ended"


def problem_of(exchange: Exchange) -> str:
    """Return what is wrong with an answer, "" if nothing is."""
    text = exchange.answer.decode(errors="replace")
    if exchange.status >= 400:
        return f"refused: {exchange.status} {text:.300}"
    if exchange.broken:
        return f"the answer broke off: {exchange.broken}"
    if not exchange.is_whole:
        waited = time.monotonic() - exchange.last_at
        return f"no part of an answer for {waited:.0f} s" if waited > STALLED_S else ""
    try:
        answers = _events(text) if exchange.body.get("stream") else [json.loads(text)]
    except ValueError:
        return f"not JSON: {text[-300:]}"
    if failed := [each for each in answers if each.get("error") or each.get("type") == "error"]:
        return f"failed: {json.dumps(failed[0]):.300}"
    return "" if _is_complete(exchange, answers) else f"not complete: {text[-300:]}"


def _events(text: str) -> list[dict[str, Any]]:
    """Return the data of a stream's events; the end of a chat's stream is {"type": "[DONE]"}."""
    data = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [{"type": each} if each == "[DONE]" else json.loads(each) for each in data]


def _is_complete(exchange: Exchange, answers: Sequence[dict[str, Any]]) -> bool:
    """Return whether an answer has its end: the last event of a stream, or a reason to stop."""
    is_stream = exchange.body.get("stream")
    last = answers[-1] if answers else {}
    if exchange.path == f"{MESSAGES}/count_tokens":
        return "input_tokens" in last
    if exchange.path == MESSAGES:
        return last.get("type") == "message_stop" if is_stream else bool(last.get("stop_reason"))
    if exchange.path == RESPONSES:
        return (last.get("response", {}) if is_stream else last).get("status") in COMPLETE
    reasons = [
        choice.get("finish_reason") for each in answers for choice in each.get("choices", ())
    ]
    return any(reasons) and (not is_stream or last.get("type") == "[DONE]")
