"""``tramontane top``.

The pictures of ``tramontane top``.
"""

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Annotated

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tramontane.cluster.cli.experts import LoadWindow, NoExpertsError, fetch_load
from tramontane.cluster.config.expert_load import MeasuredLoad
from tramontane.cluster.console.heat_map import busiest_summary, heat_map
from tramontane.cluster.console.heat_map import legend as heat_legend
from tramontane.cluster.console.options import flag, option
from tramontane.cluster.console.server_client import Key, KeyFile, Snapshot, auth_headers, make_client, poll_activity
from tramontane.cluster.console.timeline import bin_activity, legend, render_timeline
from tramontane.proto.errors import ConfigError, PipelineUnavailableError
from tramontane.router.engine.activity_log import Activity, MicroBatchModel, Percentiles, PipelineActivity


def top(
    url: Annotated[str, option("--url", help="A server that tramontane serve started.")] = "http://127.0.0.1:8000",
    once: Annotated[bool, flag("--once", help="Look once.")] = False,
    as_json: Annotated[bool, flag("--json", help="Every look as a line of JSON, as GET /activity answers.")] = False,
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """Show what the pipelines of a running server do, until interrupted."""
    console = Console(highlight=False)
    with make_client(url, auth_headers(key, key_file)) as client:
        looks = islice(poll_activity(client), 1 if once else None)
        if not once:
            for number in (signal.SIGTERM, signal.SIGHUP):  # which would leave the terminal without a cursor
                signal.signal(number, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            if as_json:
                _print_lines(looks)
            else:
                _show(render(looks, str(client.base_url), console.width, _experts_of(client)), console, once)


def _print_lines(looks: Iterable[Snapshot]) -> None:
    for look in looks:
        if isinstance(look, str):
            Console(stderr=True, highlight=False).print(f"note: {look}", markup=False, soft_wrap=True)
        else:
            print(look.model_dump_json(), flush=True)


def _show(shown: Iterator[Group], console: Console, once: bool) -> None:
    """In a terminal each frame takes the place of the one before; what does not fit is cut off."""
    if once or not console.is_terminal:
        for frame in shown:
            console.print(frame, Text())
        return
    with Live(console=console, auto_refresh=False) as live:
        for frame in shown:
            live.update(frame, refresh=True)


def _experts_of(client: httpx.Client) -> Callable[[], MeasuredLoad | None]:
    """Asks for their load; None where it is not told, and from then on where there are none."""
    are_there = True

    def ask() -> MeasuredLoad | None:
        nonlocal are_there
        try:
            return fetch_load(client) if are_there else None
        except NoExpertsError:
            are_there = False
        except (ConfigError, PipelineUnavailableError):
            pass
        return None

    return ask


SPAN_S = 10.0  # of the timelines, as of the shares
BAR = 10  # characters
BUSY = ((0.5, "blue"), (0.8, "green"), (float("inf"), "bold green"))  # up to such a share a bar looks so

AskLoad = Callable[[], MeasuredLoad | None]


class History:
    """The micro-batches of one pipeline that the timelines show."""

    def __init__(self) -> None:
        self._batches: deque[MicroBatchModel] = deque()

    def add(self, pipeline: PipelineActivity, now: float) -> None:
        """Those that have come since; they are in the order in which they came back. A log that begins anew is another one."""
        new = pipeline.micro_batches
        if new and self._batches and new[0].number <= self._batches[-1].number:
            self._batches.clear()
        self._batches.extend(new)
        while self._batches and all(at + elapsed_s < now - SPAN_S for _, at, _, elapsed_s in self._batches[0].stages):
            self._batches.popleft()

    def timeline(self, stage: int, now: float, width: int) -> Text:
        """Columns begin at the same times at every look, so that what has been drawn only moves."""
        column_s = SPAN_S / width
        began_at = now // column_s * column_s - SPAN_S
        return render_timeline(bin_activity(self._batches, stage, began_at, column_s, width), column_s)


def render(looks: Iterable[Snapshot], url: str, width: int, ask_load: AskLoad) -> Iterator[Group]:
    """For each look what there is to see. ``fetch_load``: of the experts, where there are any."""
    histories: dict[str, History] = {}
    recent, shown = LoadWindow(), Group()
    for look in looks:
        if isinstance(look, str):
            yield Group(Text(f"{look}; this is what was told before", style="bold red"), shown)
            continue
        known, histories = histories, {pipeline.name: History() for pipeline in look.pipelines}
        histories |= {name: known[name] for name in histories.keys() & known.keys()}
        for pipeline in look.pipelines:
            histories[pipeline.name].add(pipeline, look.now)
        shown = Group(_head(look, url), *(_pipeline(p, histories[p.name], look.now, width) for p in look.pipelines))
        if (load := ask_load()) is not None:
            recent.add(look.now, load)
            shown = Group(shown, _experts(recent, load, width))
        yield shown


def _head(look: Activity, url: str) -> Text:
    num = len(look.pipelines)
    what = "no pipeline runs now" if not num else f"{num} pipelines" if num > 1 else "1 pipeline"
    return Text.assemble((f"{url}: {what}", "bold"), f"\nthe last {SPAN_S:.0f} s: ", legend())


def _pipeline(pipeline: PipelineActivity, history: History, now: float, width: int) -> Group:
    name = Text.assemble("\n", (pipeline.name, "bold"))
    numbers = Text(
        f"{pipeline.tokens_per_s:.0f} new tokens/s, {pipeline.running} running, {pipeline.waiting} waiting, "
        f"{pipeline.pages_held} of {pipeline.pages} pages, {_counted(pipeline.recoveries)}"
    )
    waits = Text(f"first token {_percentiles(pipeline.first_token_s)}, between tokens {_percentiles(pipeline.inter_token_s)}")
    labels = max((len(stage.label) for stage in pipeline.stages), default=0)
    room = max(width - labels - BAR - 8, 10)
    stages = [
        Text.assemble(f"{stage.label:<{labels}} {busy:>4.0%} ", _bar(busy), " ", history.timeline(stage.stage, now, room))
        for stage, busy in zip(pipeline.stages, pipeline.busy, strict=True)
    ]
    return Group(name, numbers, waits, *stages)


def _counted(recoveries: int) -> str:
    return "1 recovery" if recoveries == 1 else f"{recoveries} recoveries"


def _percentiles(waits: Percentiles | None) -> str:
    return "-" if waits is None else f"p50 {_short(waits.p50)} p95 {_short(waits.p95)}"


def _short(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _bar(share: float) -> Text:
    full = min(max(round(share * BAR), 0), BAR)
    return Text.assemble(("█" * full, next(style for limit, style in BUSY if share <= limit)), ("·" * (BAR - full), "dim"))


def _experts(recent: LoadWindow, load: MeasuredLoad, width: int) -> Group:
    """What was given of late, or since the stages were loaded as long as there is only one look."""
    tokens, when = (recent.tokens, f"the last {recent.span_s:.0f} s") if recent.span_s else (load.tokens, "since loading")
    title = Text(f"\n{when}: % of each layer's tokens that each expert was given", style="bold")
    return Group(title, heat_map(tokens, width), Text(busiest_summary(tokens)), heat_legend())
