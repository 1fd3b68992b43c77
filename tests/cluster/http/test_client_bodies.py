"""What widely used clients send is answered, or refused because it would change an answer and
cannot be honored.

``client_bodies.json`` has the bodies of requests with the client's version. "recorded": the client
sent it to a server that records. "read": written after the client's source. "ignored": a field that
has no effect and that the response names.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from http_fuzz import check_error
from scripted_token_source import SAID, ScriptedSource, client_for, http_app_for
from tokenizer_files import SENTENCEPIECE

from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate

BODIES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "support" / "client_bodies.json").read_text("utf-8")
)
CLIENTS = {
    *(
        "guidellm",
        "aiperf",
        "vllm bench serve",
        "lm-eval",
        "AutoGen",
        "langchain-openai",
        "langchain-mistralai",
    ),
    *("openai-agents", "LiteLLM", "Open WebUI", "mistralai"),
}
TOKENIZER = SentencePieceTokenizer(SENTENCEPIECE["v3"])  # whose format has tools and FIM
MODEL = ServedModel("demo", TOKENIZER, 512, 16, TOKENIZER.vocab_size)
CHAT = MistralChatTemplate.from_sentencepiece(SENTENCEPIECE["v3"])
SAYS = TOKENIZER.encode(SAID)[1:]


def _post(path: str, body: dict[str, Any]) -> tuple[int, str, str]:
    """The status, the text and the warning of the response."""

    async def scenario() -> tuple[int, str, str]:
        app = http_app_for(ScriptedSource(SAYS), MODEL, chat=CHAT).app()
        async with client_for(app) as client:
            response = await client.post(path, json=body)
            return response.status_code, response.text, response.headers.get("warning", "")

    return asyncio.run(scenario())


def test_every_client_is_there() -> None:
    assert {body["client"].rpartition(" ")[0] for body in BODIES} == CLIENTS
    assert {body["how"] for body in BODIES} == {"recorded", "read"}


def test_the_bodies_name_no_place_of_the_machine_that_recorded_them() -> None:
    assert not any(
        place in json.dumps(BODIES)
        for place in ("/tmp", "/home", "/root", "/work", "localhost", "127.0.0.1")
    )


@pytest.mark.parametrize("sent", BODIES, ids=lambda sent: sent["client"].partition(" ")[0])
def test_a_body_is_answered_or_refused_for_its_reason(sent: dict[str, Any]) -> None:
    status, text, warning = _post(sent["path"], sent["body"])
    if "refused" in sent:
        assert status == 400, text
        assert sent["reason"] in check_error(text.encode(), param=sent["refused"])["message"]
        return
    assert status == 200, text
    assert sent.get("ignored", "") in warning
    if sent["body"].get("stream"):
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        assert events.pop() == "[DONE]"
        assert not any("error" in json.loads(event) for event in events)
        if sent["body"].get("stream_options", {}).get("continuous_usage_stats"):
            assert all(json.loads(event)["usage"]["total_tokens"] for event in events)
    else:
        assert json.loads(text)["choices"]
