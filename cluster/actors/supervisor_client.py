"""Calls to the supervisors of pipelines, which may be restarting or hang."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError

from tramontane.cluster.actors.hang_detector import BEING_CREATED, kill_worker_process
from tramontane.cluster.actors.worker_actor import NAMESPACE
from tramontane.cluster.common.ray_api import ray_error_message, run_periodically
from tramontane.cluster.ray_internals.accessors import actor_state
from tramontane.proto.timing import (
    LEASE_CALL_TIMEOUT_S,
    RENEW_INTERVAL_S,
    SUPERVISOR_RETRY_TIMEOUT_S,
)
from tramontane.proto.units import backoff_delays

MAX_MISSED_CALLS = 15  # in a row; then its process is killed even if it is not stopped
MAX_FURTHER_CALLS = 5  # after which the call fails
START_TIMEOUT_S = 180.0  # for its first process
RETRY_INTERVAL_S, MAX_RETRY_INTERVAL_S = 0.2, 2.0

logger = logging.getLogger(__name__)


async def call_with_retry(call: Callable[[], Any]) -> Any:  # the actor's return value
    """Await an idempotent call, again while the supervisor restarts. Raises RayError."""
    deadline = time.monotonic() + SUPERVISOR_RETRY_TIMEOUT_S
    for delay_s in backoff_delays(RETRY_INTERVAL_S, MAX_RETRY_INTERVAL_S):
        try:
            return await call()
        except ActorUnavailableError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(delay_s)


async def call_or_restart(supervisor: "ActorHandle[Any]", call: Callable[[], Any]) -> Any:
    """Call one of the lease's methods as ``call_with_retry`` does; a stopped supervisor process is
    replaced.

    Calls to a supervisor that has no process yet, as on a busy machine, do not count for
    ``START_TIMEOUT_S``. Raises RayError, also if the replacement does not help.
    """
    begun_at = time.monotonic()

    async def call_in_time() -> Any:
        num_missed = 0
        while num_missed < MAX_MISSED_CALLS + MAX_FURTHER_CALLS:
            try:
                async with asyncio.timeout(LEASE_CALL_TIMEOUT_S):
                    return await call()
            except TimeoutError:
                if time.monotonic() - begun_at < START_TIMEOUT_S and await asyncio.to_thread(
                    _is_being_created, supervisor
                ):
                    continue
                num_missed += 1
                min_age_s = math.inf if num_missed < MAX_MISSED_CALLS else 0.0
                if await asyncio.to_thread(kill_worker_process, supervisor, min_age_s):
                    silent_s = num_missed * LEASE_CALL_TIMEOUT_S
                    logger.warning(
                        "the supervisor got a new process: it had not answered for %g s", silent_s
                    )
            # it restarts; or it is stopped, and this process has not called it before
            except ActorUnavailableError:
                if await asyncio.to_thread(kill_worker_process, supervisor, math.inf):
                    logger.warning("the supervisor got a new process: the old one was stopped")
                raise
        raise RayError(
            f"the supervisor has not answered {num_missed} calls in a row, and could not be"
            " replaced"
        )

    return await call_with_retry(call_in_time)


def _is_being_created(supervisor: "ActorHandle[Any]") -> bool:
    """Return whether Ray has not started the supervisor's first process yet; False if the head node
    does not answer.
    """
    try:
        return actor_state(supervisor).get("State") in BEING_CREATED
    except Exception as error:  # of Ray
        logger.debug("the state of the supervisor is not known: %s", error)
        return False


async def renew_lease_forever(supervisor: "ActorHandle[Any]", holder: str) -> None:
    """Renew the lease every RENEW_INTERVAL_S; errors are only logged.

    Steps do not depend on it: a replaced router is refused by the stages.
    """
    while True:
        try:
            await renew_lease(supervisor, holder)
        except Exception as error:  # of Ray; renewing continues as long as the pipeline is driven
            logger.warning(
                "the lease could not be renewed; the next attempt is in %g s: %s",
                RENEW_INTERVAL_S,
                error,
            )
        await asyncio.sleep(RENEW_INTERVAL_S)


async def renew_lease(supervisor: "ActorHandle[Any]", holder: str) -> bool:
    """Renew the lease; return False if it is no longer the holder's. Raises RayError."""
    return bool(
        await call_or_restart(
            supervisor, lambda: supervisor.renew.options(concurrency_group="lease").remote(holder)
        )
    )


@contextmanager
def send_heartbeats(names: Callable[[], list[str]]) -> Iterator[None]:
    """Send heartbeats of the command that serves on a joined cluster; without them supervisors end
    the application.

    ``names`` returns the names of the supervisors' actors.
    """
    heartbeat = _Heartbeat(names)
    with (
        run_periodically(RENEW_INTERVAL_S, heartbeat.refresh),
        run_periodically(RENEW_INTERVAL_S, heartbeat.send),
    ):
        yield


class _Heartbeat:
    """Only the head node knows the supervisors; while it is unreachable, Ray blocks a caller for a
    minute.

    So the search and the heartbeats to known supervisors have separate threads.
    """

    def __init__(self, names: Callable[[], list[str]]) -> None:
        self._names = names
        self._supervisors: list[ActorHandle[Any]] = []

    def refresh(self) -> None:
        """Look up the current supervisors."""
        found = []
        try:
            for name in self._names():
                with suppress(ValueError):  # it has just ended
                    found.append(ray.get_actor(name, NAMESPACE))
        except Exception as error:  # of Ray, whose head node may be unreachable
            logger.warning(
                "the supervisors of pipelines could not be looked up: %s", ray_error_message(error)
            )
        else:
            self._supervisors = found

    def send(self) -> None:
        """Send a heartbeat to each supervisor, without waiting."""
        for supervisor in self._supervisors:
            try:
                supervisor.heartbeat.options(concurrency_group="lease").remote()
            except Exception as error:  # of Ray; an exception here would end all later heartbeats
                logger.warning("a heartbeat could not be sent: %s", ray_error_message(error))
