"""CUDA graphs without CUDA: the operations of torch that ran once are run again, on the same memory
and with nothing else.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tramontane.workers.stage.cuda_graphs import Compute, Cut

# What the host reads of a device by ``item``, ``bool``, ``nonzero``, ``tolist`` and ``numpy``.
READS_OF_THE_HOST = {
    *(
        torch.ops.aten.item.default,
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.is_nonzero.default,
    ),
    *(torch.ops.aten.nonzero.default, torch.ops.aten.resolve_conj.default),
}


class _Call(NamedTuple):
    operation: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    done: object  # what it returned


class Tape(TorchDispatchMode):
    """The operations of torch that run within it, in pieces, which can be run again on what is then
    in the same memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[list[_Call]] = [[]]
        # by what was computed first; other tensors are memory that stays where it is
        self._anew: dict[int, object] = {}

    def __torch_dispatch__(
        self,
        operation: Callable[..., object],
        _types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        assert operation not in READS_OF_THE_HOST, "a CUDA graph cannot contain it"
        done = operation(*args, **(kwargs or {}))
        self._pieces[-1].append(_Call(operation, args, kwargs or {}, done))
        return done

    def cut(self) -> None:
        """Begin another piece."""
        self._pieces.append([])

    @property
    def num_pieces(self) -> int:
        """How many there are."""
        return len(self._pieces)

    def replay(self, piece: int, result: Tensor) -> Tensor:
        """Run a piece again, after those before it. Returns what has become of ``result``, a tensor
        that was computed.
        """
        if piece == 0:
            self._anew.clear()
        assert self._pieces[piece], "a CUDA graph would be empty"
        for operation, args, kwargs, first in self._pieces[piece]:
            done = operation(
                *tree_map_only(Tensor, self._newest, args),
                **tree_map_only(Tensor, self._newest, kwargs),
            )
            self._anew.update(zip(map(id, tree_leaves(first)), tree_leaves(done), strict=True))
        newest = self._newest(result)
        assert isinstance(newest, Tensor)
        return newest

    def _newest(self, tensor: Tensor) -> object:
        return self._anew.get(id(tensor), tensor)


class Replays:
    """A ``GraphCapture`` as a CUDA graph is one: nothing of Python runs again, so numbers of the
    host stay what they were.
    """

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def __call__(self, compute: Compute) -> Compute:
        (replay,) = self.in_pieces(lambda _cut: compute())
        return replay

    def in_pieces(self, compute: Callable[[Cut], Tensor]) -> list[Compute]:
        """Take the place of a ``PiecewiseCapture``."""
        compute(lambda: None)
        with Tape() as tape:
            first = compute(tape.cut)
        self.num_recorded += tape.num_pieces

        def replay(piece: int) -> Tensor:
            self.num_replayed += 1
            return tape.replay(piece, first)

        return [partial(replay, piece) for piece in range(tape.num_pieces)]
