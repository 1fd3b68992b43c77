"""A server that is about to stop finishes what it has begun, within a limit, and takes nothing new."""

import time
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from tramontane.cluster.common.deployments import clear_drained, mark_drained
from tramontane.cluster.ray_internals.serve import connect_handle
from tramontane.cluster.serving.app import APPLICATION

POLL_S = 0.1
ANSWER_S = 5.0  # an ingress replica that does not say how much it has is asked again

Report = Callable[[str], None]


def stop(timeout_s: float, report: Report, cancelled: Callable[[float], bool]) -> None:
    """As ``drain``; what still runs then ends with an error that says why."""
    if num_left := drain(timeout_s, report, cancelled):
        report(f"ending {num_left} request{'s' * (num_left != 1)}")
        _broadcast("end_all")


def drain(timeout_s: float, report: Report, cancelled: Callable[[float], bool]) -> int:
    """Every ingress replica refuses what is new; returns how many requests had not ended in time.

    ``cancelled`` waits for so many seconds, or until somebody wants no more waiting, and says which.
    """
    deadline = time.monotonic() + timeout_s
    mark_drained(APPLICATION)
    said = 0
    while num_left := num_unfinished():
        if num_left != said:
            report(f"finishing {num_left} request{'s' * (num_left != 1)}, for {timeout_s:g} s at most")
            said = num_left
        if time.monotonic() >= deadline or cancelled(POLL_S):
            break
    return num_left


def resume() -> None:
    """Every ingress replica takes new requests again."""
    clear_drained(APPLICATION)
    _broadcast("resume")


def num_unfinished() -> int:
    """From now on all are draining.

    One that does not say how many it has may have one.
    """
    answers = _broadcast("drain")
    known = sum(number for number in answers if isinstance(number, int))
    return known or int(any(not isinstance(number, int) for number in answers))


def _broadcast(method: str) -> list[Any]:
    handle: Any = serve.get_deployment_handle("Ingress", APPLICATION)
    connect_handle(handle)
    try:
        answers: list[Any] = handle.broadcast(method).results(timeout_s=ANSWER_S, return_exceptions=True)
    except (RayError, TimeoutError) as error:
        return [error]
    except RayServeException:  # there is none
        return []
    return answers
