"""Samples of the resources that a running application holds, and their comparison."""

import os
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray._private.internal_api import node_stats
from serve_cluster import ingress_stats, leftovers, num_proxy_calls, router_stats

MIB = 2**20
TRANSIENT = ("ray::IDLE",)  # processes that Ray keeps in reserve, and ends when they are not needed
# pools of threads and of connections reach their size late
MAX_MORE_DESCRIPTORS, MAX_MORE_THREADS = 2, 4
MAX_MORE_MIB = 5.0  # in the second half: heaps reach their size in the first half, a leak continues
MAX_MORE_TASKS = 2  # asyncio tasks of a replica: the number of Ray Serve's own varies


@dataclass(frozen=True, slots=True)
class Process:
    """A process. Memory is its private memory in MiB, without the object store and mapped files."""

    role: str
    memory: float
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Sample:
    """All processes by PID. ``held`` are the resources that the application reports."""

    at: float
    processes: dict[int, Process]
    held: dict[str, Any]

    def total(self, what: str) -> float:
        return sum(getattr(process, what) for process in self.processes.values())


def take_sample() -> Sample:
    """Take a sample of the cluster that this process has started; other processes of the machine
    are not included.
    """
    return Sample(time.monotonic(), dict(_processes()), _held())


def quietest(samples: Sequence[Sample]) -> Sample:
    """Merge samples of an idle application: the minimum of each process."""
    last = samples[-1]
    found = {
        pid: [sample.processes[pid] for sample in samples if pid in sample.processes]
        for pid in last.processes
    }
    least = {
        pid: Process(
            of[0].role,
            min(p.memory for p in of),
            min(p.descriptors for p in of),
            min(p.threads for p in of),
        )
        for pid, of in found.items()
    }
    return Sample(last.at, least, last.held)


def _processes() -> Iterable[tuple[int, Process]]:
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            memory = process.memory_info()
            own = (memory.rss - memory.shared) / MIB
            yield (
                process.pid,
                Process(_role(process), own, process.num_fds(), process.num_threads()),
            )


def _role(process: psutil.Process) -> str:
    """Return an actor's title without its current method, or the name of another program or Ray
    script.
    """
    words = process.cmdline()
    if words and words[0].startswith("ray::"):
        return words[0].split()[0].split(".")[0]
    scripts = [word for word in words[:3] if word.endswith(".py")]
    return os.path.basename(scripts[0] if scripts else words[0]) if words else process.name()


def _held() -> dict[str, Any]:
    node = ray.nodes()[0]
    store = node_stats(
        node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False
    ).store_stats
    routers, ingress = router_stats(stages=False), ingress_stats()
    return {
        "actors and groups": sorted(leftovers()),
        "pages": sum(router["pages_held"] for router in routers),
        "sequences": sum(router["sequences"] + router["waiting"] for router in routers),
        "router requests": sum(router["requests"] for router in routers),
        "ingress requests": ingress["requests"],
        "proxy calls": num_proxy_calls(),
        "router tasks": sum(router["tasks"] for router in routers),
        "ingress tasks": ingress["tasks"],
        # a different epoch means a failure and a new fence
        "epochs": [router["epoch"] for router in routers],
        "store MiB": round(store.object_store_bytes_used / MIB, 1),
        "objects in the store": store.num_local_objects,
    }


def is_idle(held: dict[str, Any]) -> bool:
    return not any(
        held[name]
        for name in ("pages", "sequences", "router requests", "ingress requests", "proxy calls")
    )


def list_leaks(before: Sample, half_way: Sample, after: Sample) -> list[str]:
    """Compare the last of three idle samples with the first; memory is compared with the second."""
    equal = (
        "actors and groups",
        "epochs",
        "pages",
        "sequences",
        "router requests",
        "ingress requests",
        "proxy calls",
    )
    equal += ("objects in the store",)
    problems = [
        f"{name}: {before.held[name]}, then {after.held[name]}"
        for name in equal
        if before.held[name] != after.held[name]
    ]
    for name in ("router tasks", "ingress tasks"):
        problems += _more(name, before.held[name], after.held[name], MAX_MORE_TASKS)
    for pid in sorted(before.processes.keys() | after.processes.keys()):
        old, new = before.processes.get(pid), after.processes.get(pid)
        if old is None or new is None:
            role = (old or new or Process("", 0, 0, 0)).role
            if role not in TRANSIENT:
                problems.append(f"{role} ({pid}) {'is gone' if new is None else 'is new'}")
            continue
        problems += _more(
            f"{new.role} ({pid}), descriptors",
            old.descriptors,
            new.descriptors,
            MAX_MORE_DESCRIPTORS,
        )
        problems += _more(
            f"{new.role} ({pid}), threads", old.threads, new.threads, MAX_MORE_THREADS
        )
        memory = half_way.processes.get(pid, old).memory
        problems += _more(
            f"{new.role} ({pid}), MiB since half way", memory, new.memory, MAX_MORE_MIB
        )
    return problems


def _more(what: str, old: float, new: float, slack: float) -> list[str]:
    return [f"{what}: {old:.0f}, then {new:.0f}"] if new > old + slack else []


def slope_per_hour(samples: Sequence[Sample], pid: int) -> float:
    """Return a process's growth in MiB per hour by linear regression, or 0 with fewer than three
    samples.
    """
    points = [
        (sample.at / 3600, sample.processes[pid].memory)
        for sample in samples
        if pid in sample.processes
    ]
    if len(points) < 3:
        return 0.0
    return statistics.linear_regression(*zip(*points, strict=True)).slope
