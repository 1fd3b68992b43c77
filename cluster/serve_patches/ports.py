"""Keep the ports that Ray Serve opens from listening on all interfaces."""

from functools import partial
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import unquote

import ray

from tramontane.cluster.ray_internals.serve import serve_controller
from tramontane.cluster.ray_internals.table import ADD_GRPC_ADDRESS, ADD_PORT
from tramontane.cluster.serve_patches.grpc_proxy import wrap_handler_factory

ALL_INTERFACES = "[::]:"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def bind_internal_port_to_node() -> None:
    """Let a replica's internal gRPC port listen on the node's own address only. To be called in its constructor.

    Ray Serve opens one port per replica, on all interfaces and without authentication, and reads pickles from it. Other
    replicas reach it under the address by which Ray knows the node, and there it listens: 127.0.0.1 in a cluster that we
    started. Ray Serve has no option for this; ``tests/test_serve_command.py`` checks the sockets.
    """
    add_port = ADD_PORT.value
    node_address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]

    def add_port_on_node_address(server: Any, address: str) -> Any:  # noqa: ANN401
        assert address.startswith(ALL_INTERFACES), "Ray Serve has changed the address that this replaces"
        return add_port(server, address.replace(ALL_INTERFACES, f"{format_host(node_address)}:"))

    ADD_PORT.replace(add_port_on_node_address)


def bind_grpc_to_http_host() -> None:
    """Let clients' gRPC listen on the host of HTTP. To be called in a proxy before it opens its ports.

    Ray Serve has an option for the port only, and listens on all interfaces. The function that adds the port does not know
    the host and cannot await it, so the port is added when the server starts. Handlers are wrapped too: see ``grpc_proxy``.
    """

    def add_port_at_start(grpc_server: Any, server_address: str) -> None:  # noqa: ANN401
        assert server_address.startswith(ALL_INTERFACES), "Ray Serve has changed the address that this replaces"
        start = grpc_server.start

        async def start_on_http_host() -> None:
            host = (await serve_controller().get_http_config.remote()).host
            grpc_server.add_insecure_port(server_address.replace(ALL_INTERFACES, f"{format_host(host)}:"))
            await start()

        grpc_server.start = start_on_http_host
        grpc_server.service_handler_factory = partial(wrap_handler_factory, grpc_server.service_handler_factory)

    ADD_GRPC_ADDRESS.replace(add_port_at_start)


def format_host(host: str) -> str:
    """Return the host as it is written before a port: ``::1`` gives ``[::1]``."""
    return f"[{host}]" if ":" in host else host


def is_loopback(peer: str) -> bool:
    """Return whether a gRPC peer, ``ipv4:127.0.0.1:50123`` or ``ipv6:%5B::1%5D:50123``, is on a loopback address."""
    kind, _, address = peer.partition(":")
    if kind == "unix":
        return True
    try:
        ip = ip_address(unquote(address).rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return ((isinstance(ip, IPv6Address) and ip.ipv4_mapped) or ip).is_loopback
