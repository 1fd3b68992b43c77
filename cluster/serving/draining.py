"""Draining: a server that is about to stop finishes its requests within a time limit, and accepts
no new ones.
"""

import time
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from tramontane.cluster.common.ray_api import clear_drained, mark_drained
from tramontane.cluster.ray_internals.accessors import connect_handle
from tramontane.cluster.serving.app import APPLICATION
from tramontane.proto.timing import (
    BROADCAST_TIMEOUT_S,
    DEFAULT_DRAIN_S,
    DRAIN_POLL_INTERVAL_S,
    END_TIMEOUT_S,
)

Report = Callable[[str], None]


def stop(timeout_s: float | None, report: Report, cancelled: Callable[[float], bool]) -> None:
    """Drain, for DEFAULT_DRAIN_S if ``timeout_s`` is None, then end the remaining requests with an
    error that explains it.
    """
    timeout_s = DEFAULT_DRAIN_S if timeout_s is None else timeout_s
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
