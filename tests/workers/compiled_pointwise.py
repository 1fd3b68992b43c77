"""The fused functions against the plain ones, on the CPU: a program of its own, for torch's compiler leaves much in a process.

Prints the largest difference of each, or why there is nothing to compare.
"""

import torch
from tiny import tiny_args

from tramontane.workers.pointwise import PLAIN, compiled


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def main() -> None:
    fused = compiled(tiny_args(), torch.device("cpu"), torch.float32)
    if fused is PLAIN:
        return
    for num_tokens in (1, 7):
        heads_THd, angles_Td = _random(num_tokens, 8, 8)[:, :6], _random(num_tokens, 8)  # heads as they lie beside values
        _compare(fused.turned(heads_THd, angles_Td, -angles_Td), PLAIN.turned(heads_THd, angles_Td, -angles_Td))
        _compare(fused.gated(_random(num_tokens, 96)), PLAIN.gated(_random(num_tokens, 96)))
        given = (_random(num_tokens, 32), _random(num_tokens, 1, 32)[:, 0], _random(32), 1e-5)
        for ours, theirs in zip(fused.added_and_normed(*given), PLAIN.added_and_normed(*given), strict=True):
            _compare(ours, theirs)


def _compare(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    print(float((ours - theirs).abs().max()))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
