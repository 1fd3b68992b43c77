"""``tramontane experts``: show, or rebalance, the expert load of a running server, or show which
experts texts choose.
"""

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.progress import Progress
from rich.text import Text

from tramontane.cluster.common.signals import until_interrupted
from tramontane.cluster.config.measurements import (
    NO_EXPERTS,
    ExpertLoad,
    MeasuredLoad,
    load_as_data,
    read_load,
)
from tramontane.cluster.console.charts import (
    BUSIEST,
    busiest_summary,
    check_plot_target,
    heat_map,
    save_figure,
)
from tramontane.cluster.console.charts import heat_legend as legend
from tramontane.cluster.console.expert_domains import (
    as_data,
    draw,
    fetch_choices,
    read_text,
    repetition_table,
)
from tramontane.cluster.console.options import flag, option
from tramontane.cluster.console.server_client import (
    DEFAULT_URL,
    Key,
    KeyFile,
    Url,
    auth_headers,
    make_client,
    request,
)
from tramontane.proto.errors import ConfigError, PipelineUnavailableError

POLL_INTERVAL_S = 1.0
WINDOW_S = 10.0  # of recent load
TITLE = f"% of each layer's tokens, {BUSIEST} its busiest"

# seconds of a clock, and the load; None if no pipeline could report it
Sample = tuple[float, MeasuredLoad | None]


def experts(
    url: Url = DEFAULT_URL,
    watch: Annotated[bool, flag("--watch", help="Update every second, until interrupted.")] = False,
    as_json: Annotated[
        bool, flag("--json", help="Print the load as JSON, the form that --expert-load reads.")
    ] = False,
    adopt: Annotated[
        Path | None,
        option(
            "--adopt", help="Redistribute the experts of the running server by this measured load."
        ),
    ] = None,
    of: Annotated[
        list[Path] | None,
        option(
            "--of",
            help="Show the experts of this text instead; repeat it for texts of several kinds.",
            metavar="FILE",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        option("--plot", help="With --of: write a figure, as PNG, SVG or PDF.", metavar="FILE"),
    ] = None,
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """Show how the tokens of a running server are distributed over its experts."""
    if of and (watch or adopt is not None):
        raise ConfigError("--of computes texts, so --watch and --adopt cannot be used with it")
    if plot is not None and not of:
        raise ConfigError("--plot draws the experts of texts; give --of as well")
    if adopt is not None and (watch or as_json):
        raise ConfigError(
            "--adopt changes the server, so --watch and --json cannot be used with it"
        )
    if watch and as_json:
        raise ConfigError("--watch updates a terminal, so --json cannot be used with it")
    console = Console(highlight=False)
    with (
        until_interrupted() if watch else nullcontext(),
        make_client(url, auth_headers(key, key_file)) as client,
    ):
        if of:
            show_texts(client, console, of, plot, as_json=as_json)
        elif adopt is not None:
            console.print(post_load(client, read_load(adopt, "--adopt")))
        elif watch:
            watch_load(client, console)
        elif as_json:
            print(json.dumps(load_as_data(fetch_load(client).tokens)))
        else:
            console.print(totals(fetch_load(client), console.width))


def show_texts(
    client: httpx.Client, console: Console, files: list[Path], plot: Path | None, *, as_json: bool
) -> None:
    """Print the experts of texts, and draw them if ``plot`` is given. Raises ConfigError before any
    text is computed.
    """
    if plot is not None:
        check_plot_target(plot)
    if len(set(files)) < len(files):
        raise ConfigError("--of names a file twice; give each text once")
    texts = {str(file): read_text(file) for file in files}
    num_experts = [len(layer) for layer in fetch_load(client).tokens]
    stderr = Console(stderr=True, highlight=False)
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("computing the texts", total=None)
        domains = fetch_choices(
            client,
            texts,
            num_experts,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    if plot is not None:
        save_figure(draw(domains), plot)
    if as_json:
        print(json.dumps(as_data(domains)))
        return
    for domain in domains:
        shown = (
            f"{domain.name}, {domain.num_tokens} tokens: % of each layer's choices, {BUSIEST} its"
            " busiest"
        )
        console.print(_title(shown), soft_wrap=True)  # a path may be long
        console.print(
            Group(
                heat_map(domain.tokens, console.width), Text(busiest_summary(domain.tokens)), Text()
            )
        )
    pairs = _title("pairs of consecutive tokens that have the same heaviest expert, or share any")
    console.print(Group(legend(), Text(), pairs, repetition_table(domains)))


class NoExpertsError(ConfigError):
    """The server's model has no experts."""


def fetch_load(client: httpx.Client) -> MeasuredLoad:
    """Return the load of the server's experts.

    Raises the errors of ``request``, ConfigError if it is another server, NoExpertsError if its
    model has no experts, PipelineUnavailableError if no pipeline can report its load now.
    """
    answer = request(client, "GET", "/experts")
    try:
        data = answer.json()
        if answer.status_code == httpx.codes.OK:
            return MeasuredLoad.from_data(data)
        code, message = data["error"]["code"], data["error"]["message"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _no_tramontane(client, answer) from error
    if code == NO_EXPERTS:
        raise NoExpertsError(f"--url {client.base_url} serves a model that has no experts")
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        raise PipelineUnavailableError(f"--url {client.base_url}: {message}; try again soon")
    raise _no_tramontane(client, answer)


def post_load(client: httpx.Client, load: ExpertLoad) -> str:
    """Redistribute the experts, and return a line about it. Raises ConfigError if the server
    refuses or cannot.
    """
    # loading may take long
    answer = request(client, "POST", "/experts", json=load_as_data(load), timeout=None)
    if answer.status_code == httpx.codes.METHOD_NOT_ALLOWED:
        raise ConfigError(
            f"--url {client.base_url} does not allow clients to redistribute experts; start it with"
            " --move-experts"
        )
    try:
        data = answer.json()
        if answer.status_code == httpx.codes.OK:
            return (
                f"{data['moved']} experts were loaded on further actors, in {data['pipelines']}"
                " pipeline(s)"
            )
        message = str(data["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _no_tramontane(client, answer) from error
    raise ConfigError(f"--url {client.base_url}: {message}")


def _no_tramontane(client: httpx.Client, answer: httpx.Response) -> ConfigError:
    return ConfigError(
        f"--url {client.base_url} answers GET /experts with HTTP {answer.status_code} and without"
        " expert load; is it Tramontane?"
    )


@dataclass
class LoadWindow:
    """The load within the last ``WINDOW_S``, from totals that only grow: a lower total means that a
    stage was reloaded.
    """

    _samples: deque[tuple[float, MeasuredLoad]] = field(default_factory=deque)

    def add(self, at_s: float, load: MeasuredLoad) -> None:
        """Add totals, and drop totals that are too old."""
        if self._samples and not _is_continued(load, self._samples[-1][1]):
            self._samples.clear()
        self._samples.append((at_s, load))
        while at_s - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()

    @property
    def span_s(self) -> float:
        """Seconds from the oldest to the newest totals."""
        return self._samples[-1][0] - self._samples[0][0]

    @property
    def tokens(self) -> ExpertLoad:
        """Tokens of each expert within ``span_s``."""
        first, last = self._samples[0][1].tokens, self._samples[-1][1].tokens
        return tuple(
            tuple(b - a for a, b in zip(*rows, strict=True))
            for rows in zip(first, last, strict=True)
        )


def _is_continued(new: MeasuredLoad, old: MeasuredLoad) -> bool:
    if new.num_pipelines != old.num_pipelines or list(map(len, new.tokens)) != list(
        map(len, old.tokens)
    ):
        return False
    return all(
        a <= b
        for rows in zip(old.tokens, new.tokens, strict=True)
        for a, b in zip(*rows, strict=True)
    )


def totals(load: MeasuredLoad, width: int) -> Group:
    """Render the load since the stages were loaded."""
    pipelines = f"{load.num_pipelines} pipelines" if load.num_pipelines > 1 else "1 pipeline"
    title = f"since loading, {pipelines}: {TITLE}"
    return Group(
        _title(title), heat_map(load.tokens, width), Text(busiest_summary(load.tokens)), legend()
    )


def render(samples: Iterable[Sample], width: int) -> Iterator[Group]:
    """Render for each sample the recent load, and below it the totals."""
    recent, shown = LoadWindow(), Group()
    for at_s, load in samples:
        if load is None:
            yield Group(
                _title("no pipeline can report its load now; this is the last report"), shown
            )
            continue
        recent.add(at_s, load)
        title = f"the last {recent.span_s:.0f} s: {TITLE}"
        added = [
            _title(title),
            heat_map(recent.tokens, width),
            Text(busiest_summary(recent.tokens)),
        ]
        shown = Group(*added, Text(), totals(load, width))
        yield shown


def watch_load(client: httpx.Client, console: Console) -> None:
    """Show the load until interrupted. In a terminal each frame replaces the last; lines that do
    not fit are cut off.
    """
    shown = render(_poll(client), console.width)
    if not console.is_terminal:
        for frame in shown:
            console.print(frame, Text())
    with Live(console=console, auto_refresh=False) as live:
        for frame in shown:
            live.update(frame, refresh=True)


def _poll(client: httpx.Client) -> Iterator[Sample]:
    while True:
        try:
            load = fetch_load(client)
        except PipelineUnavailableError:
            load = None
        yield time.monotonic(), load
        time.sleep(POLL_INTERVAL_S)


def _title(title: str) -> Text:
    return Text(title, style="bold")
