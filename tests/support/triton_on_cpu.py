"""Triton's interpreter, which runs kernels on the CPU. To be imported before Triton, in a program
of its own.

Its products are NumPy's: the order of a sum, and so its bits, depend on the processor and on the
number of rows. Here a sum adds its products in the order of the inputs, each rounded by itself,
which gives the same bits on every processor and for every number of rows. As tensor cores do, those
of 16 bits are added 16 at a time to the sum that they continue. Its products of bfloat16 and fp8
are wrong too: it keeps them as the bits of integers and multiplies these; and it takes integers
that become bfloat16 for such bits. Its roundings to bfloat16 and fp8 forget a carry (127.8 becomes
64 in fp8), and NaN becomes a number. They are repaired here, and so are numbers of loops in Triton
3.6, which it makes of arrays of one element: NumPy 2.5 refuses that.

Much of its time is wasted. With every call of a function within a kernel it replaces the functions
of the language again, for a third of the time; here it does so once. Each sum and product of
integers it computes twice, and compares them for an assertion that is off without ``debug``; here
only once.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

INPUTS_OF_INSTRUCTION = 16  # of a product of tensor cores in 16 bits
_patch_tensor, _convert = interpreter._patch_lang_tensor, interpreter._convert_float


# and their bits
SMALL = {
    tl.bfloat16: (torch.bfloat16, torch.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
}


def _numbers(handle: Any) -> np.ndarray:  # of Triton's interpreter
    """Return the numbers of a matrix, also where the interpreter keeps bits."""
    if handle.dtype.scalar == tl.bfloat16:
        # a bfloat16 is the upper half of a float32
        bits = handle.data.view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32)
    if handle.dtype.scalar == tl.float8e4nv:
        numbers: np.ndarray = (
            torch.from_numpy(handle.data.view(np.uint8)).view(torch.float8_e4m3fn).float().numpy()
        )
        return numbers
    assert not (handle.dtype.is_floating() and handle.dtype.primitive_bitwidth == 8), (
        "products of other float8 are not repaired"
    )
    return handle.data


def multiply(left_MK: np.ndarray, right_KN: np.ndarray) -> np.ndarray:
    """Return a product whose sums add up in the order of the inputs, in the dtype of both; more
    dimensions may come first.
    """
    out_MN = np.zeros(
        np.broadcast_shapes(left_MK[..., :1].shape, right_KN[..., :1, :].shape), left_MK.dtype
    )
    for k in range(left_MK.shape[-1]):
        out_MN += left_MK[..., k, None] * right_KN[..., k, None, :]
    return out_MN


def _create_dot(_builder: Any, a: Any, b: Any, d: Any, *_precision: Any) -> Any:
    left_MK, right_KN = (_numbers(handle).astype(d.data.dtype) for handle in (a, b))
    step = INPUTS_OF_INSTRUCTION if a.dtype.scalar.primitive_bitwidth == 16 else 1
    out_MN = d.data
    for k in range(0, left_MK.shape[-1], step):
        out_MN = out_MN + multiply(left_MK[..., k : k + step], right_KN[..., k : k + step, :])
    return TensorHandle(out_MN, d.dtype.scalar)


def _convert_float(given: np.ndarray, from_dtype: Any, to_dtype: Any, rounding: Any) -> np.ndarray:
    """Convert between float32 and smaller numbers by PyTorch, which rounds to the nearest, ties to
    even, as GPUs do.
    """
    if from_dtype == tl.float32 and to_dtype in SMALL:
        number, bits = SMALL[to_dtype]
        return torch.from_numpy(given.copy()).to(number).view(bits).numpy()
    if from_dtype in SMALL and to_dtype == tl.float32:
        number, bits = SMALL[from_dtype]
        return torch.from_numpy(given.copy()).view(bits).view(number).float().numpy()
    return _convert(given, from_dtype, to_dtype, rounding)


def _create_si_to_fp(builder: Any, integers: Any, dst_type: Any) -> Any:
    """Convert integers; to bfloat16 those up to 256, of which 7 bits behind the first one are
    enough.
    """
    if dst_type.scalar != tl.bfloat16:
        return builder.cast_impl(integers, dst_type)
    bits = integers.data.astype(np.float32).view(np.uint32) >> 16
    return TensorHandle(bits.astype(np.uint16), tl.bfloat16)


def _patch_lang_tensor(tensor: Any, scope: Any) -> None:  # of Triton's interpreter
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


class _PatchOnce:
    """Replaces the functions of the language once for each module whose functions a kernel calls,
    until the next launch.
    """

    def __init__(self) -> None:
        self._modules = set[int]()  # by the identity of their names
        self._launch, self._patch = GridExecutor.__call__, interpreter._patch_lang

    def install(self) -> None:
        def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
            self._modules.clear()
            self._launch(executor, *args, **kwargs)

        GridExecutor.__call__ = launch
        interpreter._patch_lang = self._patch_module_of

    def _patch_module_of(self, function: Any) -> Any:
        module = id(function.__globals__)
        if module in self._modules:
            return None
        self._modules.add(module)
        return self._patch(function)


InterpreterBuilder.create_dot = _create_dot
InterpreterBuilder.create_si_to_fp = _create_si_to_fp
interpreter._patch_lang_tensor = _patch_lang_tensor
interpreter._convert_float = _convert_float
interpreter.interpreter_builder.options = replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)
_PatchOnce().install()
