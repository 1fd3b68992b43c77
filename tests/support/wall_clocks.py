"""Wall clocks of processes that a test can set, each by itself: the library ``wall_clock.c``,
preloaded into all of them.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCE = Path(__file__).with_name("wall_clock.c")
LOOKED_AT_AFTER_S = 0.1  # by then a process has noticed that its clock is set


class WallClocks:
    """Sets the wall clocks of processes that were started while ``settable_clocks`` was open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, pid: int, off_s: int) -> None:
        """Set how far the wall clock of a process is off from now on."""
        partial = self._folder / f"{pid}.new"
        partial.write_text(str(off_s), encoding="ascii")
        partial.rename(self._folder / str(pid))


@contextmanager
def settable_clocks() -> Iterator[WallClocks]:
    """Give all processes that are started in the block, and theirs, a wall clock that can be
    set.
    """
    with TemporaryDirectory() as folder:
        library = Path(folder) / "wall_clock.so"
        subprocess.run(
            ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl", "-lpthread"],
            check=True,
        )
        before = {name: os.environ.get(name) for name in ("LD_PRELOAD", "WALL_CLOCKS")}
        os.environ |= {"LD_PRELOAD": str(library), "WALL_CLOCKS": folder}
        try:
            yield WallClocks(Path(folder))
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
