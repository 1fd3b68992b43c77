"""Keys on a command line, which every user of the machine may read, and which Ray shows on its dashboard."""

from collections.abc import Sequence
from subprocess import list2cmdline

import psutil

FLAG, HIDDEN = "--api-key", "***"


def hide_keys(arguments: Sequence[str]) -> None:
    """Give this process a title without them, before Ray asks for it. For the moment that this takes they can be seen."""
    if without_keys(arguments) == list(arguments):
        return
    from ray._raylet import setproctitle  # type: ignore[attr-defined]

    setproctitle(list2cmdline(without_keys(psutil.Process().cmdline())))


def without_keys(arguments: Sequence[str]) -> list[str]:
    """``--api-key KEY`` and ``--api-key=KEY`` without the key."""
    shown: list[str] = []
    for argument in arguments:
        if shown and shown[-1] == FLAG:
            shown.append(HIDDEN)
        else:
            shown.append(f"{FLAG}={HIDDEN}" if argument.startswith(f"{FLAG}=") else argument)
    return shown
