"""Memory and events of a GPU, shared between processes by CUDA IPC.

Memory is asked of CUDA rather than of torch: torch counts who has opened what in a file that outlives a killed process,
and keeps what a killed process had opened for ever.

Shape letters: N bytes.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tramontane.workers.device.self_test import one_line
from tramontane.workers.links.ipc_memory import SharedEvent, SharedMemory

HANDLE_BYTES = 64  # of cudaIpcMemHandle_t, by CUDA's headers (CUDA_IPC_HANDLE_SIZE); the bindings have no name for what is in it


class CudaMemory:
    """``pointer`` is on ``device``; whether it was made or opened here decides how it is closed."""

    def __init__(self, device: torch.device, pointer: int, num_bytes: int, handle: bytes, is_ours: bool) -> None:
        self._device, self._pointer, self._is_ours = device, int(pointer), is_ours
        self.handle = handle
        self.bytes_N = torch.as_tensor(_Bytes(self._pointer, num_bytes), device=device)

    def close(self) -> None:
        runtime = _runtime(self._device)
        self.bytes_N = torch.empty(0, dtype=torch.uint8)
        _call(runtime.cudaFree(self._pointer) if self._is_ours else runtime.cudaIpcCloseMemHandle(self._pointer))


class CudaEvent:
    """An event; recorded and waited for on the current stream of whoever calls."""

    def __init__(self, device: torch.device, handle: bytes | None = None) -> None:
        cuda: Any = torch.cuda  # whose type stubs know little
        self._device = device
        if handle is not None:
            self._event = cuda.Event.from_ipc_handle(device, handle)
            self.handle = handle
            return
        self._event = cuda.Event(interprocess=True)
        with torch.cuda.device(device):  # which the event becomes one of
            self.handle = self._event.ipc_handle()

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))

    def synchronize(self) -> None:
        self._event.synchronize()

    def close(self) -> None:
        self._event = None


class CudaIpc:
    """``IpcBackend`` on one GPU; copies go to the current stream of whoever calls, and nothing waits on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    def memory(self, num_bytes: int) -> SharedMemory:
        with _check():
            runtime = _runtime(self._device)
            pointer = int(_call(runtime.cudaMalloc(num_bytes)))
            try:
                handle = handle_to_bytes(_call(runtime.cudaIpcGetMemHandle(pointer)))
                return CudaMemory(self._device, pointer, num_bytes, handle, is_ours=True)
            except BaseException:
                runtime.cudaFree(pointer)
                raise

    def open_memory(self, handle: bytes, num_bytes: int) -> SharedMemory:
        with _check():
            runtime = _runtime(self._device)
            theirs = handle_from_bytes(runtime, handle)
            pointer = int(_call(runtime.cudaIpcOpenMemHandle(theirs, runtime.cudaIpcMemLazyEnablePeerAccess)))
            try:
                return CudaMemory(self._device, pointer, num_bytes, handle, is_ours=False)
            except BaseException:
                runtime.cudaIpcCloseMemHandle(pointer)
                raise

    def event(self) -> SharedEvent:
        return CudaEvent(self._device)

    def open_event(self, handle: bytes) -> SharedEvent:
        return CudaEvent(self._device, handle)

    def copy(self, target_N: Tensor, source_N: Tensor) -> None:
        with torch.inference_mode():  # slots that were made in it may be written nowhere else
            target_N.copy_(source_N, non_blocking=True)


class _Bytes:
    """As torch takes memory that is not its own."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


def handle_to_bytes(handle: Any) -> bytes:  # noqa: ANN401 - of a module without types
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def handle_from_bytes(runtime: Any, handle: bytes) -> Any:  # noqa: ANN401
    if len(handle) != HANDLE_BYTES:
        raise RuntimeError(f"a handle of {len(handle)} bytes, not of {HANDLE_BYTES}")
    made = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(made.getPtr(), handle, HANDLE_BYTES)
    return made


@contextmanager
def _check() -> Iterator[None]:
    """Other versions of the bindings may have other names. Whatever they raise is RuntimeError: then tensors go by the host."""
    try:
        yield
    except RuntimeError:
        raise
    except Exception as error:
        raise RuntimeError(f"CUDA's bindings: {type(error).__name__}: {one_line(error)}") from error


def _runtime(device: torch.device) -> Any:  # noqa: ANN401 - a module without types
    """CUDA's runtime, at work on this device: it has a current one for every thread."""
    from cuda.bindings import runtime  # comes with torch for CUDA

    _call(runtime.cudaSetDevice(device.index))
    return runtime


def _call(answer: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """What a function of the runtime gives besides the code that says how it went. Raises RuntimeError."""
    code, *rest = answer
    if int(code) != 0:
        raise RuntimeError(f"CUDA: {code.name}")
    return rest[0] if rest else None
