"""Where tokens begin in a text, which of them are reported around a stop string, and the shapes in
which clients get them.
"""

import io
import pickle
from itertools import combinations, pairwise

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat.chat_completion import ChoiceLogprobs
from openai.types.completion_choice import Logprobs as CompletionLogprobs
from token_pieces import PieceTokenizer

from tramontane.proto.request import FinishReason, Logprobs, TokenEvent
from tramontane.router.engine.active_request import PositionBuffer
from tramontane.router.openai.detokenizer import ChoiceDetokenizer
from tramontane.router.openai.logprobs import (
    TokenLogprobs,
    TokenWithLogprobs,
    chat_logprobs,
    completion_logprobs,
    index_by_position,
    merge_logprobs,
    prompt_logprobs,
    prompt_tokens,
    token_text,
)
from tramontane.router.openai.resume_state import ChoiceState, ChoiceUpdate, ResumeState
from tramontane.router.tokenization.tokenizer import REPLACE_EACH

SCORE = TokenLogprobs(-1.0, ())


def _cut(text: bytes, at: tuple[int, ...]) -> list[bytes]:
    return [text[start:end] for start, end in pairwise((0, *at, len(text)))]


def _begins(text: str) -> list[int]:
    """Of each byte, the character that it belongs to: of "a\\u00e9b" 0, 1, 1, 2."""
    return [place for place, char in enumerate(text) for _ in char.encode()]


# Where tokens begin


@pytest.mark.parametrize("text", ["a\u00e9\U0001f600 b", "\U0001f600\U0001f600", "plain"])
@pytest.mark.parametrize("num_cuts", [0, 1, 2, 3])
def test_a_token_begins_where_its_first_byte_stands(text: str, num_cuts: int) -> None:
    data, begins = text.encode(), _begins(text)
    for at in combinations(range(1, len(data)), num_cuts):
        tokenizer = PieceTokenizer(_cut(data, at))
        assert tokenizer.offsets(tokenizer.ids) == [begins[byte] for byte in (0, *at)]
        assert tokenizer.decode(tokenizer.ids) == text


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(
    pieces=st.lists(
        st.binary(max_size=4)
        | st.sampled_from([b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"a", b""]),
        max_size=8,
    ),
    errors=st.sampled_from(["replace", REPLACE_EACH]),
)
def test_offsets_are_right_in_broken_texts_too(pieces: list[bytes], errors: str) -> None:
    """Whatever was left unfinished before a token, its first character stands where it is said to
    begin.
    """
    tokenizer = PieceTokenizer([*pieces, b"end"], errors)
    decoder, other = tokenizer.decoder(), tokenizer.decoder()
    text = ""
    for token_id, offset in zip(tokenizer.ids, tokenizer.offsets(tokenizer.ids), strict=True):
        said, place = decoder.push_with_offset(token_id)
        assert said == other.push(token_id), "they say the same"
        assert offset == len(text) + place
        assert 0 <= place <= len(said)
        piece = tokenizer.bytes_of(token_id)
        if piece[:1].isascii() and piece:  # never the continuation of anything
            assert said[place] == chr(piece[0])
        text += said
    assert text == tokenizer.decode(tokenizer.ids)
    assert text.endswith("end")


# Around stop strings


@pytest.mark.parametrize(
    "text", ["xEND", "xENDy", "ENDy", "no EN D END\u00e9", "\u00e9END\U0001f600"]
)
@pytest.mark.parametrize("num_cuts", [0, 1, 2])
@pytest.mark.parametrize("stop", ["END", "D", "\U0001f600"])
def test_no_stop_string_leaks_wherever_tokens_are_cut(text: str, num_cuts: int, stop: str) -> None:
    """Every way to cut a text into one, two or three tokens, within characters too."""
    data, begins = text.encode(), _begins(text)
    end = text.find(stop) if stop in text else len(text)
    for at in combinations(range(1, len(data)), num_cuts):
        tokenizer = PieceTokenizer(_cut(data, at))
        choice = ChoiceDetokenizer(tokenizer, [stop])
        shown, reported = "", []
        for token_id in tokenizer.ids:
            last = FinishReason.LENGTH if token_id == tokenizer.ids[-1] else None
            shown += choice.push(TokenEvent(0, token_id, last), SCORE)
            reported += choice.take_logprobs()
            assert text[:end].startswith(shown)
            assert all(token.offset < len(shown) for token in reported), (
                "nothing is reported before it is shown"
            )
        assert shown == text[:end]
        assert choice.finish is (FinishReason.STOP if stop in text else FinishReason.LENGTH)
        offsets = [begins[byte] for byte in (0, *at)]
        assert [token.offset for token in reported] == [
            offset for offset in offsets if offset < end
        ]
        assert [token.token_id for token in reported] == list(tokenizer.ids[: len(reported)])


def test_without_stop_strings_every_token_is_reported_at_once() -> None:
    tokenizer = PieceTokenizer([b"\xf0", b"\x9f\x98\x80", b"", b"a"])
    choice = ChoiceDetokenizer(tokenizer, [])
    reported = []
    for token_id in tokenizer.ids:
        choice.push(TokenEvent(0, token_id), SCORE)
        reported.append([token.offset for token in choice.take_logprobs()])
    assert reported == [[0], [0], [1], [1]]


def test_a_token_without_text_at_the_end_is_reported_unless_a_stop_string_came_first() -> None:
    tokenizer = PieceTokenizer([b"a", b"", b"b"])
    for stop, expected in (("never", [0, 1]), ("a", [])):
        choice = ChoiceDetokenizer(tokenizer, [stop])
        choice.push(TokenEvent(0, 0), SCORE)
        choice.push(TokenEvent(0, 1, FinishReason.STOP), SCORE)
        assert [token.token_id for token in choice.take_logprobs()] == expected


def test_tokens_without_scores_are_not_reported() -> None:
    tokenizer = PieceTokenizer([b"a", b"b"])
    choice = ChoiceDetokenizer(tokenizer, [])
    assert [choice.push(TokenEvent(0, token_id)) for token_id in tokenizer.ids] == ["a", "b"]
    assert choice.take_logprobs() == []


# Shapes

PIECES = [b"", b" What", b"\xf0\x9f", b"\xc3\xa9", b"x", b"x"]
TOKENIZER = PieceTokenizer(PIECES)
TOKENS = [
    TokenWithLogprobs(0, 0, None),
    TokenWithLogprobs(1, 0, TokenLogprobs(-0.5, ((1, -0.5), (4, -2.0), (5, -3.0)))),
    TokenWithLogprobs(2, 5, TokenLogprobs(-9.0, ((3, -0.1), (0, -4.0), (1, -5.0)))),
]


def test_a_token_is_shown_by_its_text_or_by_its_bytes_or_by_its_number() -> None:
    shown = ["token_id:0", " What", "bytes:\\xf0\\x9f", "\u00e9", "x", "x", "token_id:77"]
    assert [token_text(TOKENIZER, token_id) for token_id in (*range(6), 77)] == shown
    assert token_text(None, 3) == "token_id:3"


def test_openais_shape_for_completions() -> None:
    reported = completion_logprobs(TOKENIZER, TOKENS, 2)
    assert reported == {
        "tokens": ["token_id:0", " What", "bytes:\\xf0\\x9f"],
        "token_logprobs": [None, -0.5, -9.0],
        "top_logprobs": [
            None,
            {" What": -0.5, "x": -2.0},
            {"\u00e9": -0.1, "token_id:0": -4.0, "bytes:\\xf0\\x9f": -9.0},
        ],
        "text_offset": [0, 0, 5],
    }
    CompletionLogprobs.model_validate(completion_logprobs(TOKENIZER, TOKENS[1:], 2), strict=True)
    assert completion_logprobs(TOKENIZER, TOKENS, 0)["top_logprobs"] == [
        None,
        {" What": -0.5},
        {"bytes:\\xf0\\x9f": -9.0},
    ]
    assert completion_logprobs(TOKENIZER, TOKENS, 3)["top_logprobs"][1] == {
        " What": -0.5,
        "x": -2.0,
    }, "the likelier x"
    halves = (
        completion_logprobs(TOKENIZER, TOKENS[:1], 2),
        None,
        completion_logprobs(TOKENIZER, TOKENS[1:], 2),
    )
    assert merge_logprobs(halves) == reported
    assert merge_logprobs([None]) == {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }


def test_openais_shape_for_chats() -> None:
    reported = chat_logprobs(TOKENIZER, TOKENS[1:], 1)
    ChoiceLogprobs.model_validate(reported, strict=True)
    what = {"token": " What", "logprob": -0.5, "bytes": list(b" What")}
    accent = {"token": "\u00e9", "logprob": -0.1, "bytes": [0xC3, 0xA9]}
    half = {"token": "bytes:\\xf0\\x9f", "logprob": -9.0, "bytes": [0xF0, 0x9F]}
    assert reported == {
        "content": [what | {"top_logprobs": [what]}, half | {"top_logprobs": [accent]}],
        "refusal": None,
    }
    end = chat_logprobs(TOKENIZER, [TokenWithLogprobs(0, 0, SCORE)], 0)
    assert end["content"] == [
        {"token": "token_id:0", "logprob": -1.0, "bytes": None, "top_logprobs": []}
    ]


def test_vllms_shape_for_prompts() -> None:
    assert prompt_logprobs(TOKENIZER, TOKENS, 1) == [
        None,
        {"1": {"logprob": -0.5, "decoded_token": " What"}},
        {
            "2": {"logprob": -9.0, "decoded_token": "bytes:\\xf0\\x9f"},
            "3": {"logprob": -0.1, "decoded_token": "\u00e9"},
        },
    ]


def test_scores_are_found_by_sequence_and_position() -> None:
    news = [
        Logprobs(3, 1, (-0.5, -9.0), (TOKENS[1].score.top, TOKENS[2].score.top)),
        Logprobs(4, 1, (-7.0,), ((),)),
    ]  # type: ignore[union-attr]
    assert prompt_tokens(TOKENIZER, (0, 1, 2), 3, index_by_position(news)) == TOKENS
    assert prompt_tokens(None, (9,), 4, index_by_position(news)) == [TokenWithLogprobs(9, 0, None)]


# On their way


def test_what_is_received_twice_is_reported_once() -> None:
    history = PositionBuffer[Logprobs]()

    def logprobs(seq_id: int, start: int, end: int) -> Logprobs:
        positions = range(start, end)
        return Logprobs(
            seq_id,
            start,
            tuple(-float(p) for p in positions),
            tuple(((p, -float(p)),) for p in positions),
        )

    for start, end in ((1, 5), (1, 3), (3, 7)):
        history.add(logprobs(0, start, end))
    history.add(logprobs(1, 6, 7))
    assert history.take([TokenEvent(0, 7)], lambda _: 99) == (logprobs(0, 1, 5), logprobs(0, 5, 7))
    assert history.take([TokenEvent(0, 7)], lambda _: 99) == ()
    history.add(logprobs(0, 2, 4))
    history.add(logprobs(0, 7, 8))
    assert history.take([TokenEvent(0, 7), TokenEvent(1, 7)], lambda _: 99) == (
        logprobs(0, 7, 8),
        logprobs(1, 6, 7),
    )
    with pytest.raises(AssertionError, match="missing"):
        history.add(logprobs(0, 9, 10))


def test_what_moves_to_another_ingress_has_the_names_that_older_versions_know() -> None:
    """Ray Serve pickles it, and a proxy lives longer than the ingresses of one version."""
    token = TokenWithLogprobs(5, 0, TokenLogprobs(-0.5, ((5, -0.5),)))
    choice = ChoiceState([5], FinishReason.LENGTH, [token])
    state = ResumeState("id", 1, 2, "model", {0: choice}, [], 1, 0.5)
    update: ChoiceUpdate = (0, [5], FinishReason.LENGTH, [token])
    found = set[str]()

    class Noting(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            found.add(f"{module}.{name}")
            return super().find_class(module, name)

    for data in (state, update):
        assert Noting(io.BytesIO(pickle.dumps(data))).load() == data
    openai = "tramontane.router.openai"
    assert found == {
        f"{openai}.resume_state.ResumeState",
        f"{openai}.resume_state.ChoiceState",
        f"{openai}.logprobs.TokenWithLogprobs",
        f"{openai}.logprobs.TokenLogprobs",
        "tramontane.proto.request.FinishReason",
    }
