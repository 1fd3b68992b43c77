"""``tramontane experts``."""

import json
import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from rich.console import Console

from tramontane.cluster.config.expert_load import load_as_data, read_load
from tramontane.cluster.console.client_key import Key, KeyFile, key_headers
from tramontane.cluster.console.options import flag, option
from tramontane.proto.errors import ConfigError


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
    from tramontane.cluster.cli import expert_watch  # brings an HTTP client

    if adopt is not None and (watch or as_json):
        raise ConfigError("--adopt changes the server, so --watch and --json cannot be used with it")
    if watch and as_json:
        raise ConfigError("--watch is for the eye, so --json cannot be used with it")
    console = Console(highlight=False)
    with expert_watch.client_of(url, key_headers(key, key_file)) as client:
        if adopt is not None:
            console.print(expert_watch.adopt(client, read_load(adopt, "--adopt")))
            return
        if not watch:
            load = expert_watch.ask_load(client)
            if as_json:
                print(json.dumps(load_as_data(load.tokens)))
            else:
                console.print(expert_watch.totals(load, console.width))
            return
        for number in (signal.SIGTERM, signal.SIGHUP):  # which would leave the terminal without a cursor
            signal.signal(number, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            expert_watch.watch(client, console)
