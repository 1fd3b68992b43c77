"""Computation that gives way wherever it waits for experts, so that another micro-batch can have its turn."""

from collections.abc import Generator
from typing import TypeVar

from tramontane.proto.ports import AskedExperts

T = TypeVar("T")
Waiting = Generator[AskedExperts, None, T]  # computes a T, and yields whatever has not been answered yet


def completed(waiting: Waiting[T]) -> T:
    """Run it to its end, alone: the thread sleeps where it waits."""
    try:
        while True:
            next(waiting).wait()
    except StopIteration as end:
        value: T = end.value
        return value
