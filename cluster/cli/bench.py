"""``tramontane bench``."""

import asyncio
import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tramontane.cluster.common.signals import stoppable
from tramontane.cluster.console.options import BATCHING, PIPELINE, RUN, configured, given_options, option, takes
from tramontane.cluster.console.plotting import check_plot
from tramontane.cluster.console.server_client import Key, KeyFile, key_headers
from tramontane.proto.errors import ConfigError

if TYPE_CHECKING:
    from tramontane.cluster.bench.results import Outcome

ONLINE = ("request_rate", "max_concurrency", "vocab_size", "key", "key_file")
OF_ENGINE = {*PIPELINE, *BATCHING, *RUN} - {"seed", "json", "config"}


@takes(PIPELINE, BATCHING, RUN)
def bench(
    context: typer.Context,
    num_prompts: Annotated[int, option("--num-prompts", help="Requests of a round.")] = 64,
    input_len: Annotated[int, option("--input-len", help="Tokens of a prompt.")] = 128,
    output_len: Annotated[int, option("--output-len", help="New tokens of an answer.")] = 64,
    range_ratio: Annotated[
        float, option("--range-ratio", help="0: fixed lengths. 0.5: any, from half of the length to one and a half.")
    ] = 0.0,
    warmups: Annotated[int | None, option("--warmups", help="Rounds that do not count. Default 1; with --url 0.")] = None,
    repeats: Annotated[
        int | None, option("--repeats", help="Rounds, of which the one of median speed is shown. Default 3; with --url 1.")
    ] = None,
    url: Annotated[
        str | None, option("--url", help="An OpenAI-compatible server to ask, instead of an engine of its own.")
    ] = None,
    request_rate: Annotated[
        float | None, option("--request-rate", help="With --url: requests a second, at random times. Default: all at once.")
    ] = None,
    max_concurrency: Annotated[
        int | None, option("--max-concurrency", help="With --url: requests that are under way at once. Default: any number.")
    ] = None,
    vocab_size: Annotated[
        int | None, option("--vocab-size", help="With --url: prompts are token ids below it. Default: asked of the server.")
    ] = None,
    key: Key = None,
    key_file: KeyFile = None,
    plot: Annotated[Path | None, option("--plot", help="Write a picture: .png, .svg or .pdf.")] = None,
) -> None:
    """Measure tokens per second, latencies and how busy the stages are, on random prompts."""
    from tramontane.cluster.bench.report import BenchDisplay
    from tramontane.cluster.bench.results import Rounds
    from tramontane.cluster.bench.workload import Workload

    _check_flags(given_options(context), url)
    rounds = Rounds(*(default if n is None else n for n, default in ((warmups, 0 if url else 1), (repeats, 1 if url else 3))))
    if plot is not None:
        check_plot(plot)
    with configured(context) as settings:
        workload = Workload(num_prompts, input_len, output_len, range_ratio, settings.seed)
        display = BenchDisplay()
        try:
            if url is None:
                from tramontane.cluster.bench.offline import bench_offline  # brings Ray

                measuring = bench_offline(settings, workload, rounds, display)
            else:
                from tramontane.cluster.bench.online import Traffic, bench_online, client_of

                rate = float("inf") if request_rate is None else request_rate
                traffic = Traffic(rate, max_concurrency, vocab_size)
                measuring = bench_online(client_of(url, key_headers(key, key_file)), workload, traffic, rounds, display)
            outcome = asyncio.run(stoppable(measuring))
        finally:
            display.stop()
    _show(outcome, plot, settings.json_output)


def _show(outcome: "Outcome", plot: Path | None, as_json: bool) -> None:
    from tramontane.cluster.bench.report import as_data, summary, write_plot

    if plot is not None:
        write_plot(plot, outcome)
    if as_json:
        print(json.dumps(as_data(outcome)))
    else:
        Console(highlight=False).print(summary(outcome))


def _check_flags(given: Collection[str], url: str | None) -> None:
    """Some are for a server that is already there, most for an engine of bench's own."""
    if wrong := [name for name in ONLINE if name in given and url is None]:
        raise ConfigError(f"{_flags(wrong)}: only for a server; give its --url")
    if url and (wrong := [name for name in given if name in OF_ENGINE]):
        raise ConfigError(
            f"{_flags(wrong)}: only for an engine of bench's own; the one behind --url has been started with its own"
        )


def _flags(names: list[str]) -> str:
    flags = {"key": "--api-key", "key_file": "--api-key-file"}
    return ", ".join(flags.get(name, f"--{name.replace('_', '-')}") for name in names)
