"""A stage on a CPU uses the kernels in C that are right and faster; without a compiler PyTorch
computes.
"""

import logging
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_args, tiny_plan
from torch import Tensor

from tramontane.proto.plan import StagePlan
from tramontane.workers.attention import autotune
from tramontane.workers.attention.backend import AttentionKernels
from tramontane.workers.attention.kernel_cases import timing_cases
from tramontane.workers.attention.native_backend import NativeDecode, NativePrefill
from tramontane.workers.attention.sdpa_backend import GatheredDecode, PagedDecode, SdpaPrefill
from tramontane.workers.device import kernel_selection
from tramontane.workers.device.kernel_selection import Compute, KernelSelector
from tramontane.workers.device.native_library import CompilerError
from tramontane.workers.stage.device_backend import select_backend

needs_compiler = pytest.mark.usefixtures("compiler")
LOGGER = "tramontane.workers"


def _plan() -> StagePlan:
    """Return the plan of a stage that need not be batch-invariant: speed decides."""
    return tiny_plan(tiny_args(windows=(24, None), n_layers=2), 1, batch_invariant=False).stages[0]


def _choose(
    caplog: pytest.LogCaptureFixture, seconds: list[float]
) -> tuple[AttentionKernels, list[str]]:
    """Choose when kernels take these seconds, C before PyTorch; also return the lines of the
    log.
    """
    times = iter(seconds)
    with caplog.at_level(logging.INFO, logger=LOGGER):
        chosen = autotune._select_for_cpu.__wrapped__(
            _plan(), KernelSelector(lambda _compute: next(times))
        )
    return chosen, caplog.messages


@needs_compiler
@pytest.mark.parametrize(("seconds", "in_c"), [(1, True), (2.9, True), (3.1, False)])
def test_kernels_in_c_compute_prefill_and_decode_unless_they_are_much_slower(
    seconds: float, in_c: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Stages that replace others choose the same although times vary."""
    chosen, lines = _choose(caplog, [seconds, 2.0])
    assert type(chosen.prefill) is (NativePrefill if in_c else SdpaPrefill)
    assert type(chosen.decode) is (NativeDecode if in_c else GatheredDecode)
    name = "C" if in_c else "PyTorch"
    assert lines == [f"attention by {name} (C {seconds * 1e6:.0f} us; PyTorch 2000000 us)"]


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
    chosen, (line,) = _choose(caplog, [1.0])  # the wrong one is not timed
    assert (type(chosen.prefill), type(chosen.decode)) == (SdpaPrefill, GatheredDecode)
    assert re.fullmatch(
        r"attention by PyTorch \(C differs by 0\.[0-9]+; PyTorch 1000000 us\)", line
    )


def test_a_stage_that_starts_again_has_the_kernels_that_the_first_one_chose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever times are then; nothing is timed. With another shape or data type it chooses
    anew.
    """
    in_c, cpu, plan = AttentionKernels(SdpaPrefill(), PagedDecode()), torch.device("cpu"), _plan()
    monkeypatch.setattr(autotune, "native_kernels", lambda _plan: in_c)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def start(plan: StagePlan, *seconds: float) -> tuple[bool, int]:
        """Return whether the kernels in C are chosen, and how many kernels were timed."""
        times = [*seconds]
        monkeypatch.setattr(kernel_selection, "cpu_seconds", lambda _compute: times.pop(0))
        kernels = autotune.select_kernels(plan, cpu, KernelSelector.of_device(cpu))
        return kernels is in_c, len(seconds) - len(times)

    assert start(plan, 9.0, 1.0) == (False, 2)
    assert start(plan, 1.0, 9.0) == (False, 0)
    args = plan.args
    others = [
        replace(plan, dtype="bfloat16"),
        replace(plan, args=replace(args, n_kv_heads=1)),
        replace(plan, args=replace(args, n_heads=2)),
        replace(plan, args=replace(args, head_dim=16)),
        tiny_plan(args, 1, batch_invariant=False, page_size=32).stages[0],
        tiny_plan(tiny_args(windows=(25, None), n_layers=2), 1, batch_invariant=False).stages[0],
    ]
    for other in others:
        assert start(other, 1.0, 9.0) == (True, 2), other
    assert start(plan, 1.0, 9.0) == (False, 0)


@needs_compiler
def test_a_stage_computes_with_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen, _ = _choose(caplog, [1.0, 2.0])
    monkeypatch.setattr(autotune, "_select_for_cpu", lambda *_: chosen)
    plan = tiny_plan(tiny_args(n_layers=1), 1).stages[0]
    assert select_backend(plan, torch.device("cpu")).kernels is chosen


def test_without_a_compiler_pytorch_computes_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(autotune, "native_kernels", _no_compiler)
    chosen, lines = _choose(caplog, [])
    assert type(chosen.prefill) is SdpaPrefill
    assert type(chosen.decode) is GatheredDecode
    assert lines == [
        "attention is computed by PyTorch, two to four times as slow as the kernels in C: there is"
        " no C compiler"
    ]


def _no_compiler(_plan: StagePlan) -> AttentionKernels:
    raise CompilerError("there is no C compiler")


@needs_compiler
def test_what_is_timed_are_the_timing_cases() -> None:
    plan = _plan()
    cases = timing_cases(plan, torch.device("cpu"), autotune.CPU_TOKENS)
    expected = torch.cat([case.expected[job].flatten() for job in (0, 1) for case in cases])
    timed: list[Tensor] = []

    def clock(compute: Compute) -> float:
        timed.append(compute())
        return 1.0

    autotune._select_for_cpu.__wrapped__(plan, KernelSelector(clock))
    assert len(timed) == 2
    for out in timed:
        torch.testing.assert_close(out, expected)
