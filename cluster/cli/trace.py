"""``tramontane trace``."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from tramontane.cluster.console.client_key import Key, KeyFile, key_headers
from tramontane.cluster.console.options import option
from tramontane.proto.errors import ConfigError, NotRunningError

if TYPE_CHECKING:
    import httpx

    from tramontane.router.engine.activity_schema import Activity

MAX_SECONDS = 3600.0
ASK_EVERY_S = 0.5  # a server tells of 1000 micro-batches at once
HEAD = '{"otherData": {"writer": "tramontane trace"'  # what a trace begins with


def trace(
    output: Annotated[Path, option("-o", "--output", help="The file to write. One that is no trace of ours is left alone.")],
    seconds: Annotated[float, option("--seconds", help="How long to watch.")] = 5.0,
    url: Annotated[str, option("--url", help="A server that tramontane serve started.")] = "http://127.0.0.1:8000",
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """Write what the stages of a running server do for some seconds, as a trace for Perfetto."""
    from tramontane.cluster.cli.expert_watch import client_of  # brings an HTTP client
    from tramontane.cluster.cli.trace_file import num_slices, trace_data

    if not 0 < seconds <= MAX_SECONDS:
        raise ConfigError(f"--seconds is {seconds:g}; it must be more than 0 and at most {MAX_SECONDS:g}")
    _check_file(output)
    status = Console(stderr=True, highlight=False).status(f"watching for {seconds:g} s")
    with client_of(url, key_headers(key, key_file)) as client, status:
        data = trace_data(list(_looks(client, seconds)))
    if not num_slices(data):
        raise NotRunningError(f"nothing ran in these {seconds:g} s, so {output} was not written; trace while requests run")
    _write(output, data)
    print(f"{num_slices(data)} slices in {output}; open it at https://ui.perfetto.dev")


def _looks(client: "httpx.Client", seconds: float) -> "Iterator[Activity]":
    """From the beginning to the first that is after the end, by the server's clock."""
    from tramontane.cluster.console.server_client import ask_activity, known_of

    look = ask_activity(client)
    ends_at = look.now + seconds
    yield look
    while look.now < ends_at:
        time.sleep(min(ASK_EVERY_S, ends_at - look.now))
        look = ask_activity(client, known_of(look))
        yield look


def _check_file(output: Path) -> None:
    """Before anything is watched. Raises ConfigError."""
    if not output.parent.is_dir():
        raise ConfigError(f"-o {output}: there is no folder {output.parent}")
    try:
        if output.exists() and not _begins_a_trace(output):
            raise ConfigError(f"{output} was not written by this command; choose another -o")
    except OSError as error:
        raise ConfigError(f"-o {output} cannot be read: {error.strerror}") from error


def _begins_a_trace(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(HEAD)) == HEAD.encode()


def _write(output: Path, data: dict[str, Any]) -> None:
    try:
        output.write_text(json.dumps(data), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"-o {output} cannot be written: {error.strerror}") from error
