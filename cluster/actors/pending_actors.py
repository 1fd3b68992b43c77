"""Detection of actors that Ray never starts although the resources for them are reserved.

A head node that dies while actors are being created can leave them so: a lease that the previous
head requested is granted after its death, to a worker process that stays idle and keeps the
resources of the bundle, and the request of the new head waits for them without end (Ray issue
66199). Ray has no time limit for this.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from ray.actor import ActorHandle
from ray.util.placement_group import get_placement_group, placement_group_table

from tramontane.cluster.ray_internals.accessors import actor_state
from tramontane.proto.timing import ACTOR_START_TIMEOUT_S, MAX_ACTOR_START_TIMEOUT_S

Start = tuple[str, int]  # the name of an actor, and how often Ray has restarted it before
PENDING = ("DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING")

logger = logging.getLogger(__name__)


class PendingActorTracker:
    """How long each actor of a placement group has been pending since the group got its resources.

    The limit is ``ACTOR_START_TIMEOUT_S`` and doubles each time that actors are stuck, up to
    ``MAX_ACTOR_START_TIMEOUT_S``: on a busy machine a process may only be slow to start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limit_s = ACTOR_START_TIMEOUT_S
        self._pending_since: dict[Start, float] = {}

    def find_stuck(self, group: str, actors: Mapping[str, "ActorHandle[Any]"]) -> list[str]:
        """Return the names of the actors that have been pending for longer than the limit.

        ``group``: the name of their placement group. Time in which the head node does not answer,
        or nodes for the group are missing, does not count.
        """
        try:
            pending = _pending_starts(actors) if _is_placed(group) else []
        except Exception as error:  # of Ray, whose head node may be unreachable
            logger.debug("pending actors of %s are not known: %s", group, error)
            pending = []
        now = self._clock()
        self._pending_since = {start: self._pending_since.get(start, now) for start in pending}
        stuck = [
            name for (name, _), since in self._pending_since.items() if now - since > self._limit_s
        ]
        if stuck:
            self._limit_s = min(2 * self._limit_s, MAX_ACTOR_START_TIMEOUT_S)
            self._pending_since.clear()
        return stuck


def _pending_starts(actors: Mapping[str, "ActorHandle[Any]"]) -> list[Start]:
    """Return the starts that Ray has not completed. An actor whose process dies again and again has
    another start each time.
    """
    states = {name: actor_state(actor) for name, actor in actors.items()}
    return [
        (name, state["NumRestarts"])
        for name, state in states.items()
        if state.get("State") in PENDING
    ]


def _is_placed(group: str) -> bool:
    try:
        return bool(placement_group_table(get_placement_group(group))["state"] == "CREATED")
    except ValueError:  # it has been removed
        return False
