"""The inputs and outputs of a stage's step: hidden states, sent to the next stage as a small header
and raw bytes, or a result.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tramontane.proto import wire
from tramontane.proto.request import ExpertChoices
from tramontane.proto.step import StageTiming, StepResult
from tramontane.workers.device.cuda import HostCopy, copy_to_host_async, to_host

# (header, bytes as a uint8 array): numpy arrays travel out of band and are read without a copy
Packed = tuple[bytes, "np.ndarray[tuple[int], np.dtype[np.uint8]]"]


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The output of a stage: hidden states, the timings of the stages they have passed, and the
    experts chosen there.
    """

    hidden_TD: Tensor
    timings: tuple[StageTiming, ...]
    choices: tuple[ExpertChoices, ...] = ()

    def pack(self) -> Packed:
        """Serialize. Waits until the bytes are on the host."""
        hidden_TD = to_host(self.hidden_TD)
        dtype = str(hidden_TD.dtype).removeprefix("torch.")
        header = wire.encode_header(dtype, tuple(hidden_TD.shape), self.timings, self.choices)
        return header, hidden_TD.view(torch.uint8).reshape(-1).numpy()

    @classmethod
    def unpack(cls, packed: Packed) -> "HiddenStates":
        """Deserialize, on the host. The tensor shares the array's memory, which may be read-only:
        never write to it in place.
        """
        dtype, shape, timings, choices = wire.decode_header(packed[0])
        hidden_TD = torch.from_numpy(packed[1]).view(getattr(torch, dtype)).view(shape)
        return cls(hidden_TD, timings, choices)


# The input of a step besides its micro-batch: the hidden states of the stage before; in the first
# stage the last stage's result of the previous step, if that step was in flight when this one was
# submitted.
StageInput = HiddenStates | StepResult | None
StageOutput = HiddenStates | StepResult


class HiddenStatesCopy:
    """The transfer of a step's hidden states from the GPU to the host.

    The copy is launched when they are delivered, before the next step is launched on the GPU.
    """

    def __init__(self) -> None:
        self._copy: HostCopy | None = None

    def start(self, hidden_TD: Tensor | None) -> None:
        """Launch the copy to the host. The last stage has no hidden states."""
        self._copy = None if hidden_TD is None else copy_to_host_async(hidden_TD)

    def payload(self, outcome: HiddenStates) -> Packed:
        """Serialize the outcome of that step. Waits until its bytes are on the host."""
        assert self._copy is not None
        self._copy.wait()
        return replace(outcome, hidden_TD=self._copy.tensor).pack()
