"""Command line options, made from the keys of the configuration, and the configuration from these
and ``--config``.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import EnumType
from functools import wraps
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from tramontane.cluster.config.engine_config import GROUPS, ConfigFile, EngineConfig
from tramontane.cluster.config.key import extra
from tramontane.proto.errors import UserError
from tramontane.proto.units import format_bytes_flag

# flags of other types take text, which EngineConfig parses
FLAG_TYPES = (bool, int, float, Path)
REPEATED = {"api_key"}
AS_TEXT = {"max_model_len", "max_num_batched_tokens"}  # numbers such as 32k


def option(*names: str, help: str, panel: str | None = None, **details: Any) -> Any:
    """Return an option of a single command. ``panel``: the title above it in ``--help``."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **details)


def flag(name: str, help: str, panel: str | None = None) -> Any:
    """Return an option without a value; typer's help would otherwise show one: ``--json
    <bool>``.
    """
    return typer.Option(name, help=help, rich_help_panel=panel, metavar="")


SAMPLING = "Sampling"  # title of a group of options
Config = Annotated[
    Path | None,
    option("--config", help="YAML file of these options, without the dashes: max_num_seqs: 32."),
]
Json = Annotated[bool, flag("--json", help="Write machine-readable output to standard output.")]
Temperature = Annotated[
    float,
    option(
        "--temperature",
        help="Sampling temperature. 0 is greedy. Over HTTP the default is 1.",
        panel=SAMPLING,
    ),
]
TopP = Annotated[
    float,
    option(
        "--top-p", help="Keep the likeliest tokens up to this much probability.", panel=SAMPLING
    ),
]
TopK = Annotated[
    int,
    option(
        "--top-k", help="Keep this many of the likeliest tokens. 0 and -1 keep all.", panel=SAMPLING
    ),
]

FIELDS = {
    field.alias or name: (field, group.title)
    for group in GROUPS
    for name, field in group.model_fields.items()
}
Command = Callable[..., None]
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


def flags_of(*groups: type[BaseModel]) -> tuple[str, ...]:
    """Return the keys of the groups that have a flag."""
    fields = [
        (field.alias or name, field)
        for group in groups
        for name, field in group.model_fields.items()
    ]
    return tuple(name for name, field in fields if extra(field)["has_flag"])


def default_text(field: FieldInfo) -> str:
    """Return a description of a key's default; empty for a switch that is off."""
    if extra(field)["unset"]:
        return str(extra(field)["unset"])
    default = field.default
    if isinstance(default, ByteSize):
        return format_bytes_flag(default)
    if isinstance(default, bool):
        return "on" if default else ""
    return f"{default:g}" if isinstance(default, float) else str(default)


def key_option(name: str, help: str | None = None, **details: Any) -> Any:
    """Return the option of a key, for commands whose option has another help, default or range than
    the key.
    """
    field, title = FIELDS[name]
    words, default = field.description, default_text(field)
    if help is None:
        help = f"{words} Default: {default}." if default else words
    flag_name, metavar = f"--{name.replace('_', '-')}", extra(field)["metavar"] or _choices(name)
    if _flag_type(name) is bool:  # the second form overrides a file
        flag_name, metavar = f"{flag_name}/--no-{flag_name.removeprefix('--')}", ""
    return typer.Option(flag_name, help=help, metavar=metavar, rich_help_panel=title, **details)


def with_options(
    *keys: str, config: Any = Config, others: Mapping[str, Any] = NO_OPTIONS
) -> Callable[[Command], Command]:
    """Give a command the options of these keys and ``--config``, next to its own; options that are
    not given are None. ``others``: annotations of further options, by parameter.

    The command does not declare them: ``load_config`` finds them in the context. An option that it
    does declare is its own.
    """

    def decorate(command: Command) -> Command:
        own = inspect.signature(command).parameters
        kinds = {name: Annotated[_flag_type(name) | None, key_option(name)] for name in keys} | {
            "config": config,
            **others,
        }
        added = {name: kind for name, kind in kinds.items() if name not in own}
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter(name, keyword, default=None, annotation=kind)
            for name, kind in added.items()
        ]

        @wraps(command)
        def run(**values: Any) -> None:
            command(**{name: value for name, value in values.items() if name in own})

        run.__annotations__ = command.__annotations__ | added  # typer reads both
        vars(run)["__signature__"] = inspect.Signature([*own.values(), *parameters])
        return run

    return decorate


def _flag_type(name: str) -> Any:  # a type, or list[str]
    if name in REPEATED:
        return list[str]
    if name in AS_TEXT:
        return str
    kinds = _plain_types(FIELDS[name][0].annotation)
    return next((kind for kind in FLAG_TYPES if kinds == {kind}), str)


def _choices(name: str) -> str | None:
    """Return ``<text|json>`` for a key with a fixed set of words."""
    kind = next(iter(_plain_types(FIELDS[name][0].annotation)))
    words = (
        list(kind)
        if isinstance(kind, EnumType)
        else get_args(kind)
        if get_origin(kind) is Literal
        else ()
    )
    return f"<{'|'.join(words)}>" if words else None


def _plain_types(annotation: Any) -> set[Any]:
    """Return the members of a union, without None and without annotations: ``PositiveInt | None``
    is int.
    """
    if get_origin(annotation) is Annotated:
        return _plain_types(get_args(annotation)[0])
    if get_origin(annotation) in (None, Literal, tuple):
        return {annotation} - {NoneType}
    return set().union(*map(_plain_types, get_args(annotation)))


def _as_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Use the file's keys that are options of this command as the defaults of these options."""
    if path is not None:
        keys = {
            key: value for key, value in ConfigFile.read(path).keys.items() if value is not None
        }
        names = {parameter.name for parameter in context.command.params}
        context.default_map = {key: _as_text(value) for key, value in keys.items() if key in names}
    return path


def _as_text(value: object) -> str:
    """Return the text of a key's flag: ``24GiB,80GiB``, or JSON for a list of lists or of
    dictionaries.
    """
    if not isinstance(value, list):
        return str(value)
    return (
        json.dumps(value)
        if any(isinstance(each, list | dict) for each in value)
        else ",".join(map(str, value))
    )


# For commands that plan or model something, and have only some keys as options.
ConfigDefaults = Annotated[
    Path | None,
    option(
        "--config",
        is_eager=True,
        callback=_as_defaults,
        help="YAML file; those of its keys count that are options here.",
    ),
]


def is_from_file(context: typer.Context, name: str) -> bool:
    """Return True if an option has its value from the file of ``ConfigDefaults``, because it was
    not given.
    """
    source = context.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT_MAP"


def explicit_options(context: typer.Context) -> list[str]:
    """Return the names of the given options, among the options whose default is None."""
    return [name for name, value in context.params.items() if value is not None]


def given_keys(context: typer.Context) -> dict[str, Any]:
    """Return the options that are keys of the configuration."""
    return {name: value for name, value in context.params.items() if name in FIELDS}


@contextmanager
def load_config(
    context: typer.Context, defaults: Mapping[str, Any] = NO_OPTIONS
) -> Iterator[EngineConfig]:
    """Merge the flags with the keys of ``--config``, which they override. Errors name each where it
    was given. ``defaults``: valid values of keys that neither has.
    """
    flags, path = given_keys(context), context.params["config"]
    file = ConfigFile.read(path) if path else None
    for name, value in defaults.items():
        if flags.get(name) is None and (file is None or file.keys.get(name) is None):
            flags[name] = value
    try:
        yield EngineConfig.build(file, flags)
    except UserError as error:
        if file is None:
            raise
        raise type(error)(file.named_in(str(error), flags)) from error
