"""Readable messages of errors that Ray raises."""

import re


def ray_error_message(error: BaseException) -> str:
    """Return the last line of an error, without its class: Ray's errors carry remote tracebacks, and end with the cause."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^(tramontane\.[\w.]+: |ray\.exceptions\.)", "", lines[-1])
