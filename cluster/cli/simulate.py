"""``tramontane simulate``: compare scheduling policies on a modelled pipeline, before any machine
is bought.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from tramontane.cluster.bench.comparison import PERCENTILES, Summary, all_policies, compare
from tramontane.cluster.bench.simulator import (
    LengthDistribution,
    PipelineModel,
    SimTrace,
    TrafficModel,
)
from tramontane.cluster.common.signals import cancel_on_signal
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.console.charts import check_plot_target, save_figure
from tramontane.cluster.console.display import Display
from tramontane.cluster.console.options import ConfigDefaults, Json, flag, key_option, option
from tramontane.cluster.planning.batch_limits import least_limits
from tramontane.proto.errors import ConfigError
from tramontane.router.scheduling.policy import BatchWork

if TYPE_CHECKING:
    from tramontane.cluster.bench.calibration import Calibration

REQUESTS, MODEL = "Requests", "Modelled stages"  # titles of groups of options
ASSUMED_HOP_S = 2e-4
CALIBRATED_STAGES = 2
CALIBRATION_REQUESTS = 48
PROMPT_SPREAD, ANSWER_SPREAD = 1.0, 0.8
MAX_LENGTH_RATIO = 10  # of the longest request to the mean
MAX_LENGTH = 100_000
PLOTTED_STEPS = 60  # micro-batches in the middle of a run whose times are drawn

BATCHED_TOKENS_HELP = "Tokens in one micro-batch of our policy; the others have their own bounds."
BatchedTokens = Annotated[
    int, key_option("max_num_batched_tokens", min=1, max=2**20, help=BATCHED_TOKENS_HELP)
]


def simulate(
    stages: Annotated[
        int, key_option("stages", min=1, max=64, help="Stages of the modelled pipeline.")
    ] = 8,
    num_requests: Annotated[
        int,
        option("--num-requests", min=1, max=100_000, help="Number of requests.", panel=REQUESTS),
    ] = 300,
    input_len: Annotated[
        int,
        option(
            "--input-len", min=1, max=MAX_LENGTH, help="Mean tokens of a prompt.", panel=REQUESTS
        ),
    ] = 800,
    output_len: Annotated[
        int,
        option(
            "--output-len", min=1, max=MAX_LENGTH, help="Mean tokens of an answer.", panel=REQUESTS
        ),
    ] = 200,
    request_rate: Annotated[
        float | None,
        option(
            "--request-rate",
            min=1e-6,
            help="Requests per second. Default: all arrive at once.",
            panel=REQUESTS,
        ),
    ] = None,
    burst: Annotated[
        int,
        option(
            "--burst", min=1, max=100_000, help="Requests that arrive together.", panel=REQUESTS
        ),
    ] = 1,
    max_num_seqs: Annotated[
        int, key_option("max_num_seqs", min=1, max=2**14, help="Sequences admitted at once.")
    ] = 128,
    max_num_batched_tokens: BatchedTokens = 1024,
    itl_target_ms: Annotated[
        float | None,
        key_option(
            "itl_target_ms",
            min=1e-3,
            help="Our policy's bound on the time between tokens. Default: none.",
        ),
    ] = None,
    noise: Annotated[
        float,
        option(
            "--noise",
            min=0,
            max=1,
            help="Deviation of a step's time, as a share of it.",
            panel=MODEL,
        ),
    ] = 0.05,
    calibrate: Annotated[
        bool,
        flag("--calibrate", help="Measure the times of stages on two real ones here.", panel=MODEL),
    ] = False,
    model: Annotated[
        Path | None,
        key_option(
            "model", help="With --calibrate: checkpoint folder. Default: the built-in demo model."
        ),
    ] = None,
    seed: Annotated[int, key_option("seed", min=0, help="Seed of lengths and arrivals.")] = 0,
    plot: Annotated[
        Path | None, option("--plot", help="Write a picture (.png, .svg or .pdf) to this file.")
    ] = None,
    config: ConfigDefaults = None,
    as_json: Json = False,
) -> None:
    """Compare scheduling policies: the real scheduler on a modelled pipeline."""
    if model is not None and not calibrate:
        raise ConfigError("--model is for --calibrate; give both or none")
    if plot is not None:
        check_plot_target(plot)
    traffic = TrafficModel(
        num_requests,
        LengthDistribution(input_len, PROMPT_SPREAD, MAX_LENGTH_RATIO * input_len),
        LengthDistribution(output_len, ANSWER_SPREAD, MAX_LENGTH_RATIO * output_len),
        request_rate,
        burst,
    )
    measured = _calibrate(model) if calibrate else None
    pipeline = (
        measured.pipeline(stages)
        if measured
        else PipelineModel(default_cost_model(stages), ASSUMED_HOP_S)
    )
    pipeline = PipelineModel(pipeline.seconds, pipeline.hop_s, noise)
    chosen = all_policies(
        max_num_batched_tokens, None if itl_target_ms is None else itl_target_ms / 1000
    )
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=len(chosen))
        outcomes = compare(
            chosen,
            pipeline,
            stages,
            traffic.arrivals(seed),
            max_num_seqs,
            lambda: progress.advance(task),
        )
    if plot is not None:
        plot_runs(plot, [trace for _, trace in outcomes], [each.name for each, _ in outcomes])
    _print(outcomes, measured, as_json=as_json)


def default_cost_model(num_stages: int) -> Callable[[BatchWork], list[float]]:
    """Return the cost model of a 7B model over eight large GPUs: weights are read in 0.4 ms, and
    then every token costs.

    256 decodes that see 1,000 keys each take 0.4 + 256 * 0.004 + 256,000 * 0.000006 = 3.0 ms.
    """

    def seconds(work: BatchWork) -> list[float]:
        prefill = 4e-6 * work.prefill_tokens + 1e-10 * work.prefill_keys
        return [4e-4 + prefill + 4e-6 * work.decodes + 6e-9 * work.decode_keys] * num_stages

    return seconds


def _calibrate(model: Path | None) -> "Calibration":
    # imports Ray, which simulation does not need
    from tramontane.cluster.bench.calibration import calibrate

    config = EngineConfig.build(
        None, {"model": model, "stages": CALIBRATED_STAGES, "enable_prefix_caching": False}
    )
    traffic = TrafficModel(
        CALIBRATION_REQUESTS,
        LengthDistribution(100, PROMPT_SPREAD, 600),
        LengthDistribution(40, ANSWER_SPREAD, 200),
    )
    candidate = all_policies(least_limits(config).num_tokens)[0]
    display = Display(live=False)
    try:
        runs = [traffic.arrivals(seed) for seed in (1, 2)]
        return asyncio.run(
            cancel_on_signal(calibrate(config, runs, candidate, display.report, display.loading))
        )
    finally:
        display.stop()


def _print(
    outcomes: Sequence[tuple[Summary, SimTrace]], measured: "Calibration | None", *, as_json: bool
) -> None:
    if as_json:
        data: dict[str, object] = {
            "percentiles": PERCENTILES,
            "policies": [asdict(each) for each, _ in outcomes],
        }
        if measured:
            data["calibration"] = {
                "errors": measured.relative_errors,
                "hop_s": measured.hop_s,
                "stages": CALIBRATED_STAGES,
            }
        print(json.dumps(data))
        return
    times = (f"{name}\n{p}%" for name in ("TTFT", "ITL", "E2E") for p in PERCENTILES[::2])
    figures = (Column(name, no_wrap=True) for name in ("bubble", "tokens/s", *times))
    # 80 characters wide, no figure is cut
    table = Table("policy", *figures, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for each, _ in outcomes:
        seconds = (
            _milliseconds(value)
            for values in (each.ttft_s, each.itl_s, each.e2e_s)
            for value in values[::2]
        )
        table.add_row(each.name, f"{each.bubble:.1%}", f"{each.tokens_per_s:,.0f}", *seconds)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "milliseconds; tokens in and out; the bubble is that of the time in which requests waited",
        soft_wrap=True,
    )
    if measured:
        errors = ", ".join(
            f"{name.replace('_', ' ')} {error:+.0%}"
            for name, error in measured.relative_errors.items()
        )
        console.print(
            f"costs: the mean of {CALIBRATED_STAGES} real stages here, with hops of"
            f" {_milliseconds(measured.hop_s)} ms. Against a real run of other requests the model"
            f" is off by: {errors}",
            soft_wrap=True,
        )
    else:
        console.print(
            "costs: assumed, of a 7B model over eight large GPUs; --calibrate measures them here",
            soft_wrap=True,
        )


def plot_runs(path: Path, traces: Sequence[SimTrace], names: Sequence[str]) -> None:
    """Draw a row per policy: which stage worked when, and the distribution of the time between
    tokens.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 2.4 * len(traces)), layout="constrained")
    rows = figure.subplots(len(traces), 2, squeeze=False, width_ratios=[3, 1])
    for (work, gaps), trace, name in zip(rows, traces, names, strict=True):
        middle = len(trace.timings) // 2
        shown = trace.timings[middle : middle + PLOTTED_STEPS]
        start = min(timing.started_at for timings in shown for timing in timings)
        for stage in range(len(shown[0])):
            spans = [
                ((timings[stage].started_at - start) * 1000, timings[stage].busy_s * 1000)
                for timings in shown
            ]
            work.broken_barh(
                spans, (stage + 0.6, 0.8), facecolors=["#3b6ea5", "#9cc3e6"] * (len(spans) // 2 + 1)
            )
        work.set(title=name, ylabel="stage", xlabel="ms")
        gaps.hist([seconds * 1000 for seconds in trace.itl_s()], bins=60, color="#3b6ea5")
        gaps.set(title="between tokens", xlabel="ms", yscale="log")
    save_figure(figure, path)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g}" if seconds < 1 else f"{seconds * 1000:,.0f}"
