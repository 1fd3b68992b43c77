"""Is there a Ray cluster at an address? Ray itself would try for minutes, and say so in many lines."""

import os
import socket

import grpc
from ray.exceptions import AuthenticationError

from tramontane.cluster.ray_internals.core import head_channel, ping_head, resolve_cluster_address, stored_token_headers
from tramontane.proto.errors import ConfigError

TIMEOUT_S = 5.0
JOIN = "give the host:port of a cluster's head node"
ADVICE = f"{JOIN}, or leave --address out to start Ray on this machine"


def check_ray_address(address: str, advice: str = ADVICE) -> None:
    """Raises ConfigError unless a cluster answers at ``auto`` or host:port, and lets us in.

    ``advice`` is what to do about it: ``JOIN`` where the command cannot start Ray itself.
    """
    host, _, port = address.rpartition(":")
    if address != "auto" and ("://" in address or not host or not port.isdigit()):
        raise ConfigError(f"--address is {address!r}; it must be auto or host:port")
    found = _resolve_address(address, advice)
    where = address if found == address else f"{address} ({found})"
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=TIMEOUT_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(f"no Ray cluster answers at --address {where}: {error}; {advice}") from error
    _check_head(found, where, _token_of_the_home() if address == "auto" else (), advice)


def _resolve_address(address: str, advice: str) -> str:
    """``auto`` is RAY_ADDRESS, or a cluster on this machine; 127.0.0.1 is this machine's outer address."""
    try:
        found = resolve_cluster_address(address)
    except (ConnectionError, ValueError):
        found = None
    if found is not None:
        return found
    if named := os.environ.get("RAY_ADDRESS"):
        raise ConfigError(f"--address auto is what RAY_ADDRESS says, {named!r}; it must be host:port")
    raise ConfigError(f"--address is auto, but no Ray cluster runs on this machine; {advice}")


def _check_head(address: str, where: str, token: tuple[tuple[str, str], ...], advice: str) -> None:
    """Ask what listens there whether it is alive, as Ray's own nodes do."""
    with head_channel(address) as channel:
        try:
            ping_head(channel, TIMEOUT_S, token)
        except AuthenticationError as error:  # not the cluster's, but that of Ray in this process
            raise ConfigError("RAY_AUTH_MODE is token, but there is no token; set RAY_AUTH_TOKEN to the cluster's") from error
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise ConfigError(
                    f"the Ray cluster at --address {where} asks for a token, and got none or another; "
                    "set RAY_AUTH_MODE=token, and unless its token is in ~/.ray/auth_token here, RAY_AUTH_TOKEN to that"
                ) from error
            raise ConfigError(f"what listens at --address {where} does not answer as a Ray cluster; {advice}") from error


def _token_of_the_home() -> tuple[tuple[str, str], ...]:
    """Without RAY_AUTH_MODE, ray.init shows a token that it finds to ``auto``, and to no other address."""
    return () if "RAY_AUTH_MODE" in os.environ else stored_token_headers()
