"""Why a job without one good line has failed, in one line."""

from collections.abc import Sequence
from dataclasses import dataclass

NUM_SHOWN = 3


@dataclass(frozen=True, slots=True)
class LineProblem:
    """``message`` begins with the number of the line: ``line 2: it is not JSON``."""

    line: int
    code: str
    message: str


def none_is_a_request(problems: Sequence[LineProblem], num_lines: int) -> str:
    """``problems``: of the first lines. What several of them have in common is told of the first that has it."""
    by_words: dict[str, str] = {}
    for problem in problems:
        by_words.setdefault(problem.message.removeprefix(f"line {problem.line}: "), problem.message)
    shown = list(by_words.values())[:NUM_SHOWN]
    more = [f"and {num_lines - len(shown)} more"] if num_lines > len(shown) else []
    which = f"none of the {num_lines} lines is a request" if num_lines > 1 else "the only line is no request"
    return f"{which}: {'; '.join([*shown, *more])}"
