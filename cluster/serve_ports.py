"""Keeps what Ray Serve opens behind our backs from being reachable by everybody."""

from typing import Any

import ray
import ray.serve._private.replica

EVERYWHERE = "[::]:"


def keep_internal_port_on_node_address() -> None:
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
        host = f"[{node_address}]" if ":" in node_address else node_address
        return add_port(server, address.replace(EVERYWHERE, f"{host}:"))

    module.add_port_to_grpc_server = add_port_on_node_address
