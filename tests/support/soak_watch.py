"""What a running application holds: looked at again and again, and compared."""

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
PASSING = ("ray::IDLE",)  # processes that Ray keeps ready, and ends when they are not needed
MORE_DESCRIPTORS, MORE_THREADS = 2, 4  # than before; pools of threads and of connections grow to their size late
MORE_MIB = 5.0  # in the second half: heaps find their size before, a leak goes on
MORE_TASKS = 2  # of asyncio, in a replica: Ray Serve's own come and go


@dataclass(frozen=True, slots=True)
class Process:
    """Memory is what it has for itself, in MiB: not the object store, nor files that it has mapped."""

    role: str
    memory: float
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Sample:
    """``held`` is what the application says that it holds."""

    at: float
    processes: dict[int, Process]
    held: dict[str, Any]

    def total(self, what: str) -> float:
        return sum(getattr(process, what) for process in self.processes.values())


def take_sample() -> Sample:
    """Of the cluster that this process has started, whatever else runs on the machine."""
    return Sample(time.monotonic(), dict(_processes()), _held())


def quietest(samples: Sequence[Sample]) -> Sample:
    """Of some that were taken while nothing went on, with the least that was seen of each process."""
    last = samples[-1]
    found = {pid: [sample.processes[pid] for sample in samples if pid in sample.processes] for pid in last.processes}
    least = {
        pid: Process(of[0].role, min(p.memory for p in of), min(p.descriptors for p in of), min(p.threads for p in of))
        for pid, of in found.items()
    }
    return Sample(last.at, least, last.held)


def _processes() -> Iterable[tuple[int, Process]]:
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            memory = process.memory_info()
            own = (memory.rss - memory.shared) / MIB
            yield process.pid, Process(_role(process), own, process.num_fds(), process.num_threads())


def _role(process: psutil.Process) -> str:
    """An actor without the method that it is at; a program or a script of Ray's by its name."""
    words = process.cmdline()
    if words and words[0].startswith("ray::"):
        return words[0].split()[0].split(".")[0]
    scripts = [word for word in words[:3] if word.endswith(".py")]
    return os.path.basename(scripts[0] if scripts else words[0]) if words else process.name()


def _held() -> dict[str, Any]:
    node = ray.nodes()[0]
    store = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False).store_stats
    routers, door = router_stats(stages=False), ingress_stats()
    return {
        "actors and groups": sorted(leftovers()),
        "pages": sum(router["pages_held"] for router in routers),
        "sequences": sum(router["sequences"] + router["waiting"] for router in routers),
        "router's requests": sum(router["requests"] for router in routers),
        "door's requests": door["requests"],
        "proxy's calls": num_proxy_calls(),
        "tasks of routers": sum(router["tasks"] for router in routers),
        "tasks of the door": door["tasks"],
        "epochs": [router["epoch"] for router in routers],  # another one: something failed, and the stages were fenced anew
        "store MiB": round(store.object_store_bytes_used / MIB, 1),
        "objects in the store": store.num_local_objects,
    }


def is_idle(held: dict[str, Any]) -> bool:
    return not any(held[name] for name in ("pages", "sequences", "router's requests", "door's requests", "proxy's calls"))


def list_leaks(before: Sample, half_way: Sample, after: Sample) -> list[str]:
    """What of three quiet looks is not as it was at first; of memory, as it was half way."""
    equal = ("actors and groups", "epochs", "pages", "sequences", "router's requests", "door's requests", "proxy's calls")
    equal += ("objects in the store",)
    problems = [
        f"{name}: {before.held[name]}, then {after.held[name]}" for name in equal if before.held[name] != after.held[name]
    ]
    for name in ("tasks of routers", "tasks of the door"):
        problems += _more(name, before.held[name], after.held[name], MORE_TASKS)
    for pid in sorted(before.processes.keys() | after.processes.keys()):
        old, new = before.processes.get(pid), after.processes.get(pid)
        if old is None or new is None:
            role = (old or new or Process("", 0, 0, 0)).role
            if role not in PASSING:
                problems.append(f"{role} ({pid}) {'is gone' if new is None else 'is new'}")
            continue
        problems += _more(f"{new.role} ({pid}), descriptors", old.descriptors, new.descriptors, MORE_DESCRIPTORS)
        problems += _more(f"{new.role} ({pid}), threads", old.threads, new.threads, MORE_THREADS)
        memory = half_way.processes.get(pid, old).memory
        problems += _more(f"{new.role} ({pid}), MiB since half way", memory, new.memory, MORE_MIB)
    return problems


def _more(what: str, old: float, new: float, slack: float) -> list[str]:
    return [f"{what}: {old:.0f}, then {new:.0f}"] if new > old + slack else []


def slope_per_hour(samples: Sequence[Sample], pid: int) -> float:
    """MiB that a process grows in an hour, by the line that fits best; 0 where there are too few samples for one."""
    points = [(sample.at / 3600, sample.processes[pid].memory) for sample in samples if pid in sample.processes]
    if len(points) < 3:
        return 0.0
    return statistics.linear_regression(*zip(*points, strict=True)).slope
