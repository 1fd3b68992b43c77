"""The numerics of a worker: the device, libraries and kernels that, besides weights and requests,
determine the bits of its results.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Self

from tramontane.workers.device.probe import device_name


@dataclass(frozen=True, slots=True)
class Numerics:
    """The parts of a worker's computation, each with the name of its implementation.

    Parts have the same names in all workers, and a worker has only the parts that it uses: only a
    stage has ``attention``. So the workers of a pipeline are alike if every part has the same value
    in all of them. ``is_batch_invariant``: whether a token's bits depend only on that token and the
    tokens before it.
    """

    parts: tuple[tuple[str, str], ...] = ()
    is_batch_invariant: bool = False

    @classmethod
    def of(cls, parts: Mapping[str, str], device: str, *, is_batch_invariant: bool) -> Self:
        """Return the numerics of a worker on this device, which is one of its parts."""
        return cls(
            tuple(sorted({**parts, "device": device_numerics(device)}.items())), is_batch_invariant
        )


def device_numerics(device: str) -> str:
    """Name a device and the libraries that compute on it, besides kernels in C. NumPy computes
    rotary tables on CPUs.
    """
    import numpy as np
    import torch

    from tramontane.workers.device.native_library import processor

    if torch.device(device).type == "cpu":
        instructions = hashlib.sha256(processor().encode()).hexdigest()[:8]
        return (
            f"torch {torch.__version__}, NumPy {np.__version__}, {device_name('cpu')},"
            f" {instructions}"
        )
    others = f"xformers {_version('xformers')}, Triton {_version('triton')}"
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, {others}, {device_name(device)}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
