"""Values that were seen of late, until whoever watches takes them."""

from collections import deque

MOST = 200  # that are kept between two looks, which is enough for percentiles: telling of one may cost more than it took to see


class Recent:
    """One thread adds, another one takes. Where too many come in between, the oldest are forgotten."""

    def __init__(self, most: int = MOST) -> None:
        self._values: deque[float] = deque(maxlen=most)
        self.add = self._values.append

    def take(self) -> list[float]:
        """All that are there now, the oldest first."""
        taken = []
        for _ in range(len(self._values)):  # not those that come meanwhile
            taken.append(self._values.popleft())
        return taken
