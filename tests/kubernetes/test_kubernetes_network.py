"""Which addresses reach what: the operator's own Service, and nothing outside of the cluster."""

import json
import socket
import subprocess
import sys
from collections import Counter

from kube_application import Application, inside_node
from kube_nodes import nodes_with_folders
from kube_paths import CONTROL_PLANE, CONTROL_PLANE_ADDRESS, node_name
from kube_processes import in_network
from kube_report import Report

CONNECT = """
import socket, sys
for address in sys.argv[2:]:
    try:
        socket.create_connection((address, int(sys.argv[1])), timeout=2).close()
        print(address)
    except OSError:
        pass
"""


def test_the_operators_own_service_has_ready_proxies_only(
    demo: Application, report: Report
) -> None:
    """Pods of stages are Ready too, and have no proxy."""
    statuses = Counter(ask_the_operators_service(demo) for _ in range(16))
    report.add("16 requests to tramontane-serve-svc", f"{dict(statuses)}")
    assert statuses == {"200": 16}


def ask_the_operators_service(application: Application) -> str:
    """The status of a completion by the Service that the operator makes; "000" without one."""
    spec = application.get("service", f"{application.name}-serve-svc")["spec"]
    body = json.dumps({"model": "demo", "prompt": "The wind", "max_tokens": 4})
    words = ("curl", "-sS", "--max-time", "60", "--output", "/dev/null")
    options = ("--write-out", "%{http_code}", "--data", body)
    headers = (f"Authorization: Bearer {application.key}", "Content-Type: application/json")
    with_headers = [word for each in headers for word in ("--header", each)]
    url = f"http://{spec['clusterIP']}:8000/v1/completions"
    return inside_node([*words, *options, *with_headers, url]).stdout


def test_nothing_in_the_cluster_reaches_outside(cluster: None, report: Report) -> None:
    """Nodes and the control plane connect to each other, and not to this machine."""
    namespaces = [CONTROL_PLANE, *map(node_name, nodes_with_folders())]
    with socket.create_server(("", 0)) as listener:
        port = str(listener.getsockname()[1])
        outside = own_addresses()
        assert reached(None, port, outside) == outside
        for each in namespaces:
            assert reached(each, port, outside) == []
    for each in namespaces:
        assert reached(each, "6443", [CONTROL_PLANE_ADDRESS]) == [CONTROL_PLANE_ADDRESS]
    result = f"{len(namespaces)} namespaces reach none of {len(outside)} addresses of the machine"
    report.add("connections out of the cluster", result)


def own_addresses() -> list[str]:
    """The addresses of this machine's devices outside of all namespaces, without 127.0.0.1."""
    devices = json.loads(subprocess.check_output(["ip", "-j", "-4", "address"]))
    found = [each["local"] for device in devices for each in device["addr_info"]]
    others = [each for each in found if not each.startswith("127.")]
    assert others, "this machine has no address"
    return others


def reached(namespace: str | None, port: str, addresses: list[str]) -> list[str]:
    """The addresses at which a connection succeeds from a namespace; None: from this process'."""
    words = in_network(namespace) if namespace else []
    command = [*words, sys.executable, "-c", CONNECT, port, *addresses]
    return subprocess.check_output(command, text=True).split()
