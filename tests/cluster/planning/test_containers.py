"""What a container allows counts, and not what its machine has: cores, memory, shared memory."""

import logging
import os
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tramontane.cluster.pipeline import ray_cluster
from tramontane.cluster.planning import hardware
from tramontane.cluster.planning.hardware import num_memory_kills, usable_cpus, usable_memory
from tramontane.cluster.serving import preflight
from tramontane.proto.errors import PlanError
from tramontane.proto.units import GIB

MIB = 2**20
UNLIMITED = "9223372036854771712\n"  # of version 1
FREE = 20 * GIB  # of the machine
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores and 20 GiB free. Returns the folder of its control groups, which is empty."""
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=FREE))
    return tmp_path


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 4),
        ({"cpu.max": "max 100000\n"}, 4),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "800000 100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "250000\n"}, 4),
    ],
)
def test_cores_are_bounded_by_the_quota(machine: Path, files: dict[str, str], cores: int) -> None:
    _write(machine, files)
    assert usable_cpus() == cores


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, FREE),
        ({"memory.max": "max\n", "memory.current": f"{GIB}\n"}, FREE),
        ({"memory.max": f"{4 * GIB}\n", "memory.current": f"{GIB}\n"}, 3 * GIB),
        ({"memory.max": f"{40 * GIB}\n", "memory.current": f"{GIB}\n"}, FREE),
        ({"memory.max": f"{GIB}\n", "memory.current": f"{2 * GIB}\n"}, 0),
        ({"memory/memory.limit_in_bytes": UNLIMITED, "memory/memory.usage_in_bytes": "7\n"}, FREE),
        (
            {
                "memory/memory.limit_in_bytes": f"{4 * GIB}\n",
                "memory/memory.usage_in_bytes": f"{GIB}\n",
            },
            3 * GIB,
        ),
        (  # half of what is used are pages of files that were read once, as a checkpoint's
            {
                "memory.max": f"{4 * GIB}\n",
                "memory.current": f"{2 * GIB}\n",
                "memory.stat": f"anon 5\ninactive_file {GIB}\nactive_file 9\n",
            },
            3 * GIB,
        ),
        (
            {
                "memory/memory.limit_in_bytes": f"{4 * GIB}\n",
                "memory/memory.usage_in_bytes": f"{2 * GIB}\n",
                "memory/memory.stat": f"inactive_file 8\ntotal_inactive_file {GIB}\n",
            },
            3 * GIB,
        ),
    ],
)
def test_memory_is_bounded_by_the_limit(machine: Path, files: dict[str, str], free: int) -> None:
    _write(machine, files)
    assert usable_memory() == free


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({}, 0),
        ({"memory.events": "low 0\nhigh 4\nmax 9\noom 3\noom_kill 2\noom_group_kill 1\n"}, 2),
        ({"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"}, 5),
        ({"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"}, 0),
    ],
)
def test_kills_for_memory_are_counted(machine: Path, files: dict[str, str], kills: int) -> None:
    _write(machine, files)
    assert num_memory_kills() == kills


@pytest.mark.parametrize(
    ("num_workers", "num_pipelines", "need"),
    [(1, 1, 1190), (2, 1, 1500), (4, 1, 2120), (1, 2, 1800)],
)
def test_a_start_without_memory_for_the_processes_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, num_workers: int, num_pipelines: int, need: int
) -> None:
    spec: Any = SimpleNamespace(num_workers=num_workers)
    own = psutil.Process().memory_info().rss
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: SimpleNamespace(rss=own))
    monkeypatch.setattr(preflight, "usable_memory", lambda: need * MIB - own)
    preflight.check_memory(spec, num_pipelines)
    monkeypatch.setattr(preflight, "usable_memory", lambda: GIB - own)
    count = num_workers * num_pipelines
    workers = f"{count} worker{'s' * (count > 1)}"
    reason = rf"^Ray and {workers} need .* and can have 1 GiB here; give the container"
    with pytest.raises(PlanError, match=reason):
        preflight.check_memory(spec, num_pipelines)


@pytest.mark.parametrize(
    ("free", "store", "said"),
    [
        (GIB, 512 * MIB, ""),
        (512 * MIB, 512 * MIB, ""),
        (100 * MIB, 100 * MIB, "takes what is free"),
        (64 * MIB, 512 * MIB, "is a file in the temporary folder"),
    ],
)
def test_little_shared_memory_is_named_with_the_flag_that_helps(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free: int,
    store: int,
    said: str,
) -> None:
    monkeypatch.setattr(ray_cluster.shutil, "disk_usage", lambda _: Usage(free, 0, free))
    with caplog.at_level(logging.WARNING, ray_cluster.logger.name):
        assert ray_cluster._object_store_bytes() == store
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(said)
    assert all(said in line and "--shm-size 1g" in line for line in lines)
