"""What the command that serves on a joined cluster tells its supervisors, which otherwise end the application."""

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
    """While the block runs. ``names`` tells the actors of the supervisors that there are."""
    signs = _Heartbeat(names)
    with ExitStack() as stack:
        for work in (signs.refresh, signs.send):  # in a thread each
            stack.enter_context(run_periodically(RENEW_INTERVAL_S, work))
        yield


class _Heartbeat:
    """Only the head node knows which supervisors there are; while it is away, Ray makes whoever asks wait for a minute.

    Those that are known hear of us all the same.
    """

    def __init__(self, names: Callable[[], list[str]]) -> None:
        self._names = names
        self._supervisors: list[ActorHandle[Any]] = []

    def refresh(self) -> None:
        """Who is there now."""
        found = []
        try:
            for name in self._names():
                with suppress(ValueError):  # it has just gone
                    found.append(ray.get_actor(name, NAMESPACE))
        except Exception as error:  # of Ray, whose head node may be away
            logger.warning("the pipelines could not be looked for: %s", ray_error_message(error))
        else:
            self._supervisors = found

    def send(self) -> None:
        """To each, without waiting."""
        for supervisor in self._supervisors:
            try:
                supervisor.heartbeat.options(concurrency_group="lease").remote()
            except Exception as error:  # of Ray; without the next sign of life all would go
                logger.warning("a sign of life could not be sent: %s", ray_error_message(error))
