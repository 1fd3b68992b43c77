"""``tramontane bench --plot``: one picture of the round that the figures are of."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tramontane.cluster.bench.bench_rounds import Outcome, PipelineUse
from tramontane.cluster.console.plotting import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BINS = 60


def write_plot(path: Path, outcome: Outcome) -> None:
    """Tokens per second over time, how many requests were answered within which time, and what the stages did."""
    from matplotlib.figure import Figure

    used = outcome.round.pipeline
    picture = Figure(figsize=(9, 9 if used else 6), layout="constrained")
    panels = picture.subplots(3 if used else 2, squeeze=False)[:, 0]
    _speed(panels[0], outcome)
    _latency(panels[1], outcome)
    if used is not None:
        _stages(panels[2], used)
    save(picture, path)


def _speed(panel: "Axes", outcome: Outcome) -> None:
    """A piece of an answer counts for its share of the answer's tokens."""
    done = [trace for trace in outcome.round.traces if trace.failure is None]
    begin = min(trace.due_at for trace in outcome.round.traces)
    at = np.concatenate([np.asarray(trace.pieces_at) - begin for trace in done])
    weights = np.concatenate([np.full(len(t.pieces_at), t.num_new_tokens / len(t.pieces_at)) for t in done])
    counts, edges = np.histogram(at, bins=BINS, range=(0, outcome.figures.elapsed_s), weights=weights)
    panel.stairs(counts / np.diff(edges), edges, fill=True)
    panel.set(xlabel="seconds", ylabel="new tokens/s", title=f"{outcome.figures.tokens_per_s:.0f} tokens/s in and out")


def _latency(panel: "Axes", outcome: Outcome) -> None:
    done = [trace for trace in outcome.round.traces if trace.failure is None]
    panel.ecdf([trace.ttft_s for trace in done], label="first token")
    panel.ecdf([trace.e2e_s for trace in done], label="whole answer")
    panel.set(xlabel="seconds after a request was due", ylabel="share of requests", xlim=(0, None))
    panel.legend()


def _stages(panel: "Axes", used: PipelineUse) -> None:
    """Each stage's working times, one row per stage, by the stages' own clocks."""
    begin = min(timing.started_at for timing in used.timings)
    for stage in used.plan.stages:
        spans = [(t.started_at - begin, t.busy_s) for t in used.timings if t.stage_id == stage.stage_id]
        panel.broken_barh(spans, (stage.stage_id + 0.1, 0.8))
    names = [f"{stage.stage_id + 1}: {used.usage.busy_share(stage.stage_id):.0%} busy" for stage in used.plan.stages]
    panel.set_yticks([stage.stage_id + 0.5 for stage in used.plan.stages], names)
    panel.set(xlabel="seconds", ylabel="stage", title=f"bubble {used.usage.bubble:.0%}")
    panel.invert_yaxis()
