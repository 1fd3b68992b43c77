"""The network namespaces of the control plane and the nodes, joined by a bridge without an uplink.

Pods of a node have a range of its own, to which every other node has a route.
"""

import subprocess
from pathlib import Path

from kube_paths import CONTROL_PLANE, CONTROL_PLANE_ADDRESS, node_address, node_name, pod_range
from kube_processes import in_network

from tramontane.proto.errors import UserError

BRIDGE = "bridge"
NAMESPACES = Path("/run/netns")


def check_namespaces() -> None:
    """Raise a UserError where network namespaces cannot be made."""
    done = subprocess.run(["unshare", "--net", "--mount", "true"], check=False, capture_output=True)
    if done.returncode != 0:
        raise UserError(
            "this machine does not allow network namespaces"
            f" ({done.stderr.decode().strip()}): use a virtual machine, or a privileged container"
        )


def create_control_plane() -> None:
    """Create the namespace of the control plane, with the bridge."""
    if not (NAMESPACES / CONTROL_PLANE).exists():
        _ip("netns", "add", CONTROL_PLANE)
    _inside(
        CONTROL_PLANE,
        f"""ip link set lo up
        ip link show {BRIDGE} > /dev/null 2>&1 || ip link add {BRIDGE} type bridge
        ip addr replace {CONTROL_PLANE_ADDRESS}/24 dev {BRIDGE}
        ip link set {BRIDGE} up
        echo 1 > /proc/sys/net/ipv4/ip_forward""",
    )


def create_node(number: int, others: list[int]) -> None:
    """Create the namespace of a node and its routes to and from the others."""
    name, peer = node_name(number), f"node{number}"
    if not (NAMESPACES / name).exists():
        _ip("netns", "add", name)
    _inside(
        CONTROL_PLANE,
        f"""ip link show {peer} > /dev/null 2>&1 ||
        ip link add {peer} type veth peer name eth0 netns {name}
        ip link set {peer} master {BRIDGE} up
        ip route replace {pod_range(number)} via {node_address(number)}""",
    )
    routes = "\n".join(
        f"ip route replace {pod_range(other)} via {node_address(other)}" for other in others
    )
    _inside(
        name,
        f"""ip link set lo up
        ip addr replace {node_address(number)}/24 dev eth0
        ip link set eth0 up
        ip route replace default via {CONTROL_PLANE_ADDRESS}
        echo 1 > /proc/sys/net/ipv4/ip_forward
        echo 1 > /proc/sys/net/ipv4/conf/all/route_localnet
        {routes}""",
    )
    for other in others:
        _inside(
            node_name(other), f"ip route replace {pod_range(number)} via {node_address(number)}"
        )


def remove(name: str) -> None:
    """Remove a namespace, with its ends of links and its routes."""
    if (NAMESPACES / name).exists():
        _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _inside(namespace: str, script: str) -> None:
    """Run lines of shell in a namespace."""
    done = subprocess.run(
        [*in_network(namespace), "sh", "-ec", script], check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise UserError(f"the network of {namespace} cannot be made: {done.stderr.strip()}")
