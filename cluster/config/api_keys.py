"""API keys: from the command line, from the environment, or from a file that may change while the
server runs.
"""

import hashlib
import hmac
import logging
import re
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

from pydantic import SecretStr

from tramontane.proto.errors import ConfigError
from tramontane.proto.request import Identity

logger = logging.getLogger(__name__)

MAX_KEYS = 1000
MAX_FILE = 2**20  # bytes
KEY = re.compile(r"[!-~]{1,1024}")  # characters that a header can carry
VARIABLE = "TRAMONTANE_API_KEY"

Stamp = tuple[int, ...]


class ApiKeys:
    """The keys that clients may use; the file is checked at every request and read again when it
    has changed.

    A file that has become invalid is ignored: the valid keys remain. Only digests are kept, no
    keys. Without keys and file every request is allowed. Raises ConfigError, without a key in its
    message, for unusable keys and files.
    """

    def __init__(self, keys: Iterable[SecretStr] = (), file: Path | None = None) -> None:
        texts = [key.get_secret_value() for key in keys]
        if len(texts) > MAX_KEYS or not all(map(KEY.fullmatch, texts)):
            raise ConfigError(
                f"--api-key must be printable ASCII without spaces, and may be given {MAX_KEYS}"
                " times at most"
            )
        self._fixed = frozenset(map(_digest, texts))
        self._file = file
        self._file_version: Stamp | None = None
        in_file: frozenset[bytes] = frozenset()
        if file is not None:
            self._file_version, in_file = _file_version(file), _digests(file)
        self._known = sorted(self._fixed | in_file)

    @property
    def is_enabled(self) -> bool:
        """True if requests need a key."""
        return bool(self._fixed) or self._file is not None

    def authenticate(self, authorization: str | None) -> Identity | None:
        """Return the identity of the key in the header ``Authorization: Bearer KEY``; None if it
        has no valid key.

        Keys are numbered from 1, in an order that reveals nothing about them. The number is 0 with
        a single key, or if no key is needed. Invalid headers take the same time, however they
        differ.
        """
        if not self.is_enabled:
            return Identity()
        self._reload()
        scheme, _, key = (authorization or "").partition(" ")
        digest_of_key = _digest(key.strip())
        number = sum(
            index * hmac.compare_digest(digest_of_key, digest)
            for index, digest in enumerate(self._known, 1)
        )
        if not number or scheme.lower() != "bearer":
            return None
        return Identity(number if len(self._known) > 1 else 0, digest_of_key.hex())

    def _reload(self) -> None:
        if self._file is None:
            return
        stamp = _file_version(self._file)
        if stamp == self._file_version:
            return
        # so that an invalid file is logged once, and not at every request
        self._file_version = stamp
        try:
            self._known = sorted(self._fixed | _digests(self._file))
        except ConfigError as error:
            logger.warning("%s; the keys that were read before remain valid", error)


def environment_keys(environ: Mapping[str, str]) -> tuple[SecretStr, ...]:
    """Return the keys of the variable, which has commas between them; none if it is not set.

    Raises ConfigError, which does not repeat them, also for an empty variable: a server would be
    open, because some other variable was not set.
    """
    if (text := environ.get(VARIABLE)) is None:
        return ()
    keys = [key.strip() for key in text.split(",")]
    if not all(map(KEY.fullmatch, keys)):
        raise ConfigError(
            f"{VARIABLE} must hold an API key of printable ASCII without spaces, or several with"
            " commas between them; or unset it"
        )
    return tuple(map(SecretStr, keys))


def take_environment_keys(environ: MutableMapping[str, str]) -> tuple[SecretStr, ...]:
    """Return the keys of the variable, and unset it. Raises ConfigError."""
    keys = environment_keys(environ)
    environ.pop(VARIABLE, None)
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def _file_version(file: Path) -> Stamp:
    """Return a value that changes with the file; empty if the file does not exist."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _digests(file: Path) -> frozenset[bytes]:
    return frozenset(map(_digest, read_key_file(file)))


def read_key_file(file: Path) -> list[str]:
    """Read one key per line, except blank lines and lines that begin with #. Raises ConfigError."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE + 1)
        lines = [line.strip() for line in content.decode("ascii").split("\n")]
    except OSError as error:
        raise ConfigError(f"--api-key-file {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {file} holds characters that no key can have") from None
    keys = {
        number: line for number, line in enumerate(lines, 1) if line and not line.startswith("#")
    }
    if not keys:
        raise ConfigError(f"--api-key-file {file} holds no key")
    if len(content) > MAX_FILE or len(keys) > MAX_KEYS:
        raise ConfigError(f"--api-key-file {file} holds more than {MAX_KEYS} keys")
    if bad := [number for number, key in keys.items() if not KEY.fullmatch(key)]:
        raise ConfigError(
            f"--api-key-file {file}: line {bad[0]} is not a key; keys are printable ASCII without"
            " spaces"
        )
    return list(keys.values())
