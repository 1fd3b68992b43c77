"""From a parsed request to OpenAI's objects: streamed or not, the same texts, and every token
counted once.
"""

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from event_loops import in_event_loop
from examples import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scripted_token_source import ScriptedSource

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.proto import wire
from tramontane.proto.errors import (
    ContextLengthError,
    ParameterError,
    PipelineError,
    RequestError,
    UnknownModelError,
)
from tramontane.proto.request import FinishReason, Request, RequestTimings
from tramontane.router.openai.completion import prepare_completion
from tramontane.router.openai.completion_request import CompletionRequest, parse_completion
from tramontane.router.openai.formatter import CompletionFormatter
from tramontane.router.openai.logprobs import token_text
from tramontane.router.openai.response_models import CompletionAnswer, CompletionChunk
from tramontane.router.openai.resume_state import ChoiceState, ResumeState
from tramontane.router.openai.served_model import (
    MAX_STREAMED_LOGPROBS,
    MAX_WHOLE_LOGPROBS,
    OFFLOAD_CHARS,
    ModelCatalog,
    ServedModel,
    check_model_name,
)
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.chat import NoChatTemplate

CONTEXT = 2048
MAX_SEQUENCES = 8
VOCAB = 1000
PROMPT, OTHER_PROMPT = "What news?", "la la"
TEXT, OTHER_TEXT = "Speak, my lord; the hour is late.", "\u00e9 \U0001f600 END of it"
NEVER = 2**31
TOKENIZER = SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model")
MODEL = ServedModel(
    "demo", TOKENIZER, CONTEXT, MAX_SEQUENCES, VOCAB, expert_layers=range(4), experts_per_token=2
)
WORDLESS = ServedModel("wordless", None, CONTEXT, MAX_SEQUENCES, VOCAB)
SCRIPT, OTHER_SCRIPT = TOKENIZER.encode(TEXT), TOKENIZER.encode(OTHER_TEXT)
ENDED = {"index": 0, "logprobs": None, "finish_reason": "length"}


def _expert_ids(index: int, layer: int, position: int) -> tuple[int, int]:
    return (index + layer + position) % 8, (index * layer + 3 * position) % 8


def _logprob(index: int, position: int) -> float:
    return -10.0 - index - position / 1000


def _top(index: int, position: int, num_top: int) -> tuple[tuple[int, float], ...]:
    return tuple((300 + index + position + place, -float(place)) for place in range(num_top))


def _scores(index: int, position: int, _token_id: int) -> tuple[float, Any]:
    return _logprob(index, position), _top(index, position, 20)


def _source(
    scripts: Sequence[Sequence[int]], sizes: Sequence[int] = (1,), **options: Any
) -> ScriptedSource:
    """Return a source that gives sequence i the tokens of ``scripts[i]``, in outputs as long as
    ``sizes`` says.
    """
    return ScriptedSource(
        scripts=scripts,
        sizes=sizes,
        finish=FinishReason.LENGTH,
        scores=_scores,
        experts=_expert_ids,
        times=lambda number: RequestTimings(1.0, 2.0, float(number)),
        **options,
    )


def _request(**fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"prompt": PROMPT} | fields).encode())


async def _prepared(model: ServedModel, **fields: Any) -> CompletionFormatter:
    return await prepare_completion(model, _request(**fields), 0.0)


def _run(model: ServedModel, source: ScriptedSource, **fields: Any) -> dict[str, Any]:
    async def scenario() -> dict[str, Any]:
        answer = await (await _prepared(model, **fields)).run(source)
        assert source.num_open == 0
        CompletionAnswer.model_validate_json(json.dumps(answer))
        return answer

    return asyncio.run(scenario())


def _stream(
    model: ServedModel, source: ScriptedSource, **fields: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The chunks with choices, and the one after them."""

    async def scenario() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        completion = await _prepared(model, stream=True, **fields)
        stream = completion.generation.stream(source)
        chunks = [completion.chunk(choices) async for choices in stream]
        assert source.num_open == 0
        for chunk in (*chunks, completion.usage_chunk()):
            CompletionChunk.model_validate_json(json.dumps(chunk))
        return chunks, completion.usage_chunk()

    return asyncio.run(scenario())


def _changes(chunks: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [change for chunk in chunks for change in chunk["choices"] if change["index"] == index]


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


# Streamed and whole


@settings(derandomize=True, deadline=None, max_examples=examples(100))
@given(
    num_prompts=st.integers(1, 3),
    n=st.integers(1, 2),
    sizes=SIZES,
    other_sizes=SIZES,
    stop=st.sampled_from([[], ["my"], [", m", "END"], ["\U0001f600"], ["lat", "late."]]),
    echo=st.booleans(),
    ids=st.booleans(),
    seed=st.integers(0, 3),
)
def test_a_stream_joined_is_the_whole_answer(
    num_prompts: int,
    n: int,
    sizes: list[int],
    other_sizes: list[int],
    stop: list[str],
    echo: bool,
    ids: bool,
    seed: int,
) -> None:
    prompts = [PROMPT, OTHER_PROMPT, ""][:num_prompts]
    scripts = [(SCRIPT, OTHER_SCRIPT)[(index + seed) % 2] for index in range(num_prompts * n)]
    fields = {"prompt": prompts, "n": n, "stop": stop, "echo": echo, "return_token_ids": ids}
    whole = _run(MODEL, _source(scripts, other_sizes), **fields)
    chunks, last = _stream(MODEL, _source(scripts, sizes), **fields)
    assert last["usage"] == whole["usage"]
    assert [choice["index"] for choice in whole["choices"]] == list(range(num_prompts * n))
    for choice in whole["choices"]:
        own = _changes(chunks, choice["index"])
        assert "".join(change["text"] for change in own) == choice["text"]
        assert [change["finish_reason"] for change in own] == [None] * (len(own) - 1) + [
            choice["finish_reason"]
        ]
        if ids:
            assert [token_id for change in own for token_id in change["token_ids"]] == choice[
                "token_ids"
            ]
            assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"]
            assert [change["prompt_token_ids"] for change in own[1:]] == [None] * (len(own) - 1)
        else:
            assert all(
                "token_ids" not in change and "prompt_token_ids" not in change
                for change in (*own, choice)
            )


def test_an_answer_is_its_tokens_text() -> None:
    source = _source([SCRIPT])
    answer = _run(MODEL, source)
    assert answer["choices"] == [ENDED | {"text": " " + TEXT}]
    assert (answer["object"], answer["model"]) == ("text_completion", "demo")
    assert answer["id"].startswith("cmpl-")
    assert source.num_outputs == len(SCRIPT)


def test_every_chunk_has_the_same_head_and_the_whole_answer_another() -> None:
    chunks, last = _stream(MODEL, _source([SCRIPT]))
    heads = {
        (chunk["id"], chunk["object"], chunk["created"], chunk["model"])
        for chunk in (*chunks, last)
    }
    assert len(heads) == 1
    assert _run(MODEL, _source([SCRIPT]))["id"] != last["id"]


def test_what_is_ready_together_comes_as_one_change_per_choice() -> None:
    chunks, _ = _stream(MODEL, _source([SCRIPT, SCRIPT], sizes=[1000]), n=2)
    assert len(chunks) == 1
    assert [(change["index"], change["text"]) for change in chunks[0]["choices"]] == [
        (0, " " + TEXT),
        (1, " " + TEXT),
    ]


# Experts


@settings(derandomize=True, deadline=None, max_examples=examples(100))
@given(
    num_prompts=st.integers(1, 2),
    n=st.integers(1, 2),
    sizes=SIZES,
    other_sizes=SIZES,
    stop=st.sampled_from([[], ["my"], [", m", "END"], ["lat", "late."]]),
    layers=st.lists(st.integers(0, 3), min_size=1, unique=True),
)
def test_every_token_that_went_into_the_model_has_its_experts(
    num_prompts: int,
    n: int,
    sizes: list[int],
    other_sizes: list[int],
    stop: list[str],
    layers: list[int],
) -> None:
    """Streamed or not, however tokens come together, and also where more were made than an answer
    takes.
    """
    scripts = [(SCRIPT, OTHER_SCRIPT)[index % 2] for index in range(num_prompts * n)]
    fields = {
        "prompt": [PROMPT, OTHER_PROMPT][:num_prompts],
        "n": n,
        "stop": stop,
        "echo": True,
        "return_token_ids": True,
    }
    fields["return_experts"] = layers
    whole = _run(MODEL, _source(scripts, other_sizes), **fields)
    chunks, _ = _stream(MODEL, _source(scripts, sizes), **fields)
    for choice in whole["choices"]:
        own = _changes(chunks, choice["index"])
        num_prompt, num_new = len(choice["prompt_token_ids"]), len(choice["token_ids"])
        parts = {
            "prompt_experts": range(num_prompt),
            "experts": range(num_prompt, num_prompt + num_new - 1),
        }
        for name, positions in parts.items():
            assert list(choice[name]) == [str(layer) for layer in layers]
            for layer in layers:
                expected = [_expert_ids(choice["index"], layer, position) for position in positions]
                assert choice[name][str(layer)] == expected
                assert [
                    ids for change in own for ids in change.get(name, {}).get(str(layer), ())
                ] == expected
        assert all(change.get(name) != {} for change in own for name in parts), (
            "where there is nothing, nothing is said"
        )


def test_an_answer_of_one_token_has_no_experts() -> None:
    fields = {"prompt": [[5, 6]], "return_experts": [2]}
    [choice] = _run(MODEL, _source([SCRIPT[:1]]), **fields)["choices"]
    prompt_experts = {"2": [_expert_ids(0, 2, 0), _expert_ids(0, 2, 1)]}
    assert (choice["prompt_experts"], choice["experts"]) == (prompt_experts, {"2": []})
    [[change]] = [chunk["choices"] for chunk in _stream(MODEL, _source([SCRIPT[:1]]), **fields)[0]]
    assert change["prompt_experts"] == prompt_experts
    assert "experts" not in change


@pytest.mark.parametrize("layers", [None, []])
def test_experts_are_only_sent_on_request(layers: list[int] | None) -> None:
    [choice] = _run(MODEL, _source([SCRIPT]), return_experts=layers)["choices"]
    assert not {"experts", "prompt_experts"} & choice.keys()


@pytest.mark.parametrize(
    ("layers", "message"), [([4], "layers 0 to 3"), ([0, 900], "layer 900 has no experts")]
)
def test_a_layer_that_is_not_there_is_refused(layers: list[int], message: str) -> None:
    with pytest.raises(ParameterError, match=message) as refused:
        asyncio.run(_prepared(MODEL, return_experts=layers))
    assert refused.value.parameter == "return_experts"


def test_a_model_without_experts_refuses_to_return_them() -> None:
    with pytest.raises(ParameterError, match="no experts") as refused:
        asyncio.run(_prepared(WORDLESS, prompt=[1], return_experts=[0]))
    assert refused.value.parameter == "return_experts"


@pytest.mark.parametrize(("max_tokens", "fits"), [(2**15 - 10, True), (2**15 - 9, False)])
def test_experts_of_too_many_tokens_are_refused(max_tokens: int, fits: bool) -> None:
    """2 choices of 10 and 32,758 tokens, 4 layers and 2 experts of each: 2**19."""
    wide = replace(MODEL, max_model_len=10**6)
    preparing = _prepared(
        wide, prompt=[[1] * 10], n=2, max_tokens=max_tokens, return_experts=[0, 1, 2, 3]
    )
    if fits:
        assert asyncio.run(preparing).generation.sequences()[0].sampling.return_experts == (
            0,
            1,
            2,
            3,
        )
    else:
        with pytest.raises(ParameterError, match=f"at most {2**19}") as refused:
            asyncio.run(preparing)
        assert refused.value.parameter == "return_experts"


# Log-probabilities


@settings(derandomize=True, deadline=None, max_examples=examples(150))
@given(
    num_prompts=st.integers(1, 2),
    n=st.integers(1, 2),
    sizes=SIZES,
    other_sizes=SIZES,
    stop=st.sampled_from([[], ["my"], [", m", "END"], ["lat", "late."], ["\U0001f600"]]),
    echo=st.booleans(),
    num_top=st.none() | st.integers(0, 3),
    num_prompt_top=st.none() | st.integers(0, 3),
    max_tokens=st.sampled_from([0, 500]),
    ids=st.booleans(),
)
def test_every_token_that_is_shown_has_a_log_probability_streamed_or_not(
    num_prompts: int,
    n: int,
    sizes: list[int],
    other_sizes: list[int],
    stop: list[str],
    echo: bool,
    num_top: int | None,
    num_prompt_top: int | None,
    max_tokens: int,
    ids: bool,
) -> None:
    assert MODEL.tokenizer is not None
    scripts = [(SCRIPT, OTHER_SCRIPT)[index % 2] for index in range(num_prompts * n)]
    prompts: list[Any] = [PROMPT, "\u00e9\U0001f600"][:num_prompts]
    encoded = [MODEL.tokenizer.encode(prompt) for prompt in prompts]
    fields = {
        "prompt": [list(each) for each in encoded] if ids else prompts,
        "n": n,
        "stop": stop,
        "echo": echo or not max_tokens,
    }
    fields |= {
        "max_tokens": max_tokens,
        "logprobs": num_top,
        "prompt_logprobs": num_prompt_top,
        "return_token_ids": True,
    }
    whole = _run(MODEL, _source(scripts, other_sizes), **fields)
    chunks, last = _stream(MODEL, _source(scripts, sizes), **fields)
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        own, index, prompt_ids = (
            _changes(chunks, choice["index"]),
            choice["index"],
            encoded[choice["index"] // n],
        )
        assert "".join(change["text"] for change in own) == choice["text"]
        assert [change["finish_reason"] for change in own][-1] == choice["finish_reason"]
        if not max_tokens:
            assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == (
                prompts[index // n],
                [],
                "length",
            )
        assert ("prompt_logprobs" in choice) == (num_prompt_top is not None)
        assert choice.get("prompt_logprobs") == own[0].get("prompt_logprobs")
        if num_prompt_top is not None:
            assert choice["prompt_logprobs"][0] is None
            for position, reported in enumerate(choice["prompt_logprobs"][1:], start=1):
                expected = {str(prompt_ids[position]): _logprob(index, position)}
                expected |= {
                    str(token_id): logprob
                    for token_id, logprob in _top(index, position, num_prompt_top)
                }
                assert {
                    token_id: each["logprob"] for token_id, each in reported.items()
                } == expected
        if num_top is None:
            assert choice["logprobs"] is None
            continue
        reported = choice["logprobs"]
        parts = [change["logprobs"] for change in own if change["logprobs"]]
        assert {
            name: [each for part in parts for each in part[name]] for name in reported
        } == reported
        first = 0 if fields["echo"] else len(prompt_ids)
        all_ids = (*prompt_ids, *choice["token_ids"])
        sent_ids = all_ids[first : first + len(reported["tokens"])]
        assert reported["tokens"] == [
            token_text(MODEL.tokenizer, token_id) for token_id in sent_ids
        ]
        assert len({len(values) for values in reported.values()}) == 1
        if choice["finish_reason"] != "stop":
            assert sent_ids == all_ids[first:]
        for place, logprob in enumerate(reported["token_logprobs"]):
            position = first + place
            assert logprob == (_logprob(index, position) if position else None)
            assert (
                reported["top_logprobs"][place] is None
                or len(reported["top_logprobs"][place]) <= num_top + 1
            )
        text = choice["text"]
        for token, offset in zip(reported["tokens"], reported["text_offset"], strict=True):
            assert 0 <= offset <= len(text)
            if not token.startswith(("bytes:", "token_id:")):
                end = text[offset:]
                # A text's first token has lost its space; the last one may be cut by a stop string.
                assert end.startswith((token, token.removeprefix(" "))) or token.startswith(end)


def test_logprobs_without_a_tokenizer_are_by_token_id() -> None:
    answer = _run(WORDLESS, _source([(7, 8)]), prompt=[1, 2], echo=True, logprobs=1)
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["token_id:1", "token_id:2", "token_id:7", "token_id:8"],
        "token_logprobs": [None, _logprob(0, 1), _logprob(0, 2), _logprob(0, 3)],
        "top_logprobs": [None]
        + [
            {f"token_id:{300 + p}": 0.0, f"token_id:{token}": _logprob(0, p)}
            for p, token in ((1, 2), (2, 7), (3, 8))
        ],
        "text_offset": [0, 0, 0, 0],
    }


@pytest.mark.parametrize(
    ("fields", "parameter", "most"),
    [
        (
            {"prompt": [[1] * 2**15] * 2, "prompt_logprobs": 1},
            "prompt_logprobs",
            MAX_WHOLE_LOGPROBS,
        ),
        (
            {"prompt": [[1] * 2**15], "n": 2, "logprobs": 1, "echo": True, "max_tokens": 0},
            "logprobs",
            MAX_WHOLE_LOGPROBS,
        ),
        (
            {"prompt": [[1]], "n": 2, "logprobs": 3, "max_tokens": 2**14},
            "logprobs",
            MAX_WHOLE_LOGPROBS,
        ),
        (
            {"prompt": [[1]], "n": 2, "logprobs": 3, "max_tokens": 2**16, "stream": True},
            "logprobs",
            MAX_STREAMED_LOGPROBS,
        ),
    ],
)
def test_log_probabilities_of_too_many_tokens_are_refused(
    fields: dict[str, Any], parameter: str, most: int
) -> None:
    """Just as many as there may be are not; one choice or one of the likeliest more is."""
    wide = replace(MODEL, max_model_len=10**6)
    asyncio.run(_prepared(wide, **fields))
    with pytest.raises(ParameterError, match=f"at most {most}") as refused:
        asyncio.run(_prepared(wide, **fields | {parameter: fields[parameter] + 1}))
    assert refused.value.parameter == parameter


def test_a_bias_of_a_token_that_is_not_there_is_refused() -> None:
    asyncio.run(_prepared(MODEL, logit_bias={str(VOCAB - 1): 1}))
    with pytest.raises(ParameterError, match=f"{VOCAB} is outside") as refused:
        asyncio.run(_prepared(MODEL, logit_bias={str(VOCAB): 1}))
    assert refused.value.parameter == "logit_bias"


# Sequences and their numbers


def test_a_choice_knows_its_prompt() -> None:
    prompts = [PROMPT, OTHER_PROMPT]
    source = _source([SCRIPT[: index + 1] for index in range(6)])
    answer = _run(MODEL, source, prompt=prompts, n=3, return_token_ids=True, seed=11)
    encoded = [TOKENIZER.encode(prompt) for prompt in prompts]
    assert [spec.prompt_ids for spec in source.requested[-1]] == [
        ids for ids in encoded for _ in range(3)
    ]
    assert [spec.sampling.choice for spec in source.requested[-1]] == [0, 1, 2, 0, 1, 2]
    for index, choice in enumerate(answer["choices"]):
        assert choice["index"] == index
        assert choice["prompt_token_ids"] == list(encoded[index // 3])
        assert choice["token_ids"] == list(SCRIPT[: index + 1])


def test_sampling_is_what_was_requested() -> None:
    source = _source([SCRIPT])
    _run(
        MODEL, source, max_tokens=7, temperature=0.5, top_p=0.25, top_k=9, seed=-3, ignore_eos=True
    )
    sampling = source.requested[-1][0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (
        7,
        0.5,
        0.25,
        9,
    )
    assert (sampling.seed, sampling.choice, sampling.ignore_eos) == (-3, 0, True)
    _run(MODEL, source, top_k=-1)
    assert source.requested[-1][0].sampling.top_k == 0, "vLLM's word for all"
    changes = {
        "min_p": 0.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
        "min_tokens": 3,
    }
    _run(MODEL, source, logit_bias={"9": -1, "8": 2.5}, logprobs=2, prompt_logprobs=4, **changes)
    sampling = source.requested[-1][0].sampling
    assert {name: getattr(sampling, name) for name in changes} == changes
    assert (sampling.logit_bias, sampling.logprobs, sampling.prompt_logprobs) == (
        ((9, -1.0), (8, 2.5)),
        2,
        4,
    )


def test_no_stop_string_ends_an_answer_before_min_tokens() -> None:
    [choice] = _run(
        MODEL, _source([SCRIPT]), stop=[",", ";"], min_tokens=len(SCRIPT) - 1, max_tokens=99
    )["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" " + TEXT, "length")


def test_a_response_format_becomes_the_grammar_of_every_sequence() -> None:
    source = _source([SCRIPT, SCRIPT])
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    _run(MODEL, source, n=2, response_format=wanted)
    first, second = (spec.sampling.grammar for spec in source.requested[-1])
    assert '"type":"integer"' in first
    assert first == second
    _run(MODEL, source, n=2, response_format={"type": "text"})
    assert {spec.sampling.grammar for spec in source.requested[-1]} == {""}
    wanted["json_schema"]["schema"] = {"type": "array", "uniqueItems": True}  # type: ignore[index]
    with pytest.raises(ParameterError, match="uniqueItems"):
        asyncio.run(_prepared(MODEL, response_format=wanted))
    with pytest.raises(ParameterError, match="has no tokenizer"):
        asyncio.run(_prepared(WORDLESS, prompt=[1], response_format={"type": "json_object"}))


def test_without_a_seed_every_request_has_one_of_its_own() -> None:
    source = _source([SCRIPT] * 4)
    seeds = []
    for _ in range(2):
        _run(MODEL, source, prompt=["a", "b"], n=2)
        seeds.append({spec.sampling.seed for spec in source.requested[-1]})
        assert len(seeds[-1]) == 1
    assert seeds[0] != seeds[1]


def _draws(source: ScriptedSource) -> list[tuple[int | None, int]]:
    """What the random numbers of each sequence depend on."""
    return [(spec.sampling.seed, spec.sampling.choice) for spec in source.requested[-1]]


def test_without_a_seed_equal_prompts_are_sampled_apart() -> None:
    source = _source([SCRIPT] * 6)
    _run(MODEL, source, prompt=["a", "b", "a"], n=2)
    seed = source.requested[-1][0].sampling.seed
    assert _draws(source) == [(seed, choice) for choice in range(6)]


def test_with_the_clients_seed_a_prompt_has_the_text_that_it_has_alone() -> None:
    source, alone = _source([SCRIPT] * 6), _source([SCRIPT] * 2)
    _run(MODEL, source, prompt=["a", "b", "a"], n=2, seed=7)
    _run(MODEL, alone, prompt="b", n=2, seed=7)
    assert _draws(source) == _draws(alone) * 3 == [(7, 0), (7, 1)] * 3


def test_token_ids_go_through_as_they_are() -> None:
    source = _source([SCRIPT] * 2)
    answer = _run(MODEL, source, prompt=[[5, 6], [7]], return_token_ids=True)
    assert [spec.prompt_ids for spec in source.requested[-1]] == [(5, 6), (7,)]
    assert answer["usage"]["prompt_tokens"] == 3


@settings(derandomize=True, deadline=None, max_examples=examples(200))
@given(
    prompt=st.lists(st.integers(0, 999), min_size=1, max_size=3),
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=st.floats(0, allow_infinity=False) | st.integers(0, 10**30),
    max_tokens=st.integers(1, 2**31 - 1),
)
@example(prompt=[2**64], seed=0, temperature=1, max_tokens=1)
@example(prompt=[-(2**63) - 1], seed=0, temperature=1, max_tokens=1)
@in_event_loop
async def test_what_is_accepted_crosses_the_wire(
    prompt: list[int], seed: int, temperature: float, max_tokens: int
) -> None:
    """A request that the ingress accepts must reach a router, be it only to be refused there."""
    try:
        completion = await _prepared(
            MODEL, prompt=prompt, seed=seed, temperature=temperature, max_tokens=max_tokens
        )
    except RequestError:
        return
    request = Request(tuple(completion.generation.sequences()))
    assert wire.decode_request(wire.encode_request(request)) == request


# What is counted


@pytest.mark.parametrize(
    ("n", "prompts"), [(1, [PROMPT]), (3, [PROMPT]), (2, [PROMPT, OTHER_PROMPT, ""])]
)
def test_a_prompt_counts_once_and_every_new_token_counts(n: int, prompts: list[str]) -> None:
    answer = _run(MODEL, _source([SCRIPT] * (n * len(prompts))), prompt=prompts, n=n)
    num_prompt = sum(len(TOKENIZER.encode(prompt)) for prompt in prompts)
    num_new = len(SCRIPT) * n * len(prompts)
    expected = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
    }
    expected |= {"prompt_tokens_details": {"cached_tokens": 0}}
    assert answer["usage"] == expected


@pytest.mark.parametrize(
    ("num_cached", "expected"), [((2,), [2, 2, 2]), ((0, 1, 3), [0, 1, 4]), ((4, 0, 4), [4, 4, 6])]
)
@in_event_loop
async def test_cached_tokens_add_up_to_the_prompts_at_most(
    num_cached: tuple[int, ...], expected: list[int]
) -> None:
    """A router that continues one of two choices may find their prompt again."""
    completion = await _prepared(MODEL, prompt=list(range(300, 306)), n=2)
    source = _source([SCRIPT] * 2, num_cached=num_cached)
    found = [
        completion.generation.usage.prompt_tokens_details.cached_tokens
        async for _ in completion.generation.stream(source)
    ]
    assert found[:3] == expected
    assert set(found[3:]) == {expected[-1]}
    assert completion.generation.usage.prompt_tokens == 6
    assert completion.generation.timings.cached_tokens == expected[-1]


def test_tokens_after_a_stop_string_do_not_count() -> None:
    answer = _run(MODEL, _source([SCRIPT], sizes=[1000]), stop=[";"], return_token_ids=True)
    [choice] = answer["choices"]
    assert choice["text"] == " Speak, my lord"
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert TOKENIZER.decode(tuple(choice["token_ids"])).endswith(";")
    assert tuple(choice["token_ids"]) == SCRIPT[: len(choice["token_ids"])]


@pytest.mark.parametrize("asks", [True, False])
def test_usage_comes_in_a_chunk_of_its_own_and_is_null_before(asks: bool) -> None:
    chunks, last = _stream(MODEL, _source([SCRIPT]), stream_options={"include_usage": asks})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(SCRIPT)
    if asks:
        assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)


def test_timings_are_the_routers_last_word_and_the_rest() -> None:
    timings = _run(MODEL, _source([SCRIPT]))["timings"]
    assert (timings["queue_s"], timings["prefill_s"], timings["decode_s"]) == (
        1.0,
        2.0,
        float(len(SCRIPT)),
    )
    assert set(timings) == {"ingress_s", "queue_s", "prefill_s", "decode_s", "cached_tokens"}


# Echo and stop strings


@pytest.mark.parametrize("prompt", [PROMPT, "", "two\n\n  lines \U0001f600"])
def test_echo_begins_with_the_prompt_as_it_was_given(prompt: str) -> None:
    answer = _run(MODEL, _source([SCRIPT] * 2), prompt=prompt, echo=True, n=2)
    assert [choice["text"] for choice in answer["choices"]] == [f"{prompt} {TEXT}"] * 2


def test_echo_of_token_ids_is_their_text() -> None:
    ids = list(TOKENIZER.encode(PROMPT))
    assert (
        _run(MODEL, _source([SCRIPT]), prompt=ids, echo=True)["choices"][0]["text"]
        == f"{PROMPT} {TEXT}"
    )


def test_a_stop_string_in_the_echoed_prompt_stops_nothing() -> None:
    [choice] = _run(MODEL, _source([SCRIPT]), echo=True, stop="news")["choices"]
    assert (choice["text"], choice["finish_reason"]) == (f"{PROMPT} {TEXT}", "length")


@settings(derandomize=True, deadline=None, max_examples=examples(100))
@given(start=st.integers(1, 30), length=st.integers(1, 8), sizes=SIZES)
def test_a_stop_string_is_found_across_tokens_and_batches(
    start: int, length: int, sizes: list[int]
) -> None:
    text = " " + TEXT
    stop = text[start : start + length]
    chunks, _ = _stream(MODEL, _source([SCRIPT], sizes), stop=stop)
    own = _changes(chunks, 0)
    assert "".join(change["text"] for change in own) == text.split(stop)[0]
    assert own[-1]["finish_reason"] == "stop"


def test_a_choice_that_stopped_sends_nothing_more_while_others_continue() -> None:
    chunks, _ = _stream(MODEL, _source([SCRIPT, OTHER_SCRIPT]), n=2, stop="Speak")
    assert [change["finish_reason"] for change in _changes(chunks, 0)][-1] == "stop"
    assert "".join(change["text"] for change in _changes(chunks, 1)) == " " + OTHER_TEXT
    assert all(chunk["choices"] for chunk in chunks)


def test_when_every_choice_has_stopped_the_source_is_closed_at_once() -> None:
    source = _source([SCRIPT, SCRIPT])
    _run(MODEL, source, n=2, stop="Speak")
    assert source.num_outputs < len(SCRIPT)


# Without a tokenizer


def test_without_a_tokenizer_ids_go_in_and_come_out() -> None:
    source = _source([(7, 8, 9)])
    answer = _run(WORDLESS, source, prompt=[1, 2], return_token_ids=True, echo=True)
    ids = {"token_ids": [7, 8, 9], "prompt_token_ids": [1, 2]}
    assert answer["choices"] == [ENDED | {"text": ""} | ids]
    totals = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert answer["usage"] == totals | {"prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"prompt": "a"}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": [1], "stop": "x"}, "stop"),
    ],
)
def test_without_a_tokenizer_texts_are_refused(fields: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ParameterError, match="no tokenizer") as refused:
        asyncio.run(_prepared(WORDLESS, **fields))
    assert refused.value.parameter == parameter


# What could never run


@pytest.mark.parametrize(
    ("num_prompts", "n", "fits"),
    [(8, 1, True), (2, 4, True), (9, 1, False), (3, 3, False), (1, 9, False)],
)
def test_too_many_sequences_are_refused_with_the_numbers(
    num_prompts: int, n: int, fits: bool
) -> None:
    preparing = _prepared(MODEL, prompt=["a"] * num_prompts, n=n)
    if fits:
        assert len(asyncio.run(preparing).generation.sequences()) == MAX_SEQUENCES
    else:
        with pytest.raises(
            ParameterError, match=f"{num_prompts * n} sequences.*at most {MAX_SEQUENCES}"
        ):
            asyncio.run(preparing)


def test_a_text_too_long_for_any_tokens_is_refused_without_reading_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert MODEL.tokenizer is not None
    longest = CONTEXT * MODEL.tokenizer.max_piece_bytes
    monkeypatch.setattr(MODEL.tokenizer, "encode", lambda text: (len(text) % 100,))
    assert asyncio.run(_prepared(MODEL, prompt="a" * longest)).generation.sequences()[
        0
    ].prompt_ids == (longest % 100,)

    def refuse(_text: str) -> None:
        raise AssertionError("this text must not be tokenized")

    monkeypatch.setattr(MODEL.tokenizer, "encode", refuse)
    with pytest.raises(ContextLengthError, match=f"at least {CONTEXT + 1} tokens") as refused:
        asyncio.run(_prepared(MODEL, prompt="a" * (longest + 1)))
    assert refused.value.parameter == "prompt"


@pytest.mark.parametrize(
    "length", [OFFLOAD_CHARS - 1, OFFLOAD_CHARS, OFFLOAD_CHARS + 1, 3 * OFFLOAD_CHARS]
)
def test_a_long_text_has_the_same_tokens(length: int) -> None:
    text = ("la la, \u00e9 " * length)[:length]
    roomy = replace(MODEL, max_model_len=10**6)
    assert asyncio.run(_prepared(roomy, prompt=text)).generation.sequences()[
        0
    ].prompt_ids == TOKENIZER.encode(text)


def test_many_short_texts_are_tokenized_outside_the_event_loop_like_a_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert MODEL.tokenizer is not None
    threads: set[int] = set()

    def encode(text: str) -> tuple[int, ...]:
        threads.add(threading.get_ident())
        return (len(text),)

    monkeypatch.setattr(MODEL.tokenizer, "encode", encode)
    wide = replace(MODEL, max_sequences=1000)
    asyncio.run(_prepared(wide, prompt=["a" * 10] * (OFFLOAD_CHARS // 10)))
    assert threads == {threading.get_ident()}
    asyncio.run(_prepared(wide, prompt=["a" * 10] * (OFFLOAD_CHARS // 10 + 1)))
    assert len(threads) == 2


def test_another_model_is_refused_and_none_is_this_one() -> None:
    check_model_name(MODEL, None)
    check_model_name(MODEL, "demo")
    with pytest.raises(UnknownModelError, match="'gpt' does not exist; this server has 'demo'"):
        check_model_name(MODEL, "gpt")


def test_the_list_of_models_has_this_one() -> None:
    entry = {
        "id": "demo",
        "object": "model",
        "created": 7,
        "owned_by": "tramontane",
        "max_model_len": CONTEXT,
    }
    entry |= {"vocab_size": VOCAB, "type": "base", "max_context_length": CONTEXT, "aliases": []}
    can = ("completion_chat", "completion_fim", "function_calling")
    entry["capabilities"] = dict.fromkeys((*can, "reasoning", "vision", "fine_tuning"), False)
    catalog = ModelCatalog(MODEL, NoChatTemplate(""), 7)
    assert catalog.list().as_json() == {"object": "list", "data": [entry]}


def test_anthropics_list_of_models_has_every_name_on_one_page() -> None:
    catalog = ModelCatalog(replace(MODEL, aliases=("other",)), NoChatTemplate(""), 7)
    listed = catalog.anthropic_list().as_json()
    assert [entry["id"] for entry in listed.pop("data")] == ["demo", "other"]
    assert listed == {"has_more": False, "first_id": "demo", "last_id": "other"}
    assert catalog.anthropic_entry("other").as_json() == {
        "type": "model",
        "id": "other",
        "display_name": "other",
        "created_at": "1970-01-01T00:00:07+00:00",
        "lifecycle": "active",
        "max_input_tokens": CONTEXT,
        "max_tokens": CONTEXT,
    }


# Who leaves, and what fails


@pytest.mark.parametrize("num_read", [1, 3])
@in_event_loop
async def test_closing_early_closes_the_source(num_read: int) -> None:
    source = _source([SCRIPT])
    changes = (await _prepared(MODEL)).generation.stream(source)
    for _ in range(num_read):
        await anext(changes)
    assert source.num_open == 1
    await changes.aclose()
    assert (source.num_open, source.num_outputs) == (0, num_read)


@pytest.mark.parametrize("num_turns", range(1, 8))
@in_event_loop
async def test_cancelling_closes_the_source(num_turns: int) -> None:
    source = _source([SCRIPT])
    running = asyncio.create_task((await _prepared(MODEL)).run(source))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert source.num_open == 0


@in_event_loop
async def test_a_failure_comes_after_the_tokens_and_closes_the_source() -> None:
    source = _source([SCRIPT], failure=PipelineError("stage 1 died"), fails_at=NEVER)
    completion = await _prepared(MODEL)
    texts = []
    changes = completion.generation.stream(source)
    for _ in SCRIPT:
        texts += [change["text"] for change in await anext(changes)]
    with pytest.raises(PipelineError, match="stage 1 died"):
        await anext(changes)
    assert "".join(texts) == " " + TEXT
    assert source.num_open == 0
    with pytest.raises(PipelineError, match="stage 1 died"):
        await (await _prepared(MODEL)).run(source)


@pytest.mark.parametrize("ended", [[0], [1], [0, 2], [1, 2]])
def test_an_answer_of_which_choices_have_ended_continues_with_the_others(ended: list[int]) -> None:
    """Another ingress has ended them; the source numbers what is left from 0."""
    left = [index for index in range(3) if index not in ended]
    state = ResumeState(choices={index: ChoiceState([300], FinishReason.STOP) for index in ended})

    async def scenario() -> dict[int, list[int]]:
        request = _request(prompt="ROMEO:", n=3, max_tokens=4, return_token_ids=True)
        completion = await prepare_completion(MODEL, request, 0.0, resume_state=state)
        found: dict[int, list[int]] = {}
        async for changes in completion.generation.stream(
            _source([(310 + index,) * 4 for index in left])
        ):
            for change in changes:
                found.setdefault(change["index"], []).extend(change["token_ids"])
        return found

    assert asyncio.run(scenario()) == {index: [310 + index] * 4 for index in left}
