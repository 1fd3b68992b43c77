"""Where ``tramontane batch results`` writes: whole lines, each once, however often the connection is lost."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol


class Output(Protocol):
    """Lines come in pieces, cut anywhere."""

    def whole_lines(self) -> int:
        """How many there are, after what follows the last of them was cut off."""
        ...

    def appending(self) -> AbstractContextManager[Callable[[bytes], object]]:
        """Gives what takes a piece."""
        ...

    def finish(self) -> None:
        """All lines have come."""
        ...

    def discard(self) -> None:
        """They are not what was asked for."""
        ...


class PartFile:
    """A file that has another name until it is whole, and stays when the command is interrupted: the next one goes on with it."""

    def __init__(self, file: Path, job_id: str) -> None:
        self._file, self._part = file, file.with_name(f"{file.name}.{job_id}.part")

    def whole_lines(self) -> int:
        if not self._part.exists():
            return 0
        num_lines = end = position = 0
        with self._part.open("rb+") as part:
            while piece := part.read(2**20):
                num_lines += piece.count(b"\n")
                if (last := piece.rfind(b"\n")) >= 0:
                    end = position + last + 1
                position += len(piece)
            part.truncate(end)
        return num_lines

    @contextmanager
    def appending(self) -> Iterator[Callable[[bytes], object]]:
        with self._part.open("ab") as part:
            yield part.write

    def finish(self) -> None:
        self._part.replace(self._file)

    def discard(self) -> None:
        self._part.unlink()


class LineStream:
    """Standard output, most likely. What was written cannot be taken back, so a line is written when it is whole."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._begun, self._num_lines = stream, bytearray(), 0

    def whole_lines(self) -> int:
        self._begun.clear()
        return self._num_lines

    @contextmanager
    def appending(self) -> Iterator[Callable[[bytes], object]]:
        yield self._write

    def _write(self, piece: bytes) -> None:
        self._begun += piece
        if (end := piece.rfind(b"\n") + 1) > 0:
            end += len(self._begun) - len(piece)
            self._stream.write(self._begun[:end])
            self._stream.flush()
            self._num_lines += piece.count(b"\n")
            del self._begun[:end]

    def finish(self) -> None:
        """There is nothing behind the last whole line."""

    def discard(self) -> None:
        """It was read already, perhaps."""
