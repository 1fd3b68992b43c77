"""Which differences are rounding's, and which count, with the demo model and transformers as the
oracle.
"""

import asyncio
import random
from typing import Any

import pytest
from chaos_load import bodies
from close_calls import close_call, encode, gate_ties
from harness import random_ids
from soak_load import requests

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.pipeline.engine import open_engine
from tramontane.proto.request import Request, SamplingParams

pytestmark = pytest.mark.nightly

VOCABULARY = 1000
# with seed 777, the request with a tie at a gate, and the first place where the two experts' tokens
# differ
TIED, APART = 10, 14
TIED_TOKENS = 632, 763
# of the soak test's requests one whose 34th random number is 3e-8 from the next token's share
CLOSE, PLACE = 29, 33


def _tokens(request: Request) -> list[int]:
    async def generate() -> list[int]:
        async with open_engine(EngineConfig(local=True, dtype="float32", stages=1)) as engine:
            return [
                event.token_id
                async for batch in engine.router.generate(request)
                for event in batch.events
            ]

    return asyncio.run(generate())


@pytest.fixture(scope="module")
def body() -> dict[str, Any]:
    return requests(random.Random(0))[CLOSE]


@pytest.fixture(scope="module")
def answer(body: dict[str, Any]) -> list[int]:
    sampling = SamplingParams(
        max_tokens=PLACE + 3, temperature=1.0, seed=body["seed"], ignore_eos=True
    )
    return _tokens(Request.of(tuple(body["prompt"]), sampling))


def _parted(answer: list[int], place: int, token_id: int) -> list[int]:
    return [*answer[:place], token_id, *answer[place + 1 :]]


def test_a_draw_next_to_the_other_tokens_share_is_a_close_call(
    body: dict[str, Any], answer: list[int]
) -> None:
    calls = [
        close_call(body, 0, PLACE, _parted(answer, PLACE, other), answer)
        for other in range(VOCABULARY)
        if other != answer[PLACE]
    ]
    (close,) = filter(None, calls)
    assert close == "its random number is 3.1e-08 from the other token's share"


@pytest.mark.parametrize("place", [0, PLACE - 1, PLACE + 1])
def test_elsewhere_no_other_token_is_one(
    body: dict[str, Any], answer: list[int], place: int
) -> None:
    for other in random_ids(20, place, VOCABULARY):
        assert other == answer[place] or not close_call(
            body, 0, place, _parted(answer, place, other), answer
        )


def test_an_answer_that_ends_sooner_counts(body: dict[str, Any], answer: list[int]) -> None:
    assert not close_call(body, 0, PLACE, answer[:PLACE], answer)


def test_a_greedy_token_counts_unless_its_logit_is_as_good(
    body: dict[str, Any], answer: list[int]
) -> None:
    greedy = body | {"temperature": 0.0}
    assert not close_call(greedy, 0, PLACE, _parted(answer, PLACE, 5), answer)
    assert close_call(greedy, 0, PLACE, answer, answer) == "their logits are 0.0e+00 apart"


@pytest.fixture(scope="module")
def tied() -> tuple[dict[str, Any], list[int]]:
    """The request of the chaos test whose second and third expert's scores are 6e-9 apart, and its
    answer.
    """
    body = bodies(TIED + 1, random.Random(777))[TIED]
    body |= {"prompt": encode(body["prompt"])}
    sampling = SamplingParams(
        max_tokens=APART + 1, temperature=body["temperature"], seed=body["seed"], ignore_eos=True
    )
    return body, _tokens(Request.of(tuple(body["prompt"]), sampling))


def test_a_tie_at_a_gate_is_a_close_call_if_both_experts_explain_the_tokens(
    tied: tuple[dict[str, Any], list[int]],
) -> None:
    body, answer = tied
    (tie,) = gate_ties(tuple(body["prompt"]))
    assert (tie.layer, tie.position) == (0, 135)
    assert tie.gap < 1e-8
    assert answer[APART] in TIED_TOKENS
    (other,) = set(TIED_TOKENS) - {answer[APART]}
    explained = close_call(body, 0, APART, _parted(answer, APART, other), answer)
    assert (
        explained
        == "the scores of two experts at layer 0, position 135 are 5.8e-09 apart, and each gives"
        " one of the two tokens"
    )
    assert close_call(body, 0, APART, answer, _parted(answer, APART, other)) == explained


def test_a_tie_at_a_gate_does_not_explain_other_tokens(
    tied: tuple[dict[str, Any], list[int]],
) -> None:
    body, answer = tied
    for unexpected in set(random_ids(10, 1, VOCABULARY)) - set(TIED_TOKENS):
        assert not close_call(body, 0, APART, _parted(answer, APART, unexpected), answer)
    assert not close_call(body, 0, APART - 1, _parted(answer, APART - 1, 5), answer)
