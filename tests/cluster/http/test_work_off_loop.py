"""Small bodies that are much work: it is done on other threads than the event loop's, or bounded
before it is done.
"""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from scripted_token_source import ScriptedSource, client_for, http_app_for
from tokenizer_files import SENTENCEPIECE

from tramontane.cluster.http import token_endpoints
from tramontane.router.openai.json_limits import SMALL_BODY
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate

TOKENIZER = SentencePieceTokenizer(SENTENCEPIECE["v3"])
CONTEXT, MAX_BODY = 512, 2**23
MODEL = ServedModel("demo", TOKENIZER, CONTEXT, 16, TOKENIZER.vocab_size)
FORMAT = MistralChatTemplate.from_sentencepiece(SENTENCEPIECE["v3"])
USER = {"role": "user", "content": "a"}


def _threads(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[bool]:
    """Return a list that gets, for each call, whether it is made on the main thread."""
    seen, original = list[bool](), getattr(owner, name)

    def watched(*args: Any, **more: Any) -> Any:
        seen.append(threading.current_thread() is threading.main_thread())
        return original(*args, **more)

    monkeypatch.setattr(owner, name, watched)
    return seen


def _post(path: str, body: Any) -> tuple[int, dict[str, Any]]:
    written = json.dumps(body, separators=(",", ":")).encode()

    async def scenario() -> tuple[int, dict[str, Any]]:
        app = http_app_for(ScriptedSource(), MODEL, chat=FORMAT, max_body_bytes=MAX_BODY).app()
        async with client_for(app) as client:
            answer = await client.post(path, content=written)
            return answer.status_code, answer.json()

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("messages", "on_loop"),
    [
        ([USER] * 3, True),
        ([USER, {"role": "assistant", "tool_calls": [{}]}, {"role": "tool"}] * 30, False),
        ([USER, {"role": "assistant", "tool_calls": [{}] * 100}], False),
    ],
)
def test_a_conversation_of_many_messages_or_calls_is_written_on_a_thread(
    messages: list[Any], on_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _threads(monkeypatch, FORMAT, "encode")
    _post("/v1/chat/completions", {"messages": messages})
    assert seen == [on_loop]


@pytest.mark.parametrize(("num_calls", "on_loop"), [(10, True), (8 * 2048, False)])
def test_a_small_body_of_many_objects_is_parsed_on_the_thread_for_large_bodies(
    num_calls: int, on_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {"role": "assistant", "tool_calls": [{}] * (num_calls // 8)}
    body = {"messages": [USER, *[answer] * 8, {"role": "user"}]}
    assert len(json.dumps(body, separators=(",", ":"))) < SMALL_BODY
    seen = _threads(monkeypatch, token_endpoints, "parse_chat")
    _post("/v1/chat/completions", body)
    assert seen == [on_loop]


def _tools(path: str) -> list[dict[str, Any]]:
    """Return 200 tools of 2 KB each; those of Responses get long names of their namespace."""
    described = {"name": "f", "description": "la " * 700}
    match path:
        case "chat/completions":
            return [
                {"type": "function", "function": described | {"name": f"f{n}"}} for n in range(200)
            ]
        case "messages":
            schema = {"input_schema": {"type": "object"}}
            return [described | schema | {"name": f"f{n}"} for n in range(200)]
    inner = [described | {"type": "function", "name": f"f{n}"} for n in range(100)]
    return [{"type": "namespace", "name": name, "tools": inner} for name in ("a", "b" * 100_000)]


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_tools_are_counted_before_they_are_tokenized(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Callable[..., Any]:
        raise AssertionError("these tools must not be tokenized at once")

    monkeypatch.setattr(FORMAT, "encode", refuse)
    conversation = {"input": "a"} if path == "responses" else {"messages": [USER], "max_tokens": 5}
    status, answer = _post(f"/v1/{path}", conversation | {"tools": _tools(path)})
    assert (status, "prompt is too long: at least" in answer["error"]["message"]) == (400, True)
