"""Private functions of Ray, each behind a named accessor. Importing this module does not import Ray."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from tramontane.cluster.ray_internals import table

if TYPE_CHECKING:
    import grpc
    from ray.actor import ActorHandle


def kv_get(key: str) -> bytes | None:
    """Read from the cluster's key-value store; None if the key is not there."""
    value: bytes | None = table.KV_GET.value(key)
    return value


def kv_put(key: str, value: bytes, *, overwrite: bool = True) -> None:
    """Write to the cluster's key-value store; with ``overwrite=False`` an existing value stays."""
    table.KV_PUT.value(key, value, overwrite=overwrite)


def kv_delete(key: str) -> None:
    """Remove a key from the cluster's key-value store, if it is there."""
    table.KV_DELETE.value(key)


def actor_state(actor: "ActorHandle[Any]") -> dict[str, Any]:
    """Return what Ray's table of actors has of this one: ``State``, ``Pid`` and ``Address``; empty if it is unknown."""
    state: dict[str, Any] = table.ACTORS.value(actor._actor_id.hex())
    return state


def mute_worker_logs() -> AbstractContextManager[None]:
    """Keep Ray from printing errors of the cluster's processes to our standard output while the block runs.

    It prints also those that it recovers from by itself.
    """
    return table.WORKER_LOGS.replaced(False)


def keep_loopback_address() -> AbstractContextManager[None]:
    """Keep Ray from replacing 127.0.0.1 by the machine's outer address while the block runs.

    With the outer address every process of Ray would listen on all interfaces; with 127.0.0.1 none does.
    """
    return table.RAY_CLUSTERS_POSSIBLE.replaced(False)


def keep_sigterm_handler() -> AbstractContextManager[None]:
    """Keep Ray from handling SIGTERM while the block runs: it would end the process before anything is removed."""
    return table.SET_SIGTERM_HANDLER.replaced(lambda sigterm_handler: None)


def set_process_title(title: str) -> None:
    """Set the title under which the system and Ray's dashboard show this process."""
    table.SET_PROCESS_TITLE.value(title)


def json_formatter(fields: tuple[str, ...]) -> logging.Formatter:
    """Create the formatter of Ray Serve's JSON logs, with these attributes of a record in addition to Ray's."""
    formatter = table.JSON_FORMATTER.value()
    formatter.set_additional_log_standard_attrs(list(fields))
    return formatter  # type: ignore[no-any-return]


def import_attribute(path: str) -> Any:  # noqa: ANN401 - whatever the path names
    """Import ``module:name`` or ``module.name`` as Ray does. Raises ImportError, AttributeError or ValueError."""
    return table.IMPORT_ATTRIBUTE.value(path)


def resolve_cluster_address(address: str) -> str | None:
    """Return host:port for ``auto`` or host:port. Raises ConnectionError or ValueError."""
    resolved: str | None = table.RESOLVE_ADDRESS.value(address)
    return resolved


@contextmanager
def head_channel(address: str) -> "Iterator[grpc.Channel]":
    """Open a gRPC channel to the head process at host:port."""
    with table.OPEN_CHANNEL.value(address) as channel:
        yield channel


def ping_head(channel: "grpc.Channel", timeout_s: float, metadata: tuple[tuple[str, str], ...]) -> None:
    """Ask a head process whether it is alive, as Ray's nodes do. Raises grpc.RpcError, or Ray's AuthenticationError."""
    table.HEAD_SERVICE.value(channel).CheckAlive(table.CHECK_ALIVE.value(), timeout=timeout_s, metadata=metadata)


def stored_token_headers() -> tuple[tuple[str, str], ...]:
    """Return the headers with the token that Ray finds in the environment or the user's home, whatever RAY_AUTH_MODE says."""
    loader = table.TOKEN_LOADER.value.instance()
    if not loader.has_token(ignore_auth_mode=True):
        return ()
    return tuple(loader.get_token_for_http_header(ignore_auth_mode=True).items())
