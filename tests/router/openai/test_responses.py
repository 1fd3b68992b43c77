"""What the models of answers accept as JSON, in the fields that are not validated when an answer is
built.
"""

import copy
import json
from typing import Any

import pytest
from pydantic import ValidationError

from tramontane.router.openai.response_models import (
    MAX_PIECE,
    Answer,
    ChatChoice,
    ChatChunkChoice,
    CompletionChoice,
    _json_pieces,
    encode_and_free,
    to_json,
)

LOGPROBS = {
    "tokens": ["a", "b"],
    "token_logprobs": [None, -0.5],
    "top_logprobs": [None, {"b": -0.5}],
    "text_offset": [0, 1],
}
CHAT_TOKEN = {"token": "a", "logprob": -0.5, "bytes": [97]}
CHAT_LOGPROBS = {"content": [CHAT_TOKEN | {"top_logprobs": [CHAT_TOKEN]}], "refusal": None}
EXPERTS = {"0": [[1, 2]], "3": [[0, 1], [2, 3]]}
BULK = {
    "token_ids": [7, 8],
    "prompt_token_ids": [1, 7],
    "prompt_experts": EXPERTS,
    "experts": EXPERTS,
    "prompt_logprobs": [None, {"7": {"logprob": -0.5, "decoded_token": "a"}}],
}
HEAD = {"index": 0, "finish_reason": "stop"}
MESSAGE = {"role": "assistant", "content": "a", "refusal": None}
CHOICES: dict[type[Answer], dict[str, Any]] = {
    CompletionChoice: {**HEAD, **BULK, "text": "ab", "logprobs": LOGPROBS},
    ChatChoice: {**HEAD, **BULK, "message": MESSAGE, "logprobs": CHAT_LOGPROBS},
    ChatChunkChoice: {**HEAD, "delta": {}, "logprobs": CHAT_LOGPROBS},
}
# A path in a choice, and what must not be there.
MISTAKES: list[tuple[type[Answer], list[str | int], object]] = [
    (CompletionChoice, ["logprobs", "token_logprobs", 1], "-0.5"),
    (CompletionChoice, ["logprobs", "top_logprobs", 1, "b"], None),
    (CompletionChoice, ["logprobs", "text_offset", 1], 0.5),
    (CompletionChoice, ["prompt_logprobs", 1, "7", "logprob"], [-0.5]),
    (CompletionChoice, ["prompt_logprobs", 1, "7", "rank"], 1),
    (CompletionChoice, ["prompt_experts", "3", 1, 0], "2"),
    (CompletionChoice, ["experts", "0", 0], 1),
    (CompletionChoice, ["token_ids", 1], "8"),
    (ChatChoice, ["prompt_token_ids", 1], "7"),
    (ChatChoice, ["logprobs", "content", 0, "logprob"], "-0.5"),
    (ChatChoice, ["logprobs", "content", 0, "top_logprobs", 0, "bytes"], "a"),
    (ChatChunkChoice, ["logprobs", "content", 0, "logprob"], None),
]


@pytest.mark.parametrize("kind", CHOICES)
def test_right_choices_are_accepted(kind: type[Answer]) -> None:
    choice = kind.model_validate_json(json.dumps(CHOICES[kind]))
    assert json.loads(choice.model_dump_json(exclude_unset=True)) == CHOICES[kind]


@pytest.mark.parametrize(
    ("kind", "path", "value"), MISTAKES, ids=lambda part: getattr(part, "__name__", str(part))
)
def test_a_wrong_number_is_refused_in_json_and_not_looked_at_when_an_answer_is_built(
    kind: type[Answer], path: list[str | int], value: object
) -> None:
    choice = copy.deepcopy(CHOICES[kind])
    *way, last = path
    place: Any = choice
    for step in way:
        place = place[step]
    place[last] = value
    with pytest.raises(ValidationError) as refusal:
        kind.model_validate_json(json.dumps(choice))
    where = {error["loc"][: len(path)] for error in refusal.value.errors()}
    assert any(found[: len(way)] == tuple(way) for found in where), where
    field = str(path[0])
    assert getattr(kind.model_validate(choice), field) is choice[field]


@pytest.mark.parametrize("num_items", [0, 1, MAX_PIECE, MAX_PIECE + 1, 3 * MAX_PIECE + 1])
def test_pieces_of_an_answer_are_the_json_of_the_whole(num_items: int) -> None:
    top = [None, *({f'"{n}\\é': -n / 7, "\n": -1e-9} for n in range(num_items))]
    logprobs = {"tokens": ["ü"] * num_items, "top_logprobs": top, "empty": {}, "none": []}
    choices = [
        {"index": n, "logprobs": logprobs, "experts": {"3": [(1, 2)] * num_items}}
        for n in range(num_items)
    ]
    answer = {"id": "cmpl-1", "choices": choices, "usage": {"total_tokens": num_items}}
    expected = to_json(answer).encode()
    longest = max(len(to_json(each)) + 1 for each in top)
    assert max(map(len, _json_pieces(answer, 0))) <= MAX_PIECE * longest
    assert encode_and_free(answer) == expected
    assert answer["choices"] == [], "freed where it was encoded"
