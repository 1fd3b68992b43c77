"""What ``tramontane top`` and ``tramontane trace`` ask a server: what its pipelines have done since they last asked."""

import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import httpx

from tramontane.cluster.console.server_url import answer_of
from tramontane.proto.errors import ConfigError, NotRunningError
from tramontane.router.engine.activity_schema import Activity

LOOK_EVERY_S = 1.0
NOTHING: Mapping[str, int] = MappingProxyType({})

Look = Activity | str  # or why there is none


def ask_activity(client: httpx.Client, after: Mapping[str, int] = NOTHING) -> Activity:
    """``after``: by pipeline, the number of the last micro-batch that is known.

    Raises ConfigError where no server of ours answers, NotRunningError where it does not want to now.
    """
    answer = answer_of(client, "GET", "/activity", params=[("after", f"{name}:{last}") for name, last in after.items()])
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        raise NotRunningError(f"--url {client.base_url} answers GET /activity with HTTP 503; try again soon")
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


def known_of(activity: Activity) -> dict[str, int]:
    """To ask for what follows it."""
    return {pipeline.name: pipeline.last for pipeline in activity.pipelines}


def looks(client: httpx.Client) -> Iterator[Look]:
    """One a second, each with what is new. What is wrong with the first is raised; a server may come back, or be another one."""
    activity = ask_activity(client)
    yield activity
    while True:
        time.sleep(LOOK_EVERY_S)
        try:
            activity = ask_activity(client, known_of(activity))
        except (ConfigError, NotRunningError) as error:
            yield str(error)
        else:
            yield activity
