"""Trying, before the first step, what a device may not have: a compiler, a library's kernel, arithmetic of a kind.

What is tried has to run and to be right. Where it is not, a line in the log says why, and stages do without.
"""

from collections.abc import Callable

from torch import Tensor

LONGEST = 200  # characters of a reason


def assert_close_norm(out: Tensor, expected: Tensor, most: float) -> None:
    """Raises ArithmeticError if they differ by more than ``most``, relative, by norms. What is no number differs always."""
    relative = float((out.float() - expected.float()).norm() / expected.float().norm())
    if not relative <= most:
        raise ArithmeticError(f"differs by {relative:.2g}")


def try_or_reason(attempt: Callable[[], object]) -> str:
    """Why it fails; empty if it does not."""
    try:
        attempt()
    except Exception as error:  # of a compiler, a driver, a library or an import, each of its own kind
        return one_line(error)
    return ""


def one_line(error: Exception) -> str:
    """What an error says, without what stands between its first line and its last: compilers quote sources there.

    "at 7:4:", the code, "unsupported type" become "at 7:4: ... unsupported type".
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    first, last = lines[0], lines[-1]
    return first[:LONGEST] if len(lines) == 1 else f"{first[: LONGEST // 2]} ... {last[: LONGEST // 2]}"
