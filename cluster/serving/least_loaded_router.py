"""Routing of requests to routers: Ray Serve's routing, with an ingress's own counts."""

import random
from collections import Counter
from collections.abc import Collection

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

# Constraints on a call's replica. They are sent as the call's session id, which has no other use
# here.
ANY, ONLY, EXCEPT = "", "=", "!"


def exclude(replicas: Collection[str]) -> str:
    """Return the constraint that excludes these replicas: no replicas give "", {"b", "a"} gives
    "!a,b".
    """
    return EXCEPT + ",".join(sorted(replicas)) if replicas else ANY


def prefer(replica: str | None, excluded: Collection[str]) -> str:
    """Return the constraint to this replica if it exists, else to any that is not excluded: a and
    {"b"} gives "=a!b".
    """
    return (ONLY + replica if replica else ANY) + exclude(excluded)


class LeastLoadedRouter(RequestRouter):
    """Chooses the replica with the fewest requests among the replicas that the call's constraint
    allows, at random between equals.

    ``=a`` allows replica a; ``!a,b`` allows all but a and b; ``=a!b,c`` allows a, and if it is not
    there all but b and c. If no allowed replica is left, all are allowed.

    Ray Serve's own counts are the last ones that replicas reported, so requests that arrive
    together see the same counts and are all sent to one replica. Here a request counts from its
    assignment to a replica.
    """

    def initialize_state(self, **_: object) -> None:
        """Start without requests; Ray Serve calls this in place of a constructor."""
        self._assigned: dict[str, str] = {}  # replica, by request
        self._num_assigned: Counter[str] = Counter()  # by replica

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replica for a pending request, for Ray Serve; all allowed ones without a
        request.
        """
        constraint = pending_request.metadata.session_id if pending_request else ANY
        only, _, excluded = constraint.partition(EXCEPT)
        allowed = [r for r in candidate_replicas if ONLY + r.replica_id.unique_id == only]
        allowed = allowed or [
            r for r in candidate_replicas if r.replica_id.unique_id not in excluded.split(",")
        ]
        allowed = allowed or candidate_replicas
        if pending_request is None or not allowed:
            return [allowed]
        request = pending_request.metadata.internal_request_id
        self._release(request)  # the replica that it was assigned to did not answer
        chosen = min(
            allowed, key=lambda r: (self._num_assigned[r.replica_id.unique_id], random.random())
        )
        self._assigned[request] = chosen.replica_id.unique_id
        self._num_assigned[chosen.replica_id.unique_id] += 1
        pending_request.future.add_done_callback(
            lambda future: self._release(request) if future.cancelled() else None
        )
        return [[chosen]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Stop counting a request that was sent, however it ended."""
        self._release(internal_request_id)

    def _release(self, request: str) -> None:
        if (replica := self._assigned.pop(request, None)) is not None:
            self._num_assigned[replica] -= 1
            if not self._num_assigned[replica]:
                del self._num_assigned[replica]
