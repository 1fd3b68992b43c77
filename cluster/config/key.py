"""Declaration of a configuration key, and parsers of values with several notations."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ByteSize, ConfigDict, Field, SecretStr, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from tramontane.proto.errors import EXPECTED, ConfigError, describe_value

MIN_GPU_BYTES = 2**10  # 24 without a unit is a mistake
MAX_GPU_SPEED = 10_000
MAX_EXPERT_REPLICAS = 2**14
PASSWORD = re.compile(r"://[^@/]*:.*@|[?&][^=]*(pass|secret|token|key)[^=]*=", re.IGNORECASE)

# as browsers write it in the header Origin; a host in lower case
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")

# Larger numbers are mistakes: memory that is allocated in advance has to stay small.
PositiveInt = Annotated[int, Field(ge=1, le=2**24)]
SmallInt = Annotated[int, Field(ge=1, le=2**14)]
# a sequence wastes half a page, and only full pages are found again
PageSize = Annotated[int, Field(ge=1, le=2**10)]
Seconds = Annotated[float, Field(ge=0, le=86_400)]
PositiveSeconds = Annotated[float, Field(gt=0, le=86_400)]
Text = Annotated[str, Field(min_length=1)]
SecretText = Annotated[SecretStr, Field(min_length=1)]


def key(
    default: Any,  # of the field's type
    description: str,
    *,
    unset: str = "",
    metavar: str | None = None,
    alias: str | None = None,
    other_names: tuple[str, ...] = (),
    former_names: tuple[str, ...] = (),
    has_flag: bool = True,
    in_serve_config: bool = True,
    defines_pipeline: bool = False,
) -> Any:  # pydantic's Field is declared so, too
    """Declare a key: its default, its description, and its properties for flags and documentation.

    Args:
        default: The value if the key is not given.
        description: Full sentences for ``--help`` and docs/configuration.md.
        unset: Description of the default, if the default value does not show it.
        metavar: The name of the value in ``--help``; if None, its choices, or else the type's name.
        alias: The name in files and flags, if the field cannot have this name.
        other_names: vLLM's names, which mean the same in files, flags and Ray Serve configs.
        former_names: Names of 0.2, which mean the same with a warning, and which 0.4 will refuse.
        has_flag: False for a key that only files may have.
        in_serve_config: False if a Ray Serve config must not have the key.
        defines_pipeline: True if pipelines with different values of the key are different
            pipelines.
    """
    extra = {
        "unset": unset,
        "metavar": metavar,
        "other_names": other_names,
        "former_names": former_names,
        "has_flag": has_flag,
        "in_serve_config": in_serve_config,
        "defines_pipeline": defines_pipeline,
    }
    return Field(default, description=description, alias=alias, json_schema_extra=extra)  # type: ignore[arg-type]


_SIZE, _TEXT = "a size such as 512MiB or 2GiB", "a text that is not empty"
_EXPECTED_HERE = {
    "int_parsing_size": "a whole number",
    "byte_size": _SIZE,
    "byte_size_unit": _SIZE,
    "string_type": _TEXT,
    "string_unicode": _TEXT,
    "string_too_short": _TEXT,
    "path_type": "a path",
    "dataclass_type": "what the command in its description writes",
}


def describe_wrong_value(name: str, problem: Any) -> str:  # pydantic's ErrorDetails is private
    """Return a readable form of pydantic's error: ``--stages is 'two'; it must be a whole
    number``.
    """
    if problem["type"] == "value_error":  # of typer's choices: 'x' is not one of 'full', 'small'.
        return f"{name}: {problem['ctx']['error']}".rstrip(".")
    expected_of = {**EXPECTED, **_EXPECTED_HERE}
    shown = repr(problem["input"])
    return describe_value(name, shown, problem, expected_of, "docs/configuration.md")


class KeyGroup(BaseModel):
    """Keys that belong together; ``title`` heads them in ``--help`` and in the documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    title: ClassVar[str]


def extra(field: FieldInfo) -> dict[str, Any]:
    """Return the arguments of ``key`` beyond the default and the description."""
    assert isinstance(field.json_schema_extra, dict)
    return dict(field.json_schema_extra)


def keys_with(keys: type[BaseModel], **words: bool) -> set[str]:
    """Return the fields with these arguments of ``key``, such as ``has_flag=False``, by their names
    in files.
    """
    return {
        field.alias or name
        for name, field in keys.model_fields.items()
        if words.items() <= extra(field).items()
    }


def has_password(url: str) -> bool:
    """Return True if a password is before the host or a parameter.

    ``postgresql://me:secret@host/jobs`` and ``postgresql://host/jobs?password=secret`` have one.
    """
    return bool(PASSWORD.search(url))


def expand_home(path: Path) -> Path:
    """Return ``~/models/x`` below the user's home folder; unchanged if the user does not exist."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def absolute_database(url: SecretStr) -> SecretStr:
    """Return ``sqlite:///jobs.sqlite`` with the absolute path: three slashes and a path without one
    in front are relative.
    """
    text = url.get_secret_value()
    driver, mark, path = text.partition(":///")
    is_relative = (
        driver.startswith("sqlite")
        and mark
        and path
        and not path.startswith(("/", ":memory:", "file:"))
    )
    return SecretStr(f"{driver}{mark}{Path.cwd() / path}") if is_relative else url


def absolute_folder(url: SecretStr) -> SecretStr:
    """Return the absolute path of a folder; other URLs stay as they are."""
    text = url.get_secret_value()
    path = text.removeprefix("file://").removeprefix("file:")
    return (
        url if "::" in path or "://" in path else SecretStr(str(Path(path).expanduser().absolute()))
    )


def parse_gpu_memory(value: object) -> tuple[int, ...] | None:
    """Return bytes, from ``24GiB,24GiB,80GiB`` or a file's list. Raises ConfigError."""
    return (
        None
        if value is None
        else tuple(_parse_size(part, "--gpu-memory") for part in _parts(value))
    )


def parse_expert_memory(value: object) -> tuple[int, ...] | None:
    """Return bytes, as ``parse_gpu_memory`` does. Raises ConfigError."""
    return (
        None
        if value is None
        else tuple(_parse_size(part, "--expert-memory") for part in _parts(value))
    )


def for_each_expert_actor(sizes: tuple[int, ...], num_actors: int) -> tuple[int, ...]:
    """Return one size per actor. Raises ConfigError unless there is one for all or one for each."""
    if len(sizes) not in (1, num_actors):
        raise ConfigError(
            f"--expert-memory is for {len(sizes)} actors and --expert-actors is {num_actors}; "
            "give one value for all, or one for each"
        )
    return sizes if len(sizes) > 1 else sizes * num_actors


def parse_expert_replicas(value: object) -> object:
    """Return a number, or ``auto``. Raises ConfigError."""
    text = str(value)
    if text != "auto" and not (text.isdecimal() and 1 <= int(text) <= MAX_EXPERT_REPLICAS):
        raise ConfigError(
            f"--expert-replicas is {value!r}; it must be a whole number from 1 to"
            f" {MAX_EXPERT_REPLICAS}, or auto"
        )
    return text if text == "auto" else int(text)


def parse_gpu_speed(value: object) -> tuple[int, ...] | None:
    """Return whole numbers, from ``1,1,3`` or a file's list. Raises ConfigError."""
    return None if value is None else tuple(_parse_speed(part) for part in _parts(value))


def parse_api_keys(value: object) -> tuple[SecretStr, ...]:
    """Return keys, from a text or a list of texts. Raises ConfigError, which does not repeat
    them.
    """
    keys = [
        key for key in (value if isinstance(value, list | tuple) else [value]) if key is not None
    ]
    if not all(isinstance(key, str | SecretStr) for key in keys):
        raise ConfigError("--api-key must be a text, or a list of texts; in a file, between quotes")
    return tuple(key if isinstance(key, SecretStr) else SecretStr(str(key)) for key in keys)


def parse_url_prefixes(value: object) -> tuple[str, ...]:
    """Return prefixes, from ``file:///data/in,s3://bucket/in`` or a list. Raises ConfigError, which
    does not repeat them.
    """
    prefixes = tuple(part for part in _parts(value) if part) if value else ()
    if any(map(has_password, prefixes)):
        raise ConfigError(
            "--jobs-url-prefixes has a password, which clients would have to name too; "
            "leave it to the environment or the files that the storage's library reads"
        )
    return prefixes


def parse_origins(value: object) -> tuple[str, ...]:
    """Return origins of web pages, from ``https://a.example,https://b.example``, vLLM's JSON list,
    or a file's list. Raises ConfigError.
    """
    try:
        given = json.loads(value) if isinstance(value, str) and value.startswith("[") else value
    except (ValueError, RecursionError):
        given = value
    origins = tuple(_parts(given))
    if wrong := [origin for origin in origins if origin != "*" and not ORIGIN.fullmatch(origin)]:
        raise ConfigError(
            f"--allowed-origins has {wrong[0]!r:.100}; it must be origins such as"
            " https://chat.example.com or http://localhost:3000, without a path, or * for all"
        )
    return origins


def _parts(value: object) -> list[str]:
    return [
        str(part).strip()
        for part in (value if isinstance(value, list | tuple) else str(value).split(","))
    ]


def _parse_size(text: str, flag: str) -> int:
    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if size < MIN_GPU_BYTES:
        raise ConfigError(
            f"{flag} has {text!r}; it must be a size such as 24GiB, or sizes with commas between"
            " them"
        )
    return size


def _parse_speed(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_GPU_SPEED:
        raise ConfigError(
            f"--gpu-speed has {text!r}; it must be whole numbers from 1, such as 1,1,3"
        )
    return int(text)
