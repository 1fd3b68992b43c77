"""What ``tramontane top`` and ``tramontane trace`` ask a server: what its pipelines have done since they last asked.

The key that commands show to a server that wants one.

Where a server is, as ``--url`` says, and whether it lets us in.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import httpx

from tramontane.cluster.config.api_keys import KEY, read_key_file
from tramontane.cluster.console.options import option
from tramontane.proto.errors import ConfigError, PipelineUnavailableError
from tramontane.router.engine.activity_log import Activity

PATIENCE_S = 20.0  # an ingress waits for its routers for five


def base_url(url: str) -> httpx.URL:
    """With or without the /v1 that OpenAI's clients want at the end. Raises ConfigError."""
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"--url is {url!r}; it must begin with http:// or https://")
    try:
        return httpx.URL(base)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url is {url!r}: {error}") from error


def make_client(url: str, headers: Mapping[str, str]) -> httpx.Client:
    """Raises ConfigError as ``base_url`` does."""
    return httpx.Client(base_url=base_url(url), headers=dict(headers), timeout=PATIENCE_S)


def request(client: httpx.Client, method: str, path: str, **options: Any) -> httpx.Response:  # noqa: ANN401 - httpx's own
    """Of a server that is there and lets us in, whatever it answers. Raises ConfigError."""
    try:
        answer = client.request(method, path, **options)
    except httpx.HTTPError as error:
        raise ConfigError(f"--url {client.base_url} does not answer: {str(error) or type(error).__name__}") from error
    raise_if_unauthorized(client, answer)
    return answer


def raise_if_unauthorized(client: httpx.Client | httpx.AsyncClient, answer: httpx.Response) -> None:
    """Raises ConfigError if the server wants another key, or one at all."""
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        was_sent = "authorization" in answer.request.headers
        wish = "wants another API key than this" if was_sent else "wants an API key"
        raise ConfigError(f"--url {client.base_url} {wish}; give --api-key-file or --api-key")


LOOK_EVERY_S = 1.0
NOTHING: Mapping[str, int] = MappingProxyType({})

Snapshot = Activity | str  # or why there is none


def ask_activity(client: httpx.Client, after: Mapping[str, int] = NOTHING) -> Activity:
    """``after``: by pipeline, the number of the last micro-batch that is known.

    Raises ConfigError where no server of ours answers, PipelineUnavailableError where it does not want to now.
    """
    answer = request(client, "GET", "/activity", params=[("after", f"{name}:{last}") for name, last in after.items()])
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        raise PipelineUnavailableError(f"--url {client.base_url} answers GET /activity with HTTP 503; try again soon")
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
        f"--url {client.base_url} answers GET /activity with HTTP {answer.status_code} and no activity; "
        "is it Tramontane, and of this version?"
    )


def last_seen(activity: Activity) -> dict[str, int]:
    """To ask for what follows it."""
    return {pipeline.name: pipeline.last for pipeline in activity.pipelines}


def poll_activity(client: httpx.Client) -> Iterator[Snapshot]:
    """One a second, each with what is new. What is wrong with the first is raised; a server may come back, or be another one."""
    activity = ask_activity(client)
    yield activity
    while True:
        time.sleep(LOOK_EVERY_S)
        try:
            activity = ask_activity(client, last_seen(activity))
        except (ConfigError, PipelineUnavailableError) as error:
            yield str(error)
        else:
            yield activity


Key = Annotated[str | None, option("--api-key", help="For a server that wants one. Others may see it here; better in a file.")]
KeyFile = Annotated[Path | None, option("--api-key-file", help="For a server that wants a key: the first of this file.")]


def auth_headers(key: str | None, file: Path | None) -> dict[str, str]:
    """For every request; none where there is no key. Raises ConfigError, which does not repeat it."""
    if key is not None and file is not None:
        raise ConfigError("--api-key and --api-key-file both say the key; give one of them")
    if file is not None:
        key = read_key_file(file)[0]
    if key is not None and not KEY.fullmatch(key):
        raise ConfigError("--api-key must be printable ASCII without spaces")
    return {} if key is None else {"authorization": f"Bearer {key}"}
