"""Which tokens sequences have had, and how often: a row for each sequence whose sampling depends on it."""

import torch
from torch import Tensor

from tramontane.workers.device.pinned_memory import on_device

FIRST_ROWS = 4


class TokenCounts:
    """Rows are taken and given back. Where none is left there are twice as many: 5 bytes per token of the vocabulary each."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._output_NV = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._prompt_NV = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._free: list[int] = []

    def take(self) -> int:
        """A row where nothing has been counted."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._output_NV[row] = 0
        self._prompt_NV[row] = False
        return row

    def give_back(self, row: int) -> None:
        self._free.append(row)

    def add_prompt(self, row: int, token_ids: tuple[int, ...]) -> None:
        self._prompt_NV[row, self._index(token_ids)] = True

    def add_output(self, rows: list[int], token_ids: list[int]) -> None:
        """One more of each of these tokens, in these rows; the same of both may come several times."""
        ones = torch.ones(len(rows), dtype=torch.int32, device=self._output_NV.device)
        self._output_NV.index_put_((self._index(rows), self._index(token_ids)), ones, accumulate=True)

    def of(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """How often each token is in the output [R, V], and whether it is in prompt or output [R, V]."""
        index = self._index(rows)
        output_RV = self._output_NV[index]
        return output_RV, self._prompt_NV[index] | (output_RV > 0)

    def _grow(self) -> None:
        num_rows = len(self._output_NV)
        num_new = max(num_rows, FIRST_ROWS)
        self._output_NV = torch.cat([self._output_NV, self._output_NV.new_zeros(num_new, self._output_NV.shape[1])])
        self._prompt_NV = torch.cat([self._prompt_NV, self._prompt_NV.new_zeros(num_new, self._prompt_NV.shape[1])])
        self._free += range(num_rows, num_rows + num_new)

    def _index(self, numbers: list[int] | tuple[int, ...]) -> Tensor:
        return on_device(numbers, torch.int64, self._output_NV.device)
