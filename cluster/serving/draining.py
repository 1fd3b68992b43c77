"""Draining: a server that is about to stop finishes its requests within a time limit, and accepts
no new ones.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from tramontane.cluster.common.ray_api import clear_drained, mark_drained
from tramontane.cluster.common.signals import end_at_once
from tramontane.cluster.ray_internals.accessors import connect_handle, serve_controller
from tramontane.cluster.serving.app import APPLICATION
from tramontane.proto.timing import (
    BROADCAST_TIMEOUT_S,
    DEFAULT_DRAIN_S,
    DRAIN_POLL_INTERVAL_S,
    END_TIMEOUT_S,
    JOINED_STOP_S,
    MAX_STOP_S,
    MIN_STOP_S,
    RAY_STOP_S,
)

Report = Callable[[str], None]
logger = logging.getLogger(__name__)


class StopLimit:
    """A context that ends this process, with status 1, and all that it has started, if the end of
    the context takes too long once it has begun.

    Calls of Ray have no limit where its daemons are dead or hang. ``address``: of the cluster that
    the server has joined, None for one of its own.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._timer: threading.Timer | None = None
        self._deadline = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()  # if it has run out, this process ends there, with its status

    def begin(self, drain_s: float = 0.0) -> None:
        """Begin to count; later calls change nothing. ``drain_s``: for which requests may run
        on.
        """
        if self._timer is None:
            limit_s = drain_s + stop_time_s(drain_s, is_own=self._address is None)
            self._deadline = time.monotonic() + limit_s
            self._timer = threading.Timer(limit_s, self._end, [limit_s])
            self._timer.daemon = True
            self._timer.start()

    def left_s(self) -> float:
        """Return the seconds that are left, once it counts."""
        return self._deadline - time.monotonic()

    def _end(self, limit_s: float) -> None:
        rest = (
            "all its processes are ended"
            if self._address is None
            else f"the Ray cluster at {self._address} keeps what it has of this server until that"
            " misses this process"
        )
        logger.error(
            "the server has not stopped within %g s, as Ray did not answer: %s", limit_s, rest
        )
        end_at_once(1)


def stop_time_s(drain_s: float, is_own: bool) -> float:
    """Return the seconds for all that follows the drain time: in a cluster of its own 5 after 3 s,
    12 after 12, 30 after 600.
    """
    return min(max(drain_s, MIN_STOP_S), MAX_STOP_S) if is_own else JOINED_STOP_S


def drain_time_s(configured: float | None) -> float:
    """Return the seconds that running requests have when the server stops."""
    return DEFAULT_DRAIN_S if configured is None else configured


def shut_down_serve(limit: StopLimit) -> None:
    """Let Ray Serve end its replicas, which release what is outside of the cluster, as long as the
    limit permits: the cluster ends next, and all its processes with it.
    """
    with suppress(RayError, TimeoutError, ValueError):  # ValueError: it has no controller yet
        ended = serve_controller().graceful_shutdown.remote()
        ray.get(ended, timeout=max(limit.left_s() - RAY_STOP_S, 0.0))


def stop(timeout_s: float, report: Report, cancelled: Callable[[float], bool]) -> None:
    """Drain, then end the remaining requests with an error that explains it."""
    if num_left := drain(timeout_s, report, cancelled):
        report(f"ending {num_left} request{'s' * (num_left != 1)}")
        _end_all()


def _end_all() -> None:
    """End all requests, and wait until no ingress replica has one: an error that is still to be
    sent is lost with its proxy.
    """
    deadline = time.monotonic() + END_TIMEOUT_S
    _broadcast("end_all")
    while start_draining() and time.monotonic() < deadline:
        time.sleep(DRAIN_POLL_INTERVAL_S)
        _broadcast("end_all")


def drain(timeout_s: float, report: Report, cancelled: Callable[[float], bool]) -> int:
    """Let every ingress replica refuse new requests; return how many requests did not end in time.

    ``cancelled`` waits for the given seconds and returns whether the wait is to end early.
    """
    deadline = time.monotonic() + timeout_s
    mark_drained(APPLICATION)
    num_reported = 0
    while num_left := start_draining():
        if num_left != num_reported:
            report(
                f"finishing {num_left} request{'s' * (num_left != 1)}, for {timeout_s:g} s at most"
            )
            num_reported = num_left
        if time.monotonic() >= deadline or cancelled(DRAIN_POLL_INTERVAL_S):
            break
    return num_left


def resume() -> None:
    """Let every ingress replica accept new requests again."""
    clear_drained(APPLICATION)
    _broadcast("resume")


def start_draining() -> int:
    """Let every ingress replica refuse new requests, and return how many requests they have
    together.

    If all that answer have none, a replica that does not answer counts as one request.
    """
    answers = _broadcast("drain")
    known = sum(number for number in answers if isinstance(number, int))
    return known or int(any(not isinstance(number, int) for number in answers))


def _broadcast(method: str) -> list[Any]:
    handle: Any = serve.get_deployment_handle("Ingress", APPLICATION)
    connect_handle(handle)
    try:
        answers: list[Any] = handle.broadcast(method).results(
            timeout_s=BROADCAST_TIMEOUT_S, return_exceptions=True
        )
    except (RayError, TimeoutError) as error:
        return [error]
    except RayServeException:  # Ray Serve is not running
        return []
    return answers
