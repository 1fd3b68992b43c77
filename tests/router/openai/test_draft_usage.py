"""What became of drafts, in the usage of completions: of those tokens that an answer has."""

import asyncio
import json
from typing import Any

import pytest
from scripted_token_source import ScriptedSource, Step

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.proto.request import (
    FinishReason,
    RequestTimings,
)
from tramontane.router.openai.completion import prepare_completion
from tramontane.router.openai.completion_request import parse_completion
from tramontane.router.openai.response_models import CompletionAnswer, Usage
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.backends import SentencePieceTokenizer

TOKENIZER = SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model")
MODEL = ServedModel("demo", TOKENIZER, 256, 8, 1000)
TIMES = RequestTimings(0.0, 0.0, 0.0)
SCRIPT = TOKENIZER.encode("Speak, my lord; the hour is late.")[1:]
NUM_TO_STOP = next(n for n in range(1, 99) if ";" in TOKENIZER.decode(SCRIPT[:n]))


def _drafting(*steps: Step) -> ScriptedSource:
    return ScriptedSource(SCRIPT, steps=steps, finish=FinishReason.LENGTH)


def _usage(source: ScriptedSource, **fields: Any) -> dict[str, Any]:
    async def scenario() -> dict[str, Any]:
        completion = await prepare_completion(
            MODEL, parse_completion(json.dumps({"prompt": "a"} | fields).encode()), 0.0
        )
        answer = await completion.run(source)
        CompletionAnswer.model_validate_json(json.dumps(answer))
        usage: dict[str, Any] = answer["usage"]
        return usage

    return asyncio.run(scenario())


def _details(accepted: int, rejected: int) -> dict[str, int]:
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}


REST = len(SCRIPT) - 6


def test_the_counts_of_all_outputs_and_choices_add_up() -> None:
    source = _drafting(
        {0: (1, 0, 0), 1: (1, 0, 0)},
        {0: (3, 4, 2)},
        {0: (1, 3, 0), 1: (5, 4, 4)},
        {0: (1, 0, 0)},
        {1: (REST, 9, 1)},
        {0: (REST, 0, 0)},
    )
    usage = _usage(source, n=2)
    assert usage["completion_tokens"] == 2 * len(SCRIPT)
    assert usage["completion_tokens_details"] == _details(2 + 4 + 1, 2 + 3 + 8)


def test_a_server_that_speculates_says_so_where_nothing_was_drafted() -> None:
    assert _usage(_drafting({0: (len(SCRIPT), 0, 0)}))["completion_tokens_details"] == _details(
        0, 0
    )


@pytest.mark.parametrize(
    ("num_beyond", "expected"), [(0, (3, 1)), (1, (3, 1)), (2, (2, 2)), (3, (1, 3))]
)
def test_right_drafts_after_a_stop_string_are_rejected(
    num_beyond: int, expected: tuple[int, int]
) -> None:
    """Of a step of four tokens the last was not drafted, and so many come after the stop string."""
    source = _drafting({0: (NUM_TO_STOP - 4 + num_beyond, 0, 0)}, {0: (4, 4, 3)})
    usage = _usage(source, stop=";")
    assert usage["completion_tokens"] == NUM_TO_STOP
    assert usage["completion_tokens_details"] == _details(*expected)


def test_drafts_of_a_choice_that_has_finished_do_not_count() -> None:
    """More tokens of it come until the other choice finishes, too."""
    source = _drafting(
        {0: (NUM_TO_STOP, 5, 4), 1: (1, 0, 0)}, {0: (2, 7, 1)}, {1: (NUM_TO_STOP, 3, 2)}
    )
    assert _usage(source, n=2, stop=";")["completion_tokens_details"] == _details(6, 2)


def test_an_answer_without_tokens_has_no_drafts() -> None:
    usage = _usage(_drafting({0: (1, 0, 0)}), max_tokens=0, echo=True)
    assert (usage["completion_tokens"], usage["completion_tokens_details"]) == (0, _details(0, 0))


@pytest.mark.parametrize(
    ("num_reasoning", "drafts", "expected"),
    [
        (None, None, None),
        (0, None, {"reasoning_tokens": 0}),
        (None, (0, 0), _details(0, 0)),
        (4, (3, 2), {"reasoning_tokens": 4} | _details(3, 2)),
    ],
)
def test_details_are_those_that_are_known(
    num_reasoning: int | None, drafts: tuple[int, int] | None, expected: dict[str, int] | None
) -> None:
    assert (
        Usage.of(3, 9, 0, num_reasoning, drafts).as_json().get("completion_tokens_details")
        == expected
    )
