"""A submission's lines on their way into the database: cut out of pieces, checked and stored in the jobs' own threads."""

from collections.abc import AsyncIterator, Callable

from tramontane.router.batch.files import FileTooLargeError
from tramontane.router.batch.input_lines import JobLimits, LineSplitter, RawLine, checked_line
from tramontane.router.batch.job_threads import JobThreads
from tramontane.router.batch.jobs import JobRefusedError
from tramontane.router.batch.store import StoredJob
from tramontane.router.batch.submissions import JobSubmissions

LINES_AT_ONCE, BYTES_AT_ONCE = 1000, 2**20  # in one transaction
CUT_AT_ONCE = 2**16  # bytes; the threads are everybody's, and a mebibyte of nothing but line ends takes a second
ADD_EVERY_S = 10.0  # of a submission that is slow: well before it counts as one that stands still


class JobIntake:
    """Of one job."""

    def __init__(
        self, job: StoredJob, submissions: JobSubmissions, threads: JobThreads, limits: JobLimits, clock: Callable[[], float]
    ) -> None:
        self._job, self._submissions, self._threads, self._limits, self._clock = job, submissions, threads, limits, clock
        self._splitter = LineSplitter(limits.max_line_bytes)
        self._ready: list[RawLine] = []
        self._ready_bytes = self._place = 0
        self._added_at = clock()

    async def run(self, pieces: AsyncIterator[bytes]) -> None:
        """Until all are stored. Raises FileTooLargeError, or JobRefusedError if there are too many lines."""
        waiting, num_bytes = bytearray(), 0
        async for piece in pieces:
            num_bytes += len(piece)
            if num_bytes > self._limits.max_bytes:
                raise FileTooLargeError(f"the input is larger than {self._limits.max_bytes} bytes; split it")
            waiting += piece
            while len(waiting) >= CUT_AT_ONCE:
                part = bytes(waiting[:CUT_AT_ONCE])
                del waiting[:CUT_AT_ONCE]
                await self._threads.run(self._take, part)
            if self._clock() - self._added_at > ADD_EVERY_S:
                await self._threads.run(self._take_and_add, bytes(waiting))
                waiting.clear()
        await self._threads.run(self._finish, bytes(waiting))

    def _take(self, part: bytes) -> None:
        for line in self._splitter.feed(part):
            self._take_line(line)

    def _take_and_add(self, part: bytes) -> None:
        self._take(part)
        self._add()

    def _finish(self, part: bytes) -> None:
        self._take(part)
        for line in self._splitter.finish():
            self._take_line(line)
        if self._ready:
            self._add()

    def _take_line(self, line: RawLine) -> None:
        if line.number > self._limits.max_lines:
            raise JobRefusedError(f"the input has more than {self._limits.max_lines} lines; split it")
        if line.text is not None and not line.text.strip():
            return
        self._ready.append(line)
        self._ready_bytes += len(line.text or b"")
        if len(self._ready) == LINES_AT_ONCE or self._ready_bytes > BYTES_AT_ONCE:
            self._add()

    def _add(self) -> None:
        """All that are ready; none: the submission only has not stood still."""
        endpoint, most = self._job.job.options.endpoint, self._limits.max_line_bytes
        self._submissions.add_lines(self._job, self._place, [checked_line(line, endpoint, most) for line in self._ready])
        self._place, self._added_at = self._place + len(self._ready), self._clock()
        self._ready, self._ready_bytes = [], 0
