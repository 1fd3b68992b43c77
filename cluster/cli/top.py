"""``tramontane top``."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tramontane.cluster.console.client_key import Key, KeyFile, key_headers
from tramontane.cluster.console.options import flag, option
from tramontane.proto.errors import ConfigError, NotRunningError

if TYPE_CHECKING:
    import httpx

    from tramontane.cluster.config.expert_load import MeasuredLoad
    from tramontane.cluster.console.server_client import Look


def top(
    url: Annotated[str, option("--url", help="A server that tramontane serve started.")] = "http://127.0.0.1:8000",
    once: Annotated[bool, flag("--once", help="Look once.")] = False,
    as_json: Annotated[bool, flag("--json", help="Every look as a line of JSON, as GET /activity answers.")] = False,
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """Show what the pipelines of a running server do, until interrupted."""
    from tramontane.cluster.cli import expert_watch  # bring an HTTP client
    from tramontane.cluster.cli.top_view import frames
    from tramontane.cluster.console import server_client as activity_client

    console = Console(highlight=False)
    with expert_watch.client_of(url, key_headers(key, key_file)) as client:
        looks = islice(activity_client.looks(client), 1 if once else None)
        if not once:
            for number in (signal.SIGTERM, signal.SIGHUP):  # which would leave the terminal without a cursor
                signal.signal(number, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            if as_json:
                _print_lines(looks)
            else:
                _show(frames(looks, str(client.base_url), console.width, _experts_of(client)), console, once)


def _print_lines(looks: "Iterable[Look]") -> None:
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


def _experts_of(client: "httpx.Client") -> "Callable[[], MeasuredLoad | None]":
    """Asks for their load; None where it is not told, and from then on where there are none."""
    from tramontane.cluster.cli.expert_watch import NoExpertsError, ask_load

    are_there = True

    def ask() -> "MeasuredLoad | None":
        nonlocal are_there
        try:
            return ask_load(client) if are_there else None
        except NoExpertsError:
            are_there = False
        except (ConfigError, NotRunningError):
            pass
        return None

    return ask
