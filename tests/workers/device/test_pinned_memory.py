"""Hidden states between a GPU and the host, with a driver that copies late and gives memory out
again as torch does.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tramontane.workers.device.cuda import (
    HostCopy,
    PinnedTransfer,
    copy_to_host_async,
    to_device,
    to_host,
)
from tramontane.workers.stage.hidden_states import HiddenStates, HiddenStatesCopy

CPU = torch.device("cpu")


class LatePinning(PinnedTransfer):
    """Copies are done when they are waited for."""

    def __init__(self) -> None:
        self.begun: list[Callable[[], object]] = []
        self.num_done = 0

    def empty_pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.full(shape, -1, dtype=dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.begun.append(lambda: target.copy_(source))

    def record(self, device: torch.device) -> Callable[[], None]:
        """Only what has been begun by now is done."""
        until = len(self.begun) + self.num_done

        def wait() -> None:
            while self.num_done < until:
                self.begun.pop(0)()
                self.num_done += 1

        return wait

    def upload(self, pinned: Tensor, device: torch.device) -> Tensor:
        arriving = torch.full_like(pinned, -2)
        self.copy(arriving, pinned)
        return arriving


def test_what_goes_to_the_host_is_there_when_it_is_given() -> None:
    hidden_TD = torch.arange(12, dtype=torch.bfloat16).view(4, 3)
    late = LatePinning()
    for given_TD in (hidden_TD, hidden_TD.T):
        on_host = to_host(given_TD, late)
        assert torch.equal(on_host, given_TD)
        assert on_host.is_contiguous()
        assert not late.begun


def test_what_is_copied_to_the_device_may_be_freed_at_once() -> None:
    """As an array of Ray's object store, which is freed with the call that it came by."""
    late = LatePinning()
    source_TD = torch.arange(12.0).view(4, 3)
    arriving = to_device(source_TD, CPU, late)
    source_TD.zero_()
    late.record(CPU)()
    assert torch.equal(arriving, torch.arange(12.0).view(4, 3))


def test_on_the_host_nothing_is_copied() -> None:
    hidden_TD = torch.arange(12.0).view(4, 3)
    assert to_host(hidden_TD) is hidden_TD
    assert to_device(hidden_TD, CPU) is hidden_TD
    header, array = HiddenStates(hidden_TD, ()).pack()
    assert array.ctypes.data == hidden_TD.data_ptr()
    assert HiddenStates.unpack((header, array)).hidden_TD.data_ptr() == hidden_TD.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_and_unpacked_it_is_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by way of a device."""
    hidden_TD = torch.randn(5, 8).to(dtype)
    pinning: list[PinnedTransfer | None] = [None, LatePinning()]
    for way in pinning:
        monkeypatch.setattr(
            "tramontane.workers.stage.hidden_states.to_host",
            lambda tensor, way=way: to_host(tensor, way),
        )
        header, array = HiddenStates(hidden_TD, ()).pack()
        assert array.dtype == np.uint8
        assert torch.equal(HiddenStates.unpack((header, array)).hidden_TD, hidden_TD)


def test_what_leaves_waits_for_nothing_that_is_begun_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next step, for one."""
    late = LatePinning()

    def leaving_late(tensor: Tensor) -> HostCopy:
        return copy_to_host_async(tensor, late)

    monkeypatch.setattr("tramontane.workers.stage.hidden_states.copy_to_host_async", leaving_late)
    hidden_TD, outbox = torch.randn(5, 8), HiddenStatesCopy()
    outbox.start(hidden_TD)
    assert len(late.begun) == 1, "it is on its way already"
    late.copy(torch.empty(3), torch.empty(3))  # what the next step requests
    packed = outbox.payload(HiddenStates(torch.empty(5, 8), ()))
    assert torch.equal(HiddenStates.unpack(packed).hidden_TD, hidden_TD)
    assert len(late.begun) == 1
