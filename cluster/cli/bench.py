"""``tramontane bench``: measure an engine in this process, or a running server."""

import asyncio
import json
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tramontane.cluster.bench.online import LoadPattern, bench_online, make_client
from tramontane.cluster.bench.report import BenchDisplay, as_data, render_report, save_plot
from tramontane.cluster.bench.results import BenchResult, RoundPlan, Workload
from tramontane.cluster.common.signals import cancel_on_signal
from tramontane.cluster.config.engine_keys import BatchingKeys, ExpertKeys, PipelineKeys, RunKeys
from tramontane.cluster.console.charts import check_plot_target
from tramontane.cluster.console.options import (
    explicit_options,
    flags_of,
    load_config,
    option,
    with_options,
)
from tramontane.cluster.console.server_client import SERVER, Key, KeyFile, auth_headers
from tramontane.proto.errors import ConfigError

ENGINE_KEYS = flags_of(PipelineKeys, ExpertKeys, BatchingKeys, RunKeys)
ONLY_ENGINE = {*ENGINE_KEYS} - {"seed", "json"}
MEASUREMENT = "Measurement"  # title of a group of options
ONLY_SERVER = ("request_rate", "max_concurrency", "vocab_size", "key", "key_file")


@with_options(*ENGINE_KEYS)
def bench(
    context: typer.Context,
    num_prompts: Annotated[
        int, option("--num-prompts", help="Requests of a round.", panel=MEASUREMENT)
    ] = 64,
    input_len: Annotated[
        int, option("--input-len", help="Tokens of a prompt.", panel=MEASUREMENT)
    ] = 128,
    output_len: Annotated[
        int, option("--output-len", help="New tokens of an answer.", panel=MEASUREMENT)
    ] = 64,
    range_ratio: Annotated[
        float,
        option(
            "--range-ratio",
            help="0: fixed lengths. 0.5: any length from half of it to one and a half.",
            panel=MEASUREMENT,
        ),
    ] = 0.0,
    warmups: Annotated[
        int | None,
        option(
            "--warmups",
            help="Rounds that do not count. Default: 1; with --url 0.",
            panel=MEASUREMENT,
        ),
    ] = None,
    repeats: Annotated[
        int | None,
        option(
            "--repeats",
            help="Rounds, of which the one of median speed is shown. Default: 3; with --url 1.",
            panel=MEASUREMENT,
        ),
    ] = None,
    url: Annotated[
        str | None,
        option(
            "--url",
            help="Measure this OpenAI-compatible server instead of an engine of its own.",
            panel=SERVER,
        ),
    ] = None,
    request_rate: Annotated[
        float | None,
        option(
            "--request-rate",
            help="With --url: requests per second, at random times. Default: all at once.",
            panel=SERVER,
        ),
    ] = None,
    max_concurrency: Annotated[
        int | None,
        option(
            "--max-concurrency",
            help="With --url: requests in progress at once. Default: any number.",
            panel=SERVER,
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        option(
            "--vocab-size",
            help="With --url: prompts are token ids below it. Default: the server's.",
            panel=SERVER,
        ),
    ] = None,
    key: Key = None,
    key_file: KeyFile = None,
    plot: Annotated[
        Path | None,
        option("--plot", help="Write a picture: .png, .svg or .pdf.", panel=MEASUREMENT),
    ] = None,
) -> None:
    """Measure tokens per second, latencies and how busy the stages are, on random prompts."""
    _check_flags(explicit_options(context), url)
    rounds = RoundPlan(
        *(
            default if n is None else n
            for n, default in ((warmups, 0 if url else 1), (repeats, 1 if url else 3))
        )
    )
    if plot is not None:
        check_plot_target(plot)
    with load_config(context) as settings:
        workload = Workload(num_prompts, input_len, output_len, range_ratio, settings.seed)
        display = BenchDisplay()
        try:
            if url is None:
                from tramontane.cluster.bench.offline import (
                    bench_offline,  # imports Ray, which a server's benchmark does not need
                )

                measuring = bench_offline(settings, workload, rounds, display)
            else:
                rate = float("inf") if request_rate is None else request_rate
                traffic = LoadPattern(rate, max_concurrency, vocab_size)
                measuring = bench_online(
                    make_client(url, auth_headers(key, key_file)),
                    workload,
                    traffic,
                    rounds,
                    display,
                )
            outcome = asyncio.run(cancel_on_signal(measuring))
        finally:
            display.stop()
    _show(outcome, plot, settings.json_output)


def _show(outcome: BenchResult, plot: Path | None, as_json: bool) -> None:
    if plot is not None:
        save_plot(plot, outcome)
    if as_json:
        print(json.dumps(as_data(outcome)))
    else:
        Console(highlight=False).print(render_report(outcome))


def _check_flags(given: Collection[str], url: str | None) -> None:
    """Raise ConfigError for options that need a server without --url, or an engine with it."""
    if wrong := [name for name in ONLY_SERVER if name in given and url is None]:
        raise ConfigError(f"{_flags(wrong)}: only for a server; give its --url")
    if url and (wrong := [name for name in given if name in ONLY_ENGINE]):
        raise ConfigError(
            f"{_flags(wrong)}: only for an engine of bench's own; the server of --url was started"
            " with its own options"
        )


def _flags(names: list[str]) -> str:
    flags = {"key": "--api-key", "key_file": "--api-key-file"}
    return ", ".join(flags.get(name, f"--{name.replace('_', '-')}") for name in names)
