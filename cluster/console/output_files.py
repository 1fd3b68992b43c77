"""Files that commands write: never over a file of another origin, and with errors that name the
option.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tramontane.proto.errors import ConfigError


def check_replaceable(file: Path, mark: str, option: str) -> None:
    """Raise ConfigError unless the file may be replaced: it does not exist, is empty or begins with
    ``mark``, as our own do.
    """
    if not file.parent.is_dir():
        raise ConfigError(f"{option} {file}: there is no folder {file.parent}")
    if not file.exists():
        return
    try:
        with file.open("rb") as opened:
            is_own = opened.read(len(mark.encode())) in (b"", mark.encode())
    except OSError as error:
        raise ConfigError(f"{option} {file} cannot be read: {error.strerror}") from error
    if not is_own:
        raise ConfigError(f"{file} was not written by this command; choose another {option}")


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Raise ConfigError if the block cannot write to the path."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror}") from error
