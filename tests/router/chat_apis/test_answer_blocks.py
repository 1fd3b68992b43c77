"""Blocks of answers: whatever way tokens arrive in, they are the same, and so are the items and
messages of both APIs.
"""

import itertools
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from event_loops import in_event_loop
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_token_source import ScriptedSource
from tokenizer_files import SENTENCEPIECE

from tramontane.router.chat_apis.block_formatter import BlockFormatter
from tramontane.router.chat_apis.blocks import AnswerPiece, Block, BlockEvent, Blocks
from tramontane.router.chat_apis.messages_answer import (
    MAX_INPUT_DEPTH,
    parse_input,
    prepare_message,
)
from tramontane.router.chat_apis.messages_request import parse_messages
from tramontane.router.chat_apis.responses_answer import error_event, next_number, prepare_response
from tramontane.router.chat_apis.responses_request import parse_responses
from tramontane.router.openai.response_models import Event
from tramontane.router.openai.resume_state import ResumeState
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate
from tramontane.router.tokenization.tool_parser import CallDelta

TOKENIZER = SentencePieceTokenizer(SENTENCEPIECE["v3"])
MODEL = ServedModel("tiny", TOKENIZER, 512, 16, TOKENIZER.vocab_size)
FORMAT = MistralChatTemplate.from_sentencepiece(SENTENCEPIECE["v3"])
CALLS = 5  # [TOOL_CALLS]

TEXTS = st.text("ab", max_size=2)
HEADS = st.builds(
    lambda id, arguments: CallDelta(0, arguments, id, "f"), st.sampled_from(["x", "y"]), TEXTS
)
PIECES = st.lists(
    st.builds(AnswerPiece, TEXTS, TEXTS)
    | st.builds(lambda head, rest: AnswerPiece(calls=(head, CallDelta(0, rest))), HEADS, TEXTS),
    max_size=12,
)


def _described(blocks: Blocks) -> list[tuple[str, int, str, str, str]]:
    return [(each.kind, each.index, each.call_id, each.name, each.content) for each in blocks.all]


@given(PIECES, st.lists(st.integers(0, 12), max_size=5))
def test_blocks_are_the_same_however_pieces_arrive(
    pieces: list[AnswerPiece], cuts: list[int]
) -> None:
    at_once, cut_up = Blocks(), Blocks()
    at_once.push(pieces)
    places = sorted({0, *(cut for cut in cuts if cut < len(pieces)), len(pieces)})
    steps: list[BlockEvent] = []
    for start, end in itertools.pairwise(places):
        new = cut_up.push(pieces[start:end])
        added = [step.block.index for step in new if step.action == "add"]
        assert len(set(added)) == len(added), "one addition to a block at most"
        steps += new
    for blocks in (at_once, cut_up):
        steps += blocks.finish() if blocks is cut_up else []
    at_once.finish()
    assert _described(cut_up) == _described(at_once)
    assert cut_up.all, "an answer of nothing is an empty text"
    _check_steps(steps, cut_up.all)


def _check_steps(steps: list[BlockEvent], blocks: list[Block]) -> None:
    """Blocks open and close one after the other; additions are their content."""
    opened: list[str] = []
    texts = [""] * len(blocks)
    for action, block, parts in steps:
        if action == "open":
            assert not opened
            opened.append(block.kind)
        elif action == "close":
            opened.pop()
        else:
            assert opened
            texts[block.index] += "".join(parts)
    assert not opened
    assert texts == [block.content for block in blocks]


def _ids(text: str) -> tuple[int, ...]:
    return TOKENIZER.encode(text)[1:]


CALLED = '[{"name": "f", "arguments": {"in": "\u00e9t\u00e9"}}, {"name": "f", "arguments": {}}]'
ANSWERS = {
    "text": _ids("Bon \u00e9t\u00e9 \U0001f642 STO"),
    "calls": (*_ids("Oui STO"), CALLS, *_ids(CALLED)),
    "nothing": (2,),
}
STATE = partial(ResumeState, id="0" * 32, created=7, seed=1)


async def _prepared(api: str, state: ResumeState, max_tokens: int) -> BlockFormatter:
    hello: dict[str, Any] = {"role": "user", "content": "Hello!"}
    if api == "responses":
        function = {"type": "function", "name": "f", "parameters": {"type": "object"}}
        body: dict[str, Any] = {
            "input": [hello],
            "tools": [function],
            "max_output_tokens": max_tokens,
            "stream": True,
        }
        return await prepare_response(
            MODEL, FORMAT, parse_responses(json.dumps(body).encode()), 0.0, state
        )
    tool = {"name": "f", "input_schema": {"type": "object"}}
    body = {
        "messages": [hello],
        "tools": [tool],
        "max_tokens": max_tokens,
        "stop_sequences": ["STOP"],
        "stream": True,
    }
    return await prepare_message(
        MODEL, FORMAT, parse_messages(json.dumps(body).encode()), 0.0, state
    )


async def _streamed(
    api: str, token_ids: Sequence[int], sizes: Sequence[int], dies_after: int, max_tokens: int
) -> list[Event]:
    """Return the events of a stream whose first ingress dies after so many writes."""
    state, events = STATE(), list[Event]()
    for life in (dies_after, 1000):
        answer = await _prepared(api, state, max_tokens)
        is_first = True
        async for changes in answer.generation.stream(ScriptedSource(token_ids, sizes=sizes)):
            if not life:
                break
            events += [*(answer.opening() if is_first else ()), *answer.events(changes)]
            is_first, life = False, life - 1
            state.add(answer.generation.take_updates())
            if answer.generation.is_finished:
                return events
    raise AssertionError("it did not finish")


@settings(deadline=None, max_examples=examples(60))
@given(
    st.sampled_from(["responses", "messages"]),
    st.sampled_from(sorted(ANSWERS)),
    st.lists(st.integers(1, 9), max_size=9),
    st.integers(0, 12),
    st.sampled_from([100, 3, 21]),
)
@in_event_loop
async def test_the_last_event_has_the_whole_answer_whatever_way_tokens_arrive(
    api: str, name: str, sizes: list[int], dies_after: int, max_tokens: int
) -> None:
    events = await _streamed(api, ANSWERS[name], sizes, dies_after, max_tokens)
    whole = await (await _prepared(api, STATE(), max_tokens)).run(ScriptedSource(ANSWERS[name]))
    if api == "responses":
        assert events[-1].data["response"] == whole
        numbers = [event.data["sequence_number"] for event in events]
        assert numbers == sorted(set(numbers))
        return
    texts: dict[int, str] = {}
    for event in events:
        for kind, text in (
            event.data.get("delta", {}).items() if event.name == "content_block_delta" else ()
        ):
            texts[event.data["index"]] = texts.get(event.data["index"], "") + text * (
                kind != "type"
            )
    blocks = [
        event.data["content_block"] for event in events if event.name == "content_block_start"
    ]
    assert events[-2].data["delta"] == {key: whole[key] for key in ("stop_reason", "stop_sequence")}
    for index, block in enumerate(whole["content"]):
        assert block.keys() == blocks[index].keys()
        given_text = texts.get(index, "")
        assert block == blocks[index] | (
            {"text": given_text} if block["type"] == "text" else {"input": json.loads(given_text)}
        )


@in_event_loop
async def test_what_an_answer_repeats_of_its_request_counts_for_the_events_that_have_it() -> None:
    """The first ones, and the last one; so that a large one is written in another thread."""
    function = {"type": "function", "name": "f", "description": "d" * 100_000}
    body = {"input": "Hello!", "tools": [function], "tool_choice": "none", "stream": True}

    conversation = parse_responses(json.dumps(body).encode())
    answer = await prepare_response(MODEL, FORMAT, conversation, 0.0, STATE())
    sizes: list[int] = []
    async for changes in answer.generation.stream(ScriptedSource(ANSWERS["text"])):
        sizes.append(answer.change_bytes)
        answer.opening()
        answer.events(changes)
    assert [size > 100_000 for size in sizes] == [True, *[False] * (len(sizes) - 2), True]


@pytest.mark.parametrize("api", ["responses", "messages"])
@pytest.mark.parametrize("num_read", [1, 2])
@in_event_loop
async def test_a_stream_that_is_closed_aborts_its_request_at_once(api: str, num_read: int) -> None:
    """And not when the event loop gets to it: its slot is another request's then."""
    source = ScriptedSource(ANSWERS["text"])
    changes = (await _prepared(api, STATE(), 100)).generation.stream(source)
    for _ in range(num_read):
        await anext(changes)
    assert source.num_open
    await changes.aclose()
    assert not source.num_open


@given(PIECES, st.lists(st.integers(1, 4), max_size=12))
def test_numbers_of_events_are_below_what_another_ingress_begins_with(
    pieces: list[AnswerPiece], sizes: list[int]
) -> None:
    """Every piece is of one token. Blocks of an ingress that continues are those of the same
    pieces.
    """
    blocks, num_events, start = Blocks(), 2, 0
    for size in [*sizes, *[1] * len(pieces)]:
        for step in blocks.push(pieces[start : start + size]):
            num_events += {"open": 2, "add": 1, "close": 3}[step.action]
        start += size
        assert num_events <= next_number(min(start, len(pieces)), len(blocks.all))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ('{"a": ', None),
        ("[1]", None),
        ('{"a": NaN}', None),
        ('{"a": 1e999}', None),
        ('{"a": "\\ud800"}', None),
        (f'{{"a": {"9" * 5000}}}', None),
        ('{"a":' * (MAX_INPUT_DEPTH + 1) + "1" + "}" * (MAX_INPUT_DEPTH + 1), None),
        ('{"a":' * 100_000, None),
        ('{"a":' * 5000 + "1" + "}" * 5000, None),
    ],
    ids=lambda value: f"{value!s:.20}",
)
def test_the_input_of_a_call_is_json_that_can_be_written_again(text: str, value: Any) -> None:
    assert parse_input(text) == value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"Internal Server Error",
        b"[1]",
        b'{"error": 1}',
        b'{"error": {}}',
        b"\xff",
        b"[" * 10_000,
    ],
)
def test_an_error_of_something_else_is_an_event_too(body: bytes) -> None:
    assert error_event(body, 7).data == {
        "type": "error",
        "code": None,
        "message": "the server failed",
        "param": None,
        "sequence_number": 7,
    }
