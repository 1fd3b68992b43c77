"""Asking a pipeline's supervisor, which may be starting again, or do nothing any more."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError

from tramontane.cluster.actors.hang_detector import kill_worker_process

RENEW_INTERVAL_S = 2.0
ANSWERS_WITHIN_S = 2.0  # what is asked of its lease, beside whatever it does
SILENT_CALLS = 15  # in a row; then its process is ended although it is not stopped
FURTHER_CALLS = 5  # then nobody waits for it any more
RETRY_TIMEOUT_S = 30.0
RETRY_S = 0.2

logger = logging.getLogger(__name__)


async def call_with_retry(call: Callable[[], Any]) -> Any:  # noqa: ANN401 - what the actor answers
    """By a supervisor, which may be starting again: what it is asked for here may be asked twice. Raises RayError."""
    give_up_at = time.monotonic() + RETRY_TIMEOUT_S
    while True:
        try:
            return await call()
        except ActorUnavailableError:
            if time.monotonic() > give_up_at:
                raise
            await asyncio.sleep(RETRY_S)


async def call_or_restart(supervisor: "ActorHandle[Any]", call: Callable[[], Any]) -> Any:  # noqa: ANN401
    """As ``answered``, of the lease's methods. A supervisor whose process is stopped gets another one.

    Raises RayError also where that is of no help.
    """

    async def in_time() -> Any:  # noqa: ANN401
        num_silent = 0
        while num_silent < SILENT_CALLS + FURTHER_CALLS:
            try:
                async with asyncio.timeout(ANSWERS_WITHIN_S):
                    return await call()
            except TimeoutError:
                num_silent += 1
                least_age_s = math.inf if num_silent < SILENT_CALLS else 0.0
                if await asyncio.to_thread(kill_worker_process, supervisor, least_age_s):
                    logger.warning("the supervisor did not answer, and got a new process")
            except ActorUnavailableError:  # it is starting again; or is stopped, and this process has not talked to it before
                if await asyncio.to_thread(kill_worker_process, supervisor, math.inf):
                    logger.warning("the supervisor was stopped, and got a new process")
                raise
        raise RayError("the supervisor does not answer, and could not be ended")

    return await call_with_retry(in_time)


async def renew_lease_forever(supervisor: "ActorHandle[Any]", holder: str) -> None:
    """Steps do not depend on it: a router that was replaced hears of it from the stages."""
    while True:
        try:
            await renew_lease(supervisor, holder)
        except Exception as error:  # of Ray; this must go on as long as the pipeline is driven
            logger.warning("the lease could not be renewed: %s", error)
        await asyncio.sleep(RENEW_INTERVAL_S)


async def renew_lease(supervisor: "ActorHandle[Any]", holder: str) -> bool:
    """Whether the lease is still the holder's. Raises RayError."""
    return bool(await call_or_restart(supervisor, lambda: supervisor.renew.options(concurrency_group="lease").remote(holder)))
