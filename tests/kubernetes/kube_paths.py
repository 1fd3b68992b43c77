"""Where the cluster's files are, and the names and addresses of its parts.

Two folders are used: a cache, which keeps what was built, and the cluster's own folder, which
`make kubernetes-down` removes. All addresses are out of 198.18.0.0/15, which is meant for tests
of networks, and no namespace has an uplink.
"""

import os
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE = Path(
    os.environ.get("TRAMONTANE_KUBERNETES_CACHE", "~/.cache/tramontane-kubernetes")
).expanduser()
# hard links of the environment need one file system, so both are set where /var is another one
CLUSTER = Path(os.environ.get("TRAMONTANE_KUBERNETES", "/var/lib/tramontane-kubernetes"))

BINARIES = CACHE / "bin"
BUILDS = CACHE / "build"

CERTIFICATES = CLUSTER / "certificates"
IMAGES = CLUSTER / "images"
LOGS = CLUSTER / "log"
MANIFESTS = CLUSTER / "manifests"
NODES = CLUSTER / "nodes"
PROCESSES = CLUSTER / "processes"
KUBECONFIG = CERTIFICATES / "admin.conf"
GIVEN_IMAGE = IMAGES / "given"  # a link to the archive of a real image

CONTROL_PLANE = "tramontane-kube"  # its network namespace
CONTROL_PLANE_ADDRESS = "198.18.0.1"
API_SERVER = f"https://{CONTROL_PLANE_ADDRESS}:6443"
PODS = "198.18.0.0/16"
SERVICES = "198.19.0.0/16"
API_SERVICE = "198.19.0.1"
DNS_SERVICE = "198.19.0.10"
MAX_NODES = 60


def node_name(number: int) -> str:
    """The name of a node, which counts from 1; also of its network namespace."""
    return f"tramontane-node-{number}"


def node_address(number: int) -> str:
    """The address of a node."""
    return f"198.18.0.{10 + number}"


def pod_range(number: int) -> str:
    """The addresses of a node's pods."""
    return f"198.18.{100 + number}.0/24"


def pod_gateway(number: int) -> str:
    """The first address of a node's pods, by which they reach the node."""
    return f"198.18.{100 + number}.1"
