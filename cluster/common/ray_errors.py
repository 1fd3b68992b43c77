"""Readable messages of errors that Ray raises."""

import re


def ray_error_message(error: BaseException) -> str:
    """Ray's errors carry remote tracebacks; their last line says what happened, after the name of the class."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^(tramontane\.[\w.]+: |ray\.exceptions\.)", "", lines[-1])
