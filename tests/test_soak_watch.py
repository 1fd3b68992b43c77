"""The soak's judgement: what was not given back has its name in it."""

from dataclasses import replace
from typing import Any

from soak_watch import Process, Sample, list_leaks, quietest, slope_per_hour

HELD: dict[str, Any] = {
    "actors and groups": ["a-0"],
    "epochs": [5],
    "pages": 0,
    "sequences": 0,
    "router's requests": 0,
    "door's requests": 0,
    "proxy's calls": 0,
    "tasks of routers": 10,
    "tasks of the door": 8,
    "objects in the store": 0,
}
DOOR = Process("ray::ServeReplica:tramontane:Ingress", 100.0, 50, 30)
BEFORE = Sample(0.0, {7: DOOR, 9: Process("ray::IDLE", 60.0, 40, 20)}, HELD)


def _after(held: dict[str, Any] | None = None, **door: Any) -> list[str]:  # noqa: ANN401
    return list_leaks(BEFORE, BEFORE, Sample(60.0, {7: replace(DOOR, **door)}, HELD | (held or {})))


def test_what_is_as_before_is_back_and_idle_workers_may_go() -> None:
    assert _after() == []
    assert _after(memory=104.0, descriptors=52, threads=34) == []
    assert _after(memory=20.0, descriptors=5, threads=3) == []


def test_whatever_is_more_is_named() -> None:
    assert _after(memory=106.0) == [f"{DOOR.role} (7), MiB since half way: 100, then 106"]
    assert _after(descriptors=53) == [f"{DOOR.role} (7), descriptors: 50, then 53"]
    assert _after(threads=35) == [f"{DOOR.role} (7), threads: 30, then 35"]
    for name, more in (
        ("pages", 1),
        ("epochs", [6]),
        ("door's requests", 1),
        ("proxy's calls", 1),
        ("actors and groups", []),
        ("tasks of the door", 11),
    ):
        (problem,) = _after({name: more})
        assert problem.startswith(name)


def test_a_process_that_was_replaced_is_named_twice() -> None:
    other = Sample(60.0, {8: DOOR}, HELD)
    assert list_leaks(BEFORE, BEFORE, other) == [f"{DOOR.role} (7) is gone", f"{DOOR.role} (8) is new"]


def test_memory_is_judged_from_half_way_on_and_nothing_else_is() -> None:
    half_way, after = (
        Sample(at, {7: replace(DOOR, memory=memory, descriptors=70)}, HELD) for at, memory in ((60.0, 130.0), (120.0, 134.0))
    )
    assert list_leaks(BEFORE, half_way, after) == [f"{DOOR.role} (7), descriptors: 50, then 70"]


def test_a_quiet_look_is_the_least_of_several() -> None:
    looks = [Sample(at, {7: Process("door", 100.0 - at, int(50 + at), 30)}, HELD) for at in (0.0, 1.0, 2.0)]
    assert quietest(looks).processes == {7: Process("door", 98.0, 50, 30)}


def test_the_slope_is_in_mib_per_hour() -> None:
    growing = [Sample(60.0 * minute, {7: Process("door", 100.0 + minute, 50, 30)}, HELD) for minute in range(5)]
    assert round(slope_per_hour(growing, 7), 6) == 60.0
    assert slope_per_hour(growing[:2], 7) == 0.0
    assert slope_per_hour(growing, 8) == 0.0
