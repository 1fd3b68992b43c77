"""Rotary embedding: frequencies of scaled models, the worked example and those of transformers;
tables that are kept.
"""

from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_args
from transformers import MistralConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tramontane.proto.model_args import ModelArgs, YarnScaling
from tramontane.workers.model.rotary import (
    BLOCK_POSITIONS,
    RotaryCache,
    rotary_frequencies,
    rotary_tables,
)

FACTOR = 8.0


def _args(
    head_dim: int, theta: float, original: int, beta_fast: float = 32.0, beta_slow: float = 1.0
) -> ModelArgs:
    scaling = YarnScaling(FACTOR, original, beta_fast, beta_slow)
    return replace(
        tiny_args(n_heads=1, n_kv_heads=1, head_dim=head_dim),
        rope_theta=theta,
        rope_scaling=scaling,
    )


def test_pairs_keep_their_frequency_up_to_20_and_are_fully_scaled_from_37_on() -> None:
    """Of width 128, theta 1e6, 16384 positions: between them the share falls by 1/17 with each
    pair.
    """
    args = _args(128, 1e6, 16384)
    unscaled = rotary_frequencies(replace(args, rope_scaling=None))
    ratio = rotary_frequencies(args) / unscaled
    kept = (ratio - 1 / FACTOR) / (1 - 1 / FACTOR)
    expected = [min(max((37 - pair) / 17, 0.0), 1.0) for pair in range(64)]
    torch.testing.assert_close(kept, torch.tensor(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("betas", [(32.0, 1.0), (8.0, 2.0), (64.0, 0.5)])
@pytest.mark.parametrize(
    ("head_dim", "theta", "original"),
    [(128, 1e6, 16384), (64, 1e4, 4096), (96, 5e5, 8192), (8, 1e4, 64)],
)
def test_frequencies_are_those_of_transformers(
    head_dim: int, theta: float, original: int, betas: tuple[float, float]
) -> None:
    fast, slow = betas
    rope = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": FACTOR,
        "original_max_position_embeddings": original,
        "beta_fast": fast,
        "beta_slow": slow,
    }
    config = MistralConfig(
        head_dim=head_dim, max_position_embeddings=int(original * FACTOR), rope_parameters=rope
    )
    theirs, _ = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    ours = rotary_frequencies(_args(head_dim, theta, original, fast, slow))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize(
    "positions",
    [
        [0, 5, BLOCK_POSITIONS - 1],
        [BLOCK_POSITIONS],
        [3 * BLOCK_POSITIONS, 7],
        [BLOCK_POSITIONS + 1, BLOCK_POSITIONS - 1, 2 * BLOCK_POSITIONS],
        [],
    ],
)
def test_kept_tables_are_those_of_the_positions(positions: list[int], beta: float) -> None:
    """The first position of a block is the least that needs it; queries are scaled from position 64
    on.
    """
    args = _args(8, 1e4, 64)
    assert args.rope_scaling is not None
    args = replace(args, rope_scaling=replace(args.rope_scaling, llama4_beta=beta))
    cache, positions_T = (
        RotaryCache(args, torch.float32),
        torch.tensor(positions, dtype=torch.int64),
    )
    expected, first, again = (
        rotary_tables(positions_T, args, torch.float32),
        cache.tables(positions_T),
        cache.tables(positions_T),
    )
    for name in ("cos_Td", "sin_Td", "query_scale_T"):
        theirs, ours = getattr(expected, name), getattr(first, name)
        assert (theirs is None) == (ours is None) == (name == "query_scale_T" and not beta)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
            assert torch.equal(ours, getattr(again, name))


def test_a_position_has_the_same_bits_in_any_company() -> None:
    cache, args = RotaryCache(_args(6, 1e4, 64), torch.float32), _args(6, 1e4, 64)
    many = cache.tables(torch.arange(3000))
    alone = RotaryCache(args, torch.float32).tables(torch.tensor([2999]))
    assert torch.equal(alone.cos_Td[0], many.cos_Td[2999])
    assert torch.equal(alone.sin_Td[0], many.sin_Td[2999])
