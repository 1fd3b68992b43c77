"""What GPUs are queried for, in the form that it has without one, and the names of processors."""

import itertools
import platform
import subprocess
import sys

import pytest
import torch

from tramontane.workers.device import probe
from tramontane.workers.device.probe import (
    device_name,
    memory_bandwidth,
    panel_rows,
    processor_name,
    visible_gpus,
)
from tramontane.workers.kernels.packed_linear import PackedMatmul


def test_the_quickest_copy_after_the_first_counts() -> None:
    """Four copies that take 0.25, 8, 2 and 4 s by this clock; 1000 bytes are read and as many
    written.
    """
    ticks = itertools.accumulate([0, 0.25, 1, 8, 1, 2, 1, 4])
    assert (
        memory_bandwidth("cpu", num_bytes=1000, rounds=3, clock=lambda: next(ticks))
        == 2 * 1000 // 2
    )


def test_a_real_clock_says_something() -> None:
    assert memory_bandwidth("cpu", num_bytes=2**20) > 0


def test_what_is_seen_is_what_cuda_shows() -> None:
    assert len(visible_gpus()) == torch.cuda.device_count()


FIELDS = {
    "model name": "AMD EPYC",
    "cpu family": "25",
    "model": "17",
    "flags": "sse avx avx2 avx512f avx512_bf16",
}


def _cpuinfo(**changed: str) -> str:
    one = "".join(
        f"{key}\t: {value}\n"
        for key, value in (
            FIELDS | {key.replace("_", " "): v for key, v in changed.items()}
        ).items()
    )
    return f"processor\t: 0\n{one}\nprocessor\t: 1\nmodel name\t: another\n"


def test_processors_of_one_name_differ_by_what_else_is_known() -> None:
    """Virtual machines may hide the model."""
    assert processor_name(_cpuinfo()) == "AMD EPYC, family 25, model 17, avx512_bf16"
    others = [
        _cpuinfo(cpu_family="23"),
        _cpuinfo(model="1"),
        _cpuinfo(flags="sse avx avx2 avx512f"),
        _cpuinfo(flags="sse"),
    ]
    assert len({*map(processor_name, [_cpuinfo(), *others])}) == 5


def test_a_processor_without_a_name_is_known_by_its_kind() -> None:
    assert (
        processor_name("processor\t: 0\nFeatures\t: fp asimd\nCPU part\t: 0xd0c\n")
        == f"{platform.machine()}, part 0xd0c, asimd"
    )
    assert processor_name("") == platform.machine()


def test_this_processor_has_a_name() -> None:
    assert device_name("cpu")


def test_panels_have_the_rows_that_the_kernels_give_them() -> None:
    assert panel_rows() == PackedMatmul(torch.float32, torch.float32).packed_shape(1, 1)[2]


@pytest.mark.parametrize(
    ("instructions", "rows"),
    [("avx512_bf16", 32), ("avx512f", 32), ("avx2", 16), ("avx", 16), ("", 8), ("asimd", 8)],
)
def test_panels_are_two_vectors(
    instructions: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "vector_instructions", lambda: instructions)
    assert panel_rows() == rows


def test_matrices_are_not_packed_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such")
    assert panel_rows() == 1


def test_plans_need_no_torch() -> None:
    """It takes seconds to load."""
    program = (
        f"import sys, {probe.__name__} as probe; probe.panel_rows(); assert 'torch' not in"
        " sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
