"""A picture of simulated runs: when the stages worked, and what requests waited for."""

from collections.abc import Sequence
from pathlib import Path

from tramontane.cluster.console.plotting import save
from tramontane.router.simulation.simulator import Trace

SHOWN_STEPS = 60  # micro-batches in the middle of a run whose times are drawn


def draw(path: Path, traces: Sequence[Trace], names: Sequence[str]) -> None:
    """A row per policy: which stage worked when, and the distribution of the time between tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 2.4 * len(traces)), layout="constrained")
    rows = figure.subplots(len(traces), 2, squeeze=False, width_ratios=[3, 1])
    for (work, gaps), trace, name in zip(rows, traces, names, strict=True):
        middle = len(trace.timings) // 2
        shown = trace.timings[middle : middle + SHOWN_STEPS]
        start = min(timing.started_at for timings in shown for timing in timings)
        for stage in range(len(shown[0])):
            spans = [((timings[stage].started_at - start) * 1000, timings[stage].busy_s * 1000) for timings in shown]
            work.broken_barh(spans, (stage + 0.6, 0.8), facecolors=["#3b6ea5", "#9cc3e6"] * (len(spans) // 2 + 1))
        work.set(title=name, ylabel="stage", xlabel="ms")
        gaps.hist([seconds * 1000 for seconds in trace.between_tokens_s()], bins=60, color="#3b6ea5")
        gaps.set(title="between tokens", xlabel="ms", yscale="log")
    save(figure, path)
