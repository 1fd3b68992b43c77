"""Choices of kernels that a machine stores, so that stages that start again do not time kernels.

A choice is valid for a device, its libraries and the sources of our kernels (the platform), for a
job with its shapes, and for these candidates. Each choice has its own small file, so that
concurrent writers do not overwrite each other. The files are in the folder of compiled kernels,
which only this user can write to.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypedDict

from tramontane.workers.device.native_library import kernel_folder, locked
from tramontane.workers.device.numerics import device_numerics
from tramontane.workers.device.self_test import one_line

SOURCES = Path(__file__).parents[1]  # of workers
PACKAGES = ("attention", "device", "kernels", "model")  # with kernels, or code that selects them

logger = logging.getLogger(__name__)


class Question(TypedDict):
    """The inputs of a choice, as they are written to its file."""

    platform: str
    job: str
    shapes: str
    candidates: list[str]


@dataclass(frozen=True, slots=True)
class KernelChoices:
    """The choices on one platform, stored in ``folder``."""

    platform: str
    folder: Path

    @classmethod
    def of_device(cls, device: str) -> Self | None:
        """Return the choices for a device of this machine; None, with a logged reason, if there is
        no folder.
        """
        try:
            return cls(platform_of(device), kernel_folder())
        except OSError as error:
            logger.warning(
                "Choices of kernels cannot be kept, so each start times kernels again: %s",
                one_line(error),
            )
            return None

    def of(self, job: str, shapes: str, candidates: Sequence[str]) -> "KeptChoice":
        """Return the stored choice for a job, between kernels of these names."""
        question = Question(
            platform=self.platform, job=job, shapes=shapes, candidates=[*candidates]
        )
        digest = hashlib.sha256(json.dumps(question).encode()).hexdigest()[:16]
        return KeptChoice(question, self.folder / f"choice-{digest}.json")


@dataclass(frozen=True, slots=True)
class KeptChoice:
    """The file of one choice: the question, and the name of the selected kernel."""

    question: Question
    path: Path

    def recall(self) -> str | None:
        """Return the name of the selected kernel, or None if there is none yet.

        A damaged file, for example after a power failure, is removed.
        """
        try:
            content = self.path.read_bytes()
        except OSError:
            return None
        with suppress(ValueError):  # not JSON, or not text
            kept = json.loads(content)
            chosen = next(
                (name for name in self.question["candidates"] if kept == self._answered(name)), None
            )
            if chosen is not None:
                return chosen
        logger.warning("the choice of a kernel in %s is damaged, and is made again", self.path)
        self.forget()
        return None

    def keep(self, chosen: str) -> None:
        """Store a choice, replacing an earlier one; log an error that prevents it."""
        try:
            with tempfile.TemporaryDirectory(dir=self.path.parent) as folder:
                made = Path(folder) / self.path.name
                with made.open("w", encoding="utf-8") as file:
                    json.dump(self._answered(chosen), file, indent=1)
                    file.flush()
                    os.fsync(file.fileno())  # after a power failure the file is complete or missing
                made.replace(self.path)
        except OSError as error:
            logger.warning(
                "the choice of a kernel cannot be kept in %s, so it is made at each start: %s",
                self.path,
                error,
            )

    def forget(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            self.path.unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let one process at a time make this choice: other processes wait, and read it afterwards.

        Without a lock file, processes do not wait.
        """
        with ExitStack() as stack:
            with suppress(OSError):
                stack.enter_context(locked(self.path.with_suffix(".lock")))
            yield

    def _answered(self, chosen: str) -> dict[str, object]:
        return {**self.question, "chosen": chosen}


def platform_of(device: str) -> str:
    """Name the conditions of kernel speeds other than their inputs: the GPU, its libraries and our
    sources.
    """
    return f"{device_numerics(device)}, sources {_sources_digest()}"


def _sources_digest() -> str:
    """Return a digest of the source files of kernels and of their selection, by their names and
    contents.
    """
    digest = hashlib.sha256()
    for path in sorted(path for package in PACKAGES for path in (SOURCES / package).glob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(SOURCES)} {len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]
