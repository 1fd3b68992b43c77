"""Sampling parameters have the same bounds in the bodies of all APIs and in SamplingParams."""

import json
import math
from typing import Any

import pytest
from pydantic import BaseModel

from tramontane.proto.errors import RequestError
from tramontane.proto.request import SAMPLING_BOUNDS, SamplingParams
from tramontane.router.chat_apis.messages_request import MessagesRequest
from tramontane.router.chat_apis.responses_request import ResponsesRequest
from tramontane.router.openai.chat_request import ChatRequest
from tramontane.router.openai.completion_request import CompletionRequest, parse_completion
from tramontane.router.openai.fim import FimRequest

KEYWORDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
}
OTHER_NAMES = {
    "random_seed": "seed",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "top_logprobs": "logprobs",
}
BODIES = (CompletionRequest, ChatRequest, FimRequest, MessagesRequest, ResponsesRequest)
FRACTIONS = ("temperature", "top_p", "min_p", "repetition_penalty")
# 0 is for a completion that only echoes, and for a message that fills the cache
MAX_TOKENS = {"minimum": 0, "exclusiveMaximum": 2**31}
WRAPPED = ("seed", "random_seed")  # of any whole number the lowest 64 bits count


@pytest.mark.parametrize("body", BODIES)
def test_the_schemas_of_bodies_have_the_bounds(body: type[BaseModel]) -> None:
    num_found = 0
    for field, schema in body.model_json_schema()["properties"].items():
        number = _number(schema)
        bounds = SAMPLING_BOUNDS.get(OTHER_NAMES.get(field, field))
        if bounds is None or number is None:  # some APIs refuse seeds
            continue
        if field in WRAPPED:
            assert not number.keys() & KEYWORDS.values(), field
            continue
        found = {word: number[word] for word in KEYWORDS.values() if word in number}
        expected = {KEYWORDS[key]: bound for key, bound in bounds.items() if key in KEYWORDS}
        may_be_0 = field == "max_tokens" and body in (CompletionRequest, MessagesRequest)
        assert found == (MAX_TOKENS if may_be_0 else expected), field
        num_found += 1
    assert num_found >= 3


def _number(schema: dict[str, Any]) -> dict[str, Any] | None:
    """Return the alternative of a field's schema that is a number."""
    alternatives = schema.get("anyOf", [schema])
    return next((each for each in alternatives if each.get("type") in ("integer", "number")), None)


def _is_refused(call: Any, *args: Any, **kwargs: Any) -> bool:
    try:
        call(*args, **kwargs)
    except RequestError:
        return True
    return False


@pytest.mark.parametrize("body", [CompletionRequest, ChatRequest, FimRequest, ResponsesRequest])
def test_the_schemas_of_bodies_say_which_seeds_are_taken(body: type[BaseModel]) -> None:
    """Whole numbers without bounds, which may be written as 2.0, as JSON schema has it, too."""
    fields = body.model_json_schema()["properties"]
    for name in fields.keys() & set(WRAPPED):
        assert fields[name]["anyOf"] == [{"type": "integer"}, {"type": "null"}], name


@pytest.mark.parametrize("name", SAMPLING_BOUNDS)
def test_what_is_out_of_bounds_is_refused(name: str) -> None:
    step = 1e-6 if name in FRACTIONS else 1
    for key, bound in SAMPLING_BOUNDS[name].items():
        if key not in KEYWORDS:
            continue
        inwards = step if key in ("ge", "gt") else -step
        inside, outside = (
            (bound, bound - inwards) if key in ("ge", "le") else (bound + inwards, bound)
        )
        for value, is_refused in ((inside, False), (outside, True)):
            assert _is_refused(SamplingParams, **{name: value}) == is_refused, value
            if (name, value) != ("max_tokens", 0):
                body = json.dumps({"prompt": "a", name: value}).encode()
                is_wrapped = name in WRAPPED
                assert _is_refused(parse_completion, body) == (is_refused and not is_wrapped), value
    for value in (math.nan, math.inf, -math.inf):
        assert _is_refused(SamplingParams, **{name: value}), value
