"""What of a conversation goes into the next prompt."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tramontane.proto.errors import RequestError
from tramontane.router.tokenization.chat import ChatMessage, Conversation

SYSTEM = ChatMessage("system", "sss")


class OneTokenPerLetter:
    def encode(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        return tuple(map(ord, "".join(message.content for message in messages)))


def _text(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def test_everything_that_was_said_is_in_the_prompt() -> None:
    conversation = Conversation(OneTokenPerLetter(), 100, 10, (SYSTEM,))
    extended, ids = conversation.with_question("one")
    assert _text(ids) == "sssone"
    extended, ids = extended.with_answer("two").with_question("three")
    assert _text(ids) == "sssonetwothree"
    assert [message.role for message in extended.turns] == ["user", "assistant", "user"]
    assert (conversation.turns, conversation.num_dropped) == ((), 0), "what it was stays"


@pytest.mark.parametrize("answer", ["", " \n"])
def test_a_question_without_an_answer_is_forgotten(answer: str) -> None:
    extended, _ = Conversation(OneTokenPerLetter(), 100, 10).with_question("one")
    _, ids = extended.with_answer(answer).with_question("two")
    assert _text(ids) == "two"


def test_the_oldest_are_forgotten_where_there_is_no_room_for_an_answer() -> None:
    """Of 20 positions 8 are for the answer: 3 and 4 + 4 and 2 fit, with another 1 + 1 they do
    not.
    """
    conversation = Conversation(OneTokenPerLetter(), 20, 8, (SYSTEM,))
    extended, _ = conversation.with_question("a")
    extended, _ = extended.with_answer("b").with_question("cccc")
    extended, ids = extended.with_answer("dddd").with_question("e")
    assert (_text(ids), extended.num_dropped) == ("sssccccdddde", 2)
    extended, ids = extended.with_answer("").with_question("eeee")
    assert (_text(ids), extended.num_dropped) == ("ssseeee", 4)


def test_what_fits_into_no_context_is_refused() -> None:
    conversation = Conversation(OneTokenPerLetter(), 20, 8, (SYSTEM,))
    extended, ids = conversation.with_question("x" * 16)
    assert len(ids) == 19, "one position is left for an answer"
    with pytest.raises(
        RequestError, match="takes 20 tokens; with a context of 20 positions it may take 19"
    ):
        conversation.with_question("x" * 17)
    with pytest.raises(RequestError):
        extended.with_answer("y").with_question("x" * 17)


@settings(derandomize=True, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=12),
    context=st.integers(13, 60),
    max_tokens=st.integers(1, 80),
)
def test_the_prompt_is_always_the_latest_that_fit(
    lengths: list[tuple[int, int]], context: int, max_tokens: int
) -> None:
    conversation = Conversation(OneTokenPerLetter(), context, max_tokens)
    said = ""
    for number, (question, answer) in enumerate(lengths):
        extended, ids = conversation.with_question(chr(0x100 + number) * question)
        text = _text(ids)
        assert (said + chr(0x100 + number) * question).endswith(text)
        assert len(text) + min(max_tokens, context // 2) <= context or len(extended.turns) == 1
        conversation = extended.with_answer("a" * answer)
        said = "".join(message.content for message in conversation.turns)
