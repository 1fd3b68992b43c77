"""``tramontane config``: the configuration from flags and a file, and the page that describes all
keys.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter

from tramontane.cluster.config.engine_config import GROUPS, SECRETS, ConfigFile, EngineConfig
from tramontane.cluster.config.key import extra
from tramontane.cluster.console.options import (
    FIELDS,
    default_text,
    explicit_options,
    flag,
    flags_of,
    load_config,
    with_options,
)
from tramontane.proto.units import format_bytes_flag

HIDDEN = "***"
SIZES = ("SIZE", "SIZES")  # metavars of keys that are numbers of bytes
FLAG, AS_CODE = re.compile(r"--[a-z]+(-[a-z]+)*( direct| dummy)?"), r"`\g<0>`"
COMMENTS_FROM = 44  # columns
INTRODUCTION = """# Configuration

<!-- Written by: tramontane config --markdown. Edit the descriptions in cluster/config/ instead. -->

Every option below is a key of one validated configuration. A value comes from the command line,
else from the YAML file of `--config FILE`, else from the default. In the file a key is written
without dashes in front:

```yaml
model: /models/Mixtral-8x7B-v0.1
stages: 4
max_num_seqs: 128
```

Unknown keys are refused. `tramontane config` takes the same options, and prints the resulting
configuration with the source of each value; its output is itself such a file. `plan` and `simulate`
read only those keys of a file that are options of theirs. A [Ray Serve config](deploy/ray-serve.md)
has the keys as `args`, except those marked "not in a Ray Serve config".

A switch such as `--local` has a second form, `--no-local`, which overrides a file that turns it on.

Keys without an option can only be set in a file. `tramontane COMMAND --help` lists the options of
each command; [Command line](cli.md) describes the options that are not keys.
"""


@with_options(*flags_of(*GROUPS))
def config(
    context: typer.Context,
    markdown: Annotated[
        bool,
        flag("--markdown", help="Print the page of the documentation that describes all keys."),
    ] = False,
) -> None:
    """Print the configuration that options, a --config file and the defaults result in; it is
    itself such a file.
    """
    if markdown:
        print(INTRODUCTION + "".join(_markdown()), end="")
        return
    with load_config(context) as settings:
        values = _redact(settings)
    if settings.json_output:
        print(json.dumps(values))
        return
    sizes = {
        name: _readable_size(values[name])
        for name, (field, _) in FIELDS.items()
        if extra(field)["metavar"] in SIZES
    }
    for line in _lines(values | sizes, _sources(context)):
        print(line)


def _readable_size(value: Any) -> Any:  # sizes in bytes: one, several or None
    """Return a size as options take it, 24GiB, or the number of bytes if that is not exact."""
    if not isinstance(value, int):
        return [_readable_size(each) for each in value] if value else value
    text = format_bytes_flag(value)
    return text if TypeAdapter(ByteSize).validate_python(text) == value else value


def _redact(settings: EngineConfig) -> dict[str, Any]:
    """Return every key but ``json``, which belongs to this command; values that may be secret are
    HIDDEN.
    """
    values = settings.model_dump(mode="json", by_alias=True, exclude={"json_output"})
    return values | {key: HIDDEN for key in (*SECRETS, "api_key") if values[key]}


def _sources(context: typer.Context) -> dict[str, str]:
    """Return the sources of the values that are not defaults."""
    path = context.params["config"]
    in_file = dict.fromkeys(ConfigFile.read(path).keys, str(path)) if path else {}
    given = {
        name: context.params[name]
        for name in explicit_options(context)
        if context.params[name] != ()
    }
    return in_file | {
        name: f"--{'no-' * (value is False)}{name.replace('_', '-')}"
        for name, value in given.items()
    }


def _lines(values: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[str]:
    """Yield YAML; JSON's scalars and lists are valid YAML."""
    for key, value in values.items():
        if value == HIDDEN:
            yield f"# {key} is given by {sources[key]} and not shown"
        else:
            yield (
                f"{f'{key}: {json.dumps(value, ensure_ascii=False)}':<{COMMENTS_FROM}}  #"
                f" {sources.get(key, 'default')}"
            )


def _markdown() -> Iterator[str]:
    """Yield a table for each group of keys."""
    for group in GROUPS:
        yield f"\n## {group.title}\n\n| option | key | default | meaning |\n|---|---|---|---|\n"
        for name, field in group.model_fields.items():
            words, key = extra(field), field.alias or name
            option = f"--{key.replace('_', '-')}" if words["has_flag"] else "none"
            default = default_text(field) or "off"
            if not words["unset"] and default not in ("on", "off"):
                default = f"`{default}`"
            note = "" if words["in_serve_config"] else " Not in a Ray Serve config."
            note += "".join(f" Also `{other}`." for other in words["other_names"])
            note += "".join(f" Until 0.4 also `{former}`." for former in words["former_names"])
            cells = (option, f"`{key}`", default, f"{field.description}{note}")
            yield f"| {' | '.join(FLAG.sub(AS_CODE, cell) for cell in cells)} |\n"
