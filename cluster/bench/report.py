"""The output of ``tramontane bench``: progress, a table or JSON, and the plot of the median
round.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from tramontane.cluster.bench.results import (
    PERCENTILES,
    BenchMetrics,
    BenchResult,
    Latency,
    PipelineUsage,
    RoundPlan,
)
from tramontane.cluster.console.charts import save_figure
from tramontane.cluster.console.display import Display
from tramontane.cluster.console.run_summary import (
    expert_table,
    experts_as_data,
    stage_table,
    stages_json,
)
from tramontane.router.engine.stats import HopTime

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BINS = 60
LINE_EVERY_S = 5.0
LATENCIES = (
    ("ttft", "first token (TTFT)"),
    ("tpot", "per token (TPOT)"),
    ("itl", "between pieces (ITL)"),
    ("e2el", "whole (E2E)"),
)


class _SpeedColumn(ProgressColumn):
    """Tokens per second of the last half minute."""

    def render(self, task: Task) -> Text:
        """Render the speed once it is known."""
        speed = task.finished_speed or task.speed
        return Text(f"{speed:.0f} tokens/s" if speed else "")


class BenchDisplay(Display):
    """Progress on standard error: in a terminal a bar for each round, otherwise a line at its start
    and then every 5 s.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(live=False)
        self._clock = clock
        self._rounds_bar: Progress | None = None
        self._title, self._num_tokens, self._num_done = "", 0, 0  # of the round
        self._begun_at = self._shown_at = 0.0

    def begin_round(self, number: int, rounds: RoundPlan, num_tokens: int) -> None:
        """Show the start of a round; ``advance`` will be called for a total of ``num_tokens``
        tokens.
        """
        self.stop()
        self._title = f"round {number + 1} of {rounds.total}" + (
            " (warm-up)" if number < rounds.num_warmups else ""
        )
        self._num_tokens, self._num_done, self._begun_at = num_tokens, 0, self._clock()
        self._shown_at = self._begun_at
        if not self.stderr.is_terminal:
            self.stderr.print(f"{self._title} ...")
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f} of {task.total:.0f} tokens"),
        )
        times = (_SpeedColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._rounds_bar = Progress(*columns, *times, console=self.stderr, transient=True)
        self._rounds_bar.add_task(self._title, total=num_tokens)
        self._rounds_bar.start()

    def advance(self, num_tokens: int) -> None:
        """Add tokens to the round."""
        # the tokens of a lost stage are computed again
        self._num_done = min(self._num_done + num_tokens, self._num_tokens)
        if self._rounds_bar is not None:
            self._rounds_bar.update(self._rounds_bar.task_ids[0], completed=self._num_done)
        elif (
            now := self._clock()
        ) - self._shown_at >= LINE_EVERY_S and not self.stderr.is_terminal:
            self._shown_at, elapsed_s = now, now - self._begun_at
            share, speed = self._num_done / self._num_tokens, self._num_done / elapsed_s
            self.stderr.print(
                f"{self._title}: {share:.0%} of {self._num_tokens} tokens after {elapsed_s:.0f} s,"
                f" {speed:.0f} a second ..."
            )

    def stop(self) -> None:
        """Remove the bar."""
        if self._rounds_bar is not None:
            self._rounds_bar.stop()
            self._rounds_bar = None
        super().stop()


def _latencies(figures: BenchMetrics) -> list[tuple[str, str, Latency]]:
    pairs = zip(LATENCIES, (figures.ttft, figures.tpot, figures.itl, figures.e2e), strict=True)
    return [(key, name, latency) for (key, name), latency in pairs if latency is not None]


def render_report(outcome: BenchResult) -> Group:
    """Render the metrics as tables."""
    figures = outcome.figures
    speed = Table("tokens/s, in and out", "in", "out", "requests/s", "seconds")
    in_s, out_s = figures.per_s(figures.num_prompt_tokens), figures.per_s(figures.num_new_tokens)
    requests_s = f"{figures.per_s(figures.num_completed):.2f}"
    speed.add_row(
        f"{figures.tokens_per_s:.0f}",
        f"{in_s:.0f}",
        f"{out_s:.0f}",
        requests_s,
        f"{figures.elapsed_s:.2f}",
    )
    latency = Table("milliseconds", "mean", *(f"p{at}" for at in PERCENTILES))
    for _, name, seconds in _latencies(figures):
        latency.add_row(
            name, *(f"{1000 * s:.1f}" for s in (seconds.mean_s, *seconds.percentiles_s))
        )
    parts: list[Table | Text] = [Text(_headline(outcome)), speed, latency]
    if (used := outcome.round.pipeline) is not None:
        parts += [
            stage_table(used.plan, used.usage),
            *([expert_table(used.plan, used.usage)] if used.plan.experts else []),
        ]
        parts += [Text(_between_stages(used.usage.bubble, used.hops))]
    parts += [Text(f"failed: {f.count} x {f.kind}: {f.example}") for f in figures.failures]
    return Group(*parts)


def _headline(outcome: BenchResult) -> str:
    figures = outcome.figures
    done = (
        f"{figures.num_completed} requests, {figures.num_prompt_tokens} tokens in,"
        f" {figures.num_new_tokens} out"
    )
    failed = f", {figures.num_failed} FAILED" if figures.num_failed else ""
    if len(outcome.speeds) == 1:
        return done + failed
    speeds = ", ".join(f"{speed:.0f}" for speed in outcome.speeds)
    return f"{done}{failed}\nthe median of {len(outcome.speeds)} rounds: {speeds} tokens/s"


def _between_stages(bubble: float, hops: Sequence[HopTime]) -> str:
    each = (
        f"hop {number} to {number + 1}: {1000 * hop.min_s:.2f} ms at least,"
        f" {1000 * hop.median_s:.2f} ms in the median"
        for number, hop in enumerate(hops, start=1)
    )
    return "\n".join([f"bubble {bubble:.0%}", *each])


def as_data(outcome: BenchResult) -> dict[str, Any]:
    """Return the metrics for JSON.

    The first five keys are the keys of ``vllm bench throughput``, the next ones, where they exist,
    of ``vllm bench serve``.
    """
    figures, used = outcome.figures, outcome.round.pipeline
    data: dict[str, Any] = {
        "elapsed_time": figures.elapsed_s,
        "num_requests": figures.num_completed + figures.num_failed,
        "total_num_tokens": figures.num_prompt_tokens + figures.num_new_tokens,
        "requests_per_second": figures.per_s(figures.num_completed),
        "tokens_per_second": figures.tokens_per_s,
        "completed": figures.num_completed,
        "failed": figures.num_failed,
        "errors": [
            {"kind": f.kind, "count": f.count, "example": f.example} for f in figures.failures
        ],
        "total_input_tokens": figures.num_prompt_tokens,
        "total_output_tokens": figures.num_new_tokens,
        "input_throughput": figures.per_s(figures.num_prompt_tokens),
        "output_throughput": figures.per_s(figures.num_new_tokens),
        "num_warmups": outcome.num_warmups,
        "repeats_tokens_per_second": list(outcome.speeds),
    }
    for key, _, seconds in _latencies(figures):
        data[f"mean_{key}_ms"] = 1000 * seconds.mean_s
        for at, value in zip(PERCENTILES, seconds.percentiles_s, strict=True):
            data[f"{'median' if at == 50 else f'p{at}'}_{key}_ms"] = 1000 * value
    if used is not None:
        hops = [{"min_ms": 1000 * hop.min_s, "median_ms": 1000 * hop.median_s} for hop in used.hops]
        data |= {
            "stages": stages_json(used.plan, used.usage, used.devices),
            "bubble": used.usage.bubble,
            "hops": hops,
        }
        data |= experts_as_data(used.plan, used.usage) | {
            "system_fingerprint": used.fingerprint or None
        }
    return data


def save_plot(path: Path, outcome: BenchResult) -> None:
    """Plot tokens per second over time, the distribution of latencies, and when the stages worked.
    Raises ConfigError.
    """
    from matplotlib.figure import Figure

    used = outcome.round.pipeline
    figure = Figure(figsize=(9, 9 if used else 6), layout="constrained")
    panels = figure.subplots(3 if used else 2, squeeze=False)[:, 0]
    _plot_speed(panels[0], outcome)
    _plot_latency(panels[1], outcome)
    if used is not None:
        _plot_stages(panels[2], used)
    save_figure(figure, path)


def _plot_speed(panel: "Axes", outcome: BenchResult) -> None:
    """Plot tokens per second: a piece of an answer counts for its share of the answer's tokens."""
    done = [trace for trace in outcome.round.traces if trace.failure is None]
    begin = min(trace.due_at for trace in outcome.round.traces)
    at = np.concatenate([np.asarray(trace.pieces_at) - begin for trace in done])
    weights = np.concatenate(
        [np.full(len(t.pieces_at), t.num_new_tokens / len(t.pieces_at)) for t in done]
    )
    counts, edges = np.histogram(
        at, bins=BINS, range=(0, outcome.figures.elapsed_s), weights=weights
    )
    panel.stairs(counts / np.diff(edges), edges, fill=True)
    panel.set(
        xlabel="seconds",
        ylabel="new tokens/s",
        title=f"{outcome.figures.tokens_per_s:.0f} tokens/s in and out",
    )


def _plot_latency(panel: "Axes", outcome: BenchResult) -> None:
    done = [trace for trace in outcome.round.traces if trace.failure is None]
    panel.ecdf([trace.ttft_s for trace in done], label="first token")
    panel.ecdf([trace.e2e_s for trace in done], label="whole answer")
    panel.set(xlabel="seconds after a request was due", ylabel="share of requests", xlim=(0, None))
    panel.legend()


def _plot_stages(panel: "Axes", used: PipelineUsage) -> None:
    """Plot when each stage worked, one row per stage, by the stages' own clocks."""
    begin = min(timing.started_at for timing in used.timings)
    for stage in used.plan.stages:
        spans = [
            (t.started_at - begin, t.busy_s) for t in used.timings if t.stage_id == stage.stage_id
        ]
        panel.broken_barh(spans, (stage.stage_id + 0.1, 0.8))
    names = [
        f"{stage.stage_id + 1}: {used.usage.busy_share(stage.stage_id):.0%} busy"
        for stage in used.plan.stages
    ]
    panel.set_yticks([stage.stage_id + 0.5 for stage in used.plan.stages], names)
    panel.set(xlabel="seconds", ylabel="stage", title=f"bubble {used.usage.bubble:.0%}")
    panel.invert_yaxis()
