"""``tramontane top``: show the activity of a running server's pipelines in the terminal."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Annotated

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tramontane.cluster.cli.experts import LoadWindow, NoExpertsError, fetch_load
from tramontane.cluster.common.signals import until_interrupted
from tramontane.cluster.config.measurements import MeasuredLoad
from tramontane.cluster.console.charts import (
    bin_activity,
    busiest_summary,
    heat_legend,
    heat_map,
    render_timeline,
)
from tramontane.cluster.console.charts import timeline_legend as legend
from tramontane.cluster.console.options import flag
from tramontane.cluster.console.server_client import (
    DEFAULT_URL,
    Key,
    KeyFile,
    Snapshot,
    Url,
    auth_headers,
    make_client,
    poll_activity,
)
from tramontane.proto.errors import ConfigError, ConnectionLostError, PipelineUnavailableError
from tramontane.router.engine.activity_log import (
    Activity,
    MicroBatchActivity,
    Percentiles,
    PipelineActivity,
)

WINDOW_S = 10.0  # of the timelines and of the busy shares
BAR_WIDTH = 10  # characters
# upper bound of a share, and the style of its bar
BAR_STYLES = ((0.5, "blue"), (0.8, "green"), (float("inf"), "bold green"))

FetchLoad = Callable[[], MeasuredLoad | None]


def top(
    url: Url = DEFAULT_URL,
    once: Annotated[bool, flag("--once", help="Show the pipelines once.")] = False,
    as_json: Annotated[
        bool,
        flag("--json", help="Print every snapshot as a line of JSON, as GET /activity returns it."),
    ] = False,
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """Show what the pipelines of a running server do, until interrupted."""
    console = Console(highlight=False)
    with (
        nullcontext() if once else until_interrupted(),
        make_client(url, auth_headers(key, key_file)) as client,
    ):
        snapshots = islice(poll_activity(client), 1 if once else None)
        if as_json:
            _print_json(snapshots)
        else:
            _show(
                render(snapshots, str(client.base_url), console.width, _load_source(client)),
                console,
                once,
            )


def _print_json(snapshots: Iterable[Snapshot]) -> None:
    for snapshot in snapshots:
        if isinstance(snapshot, str):
            Console(stderr=True, highlight=False).print(
                f"note: {snapshot}", markup=False, soft_wrap=True
            )
        else:
            print(snapshot.model_dump_json(), flush=True)


def _show(frames: Iterator[Group], console: Console, once: bool) -> None:
    """Print frames. In a terminal each frame replaces the last; lines that do not fit are cut
    off.
    """
    if once or not console.is_terminal:
        for frame in frames:
            console.print(frame, Text())
        return
    with Live(console=console, auto_refresh=False) as live:
        for frame in frames:
            live.update(frame, refresh=True)


def _load_source(client: httpx.Client) -> FetchLoad:
    """Return a function that fetches the expert load: None if it is unavailable, and always None
    for a model without experts.
    """
    has_experts = True

    def fetch() -> MeasuredLoad | None:
        nonlocal has_experts
        try:
            return fetch_load(client) if has_experts else None
        except NoExpertsError:
            has_experts = False
        except (ConfigError, ConnectionLostError, PipelineUnavailableError):
            pass
        return None

    return fetch


class History:
    """The micro-batches of one pipeline that the timelines show."""

    def __init__(self) -> None:
        self._batches: deque[MicroBatchActivity] = deque()

    def add(self, pipeline: PipelineActivity, now: float) -> None:
        """Add new micro-batches, in order of completion. Numbers that start again are from another
        router.
        """
        new = pipeline.micro_batches
        if new and self._batches and new[0].number <= self._batches[-1].number:
            self._batches.clear()
        self._batches.extend(new)
        while self._batches and all(
            at + elapsed_s < now - WINDOW_S for _, at, _, elapsed_s in self._batches[0].stages
        ):
            self._batches.popleft()

    def timeline(self, stage: int, now: float, width: int) -> Text:
        """Render the last ``WINDOW_S`` seconds of a stage. Columns start at fixed times, so that
        drawn ones only move.
        """
        column_s = WINDOW_S / width
        starts_at = now // column_s * column_s - WINDOW_S
        return render_timeline(
            bin_activity(self._batches, stage, starts_at, column_s, width), column_s
        )


def render(
    snapshots: Iterable[Snapshot], url: str, width: int, fetch: FetchLoad
) -> Iterator[Group]:
    """Render each snapshot; ``fetch`` returns the load of the experts, or None."""
    histories: dict[str, History] = {}
    recent, shown = LoadWindow(), Group()
    for snapshot in snapshots:
        if isinstance(snapshot, str):
            yield Group(Text(f"{snapshot}; this is the last report", style="bold red"), shown)
            continue
        known, histories = histories, {pipeline.name: History() for pipeline in snapshot.pipelines}
        histories |= {name: known[name] for name in histories.keys() & known.keys()}
        for pipeline in snapshot.pipelines:
            histories[pipeline.name].add(pipeline, snapshot.now)
        shown = Group(
            _head(snapshot, url),
            *(_pipeline(p, histories[p.name], snapshot.now, width) for p in snapshot.pipelines),
        )
        if (load := fetch()) is not None:
            recent.add(snapshot.now, load)
            shown = Group(shown, _experts(recent, load, width))
        yield shown


def _head(snapshot: Activity, url: str) -> Text:
    count = len(snapshot.pipelines)
    running = (
        "no pipeline runs now" if not count else f"{count} pipelines" if count > 1 else "1 pipeline"
    )
    return Text.assemble((f"{url}: {running}", "bold"), f"\nthe last {WINDOW_S:.0f} s: ", legend())


def _pipeline(pipeline: PipelineActivity, history: History, now: float, width: int) -> Group:
    name = Text.assemble("\n", (pipeline.name, "bold"))
    numbers = Text(
        f"{pipeline.tokens_per_s:.0f} new tokens/s, {pipeline.running} running, {pipeline.waiting}"
        f" waiting, {pipeline.pages_held} of {pipeline.pages} pages,"
        f" {_recoveries(pipeline.recoveries)}"
    )
    pages = "1 page" if pipeline.pages_cached == 1 else f"{pipeline.pages_cached} pages"
    cached = Text(f"{pages} cached, {_hit(pipeline)}{_right(pipeline)}")
    waits = Text(
        f"first token {_percentiles(pipeline.first_token_s)}, between tokens"
        f" {_percentiles(pipeline.inter_token_s)}"
    )
    labels = max((len(stage.label) for stage in pipeline.stages), default=0)
    columns = max(width - labels - BAR_WIDTH - 8, 10)
    stages = [
        Text.assemble(
            f"{stage.label:<{labels}} {busy:>4.0%} ",
            _bar(busy),
            " ",
            history.timeline(stage.stage, now, columns),
        )
        for stage, busy in zip(pipeline.stages, pipeline.busy, strict=True)
    ]
    return Group(name, numbers, waits, cached, *stages)


def _hit(pipeline: PipelineActivity) -> str:
    queries = pipeline.prefix_cache_queries
    return (
        f"{pipeline.prefix_cache_hits / queries:.0%} of prompt tokens hit"
        if queries
        else "no prompt yet"
    )


def _right(pipeline: PipelineActivity) -> str:
    drafts = pipeline.draft_tokens
    return f", {pipeline.accepted_tokens / drafts:.0%} of drafts right" if drafts else ""


def _recoveries(count: int) -> str:
    return "1 recovery" if count == 1 else f"{count} recoveries"


def _percentiles(seconds: Percentiles | None) -> str:
    return "-" if seconds is None else f"p50 {_format(seconds.p50)} p95 {_format(seconds.p95)}"


def _format(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _bar(share: float) -> Text:
    full = min(max(round(share * BAR_WIDTH), 0), BAR_WIDTH)
    style = next(style for limit, style in BAR_STYLES if share <= limit)
    return Text.assemble(("█" * full, style), ("·" * (BAR_WIDTH - full), "dim"))


def _experts(recent: LoadWindow, load: MeasuredLoad, width: int) -> Group:
    """Render the recent load, or after one sample the load since the stages were loaded."""
    tokens, when = (
        (recent.tokens, f"the last {recent.span_s:.0f} s")
        if recent.span_s
        else (load.tokens, "since loading")
    )
    title = Text(f"\n{when}: % of each layer's tokens by expert", style="bold")
    return Group(title, heat_map(tokens, width), Text(busiest_summary(tokens)), heat_legend())
