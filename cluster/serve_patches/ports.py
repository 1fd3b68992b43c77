"""Keeps what Ray Serve opens behind our backs from being reachable by everybody."""

from functools import partial
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import unquote

import ray
import ray.serve._private.default_impl
import ray.serve._private.replica
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from tramontane.cluster.serve_patches.grpc_proxy import wrap_handler_factory

EVERYWHERE = "[::]:"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def bind_internal_port_to_node() -> None:
    """Call in a replica's constructor: its internal gRPC port then listens on the node's own address only.

    Ray Serve opens one per replica, without authentication, on all interfaces, and reads
    pickles from it. Other replicas reach it under the address by which Ray knows the
    node, so that is where it listens: 127.0.0.1 in a cluster that we started.
    There is no option for it; ``tests/test_serve_command.py`` looks at the sockets.
    """
    module: Any = ray.serve._private.replica
    add_port = module.add_port_to_grpc_server
    node_address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]

    def add_port_on_node_address(server: Any, address: str) -> Any:  # noqa: ANN401
        assert address.startswith(EVERYWHERE), "Ray Serve has changed what this replaces"
        return add_port(server, address.replace(EVERYWHERE, f"{format_host(node_address)}:"))

    module.add_port_to_grpc_server = add_port_on_node_address


def bind_grpc_to_http_host() -> None:
    """Call in a proxy before it opens its ports: clients' gRPC then listens on the host that HTTP was told to listen on.

    Ray Serve has an option for the port only, and listens on all interfaces. What it calls to add the port knows no host, and may
    not wait for one; so the port is added when the server starts. Its handlers are mended too: see ``grpc_door``.
    """
    addresses: Any = ray.serve._private.default_impl

    def add_when_it_starts(server: Any, address: str) -> None:  # noqa: ANN401
        assert address.startswith(EVERYWHERE), "Ray Serve has changed what this replaces"
        start = server.start

        async def start_on_http_host() -> None:
            controller = ray.get_actor(SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
            host = (await controller.get_http_config.remote()).host
            server.add_insecure_port(address.replace(EVERYWHERE, f"{format_host(host)}:"))
            await start()

        server.start = start_on_http_host
        server.service_handler_factory = partial(wrap_handler_factory, server.service_handler_factory)

    addresses.add_grpc_address = add_when_it_starts


def format_host(host: str) -> str:
    """As it is written before a port."""
    return f"[{host}]" if ":" in host else host


def is_loopback(peer: str) -> bool:
    """Whether a gRPC peer, such as ``ipv4:127.0.0.1:50123`` or ``ipv6:%5B::1%5D:50123``, is on a loopback address."""
    kind, _, address = peer.partition(":")
    if kind == "unix":
        return True
    try:
        ip = ip_address(unquote(address).rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return ((isinstance(ip, IPv6Address) and ip.ipv4_mapped) or ip).is_loopback
