"""Hidden states on their way between stages: a small header and the raw bytes."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tramontane.proto import wire
from tramontane.proto.request import ExpertChoices
from tramontane.proto.step import StageTiming

# (header, bytes as a uint8 array): numpy arrays travel out of band and are read without a copy
Packed = tuple[bytes, "np.ndarray[tuple[int], np.dtype[np.uint8]]"]


@dataclass(frozen=True, slots=True)
class Activation:
    """``hidden_TD`` as it leaves a stage; the timings of the stages it has passed, and the experts that were chosen there."""

    hidden_TD: Tensor
    timings: tuple[StageTiming, ...]
    choices: tuple[ExpertChoices, ...] = ()

    def pack(self) -> Packed:
        hidden = self.hidden_TD.contiguous().cpu()
        dtype = str(hidden.dtype).removeprefix("torch.")
        header = wire.encode_header(dtype, tuple(hidden.shape), self.timings, self.choices)
        return header, hidden.view(torch.uint8).reshape(-1).numpy()

    @classmethod
    def unpack(cls, packed: Packed) -> "Activation":
        """The tensor shares the array's memory, which may be read-only: never write to it in place."""
        dtype, shape, timings, choices = wire.decode_header(packed[0])
        return cls(torch.from_numpy(packed[1]).view(getattr(torch, dtype)).view(shape), timings, choices)
