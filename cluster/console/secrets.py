"""Secrets on the command line, which every user of the machine can read, and which Ray shows on its
dashboard.
"""

from collections.abc import Sequence
from subprocess import list2cmdline

import psutil

from tramontane.cluster.ray_internals.accessors import set_process_title

FLAGS = ("--api-key", "--jobs-database", "--jobs-storage")
HIDDEN = "***"


def hide_secrets_in_title(arguments: Sequence[str]) -> None:
    """Set a process title without secrets, before Ray reads it. Until then they can be seen."""
    if redact_arguments(arguments) == list(arguments):
        return
    set_process_title(list2cmdline(redact_arguments(psutil.Process().cmdline())))


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the values of ``FLAGS`` hidden: both ``--api-key KEY`` and
    ``--api-key=KEY``.
    """
    shown: list[str] = []
    for argument in arguments:
        flag, mark, _ = argument.partition("=")
        if shown and shown[-1] in FLAGS:
            shown.append(HIDDEN)
        else:
            shown.append(f"{flag}={HIDDEN}" if mark and flag in FLAGS else argument)
    return shown
