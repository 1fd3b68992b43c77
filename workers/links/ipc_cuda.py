"""Memory and events of a GPU, shared between processes by CUDA IPC.

Memory is allocated by CUDA rather than by torch: torch counts references in a file that outlives a
killed process, and never frees memory that a killed process had opened.

Shape letters: N bytes.
"""

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from tramontane.workers.device.self_test import one_line
from tramontane.workers.links.ipc_channel import SharedEvent, SharedMemory

logger = logging.getLogger(__name__)

# size of cudaIpcMemHandle_t (CUDA_IPC_HANDLE_SIZE), whose content the bindings do not expose
HANDLE_BYTES = 64


class CudaMemory:
    """The ``SharedMemory`` at ``pointer`` on ``device``; ``is_ours`` says whether it was allocated
    or opened here.
    """

    def __init__(
        self, device: torch.device, pointer: int, num_bytes: int, handle: bytes, is_ours: bool
    ) -> None:
        self._device, self._pointer, self._is_ours = device, int(pointer), is_ours
        self.handle = handle
        self.bytes_N = torch.as_tensor(_CudaArray(self._pointer, num_bytes), device=device)

    def close(self) -> None:
        """Free the memory, or unmap it if another process allocated it."""
        runtime = _runtime(self._device)
        self.bytes_N = torch.empty(0, dtype=torch.uint8)
        _call(
            runtime.cudaFree(self._pointer)
            if self._is_ours
            else runtime.cudaIpcCloseMemHandle(self._pointer)
        )


class CudaEvent:
    """The ``SharedEvent`` of CUDA, recorded and waited for on the caller's current stream."""

    def __init__(self, device: torch.device, handle: bytes | None = None) -> None:
        cuda: Any = torch.cuda  # its type stubs are incomplete
        self._device = device
        if handle is not None:
            self._event = cuda.Event.from_ipc_handle(device, handle)
            self.handle = handle
            return
        self._event = cuda.Event(interprocess=True)
        with torch.cuda.device(device):  # the event then belongs to it
            self.handle = self._event.ipc_handle()

    def record(self) -> None:
        """See ``SharedEvent``."""
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """See ``SharedEvent``."""
        self._event.wait(torch.cuda.current_stream(self._device))

    def query(self) -> bool:
        """See ``SharedEvent``."""
        return bool(self._event.query())

    def close(self) -> None:
        """See ``SharedEvent``."""
        self._event = None


class CudaIpc:
    """The ``IpcBackend`` of one GPU. Copies are launched on the caller's current stream; the host
    does not wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )

    def memory(self, num_bytes: int) -> SharedMemory:
        """See ``IpcBackend``."""
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
        """See ``IpcBackend``."""
        with _check():
            runtime = _runtime(self._device)
            theirs = handle_from_bytes(runtime, handle)
            pointer = int(
                _call(runtime.cudaIpcOpenMemHandle(theirs, runtime.cudaIpcMemLazyEnablePeerAccess))
            )
            try:
                return CudaMemory(self._device, pointer, num_bytes, handle, is_ours=False)
            except BaseException:
                runtime.cudaIpcCloseMemHandle(pointer)
                raise

    def event(self) -> SharedEvent:
        """See ``IpcBackend``."""
        return CudaEvent(self._device)

    def open_event(self, handle: bytes) -> SharedEvent:
        """See ``IpcBackend``."""
        return CudaEvent(self._device, handle)

    def copy(self, target_N: Tensor, source_N: Tensor) -> None:
        """See ``IpcBackend``."""
        with torch.inference_mode():  # slots made in inference mode may only be written in it
            target_N.copy_(source_N, non_blocking=True)

    def end_process(self, reason: str) -> NoReturn:
        """See ``IpcBackend``. Ray treats this as a crash, and starts another process."""
        logger.error("this process ends, and gets a new one: %s", reason)
        os._exit(1)  # any other exit would wait for the GPU


class _CudaArray:
    """The interface by which torch accepts memory that it has not allocated."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        description = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }
        self.__cuda_array_interface__ = description


def handle_to_bytes(handle: Any) -> bytes:  # of a module without types
    """Return the content of a cudaIpcMemHandle_t."""
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def handle_from_bytes(runtime: Any, handle: bytes) -> Any:
    """Make a cudaIpcMemHandle_t of its content. Raises RuntimeError if the size is wrong."""
    if len(handle) != HANDLE_BYTES:
        raise RuntimeError(f"a handle of {len(handle)} bytes, not of {HANDLE_BYTES}")
    opened = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(opened.getPtr(), handle, HANDLE_BYTES)
    return opened


@contextmanager
def _check() -> Iterator[None]:
    """Turn all errors into RuntimeError, so that tensors are sent through the host.

    Other versions of CUDA's bindings may have other names.
    """
    try:
        yield
    except RuntimeError:
        raise
    except Exception as error:
        raise RuntimeError(f"CUDA's bindings: {type(error).__name__}: {one_line(error)}") from error


def _runtime(device: torch.device) -> Any:  # a module without types
    """Return CUDA's runtime with this device as the thread's current one."""
    from cuda.bindings import runtime  # installed with torch for CUDA

    _call(runtime.cudaSetDevice(device.index))
    return runtime


def _call(returned: tuple[Any, ...]) -> Any:
    """Return the result of a runtime function. Raises RuntimeError if its status code is an
    error.
    """
    code, *rest = returned
    if int(code) != 0:
        raise RuntimeError(f"CUDA: {code.name}")
    return rest[0] if rest else None
