"""Ingest of a job's input: its lines are split, validated and stored, and its text gets a digest,
in the threads of jobs.
"""

import hashlib
from collections.abc import AsyncIterator, Callable

from tramontane.proto.byte_size import format_bytes
from tramontane.proto.errors import FileTooLargeError, JobRefusedError
from tramontane.router.batch.database import JobThreadPool
from tramontane.router.batch.input_lines import InputLine, JobLimits, LineSplitter, parse_line
from tramontane.router.batch.store import StoredJob
from tramontane.router.batch.submissions import JobSubmissions

MAX_LINES, MAX_LINE_BYTES = 1000, 2**20  # of one transaction
# that are split at once: threads are shared, and a mebibyte of line ends takes a second
SPLIT_BYTES = 2**16
ADD_INTERVAL_S = 10.0  # of a slow submission; well below TAKEOVER_TIMEOUT_S


class JobIngest:
    """Splits, validates and stores the lines of one job, in the threads of jobs. ``is_quoted``: see
    ``parse_line``.
    """

    def __init__(
        self,
        job: StoredJob,
        submissions: JobSubmissions,
        threads: JobThreadPool,
        limits: JobLimits,
        clock: Callable[[], float],
        is_quoted: bool,
    ) -> None:
        self._is_quoted = is_quoted
        self._job, self._submissions, self._threads, self._limits, self._clock = (
            job,
            submissions,
            threads,
            limits,
            clock,
        )
        self._splitter, self._digest = LineSplitter(limits.max_line_bytes), hashlib.sha256()
        self._ready: list[InputLine] = []
        self._ready_bytes = self._place = 0
        self._added_at = clock()

    async def run(self, pieces: AsyncIterator[bytes]) -> str:
        """Store all lines and return the text's digest.

        Raises FileTooLargeError, or JobRefusedError if there are too many lines.
        """
        buffer, num_bytes = bytearray(), 0
        async for piece in pieces:
            num_bytes = _count_bytes(num_bytes, piece, self._limits.max_bytes)
            buffer += piece
            while len(buffer) >= SPLIT_BYTES:
                part = bytes(buffer[:SPLIT_BYTES])
                del buffer[:SPLIT_BYTES]
                await self._threads.run(self._feed, part)
            if self._clock() - self._added_at > ADD_INTERVAL_S:
                await self._threads.run(self._feed, bytes(buffer))
                buffer.clear()
                await self._threads.run(self._add)
        await self._threads.run(self._finish, bytes(buffer))
        return self._digest.hexdigest()

    def _feed(self, part: bytes) -> None:
        self._digest.update(part)
        for line in self._splitter.feed(part):
            self._append_line(line)

    def _finish(self, part: bytes) -> None:
        self._feed(part)
        for line in self._splitter.finish():
            self._append_line(line)
        if self._ready:
            self._add()

    def _append_line(self, line: InputLine) -> None:
        if line.number > self._limits.max_lines:
            raise JobRefusedError(
                f"the input has more than {self._limits.max_lines} lines; split it"
            )
        if line.text is not None and not line.text.strip():
            return
        self._ready.append(line)
        self._ready_bytes += len(line.text or b"")
        if len(self._ready) == MAX_LINES or self._ready_bytes > MAX_LINE_BYTES:
            self._add()

    def _add(self) -> None:
        """Add the lines that are ready, or record progress if there are none."""
        endpoint, max_bytes = self._job.job.options.endpoint, self._limits.max_line_bytes
        parsed = [parse_line(line, endpoint, max_bytes, self._is_quoted) for line in self._ready]
        self._submissions.add_lines(self._job, self._place, parsed)
        self._place, self._added_at = self._place + len(self._ready), self._clock()
        self._ready, self._ready_bytes = [], 0


def digest_of_url(url: str) -> str:
    """Return the digest of a URL, which no text has."""
    return f"url:{hashlib.sha256(url.encode(errors='replace')).hexdigest()}"


async def digest_of_text(
    pieces: AsyncIterator[bytes], max_bytes: int, threads: JobThreadPool
) -> str:
    """Return the digest of a text, in the threads of jobs. Raises FileTooLargeError."""
    digest, num_bytes = hashlib.sha256(), 0
    async for piece in pieces:
        num_bytes = _count_bytes(num_bytes, piece, max_bytes)
        if len(piece) < SPLIT_BYTES:
            digest.update(piece)
        else:
            await threads.run(digest.update, piece)
    return digest.hexdigest()


def _count_bytes(num_bytes: int, piece: bytes, max_bytes: int) -> int:
    if num_bytes + len(piece) > max_bytes:
        raise FileTooLargeError(f"the input is larger than {format_bytes(max_bytes)}; split it")
    return num_bytes + len(piece)
