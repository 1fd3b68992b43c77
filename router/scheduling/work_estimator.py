"""How many keys tokens attend to, and from that what a micro-batch gives a stage to do."""

from collections.abc import Sequence

from tramontane.proto.step import MicroBatch
from tramontane.router.scheduling.policy import BatchWork


class WorkEstimator:
    """``windows``: one of each kind that the model's layers have; the context's length for those without."""

    def __init__(self, windows: Sequence[int]) -> None:
        self._windows = tuple(windows)
        self._shortest, self._longest = min(windows), max(windows)

    def visible_keys(self, num_positions: int) -> int:
        """Of the last of so many positions, on average over the kinds of windows.

        Windows of 4 and 10: the third position sees 3, the eighth (4 + 8) // 2 = 6, the twelfth (4 + 10) // 2 = 7.
        """
        if num_positions <= self._shortest:
            return num_positions
        return sum(min(window, num_positions) for window in self._windows) // len(self._windows)

    def visible_keys_gained(self, num_positions: Sequence[int]) -> int:
        """How many more than the one before it the last of so many positions sees, for each of these, summed."""
        if not num_positions or max(num_positions) <= self._shortest:
            return len(num_positions)
        return sum(self.visible_keys(n) - self.visible_keys(n - 1) for n in num_positions if n <= self._longest)

    def work_of(self, batch: MicroBatch) -> BatchWork:
        """A prompt's chunk sees its earlier positions with each token, and on average half of itself."""
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
