"""The terminal output of commands: text on standard output, progress and notes on standard
error.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.segment import Segments
from rich.status import Status
from rich.text import Text

from tramontane.proto.units import format_bytes

if TYPE_CHECKING:
    from tramontane.cluster.console.run_summary import TokenColors

CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
STRIP_CONTROL = {number: "\ufffd" for number in CONTROLS if chr(number) not in "\n\t\r"} | {
    ord("\r"): ""
}
READY = "ready"  # as a worker reports it
LIVE_LINES = 4  # of each prompt's text, while several grow at once


class LoadingWorker(Protocol):
    """Bytes of its weights that one stage or expert actor has loaded, and their total; then its
    activity until it is ready.
    """

    @property
    def label(self) -> str:
        """The name to show."""

    @property
    def num_bytes(self) -> int:
        """Loaded bytes."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all its weights."""

    @property
    def activity(self) -> str:
        """Its activity after its weights are loaded; "" before."""


class Display:
    """Progress, and the texts of prompts.

    ``live`` means that standard output is a terminal. One prompt always streams. Several stream in
    a terminal, and are otherwise printed as blocks in input order. Colored texts are always blocks,
    since colors are known only at the end.
    """

    def __init__(self, live: bool, silent: bool = False) -> None:
        self.stderr = Console(stderr=True, highlight=False)
        self.stdout = Console(highlight=False)
        self._live_wanted, self._silent = live, silent
        self._status: Status | None = None
        self._bars: Progress | None = None
        self._quarters_reported, self._activities_reported = 0, ""
        self._live: Live | None = None
        self._streams = False  # one text, written as it grows
        self._texts: list[str] = []
        self._colored: dict[int, Segments] = {}
        self._ended: list[bool] = []
        self._printed = 0

    def report(self, activity: str) -> None:
        """Show the command's current wait. The text may contain names from others, so control
        characters are removed.
        """
        self._stop_bars()
        activity = activity.translate(STRIP_CONTROL | {ord("\n"): " "})
        if self._status is None and self.stderr.is_terminal:
            self._status = self.stderr.status(escape(activity))
            self._status.start()
        elif self._status is not None:
            self._status.update(escape(activity))
        else:
            self.stderr.print(f"{activity} ...", soft_wrap=True, markup=False)

    def loading(self, stages: Sequence[LoadingWorker]) -> None:
        """Show the progress of every stage: bars in a terminal, otherwise a line for each quarter
        of all their bytes.

        Once these are loaded, show the stages' activities until they are ready.
        """
        if self.stderr.is_terminal:
            if self._bars is None:
                self._start_bars(stages)
            assert self._bars is not None
            for task, stage in zip(self._bars.task_ids, stages, strict=True):
                self._bars.update(task, completed=stage.num_bytes, activity=stage.activity)
            return
        total = sum(stage.total_bytes for stage in stages)
        quarters = 4 * sum(stage.num_bytes for stage in stages) // total
        if self._quarters_reported < quarters < 4:
            self._quarters_reported = quarters
            self.stderr.print(f"loaded {quarters * 25}% of {format_bytes(total)} ...")
        if (activities := _activities(stages)) not in ("", self._activities_reported):
            self._activities_reported = activities
            self.stderr.print(f"loaded {format_bytes(total)}: {activities} ...", soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a note on one line, however long."""
        self.stderr.print(f"note: {text}", markup=False, soft_wrap=True)

    def note_in_terminal(self, text: str) -> None:
        """Keep a line of the startup on a terminal, where the lines of ``report`` do not stay."""
        if self.stderr.is_terminal and not self._silent:
            self._stop_waiting()
            self.note(text)

    def start(self, prompts: list[str], colors: "TokenColors | None" = None) -> None:
        """Start to show texts. With ``colors`` and in a terminal, ``end`` gets the colored
        texts.
        """
        self._stop_waiting()
        self._texts, self._ended = list(prompts), [False] * len(prompts)
        if self._silent:
            return
        if colors is not None:
            self._explain(colors)
        self._streams = len(prompts) == 1 and not (colors and self._live_wanted)
        if self._streams:
            self._write(prompts[0])
        elif self._live_wanted:
            self._live = Live(
                console=self.stdout,
                transient=True,
                get_renderable=self._render_tails,
                refresh_per_second=12,
            )
            self._live.start()

    def add(self, index: int, piece: str) -> None:
        """Append a piece to a text."""
        self._texts[index] += piece
        if self._streams:
            self._write(piece)

    def end(self, index: int, colored: Segments | None = None) -> None:
        """Mark a text as complete."""
        self._ended[index] = True
        if colored is not None and self._live_wanted:
            self._colored[index] = colored
        if self._live is None:
            self._print_blocks()

    def stop(self) -> None:
        """Leave the whole text on the screen, also after a failure."""
        self._stop_waiting()
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._ended = [True] * len(self._texts)
        self._print_blocks()

    def _print_blocks(self) -> None:
        if self._silent:
            return
        while self._printed < len(self._texts) and self._ended[self._printed]:
            self._write("\n" if self._printed else "")
            if self._printed in self._colored:
                self.stdout.print(self._colored[self._printed], soft_wrap=True)
            elif not self._streams:
                self._write(self._texts[self._printed])
            self._write("\n")
            self._printed += 1

    def _explain(self, colors: "TokenColors") -> None:
        self.stderr.print(colors.legend(), soft_wrap=True)
        if not self._live_wanted:
            self.note(
                "standard output is not a terminal, so its text is not colored; --json lists the"
                " experts"
            )

    def _render_tails(self) -> Group:
        """Return the last lines of every text, so that all texts fit on the screen."""
        width = max(self.stdout.width - 2, 10)
        blocks = []
        for number, text in enumerate(self._texts, start=1):
            lines = Text(text).wrap(self.stdout, width)
            blocks.append(
                Text.assemble((f"{number} ", "bold cyan"), Text("\n  ").join(lines[-LIVE_LINES:]))
            )
        return Group(*blocks)

    def _start_bars(self, stages: Sequence[LoadingWorker]) -> None:
        self._stop_waiting()  # rich can show only one live display at a time
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True))
        self._bars = Progress(
            *columns, TextColumn("{task.fields[activity]}"), console=self.stderr, transient=True
        )
        for stage in stages:
            self._bars.add_task(stage.label, total=stage.total_bytes, activity="")
        self._bars.start()

    def _stop_bars(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _stop_waiting(self) -> None:
        self._stop_bars()
        if self._status is not None:
            self._status.stop()
            self._status = None

    @staticmethod
    def _write(text: str) -> None:
        print(sanitize(text), end="", flush=True)


def _activities(stages: Sequence[LoadingWorker]) -> str:
    """Return the activities of the stages that are not ready, once all have loaded their weights;
    "" before and at the end.
    """
    if any(not stage.activity for stage in stages):
        return ""
    return ", ".join(dict.fromkeys(stage.activity for stage in stages if stage.activity != READY))


def sanitize(text: str) -> str:
    """Remove control characters if standard output is a terminal, since a model can emit any
    text.
    """
    if sys.stdout is None or not sys.stdout.isatty():
        return text
    return text.translate(STRIP_CONTROL)
