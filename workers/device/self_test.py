"""Self tests, before the first step, of features that a device may lack: a compiler, a library's
kernel, a kind of arithmetic.

The tested operation has to run and to be correct. If it fails, the reason is logged, and stages use
a fallback.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported by modules that compile kernels and plans without loading torch
    from torch import Tensor

MAX_REASON_CHARS = 200


def assert_close_norm(out: "Tensor", expected: "Tensor", max_difference: float) -> None:
    """Raise ArithmeticError if the norm of the difference, relative to the norm of ``expected``, is
    too large or NaN.
    """
    relative = float((out.float() - expected.float()).norm() / expected.float().norm())
    if not relative <= max_difference:
        raise ArithmeticError(f"differs by {relative:.2g}")


def try_or_reason(attempt: Callable[[], object]) -> str:
    """Return why ``attempt`` fails, or an empty string if it succeeds."""
    try:
        attempt()
    except Exception as error:  # compilers, drivers, libraries and imports raise errors of any kind
        return one_line(error)
    return ""


def one_line(error: Exception) -> str:
    """Shorten a message to its first and last line: compilers quote sources between them.

    "at 7:4:", the code, "unsupported type" become "at 7:4: ... unsupported type".
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    first, last = lines[0], lines[-1]
    half = MAX_REASON_CHARS // 2
    return first[:MAX_REASON_CHARS] if len(lines) == 1 else f"{first[:half]} ... {last[:half]}"
