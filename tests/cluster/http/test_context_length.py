"""A prompt that is longer than the context: coding agents recognize the error by its code or by its
words, and shorten their history.
"""

import asyncio
import re
from typing import Any

import pytest
from scripted_token_source import ScriptedSource, client_for, http_app_for
from tokenizer_files import SENTENCEPIECE

from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate

TOKENIZER = SentencePieceTokenizer(SENTENCEPIECE["v3"])
CONTEXT = 64
MODEL = ServedModel("demo", TOKENIZER, CONTEXT, 16, TOKENIZER.vocab_size)
MAX_BODY = 8 * 2**20
FORMAT = MistralChatTemplate.from_sentencepiece(SENTENCEPIECE["v3"])
# What Anthropic's and OpenAI's APIs say, and clients search for.
WORDS = (
    re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE),
    re.compile(r"This model's maximum context length is (\d+) tokens"),
)
# More tokens than the context; more than twice as many, found in pieces; more characters than so
# many tokens may have.
TEXTS = ("la " * CONTEXT, "la " * 120_000, "la " * 10**6)
PATHS = ("completions", "chat/completions", "responses", "messages")


def _refused(path: str, text: str) -> tuple[int, dict[str, Any]]:
    field: dict[str, Any] = {
        "completions": {"prompt": text},
        "responses": {"input": text},
    }.get(path, {"messages": [{"role": "user", "content": text}]})

    async def scenario() -> tuple[int, dict[str, Any]]:
        app = http_app_for(ScriptedSource(), MODEL, chat=FORMAT, max_body_bytes=MAX_BODY).app()
        async with client_for(app) as client:
            limit = "max_output_tokens" if path == "responses" else "max_tokens"
            body = {limit: 2, **field, "model": "demo"}
            answer = await client.post(f"/v1/{path}", json=body)
            return answer.status_code, answer.json()

    return asyncio.run(scenario())


@pytest.mark.parametrize("text", TEXTS, ids=["by one", "by far", "by its characters"])
@pytest.mark.parametrize("path", PATHS)
def test_the_error_has_the_words_that_agents_look_for(path: str, text: str) -> None:
    status, answer = _refused(path, text)
    assert status == 400
    message = answer["error"]["message"]
    for words in WORDS:
        assert words.search(message), message
    taken, most = map(int, WORDS[0].search(message).groups())
    assert taken > most == CONTEXT - 1
    if path != "messages":
        assert answer["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "name"), [("completions", "prompt"), ("chat/completions", "messages")]
)
def test_the_error_names_the_parameter(path: str, name: str) -> None:
    for text in TEXTS:
        assert _refused(path, text)[1]["error"]["param"] == name
    assert _refused("responses", TEXTS[0])[1]["error"]["param"] == "input"
