"""Values of the configuration that are written in more than one way.

Where batch jobs are kept, as it was given.
"""

import re
from pathlib import Path

from pydantic import ByteSize, SecretStr, TypeAdapter, ValidationError

from tramontane.proto.errors import ConfigError


def has_password(url: str) -> bool:
    """Before the host, or as a parameter: ``postgresql://me:secret@host/jobs``, ``postgresql://host/jobs?password=secret``."""
    return bool(re.search(r"://[^@/]*:.*@|[?&][^=]*(pass|secret|token|key)[^=]*=", url, re.IGNORECASE))


def absolute_database(given: SecretStr) -> SecretStr:
    """``sqlite:///jobs.sqlite`` with the folder where it is from here; three slashes and a path that begins with none."""
    url = given.get_secret_value()
    driver, mark, path = url.partition(":///")
    is_relative = driver.startswith("sqlite") and mark and path and not path.startswith(("/", ":memory:", "file:"))
    return SecretStr(f"{driver}{mark}{Path.cwd() / path}") if is_relative else given


def absolute_folder(given: SecretStr) -> SecretStr:
    url = given.get_secret_value()
    path = url.removeprefix("file://").removeprefix("file:")
    return given if "::" in path or "://" in path else SecretStr(str(Path(path).expanduser().absolute()))


SMALLEST_GPU = 2**10  # bytes; 24 without a unit is a slip


def parse_gpu_memory(given: object) -> tuple[int, ...] | None:
    """Bytes, from ``24GiB,24GiB,80GiB`` or a file's list. Raises ConfigError."""
    return None if given is None else tuple(_size(part, "--gpu-memory") for part in _parts(given))


def expert_sizes(given: object) -> tuple[int, ...] | None:
    """As ``parse_gpu_memory``."""
    return None if given is None else tuple(_size(part, "--expert-memory") for part in _parts(given))


def for_each_expert_actor(sizes: tuple[int, ...], num_actors: int) -> tuple[int, ...]:
    """Raises ConfigError if there is neither one for all nor one for each."""
    if len(sizes) not in (1, num_actors):
        raise ConfigError(
            f"--expert-memory is for {len(sizes)} actors and --expert-actors is {num_actors}; "
            "give one value for all, or one for each"
        )
    return sizes if len(sizes) > 1 else sizes * num_actors


def gpu_speeds(given: object) -> tuple[int, ...] | None:
    """Whole numbers, from ``1,1,3`` or a file's list. Raises ConfigError."""
    return None if given is None else tuple(_speed(part) for part in _parts(given))


def parse_api_keys(given: object) -> tuple[SecretStr, ...]:
    """From a text or a list of them. Raises ConfigError, which does not repeat them."""
    keys = [key for key in (given if isinstance(given, list | tuple) else [given]) if key is not None]
    if not all(isinstance(key, str | SecretStr) for key in keys):
        raise ConfigError("--api-key must be a text, or a list of texts; in a file, between quotes")
    return tuple(key if isinstance(key, SecretStr) else SecretStr(str(key)) for key in keys)


def url_prefixes(given: object) -> tuple[str, ...]:
    """Of ``file:///data/in,s3://bucket/in`` or a file's list. Raises ConfigError, which does not repeat them."""
    prefixes = tuple(part for part in _parts(given) if part) if given else ()
    if any(map(has_password, prefixes)):
        raise ConfigError(
            "--jobs-url-prefixes has a password, which clients would have to name too; "
            "leave it to the environment or the files that the storage's library reads"
        )
    return prefixes


def _parts(given: object) -> list[str]:
    return [str(part).strip() for part in (given if isinstance(given, list | tuple) else str(given).split(","))]


def _size(text: str, name: str) -> int:
    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if size < SMALLEST_GPU:
        raise ConfigError(f"{name} has {text!r}; it must be a size such as 24GiB, or sizes with commas between them")
    return size


def _speed(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10_000:
        raise ConfigError(f"--gpu-speed has {text!r}; it must be whole numbers from 1, such as 1,1,3")
    return int(text)
