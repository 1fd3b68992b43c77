"""Who may ask: keys, given to the command or kept in a file that may change while the server runs."""

import hashlib
import hmac
import logging
import re
from collections.abc import Iterable
from pathlib import Path

from pydantic import SecretStr

from tramontane.proto.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_KEYS = 1000
MAX_FILE = 2**20  # bytes
KEY = re.compile(r"[!-~]{1,1024}")  # what a header can carry

Stamp = tuple[int, ...]


class ApiKeys:
    """Looks at the file whenever it is asked, and reads it when it has changed.

    A file that can no longer be used changes nothing: those who had a key keep it, and nobody else gets in. What is kept
    are digests: no key is in this object. Without keys and file everybody may ask.
    """

    def __init__(self, keys: Iterable[SecretStr] = (), file: Path | None = None) -> None:
        """Raises ConfigError for keys and files that cannot be used; the message has no key in it."""
        given = [key.get_secret_value() for key in keys]
        if len(given) > MAX_KEYS or not all(map(KEY.fullmatch, given)):
            raise ConfigError(f"--api-key must be printable ASCII without spaces, at most {MAX_KEYS} times")
        self._given = frozenset(map(_digest, given))
        self._file = file
        self._file_version: Stamp | None = None
        in_file: frozenset[bytes] = frozenset()
        if file is not None:
            self._file_version, in_file = _file_version(file), _digests(file)
        self._known = sorted(self._given | in_file)

    @property
    def is_enabled(self) -> bool:
        return bool(self._given) or self._file is not None

    def allows(self, authorization: str | None) -> bool:
        return self.authenticate(authorization) is not None

    def authenticate(self, authorization: str | None) -> int | None:
        """A number for the key that a header ``Authorization: Bearer KEY`` has; None: it has none of them.

        It says nothing about the key: keys are numbered from 1. Where there are not several it is 0, also without any key.
        However a header differs, that takes the same time.
        """
        if not self.is_enabled:
            return 0
        self._reload()
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        number = sum(place * hmac.compare_digest(given, digest) for place, digest in enumerate(self._known, 1))
        if not number or scheme.lower() != "bearer":
            return None
        return number if len(self._known) > 1 else 0

    def _reload(self) -> None:
        if self._file is None:
            return
        stamp = _file_version(self._file)
        if stamp == self._file_version:
            return
        self._file_version = stamp  # a file that cannot be used is said so once, not by every request
        try:
            self._known = sorted(self._given | _digests(self._file))
        except ConfigError as error:
            logger.warning("%s; the keys that it had before are still good", error)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def _file_version(file: Path) -> Stamp:
    """Changes with the file; empty where there is none."""
    try:
        status = file.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _digests(file: Path) -> frozenset[bytes]:
    return frozenset(map(_digest, read_key_file(file)))


def read_key_file(file: Path) -> list[str]:
    """One key per line; blank lines and lines that begin with # are none. Raises ConfigError."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE + 1)
        lines = [line.strip() for line in content.decode("ascii").split("\n")]
    except OSError as error:
        raise ConfigError(f"--api-key-file {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {file} holds characters that no key can have") from None
    keys = {number: line for number, line in enumerate(lines, 1) if line and not line.startswith("#")}
    if not keys:
        raise ConfigError(f"--api-key-file {file} holds no key")
    if len(content) > MAX_FILE or len(keys) > MAX_KEYS:
        raise ConfigError(f"--api-key-file {file} holds more than {MAX_KEYS} keys")
    if bad := [number for number, key in keys.items() if not KEY.fullmatch(key)]:
        raise ConfigError(f"--api-key-file {file}: line {bad[0]} is no key; keys are printable and have no spaces")
    return list(keys.values())
