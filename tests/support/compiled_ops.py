"""The compiled fused operations against the eager ones on the CPU, alone and in a model.

A separate program, because torch's compiler leaves global state in a process. Prints the largest
difference of each operation, or nothing if the operations cannot be compiled here.
"""

import torch
from harness import PROMPTS, run_in_process
from tiny_models import random_model, split_model, tiny_args, tiny_plan
from torch._dynamo.utils import counters

from tramontane.workers.attention.sdpa_backend import cpu_kernels
from tramontane.workers.kernels.fused_ops import EAGER, FusedOps, compile_ops
from tramontane.workers.stage.device_backend import DeviceBackend

ARGS = tiny_args(moe=False)


def main() -> None:
    fused = compile_ops(ARGS, torch.device("cpu"), torch.float32)
    if fused is not EAGER:
        _serve(fused)
        with torch.inference_mode():
            _compare_all(fused)


def _serve(fused: FusedOps) -> None:
    """Run a model with both. Raises AssertionError if a step of any size compiles anything
    again.
    """
    model, plan, compiled_before = random_model(ARGS), tiny_plan(ARGS, 2), dict(counters["stats"])
    assert compiled_before["unique_graphs"]
    answers = [
        run_in_process(
            plan, split_model(model, plan, backend=DeviceBackend(cpu_kernels(), pointwise)), PROMPTS
        )
        for pointwise in (EAGER, fused)
    ]
    assert answers[0] == answers[1]
    assert counters["stats"] == compiled_before, "something was compiled again"


def _compare_all(fused: FusedOps) -> None:
    for num_tokens in (1, 7):
        # heads as they lie next to values
        heads_THd, angles_Td = _random(num_tokens, 8, 8)[:, :6], _random(num_tokens, 8)
        _compare(
            fused.apply_rotary(heads_THd, angles_Td, -angles_Td),
            EAGER.apply_rotary(heads_THd, angles_Td, -angles_Td),
        )
        _compare(
            fused.silu_and_mul(_random(num_tokens, 96)), EAGER.silu_and_mul(_random(num_tokens, 96))
        )
        given = (_random(num_tokens, 32), _random(num_tokens, 1, 32)[:, 0], _random(32), 1e-5)
        for ours, theirs in zip(
            fused.fused_add_rms_norm(*given), EAGER.fused_add_rms_norm(*given), strict=True
        ):
            _compare(ours, theirs)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _compare(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    print(float((ours - theirs).abs().max()))


if __name__ == "__main__":
    main()
