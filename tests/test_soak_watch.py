"""The soak test's comparison of samples names every resource that was not released."""

from dataclasses import replace
from typing import Any

import pytest
from soak_watch import Process, Sample, list_leaks, quietest, slope_per_hour

pytestmark = pytest.mark.nightly

HELD: dict[str, Any] = {
    "actors and groups": ["a-0"],
    "epochs": [5],
    "pages": 0,
    "sequences": 0,
    "router requests": 0,
    "ingress requests": 0,
    "proxy calls": 0,
    "router tasks": 10,
    "ingress tasks": 8,
    "objects in the store": 0,
}
INGRESS = Process("ray::ServeReplica:tramontane:Ingress", 100.0, 50, 30)
BEFORE = Sample(0.0, {7: INGRESS, 9: Process("ray::IDLE", 60.0, 40, 20)}, HELD)


def _after(held: dict[str, Any] | None = None, **ingress: Any) -> list[str]:
    return list_leaks(
        BEFORE, BEFORE, Sample(60.0, {7: replace(INGRESS, **ingress)}, HELD | (held or {}))
    )


def test_equal_samples_have_no_leak_and_idle_workers_may_end() -> None:
    assert _after() == []
    assert _after(memory=104.0, descriptors=52, threads=34) == []
    assert _after(memory=20.0, descriptors=5, threads=3) == []


def test_each_resource_that_grew_is_named() -> None:
    assert _after(memory=106.0) == [f"{INGRESS.role} (7), MiB since half way: 100, then 106"]
    assert _after(descriptors=53) == [f"{INGRESS.role} (7), descriptors: 50, then 53"]
    assert _after(threads=35) == [f"{INGRESS.role} (7), threads: 30, then 35"]
    for name, more in (
        ("pages", 1),
        ("epochs", [6]),
        ("ingress requests", 1),
        ("proxy calls", 1),
        ("actors and groups", []),
        ("ingress tasks", 11),
    ):
        (problem,) = _after({name: more})
        assert problem.startswith(name)


def test_a_process_that_was_replaced_is_named_twice() -> None:
    other = Sample(60.0, {8: INGRESS}, HELD)
    assert list_leaks(BEFORE, BEFORE, other) == [
        f"{INGRESS.role} (7) is gone",
        f"{INGRESS.role} (8) is new",
    ]


def test_only_memory_is_compared_with_the_second_sample() -> None:
    half_way, after = (
        Sample(at, {7: replace(INGRESS, memory=memory, descriptors=70)}, HELD)
        for at, memory in ((60.0, 130.0), (120.0, 134.0))
    )
    assert list_leaks(BEFORE, half_way, after) == [f"{INGRESS.role} (7), descriptors: 50, then 70"]


def test_idle_samples_are_merged_by_minimum() -> None:
    samples = [
        Sample(at, {7: Process("ingress", 100.0 - at, int(50 + at), 30)}, HELD)
        for at in (0.0, 1.0, 2.0)
    ]
    assert quietest(samples).processes == {7: Process("ingress", 98.0, 50, 30)}


def test_the_slope_is_in_mib_per_hour() -> None:
    growing = [
        Sample(60.0 * minute, {7: Process("ingress", 100.0 + minute, 50, 30)}, HELD)
        for minute in range(5)
    ]
    assert round(slope_per_hour(growing, 7), 6) == 60.0
    assert slope_per_hour(growing[:2], 7) == 0.0
    assert slope_per_hour(growing, 8) == 0.0
