"""``tramontane config``: what flags and a file come to."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import typer

from tramontane.cluster.config.engine_config import SECRETS, ConfigFile, EngineConfig
from tramontane.cluster.console.options import (
    BATCHING,
    PIPELINE,
    RUN_OPTIONS,
    SERVING,
    explicit_options,
    load_config,
    with_options,
)

HIDDEN = "***"
COMMENTS_FROM = 44  # columns


@with_options(PIPELINE, BATCHING, RUN_OPTIONS, SERVING)
def config(context: typer.Context) -> None:
    """Print the configuration that these options, a --config file and the defaults come to; it is itself such a file."""
    with load_config(context) as settings:
        values = _redacted(settings)
    if settings.json_output:
        print(json.dumps(values))
        return
    for line in _lines(values, _sources(context)):
        print(line)


def _redacted(settings: EngineConfig) -> dict[str, Any]:
    """Every key but ``json``, which is not the configuration's but this command's. What may be secret is HIDDEN."""
    values = settings.model_dump(mode="json", by_alias=True, exclude={"json_output"})
    return values | {key: HIDDEN for key in (*SECRETS, "api_key") if values[key]}


def _sources(context: typer.Context) -> dict[str, str]:
    """Where a value is from that is no default."""
    path = context.params["config"]
    in_file = dict.fromkeys(ConfigFile.read(path).keys, str(path)) if path else {}
    flags = {name: f"--{name.replace('_', '-')}" for name in explicit_options(context) if context.params[name] != ()}
    return in_file | flags


def _lines(values: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[str]:
    """YAML. JSON's scalars and lists are YAML's, too."""
    for key, value in values.items():
        if value == HIDDEN:
            yield f"# {key} is given by {sources[key]} and not shown"
        else:
            yield f"{f'{key}: {json.dumps(value, ensure_ascii=False)}':<{COMMENTS_FROM}}  # {sources.get(key, 'default')}"
