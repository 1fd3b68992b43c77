"""Sampling: from logits to token ids, one row per sequence that needs a token."""

import hashlib
import logging
import struct
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tramontane.proto.request import NOT_FINITE_TOKEN, SamplingParams
from tramontane.workers.device.self_test import try_or_reason
from tramontane.workers.sampling.integer_sampler import ChooseTokens, choose_plainly, row_params
from tramontane.workers.sampling.row_sampler import sample_row

logger = logging.getLogger(__name__)


def hashed_uniform(seed: int, choice: int, position: int) -> float:
    """Return the random number in [0, 1) of one token.

    It is a hash instead of a generator's state: a sequence that is computed again, or batched with
    others, draws the same numbers, and all devices and machines agree on them.
    """
    digest = hashlib.blake2b(struct.pack("<qqq", seed, choice, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def _argmax(logits_SV: Tensor) -> Tensor:
    """Return the index of the first largest number of each row, [S]. NumPy finds it 18 times as
    fast as PyTorch on a CPU.
    """
    return (
        torch.from_numpy(logits_SV.numpy().argmax(-1))
        if logits_SV.device.type == "cpu"
        else logits_SV.argmax(-1)
    )


def sample(
    logits_SV: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    choose: ChooseTokens | None = None,
) -> Tensor:
    """Choose one token per row, [S], on the device of the logits, without waiting for it.

    ``positions``: of the new tokens. ``choose``, a kernel, chooses all tokens at once. Without it a
    CPU draws row by row, and other devices draw by ``choose_plainly``. In all cases a row's token
    does not depend on the other rows. The result is NOT_FINITE_TOKEN for a row with NaN or plus
    infinity, or with only minus infinity (which masks and biases leave in single places): its
    largest number shows it, as NaN counts as larger than any. No other elements are checked.
    """
    assert logits_SV.shape[0] == len(params) == len(positions)
    is_random = [p.temperature > 0 for p in params]
    draws = zip(params, positions, is_random, strict=True)
    uniforms = [
        hashed_uniform(p.seed or 0, p.choice, position) if is_drawn else 0.0
        for p, position, is_drawn in draws
    ]
    if choose is None and any(is_random) and logits_SV.device.type != "cpu":
        choose = choose_plainly
    if choose is not None:
        return choose(logits_SV, row_params(params, uniforms, logits_SV.device))
    chosen = _argmax(logits_SV)
    is_finite = logits_SV.gather(1, chosen[:, None])[:, 0].isfinite()
    if any(is_random):
        for row, (is_drawn, has_token) in enumerate(
            zip(is_random, is_finite.tolist(), strict=True)
        ):
            if is_drawn and has_token:
                chosen[row] = sample_row(logits_SV[row].numpy(), params[row], uniforms[row])
    return torch.where(is_finite, chosen, NOT_FINITE_TOKEN)


def kernel_for(device: torch.device, vocab_size: int) -> ChooseTokens | None:
    """Return the kernel of a GPU, compiled and tested, or None after a WARNING with the reason."""
    try:
        # Triton is not on every platform
        from tramontane.workers.sampling.triton_sampler import choose_tokens

        choose: ChooseTokens = choose_tokens
        reason = try_or_reason(lambda: _self_test(choose, device, vocab_size))
    except ImportError as error:
        reason = str(error)
    if not reason:
        return choose
    logger.warning(
        "PyTorch samples tokens, by sorting the vocabulary: the kernel of Triton's cannot be used"
        " (%s)",
        reason,
    )
    return None


def _self_test(choose: ChooseTokens, device: torch.device, vocab_size: int) -> None:
    """Raise ArithmeticError if a kernel does not choose the same tokens, of rows of every kind."""
    plain = SamplingParams(temperature=0.8)
    few = replace(plain, top_k=50, top_p=0.7, min_p=0.01)
    kinds = (
        plain,
        few,
        replace(plain, temperature=0.0),
        replace(plain, top_p=0.95),
        replace(plain, top_k=20),
    )
    params = [kind for kind in kinds for _ in range(4)]
    logits_SV = torch.randn(len(params), vocab_size, generator=torch.Generator().manual_seed(0)) * 4
    logits_SV[1::4] = logits_SV[1::4].bfloat16().float()  # many are equal
    logits_SV[2::4, ::2] = -torch.inf
    logits_SV[3::4, vocab_size // 2] = torch.nan
    uniforms = [(row * 0.618) % 1 for row in range(len(params))]
    logits_SV, params_S5 = logits_SV.to(device), row_params(params, uniforms, device)
    found_S, expected_S = choose(logits_SV, params_S5), choose_plainly(logits_SV, params_S5)
    if num_other := int((found_S != expected_S).sum()):
        raise ArithmeticError(f"{num_other} of {len(params)} tokens are not those of PyTorch")
