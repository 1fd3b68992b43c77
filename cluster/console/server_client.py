"""Requests of commands to a running server: its URL, the API key, and the activity of its
pipelines.
"""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import httpx

from tramontane.cluster.config.api_keys import (
    KEY,
    VARIABLE,
    environment_keys,
    read_key_file,
)
from tramontane.cluster.console.options import option
from tramontane.proto.errors import ConfigError, ConnectionLostError, PipelineUnavailableError
from tramontane.proto.timing import CLIENT_TIMEOUT_S
from tramontane.router.engine.activity_log import Activity

POLL_INTERVAL_S = 1.0
NO_NUMBERS: Mapping[str, int] = MappingProxyType({})

SERVER = "Running server"  # title of a group of options
Snapshot = Activity | str  # or the reason for its absence
Key = Annotated[
    str | None,
    option(
        "--api-key",
        help="API key to send. Other users of the machine may see it here; a file is safer."
        f" Default: the first one in {VARIABLE}.",
        panel=SERVER,
    ),
]
KeyFile = Annotated[
    Path | None, option("--api-key-file", help="File whose first API key is sent.", panel=SERVER)
]
Url = Annotated[str, option("--url", help="A server that tramontane serve started.", panel=SERVER)]
DEFAULT_URL = "http://127.0.0.1:8000"


def base_url(url: str) -> httpx.URL:
    """Return the URL without the /v1 that OpenAI's clients have at the end. Raises ConfigError."""
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"--url is {url!r}; it must begin with http:// or https://")
    try:
        return httpx.URL(base)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url is {url!r}: {error}") from error


def auth_headers(key: str | None, file: Path | None) -> dict[str, str]:
    """Return the headers of every request; empty without a key, also in the environment. Raises
    ConfigError, which does not repeat the key.
    """
    if key is not None and file is not None:
        raise ConfigError("--api-key and --api-key-file both give the key; use one of them")
    if file is not None:
        key = read_key_file(file)[0]
    elif key is None and (keys := environment_keys(os.environ)):
        key = keys[0].get_secret_value()
    if key is not None and not KEY.fullmatch(key):
        raise ConfigError("--api-key must be printable ASCII without spaces")
    return {} if key is None else {"authorization": f"Bearer {key}"}


def make_client(url: str, headers: Mapping[str, str]) -> httpx.Client:
    """Return a client of the server. Raises ConfigError as ``base_url`` does."""
    return httpx.Client(base_url=base_url(url), headers=dict(headers), timeout=CLIENT_TIMEOUT_S)


# httpx's own
def request(client: httpx.Client, method: str, path: str, **options: Any) -> httpx.Response:
    """Send a request. Raises the error of ``no_answer`` if the server does not answer, ConfigError
    if it requires another key.
    """
    try:
        answer = client.request(method, path, **options)
    except httpx.HTTPError as error:
        raise no_answer(client, error) from error
    raise_if_unauthorized(client, answer)
    return answer


def no_answer(
    client: httpx.Client | httpx.AsyncClient, error: Exception
) -> ConfigError | ConnectionLostError:
    """Return the error for a server that did not answer: ConfigError for a port that is certainly
    wrong.
    """
    message = f"--url {client.base_url} does not answer: {str(error) or type(error).__name__}"
    if is_other_protocol(error):
        return ConfigError(
            f"{message}; the port does not speak HTTP/1: give the --port of tramontane serve, not"
            " its --grpc-port"
        )
    if isinstance(error, httpx.ConnectError):
        message += "; is tramontane serve running there?"
    return ConnectionLostError(message)


def is_other_protocol(error: Exception) -> bool:
    """Return True if the server sent data that is not HTTP/1, as a gRPC port does; False if it
    closed the connection.
    """
    return isinstance(error, httpx.RemoteProtocolError) and "illegal" in str(error)


def raise_if_unauthorized(client: httpx.Client | httpx.AsyncClient, answer: httpx.Response) -> None:
    """Raise ConfigError if the server requires an API key, or another one."""
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        was_sent = "authorization" in answer.request.headers
        reason = "requires another API key than this" if was_sent else "requires an API key"
        raise ConfigError(
            f"--url {client.base_url} {reason}; give --api-key-file or --api-key, or set {VARIABLE}"
        )


def ask_activity(client: httpx.Client, after: Mapping[str, int] = NO_NUMBERS) -> Activity:
    """Return the pipelines' activity since ``after``, which has the number of the last known
    micro-batch of each pipeline.

    Raises the errors of ``request``, ConfigError if it is another server, PipelineUnavailableError
    if it cannot answer now.
    """
    answer = request(
        client,
        "GET",
        "/activity",
        params=[("after", f"{name}:{last}") for name, last in after.items()],
    )
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        raise PipelineUnavailableError(
            f"--url {client.base_url} answers GET /activity with HTTP 503; try again soon"
        )
    try:
        if answer.status_code == httpx.codes.OK:
            activity = Activity.model_validate_json(answer.content)
            if all(len(pipeline.busy) == len(pipeline.stages) for pipeline in activity.pipelines):
                return activity
    except ValueError as error:
        raise _no_activity(client, answer) from error
    raise _no_activity(client, answer)


def _no_activity(client: httpx.Client, answer: httpx.Response) -> ConfigError:
    return ConfigError(
        f"--url {client.base_url} answers GET /activity with HTTP {answer.status_code} and no"
        " activity; is it Tramontane, and of this version?"
    )


def last_seen(activity: Activity) -> dict[str, int]:
    """Return the numbers of the last micro-batches, for the next ``ask_activity``."""
    return {pipeline.name: pipeline.last for pipeline in activity.pipelines}


def poll_activity(client: httpx.Client) -> Iterator[Snapshot]:
    """Yield new activity once a second. Errors of the first request are raised, later ones yielded:
    the server may restart.
    """
    activity = ask_activity(client)
    yield activity
    while True:
        time.sleep(POLL_INTERVAL_S)
        try:
            activity = ask_activity(client, last_seen(activity))
        except (ConfigError, ConnectionLostError, PipelineUnavailableError) as error:
            yield str(error)
        else:
            yield activity
