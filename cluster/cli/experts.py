"""``tramontane experts``.

``tramontane experts``: a server's expert load, asked and shown.
"""

import json
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tramontane.cluster.config.expert_load import NO_EXPERTS, ExpertLoad, MeasuredLoad, load_as_data, read_load
from tramontane.cluster.console.heat_map import BUSIEST, busiest_summary, heat_map, legend
from tramontane.cluster.console.options import flag, option
from tramontane.cluster.console.server_client import Key, KeyFile, auth_headers, make_client, request
from tramontane.proto.errors import ConfigError, PipelineUnavailableError


def experts(
    url: Annotated[str, option("--url", help="A server that tramontane serve started.")] = "http://127.0.0.1:8000",
    watch: Annotated[bool, flag("--watch", help="Look again every second, until interrupted.")] = False,
    as_json: Annotated[bool, flag("--json", help="Print what --expert-load takes.")] = False,
    adopt: Annotated[
        Path | None, option("--adopt", help="Have the server spread its experts by this measured load, while it runs.")
    ] = None,
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """Show how the tokens of a running server are spread over its experts."""
    if adopt is not None and (watch or as_json):
        raise ConfigError("--adopt changes the server, so --watch and --json cannot be used with it")
    if watch and as_json:
        raise ConfigError("--watch is for the eye, so --json cannot be used with it")
    console = Console(highlight=False)
    with make_client(url, auth_headers(key, key_file)) as client:
        if adopt is not None:
            console.print(post_load(client, read_load(adopt, "--adopt")))
            return
        if not watch:
            load = fetch_load(client)
            if as_json:
                print(json.dumps(load_as_data(load.tokens)))
            else:
                console.print(totals(load, console.width))
            return
        for number in (signal.SIGTERM, signal.SIGHUP):  # which would leave the terminal without a cursor
            signal.signal(number, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            watch_load(client, console)


LOOK_EVERY_S = 1.0
SPAN_S = 10.0  # of what is called recent
WHAT = f"% of each layer's tokens, {BUSIEST} its busiest"

Look = tuple[float, MeasuredLoad | None]  # at so many seconds of a clock; None: no pipeline could tell


class NoExpertsError(ConfigError):
    """The server's model has none."""


def fetch_load(client: httpx.Client) -> MeasuredLoad:
    """Raises ConfigError where no server of ours answers, NoExpertsError where its model has none, PipelineUnavailableError
    while none can tell.
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
    """What the server says that it did. Raises ConfigError where it will not or cannot."""
    answer = request(client, "POST", "/experts", json=load_as_data(load), timeout=None)  # as long as loading takes
    if answer.status_code == httpx.codes.METHOD_NOT_ALLOWED:
        raise ConfigError(f"--url {client.base_url} does not let clients move experts; start it with --move-experts")
    try:
        data = answer.json()
        if answer.status_code == httpx.codes.OK:
            return f"{data['moved']} experts were loaded where they were not before, in {data['pipelines']} pipeline(s)"
        message = str(data["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise _no_tramontane(client, answer) from error
    raise ConfigError(f"--url {client.base_url}: {message}")


def _no_tramontane(client: httpx.Client, answer: httpx.Response) -> ConfigError:
    return ConfigError(
        f"--url {client.base_url} answers GET /experts with HTTP {answer.status_code} and no load of experts; is it Tramontane?"
    )


@dataclass
class LoadWindow:
    """What was added within the last ``SPAN_S``, from totals that only grow: where one does not, a stage was loaded anew."""

    _looks: deque[tuple[float, MeasuredLoad]] = field(default_factory=deque)

    def add(self, at_s: float, load: MeasuredLoad) -> None:
        if self._looks and not _follows(load, self._looks[-1][1]):
            self._looks.clear()
        self._looks.append((at_s, load))
        while at_s - self._looks[0][0] > SPAN_S:
            self._looks.popleft()

    @property
    def span_s(self) -> float:
        return self._looks[-1][0] - self._looks[0][0]

    @property
    def tokens(self) -> ExpertLoad:
        """That were given to each expert within ``span_s``."""
        first, last = self._looks[0][1].tokens, self._looks[-1][1].tokens
        return tuple(tuple(b - a for a, b in zip(*rows, strict=True)) for rows in zip(first, last, strict=True))


def _follows(new: MeasuredLoad, old: MeasuredLoad) -> bool:
    if new.num_pipelines != old.num_pipelines or list(map(len, new.tokens)) != list(map(len, old.tokens)):
        return False
    return all(a <= b for rows in zip(old.tokens, new.tokens, strict=True) for a, b in zip(*rows, strict=True))


def totals(load: MeasuredLoad, width: int) -> Group:
    """All since the stages were loaded."""
    pipelines = f"{load.num_pipelines} pipelines" if load.num_pipelines > 1 else "1 pipeline"
    title = f"since loading, {pipelines}: {WHAT}"
    return Group(_title(title), heat_map(load.tokens, width), Text(busiest_summary(load.tokens)), legend())


def render(poll: Iterable[Look], width: int) -> Iterator[Group]:
    """For each look, what was added recently, and below it the totals."""
    recent, shown = LoadWindow(), Group()
    for at_s, load in poll:
        if load is None:
            yield Group(_title("no pipeline can tell its load now; this is what was told before"), shown)
            continue
        recent.add(at_s, load)
        title = f"the last {recent.span_s:.0f} s: {WHAT}"
        added = [_title(title), heat_map(recent.tokens, width), Text(busiest_summary(recent.tokens))]
        shown = Group(*added, Text(), totals(load, width))
        yield shown


def watch_load(client: httpx.Client, console: Console) -> None:
    """Until it is interrupted. In a terminal each frame takes the place of the one before; what does not fit is cut off."""
    shown = render(_looks(client), console.width)
    if not console.is_terminal:
        for frame in shown:
            console.print(frame, Text())
    with Live(console=console, auto_refresh=False) as live:
        for frame in shown:
            live.update(frame, refresh=True)


def _looks(client: httpx.Client) -> Iterator[Look]:
    while True:
        try:
            load = fetch_load(client)
        except PipelineUnavailableError:
            load = None
        yield time.monotonic(), load
        time.sleep(LOOK_EVERY_S)


def _title(title: str) -> Text:
    return Text(title, style="bold")
