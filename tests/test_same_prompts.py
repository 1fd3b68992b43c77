"""A prompt is accepted or refused, with the same words, by HTTP, gRPC, ``tramontane generate``,
``LLM`` and the router.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizer_files import SENTENCEPIECE, json_of_sentencepiece

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.engine_keys import DEMO_MODEL
from tramontane.cluster.console.prompts import Prompt, encode_prompts
from tramontane.cluster.llm.inputs import PromptEncoder
from tramontane.proto import inference_pb2 as pb
from tramontane.proto.errors import RequestError
from tramontane.proto.model_folder import resolve_model_args
from tramontane.proto.plan import CachePlan
from tramontane.proto.request import SamplingParams
from tramontane.router.grpc.messages import parse_generate
from tramontane.router.openai.completion import prepare_completion
from tramontane.router.openai.completion_request import CompletionRequest, parse_completion
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.sequence import Sequence as LiveSequence
from tramontane.router.scheduling.waiting_queue import SchedulerLimits, validate_sequence
from tramontane.router.tokenization.loader import load_tokenizer

Given = str | Sequence[int]
CONTEXT = 2048


def _results(folder: Path, prompt: Given) -> list[str | tuple[int, ...]]:
    """Return the ids or the refusal of every interface that takes such a prompt."""
    args = resolve_model_args(folder)
    tokenizer = load_tokenizer(folder, args.vocab_size)
    served = ServedModel("it", tokenizer, CONTEXT, 64, args.vocab_size)
    config = EngineConfig(model=folder, max_model_len=CONTEXT)

    def complete(request: CompletionRequest) -> tuple[int, ...]:
        [spec] = asyncio.run(prepare_completion(served, request, 0.0)).generation.sequences()
        return spec.prompt_ids

    is_text = isinstance(prompt, str)
    message = (
        pb.GenerateRequest(text=prompt)
        if is_text
        else pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt))
    )
    interfaces = [
        lambda: complete(parse_completion(json.dumps({"prompt": prompt}).encode())),
        lambda: complete(parse_generate(message)),
        lambda: PromptEncoder(folder, CONTEXT, args.vocab_size).encode(prompt, "the prompt"),
    ]
    if is_text:
        interfaces.append(lambda: encode_prompts(config, [Prompt(prompt, "the prompt")])[1][0])
    else:
        sequence = LiveSequence(0, tuple(prompt), SamplingParams(), max_len=CONTEXT)
        limits = SchedulerLimits(8, 512, CONTEXT, args.vocab_size)
        interfaces.append(
            lambda: validate_sequence(sequence, limits, PageAllocator(CachePlan(16, ())))
        )
    results: list[str | tuple[int, ...]] = []
    for interface in interfaces:
        try:
            results.append(interface())
        except RequestError as error:
            results.append(str(error))
    return results


@pytest.fixture(scope="module")
def folder_without_bos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("without_bos")
    (folder / "config.json").write_text(
        json.dumps(json.loads((DEMO_MODEL / "config.json").read_text()) | {"vocab_size": 40_000})
    )
    written = json_of_sentencepiece(SENTENCEPIECE["v1"]) | {"post_processor": None}
    (folder / "tokenizer.json").write_text(json.dumps(written))
    return folder


def test_an_empty_text_is_the_token_that_begins_every_text() -> None:
    assert _results(DEMO_MODEL, "") == [(1,)] * 4


def test_a_space_is_a_prompt() -> None:
    results = _results(DEMO_MODEL, " ")
    assert results[0][0] == 1
    assert len(results[0]) > 1
    assert results == results[:1] * 4


def test_an_empty_text_without_any_token_is_refused(folder_without_bos: Path) -> None:
    assert (
        _results(folder_without_bos, "") == ["the prompt is empty; give it at least one token"] * 4
    )


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            [5] * CONTEXT,
            f"the prompt is too long: {CONTEXT} tokens > {CONTEXT - 1} maximum",
        ),
        ([5, 1000], "the prompt has token id 1000; the model's vocabulary has the ids 0 to 999"),
        (
            "la " * CONTEXT,
            f" > {CONTEXT - 1} maximum. This model's maximum context length is {CONTEXT} tokens",
        ),
        (
            "la " * 10**6,
            "the prompt is too long: at least ",
        ),
    ],
    ids=["too many ids", "unknown id", "too many tokens", "too many characters"],
)
def test_what_cannot_be_generated_from_is_refused_with_the_same_words(
    prompt: Given, message: str
) -> None:
    first, *others = _results(DEMO_MODEL, prompt)
    assert message in first
    assert others == [first] * len(others)
