"""The last token of every sequence, on the device: what a decode begins with if the router does not
know it yet.

With asynchronous scheduling the router submits a step before the tokens of the step before it have
been read. Its columns then have a ``PLACEHOLDER_TOKEN``, and the device fills in what it has
sampled itself, without a copy to the host and back.

Shape letters: N slots of sequences, S sampled rows, B single tokens.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tramontane.workers.device.pinned_memory import tensor_on


class LatestTokens:
    """The token id that was last sampled for each slot, [N]. ``slots``: the slot of each sequence,
    by its id; only read.
    """

    def __init__(self, num_slots: int, slots: Mapping[int, int], device: torch.device) -> None:
        self._ids_N = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._slots, self._device = slots, device

    def put(self, seq_ids: Sequence[int], token_ids_S: Tensor) -> None:
        """Keep the tokens that have been sampled for these sequences, each of which occurs once.

        A sequence without a token has ended (NOT_FINITE_TOKEN). What is computed for it until that
        is known is in vain, but has to begin with a token of the vocabulary: 0.
        """
        self._ids_N[self._index(seq_ids)] = token_ids_S.clamp(min=0)

    def of(self, seq_ids: Sequence[int]) -> Tensor:
        """Return the last tokens of these sequences, [S]."""
        return self._ids_N[self._index(seq_ids)]

    def fill_in(self, token_ids_B: Tensor, slots_B: Tensor) -> Tensor:
        """Return the tokens [B] with those of their slots in the places of placeholders.

        Last tokens [7, 8, 9], tokens [40, -1], slots [0, 2]: [40, 9].
        """
        return torch.where(token_ids_B < 0, self._ids_N[slots_B], token_ids_B)

    def _index(self, seq_ids: Sequence[int]) -> Tensor:
        return tensor_on([self._slots[seq_id] for seq_id in seq_ids], torch.int64, self._device)
