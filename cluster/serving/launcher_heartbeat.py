"""Heartbeats of the command that serves on a joined cluster; without them the supervisors end the application."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import ray
from ray.actor import ActorHandle

from tramontane.cluster.actors.supervisor_client import RENEW_INTERVAL_S
from tramontane.cluster.actors.worker_actor import NAMESPACE
from tramontane.cluster.common.periodic import run_periodically
from tramontane.cluster.common.ray_errors import ray_error_message

logger = logging.getLogger(__name__)


@contextmanager
def send_heartbeats(names: Callable[[], list[str]]) -> Iterator[None]:
    """Send heartbeats while the block runs. ``names`` returns the names of the supervisors' actors."""
    heartbeat = _Heartbeat(names)
    with ExitStack() as stack:
        for work in (heartbeat.refresh, heartbeat.send):  # in a thread each
            stack.enter_context(run_periodically(RENEW_INTERVAL_S, work))
        yield


class _Heartbeat:
    """Only the head node knows the supervisors; while it is away, Ray lets a caller wait for a minute.

    So the search and the heartbeats to supervisors that are known have separate threads.
    """

    def __init__(self, names: Callable[[], list[str]]) -> None:
        self._names = names
        self._supervisors: list[ActorHandle[Any]] = []

    def refresh(self) -> None:
        """Look up the supervisors that there are now."""
        found = []
        try:
            for name in self._names():
                with suppress(ValueError):  # it has just ended
                    found.append(ray.get_actor(name, NAMESPACE))
        except Exception as error:  # of Ray, whose head node may be away
            logger.warning("the supervisors of pipelines could not be looked up: %s", ray_error_message(error))
        else:
            self._supervisors = found

    def send(self) -> None:
        """Send a heartbeat to each supervisor, without waiting."""
        for supervisor in self._supervisors:
            try:
                supervisor.heartbeat.options(concurrency_group="lease").remote()
            except Exception as error:  # of Ray; an exception here would end all later heartbeats
                logger.warning("a heartbeat could not be sent: %s", ray_error_message(error))
