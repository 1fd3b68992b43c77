"""The profile of served steps that the environment requests, as
``TRAMONTANE_PROFILE=FOLDER:FIRST:STEPS``.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

from tramontane.proto.errors import ConfigError

VARIABLE = "TRAMONTANE_PROFILE"


class StepProfile(NamedTuple):
    """Each stage skips ``first`` steps, and writes a profile of the next ``num_steps`` into a
    folder of its node.
    """

    folder: Path
    first: int
    num_steps: int


def read_profile() -> StepProfile | None:
    """Return the profile requested by ``TRAMONTANE_PROFILE``, or None without it. Raises
    ConfigError if it is malformed.
    """
    if not (text := os.environ.get(VARIABLE)):
        return None
    found = re.fullmatch(r"(.+):(\d{1,9}):(\d{1,9})", text)
    if found is None or not int(found[3]):
        raise ConfigError(
            f"{VARIABLE} is {text!r}; it must be FOLDER:FIRST:STEPS, such as /tmp/profile:200:20"
        )
    return StepProfile(Path(found[1]), int(found[2]), int(found[3]))
