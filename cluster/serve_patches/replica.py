"""Changes to Ray Serve in a replica's process: where its internal port listens, and the length of
its response queues.
"""

from typing import Any

import ray

from tramontane.cluster.http.slow_clients import buffered_messages
from tramontane.cluster.ray_internals.accessors import replace_response_queues
from tramontane.cluster.ray_internals.table import ADD_PORT

ALL_INTERFACES = "[::]:"


def bind_internal_port_to_node() -> None:
    """Let a replica's internal gRPC port listen on the node's own address only. To be called in its
    constructor.

    Ray Serve opens one port per replica, on all interfaces and without authentication, and reads
    pickles from it. Other replicas reach it under the address by which Ray knows the node, and
    there it listens: 127.0.0.1 in a cluster that we started. Ray Serve has no option for this;
    ``tests/test_serve_command.py`` checks the sockets.
    """
    add_port = ADD_PORT.value
    node_address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]

    def add_port_on_node_address(server: Any, address: str) -> Any:
        return add_port(server, replace_all_interfaces(address, node_address))

    ADD_PORT.replace(add_port_on_node_address)


def track_response_queues() -> None:
    """Let the queues through which a replica passes responses on publish their lengths to the
    requests they are made for.

    To be called in a replica's constructor.
    """
    replace_response_queues(buffered_messages.set)


def replace_all_interfaces(address: str, host: str) -> str:
    """Return an address of Ray Serve's with a host: ``[::]:9000`` and ``127.0.0.1`` give
    ``127.0.0.1:9000``.
    """
    assert address.startswith(ALL_INTERFACES), (
        "Ray Serve has changed the address that this replaces"
    )
    return address.replace(ALL_INTERFACES, f"{format_host(host)}:")


def format_host(host: str) -> str:
    """Return the host as it is written before a port: ``::1`` gives ``[::1]``."""
    return f"[{host}]" if ":" in host else host
