"""Checks of what a client needs to reach its server, and errors that say why it does not."""

import re

from tramontane.proto.errors import ConfigError, ConnectionLostError, TramontaneError

DEFAULT_PORT = 9000  # of --grpc-port
# of targets that gRPC interprets itself
SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")
HOST_AND_PORT = re.compile(r"(\[[\w:.%]+\]|[^\s:/@\[\]]+):(\d{1,5})")
MAX_PORT = 2**16 - 1
HEADER_TEXT = re.compile(r"[ -~]*")
HTTP_1 = "http1.x server"
UNREACHABLE = ("failed to connect to all addresses", "errors resolving ", "DNS resolution failed")
WHERE = (
    f"the gRPC API is at --grpc-port of tramontane serve ({DEFAULT_PORT} by default), not at its"
    " HTTP port"
)


def check_target(target: str) -> None:
    """Raise ConfigError unless the target is host:port, or a name in one of gRPC's schemes."""
    if target.startswith(SCHEMES):
        return
    found = HOST_AND_PORT.fullmatch(target)
    if found is None or not 0 < int(found[2]) <= MAX_PORT:
        raise ConfigError(
            f"the server's address is {target!r}; it must be host:port, without http://; {WHERE}"
        )


def check_api_key(key: str | None) -> None:
    """Raise ConfigError, which does not repeat the key, for one that no header can carry."""
    if key is not None and not HEADER_TEXT.fullmatch(key):
        raise ConfigError("the API key must be printable ASCII, without line breaks")


def connection_error(target: str, message: str) -> TramontaneError | None:
    """Return the error for gRPC's message that no connection was made; None for any other message.

    "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"
    becomes "no server can be reached at 127.0.0.1:1: Connection refused; ...".
    """
    if HTTP_1 in message:
        return ConfigError(f"the server at {target} speaks HTTP/1, not gRPC; {WHERE}")
    if not message.startswith(UNREACHABLE):
        return None
    reason = message.rpartition(": ")[2].rstrip("]")
    return ConnectionLostError(
        f"no server can be reached at {target}: {reason}; is one running there? {WHERE}"
    )
