"""Which router gets a request: Ray Serve's routing, with the counts of an ingress's own."""

import random
from collections import Counter
from collections.abc import Collection

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

# What a call wishes of the routing. It travels in the call's session id, which nothing else uses here.
ANY, ONLY, EXCEPT = "", "=", "!"


def exclude(replicas: Collection[str]) -> str:
    """{} gives "", {"b", "a"} gives "!a,b"."""
    return EXCEPT + ",".join(sorted(replicas)) if replicas else ANY


class LeastLoadedRouter(RequestRouter):
    """The fewest requests among the replicas that the call's wish leaves; chance decides between equals.

    ``=a`` leaves replica a; ``!a,b`` leaves all but a and b. If that is none at all, any will do.

    Ray Serve's own counts are what each replica last said, so requests that come together see the same
    ones and all go to one replica. Here a request counts from the moment it is given a replica.
    """

    def initialize_state(self, **_: object) -> None:
        self._assigned: dict[str, str] = {}  # replica, by request
        self._num_given: Counter[str] = Counter()  # by replica

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        wish = pending_request.metadata.session_id if pending_request else ANY
        kind, names = wish[:1], wish[1:].split(",")
        left = [r for r in candidate_replicas if kind == ANY or (r.replica_id.unique_id in names) == (kind == ONLY)]
        left = left or candidate_replicas
        if pending_request is None or not left:
            return [left]
        request = pending_request.metadata.internal_request_id
        self._take_back(request)  # the replica that it was given did not answer
        chosen = min(left, key=lambda r: (self._num_given[r.replica_id.unique_id], random.random()))
        self._assigned[request] = chosen.replica_id.unique_id
        self._num_given[chosen.replica_id.unique_id] += 1
        pending_request.future.add_done_callback(lambda future: self._take_back(request) if future.cancelled() else None)
        return [[chosen]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """However it ended, once it was sent."""
        self._take_back(internal_request_id)

    def _take_back(self, request: str) -> None:
        if (replica := self._assigned.pop(request, None)) is not None:
            self._num_given[replica] -= 1
            if not self._num_given[replica]:
                del self._num_given[replica]
