"""Sampling in whole numbers: against Python's own numbers and transformers, and what a kernel that
differs leads to.
"""

import logging
import math
import random
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sampling_by_hand import SAMPLINGS, kept_by_hand, pick_by_hand
from tiny_models import tiny_args, tiny_plan
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tramontane.proto.request import SamplingParams
from tramontane.workers.sampling.integer_sampler import (
    FARTHEST,
    UNITS,
    choose_plainly,
    integer_weights,
    keep_likeliest,
    row_params,
    share,
)
from tramontane.workers.sampling.sampler import hashed_uniform, kernel_for, sample
from tramontane.workers.stage import device_backend

CPU = torch.device("cpu")
VOCAB = 40
PLAIN = SamplingParams(temperature=1.0)


def _logits(rows: int, seed: int = 0, vocab: int = VOCAB, std: float = 2.0) -> Tensor:
    return std * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def _weights(logits_SV: Tensor, temperature: float = 1.0) -> Tensor:
    temperature_S1 = torch.full((len(logits_SV), 1), temperature)
    return integer_weights(logits_SV, logits_SV.amax(-1, keepdim=True), temperature_S1)


def _choose(logits_SV: Tensor, params: SamplingParams, uniforms: list[float]) -> list[int]:
    ids: list[int] = choose_plainly(
        logits_SV, row_params([params] * len(uniforms), uniforms, CPU)
    ).tolist()
    return ids


def test_the_worked_examples() -> None:
    assert _weights(torch.tensor([[0.0, -1.0, -30.0, -torch.inf]])).tolist() == [
        [UNITS, 395007543, 0, 0]
    ]
    params = SamplingParams(temperature=0.5, top_p=0.75)
    assert row_params([params], [0.25], CPU).tolist() == [
        [0x3F000000, 2**31 - 1, 0, 3 * 2**34, 2**34]
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_weights_are_exponentials(temperature: float) -> None:
    """To 6 units of the polynomial, and half a unit of the last shift; float32 rounds a distance by
    2**-24 of itself, twice.
    """
    distances = torch.linspace(0, FARTHEST + 2, 100_001)
    logits_SV = torch.cat([-distances, -distances * 1e-4, torch.zeros(1)])[None]
    weights_V, scaled_V = _weights(logits_SV, temperature)[0], logits_SV[0].double() / temperature
    expected_V = scaled_V.exp() * UNITS
    allowed_V = 7 + expected_V * (scaled_V.abs() * 2**-22 + 2**-26)
    assert ((weights_V - expected_V).abs() <= allowed_V).all()
    order = logits_SV[0].argsort(descending=True)
    assert (weights_V[order].diff() <= 0).all(), "a lower logit has no more weight"
    assert weights_V.max() == UNITS


def test_a_share_is_that_of_pythons_integers() -> None:
    numbers = random.Random(0)
    totals = [
        0,
        1,
        2**24 - 1,
        2**24,
        2**50 - 1,
        *(numbers.randrange(2 ** numbers.randrange(1, 51)) for _ in range(500)),
    ]
    parts = [2**36, 2**36 - 1, 0, 1, *(numbers.randrange(2**36) for _ in range(len(totals) - 4))]
    found = share(torch.tensor(totals), torch.tensor(parts)).tolist()
    assert found == [total * part >> 36 for total, part in zip(totals, parts, strict=True)]


@pytest.mark.parametrize(
    "params", SAMPLINGS, ids=lambda p: f"T{p.temperature}-m{p.min_p}-k{p.top_k}-p{p.top_p}"
)
@pytest.mark.parametrize("vocab", [VOCAB, 3000])
def test_the_same_token_as_by_hand(params: SamplingParams, vocab: int) -> None:
    """Kept as on CPUs, and drawn in the order of token ids. Many logits are equal."""
    logits_SV = (_logits(100, seed=5, vocab=vocab) * 64).round() / 64
    tokens = sample(logits_SV, [params] * 100, range(100), choose_plainly).tolist()
    borders = 0
    for row, token in enumerate(tokens):
        kept = sorted(kept_by_hand(logits_SV[row].tolist(), params))
        expected, distance = pick_by_hand(
            kept, hashed_uniform(params.seed or 0, params.choice, row)
        )
        if distance < 1e-6:
            borders += 1
        else:
            assert token == expected, row
    assert borders < 5
    assert tokens != logits_SV.argmax(-1).tolist()


def _by_transformers(logits_SV: Tensor, params: SamplingParams) -> Tensor:
    """Return the probabilities that remain, in the order of ``SamplingParams``."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        warpers.append(TopKLogitsWarper(min(params.top_k, logits_SV.shape[1])))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    probabilities_SV: Tensor = warpers(
        torch.zeros(len(logits_SV), 1, dtype=torch.int64), logits_SV
    ).softmax(-1)
    return probabilities_SV


@pytest.mark.parametrize(
    "params", SAMPLINGS, ids=lambda p: f"T{p.temperature}-m{p.min_p}-k{p.top_k}-p{p.top_p}"
)
def test_kept_tokens_and_probabilities_are_those_of_transformers(params: SamplingParams) -> None:
    """Of logits of which no two are equal: of equal ones transformers' top-k keeps more than k."""
    logits_SV = _logits(200, seed=8, vocab=2000, std=3.0)
    params_S5 = row_params([params] * len(logits_SV), [0.0] * len(logits_SV), CPU)
    kept_SV = keep_likeliest(_weights(logits_SV, params.temperature), logits_SV, params_S5)
    expected_SV = _by_transformers(logits_SV, params)
    torch.testing.assert_close(
        (kept_SV / kept_SV.sum(-1, keepdim=True)).float(), expected_SV, rtol=1e-5, atol=1e-6
    )
    has_no_weight_SV = (kept_SV == 0) & (expected_SV < 1e-8)
    has_other_set_S = (((kept_SV > 0) != (expected_SV > 0)) & ~has_no_weight_SV).any(-1)
    assert int(has_other_set_S.sum()) <= 2, "only next to a border, by rounding"


@pytest.mark.parametrize(
    "params", [PLAIN, replace(PLAIN, temperature=0.6), replace(PLAIN, top_k=4, top_p=0.9)], ids=str
)
def test_a_token_has_its_share_of_all_random_numbers(params: SamplingParams) -> None:
    """Random numbers at equal distances: each token is drawn as often as its probability says, to
    one.
    """
    logits_SV, num_draws = _logits(1, seed=9, vocab=11, std=1.0), 20_000
    uniforms = [draw / num_draws for draw in range(num_draws)]
    counts = Counter(_choose(logits_SV.expand(num_draws, -1), params, uniforms))
    expected = dict(kept_by_hand(logits_SV[0].tolist(), params))
    assert set(counts) == set(expected)
    assert all(
        abs(counts[token] - probability * num_draws) <= 1 for token, probability in expected.items()
    )


def test_a_border_belongs_to_the_share_that_begins_there() -> None:
    assert _choose(torch.zeros(5, 4), PLAIN, [0.0, 0.25, 0.5, 0.75, 1 - 2**-53]) == [0, 1, 2, 3, 3]


def test_top_p_that_is_reached_exactly_keeps_no_token_more() -> None:
    """Four tokens of exactly 1/4 each, of which 0.5 needs two, the first ones."""
    uniforms = [draw / 64 for draw in range(64)]
    for top_p, expected in ((1e-300, 1), (0.25, 1), (0.5, 2), (0.75, 3), (0.76, 4), (1.0, 4)):
        assert set(_choose(torch.zeros(64, 4), replace(PLAIN, top_p=top_p), uniforms)) == set(
            range(expected)
        )


def test_of_equal_logits_the_first_are_kept() -> None:
    """Also of 0 and -0."""
    logits_SV = torch.tensor([[-1.0, -0.0, 2.0, 0.0, -0.0, 0.0]]).expand(64, -1)
    uniforms = [draw / 64 for draw in range(64)]
    assert set(_choose(logits_SV, replace(PLAIN, top_k=3), uniforms)) == {1, 2, 3}


EXTREMES = [
    {"top_k": 1},
    {"top_k": 1, "temperature": 1e300},
    {"top_p": 1e-9},
    {"top_p": 1e-300},
    {"min_p": 1.0},
    {"temperature": 1e-10},
    {"temperature": 1e-300},
]


@pytest.mark.parametrize("changes", EXTREMES, ids=str)
def test_extremes_are_greedy(changes: dict[str, float]) -> None:
    logits_SV, uniforms = _logits(200, seed=2, std=20.0), [draw / 200 for draw in range(200)]
    assert _choose(logits_SV, replace(PLAIN, **changes), uniforms) == logits_SV.argmax(-1).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes", [{}, *EXTREMES, {"temperature": 1e300}, {"top_k": 9, "top_p": 0.999}], ids=str
)
def test_the_only_token_that_is_allowed_is_chosen(changes: dict[str, float]) -> None:
    logits_SV = torch.full((50, 4), -torch.inf)
    logits_SV[:, 2] = -7.0
    uniforms = [draw / 50 for draw in range(50)]
    assert set(_choose(logits_SV, replace(PLAIN, **changes), uniforms)) == {2}  # type: ignore[arg-type]


def test_a_temperature_that_makes_logits_infinite_is_greedy() -> None:
    logits_SV = torch.tensor([[1e37, 3e37, 2e37], [-3e38, -2e38, -torch.inf]])
    assert _choose(logits_SV, replace(PLAIN, temperature=1e-3), [0.9, 0.9]) == [1, 1]


def test_a_token_does_not_depend_on_its_company() -> None:
    logits_SV, numbers = _logits(60, seed=4), random.Random(0)
    params = [
        replace(numbers.choice([*SAMPLINGS, replace(PLAIN, temperature=0.0)]), seed=row)
        for row in range(60)
    ]
    together = sample(logits_SV, params, range(60), choose_plainly).tolist()
    assert together == [
        sample(logits_SV[row, None], [params[row]], [row], choose_plainly).item()
        for row in range(60)
    ]


@pytest.fixture
def as_kernel(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return what stands for the kernel's module."""
    module = SimpleNamespace(choose_tokens=lambda *given: choose_plainly(*given))
    monkeypatch.setitem(sys.modules, "tramontane.workers.sampling.triton_sampler", module)  # type: ignore[arg-type]
    return module


def test_a_kernel_that_is_right_is_used(
    as_kernel: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    for vocab in (1, 7, 1000):
        assert kernel_for(CPU, vocab) is as_kernel.choose_tokens
    assert not caplog.records


def test_a_kernel_that_is_wrong_is_not_used(
    as_kernel: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Here in the last row only, which is one of top-k."""

    def wrong(logits_SV: Tensor, params_S5: Tensor) -> Tensor:
        chosen_S = choose_plainly(logits_SV, params_S5)
        chosen_S[-2] += 1
        return chosen_S

    as_kernel.choose_tokens = wrong
    assert kernel_for(CPU, 1000) is None
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "(1 of 20 tokens are not those of PyTorch)" in record.getMessage()


def test_without_triton_tokens_are_sorted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "tramontane.workers.sampling.triton_sampler", None)  # type: ignore[arg-type]
    assert kernel_for(CPU, 1000) is None
    [record] = caplog.records
    assert record.levelno == logging.WARNING


def test_the_self_test_has_rows_of_every_kind(as_kernel: SimpleNamespace) -> None:
    """Among them draws that the kinds of cuts change, equal logits, masks and rows without a
    token.
    """
    seen: list[tuple[Tensor, Tensor]] = []

    def choose(logits_SV: Tensor, params_S5: Tensor) -> Tensor:
        seen.append((logits_SV, params_S5))
        return choose_plainly(logits_SV, params_S5)

    as_kernel.choose_tokens = choose
    kernel_for(CPU, 1000)
    ((logits_SV, params_S5),) = seen
    temperature_S, top_k_S, min_weight_S, top_p_S, _ = params_S5.T
    for is_some_S in (
        temperature_S == 0,
        top_k_S < 1000,
        min_weight_S > 0,
        top_p_S < 2**36,
        logits_SV.isnan().any(-1),
    ):
        assert 0 < int(is_some_S.sum()) < len(params_S5)
    assert (logits_SV == -math.inf).any()


def test_only_a_last_stage_has_a_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_backend, "kernel_for", lambda device, vocab: (device, vocab))
    stages = tiny_plan(tiny_args(n_layers=2), 2).stages
    assert [device_backend._sampler(stage, CPU) for stage in stages] == [
        None,
        (CPU, stages[1].args.vocab_size),
    ]


def test_the_least_weight_is_no_less_than_the_share_of_the_best() -> None:
    """A third of 2**30 is 357913941.33: a token of 357913941 has less."""
    least_weights = row_params(
        [SamplingParams(min_p=share) for share in (1 / 3, 0.25)], [0.0] * 2, CPU
    )[:, 2].tolist()
    assert least_weights == [357_913_942, 2**28]
