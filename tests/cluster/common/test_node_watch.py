"""Callers that wait for the death of nodes: one poll serves all of them."""

import asyncio

import pytest
from event_loops import in_event_loop

from tramontane.cluster.common import node_watch
from tramontane.cluster.common.node_watch import DeadNodeWatcher


@pytest.fixture(autouse=True)
def _polled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_watch, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(node_watch, "ACK_TIMEOUT_S", 0.0)


class Nodes:
    """The dead nodes of a cluster, and how often they were listed."""

    def __init__(self) -> None:
        self.dead: set[str] = set()
        self.num_lists = 0
        self.is_away = False

    def list_dead(self) -> set[str]:
        self.num_lists += 1
        if self.is_away:
            raise ConnectionError("the head node is away")
        return self.dead

    async def until_listed(self, num_times: int) -> None:
        before = self.num_lists
        while self.num_lists < before + num_times:
            await asyncio.sleep(0)


@in_event_loop
async def test_one_poll_serves_all_requests() -> None:
    """However many wait, one task wakes up for all, and none of theirs does before a node has
    died.
    """
    nodes = Nodes()
    watcher = DeadNodeWatcher(nodes.list_dead)
    num_asked = 0

    def node() -> str:
        nonlocal num_asked
        num_asked += 1
        return "this"

    num_tasks = len(asyncio.all_tasks())
    waiting = [asyncio.create_task(watcher.wait_until_dead(node)) for _ in range(1000)]
    await nodes.until_listed(5)
    assert len(asyncio.all_tasks()) == num_tasks + 1000 + 1
    assert num_asked == 0, "no node has died"
    nodes.dead = {"another"}
    await nodes.until_listed(3)
    assert not any(each.done() for each in waiting)
    nodes.dead = {"another", "this"}
    await asyncio.gather(*waiting)


@in_event_loop
async def test_nodes_are_listed_only_while_a_caller_waits() -> None:
    nodes = Nodes()
    watcher = DeadNodeWatcher(nodes.list_dead)
    for _ in range(2):
        leaving = asyncio.create_task(watcher.wait_until_dead(lambda: "this"))
        await nodes.until_listed(3)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert watcher._polling is not None
        await watcher._polling
        assert not watcher._waiters
    assert nodes.num_lists >= 6


@in_event_loop
async def test_no_node_counts_as_dead_while_the_head_node_is_away() -> None:
    nodes = Nodes()
    nodes.is_away = True
    waiting = asyncio.create_task(DeadNodeWatcher(nodes.list_dead).wait_until_dead(lambda: "this"))
    await nodes.until_listed(3)
    assert not waiting.done()
    nodes.is_away, nodes.dead = False, {"this"}
    await waiting


@pytest.mark.parametrize(("died_s_before", "is_over"), [(29.0, True), (31.0, False)])
@in_event_loop
async def test_the_recent_death_of_any_node_ends_the_wait_for_an_unknown_one(
    died_s_before: float, is_over: bool
) -> None:
    nodes, now = Nodes(), 100.0
    nodes.dead = {"any"}
    watcher = DeadNodeWatcher(nodes.list_dead, clock=lambda: now)
    await watcher.wait_until_dead(lambda: "any")
    now += died_s_before
    waiting = asyncio.create_task(watcher.wait_until_dead(lambda: None))
    if is_over:
        await waiting
    else:
        await nodes.until_listed(3)
        assert not waiting.done()
        waiting.cancel()
