"""Triton's interpreter, which runs kernels on the CPU. To be imported before Triton, in a program of its own.

Its products of bfloat16 are wrong: it keeps bfloat16 as the bits of an integer and multiplies these. They are repaired here.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_dot = InterpreterBuilder.create_dot


def _as_float(handle: Any) -> Any:  # noqa: ANN401 - of Triton's interpreter
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.view(np.uint16).astype(np.uint32) << 16  # a bfloat16 is the upper half of a float32
    return TensorHandle(bits.view(np.float32), tl.float32)


InterpreterBuilder.create_dot = lambda self, a, b, *rest: _dot(self, _as_float(a), _as_float(b), *rest)
