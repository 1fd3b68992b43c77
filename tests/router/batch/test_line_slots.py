"""Slots for lines: never more than there are, in turns by tenant, and none lost by a
cancellation.
"""

import asyncio
from collections import Counter

import pytest
from event_loops import in_event_loop
from hypothesis import given
from hypothesis import strategies as st

from tramontane.router.batch.runner import LineSlot, LineSlots


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def _order(num_slots: int, waiting: str, first: str = "") -> str:
    """Return the tenants (letters) in the order in which they get slots; those of ``first`` hold
    some. One is freed at a time.
    """
    slots = LineSlots(num_slots)
    held = [await slots.acquire(tenant) for tenant in first]
    order: list[str] = []
    got: list[LineSlot] = []

    async def acquire(tenant: str) -> None:
        got.append(await slots.acquire(tenant))
        order.append(tenant)

    tasks = [asyncio.create_task(acquire(tenant)) for tenant in waiting]
    await _settle()
    while len(order) < len(waiting):
        (held or got).pop(0).release()
        await _settle()
    for slot in [*held, *got]:
        slot.release()
    await asyncio.gather(*tasks)
    assert slots.num_free == num_slots
    return "".join(order)


@pytest.mark.parametrize(
    ("num_slots", "first", "waiting", "order"),
    [
        (1, "a", "aaabbb", "bababa"),
        (1, "a", "aaabbbccc", "bcabcabca"),
        (2, "aa", "aaaabbbb", "babababa"),
        (4, "aaaa", "aaab", "baaa"),
        (3, "", "aaabbb", "aaabbb"),  # three are free when only a waits
    ],
)
def test_the_next_slot_is_for_whom_has_the_fewest(
    num_slots: int, first: str, waiting: str, order: str
) -> None:
    assert asyncio.run(_order(num_slots, waiting, first)) == order


class _Tenants:
    """Three tenants that ask for slots, leave, and give slots back."""

    def __init__(self, num_slots: int) -> None:
        self.slots = LineSlots(num_slots)
        self.tasks: list[asyncio.Task[LineSlot]] = []
        self.released: set[asyncio.Task[LineSlot]] = set()

    def holding(self) -> list["asyncio.Task[LineSlot]"]:
        return [
            task
            for task in self.tasks
            if task.done() and not task.cancelled() and task not in self.released
        ]

    def waiting(self) -> list["asyncio.Task[LineSlot]"]:
        return [task for task in self.tasks if not task.done()]

    async def step(self, what: str, number: int) -> None:
        if what == "acquire":
            self.tasks.append(asyncio.create_task(self.slots.acquire(f"tenant {number % 3}")))
        elif what == "cancel" and self.tasks:
            self.tasks[number % len(self.tasks)].cancel()
        elif what == "release" and (holding := self.holding()):
            self.release(holding[number % len(holding)])
        elif what == "settle":
            await _settle()

    def release(self, task: "asyncio.Task[LineSlot]") -> None:
        self.released.add(task)
        task.result().release()
        task.result().release()  # the second time it does nothing


@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.sampled_from(["acquire", "cancel", "release", "settle"]), st.integers(0, 9)),
        max_size=60,
    ),
)
@in_event_loop
async def test_no_slot_is_lost_and_none_is_given_twice(
    num_slots: int, steps: list[tuple[str, int]]
) -> None:
    tenants = _Tenants(num_slots)
    for what, number in steps:
        await tenants.step(what, number)
        assert tenants.slots.num_free >= 0
    await _settle()
    now = tenants.holding()
    assert len(now) + tenants.slots.num_free == num_slots
    assert not (tenants.waiting() and tenants.slots.num_free), "one waits while a slot is free"
    assert tenants.slots._held == Counter(task.result()._tenant for task in now)
    for task in tenants.waiting():
        task.cancel()
    await _settle()
    for task in now:
        tenants.release(task)
    assert (tenants.slots.num_free, tenants.slots._waiting) == (num_slots, {})


@in_event_loop
async def test_who_is_cancelled_when_its_slot_was_just_granted_gives_it_back() -> None:
    slots = LineSlots(1)
    slot = await slots.acquire("a")
    first, second = [asyncio.create_task(slots.acquire(tenant)) for tenant in "bc"]
    await _settle()
    slot.release()
    first.cancel()  # before it runs again
    assert isinstance(await second, LineSlot)
    with pytest.raises(asyncio.CancelledError):
        await first
    assert slots._held == Counter({"c": 1})


@in_event_loop
async def test_a_waiting_one_that_is_cancelled_is_passed_over_at_once() -> None:
    slots = LineSlots(1)
    slot = await slots.acquire("a")
    first, second = [asyncio.create_task(slots.acquire(tenant)) for tenant in "bc"]
    await _settle()
    first.cancel()
    slot.release()  # before the cancelled one has run
    assert isinstance(await second, LineSlot)
