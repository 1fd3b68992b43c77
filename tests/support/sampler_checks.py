"""Checks of the sampling kernel: it chooses what ``choose_plainly`` does, bit for bit."""

import random
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from interpreted_checks import Check
from sampling_by_hand import SAMPLINGS
from torch import Tensor

from tramontane.proto.request import NOT_FINITE_TOKEN, SamplingParams
from tramontane.workers.sampling import triton_sampler
from tramontane.workers.sampling.integer_sampler import choose_plainly, row_params
from tramontane.workers.sampling.triton_sampler import choose_tokens

GREEDY, PLAIN = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
CUTS = [
    *SAMPLINGS,
    *(
        replace(PLAIN, **changes)
        for changes in (
            {"top_p": 1e-9},
            {"top_p": 1e-300},
            {"top_k": 1},
            {"min_p": 1.0},
            {"top_p": 0.999999},
        )
    ),  # type: ignore[arg-type]
    *(replace(PLAIN, temperature=temperature) for temperature in (1e-9, 1e-3, 1e300)),
    replace(PLAIN, temperature=1e300, top_k=3),
    replace(PLAIN, top_k=40, top_p=0.5),
]
SIZES = (200, 128), (64, 32), (17, 4096), (1, 4096)  # vocabularies and blocks
LARGEST, INF, NAN = torch.finfo(torch.float32).max, torch.inf, torch.nan
HARD = {
    "NaN, first": [NAN, 1.0, 2.0, 3.0, 0.0],
    "NaN, last": [1.0, 2.0, 3.0, 0.0, NAN],
    "NaN, negative": [1.0, -NAN, 2.0, 3.0, 0.0],
    "all NaN": [NAN] * 5,
    "plus infinity": [1.0, INF, 2.0, 3.0, 0.0],
    "both infinities": [INF, -INF, 0.0, 1.0, NAN],
    "nothing can be chosen": [-INF] * 5,
    "one can be chosen": [-INF, -INF, -7.0, -INF, -INF],
    "the largest number": [LARGEST, 0.0, 1.0, LARGEST, -LARGEST],
    "the smallest number": [-INF, -LARGEST, -INF, -LARGEST, -INF],
    "zeros": [-0.0, 0.0, -0.0, 0.0, -1.0],
    "all equal": [3.0] * 5,
    "two kinds": [2.0, 1.0, 2.0, 1.0, 2.0],
    "all negative": [-1.0, -2.0, -3.0, -4.0, -5.0],
    "next to one another": [1 + number * 2**-23 for number in (3, 0, 4, 1, 2)],
    "next to 0": [1e-45, -1e-45, 0.0, 1e-38, -1e-38],
}


def _random(rows: int, vocab: int, seed: int) -> Tensor:
    """Return logits of which many are equal in one of three rows, and many masked in one of
    five.
    """
    generator = torch.Generator().manual_seed(seed)
    logits_SV = (
        torch.randn(rows, vocab, generator=generator) * torch.rand(rows, 1, generator=generator) * 8
    )
    logits_SV[::3] = (logits_SV[::3] * 2).round() / 2
    is_masked_SV = torch.rand(logits_SV[::5].shape, generator=generator) < 0.7
    logits_SV[::5][is_masked_SV] = -torch.inf
    logits_SV[:, -1] = 0.5  # at least one is not
    return logits_SV


def _check(
    logits_SV: Tensor, params: list[SamplingParams], uniforms: list[float], device: str, block: int
) -> Tensor:
    """Return the tokens. The ``block`` is that of this check, so that a small vocabulary has
    several.
    """
    logits_SV, params_S5 = logits_SV.to(device), row_params(params, uniforms, torch.device(device))
    with patch.object(triton_sampler, "BLOCK", block):
        found_S = choose_tokens(logits_SV, params_S5)
    expected_S = choose_plainly(logits_SV, params_S5)
    for row in (found_S != expected_S).nonzero()[:, 0].tolist():
        raise AssertionError(
            f"{params[row]}, {uniforms[row]}: {int(found_S[row])}, not {int(expected_S[row])}"
        )
    return found_S.cpu()


def check_random_rows(vocab: int, block: int, device: str) -> None:
    """All kinds of cuts, with random numbers also next to 0 and 1."""
    numbers = random.Random(vocab)
    uniforms = [numbers.choice([0.0, 1 - 2**-53, numbers.random(), numbers.random()]) for _ in CUTS]
    _check(_random(len(CUTS), vocab, seed=vocab), CUTS, uniforms, device, block)


def check_hard_rows(device: str) -> None:
    """Of every kind, by every way of choosing, also where the temperature makes the largest number
    infinite.

    Rows that are not finite end, and no other one does.
    """
    kinds = [
        GREEDY,
        replace(PLAIN, temperature=0.5),
        replace(PLAIN, top_k=2),
        replace(PLAIN, top_k=4),
        replace(PLAIN, top_p=0.5),
        replace(PLAIN, top_k=3, top_p=0.7, min_p=0.1),
    ]
    logits_SV = torch.tensor(list(HARD.values()))
    # of equal ones the first, in any block
    _check(logits_SV, [GREEDY] * len(logits_SV), [0.0] * len(logits_SV), device, 2)
    ends_S = ~(logits_SV.amax(-1).isfinite() & ~logits_SV.isnan().any(-1))
    for params in kinds:
        tokens_S = _check(
            logits_SV, [params] * len(logits_SV), [0.7] * len(logits_SV), device, 4096
        )
        assert torch.equal(tokens_S == NOT_FINITE_TOKEN, ends_S)
        chosen_S = logits_SV.gather(1, tokens_S.clamp(min=0)[:, None])[:, 0]
        assert chosen_S[~ends_S].isfinite().all()


def check_borders(device: str) -> None:
    """Random numbers at and next to the border of two tokens, in blocks of which the second begins
    there; and of ties.
    """
    row_V = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -60.0])  # the last one has no weight
    uniforms = [
        min(max(part / 6 + change, 0.0), 1 - 2**-53)
        for part in range(7)
        for change in (-(2**-35), 0.0, 2**-35)
    ]
    _check(row_V.expand(len(uniforms), -1), [PLAIN] * len(uniforms), uniforms, device, 2)
    few = [0.0, 1 / 3, 0.4, 2 / 3, 0.99]
    for params in (replace(PLAIN, top_p=0.5), replace(PLAIN, top_k=5, top_p=0.8)):
        _check(row_V.expand(len(few), -1), [params] * len(few), few, device, 4)


def check_company(device: str) -> None:
    """The tokens of 256 rows are those of a row alone, whatever its number."""
    kinds = [GREEDY, GREEDY, PLAIN, GREEDY, replace(PLAIN, top_p=0.9)]
    params, uniforms = (
        [kinds[row % len(kinds)] for row in range(256)],
        [(row * 0.618) % 1 for row in range(256)],
    )
    logits_SV = _random(256, 7, seed=1)
    tokens_S = _check(logits_SV, params, uniforms, device, 8)
    for row in (0, 1, 4, 100, 255):
        assert _check(logits_SV[row, None], [params[row]], [uniforms[row]], device, 8).tolist() == [
            tokens_S[row]
        ]


CHECKS: dict[str, Check] = {
    **{
        f"{vocab} in blocks of {block}": partial(check_random_rows, vocab, block)
        for vocab, block in SIZES
    },
    "hard rows": check_hard_rows,
    "borders": check_borders,
    "in company": check_company,
}
