"""Calls of tools, read back from tokens: in both of Mistral's formats, however the text is cut into
tokens.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tokenizer_files import SENTENCEPIECE, small_tekken, thinking_tekken

from tramontane.router.tokenization.chat import ToolCall, ToolFormat
from tramontane.router.tokenization.history import derived_id
from tramontane.router.tokenization.loader import load_chat_template, require_tokenizer
from tramontane.router.tokenization.tokenizer import Tokenizer
from tramontane.router.tokenization.tool_parser import (
    CallDelta,
    CallJoiner,
    ToolCallParser,
    call_ids,
    merge_deltas,
    new_call_id,
)

NASTY = json.dumps(
    {"text": 'a "}{" \\ [TOOL_CALLS] \u00e9', "deep": {"er": [{}, {"x": 1}]}}, ensure_ascii=False
)
NAMES = ["f_0-x", "mcp.server/tool:v2", "/.:-", "x" * 128]
ARGUMENTS = ["{}", '{"city": "Rome"}', '{"a":{"b":{}}}', NASTY]


@pytest.fixture(scope="module", params=["sentencepiece", "tekken"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    if request.param == "tekken":
        small_tekken(folder)
    else:
        shutil.copy(SENTENCEPIECE["v3"], folder / "tokenizer.model.v3")
    return require_tokenizer(folder, 10**6)


def _form(tokenizer: Tokenizer, *, by_name: bool) -> ToolFormat:
    calls = tokenizer.control_id("[TOOL_CALLS]")
    assert calls is not None
    # any other control token does
    return ToolFormat(calls, tokenizer.control_id("[INST]") if by_name else None)


def _said(tokenizer: Tokenizer, form: ToolFormat, calls: Sequence[tuple[str, str]]) -> list[int]:
    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text))[1:]  # without the token that begins a sequence

    if form.args is None:
        listed = ", ".join(
            f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls
        )
        return [form.calls, *ids(f"[{listed}]")]
    return [
        token
        for name, arguments in calls
        for token in (form.calls, *ids(name), form.args, *ids(arguments))
    ]


def _parser(tokenizer: Tokenizer, form: ToolFormat) -> ToolCallParser:
    numbers: Iterator[int] = iter(range(9))
    return ToolCallParser(tokenizer, form, lambda: f"call{next(numbers)}")


@pytest.mark.parametrize("by_name", [False, True])
def test_calls_are_read_back(tokenizer: Tokenizer, by_name: bool) -> None:
    form = _form(tokenizer, by_name=by_name)
    calls = list(zip(NAMES, ARGUMENTS, strict=True))
    parser = _parser(tokenizer, form)
    deltas = [
        delta for token_id in _said(tokenizer, form, calls) for delta in parser.push(token_id)
    ]
    assert merge_deltas(deltas) == tuple(
        ToolCall(f"call{i}", name, arguments) for i, (name, arguments) in enumerate(calls)
    )
    assert parser.num_calls == len(calls)
    assert sum(delta.name is not None for delta in deltas) == len(calls)
    assert len(deltas) > 3 * len(calls), "piece by piece"


@pytest.mark.parametrize("by_name", [False, True])
def test_a_call_that_is_cut_off_is_reported_as_far_as_it_goes(
    tokenizer: Tokenizer, by_name: bool
) -> None:
    form = _form(tokenizer, by_name=by_name)
    said = _said(tokenizer, form, [("f", ARGUMENTS[1]), ("g", ARGUMENTS[1])])
    for length in range(len(said)):
        parser = _parser(tokenizer, form)
        reported = merge_deltas(
            [delta for token_id in said[:length] for delta in parser.push(token_id)]
        )
        assert all(ARGUMENTS[1].startswith(call.arguments) for call in reported)
        assert [call.arguments for call in reported[:-1]] == [ARGUMENTS[1]] * len(reported[:-1])
        assert [call.name for call in reported] == ["f", "g"][: len(reported)]


def test_text_before_a_call_is_nobodys_call(tokenizer: Tokenizer) -> None:
    form = _form(tokenizer, by_name=False)
    parser = _parser(tokenizer, form)
    for token_id in tokenizer.encode('[{"name": "f", "arguments": {}}]'):
        assert parser.push(token_id) == []
        assert not parser.is_calling
    parser.push(form.calls)
    assert parser.is_calling


def test_openais_shapes() -> None:
    call = {"index": 1, "id": "abc", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert CallDelta(1, "", "abc", "f").as_openai() == call
    assert CallDelta(1, "{").as_openai() == {"index": 1, "function": {"arguments": "{"}}
    ids = {new_call_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(len(call_id) == 9 and call_id.isalnum() and call_id.isascii() for call_id in ids)


CALL_ID_FORM = ToolFormat(calls=9, args=32, call_id=33)  # of tekken's version 11


def _with_ids(tokenizer: Tokenizer, calls: Sequence[tuple[str, str | None, str]]) -> Iterator[int]:
    """Yield the tokens of calls in version 11's format: names, ids and arguments."""
    for name, call_id, arguments in calls:
        yield from (CALL_ID_FORM.calls, *tokenizer.encode(name)[1:])
        if call_id is not None:
            assert CALL_ID_FORM.call_id is not None
            yield from (CALL_ID_FORM.call_id, *tokenizer.encode(call_id)[1:])
        assert CALL_ID_FORM.args is not None
        yield from (CALL_ID_FORM.args, *tokenizer.encode(arguments)[1:])


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (["abcDEF123", "abcDEF124"], ["abcDEF123", "abcDEF124"]),
        ([None, "abcDEF124"], ["call0", "abcDEF124"]),
        (["abcDEF123", "abcDEF123"], ["abcDEF123", "call1"]),
        (["abcDEF123", None, "abcDEF123"], ["abcDEF123", "call1", "call2"]),
        ([" abcDEF123 "], ["abcDEF123"]),
        (["abcDEF12"], ["call0"]),
        (["call_1"], ["call0"]),
        ([""], ["call0"]),
    ],
)
def test_ids_that_the_model_writes_are_those_of_its_calls(
    tmp_path: Path, written: list[str | None], expected: list[str]
) -> None:
    """Where they are new ones in Mistral's form; the others are replaced."""
    thinking_tekken(tmp_path, "v11")
    tokenizer = require_tokenizer(tmp_path, 10**6)
    assert load_chat_template(tmp_path, tokenizer).tool_format == CALL_ID_FORM
    said = [(f"f_{i}", call_id, NASTY) for i, call_id in enumerate(written)]
    parser = _parser(tokenizer, CALL_ID_FORM)
    deltas = [each for token_id in _with_ids(tokenizer, said) for each in parser.push(token_id)]
    assert merge_deltas(deltas) == tuple(
        ToolCall(call_id, f"f_{i}", NASTY) for i, call_id in enumerate(expected)
    )
    assert [each.name for each in deltas if each.id] == [name for name, _, _ in said], (
        "an id is in the first part of a call, which has the name"
    )


def test_an_id_is_derived_by_the_number_of_its_call_whatever_the_model_writes(
    tmp_path: Path,
) -> None:
    """So another ingress that continues the answer derives the same ids."""
    thinking_tekken(tmp_path, "v11")
    tokenizer = require_tokenizer(tmp_path, 10**6)
    said = [("f", "abcDEF123", "{}"), ("f", None, "{}"), ("f", "abcDEF123", "{}")]
    parser = ToolCallParser(tokenizer, CALL_ID_FORM, call_ids("x"))
    deltas = [each for token_id in _with_ids(tokenizer, said) for each in parser.push(token_id)]
    ids = [each.id for each in merge_deltas(deltas)]
    assert ids == ["abcDEF123", derived_id("x 1"), derived_id("x 2")]


def test_a_call_that_is_cut_off_in_its_id_is_not_reported(tmp_path: Path) -> None:
    thinking_tekken(tmp_path, "v11")
    tokenizer = require_tokenizer(tmp_path, 10**6)
    said = list(_with_ids(tokenizer, [("f", "abcDEF123", "{}")]))
    parser = _parser(tokenizer, CALL_ID_FORM)
    for token_id in said[: said.index(CALL_ID_FORM.args or 0)]:
        assert parser.push(token_id) == []
    assert parser.is_calling
    assert parser.num_calls == 0


def test_a_call_is_joined_and_returned_as_soon_as_it_is_complete() -> None:
    joiner = CallJoiner()
    first, more = CallDelta(0, "", "abcdefghi", "f"), CallDelta(0, '{"a": ')
    assert joiner.push([first, more], is_complete=False) == []
    whole = CallDelta(0, '{"a": 1}', "abcdefghi", "f")
    assert joiner.push([CallDelta(0, "1}")], is_complete=True) == [whole]
    # one token may end a call and begin the next one
    assert joiner.push([first, more], is_complete=False) == []
    second = CallDelta(1, "", "ihgfedcba", "g")
    assert joiner.push([CallDelta(0, "1}"), second], is_complete=False) == [whole]
    assert joiner.finish() == [second]
    assert joiner.finish() == []
