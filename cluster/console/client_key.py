"""The key that commands show to a server that wants one."""

from pathlib import Path
from typing import Annotated

from tramontane.cluster.config.api_keys import KEY, keys_in
from tramontane.cluster.console.options import option
from tramontane.proto.errors import ConfigError

Key = Annotated[str | None, option("--api-key", help="For a server that wants one. Others may see it here; better in a file.")]
KeyFile = Annotated[Path | None, option("--api-key-file", help="For a server that wants a key: the first of this file.")]


def key_headers(key: str | None, file: Path | None) -> dict[str, str]:
    """For every request; none where there is no key. Raises ConfigError, which does not repeat it."""
    if key is not None and file is not None:
        raise ConfigError("--api-key and --api-key-file both say the key; give one of them")
    if file is not None:
        key = keys_in(file)[0]
    if key is not None and not KEY.fullmatch(key):
        raise ConfigError("--api-key must be printable ASCII without spaces")
    return {} if key is None else {"authorization": f"Bearer {key}"}
