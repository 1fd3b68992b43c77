"""Record the queue through which a Ray Serve replica passes a response on, so that its length can be bounded."""

from typing import Any

import ray.serve._private.replica

from tramontane.cluster.http.slow_clients import answer_queue


def track_response_queues() -> None:
    """Replace Ray Serve's ``MessageQueue`` by one that records itself. Call this in a replica's constructor."""
    module: Any = ray.serve._private.replica

    class NotedQueue(module.MessageQueue):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            answer_queue.set(self)

    module.MessageQueue = NotedQueue
