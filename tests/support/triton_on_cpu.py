"""Triton's interpreter, which runs kernels on the CPU. To be imported before Triton, in a program of its own.

Its products of bfloat16 are wrong: it keeps bfloat16 as the bits of an integer and multiplies these. They are repaired here,
and so are numbers of loops in Triton 3.6, which it makes of arrays of one element: NumPy 2.5 refuses that. With every call of a
function within a kernel it replaces the functions of the language again, for a third of its time; here it does so once.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

_dot, _patch_tensor = InterpreterBuilder.create_dot, interpreter._patch_lang_tensor


def _as_float(handle: Any) -> Any:  # noqa: ANN401 - of Triton's interpreter
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    bits = handle.data.view(np.uint16).astype(np.uint32) << 16  # a bfloat16 is the upper half of a float32
    return TensorHandle(bits.view(np.float32), tl.float32)


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:  # noqa: ANN401 - of Triton's interpreter
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


class _PatchOnce:
    """Replaces the functions of the language once for each module whose functions a kernel calls, until the next launch."""

    def __init__(self) -> None:
        self._modules = set[int]()  # by the identity of their names
        self._launch, self._patch = GridExecutor.__call__, interpreter._patch_lang

    def install(self) -> None:
        def launch(executor: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
            self._modules.clear()
            self._launch(executor, *args, **kwargs)

        GridExecutor.__call__ = launch
        interpreter._patch_lang = self._patch_module_of

    def _patch_module_of(self, function: Any) -> Any:  # noqa: ANN401
        module = id(function.__globals__)
        if module in self._modules:
            return None
        self._modules.add(module)
        return self._patch(function)


InterpreterBuilder.create_dot = lambda self, a, b, *rest: _dot(self, _as_float(a), _as_float(b), *rest)
interpreter._patch_lang_tensor = _patch_lang_tensor
_PatchOnce().install()
