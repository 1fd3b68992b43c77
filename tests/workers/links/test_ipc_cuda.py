"""Memory shared by CUDA IPC, with a scripted runtime: the calls that it gets, and what is freed if
one fails.
"""

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_ipc import HostIpc
from test_ipc_channel import _lines
from torch import Tensor

from tramontane.workers.links import ipc_cuda
from tramontane.workers.links.control_socket import ControlSocket
from tramontane.workers.links.ipc_channel import IpcUnavailableError, accept_ipc, offer_ipc
from tramontane.workers.links.ipc_cuda import (
    HANDLE_BYTES,
    CudaIpc,
    handle_from_bytes,
    handle_to_bytes,
)

HANDLE = bytes(range(100, 100 + HANDLE_BYTES))
POINTER = 4096


class _Handle:
    """As the bindings have it: where it lies, and nothing else."""

    def __init__(self, content: bytes = bytes(HANDLE_BYTES)) -> None:
        self._content = ctypes.create_string_buffer(content, HANDLE_BYTES)

    def getPtr(self) -> int:
        return ctypes.addressof(self._content)


@dataclass
class _Runtime:
    """``handle``: what it gives for a piece of memory."""

    handle: object = field(default_factory=lambda: _Handle(HANDLE))
    freed: list[int] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    opened: list[bytes] = field(default_factory=list)
    cudaIpcMemHandle_t: type = _Handle
    cudaIpcMemLazyEnablePeerAccess: int = 1

    def cudaMalloc(self, _num_bytes: int) -> tuple[int, int]:
        return 0, POINTER

    def cudaFree(self, pointer: int) -> tuple[int]:
        self.freed.append(pointer)
        return (0,)

    def cudaIpcGetMemHandle(self, _pointer: int) -> tuple[int, object]:
        return 0, self.handle

    def cudaIpcOpenMemHandle(self, handle: _Handle, _flags: int) -> tuple[int, int]:
        self.opened.append(ctypes.string_at(handle.getPtr(), HANDLE_BYTES))
        return 0, POINTER

    def cudaIpcCloseMemHandle(self, pointer: int) -> tuple[int]:
        self.closed.append(pointer)
        return (0,)


def _sharing(
    monkeypatch: pytest.MonkeyPatch, runtime: _Runtime, *, has_tensors: bool = True
) -> CudaIpc:
    def as_tensor(_bytes: object, device: torch.device) -> Tensor:
        if not has_tensors:
            raise AssertionError(f"not compiled for {device}")
        return torch.zeros(8, dtype=torch.uint8)

    monkeypatch.setattr(ipc_cuda, "_runtime", lambda _device: runtime)
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    return CudaIpc(torch.device("cuda:0"))


def test_a_handle_goes_from_one_process_to_the_other_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = _Runtime()
    sharing = _sharing(monkeypatch, runtime)
    made = sharing.memory(8)
    assert made.handle == HANDLE
    opened = sharing.open_memory(made.handle, 8)
    assert runtime.opened == [HANDLE]
    opened.close()
    made.close()
    assert (runtime.closed, runtime.freed) == ([POINTER], [POINTER])


def test_the_bindings_handle_keeps_its_bytes() -> None:
    """Of the real ones, which make handles without a GPU too."""
    runtime: Any = pytest.importorskip(
        "cuda.bindings.runtime", reason="cuda-bindings come with a torch for CUDA"
    )
    assert handle_to_bytes(handle_from_bytes(runtime, HANDLE)) == HANDLE


@pytest.mark.parametrize("has_tensors", [False, True])
def test_what_the_bindings_do_not_have_is_refused_and_the_memory_freed(
    monkeypatch: pytest.MonkeyPatch, has_tensors: bool
) -> None:
    runtime = _Runtime(handle=object() if has_tensors else _Handle(HANDLE))
    with pytest.raises(RuntimeError, match="CUDA's bindings: A"):  # AttributeError, AssertionError
        _sharing(monkeypatch, runtime, has_tensors=has_tensors).memory(8)
    assert runtime.freed == [POINTER]


def test_what_cannot_be_opened_is_refused_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = _Runtime()
    sharing = _sharing(monkeypatch, runtime, has_tensors=False)
    with pytest.raises(RuntimeError, match="CUDA's bindings: AssertionError"):
        sharing.open_memory(HANDLE, 8)
    assert runtime.closed == [POINTER]
    with pytest.raises(RuntimeError, match="a handle of 3 bytes"):
        sharing.open_memory(b"abc", 8)


def test_an_event_is_asked_without_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, True])
    monkeypatch.setattr(
        torch.cuda,
        "Event",
        SimpleNamespace(from_ipc_handle=lambda *_: SimpleNamespace(query=answers.__next__)),
    )
    event = CudaIpc(torch.device("cuda:0")).open_event(HANDLE)
    assert [event.query(), event.query()] == [False, True]


def test_a_process_that_cannot_go_on_ends_with_an_error_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not by ``sys.exit``, which ends a thread only; and Python's way to exit would wait for the
    GPU.
    """
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    CudaIpc(torch.device("cuda:0")).end_process("the GPU waits for a dead process")
    assert ended == [1]
    assert "this process ends, and gets a new one: the GPU waits for a dead process" in caplog.text


def test_both_ends_learn_of_it_and_may_use_the_host(
    monkeypatch: pytest.MonkeyPatch, lines: tuple[ControlSocket, ControlSocket]
) -> None:
    runtime = _Runtime(handle=object())
    sharing = _sharing(monkeypatch, runtime)
    monkeypatch.setattr(sharing, "event", HostIpc().event)
    at_outlet, at_inlet = lines
    with ThreadPoolExecutor(1) as thread:
        offered = thread.submit(offer_ipc, at_outlet, sharing)
        with pytest.raises(IpcUnavailableError, match="CUDA's bindings"):
            accept_ipc(at_inlet, HostIpc())
        with pytest.raises(IpcUnavailableError, match="CUDA's bindings"):
            offered.result()
    assert runtime.freed == [POINTER]


@pytest.fixture
def lines() -> Iterator[tuple[ControlSocket, ControlSocket]]:
    pair = _lines()
    yield pair
    for control in pair:
        control.close()
        control.close_fds()
