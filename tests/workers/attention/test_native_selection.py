"""A stage on a CPU computes attention with the kernels in C, if they are right; without a compiler
PyTorch computes.
"""

import logging
import re

import pytest
import torch
from tiny_models import tiny_args, tiny_plan
from torch import Tensor

from tramontane.proto.plan import StagePlan
from tramontane.workers.attention import autotune
from tramontane.workers.attention.autotune import kernels_for_cpu
from tramontane.workers.attention.backend import AttentionKernels
from tramontane.workers.attention.native_backend import NativeDecode, NativePrefill
from tramontane.workers.attention.sdpa_backend import GatheredDecode, SdpaPrefill
from tramontane.workers.device.native_library import CompilerError
from tramontane.workers.stage.device_backend import select_backend

needs_compiler = pytest.mark.usefixtures("compiler")
LOGGER = "tramontane.workers"


def _choose(
    caplog: pytest.LogCaptureFixture, batch_invariant: bool | None = None
) -> tuple[AttentionKernels, list[str]]:
    """Return the kernels of a stage and the lines of the log."""
    args = tiny_args(windows=(24, None), n_layers=2)
    plan = tiny_plan(args, 1, batch_invariant=batch_invariant).stages[0]
    with caplog.at_level(logging.INFO, logger=LOGGER):
        chosen = kernels_for_cpu.__wrapped__(plan)
    return chosen, caplog.messages


@needs_compiler
@pytest.mark.parametrize("batch_invariant", [True, None, False])
def test_kernels_in_c_compute_prefill_and_decode(
    batch_invariant: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    chosen, lines = _choose(caplog, batch_invariant)
    assert type(chosen.prefill) is NativePrefill
    assert type(chosen.decode) is NativeDecode
    assert lines == []


@needs_compiler
@pytest.mark.parametrize("kernel", [NativePrefill, NativeDecode])
def test_kernels_in_c_of_which_one_is_wrong_are_not_used(
    kernel: type[NativePrefill | NativeDecode],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    right = kernel.attend

    def wrong(*inputs: object) -> Tensor:
        return right(*inputs) * 1.1  # type: ignore[arg-type]

    monkeypatch.setattr(kernel, "attend", wrong)
    chosen, (line,) = _choose(caplog)
    assert (type(chosen.prefill), type(chosen.decode)) == (SdpaPrefill, GatheredDecode)
    assert caplog.records[0].levelno == logging.WARNING
    assert re.fullmatch(r"attention is computed by PyTorch, .*: differs by 0\.[0-9]+", line)


@needs_compiler
def test_a_stage_computes_with_what_was_chosen() -> None:
    plan = tiny_plan(tiny_args(n_layers=1), 1).stages[0]
    assert select_backend(plan, torch.device("cpu")).kernels is kernels_for_cpu(plan)


def test_without_a_compiler_pytorch_computes_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(autotune, "native_kernels", _no_compiler)
    chosen, lines = _choose(caplog)
    assert type(chosen.prefill) is SdpaPrefill
    assert type(chosen.decode) is GatheredDecode
    assert caplog.records[0].levelno == logging.INFO
    assert lines == [
        "attention is computed by PyTorch, two to four times as slow as the kernels in C: there is"
        " no C compiler"
    ]


def _no_compiler(_plan: StagePlan) -> AttentionKernels:
    raise CompilerError("there is no C compiler")
