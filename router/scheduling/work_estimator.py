"""Attention keys per token, and from them the work of a micro-batch."""

from collections.abc import Sequence

from tramontane.proto.step import MicroBatch
from tramontane.router.scheduling.policy import BatchWork


class WorkEstimator:
    """Estimates the keys that tokens attend to.

    ``windows`` has one window per kind of layer in the model; the length of the context for layers without one.
    """

    def __init__(self, windows: Sequence[int]) -> None:
        self._windows = tuple(windows)
        self._shortest, self._longest = min(windows), max(windows)

    def visible_keys(self, num_positions: int) -> int:
        """Return the keys that the last of so many positions sees, averaged over the kinds of windows.

        Windows of 4 and 10: the third position sees 3, the eighth (4 + 8) // 2 = 6, the twelfth (4 + 10) // 2 = 7.
        """
        if num_positions <= self._shortest:
            return num_positions
        return sum(min(window, num_positions) for window in self._windows) // len(self._windows)

    def visible_keys_gained(self, num_positions: Sequence[int]) -> int:
        """Return the sum, over sequences of so many positions, of how many more keys the last one sees than the one before."""
        if not num_positions or max(num_positions) <= self._shortest:
            return len(num_positions)
        return sum(self.visible_keys(n) - self.visible_keys(n - 1) for n in num_positions if n <= self._longest)

    def work_of(self, batch: MicroBatch) -> BatchWork:
        """Return the work of a micro-batch.

        Each token of a prompt's chunk sees the positions before the chunk, and on average half of the chunk.
        """
        tokens = keys = 0
        single = [start + 1 for start in batch.decodes.starts]
        for chunk in batch.chunks:
            if (length := len(chunk.token_ids)) == 1:
                single.append(chunk.start + 1)
            else:
                tokens += length
                keys += length * self.visible_keys(chunk.start) + length * (length + 1) // 2
        if single and max(single) > self._shortest:
            single = [self.visible_keys(num_positions) for num_positions in single]
        return BatchWork(tokens, keys, len(single), sum(single))
