"""A body is a CompletionRequest, or one line that names what is wrong with it; nothing else ever
happens.
"""

import json
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import Any

import pytest
from examples import examples
from http_fuzz import MANY_MISTAKES
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tramontane.proto.errors import ParameterError
from tramontane.router.openai import completion_request
from tramontane.router.openai.chat_request import ChatRequest
from tramontane.router.openai.completion_request import (
    CompletionRequest,
    parse_body,
    parse_completion,
)
from tramontane.router.openai.errors import error_body
from tramontane.router.openai.sampling_values import MAX_STOP_CHARS, MAX_STOPS
from tramontane.router.structured import request_model
from tramontane.router.structured.request_model import (
    MAX_COMPARED,
    MAX_IGNORED,
    intended_name,
    no_effect_fields,
)

LONGEST_MESSAGE = 300
MAX_PARSED_DEPTH = 190  # deeper, the parser of JSON refuses a body
USER = {"role": "user", "content": "a"}
FIELDS = sorted(CompletionRequest.model_fields)
NEUTRAL = sorted(no_effect_fields(CompletionRequest))
WITHOUT_EFFECT = (*NEUTRAL, "unknown")
NULLABLE = [name for name in FIELDS if name != "prompt"]
UNSUPPORTED = {
    "best_of": (1, 1.0),
    "length_penalty": (1, 1.0),
    "bad_words": ([],),
    **dict.fromkeys(("use_beam_search",), ()),
    **dict.fromkeys(("guided_grammar", "guided_whitespace_pattern"), ()),
}
WITH_EFFECT = {
    "best_of": (2, 0, True, "1"),
    "length_penalty": (2, True),
    "bad_words": (["x"], True),
    "use_beam_search": (True,),
    "guided_grammar": ("start: /a/",),
    "guided_whitespace_pattern": ("[ ]",),
}


def _parsed(**fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"prompt": "a"} | fields).encode())


def _check_message(error: ParameterError) -> None:
    message = str(error)
    assert message
    assert message.isprintable(), "one line, and nothing that could not be shown"
    assert len(message) <= LONGEST_MESSAGE
    assert (
        error.parameter is None or not error.parameter.isprintable() or error.parameter in message
    )
    assert error.parameter is None or len(error.parameter) <= LONGEST_MESSAGE


def _refused(body: bytes) -> ParameterError:
    with pytest.raises(ParameterError) as refused:
        parse_completion(body)
    _check_message(refused.value)
    return refused.value


def _refused_fields(**fields: Any) -> ParameterError:
    return _refused(json.dumps({"prompt": "a"} | fields).encode())


def _refused_text(field: str, text: str) -> ParameterError:
    """``text`` is JSON as it is written, for what json.dumps would not write."""
    return _refused(f'{{"prompt": "a", "{field}": {text}}}'.encode())


# However much is wrong


@pytest.mark.parametrize("case", MANY_MISTAKES)
def test_of_many_mistakes_only_the_first_is_looked_at(case: str) -> None:
    """Each that is found costs time and memory, and a body has room for millions."""
    kind, body = MANY_MISTAKES[case]
    with pytest.raises(ValidationError) as refused:
        kind.model_validate_json(body)
    assert refused.value.error_count() <= 4
    with pytest.raises(ParameterError) as explained:
        parse_body(kind, body)
    _check_message(explained.value)


def test_of_many_unknown_parameters_few_are_noted_and_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A body may have 32,000: each comparison takes as long as parsing a hundred of them."""
    compared = list[str]()

    def watched(name: str, known: Iterable[str]) -> str:
        compared.append(name)
        return intended_name(name, known)

    monkeypatch.setattr(completion_request, "intended_name", watched)
    monkeypatch.setattr(request_model, "intended_name", watched)
    unknown = {f"x{i}": 1 for i in range(32_000)}
    for body in (
        {"prompt": "a"} | unknown,
        {"prompt": "a", "stream_options": unknown, "stream": True},
    ):
        compared.clear()
        parsed = parse_completion(json.dumps(body).encode())
        assert len(compared) == len(set(compared)) == MAX_COMPARED
        assert len(parsed.ignored) == MAX_IGNORED
    part = {"type": "text", "text": "a"} | unknown
    compared.clear()
    chat = parse_body(ChatRequest, json.dumps({"messages": [USER | {"content": [part]}]}).encode())
    assert len(compared) == len(set(compared)) == MAX_COMPARED
    assert len(chat.ignored) == MAX_IGNORED


def test_of_an_unknown_parameter_at_many_places_one_is_noted_and_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = list[str]()
    monkeypatch.setattr(
        completion_request, "intended_name", lambda name, _: compared.append(name) or ""
    )
    messages = [USER | {"tone": "red"}] * 2000
    parsed = parse_body(ChatRequest, json.dumps({"messages": messages}).encode())
    assert compared == ["tone"]
    assert (parsed.ignored, parsed.unknown) == (("messages[].tone",), "messages[0].tone")


def test_few_names_are_compared_letter_by_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of two names of sixty letters takes a thousandth of a second."""
    compared = list[str]()

    class Watched(SequenceMatcher[str]):
        def set_seq1(self, a: Sequence[str]) -> None:
            compared.extend([str(a)] * bool(a))  # it begins with an empty one
            super().set_seq1(a)

    monkeypatch.setattr("difflib.SequenceMatcher", Watched)
    known = ["a" * 63 + letter for letter in "bcdefghijk"]
    for name in ("ab" * 32, "x" * 64, "a" * 30, "temperature"):
        assert intended_name(name, known) == ""
    assert compared == []
    assert intended_name("a" * 64, known) in known
    assert compared


def test_of_many_fields_few_are_compared_with_one_that_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = list[str]()
    monkeypatch.setattr(
        completion_request, "intended_name", lambda name, _: compared.append(name) or ""
    )
    body = json.dumps({f"x{i}": 1 for i in range(32_000)}).encode()
    assert str(_refused(body)) == "prompt is missing"
    assert len(compared) == MAX_IGNORED


def test_what_is_wrong_is_not_written_out() -> None:
    assert str(_refused_fields(seed=["a" * 10**6])).startswith("seed is a list of 1 item; ")
    assert str(_refused_fields(seed={"a": 1})).startswith("seed is an object; ")


# What is accepted


def test_what_is_not_given_is_as_openai_says() -> None:
    request = _parsed()
    assert request.prompt == ("a",)
    assert (request.max_tokens, request.temperature, request.top_p, request.n) == (16, 1.0, 1.0, 1)
    assert (request.top_k, request.seed, request.stop, request.model) == (0, None, (), None)
    assert (request.echo, request.stream, request.includes_usage) == (False, False, False)
    assert (request.ignore_eos, request.return_token_ids) == (False, False)
    assert request.return_experts == ()
    assert (request.min_p, request.min_tokens, request.logit_bias) == (0.0, 0, ())
    assert (request.presence_penalty, request.frequency_penalty, request.repetition_penalty) == (
        0.0,
        0.0,
        1.0,
    )
    assert (request.logprobs, request.prompt_logprobs, request.prompt_logprobs_count) == (
        None,
        None,
        None,
    )


@pytest.mark.parametrize("field", NULLABLE)
def test_null_means_not_given(field: str) -> None:
    assert _parsed(**{field: None}) == _parsed()


def test_every_field_null_at_once_means_nothing_given() -> None:
    assert _parsed(**dict.fromkeys(NULLABLE)) == _parsed()


@pytest.mark.parametrize(
    ("given_prompt", "prompts"),
    [
        ("", ("",)),
        ("one", ("one",)),
        (["one"], ("one",)),
        (["one", "", "three"], ("one", "", "three")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([0], ((0,),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["\U0001f600", "\u00e9\u0000"], ("\U0001f600", "\u00e9\u0000")),
    ],
)
def test_every_form_of_a_prompt_becomes_one_list(given_prompt: object, prompts: object) -> None:
    assert _parsed(prompt=given_prompt).prompt == prompts


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        7,
        1.5,
        True,
        {},
        {"text": "a"},
        [],
        [[]],
        [[1], []],
        [None],
        [True],
        [1, True],
        [1.0],
        ["a", 1],
        [[1], "a"],
    ],
)
def test_other_prompts_are_refused(prompt: object) -> None:
    assert _refused_fields(prompt=prompt).parameter == "prompt"


@pytest.mark.parametrize(
    "prompt", [[["a"]], [[[1]]], [[1.0]], [[True]], [[None]], ["a", None], [[1], 2]]
)
def test_lists_of_the_wrong_things_are_refused(prompt: object) -> None:
    assert _refused_fields(prompt=prompt).parameter == "prompt"


def test_a_pair_of_surrogates_is_one_character() -> None:
    assert parse_completion(rb'{"prompt": "\ud83d\ude00"}').prompt == ("\U0001f600",)


@pytest.mark.parametrize(
    ("field", "value", "kept"),
    [
        ("max_tokens", 1, 1),
        ("max_tokens", 2**31 - 1, 2**31 - 1),
        ("temperature", 0, 0.0),
        ("temperature", 2, 2.0),
        ("top_p", 1, 1.0),
        ("top_p", 1e-9, 1e-9),
        ("top_k", -1, -1),
        ("top_k", 0, 0),
        ("top_k", 2**31 - 1, 2**31 - 1),
        ("seed", -(2**63), -(2**63)),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("seed", 2**63, -(2**63)),
        ("seed", 2**64 - 1, -1),
        ("seed", 2**64 + 7, 7),
        ("seed", -(2**63) - 1, 2**63 - 1),
        ("seed", int("9" * 4000), (int("9" * 4000) + 2**63) % 2**64 - 2**63),
        ("seed", 7.0, 7),
        ("seed", -7.0, -7),
        ("seed", 2.0**64, 0),
        ("random_seed", 2**64 + 7, 7),
        ("n", 128, 128),
        ("stop", "END", ("END",)),
        ("stop", "", ()),
        ("stop", ["", ""], ()),
        ("stop", ["a", "", "b"], ("a", "b")),
        ("stop", [], ()),
        ("stop", ["x"] * MAX_STOPS, ("x",) * MAX_STOPS),
        ("stop", "x" * MAX_STOP_CHARS, ("x" * MAX_STOP_CHARS,)),
        ("echo", True, True),
        ("stream", True, True),
        ("ignore_eos", True, True),
        ("return_token_ids", True, True),
        ("min_p", 1, 1.0),
        ("presence_penalty", -2, -2.0),
        ("presence_penalty", 2, 2.0),
        ("frequency_penalty", -2.0, -2.0),
        ("frequency_penalty", 2.0, 2.0),
        ("repetition_penalty", 0.01, 0.01),
        ("repetition_penalty", 100, 100.0),
        ("logit_bias", {}, ()),
        (
            "logit_bias",
            {"0": -100, "2147483647": 100, "7": 0.5},
            ((0, -100.0), (2**31 - 1, 100.0), (7, 0.5)),
        ),
        ("logit_bias", {str(i): 1 for i in range(1024)}, tuple((i, 1.0) for i in range(1024))),
        ("min_tokens", 16, 16),
        ("logprobs", 0, 0),
        ("logprobs", 20, 20),
        ("prompt_logprobs", 20, 20),
        ("return_experts", [], ()),
        ("return_experts", [31, 0], (31, 0)),
        ("model", "demo", "demo"),
        ("user", "somebody", "somebody"),
    ],
)
def test_values_up_to_the_bounds_are_taken_as_they_are(
    field: str, value: object, kept: object
) -> None:
    assert getattr(_parsed(**{field: value}), field) == kept


@pytest.mark.parametrize(
    ("options", "includes_usage"),
    [({}, False), ({"include_usage": True}, True), ({"include_usage": None}, False), (None, False)],
)
def test_stream_options_say_whether_usage_is_wanted(options: object, includes_usage: bool) -> None:
    assert _parsed(stream=True, stream_options=options).includes_usage is includes_usage


def test_the_last_of_two_equal_keys_counts_as_everywhere_in_python() -> None:
    assert parse_completion(
        b'{"prompt": "a", "max_tokens": 0, "prompt": "b", "max_tokens": 3}'
    ) == _parsed(prompt="b", max_tokens=3)
    assert _refused(b'{"prompt": "a", "max_tokens": 3, "max_tokens": 0}').parameter == "max_tokens"


# What is refused, by name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("max_tokens", 5.5),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", -1),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_k", 1.5),
        ("seed", "7"),
        ("seed", 1.5),
        ("seed", True),
        ("seed", [7]),
        ("n", 0),
        ("n", 129),
        ("n", -1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", True),
        ("presence_penalty", -2.1),
        ("presence_penalty", True),
        ("frequency_penalty", 2.1),
        ("frequency_penalty", "0"),
        ("frequency_penalty", []),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", 101),
        ("logit_bias", []),
        ("logit_bias", 0),
        ("logit_bias", True),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": -100.5}),
        ("logit_bias", {"5": True}),
        ("logit_bias", {"5": None}),
        ("logit_bias", {"5": "1"}),
        ("logit_bias", {"05": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"": 1}),
        ("logit_bias", {"\u0665": 1}),
        ("logit_bias", {"2147483648": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {"a\nb": 1}),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("min_tokens", True),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("logprobs", ""),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("stop", [1]),
        ("stop", [None]),
        ("stop", 1),
        ("stop", {}),
        ("stop", ["x"] * (MAX_STOPS + 1)),
        ("stop", [""] * (MAX_STOPS + 1)),
        ("stop", "x" * (MAX_STOP_CHARS + 1)),
        ("echo", 1),
        ("stream", "true"),
        ("ignore_eos", 0),
        ("return_token_ids", []),
        ("return_experts", 3),
        ("return_experts", True),
        ("return_experts", "3"),
        ("return_experts", {"3": 1}),
        ("return_experts", [-1]),
        ("return_experts", [True]),
        ("return_experts", [1.0]),
        ("return_experts", ["1"]),
        ("return_experts", [None]),
        ("return_experts", [[1]]),
        ("return_experts", [2**70]),
        ("return_experts", [1, 2, 1]),
        ("model", 7),
        ("model", ["demo"]),
        ("stream_options", []),
        ("stream_options", True),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_its_name(field: str, value: object) -> None:
    assert _refused_fields(**{field: value}).parameter == field


def test_a_prompt_may_be_only_scored_if_it_is_echoed() -> None:
    assert _parsed(max_tokens=0, echo=True, logprobs=1).prompt_logprobs_count == 1
    assert _refused_fields(max_tokens=0, echo=False, logprobs=1).parameter == "max_tokens"
    assert _refused_fields(max_tokens=0, echo=True, min_tokens=1).parameter == "min_tokens"


@pytest.mark.parametrize(
    ("fields", "num_top"),
    [
        ({"logprobs": 5}, None),
        ({"logprobs": 5, "echo": True}, 5),
        ({"prompt_logprobs": 0}, 0),
        ({"prompt_logprobs": 3, "logprobs": 5}, 3),
        ({"prompt_logprobs": 3, "logprobs": 5, "echo": True}, 5),
    ],
)
def test_prompt_logprobs_have_two_names(fields: dict[str, Any], num_top: int | None) -> None:
    assert _parsed(**fields).prompt_logprobs_count == num_top


def test_a_missing_prompt_is_named() -> None:
    error = _refused(b'{"model": "demo"}')
    assert error.parameter == "prompt"
    assert str(error) == "prompt is missing"
    for body, hint in (
        (b'{"promt": "O"}', '; unknown field "promt", did you mean "prompt"?'),
        (b'{"max_token": 5, "prompts": "O"}', '; unknown field "prompts", did you mean "prompt"?'),
        (b'{"max_token": 5, "top_p": 1, "q": 1}', ""),
        (b'{"promt\\n": "O"}', '; unknown field "promt?", did you mean "prompt"?'),
    ):
        assert str(_refused(body)) == f"prompt is missing{hint}"


def test_a_misspelt_parameter_is_named_with_what_is_meant() -> None:
    error = _refused_fields(max_token=5)
    assert error.parameter == "max_token"
    assert str(error) == "max_token is not a parameter of this endpoint; did you mean max_tokens?"


def test_an_unknown_parameter_is_ignored_and_named() -> None:
    parsed = _parsed(qqqq={"a": [1]}, null=None)
    assert (parsed.ignored, parsed.unknown) == (("qqqq",), "qqqq")
    assert parsed.model_dump(exclude={"qqqq", "null"}) == _parsed().model_dump()
    assert (_parsed().ignored, _parsed().unknown) == ((), "")


def test_stream_options_without_a_stream_have_no_effect() -> None:
    for fields in ({"stream_options": {"include_usage": True}}, {"stream_options": {}}):
        assert _parsed(**fields).ignored == ("stream_options",)
        assert _parsed(**fields, stream=False).unknown == ""
        assert _parsed(**fields, stream=True).ignored == ()


def test_an_unknown_stream_option_is_ignored_and_a_wrong_one_is_named() -> None:
    unknown = _parsed(stream=True, stream_options={"usage": True})
    assert unknown.ignored == ("stream_options.usage",)
    assert unknown.unknown == "stream_options.usage"
    assert not unknown.includes_usage
    assert (
        _refused_fields(stream=True, stream_options={"include_usage": 1}).parameter
        == "stream_options.include_usage"
    )
    assert (
        _refused_fields(stream=True, stream_options={"include_usages": True}).parameter
        == "stream_options.include_usages"
    )
    for value in (True, False):
        known = _parsed(stream=True, stream_options={"include_obfuscation": value})
        assert (known.ignored, known.unknown) == (("stream_options.include_obfuscation",), "")


def test_the_lists_of_these_tests_know_every_unsupported_parameter() -> None:
    unsupported = {
        name for name, field in CompletionRequest.model_fields.items() if field.annotation is Any
    }.difference(NEUTRAL)
    assert unsupported == set(UNSUPPORTED) == set(WITH_EFFECT)


@pytest.mark.parametrize(
    ("field", "value"),
    [(f, v) for f, values in UNSUPPORTED.items() for v in (*values, None, False)],
)
def test_an_unsupported_parameter_may_be_there_without_effect(field: str, value: object) -> None:
    _parsed(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, values in WITH_EFFECT.items() for v in values]
)
def test_an_unsupported_parameter_with_an_effect_is_refused_by_name(
    field: str, value: object
) -> None:
    error = _refused_fields(**{field: value})
    assert error.parameter == field
    assert any(reason in str(error) for reason in ("not supported", "leave it out"))


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"suffix": 0}, "suffix"),
        ({"suffix": "b", "prompt": [1]}, "suffix"),
        ({"suffix": "b", "echo": True}, "echo"),
        ({"seed": 1, "random_seed": 2}, "random_seed"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"detokenize": False}, "detokenize"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice[0]"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regexp": "x"}}, "structured_outputs.regexp"),
    ],
)
def test_a_field_of_other_servers_is_refused_by_name(
    fields: dict[str, Any], parameter: str
) -> None:
    assert _refused_fields(**fields).parameter == parameter


def test_fields_without_effect_are_accepted() -> None:
    request = _parsed(
        user="a", metadata={"b": {"c": 1}}, store=False, service_tier="flex",
        prompt_cache_key="d", safety_identifier="e",
        skip_special_tokens=True, spaces_between_special_tokens=False, suffix="",
        guided_decoding_backend="xgrammar",
    )  # fmt: skip
    assert request.suffix is None
    assert request.ignored == (
        *("guided_decoding_backend", "metadata", "prompt_cache_key", "safety_identifier"),
        *("service_tier", "spaces_between_special_tokens", "store", "user"),
    )
    assert (
        _parsed(random_seed=7).given_seed
        == _parsed(seed=7).given_seed
        == _parsed(seed=7, random_seed=7).given_seed
        == _parsed(seed=7, random_seed=7 + 2**64).given_seed
        == 7
    )


@pytest.mark.parametrize("field", WITHOUT_EFFECT)
@pytest.mark.parametrize("value", [True, 0, "", [], {}, {"name": "somebody"}, [[None]], "gold"])
def test_any_value_is_ignored_where_none_has_an_effect(field: str, value: object) -> None:
    parsed = _parsed(**{field: value})
    assert parsed.ignored == (field,)
    assert parsed.model_dump(exclude={field}) == _parsed().model_dump(exclude={field})


# Bodies that are not requests at all


BAD_BODIES: dict[str, tuple[str, list[bytes]]] = {
    "no object": (
        "JSON object",
        [b"[]", b"null", b"true", b"1", b'"text"', b'[{"prompt": "a"}]', b"1.5", b"NaN"],
    ),
    "not JSON": (
        "not JSON",
        [
            b"",
            b" ",
            b"\x00",
            b"prompt=a",
            b"{",
            b'{"prompt": "a"',
            b'{"prompt": "a",}',
            b"{'prompt': 'a'}",
            b'{"prompt": "a"} {"prompt": "b"}',
            b'{"prompt": "line\nbreak"}',
            b'{"prompt": "\\x"}',
            b'{"prompt": 01}',
            b"\xef\xbb\xbf" + b'{"prompt": "a"}',
            '{"prompt": "a"}'.encode("utf-7") + b"+",
        ],
    ),
    "not UTF-8": (
        "UTF-8",
        [
            b"\xff",
            b'{"prompt": "\xff"}',
            b'{"prompt": "\xc3"}',
            b'{"prompt": "\xed\xa0\x80"}',
        ],
    ),
    "UTF-16": (
        "the body is UTF-16, which JSON over HTTP is not; send UTF-8",
        ['{"prompt": "a"}'.encode(name) for name in ("utf-16", "utf-16-le", "utf-16-be")],
    ),
}


@pytest.mark.parametrize(
    ("message", "body"),
    [(message, body) for message, bodies in BAD_BODIES.values() for body in bodies],
    ids=[f"{kind} {body[:20]!r}" for kind, (_, bodies) in BAD_BODIES.items() for body in bodies],
)
def test_a_body_that_is_no_json_object_is_refused(message: str, body: bytes) -> None:
    error = _refused(body)
    assert error.parameter is None
    assert message in str(error)


@pytest.mark.parametrize(
    "text", [r'"\ud800"', r'"a\udc00b"', r'"\ude00\ud83d"', r'["ok", "\ud800"]', r'"\ud800x"']
)
@pytest.mark.parametrize("field", ["prompt", "stop", "model", "user", "suffix", "unknown"])
def test_half_of_a_surrogate_pair_is_refused(field: str, text: str) -> None:
    _refused_text(field, text)


def test_half_of_a_surrogate_pair_in_a_name_is_refused() -> None:
    _refused(rb'{"prompt": "a", "\ud800": 1}')


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize(
    "field",
    ["max_tokens", "temperature", "top_p", "top_k", "seed", "n", "frequency_penalty", "prompt"],
)
def test_what_is_no_number_is_refused_by_name(field: str, number: str) -> None:
    assert _refused_text(field, number).parameter == field


@pytest.mark.pairwise
@pytest.mark.parametrize("digits", [19, 20, 40, 400, 4299])
@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize(
    "field",
    [
        "max_tokens",
        "top_p",
        "top_k",
        "n",
        "best_of",
        "min_tokens",
        "prompt",
        "stop",
        "model",
    ],
)
def test_a_huge_number_is_refused_by_name_and_not_recited(
    field: str, sign: str, digits: int
) -> None:
    assert _refused_text(field, sign + "9" * digits).parameter == field


@pytest.mark.parametrize("field", WITHOUT_EFFECT)
@pytest.mark.parametrize("number", ["9" * 4299, "-1e999", "NaN"])
def test_a_number_without_effect_may_be_any(field: str, number: str) -> None:
    body = f'{{"prompt": "a", "{field}": {number}}}'.encode()
    assert parse_completion(body).ignored == (field,)


@pytest.mark.parametrize("field", [*FIELDS, "unknown"])
def test_a_number_of_a_hundred_thousand_digits_is_refused(field: str) -> None:
    _refused_text(field, "9" * 100_000)


def test_a_number_of_sixty_thousand_digits_may_be_zero_and_one_of_more_is_refused_unread() -> None:
    assert (
        parse_completion(b'{"prompt": "a", "temperature": 0.%s}' % (b"0" * 60_000)).temperature == 0
    )
    with pytest.raises(ParameterError, match="a number of more than 511 digits"):
        parse_completion(b'{"prompt": "a", "temperature": 0.%s}' % (b"0" * 100_000))


NESTING = [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")]


@pytest.mark.pairwise
@pytest.mark.parametrize("field", [*FIELDS, "unknown"])
@pytest.mark.parametrize(("opening", "closing"), NESTING)
@pytest.mark.parametrize("levels", [100, 10_000])
def test_deep_nesting_is_refused_unless_it_has_no_effect(
    field: str, opening: str, closing: str, levels: int
) -> None:
    nested = opening * levels + "1" + closing * levels
    depth = levels * len(closing)
    # of these an unknown key has no effect; without a stream the options of one have none either
    keys = {"stream_options": ("stream_options", "stream_options.a")}
    keys |= {"structured_outputs": ("structured_outputs.a",)}
    without_effect = {each: (each,) for each in WITHOUT_EFFECT}
    if opening.startswith("{"):
        without_effect |= keys
    if field in without_effect and depth < MAX_PARSED_DEPTH:
        parsed = parse_completion(f'{{"prompt": "a", "{field}": {nested}}}'.encode())
        assert parsed.ignored == without_effect[field]
    else:
        _refused_text(field, nested)
    _refused_text(field, opening * levels)


def test_deep_nesting_without_an_object_is_refused() -> None:
    _refused(b"[" * 10_000 + b"]" * 10_000)
    _refused(b'{"prompt":' * 10_000 + b"1" + b"}" * 10_000)


def test_a_long_value_is_not_recited() -> None:
    assert _refused_fields(max_tokens="9" * 100_000).parameter == "max_tokens"
    assert _refused_fields(stream_options=["x" * 100_000]).parameter == "stream_options"


STRANGE_NAMES = {
    **{"": '""', "a\nb": "a?b", "a\r\nb": "a??b", "\x1b[31m": "?[31m", "\u2028": "?"},
    **{"z" * 100_000: "z" * 64, "a.b": "a.b", "None": "None", "x[7]": "x[]", "\u00e9": "\u00e9"},
}


@pytest.mark.parametrize("name", STRANGE_NAMES)
def test_a_strange_name_is_ignored_and_named_in_one_short_line(name: str) -> None:
    assert _parsed(**{name: 1}).ignored == (STRANGE_NAMES[name],)
    within = _parsed(stream=True, stream_options={name: 1})
    assert within.ignored == (f"stream_options.{STRANGE_NAMES[name]}",)
    assert within.unknown.isprintable()
    part = {"type": "text", "text": "a", name: 1}
    chat = parse_body(ChatRequest, json.dumps({"messages": [USER | {"content": [part]}]}).encode())
    [noted] = chat.ignored
    assert noted.isprintable()
    assert noted.startswith("messages[].content[].")
    assert len(noted) <= 100


@pytest.mark.parametrize("name", ["strea\nm", "stre\x1bam", "temp\u2028erature"])
def test_a_strange_misspelling_is_refused_in_one_short_line(name: str) -> None:
    error = _refused_fields(**{name: 1})
    assert "; did you mean " in str(error)
    assert error.parameter is not None
    assert error.parameter.isprintable()


def test_errors_have_openais_shape() -> None:
    error = _refused_fields(n=0)
    assert error_body(str(error), "invalid_request_error", error.parameter) == {
        "error": {
            "message": str(error),
            "type": "invalid_request_error",
            "param": "n",
            "code": None,
        },
        "message": str(error),
    }


# Whatever comes


def _is_understood(body: bytes) -> bool:
    """Whether it is a request; any exception but ParameterError passes through."""
    try:
        request = parse_completion(body)
    except ParameterError as error:
        _check_message(error)
        return False
    assert request.prompt
    assert all(isinstance(prompt, str) or prompt for prompt in request.prompt)
    return True


NUMBERS = (
    st.integers()
    | st.integers(-2, 130)
    | st.floats()
    | st.sampled_from([2**31, 2**63, 10**400, -(10**4000)])
)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(FIELDS) | st.text(max_size=6)


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(body=st.binary(max_size=60))
@example(b'{"prompt": "a"}')
def test_any_bytes_are_a_request_or_refused(body: bytes) -> None:
    _is_understood(body)


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(body=st.binary(max_size=6), at=st.integers(0, 80), length=st.integers(0, 6))
def test_a_request_with_damaged_bytes_is_a_request_or_refused(
    body: bytes, at: int, length: int
) -> None:
    whole = b'{"prompt": ["a", "b"], "max_tokens": 5, "temperature": 0.5, "stop": ["END"], "n": 2}'
    _is_understood(whole[:at] + body + whole[at + length :])


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(value=VALUES)
def test_any_json_value_is_a_request_or_refused(value: object) -> None:
    _is_understood(json.dumps(value).encode())


@settings(derandomize=True, deadline=None, max_examples=examples(1000))
@given(fields=st.dictionaries(NAMES, VALUES, max_size=4), ascii_only=st.booleans())
def test_any_value_in_any_field_is_taken_or_refused(
    fields: dict[str, object], ascii_only: bool
) -> None:
    body = json.dumps({"prompt": "a"} | fields, ensure_ascii=ascii_only).encode(
        "utf-8", "surrogatepass"
    )
    _is_understood(body)


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(text=st.text(st.characters(), max_size=20))
def test_a_text_arrives_as_it_was_sent(text: str) -> None:
    sendable = text.encode("utf-8", "replace").decode()
    assert _parsed(prompt=sendable).prompt == (sendable,)
    assert _parsed(prompt=[sendable, sendable]).prompt == (sendable, sendable)
