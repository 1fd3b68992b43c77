"""Sampling against a plain implementation, and what a draw may depend on: seed, choice and
position, nothing else.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from sampling_by_hand import SAMPLINGS, kept_by_hand, pick_by_hand
from torch import Tensor

from tramontane.proto.request import NOT_FINITE_TOKEN, SamplingParams
from tramontane.workers.sampling import row_sampler, sampler
from tramontane.workers.sampling.integer_sampler import ChooseTokens, choose_plainly
from tramontane.workers.sampling.sampler import hashed_uniform

VOCAB = 40


def sample(
    logits_SV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int]:
    ids: list[int] = sampler.sample(logits_SV, params, positions).tolist()
    return ids


def _params(**changes: Any) -> SamplingParams:  # any field of SamplingParams
    return SamplingParams(**{"temperature": 1.0, **changes})


def _logits(rows: int, seed: int = 0, vocab: int = VOCAB, std: float = 2.0) -> Tensor:
    return std * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "params", SAMPLINGS, ids=lambda p: f"T{p.temperature}-m{p.min_p}-k{p.top_k}-p{p.top_p}"
)
def test_the_same_token_as_by_hand(params: SamplingParams) -> None:
    logits = _logits(300)
    tokens = sample(logits, [params] * 300, range(300))
    borders = 0
    for row, token in enumerate(tokens):
        expected, distance = pick_by_hand(
            kept_by_hand(logits[row].tolist(), params),
            hashed_uniform(params.seed or 0, params.choice, row),
        )
        if distance < 1e-6:  # float32 may fall on either side
            borders += 1
        else:
            assert token == expected
    assert borders < 3
    greedy = logits.argmax(-1).tolist()
    assert tokens != greedy


def test_min_p_keeps_what_has_its_share_of_the_best_after_the_temperature() -> None:
    """Probabilities 0.5, 0.25, ...: 0.3 of the best keeps two; at temperature 2 the shares are 1,
    0.71, 0.5, 0.35, 0.25, ...
    """
    row = torch.tensor([[-math.log(2) * i for i in range(1, 21)]])
    for min_p, temperature, expected in (
        (0.3, 1.0, {0, 1}),
        (0.3, 2.0, {0, 1, 2, 3}),
        (1.0, 1.0, {0}),
        (0.0, 1.0, None),
        (1e-251, 1.0, None),  # less than float32 has
    ):
        params = _params(min_p=min_p, temperature=temperature)
        tokens = set(sample(row.expand(2000, -1), [params] * 2000, range(2000)))
        assert tokens == expected if expected else len(tokens) > 6


@pytest.mark.parametrize("top_k", [2, 6])
def test_top_k_keeps_k_and_no_more(top_k: int) -> None:
    row = _logits(1, seed=3, std=0.3)
    tokens = sample(row.expand(2000, -1), [_params(top_k=top_k)] * 2000, range(2000))
    assert set(tokens) == set(row[0].topk(top_k).indices.tolist())


def test_top_p_keeps_the_token_that_reaches_it() -> None:
    """Probabilities 0.5, 0.25, 0.125, ...: p = 0.7 needs two tokens, 0.75 just two, 0.8 three."""
    row = torch.tensor([[-math.log(2) * i for i in range(1, 21)]])
    for top_p, expected in ((0.4, {0}), (0.7, {0, 1}), (0.7499, {0, 1}), (0.8, {0, 1, 2})):
        assert (
            set(sample(row.expand(2000, -1), [_params(top_p=top_p)] * 2000, range(2000)))
            == expected
        )


def test_top_p_that_is_reached_exactly_keeps_no_token_more() -> None:
    """Four tokens of exactly 1/4 each, of which 0.5 needs two, and 0.25 and 0.75 one and three."""
    row = torch.zeros(1, 4)
    for top_p, expected in ((0.25, {0}), (0.5, {0, 1}), (0.75, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        assert (
            set(sample(row.expand(500, -1), [_params(top_p=top_p)] * 500, range(500))) == expected
        )


@pytest.mark.parametrize("row", [[1.0, 3.0, 3.0], [-math.inf, 2.0, -math.inf], [-0.0, 0.0, 0.0]])
def test_greedy_takes_the_first_of_equal_logits_as_pytorch_does(row: list[float]) -> None:
    logits_SV = torch.tensor([row, row[::-1]])
    assert torch.equal(
        sampler.sample(logits_SV, [SamplingParams(temperature=0.0)] * 2, [0, 0]),
        logits_SV.argmax(-1),
    )


def test_greedy_is_argmax() -> None:
    logits = _logits(200, seed=1)
    assert (
        sample(logits, [_params(temperature=0.0, top_k=3, top_p=0.5)] * 200, range(200))
        == logits.argmax(-1).tolist()
    )


@pytest.mark.parametrize(
    "params",
    [
        _params(top_k=1),
        _params(top_p=1e-9),
        _params(temperature=1e-10),
        _params(temperature=1e-300),
        _params(top_p=1e-300),  # 0 in float32
    ],
    ids=lambda p: f"T{p.temperature}-k{p.top_k}-p{p.top_p}",
)
def test_extremes_are_greedy(params: SamplingParams) -> None:
    logits = _logits(200, seed=2, std=20.0)
    assert sample(logits, [params] * 200, range(200)) == logits.argmax(-1).tolist()


def test_extremes_of_logits_stay_in_the_vocabulary() -> None:
    """Huge, equal and all but one excluded: no nan, never a token of no weight."""
    huge = torch.tensor([[3e4, -3e4, 2.9e4, 0.0]])
    one = torch.tensor([[-torch.inf, 1.0, -torch.inf, -torch.inf]])
    for params in (
        _params(),
        _params(temperature=1e-10),
        _params(temperature=1e6, top_k=9, top_p=0.999),
    ):
        assert set(sample(one.expand(500, -1), [params] * 500, range(500))) == {1}
        assert sample(huge, [_params(temperature=1e-10)], [0]) == [0]
    assert set(sample(torch.zeros(500, 4), [_params(top_k=10**9)] * 500, range(500))) == {
        0,
        1,
        2,
        3,
    }


def test_a_draw_does_not_depend_on_its_company() -> None:
    logits = _logits(60, seed=4)
    rng = random.Random(0)
    params = [
        _params(
            temperature=rng.choice([0.0, 0.5, 1.0]),
            top_k=rng.choice([0, 4]),
            top_p=rng.choice([0.6, 1.0]),
            min_p=rng.choice([0.0, 0.1]),
            seed=row,
        )
        for row in range(60)
    ]
    positions = [rng.randrange(1000) for _ in range(60)]
    together = sample(logits, params, positions)
    alone = [sample(logits[row : row + 1], [params[row]], [positions[row]])[0] for row in range(60)]
    assert together == alone
    order = rng.sample(range(60), 60)
    shuffled = sample(
        logits[order], [params[row] for row in order], [positions[row] for row in order]
    )
    assert shuffled == [together[row] for row in order]


def test_seed_choice_and_position_each_make_another_draw() -> None:
    base = {
        (seed, choice, position)
        for seed in (-5, 0, 1)
        for choice in (0, 1, 2)
        for position in range(50)
    }
    assert len({hashed_uniform(*key) for key in base}) == len(base)
    flat = torch.zeros(1, 1000).expand(50, -1)
    draws = [
        sample(flat, [_params(seed=seed, choice=choice)] * 50, range(first, first + 50))
        for seed, choice, first in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 50))
    ]
    for one, other in itertools.combinations(draws, 2):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 5
    assert sample(flat, [_params()] * 50, range(50)) == draws[0]


def test_uniform_is_pinned() -> None:
    """Replays on another machine, or by a later version, must continue with the same numbers."""
    assert hashed_uniform(0, 0, 0) == 0.156742553465558
    assert hashed_uniform(-(2**63), 3, 32767) == 0.8022540742961797
    draws = [hashed_uniform(11, 0, position) for position in range(4000)]
    assert all(0.0 <= u < 1.0 for u in draws)
    tenths = Counter(int(10 * u) for u in draws)
    assert all(320 < tenths[i] < 480 for i in range(10))


@pytest.mark.parametrize(
    "params",
    [_params(seed=5), _params(seed=6, temperature=0.6), _params(seed=7, top_k=4, top_p=0.9)],
)
def test_frequencies_are_those_of_softmax(params: SamplingParams) -> None:
    """Pearson's statistic over 20 000 positions: above 35 by chance once in 10 000 times with 10
    degrees of freedom.
    """
    row, num_draws = _logits(1, seed=9, vocab=11, std=1.0), 20_000
    counts = Counter(sample(row.expand(num_draws, -1), [params] * num_draws, range(num_draws)))
    expected = dict(kept_by_hand(row[0].tolist(), params))
    assert set(counts) <= set(expected)
    assert sum((counts[t] - num_draws * p) ** 2 / (num_draws * p) for t, p in expected.items()) < 35


NOT_FINITE = {
    "NaN, first": [math.nan, 1.0, 2.0, 3.0],
    "NaN, last": [1.0, 2.0, 3.0, math.nan],
    "NaN, negative": [1.0, -math.nan, 2.0, 3.0],
    "all NaN": [math.nan] * 4,
    "NaN and infinities": [math.inf, math.nan, -math.inf, 0.0],
    "plus infinity": [1.0, math.inf, 2.0, 3.0],
    "both infinities": [math.inf, -math.inf, 0.0, 1.0],
    "nothing can be chosen": [-math.inf] * 4,
}
FINITE = {
    "one can be chosen": [-math.inf, -math.inf, 1.0, -math.inf],
    "the largest number": [torch.finfo(torch.float32).max, 0.0, 1.0, 2.0],
    "the smallest number": [torch.finfo(torch.float32).min, -math.inf, -math.inf, -math.inf],
}


@pytest.mark.parametrize(
    "choose", [None, choose_plainly], ids=["one by one", "together, as on a GPU"]
)
@pytest.mark.parametrize(
    "params",
    [_params(temperature=0.0), _params(), _params(top_p=0.5, top_k=2), _params(min_p=0.1)],
    ids=str,
)
def test_rows_that_are_not_finite_have_no_token_and_change_no_other(
    params: SamplingParams, choose: ChooseTokens | None
) -> None:
    rows = {**NOT_FINITE, **FINITE, "numbers": [0.5, -1.0, 2.0, 0.0]}
    logits_SV, positions = torch.tensor(list(rows.values())), range(len(rows))
    ids = dict(
        zip(
            rows,
            sampler.sample(logits_SV, [params] * len(rows), positions, choose).tolist(),
            strict=True,
        )
    )
    assert {
        name for name, token_id in ids.items() if token_id == NOT_FINITE_TOKEN
    } == NOT_FINITE.keys()
    for number, (name, row) in enumerate(rows.items()):
        if name not in NOT_FINITE:
            assert row[ids[name]] > -math.inf
            assert [ids[name]] == sampler.sample(
                logits_SV[number, None], [params], [number], choose
            ).tolist()


def test_large_rows_that_are_not_finite() -> None:
    """Of a vocabulary's size, where NumPy compares many numbers at a time, with NaN or plus
    infinity in any place.
    """
    rows = _logits(64, seed=4, vocab=131_072)
    places = torch.randint(0, rows.shape[1], (64,), generator=torch.Generator().manual_seed(1))
    for row in range(1, 64, 2):
        rows[row, places[row]] = math.nan if row % 4 == 1 else math.inf
    params = [_params(temperature=float(row % 3 == 0)) for row in range(64)]
    ids = sample(rows, params, range(64))
    assert [token_id == NOT_FINITE_TOKEN for token_id in ids] == [row % 2 == 1 for row in range(64)]


def test_a_temperature_that_makes_logits_infinite_is_greedy() -> None:
    assert sample(torch.tensor([[1e37, 3e37, 2e37]]), [_params(temperature=1e-3)], [0]) == [1]


LARGE = 5000  # more than the likeliest tokens that are sorted at first


@pytest.mark.parametrize("std", [0.01, 1.0, 4.0])
@pytest.mark.parametrize(
    "params",
    [
        *SAMPLINGS,
        _params(top_k=2000),
        _params(temperature=1.5, top_k=1500, top_p=0.9),
        _params(temperature=5.0, min_p=0.9),
    ],
    ids=lambda p: f"T{p.temperature}-m{p.min_p}-k{p.top_k}-p{p.top_p}",
)
def test_a_large_vocabulary_by_hand(params: SamplingParams, std: float) -> None:
    """Nearly flat distributions, of which all tokens have to be sorted, and others; with many equal
    logits.
    """
    logits = (_logits(16, seed=5, vocab=LARGE, std=std) * 64).round() / 64
    tokens = sample(logits, [params] * 16, range(16))
    borders = 0
    for row, token in enumerate(tokens):
        kept = kept_by_hand(logits[row].tolist(), params)
        u = hashed_uniform(params.seed or 0, params.choice, row)
        expected, distance = pick_by_hand(kept, u)
        if distance < 1e-6:
            borders += 1
        else:
            assert token == expected, row
    assert borders < 5


def test_all_logits_are_sorted_only_where_the_likeliest_do_not_suffice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []
    choose = row_sampler._choose

    def recorded(scaled_V: Any, candidates_C: Any, *rest: Any) -> int | None:
        sizes.append(len(candidates_C))
        return choose(scaled_V, candidates_C, *rest)

    monkeypatch.setattr(row_sampler, "_choose", recorded)
    for std, params, all_sorted in (
        (4.0, _params(), False),
        (0.01, _params(top_k=50), False),
        (0.01, _params(), True),
    ):
        sizes.clear()
        sample(_logits(20, seed=6, vocab=LARGE, std=std), [params] * 20, range(20))
        assert min(sizes) == row_sampler.NUM_LIKELIEST
        assert (LARGE in sizes) is all_sorted


def test_a_border_belongs_to_the_share_that_begins_there() -> None:
    """Four equal tokens: [0, 1/4) is the first's."""
    row = torch.zeros(4).numpy()
    assert [
        row_sampler.sample_row(row, _params(), uniform) for uniform in (0.0, 0.25, 0.5, 0.75)
    ] == [0, 1, 2, 3]
