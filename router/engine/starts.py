"""How long requests wait for their first micro-batch: what whoever is refused is told."""

import math
from collections.abc import Callable, Iterable, Mapping

from tramontane.proto.request import NUM_PRIORITIES
from tramontane.proto.step import MicroBatch
from tramontane.router.engine.active_request import LiveRequest


class Starts:
    """Of one router's requests, by its clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_queue_s = [0.0] * NUM_PRIORITIES  # of the request of each that started last

    def note(self, batch: MicroBatch, requests: Mapping[int, LiveRequest]) -> None:
        """This micro-batch is sent; ``requests`` by the ids of their sequences."""
        for chunk in batch.chunks:
            if chunk.start == 0 and (request := requests.get(chunk.seq_id)) and request.started_at == math.inf:
                request.started_at = self._clock()
                self._last_queue_s[request.priority] = request.started_at - request.arrived_at

    def retry_after_s(self, priority: int, requests: Iterable[LiveRequest]) -> int:
        """As long as the request like it that started last has waited, or one that has not for longer, in whole seconds."""
        now = self._clock()
        waiting = (r for r in requests if r.priority == priority and r.started_at == math.inf)
        longest = max((now - request.arrived_at for request in waiting), default=0.0)
        return max(1, math.ceil(max(longest, self._last_queue_s[priority])))
