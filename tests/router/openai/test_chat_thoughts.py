"""Chats with models that think: thoughts are fields of their own, in whole answers and in streams,
however these are cut.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_token_source import ScriptedSource
from thinking_models import KINDS, Kind, ThinkingModel, thinking_model

from tramontane.proto.errors import ParameterError
from tramontane.router.openai.chat_completion import prepare_chat
from tramontane.router.openai.chat_request import parse_chat
from tramontane.router.openai.response_models import ChatAnswer, to_json
from tramontane.router.openai.resume_state import ResumeState
from tramontane.router.tokenization.chat import Thought
from tramontane.router.tokenization.reasoning_parser import ReasoningParser

HELLO = {"messages": [{"role": "user", "content": "17 * 23?"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def _prepare(thinker: ThinkingModel, body: dict[str, Any], state: ResumeState | None = None) -> Any:
    request = parse_chat(to_json(HELLO | body).encode())
    return prepare_chat(thinker.model, thinker.chat, request, 0.0, state)


def _whole(
    thinker: ThinkingModel, token_ids: Sequence[int], body: dict[str, Any], source: Any = None
) -> dict[str, Any]:
    async def scenario() -> dict[str, Any]:
        answer: dict[str, Any] = await (await _prepare(thinker, body)).run(
            source or ScriptedSource(token_ids)
        )
        return answer

    answer = asyncio.run(scenario())
    ChatAnswer.model_validate_json(to_json(answer))
    return answer


class _Streamed:
    """What a client puts together, and the usage at the end."""

    def __init__(self) -> None:
        self.content = self.reasoning = ""
        self.kinds: list[str] = []
        self.token_ids: list[int] = []
        self.scores: dict[str, list[str]] = {"content": [], "reasoning": []}
        self.finish: str | None = None
        self.usage: dict[str, Any] = {}

    def add(self, change: dict[str, Any]) -> None:
        delta = change["delta"]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        self.content += delta.get("content", "")
        self.reasoning += delta.get("reasoning", "")
        self.kinds += [name for name in ("reasoning", "content") if name in delta]
        self.token_ids += change.get("token_ids", [])
        for name, tokens in self.scores.items():
            tokens += [token["token"] for token in (change["logprobs"] or {}).get(name, ())]
        self.finish = change["finish_reason"] or self.finish


async def _stream(
    thinker: ThinkingModel,
    token_ids: Sequence[int],
    sizes: Sequence[int],
    body: dict[str, Any],
    dies_after: int | None = None,
) -> _Streamed:
    """Stream an answer; ``dies_after`` so many changes another ingress continues it."""
    streamed, state = _Streamed(), ResumeState()
    body = body | {"stream": True, "return_token_ids": True}
    for life in (dies_after, None):
        if state.choices and all(choice.finish for choice in state.choices.values()):
            break
        answer = await _prepare(thinker, body, state)
        async with aclosing(
            answer.generation.stream(ScriptedSource(token_ids, sizes=sizes))
        ) as batches:
            number = 0
            async for changes in batches:
                for change in changes:
                    streamed.add(answer.choice(change))
                state.add(answer.generation.take_updates())
                number += 1
                if number == life:
                    break
        streamed.usage = answer.usage_chunk()["usage"]
        state.num_lost_ingresses += 1
        if dies_after is None:
            break
    return streamed


CHUNKS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "a",
        " b",
        "\n",
        "\n\n",
        "STOP",
        "ST",
        "OP",
        "<",
        "</thin",
        "\u00e9\U0001f642",
    ]
)
SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=12)


@settings(deadline=None, max_examples=examples(250))
@given(
    said=st.lists(CHUNKS, min_size=1, max_size=12).map("".join),
    kind=st.sampled_from(KINDS),
    sizes=SIZES,
    stop=st.booleans(),
    logprobs=st.booleans(),
    num_lost=st.integers(0, 3),
    dies_after=st.none() | st.integers(1, 12),
)
def test_streams_have_the_two_texts_of_whole_answers_wherever_they_are_cut_and_continued(
    said: str,
    kind: Kind,
    sizes: list[int],
    stop: bool,
    logprobs: bool,
    num_lost: int,
    dies_after: int | None,
) -> None:
    thinker = thinking_model(kind)
    ids = thinker.say(said)
    ids = ids[: max(len(ids) - num_lost, 1)]
    body: dict[str, Any] = {
        **({"stop": "STOP"} if stop else {}),
        "logprobs": logprobs,
        "max_tokens": 400,
    }
    answer = _whole(thinker, ids, body | {"return_token_ids": True})
    [choice] = answer["choices"]
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"]
    streamed = asyncio.run(_stream(thinker, ids, sizes, body, dies_after))
    assert (streamed.content, streamed.reasoning or None) == (
        message["content"],
        message["reasoning"],
    )
    assert (streamed.finish, streamed.token_ids) == (choice["finish_reason"], choice["token_ids"])
    assert streamed.usage == answer["usage"]
    scores = {
        name: [token["token"] for token in (choice["logprobs"] or {}).get(name, ())]
        for name in streamed.scores
    }
    assert streamed.scores == scores
    # The texts are the parser's, of which the content ends before the stop string.
    form = thinker.chat.reasoning_format
    assert form is not None
    parser = ReasoningParser(form, thinker.tokenizer, is_open=thinker.is_open)
    splits = [parser.push(token_id) for token_id in choice["token_ids"]] + [parser.finish()]
    content = "".join(split.content for split in splits)
    assert message["content"] == (content.partition("STOP")[0] if stop else content)
    if not (stop and "STOP" in content):
        assert message["reasoning"] == ("".join(split.thought for split in splits) or None)
        places = [place for split in splits for place in split.places]
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == sum(
            place.in_thought for place in places
        )
        if logprobs:
            assert len(scores["reasoning"]) == sum(place.in_thought for place in places)
            assert len(scores["content"]) + len(scores["reasoning"]) == len(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_thought_is_a_field_of_its_own(kind: Kind) -> None:
    thinker = thinking_model(kind)
    said = (
        "17 * 20 = 340, and 51.</think>391"
        if thinker.is_open
        else "<think>17 * 20 = 340, and 51.</think>391"
    )
    answer = _whole(thinker, thinker.say(said), {})
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "391",
        "refusal": None,
        "reasoning_content": "17 * 20 = 340, and 51.",
        "reasoning": "17 * 20 = 340, and 51.",
    }
    usage = answer["usage"]
    num_content = (
        usage["completion_tokens"] - usage["completion_tokens_details"]["reasoning_tokens"]
    )
    assert 1 <= num_content <= len(thinker.text_ids("391"))
    if kind == "tekken":
        assert num_content == len(thinker.text_ids("391"))


def test_without_a_thought_its_fields_are_null() -> None:
    thinker = thinking_model("tekken")
    answer = _whole(thinker, thinker.say("391"), {})
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == (
        "391",
        None,
        None,
    )
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_limit_inside_a_thought_leaves_an_empty_answer(kind: Kind) -> None:
    thinker = thinking_model(kind)
    ids = thinker.say("17 * 20 is" if thinker.is_open else "<think>17 * 20 is")
    answer = _whole(thinker, (*ids, *ids), {"max_tokens": len(ids)})
    [choice] = answer["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert choice["message"]["reasoning"] == "17 * 20 is"
    assert (
        answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        == answer["usage"]["completion_tokens"]
        == len(ids)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_ends_the_answer_and_not_a_thought(kind: Kind) -> None:
    thinker = thinking_model(kind)
    said = "One END, two END</think>\n\nthree END four"
    answer = _whole(
        thinker,
        thinker.say(said if thinker.is_open else "<think>" + said),
        {"stop": ["END", "\n\n"][: 1 + (kind != "tekken")]},
    )
    [choice] = answer["choices"]
    assert choice["message"]["reasoning"] == "One END, two END"
    assert choice["message"]["content"].strip() == "three"
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("thinks", [True, False])
def test_a_stop_token_has_no_text_and_belongs_to_what_it_ends(thinks: bool) -> None:
    thinker = thinking_model("tekken")
    text, last = thinker.text_ids("hm"), thinker.text_ids("!")
    ids = (*(thinker.say("<think>") if thinks else ()), *text, *last)
    body = {"stop_token_ids": list(last), "logprobs": True}
    answer = _whole(thinker, ids, body, ScriptedSource(ids))
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == (
        ("", "hm") if thinks else ("hm", None)
    )
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == (
        len(ids) if thinks else 0
    )
    assert len(choice["logprobs"]["reasoning" if thinks else "content"]) == len(ids)


def test_every_choice_has_its_own_thought() -> None:
    thinker = thinking_model("tekken")
    answer = _whole(thinker, thinker.say("<think>hm</think>yes"), {"n": 2})
    texts = [
        (choice["message"]["reasoning"], choice["message"]["content"])
        for choice in answer["choices"]
    ]
    assert texts == [("hm", "yes")] * 2
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * (
        2 + len(thinker.text_ids("hm"))
    )


def test_tools_are_called_after_a_thought_and_not_in_one() -> None:
    thinker = thinking_model("tekken")
    calls, args = (thinker.tokenizer.control_id(name) for name in ("[TOOL_CALLS]", "[ARGS]"))
    assert calls is not None
    assert args is not None
    ids = (
        *thinker.say('<think>I call f with {"a": 1}.'),
        calls,  # in the thought it calls nothing
        *thinker.say(" Now.</think>"),
        calls,
        *thinker.text_ids("f"),
        args,
        *thinker.text_ids('{"a": 1}'),
    )
    [choice] = _whole(thinker, ids, {"tools": [TOOL]})["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert choice["message"]["reasoning"] == 'I call f with {"a": 1}. Now.'


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_thought_that_was_sent_open_is_continued(is_closed: bool) -> None:
    thinker = thinking_model("tekken")
    thought = {"type": "thinking", "thinking": "340 + ", "closed": is_closed}
    messages = [*HELLO["messages"], {"role": "assistant", "content": [thought], "prefix": True}]
    [choice] = _whole(
        thinker, thinker.say("391" if is_closed else "51</think>391"), {"messages": messages}
    )["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (
        None if is_closed else "51",
        "391",
    )


def test_log_probabilities_of_thoughts_are_a_list_apart() -> None:
    thinker = thinking_model("tekken")
    [choice] = _whole(
        thinker, thinker.say("<think>a</think>b"), {"logprobs": True, "top_logprobs": 1}
    )["choices"]
    assert [token["token"] for token in choice["logprobs"]["reasoning"]] == [
        "token_id:34",
        "a",
        "token_id:35",
    ]
    assert [token["token"] for token in choice["logprobs"]["content"]] == ["b"]
    [choice] = _whole(thinker, thinker.say("b"), {"logprobs": True})["choices"]
    assert set(choice["logprobs"]) == {"content", "refusal"}


@pytest.mark.parametrize(
    ("message", "complaint", "parameter"),
    [
        (
            {"content": [{"type": "thinking", "thinking": 5}]},
            "a thought must be as",
            "messages[1].content",
        ),
        (
            {"content": [{"type": "thinking", "thinking": "a", "closed": 1}]},
            "a thought must be as",
            "messages[1].content",
        ),
        (
            {"content": [{"type": "thinking", "thinking": "a", "close": True}]},
            "'close' is not a field of a part; did you mean closed",
            "messages[1].content",
        ),
        ({"reasoning": 5}, "it must be a text", "messages[1].reasoning"),
    ],
)
def test_thoughts_that_make_no_sense_are_refused(
    message: dict[str, Any], complaint: str, parameter: str
) -> None:
    body = {
        "messages": [
            *HELLO["messages"],
            {"role": "assistant", "content": "a"} | message,
            *HELLO["messages"],
        ]
    }
    with pytest.raises(ParameterError, match=complaint) as refused:
        parse_chat(to_json(body).encode())
    assert refused.value.parameter == parameter


@pytest.mark.parametrize(
    ("message", "thoughts", "content"),
    [
        ({"reasoning": "a", "reasoning_content": "b"}, "b", "a"),
        ({"reasoning": "b", "reasoning_content": ""}, "b", "a"),
        (
            {"reasoning": "a", "content": [{"type": "thinking", "thinking": "b", "closed": None}]},
            "b",
            "",
        ),
        (
            {"content": [{"type": "thinking", "thinking": "a"}, {"type": "image"}]},
            "a",
            "[image omitted]",
        ),
        (
            {"content": [{"type": "thinking", "thinking": [{"type": "image"}]}]},
            "[image omitted]",
            "",
        ),
    ],
)
def test_of_what_an_earlier_answer_has_twice_one_counts_and_what_is_not_text_has_a_name(
    message: dict[str, Any], thoughts: str, content: str
) -> None:
    messages = [HELLO["messages"][0], {"role": "assistant", "content": "a"} | message]
    made = parse_chat(to_json({"messages": messages}).encode()).conversation()[1]
    assert (made.thoughts, made.content) == (thoughts, content)
    assert all(part.closed for part in made.parts if isinstance(part, Thought))


def test_an_unknown_field_of_a_thought_is_ignored() -> None:
    content = [{"type": "thinking", "thinking": "a", "x": 1, "y": None}]
    messages = [HELLO["messages"][0], {"role": "assistant", "content": content}]
    parsed = parse_chat(to_json({"messages": messages}).encode())
    assert parsed.ignored == ("messages[].content[].x",)


def test_an_effort_has_no_effect_where_the_model_knows_none() -> None:
    thinker = thinking_model("tekken")
    answers = [
        _whole(thinker, thinker.say("<think>a</think>b"), more)["choices"]
        for more in ({}, {"reasoning_effort": "high"}, {"reasoning_effort": "none"})
    ]
    assert answers[0] == answers[1] == answers[2]
    with pytest.raises(ParameterError, match="it must be 'none', 'minimal'"):
        parse_chat(to_json(HELLO | {"reasoning_effort": "much"}).encode())
