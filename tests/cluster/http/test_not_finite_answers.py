"""What clients get of an answer whose logits are not finite: an error that says so, by every API,
and none of its tokens.
"""

import asyncio
import json
from typing import Any

import grpc
import httpx
import pytest
from event_loops import in_event_loop
from http_fuzz import check_error
from scripted_token_source import MODEL, SAID, TOKENIZER, ScriptedSource, client_for, http_app_for

from tramontane.client import AsyncClient
from tramontane.proto.errors import NotFiniteError
from tramontane.proto.grpc_messages import status_for
from tramontane.proto.request import FinishReason
from tramontane.router.grpc.handlers import add_inference
from tramontane.router.grpc.servicer import GrpcServicer
from tramontane.router.openai.errors import http_error_for

HELLO = [{"role": "user", "content": "Hello, who are you?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello, who are you?"},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": "Hello, who are you?"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
}
SCORE = {"prompt": "Hello", "echo": True, "logprobs": 1, "max_tokens": 0}
WHY = "the logits of its next token are not finite"


def _post(
    path: str, body: dict[str, Any], num_tokens: int = 0
) -> tuple[httpx.Response, dict[FinishReason, int]]:
    async def scenario() -> tuple[httpx.Response, dict[FinishReason, int]]:
        before = dict(MODEL.counts.finished)
        async with client_for(
            http_app_for(ScriptedSource(overflows_at=num_tokens)).app()
        ) as client:
            response = await client.post(path, json=body)
        return response, {
            reason: number - before[reason] for reason, number in MODEL.counts.finished.items()
        }

    return asyncio.run(scenario())


@pytest.mark.parametrize("num_tokens", [0, 2])
@pytest.mark.parametrize("path", BODIES)
def test_a_whole_answer_is_an_error(path: str, num_tokens: int) -> None:
    response, counted = _post(path, BODIES[path], num_tokens)
    assert response.status_code == 400
    assert WHY in check_error(response.content, path=path)["message"]
    assert counted == dict.fromkeys(FinishReason, 0) | {FinishReason.ERROR: 1}
    if path != "/v1/messages":  # Anthropic's errors have no code
        assert check_error(response.content)["code"] == "not_finite"


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_ends_with_the_error(path: str) -> None:
    response, _ = _post(path, BODIES[path] | {"stream": True}, 2)
    assert WHY in response.text
    assert "as its schema requires" not in response.text
    texts = response.text.split(WHY)
    # OpenAI's shape has it twice, once for Mistral's clients; two events of a response have it
    assert len(texts) == (2 if path == "/v1/messages" else 3)
    for token_id in ScriptedSource().token_ids[:2]:
        assert TOKENIZER.decoder().push(token_id).strip() in texts[0], (
            "what came before is delivered"
        )


def test_log_probabilities_of_a_prompt_are_an_error_too() -> None:
    response, _ = _post("/v1/completions", SCORE)
    assert (response.status_code, check_error(response.content)["code"]) == (400, "not_finite")


@in_event_loop
async def test_over_grpc() -> None:
    server = grpc.aio.server()
    add_inference(GrpcServicer(MODEL, ScriptedSource(overflows_at=2)), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            answer = aiter(client.generate("Hello", max_tokens=9))
            assert SAID.startswith((await anext(answer)).text.strip())
            await anext(answer)
            with pytest.raises(NotFiniteError, match=WHY):
                await anext(answer)
    finally:
        await server.stop(None)


def test_neither_a_line_of_a_job_nor_a_client_tries_it_again() -> None:
    error = NotFiniteError(WHY)
    shape, status = http_error_for(error), status_for(error)
    assert (shape.status, shape.code) == (400, "not_finite")
    assert json.loads(json.dumps(shape.body(str(error))))["error"]["message"] == WHY
    assert status.code is grpc.StatusCode.INVALID_ARGUMENT
    assert b"NOT_FINITE" in status.details
    assert b"RetryInfo" not in status.details
