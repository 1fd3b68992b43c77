"""Shared uses of Ray's public interface: messages of its errors, and the cluster's nodes."""

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

import ray

from tramontane.cluster.ray_internals.accessors import kv_delete, kv_get, kv_put

# Ray's label of nodes and its value for the head in clusters of KubeRay. Elsewhere ``ray start
# --head`` takes it from RAY_NODE_TYPE_NAME.
NODE_GROUP, HEAD_GROUP = "ray.io/node-group", "headgroup"


def ray_error_message(error: BaseException) -> str:
    """Return the last line of an error, without its class: Ray's errors carry remote tracebacks,
    and end with the cause.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^(tramontane\.[\w.]+: |ray\.exceptions\.)", "", lines[-1])


def avoid_head_node() -> dict[str, Any]:
    """Return the options of an actor that avoids the head node if there is another node, and so
    survives the head's death.
    """
    return {
        "label_selector": {NODE_GROUP: f"!{HEAD_GROUP}"},
        "fallback_strategy": [{"label_selector": {}}],
    }


def list_used_nodes(group: str) -> set[str]:
    """Return Ray's ids of the nodes that have a bundle of the placement group with this name."""
    groups: dict[str, Any] = ray.util.placement_group_table()
    return {
        node
        for each in groups.values()
        if each["name"] == group
        for node in each["bundles_to_node_id"].values()
    }


def list_dead_nodes() -> set[str]:
    """Return Ray's ids of the nodes that it has declared dead."""
    return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}  # type: ignore[no-untyped-call]


# Threads that repeat a function.

logger = logging.getLogger(__name__)


@contextmanager
def run_periodically(interval_s: float, work: Callable[[], None]) -> Iterator[None]:
    """Call ``work`` in a thread while the block runs, first after ``interval_s``; an exception ends
    the thread.
    """
    stopped = threading.Event()
    thread = _start_thread(interval_s, work, stopped)
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def start_periodic_thread(interval_s: float, work: Callable[[], None]) -> None:
    """Call ``work`` in a thread until the process ends; an exception is logged, and the next call
    follows.
    """

    @wraps(work)
    def guarded() -> None:
        try:
            work()
        except Exception:
            logger.warning(
                "%s failed; the next attempt is in %g s",
                work.__qualname__,
                interval_s,
                exc_info=True,
            )

    _start_thread(interval_s, guarded, threading.Event())


def _start_thread(
    interval_s: float, work: Callable[[], None], stopped: threading.Event
) -> threading.Thread:
    def repeat() -> None:
        while not stopped.wait(interval_s):
            work()

    thread = threading.Thread(target=repeat, name=work.__qualname__, daemon=True)
    thread.start()
    return thread


# Deployments of a Ray Serve application, recorded in the cluster's key-value store.
#
# The store assigns every build of an application a number, higher than all earlier numbers. It also
# keeps the newest deployment, to which routers of older ones yield, and the deployment that was
# drained, so that an ingress replica of it which restarts is drained as well.

TTL_NS = 900 * 10**9


def number_deployment(application: str, build_id: str) -> int:
    """Return the number of a build, ``deployed_at``: the time in ns at which its first replica
    asked, or a later time.

    It is higher than all earlier numbers, regardless of the clocks of the nodes and of the
    deploying machine: a build that starts at 5 after another one got 9 gets 10. All replicas of a
    build get the same number.
    """
    newest = newest_deployment(application)
    kv_put(
        _build_key(application, build_id),
        str(max(time.time_ns(), newest + 1)).encode(),
        overwrite=False,
    )
    deployed_at = int(kv_get(_build_key(application, build_id)) or 0)
    if deployed_at > newest:
        kv_put(_key(application), str(deployed_at).encode())
    return deployed_at


class DeploymentWatch:
    """Detects newer deployments of an application.

    A deployment counts for TTL_NS, as the routers of a deployment that failed to load never start.
    Its age is read from the wall clock once, when this process sees it first; from then on the
    monotonic clock counts. A deployment from a machine whose clock is ahead counts as new.
    """

    def __init__(self, application: str) -> None:
        self.application = application
        self._newest = self._counts_until_ns = 0

    def is_superseded(self, deployed_at: int) -> bool:
        """Return True if a newer deployment is recorded, and counts."""
        newest = newest_deployment(self.application)
        if newest != self._newest:
            age_ns = max(time.time_ns() - newest, 0)
            self._newest, self._counts_until_ns = newest, time.monotonic_ns() + TTL_NS - age_ns
        return newest > deployed_at and time.monotonic_ns() < self._counts_until_ns


def mark_drained(application: str) -> None:
    """Record that the newest deployment accepts no new requests; a later deployment will accept
    them.
    """
    kv_put(_drained_key(application), str(newest_deployment(application)).encode())


def clear_drained(application: str) -> None:
    """Record that the application accepts new requests again."""
    kv_delete(_drained_key(application))


def is_drained(application: str, deployed_at: int) -> bool:
    """Return True if this deployment, or a later one, was marked as drained."""
    return deployed_at <= int(kv_get(_drained_key(application)) or 0)


def newest_deployment(application: str) -> int:
    """Return the number of the newest deployment, see ``number_deployment``; 0 if none is
    recorded.
    """
    return int(kv_get(_key(application)) or 0)


def _key(application: str) -> str:
    return f"tramontane-deployment-{application}"


def _build_key(application: str, build_id: str) -> str:
    return f"tramontane-build-{application}-{build_id}"


def _drained_key(application: str) -> str:
    return f"tramontane-drained-{application}"


# What starting routers wait for, for health checks: in the key-value store, since Ray Serve calls
# no replica whose constructor has not returned.

WAIT_REPORT_INTERVAL_S = 5.0
MIN_WAIT_S = 10.0  # before a wait is worth a word
MAX_WAIT_AGE_S = 4 * WAIT_REPORT_INTERVAL_S  # of the text of a router that has died since
READ_TIMEOUT_S = 1.0  # of the head node


class StartWait:
    """Publishes what one starting router waits for, and logs it once it takes long."""

    def __init__(self, application: str) -> None:
        self._key = _wait_key(application)
        self._begun_at = time.time()
        self._logged = ""

    def report(self, text: str) -> None:
        """Take what it waits for now; to be called every ``WAIT_REPORT_INTERVAL_S``."""
        now = time.time()
        if now - self._begun_at < MIN_WAIT_S:
            return
        if text != self._logged:
            logger.warning("not ready after %.0f s: %s", now - self._begun_at, text)
            self._logged = text
        with suppress(Exception):  # of Ray, whose head node may be unreachable: the start continues
            kv_put(self._key, json.dumps([text, self._begun_at, now]).encode())

    def end(self) -> None:
        """Record that the wait is over."""
        with suppress(Exception):  # of Ray, whose head node may be unreachable: the text gets old
            kv_delete(self._key)


async def read_wait(application: str) -> str:
    """Return what a starting router waits for, and for how long; "" if none does or Ray's head
    node does not answer.
    """
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await asyncio.to_thread(read_wait_now, application)
    except Exception as error:  # of Ray, whose head node may be unreachable
        logger.debug("it is not known what routers wait for: %s", error)
        return ""


def read_wait_now(application: str) -> str:
    """Return what ``read_wait`` does. It blocks, and raises Ray's errors."""
    value = kv_get(_wait_key(application))
    if value is None:
        return ""
    text, begun_at, reported_at = json.loads(value)
    if time.time() - reported_at > MAX_WAIT_AGE_S:
        return ""
    return f"{text}, for {reported_at - begun_at:.0f} s"


def _wait_key(application: str) -> str:
    return f"tramontane-start-wait-{application}"
