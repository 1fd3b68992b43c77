"""Lines of batch jobs are answered as requests over HTTP are, at every endpoint that a job may
have.
"""

import asyncio
import json
import re
from dataclasses import replace
from typing import Any, get_args

import pytest
from scripted_token_source import SAID, ScriptedSource, client_for, http_app_for
from tokenizer_files import SENTENCEPIECE

from tramontane.cluster.http.line_executor import HANDLERS, LineExecutor
from tramontane.cluster.serving.batch_replica import BATCH_PRIORITY
from tramontane.proto.errors import ParameterError, UnknownModelError
from tramontane.proto.jobs import Endpoint
from tramontane.proto.request import Identity
from tramontane.router.openai.request_context import RequestStats, RequestTokenSource
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate

TOKENIZER = SentencePieceTokenizer(SENTENCEPIECE["v3"])
MODEL = ServedModel("demo", TOKENIZER, 512, 16, TOKENIZER.vocab_size)
CHAT_FORMAT = MistralChatTemplate.from_sentencepiece(SENTENCEPIECE["v3"])
SAYS = TOKENIZER.encode(SAID)[1:]
BODIES: dict[Endpoint, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "suffix": "b", "max_tokens": 64},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/fim/completions": {"prompt": "a", "suffix": "b", "n": 2},
    "/v1/responses": {"input": "a", "instructions": "b"},
}


def test_every_endpoint_of_jobs_is_tested() -> None:
    assert set(BODIES) == set(HANDLERS) == set(get_args(Endpoint))


@pytest.mark.parametrize("path", BODIES)
def test_a_line_is_answered_as_over_http(path: Endpoint) -> None:
    body = BODIES[path] | {"seed": 1}

    async def scenario() -> tuple[dict[str, Any], dict[str, Any]]:
        of_line, over_http = ScriptedSource(SAYS), ScriptedSource(SAYS)
        answer = await HANDLERS[path](
            LineExecutor(MODEL, CHAT_FORMAT, of_line), json.dumps(body).encode()
        )
        async with client_for(
            http_app_for(over_http, model=MODEL, chat=CHAT_FORMAT).app()
        ) as client:
            expected = (await client.post(path, json=body)).json()
        ours, theirs = (
            [(spec.prompt_ids, spec.sampling) for spec in source.requested[0]]
            for source in (of_line, over_http)
        )
        assert ours == theirs
        return answer, expected

    answer, expected = asyncio.run(scenario())
    chance = dict.fromkeys(("id", "created", "created_at", "timings"))
    ours, theirs = (
        re.sub(r"msg_[0-9a-z]+_", "msg_", json.dumps(each | chance, sort_keys=True))
        for each in (answer, expected)
    )
    assert ours == theirs
    assert SAID in json.dumps(answer)


@pytest.mark.parametrize("path", BODIES)
def test_a_line_is_no_stream_and_names_no_other_model(path: Endpoint) -> None:
    executor = LineExecutor(MODEL, CHAT_FORMAT, ScriptedSource(SAYS))
    for more, error in (
        ({"stream": True}, ParameterError),
        ({"model": "other"}, UnknownModelError),
    ):
        with pytest.raises(error):
            asyncio.run(HANDLERS[path](executor, json.dumps(BODIES[path] | more).encode()))


def test_a_line_waits_for_others_and_shares_pages_with_its_own_tenant() -> None:
    source = ScriptedSource(SAYS)
    own = RequestTokenSource(source, Identity(0, "own"), priority=BATCH_PRIORITY)
    executor = LineExecutor(MODEL, CHAT_FORMAT, own)
    for path, body in BODIES.items():
        asyncio.run(HANDLERS[path](executor, json.dumps(body).encode()))
    found = {(request.cache_salt, request.priority > 0) for request in source.requests}
    assert found == {("own", True)}


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_of_a_line_are_counted_or_refused(path: Endpoint) -> None:
    model = replace(MODEL, counts=RequestStats())
    body = json.dumps(BODIES[path] | {"tone": "red", "user": "me", "size": None}).encode()
    asyncio.run(HANDLERS[path](LineExecutor(model, CHAT_FORMAT, ScriptedSource(SAYS)), body))
    assert model.counts.ignored_fields == 2
    source = ScriptedSource(SAYS)
    strict = LineExecutor(model, CHAT_FORMAT, source, refuses_unknown=True)
    with pytest.raises(ParameterError, match=r"^tone is not a parameter of this endpoint$"):
        asyncio.run(HANDLERS[path](strict, body))
    assert source.requested == []
    known = json.dumps(BODIES[path] | {"user": "me", "tone": None}).encode()
    asyncio.run(HANDLERS[path](strict, known))
    assert model.counts.ignored_fields == 3
