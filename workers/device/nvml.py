"""NVIDIA's GPUs as listed by the driver's management library (NVML): without torch, and without a
CUDA context.

Ray and PyTorch also count GPUs with it. Called by ctypes: only five functions of NVIDIA's own
bindings (nvidia-ml-py) would be used. https://docs.nvidia.com/deploy/nvml-api
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LIBRARY = "libnvidia-ml.so.1"
TEXT_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE and NVML_DEVICE_UUID_V2_BUFFER_SIZE


@dataclass(frozen=True, slots=True)
class NvmlGpu:
    """A GPU of this machine: its UUID (``GPU-...``), and its total and free memory in bytes."""

    uuid: str
    name: str
    memory: int
    free: int


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _NvmlError(Exception):
    """A function of NVML that has failed."""


def list_gpus() -> list[NvmlGpu] | None:
    """Return all GPUs of the machine, regardless of CUDA_VISIBLE_DEVICES, or None if NVML is
    missing or cannot be used.
    """
    try:
        with _initialized(ctypes.CDLL(LIBRARY)) as library:
            count = ctypes.c_uint()
            _check(library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
            return [_describe(library, index) for index in range(count.value)]
    # no driver, a driver of another kind, or one that does not work
    except (OSError, AttributeError, _NvmlError):
        return None


@contextmanager
def _initialized(library: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    _check(library.nvmlInit_v2())
    try:
        yield library
    finally:
        library.nvmlShutdown()


def _describe(library: ctypes.CDLL, index: int) -> NvmlGpu:
    device, memory = ctypes.c_void_p(), _Memory()
    _check(library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)))
    _check(library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)))
    uuid, name = (
        _read_text(function, device)
        for function in (library.nvmlDeviceGetUUID, library.nvmlDeviceGetName)
    )
    return NvmlGpu(uuid, name, memory.total, memory.free)


def _read_text(function: "ctypes._NamedFuncPointer", device: ctypes.c_void_p) -> str:
    text = ctypes.create_string_buffer(TEXT_BYTES)
    _check(function(device, text, ctypes.c_uint(TEXT_BYTES)))
    return text.value.decode(errors="replace")


def _check(code: int) -> None:
    if code != 0:  # NVML_SUCCESS
        raise _NvmlError(code)
