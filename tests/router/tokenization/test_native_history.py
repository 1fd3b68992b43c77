"""What mistral-common takes is written as mistral-common writes it. An answer of the server goes
back into every format, as its own tokens where the format can write it.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import llguidance
import pytest
from chat_formats import FORMATS, MISTRALS, Format, chat_format
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from odd_histories import Json, body_of, call, calls, result, said, text, thought, user
from scripted_token_source import ScriptedSource

from tramontane.router.openai.chat_completion import prepare_chat
from tramontane.router.openai.chat_request import parse_chat
from tramontane.router.openai.response_models import to_json
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.structured.grammar import ThoughtRules, Tool, build_grammar
from tramontane.router.tokenization.history import mistral_id
from tramontane.workers.sampling.structured_output import NO_FORCING, Vocabulary

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "</s>", "parameters": {}}}
    for name in ("f", "get-it_2")
]
HELLO = user("17 * 23?")
WORDS = st.text("ab \n\u00e9.[]</s>{}\"'\\", max_size=8)
SPOKEN = WORDS.map(lambda written: f"a{written}b")  # it has no spaces at its ends
VALUES = st.none() | st.booleans() | st.integers(-99, 99) | WORDS
NAMES = st.text("abc_", min_size=1, max_size=3)
OBJECTS = st.dictionaries(NAMES, VALUES | st.lists(VALUES, max_size=2), max_size=3)
ARGUMENTS = OBJECTS.map(lambda value: json.dumps(value, ensure_ascii=False))
CALL_IDS = st.text("abcdefDEF123", min_size=9, max_size=9)


def _number(kind: str) -> int:
    return int(kind.rpartition("v")[2])


# Conversations that mistral-common takes


class _Valid:
    """Draws what a version can have."""

    def __init__(self, kind: str, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.version, self.draw = _number(kind), draw
        self.has_tools = self.version > 1 and draw(st.booleans())

    def conversation(self) -> list[Json]:
        made = [said("system", self._system())] if self.draw(st.booleans()) else []
        for _ in range(self.draw(st.integers(1, 3))):
            made += [user(self.draw(WORDS)) for _ in range(self.draw(st.integers(1, 2)))]
            made += self._answer()
        if self.draw(st.booleans()):
            return made[
                : next(i for i in reversed(range(len(made))) if made[i]["role"] == "user") + 1
            ]
        if made[-1]["role"] == "assistant":
            made[-1]["prefix"] = True
        return made

    def _system(self) -> Any:
        written = self.draw(SPOKEN)
        if self.version != 13 or self.draw(st.booleans()):
            return written
        return [text(written), thought(self.draw(WORDS)), text("so")]

    def _answer(self) -> list[Json]:
        made: list[Json] = []
        for _ in range(self.draw(st.integers(0, 2)) if self.has_tools else 0):
            ids = self.draw(st.lists(CALL_IDS, min_size=1, max_size=3, unique=True))
            ids = ids[:1] if self.version == 2 else ids
            made.append(calls(*(call(each, self.draw(ARGUMENTS)) for each in ids)))
            if self.version >= 7 and self.draw(st.booleans()):
                made[-1]["content"] = self._content()
            name = {"name": "f"} if self.draw(st.booleans()) else {}
            results = self.draw(st.permutations(ids))
            made += [result(each, self.draw(WORDS | ARGUMENTS), **name) for each in results]
        return (
            made
            if made and self.draw(st.booleans())
            else [*made, said("assistant", self._content())]
        )

    def _content(self) -> Any:
        written = self.draw(SPOKEN)
        if self.version < 13 or self.draw(st.booleans()):
            return written
        opened = thought(self.draw(WORDS), closed=self.draw(st.booleans()))
        return [opened, text(written)] if self.draw(st.booleans()) else [opened]


def _reference(form: Format, messages: Sequence[Json], tools: Sequence[Json]) -> list[int]:
    assert form.reference is not None
    wanted: Any = {"messages": messages, "tools": tools or None, "model": "m"}
    ids: list[int] = form.reference.encode_chat_completion(ChatCompletionRequest(**wanted)).tokens
    return ids


@pytest.mark.parametrize("kind", MISTRALS)
@settings(deadline=None, max_examples=examples(120))
@given(data=st.data())
def test_what_mistral_common_takes_has_its_tokens(kind: str, data: st.DataObject) -> None:
    valid = _Valid(kind, data.draw)
    messages = valid.conversation()
    tools = TOOLS if valid.has_tools else []
    form = chat_format(kind)
    expected = _reference(form, messages, tools)
    ids = form.chat.encode(parse_chat(body_of(messages)).conversation(), tools)
    assert list(ids) == expected


# Answers of the server that come back


CALLING = (*MISTRALS[1:], "strict", "parts")


@cache
def _vocabulary(kind: str) -> Vocabulary:
    return Vocabulary(chat_format(kind).tokenizer.vocabulary())


@cache
def _grammar(kind: str) -> str:
    chat = chat_format(kind).chat
    form, tools = chat.reasoning_format, [Tool.model_validate(each) for each in TOOLS]
    rules = None if form is None else ThoughtRules(form, is_open=False)
    return build_grammar(None, tools, None, chat.tool_format, thoughts=rules)


def _is_allowed(kind: str, ids: Sequence[int]) -> bool:
    matcher = llguidance.LLMatcher(
        _vocabulary(kind).tokenizer, NO_FORCING + _grammar(kind), log_level=0
    )
    return matcher.try_consume_tokens(list(ids)) == len(ids) and matcher.is_accepting()


class _Answer:
    """Draws an answer in the tool format of a chat format: the tokens of its thought, its text and
    its calls.
    """

    def __init__(self, form: Format, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.form = form
        self.thought: list[int] = []
        self.text: tuple[int, ...] = ()
        markers = form.chat.reasoning_format
        if markers is not None and draw(st.booleans()):
            assert markers.begin_id is not None
            assert markers.end_id is not None
            self.thought = [markers.begin_id, *self._encoded(draw(SPOKEN)), markers.end_id]
        self.calls = draw(
            st.lists(
                st.tuples(st.sampled_from(["f", "get-it_2"]), ARGUMENTS, st.none() | CALL_IDS),
                max_size=3,
            )
        )
        if not self.calls or draw(st.booleans()):
            self.text = self._encoded(draw(SPOKEN))

    @property
    def ids(self) -> list[int]:
        return [*self.thought, *self.text, *self.call_ids]

    @property
    def call_ids(self) -> list[int]:
        tools = self.form.chat.tool_format
        assert tools is not None
        if not self.calls:
            return []
        if tools.args is None:
            listed = [
                {"name": name, "arguments": json.loads(given)} for name, given, _ in self.calls
            ]
            return [tools.calls, *self._encoded(json.dumps(listed, ensure_ascii=False))]
        made: list[int] = []
        for name, arguments, call_id in self.calls:
            made += [tools.calls, *self._encoded(name)]
            if tools.call_id is not None and call_id is not None:
                made += [tools.call_id, *self._encoded(call_id)]
            made += [tools.args, *self._encoded(arguments)]
        return made

    def _encoded(self, written: str) -> tuple[int, ...]:
        return self.form.tokenizer.encode(written)[1:]


def _message(form: Format, token_ids: Sequence[int]) -> Json:
    """Return the message that the server makes of an answer, as a client gets it."""
    model = ServedModel("m", form.tokenizer, 2**14, 16, len(form.tokenizer.vocabulary()))
    body = {"messages": [HELLO], "tools": TOOLS, "max_tokens": 2**12}

    async def answer() -> Any:
        prepared = await prepare_chat(model, form.chat, parse_chat(to_json(body).encode()), 0.0)
        return await prepared.run(ScriptedSource(token_ids))

    message: Json = json.loads(to_json(asyncio.run(answer())))["choices"][0]["message"]
    return message


def _holds(ids: Sequence[int], part: Sequence[int]) -> bool:
    length = len(part)
    return any(list(ids[at : at + length]) == list(part) for at in range(len(ids) - length + 1))


@pytest.mark.parametrize("kind", CALLING)
@settings(deadline=None, max_examples=examples(60))
@given(data=st.data())
def test_an_answer_of_the_server_goes_back_into_every_format(
    kind: str, data: st.DataObject
) -> None:
    form = chat_format(kind)
    answer = _Answer(form, data.draw)
    assert _is_allowed(kind, answer.ids)
    message = _message(form, answer.ids)
    made = message.get("tool_calls", [])
    assert [(each["function"]["name"], each["function"]["arguments"]) for each in made] == [
        (name, arguments) for name, arguments, _ in answer.calls
    ]
    assert [each["id"] for each in made] == [mistral_id(each["id"]) for each in made]
    results = [result(each["id"], "sunny") for each in made]
    has_results = data.draw(st.booleans())
    history = [HELLO, message, *(results if has_results else [])]
    for other in FORMATS:
        for end in ([], [user("Thanks")]):
            chat_format(other).chat.encode(parse_chat(body_of([*history, *end])).conversation())
    if kind in MISTRALS:
        _check_native(form, answer, history)


def _check_native(form: Format, answer: _Answer, history: Sequence[Json]) -> None:
    """Assert that a prompt has the tokens of an answer."""
    ids = form.chat.encode(parse_chat(body_of(list(history))).conversation())
    version = _number(form.name)
    has_ids = version == 11 and len({each for _, _, each in answer.calls} - {None}) == len(
        answer.calls
    )
    if version in (2, 13, 15) or has_ids:
        assert _holds(ids, answer.ids[0 if version >= 13 else len(answer.thought) :])
        return
    # these versions write the ids of calls, which the model has not written
    assert _holds(ids, [*answer.text, *answer.call_ids[:1]])
    written = form.tokenizer.decode(ids)
    assert all(name in written and arguments in written for name, arguments, _ in answer.calls)


@settings(deadline=None, max_examples=examples(60))
@given(data=st.data())
def test_version_11_keeps_the_ids_that_the_model_writes(data: st.DataObject) -> None:
    form = chat_format("v11")
    answer = _Answer(form, data.draw)
    message = _message(form, answer.ids)
    ids = [each["id"] for each in message.get("tool_calls", [])]
    assert len(set(ids)) == len(ids)
    seen: set[str] = set()
    for (_, _, written), made in zip(answer.calls, ids, strict=True):
        if written is not None and written not in seen:
            assert made == written
        seen.add(made)
