"""Which differences are rounding's, and which count, with the demo model and transformers as the oracle."""

import asyncio
import random
from typing import Any

import pytest
from close_calls import close_call
from harness import random_ids
from soak_load import requests

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.pipeline.engine import open_engine
from tramontane.proto.request import SamplingParams, SequenceRequest

VOCABULARY = 1000
CLOSE, PLACE = 29, 33  # of the soak test's requests one whose 34th random number is 3e-8 from the next token's share


async def _answer(body: dict[str, Any]) -> list[int]:
    sampling = SamplingParams(max_tokens=PLACE + 3, temperature=1.0, seed=body["seed"], ignore_eos=True)
    async with open_engine(EngineConfig(local=True, dtype="float32", stages=1)) as engine:
        batches = [batch async for batch in engine.router.generate([SequenceRequest(tuple(body["prompt"]), sampling)])]
    return [event.token_id for batch in batches for event in batch.events]


@pytest.fixture(scope="module")
def body() -> dict[str, Any]:
    return requests(random.Random(0))[CLOSE]


@pytest.fixture(scope="module")
def answer(body: dict[str, Any]) -> list[int]:
    return asyncio.run(_answer(body))


def _parted(answer: list[int], place: int, token_id: int) -> list[int]:
    return [*answer[:place], token_id, *answer[place + 1 :]]


def test_a_draw_next_to_the_other_tokens_share_is_a_close_call(body: dict[str, Any], answer: list[int]) -> None:
    calls = [
        close_call(body, 0, PLACE, _parted(answer, PLACE, other), answer) for other in range(VOCABULARY) if other != answer[PLACE]
    ]
    (close,) = filter(None, calls)
    assert close == "its random number is 3.1e-08 from the other token's share"


@pytest.mark.parametrize("place", [0, PLACE - 1, PLACE + 1])
def test_elsewhere_no_other_token_is_one(body: dict[str, Any], answer: list[int], place: int) -> None:
    for other in random_ids(20, place, VOCABULARY):
        assert other == answer[place] or not close_call(body, 0, place, _parted(answer, place, other), answer)


def test_an_answer_that_ends_sooner_counts(body: dict[str, Any], answer: list[int]) -> None:
    assert not close_call(body, 0, PLACE, answer[:PLACE], answer)


def test_a_greedy_token_counts_unless_its_logit_is_as_good(body: dict[str, Any], answer: list[int]) -> None:
    greedy = body | {"temperature": 0.0}
    assert not close_call(greedy, 0, PLACE, _parted(answer, PLACE, 5), answer)
    assert close_call(greedy, 0, PLACE, answer, answer) == "their logits are 0.0e+00 apart"
