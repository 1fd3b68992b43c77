"""How GPUs are found, on a machine without one: a library in place of the driver's, which Ray and
PyTorch ask as well.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tramontane.workers.device import nvml, probe
from tramontane.workers.device.nvml import NvmlGpu
from tramontane.workers.device.probe import (
    VisibleGpu,
    count_selected,
    num_visible_gpus,
    visible_gpus,
)

GIB = 2**30
UUIDS = ["GPU-a0000000-0000-0000-0000-000000000000", "GPU-b0000000-0000-0000-0000-000000000001"]
OURS = """
import ctypes, json, sys
from tramontane.workers.device.nvml import LIBRARY, list_gpus
from tramontane.workers.device.probe import num_visible_gpus
gpus = list_gpus()
found = [] if gpus is None else [[gpu.uuid, gpu.name, gpu.memory, gpu.free] for gpu in gpus]
count = num_visible_gpus()
assert "torch" not in sys.modules
assert ctypes.CDLL(LIBRARY).num_initialized() == 0
print(json.dumps({"gpus": found, "is_known": gpus is not None, "visible": count}))
"""
RAYS = """
import json
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager
print(json.dumps(NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()))
"""
TORCHS = """
import json, torch
cuda = torch.cuda
counts = cuda._raw_device_count_nvml(), cuda._raw_device_uuid_nvml(), cuda._device_count_nvml()
print(json.dumps(counts))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the library."""
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).parents[2] / "support" / "nvml.c"
    command = [
        "cc",
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-Werror",
        "-o",
        folder / nvml.LIBRARY,
        source,
    ]
    subprocess.run(command, check=True)
    return folder


def _answers(
    program: str, library: Path | None, free_gib: str, selected: str | None = None
) -> object:
    """Return what a program prints in a process of its own, which finds the library."""
    environment = (
        os.environ
        | {"FAKE_NVML": free_gib}
        | ({"LD_LIBRARY_PATH": str(library)} if library else {})
    )
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if selected is not None:
        environment["CUDA_VISIBLE_DEVICES"] = selected
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def test_gpus_are_those_of_the_driver_as_ray_and_torch_find_them(library: Path) -> None:
    ours = _answers(OURS, library, "70,12")
    assert ours == {
        "gpus": [
            [UUIDS[0], "NVIDIA H100 0", 80 * GIB, 70 * GIB],
            [UUIDS[1], "NVIDIA H100 1", 80 * GIB, 12 * GIB],
        ],
        "is_known": True,
        "visible": 2,
    }
    assert _answers(RAYS, library, "70,12") == 2
    assert _answers(TORCHS, library, "70,12") == [2, UUIDS, 2]


def test_a_driver_without_gpus_and_one_that_does_not_work(library: Path) -> None:
    assert _answers(OURS, library, "") == {"gpus": [], "is_known": True, "visible": 0}
    assert _answers(OURS, library, "broken") == {"gpus": [], "is_known": False, "visible": 0}
    assert _answers(RAYS, library, "broken") == 0


@pytest.mark.parametrize("library", ["libc.so.6", "libtramontane-missing.so"])
def test_a_library_of_another_kind_or_none_knows_no_gpus(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "LIBRARY", library)
    assert nvml.list_gpus() is None


@pytest.mark.parametrize(
    ("selected", "number"),
    [
        *[
            ("", 0),
            ("-1", 0),
            ("0", 1),
            ("1,0", 2),
            ("0,1,2", 2),
            ("0,2,1", 1),
            ("0,-1,1", 1),
            ("0,0", 0),
            ("2", 0),
            ("NoDevFiles", 0),
        ],
        *[
            (" 1 , 0", 2),
            ("1gpu,0", 2),
            ("GPU-a", 1),
            ("GPU-b,GPU-a", 2),
            ("GPU-", 0),
            ("GPU-c", 0),
            ("GPU-a,GPU-c,GPU-b", 1),
        ],
        *[("GPU-a,GPU-a0", 0), (UUIDS[1], 1), ("0,GPU-b", 1)],
    ],
)
def test_what_is_selected_is_counted_as_pytorch_counts_it(
    selected: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which counts as CUDA does."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", selected)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: UUIDS)
    assert count_selected(selected, 2, UUIDS) == torch.cuda._device_count_nvml() == number


def test_selections_that_torch_cannot_count() -> None:
    assert count_selected(None, 2, UUIDS) == 2
    assert count_selected("MIG-0123,MIG-4567", 2, UUIDS) == 1
    assert count_selected("GPU-0123,GPU-4567,GPU-89ab", 2) == 2, "where UUIDs are not known"
    assert count_selected("0,-1", 2) == 1


def _hide_driver(
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[NvmlGpu] | None,
    module: Path,
    has_cuda: bool = False,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvml, "list_gpus", lambda: gpus)
    monkeypatch.setattr(probe, "KERNEL_MODULE", module)
    monkeypatch.setattr(probe, "_has_cuda_driver", lambda: has_cuda)


def test_the_kernel_module_is_asked_without_the_library_then_pytorch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In that order, and PyTorch only where CUDA's library is there."""
    (tmp_path / "module" / "0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    in_nvml = [NvmlGpu(uuid, "H100", 80 * GIB, 80 * GIB) for uuid in UUIDS]
    for gpus, module, has_cuda, number in [
        (in_nvml, tmp_path / "module", True, 2),
        ([], tmp_path / "module", True, 0),
        (None, tmp_path / "module", True, 1),
        (None, tmp_path / "none", True, 3),
        (None, tmp_path / "none", False, 0),
    ]:
        _hide_driver(monkeypatch, gpus, module, has_cuda)
        assert num_visible_gpus() == number


def test_free_memory_is_that_of_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's order may be another than the driver's, and there may be GPUs that only CUDA knows, as
    parts of one.
    """
    shown = [
        ("big", 90 * GIB, UUIDS[1][4:]),
        ("small", 80 * GIB, UUIDS[0][4:]),
        ("part", 10 * GIB, "0123"),
    ]
    properties = [
        SimpleNamespace(name=name, total_memory=memory, uuid=uuid) for name, memory, uuid in shown
    ]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(properties))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    for listed in (True, False):
        gpus = [
            NvmlGpu(uuid, "H100", 80 * GIB, (index + 1) * GIB) for index, uuid in enumerate(UUIDS)
        ]
        monkeypatch.setattr(nvml, "list_gpus", lambda gpus=gpus if listed else None: gpus)
        free = (2 * GIB, 1 * GIB, None) if listed else (None, None, None)
        assert visible_gpus() == [
            VisibleGpu(*gpu[:2], each) for gpu, each in zip(shown, free, strict=True)
        ]
