"""Make the length of the queue observable through which a Ray Serve replica passes a response on."""

from typing import Any

from tramontane.cluster.http.slow_clients import buffered_messages
from tramontane.cluster.ray_internals.table import MESSAGE_QUEUE


def track_response_queues() -> None:
    """Let Ray Serve's ``MessageQueue`` publish its length to the request that it is made for.

    To be called in a replica's constructor.
    """
    queue: Any = MESSAGE_QUEUE.value

    class TrackedQueue(queue):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            buffered_messages.set(self._message_queue.__len__)

    MESSAGE_QUEUE.replace(TrackedQueue)
