"""Fields of vLLM's server that concern the prompt, its cache and the tokens of an answer."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from scripted_token_source import CHAT, CONTEXT, MODEL, SAID_IDS, TOKENIZER, ScriptedSource

from tramontane.proto.errors import ParameterError
from tramontane.proto.request import FinishReason, Identity, Request, SamplingParams
from tramontane.router.openai import served_model
from tramontane.router.openai.chat_completion import prepare_chat
from tramontane.router.openai.chat_request import parse_chat
from tramontane.router.openai.completion import prepare_completion
from tramontane.router.openai.completion_request import parse_completion
from tramontane.router.openai.request_context import RequestTokenSource
from tramontane.router.scheduling.prefix_cache import cache_salt
from tramontane.router.tokenization import tokenizer

LONG = "What news? " * 100
HELLO = {"messages": [{"role": "user", "content": "Good morrow"}]}
EOS = 2
MODEL_WITH_EOS = replace(MODEL, eos_token_ids=frozenset({EOS}))


def _completed(model: served_model.ServedModel = MODEL, **fields: Any) -> tuple[Request, Any]:
    """The request that the source gets, and the answer."""
    source = ScriptedSource()

    async def scenario() -> Any:
        request = parse_completion(json.dumps({"prompt": LONG} | fields).encode())
        answer = await prepare_completion(model, request, 0.0)
        return await answer.run(RequestTokenSource(source, Identity(0, "tenant")))

    answer = asyncio.run(scenario())
    return source.requests[0], answer


def _chatted(model: served_model.ServedModel = MODEL, **fields: Any) -> tuple[Request, Any]:
    source = ScriptedSource()

    async def scenario() -> Any:
        answer = await prepare_chat(model, CHAT, parse_chat(json.dumps(HELLO | fields).encode()), 0)
        return await answer.run(RequestTokenSource(source, Identity(0, "tenant")))

    answer = asyncio.run(scenario())
    return source.requests[0], answer


def _prompt(request: Request) -> tuple[int, ...]:
    return request.sequences[0].prompt_ids


def _sampling(request: Request) -> SamplingParams:
    return request.sequences[0].sampling


# truncate_prompt_tokens


@pytest.mark.parametrize(("num_kept", "num_left"), [(5, 5), (1, 1), (-1, CONTEXT - 16)])
def test_the_last_tokens_of_a_prompt_are_kept(num_kept: int, num_left: int) -> None:
    whole = TOKENIZER.encode(LONG)
    assert len(whole) > CONTEXT
    for prompt in (LONG, list(whole)):
        request, answer = _completed(prompt=prompt, truncate_prompt_tokens=num_kept)
        assert _prompt(request) == whole[-num_left:]
        assert answer["usage"]["prompt_tokens"] == num_left


def test_a_short_prompt_is_not_cut() -> None:
    for num_kept in (-1, 50):
        request, _ = _completed(prompt="Good morrow", truncate_prompt_tokens=num_kept)
        assert _prompt(request) == TOKENIZER.encode("Good morrow")
    with pytest.raises(ParameterError, match="tokens"):
        _completed()


def test_a_prompt_that_leaves_no_room_for_its_answer_keeps_one_token() -> None:
    request, _ = _completed(truncate_prompt_tokens=-1, max_tokens=10**6)
    assert _prompt(request) == TOKENIZER.encode(LONG)[-1:]


def test_no_more_than_the_context_is_kept_of_a_prompt() -> None:
    with pytest.raises(ParameterError, match=f"the prompt is too long: {CONTEXT} tokens"):
        _completed(truncate_prompt_tokens=2**31 - 1)


def test_an_echo_is_of_the_tokens_that_were_kept() -> None:
    _, answer = _completed(truncate_prompt_tokens=3, echo=True, max_tokens=1)
    kept = TOKENIZER.decode(TOKENIZER.encode(LONG)[-3:])
    assert answer["choices"][0]["text"].startswith(kept)
    assert len(answer["choices"][0]["text"]) < 20


@pytest.mark.parametrize(
    "text", ["What news? " * 5000, "a" * 30_000, "\u00e9\U0001f600 x\n" * 4000]
)
@pytest.mark.parametrize("num_tokens", [1, 100])
def test_the_end_of_a_long_text_has_the_tokens_of_the_whole(text: str, num_tokens: int) -> None:
    assert TOKENIZER.encode_end(text, num_tokens) == TOKENIZER.encode(text)[-num_tokens:]


def test_the_cut_of_a_long_text_changes_none_of_its_last_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizer, "CHARS_PER_TOKEN", 2)
    text = " ".join(word * 3 for word in LONG.split()) + " marvellous kings"
    whole = TOKENIZER.encode(text)
    for num_tokens in range(1, 60):
        assert TOKENIZER.encode_end(text, num_tokens) == whole[-num_tokens:]


def test_of_a_long_text_only_the_end_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    encode = TOKENIZER._encode

    def noted(text: str) -> tuple[int, ...]:
        lengths.append(len(text))
        return encode(text)

    monkeypatch.setattr(TOKENIZER, "_encode", noted)
    TOKENIZER.encode_end("What news? " * 100_000, 10)
    assert max(lengths) < 2000


@pytest.mark.parametrize(
    "fields",
    [
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"truncate_prompt_tokens": "5"},
        {"truncate_prompt_tokens": 5, "suffix": "x"},
    ],
)
def test_other_cuts_are_refused(fields: Mapping[str, Any]) -> None:
    with pytest.raises(ParameterError) as refused:
        _completed(**fields)
    assert refused.value.parameter == "truncate_prompt_tokens"


def test_a_chat_is_not_cut() -> None:
    with pytest.raises(ParameterError, match="only prompts of /v1/completions are cut"):
        _chatted(truncate_prompt_tokens=5)


# cache_salt


def test_a_salt_is_joined_with_the_clients_own() -> None:
    for ask in (lambda **fields: _completed(prompt="a", **fields), _chatted):
        plain, salted = ask()[0], ask(cache_salt="s")[0]
        assert plain.cache_salt == "tenant"
        assert salted.cache_salt == Identity(0, "tenant").cache_salt("s") != plain.cache_salt
        assert ask(cache_salt="s")[0].cache_salt == salted.cache_salt
        assert ask(cache_salt="other")[0].cache_salt != salted.cache_salt
        assert ask(cache_salt="")[0].cache_salt == ask(cache_salt=None)[0].cache_salt == "tenant"


def test_only_equal_salts_of_one_tenant_share_blocks() -> None:
    requests = [(tenant, own) for tenant in ("", "a", "b") for own in ("", "a", "b", "a b")]
    apart = [
        cache_salt("m", Identity(0, each[0]).cache_salt(each[1]), share_prefixes=False)
        for each in requests
    ]
    assert len(set(apart)) == len(requests)
    shared = [
        cache_salt("m", Identity(0, each[0]).cache_salt(each[1]), share_prefixes=True)
        for each in requests
    ]
    assert len(set(shared)) == 4, "as many as salts"
    assert shared[:4] * 3 == shared
    assert apart[0] == "m ", "as without salts"


def test_a_salt_is_bounded() -> None:
    for salt in ("x" * 257, 5, ["a"], "\ud800"):
        with pytest.raises(ParameterError) as refused:
            _completed(prompt="a", cache_salt=salt)
        assert refused.value.parameter in ("cache_salt", None)


# allowed_token_ids


@pytest.mark.parametrize("ask", [_completed, _chatted])
def test_allowed_tokens_are_a_grammar(ask: Any) -> None:
    prompt = {"prompt": "a"} if ask is _completed else {}
    for allowed, ignores in (([7, 9], True), ([7, EOS], False)):
        request, _ = ask(MODEL_WITH_EOS, allowed_token_ids=allowed, **prompt)
        listed = ",".join(map(str, sorted(allowed)))
        assert _sampling(request).grammar == f"start: answer\nanswer: body\nbody: <[{listed}]>+"
        assert _sampling(request).ignore_eos is ignores, "no other token ends the answer"
    assert not _sampling(ask(MODEL_WITH_EOS, **prompt)[0]).ignore_eos


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids"),
        ({"allowed_token_ids": list(range(1025))}, "1024"),
        ({"allowed_token_ids": [10**6]}, "outside the model's vocabulary"),
        (
            {"allowed_token_ids": [1], "response_format": {"type": "json_object"}},
            "allowed_token_ids and response_format both say what the answer must be",
        ),
        ({"allowed_token_ids": [1], "guided_regex": "a"}, "guided_regex and allowed_token_ids"),
    ],
)
@pytest.mark.parametrize("ask", [_completed, _chatted])
def test_other_allowed_tokens_are_refused(ask: Any, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ParameterError, match=reason):
        ask(**({"prompt": "a"} if ask is _completed else {}) | fields)


def test_bad_words_are_refused_with_a_way_out() -> None:
    assert _completed(prompt="a", bad_words=[])
    with pytest.raises(ParameterError, match="make single tokens unlikely with logit_bias"):
        _completed(prompt="a", bad_words=["x"])


# log-probabilities


def test_an_answer_of_any_length_ends_where_it_has_as_many_log_probabilities_as_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served_model, "MAX_WHOLE_LOGPROBS", 60)
    monkeypatch.setattr(served_model, "MAX_STREAMED_LOGPROBS", 90)
    for fields, max_tokens in (
        ({"top_logprobs": 4}, 12),
        ({"top_logprobs": 4, "n": 3}, 4),
        ({"top_logprobs": 20, "n": 3}, 1),
        ({}, 60),
    ):
        request, answer = _chatted(logprobs=True, **fields)
        assert _sampling(request).max_tokens == max_tokens
        num_made = len(answer["choices"][0]["logprobs"]["content"])
        assert num_made == min(max_tokens, len(SAID_IDS))
    short, answer = _chatted(logprobs=True, top_logprobs=20)
    assert answer["choices"][0]["finish_reason"] == FinishReason.LENGTH
    assert _sampling(short).max_tokens == 2
    assert _sampling(_chatted()[0]).max_tokens > 60, "without log-probabilities nothing changes"
    with pytest.raises(ParameterError, match="one request may ask for at most 60"):
        _chatted(logprobs=True, max_tokens=61)
