"""Count of the hidden states that a stage hands to the next one, by the way that they take."""

import os
import threading
from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING

from tramontane.cluster.config.ray_settings import INLINE_LIMIT
from tramontane.cluster.ray_internals.accessors import cluster_settings

if TYPE_CHECKING:
    from tramontane.workers.stage.activation import Packed

RAYS_LIMIT = 100 * 2**10  # without the setting
SERIALIZED_OVERHEAD = 254  # bytes that Ray's serialization adds to a header and an array


class Way(StrEnum):
    """How hidden states reach the next stage: in the reply to the router and its next call, by the
    object store, or a channel.
    """

    INLINE = "inline"
    PLASMA = "plasma"
    DIRECT = "direct"


class SentStates:
    """Counts of one stage. Threads that compute steps add to them, another one reads them."""

    def __init__(self, inline_limit: int) -> None:
        self._inline_limit = inline_limit
        self._lock = threading.Lock()
        self._hops: Counter[Way] = Counter()
        self._num_bytes: Counter[Way] = Counter()

    def add_result(self, packed: "Packed") -> None:
        """Count a result of the actor by Ray's own rule: with a limit of 1,048,576, 1,048,575 bytes
        are inline.
        """
        header, array_B = packed
        size = len(header) + array_B.nbytes + SERIALIZED_OVERHEAD
        self._add(Way.INLINE if size < self._inline_limit else Way.PLASMA, array_B.nbytes)

    def add_direct(self, num_bytes: int) -> None:
        """Count hidden states that went through a direct channel."""
        self._add(Way.DIRECT, num_bytes)

    def _add(self, way: Way, num_bytes: int) -> None:
        with self._lock:
            self._hops[way] += 1
            self._num_bytes[way] += num_bytes

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return hops and bytes of hidden states, by way."""
        with self._lock:
            return {str(way): (hops, self._num_bytes[way]) for way, hops in self._hops.items()}


def inline_limit() -> int:
    """Return the size below which this cluster's results are inline: a setting of the head node, or
    else of the environment.
    """
    return int(
        cluster_settings().get(INLINE_LIMIT) or os.environ.get(f"RAY_{INLINE_LIMIT}") or RAYS_LIMIT
    )
