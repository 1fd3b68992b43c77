"""The control plane: etcd, API server, controller manager, scheduler, DNS, the KubeRay operator."""

from typing import Any

import kube_cgroups
import yaml
from kube_builds import OPERATOR_MANIFESTS
from kube_certificates import (
    AUTHORITY,
    SERVICE_ACCOUNTS,
    certificate_file,
    config_file,
    create_certificates,
    key_file,
)
from kube_images import DNS, OPERATOR
from kube_network import create_control_plane
from kube_paths import (
    BINARIES,
    CLUSTER,
    CONTROL_PLANE,
    CONTROL_PLANE_ADDRESS,
    DNS_SERVICE,
    SERVICES,
    node_name,
)
from kube_processes import in_network, inside, kubectl, start, stop, wait_until

GROUP = "control-plane"
SERVICE_NAMES = ("scheduler", "controller-manager", "api-server", "etcd")
ETCD = "http://127.0.0.1:2379"
DEMO_NAMESPACE = "llm"  # as in k8s/README.md
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
# pods of the application ask for whole CPUs, so those of the cluster itself are on one node
OF_THE_CLUSTER = {"kubernetes.io/hostname": node_name(1)}


def start_control_plane() -> None:
    """Start what does not run yet; return when the API server is ready."""
    create_control_plane()
    create_certificates()
    kube_cgroups.create(GROUP)
    _start_etcd()
    _start_api_server()
    is_ready = ["kubectl", "get", "--raw", "/readyz"]
    wait_until("the API server's start", lambda: inside(is_ready).stdout == "ok", 120, "api-server")
    _start_controllers()
    proxies = ["create", "clusterrolebinding", "kube-proxy", "--clusterrole=system:node-proxier"]
    binding = kubectl(*proxies, "--user=system:kube-proxy", "--dry-run=client", "--output=yaml")
    apply(binding)


def apply(manifest: str) -> None:
    """Apply a manifest, of any size."""
    arguments = ("--server-side", "--force-conflicts", "--filename=-")
    kubectl("apply", *arguments, text=manifest)


def start_system_pods() -> None:
    """Start CoreDNS and the operator, on the first node, and wait for them."""
    apply(yaml.safe_dump_all(_dns()))
    _apply_operator()
    for namespace, deployment in (("kube-system", "dns"), ("default", "kuberay-operator")):
        arguments = ("rollout", "status", f"deployment/{deployment}", "--timeout=180s")
        kubectl("--namespace", namespace, *arguments, timeout_s=200)
    create_namespace(DEMO_NAMESPACE)


def _apply_operator() -> None:
    """Apply the operator's manifests unless they are: its definitions take the API server a while.

    Creating them takes less than applying them, of which it records who owns each field.
    """
    text = yaml.safe_dump_all(_operator())
    applied = CLUSTER / "operator-applied"
    if applied.exists() and applied.read_text() == text:
        return
    if inside([str(BINARIES / "kubectl"), "create", "--filename=-"], text=text).returncode != 0:
        apply(text)
    applied.write_text(text)


def create_namespace(name: str) -> None:
    """Create a namespace with the pod security level "restricted"."""
    apply(kubectl("create", "namespace", name, "--dry-run=client", "--output=yaml"))
    kubectl("label", "--overwrite", "namespace", name, RESTRICTED)


def stop_control_plane() -> None:
    """End the control plane."""
    for name in SERVICE_NAMES:
        stop(name)
    kube_cgroups.end(GROUP)
    kube_cgroups.remove(GROUP)


def _start(name: str, *command: str) -> None:
    start(name, GROUP, [*in_network(CONTROL_PLANE), *command])


def _start_etcd() -> None:
    _start(
        "etcd",
        *("etcd", f"--data-dir={CLUSTER / 'etcd'}", "--logger=zap", "--log-level=warn"),
        *(f"--listen-client-urls={ETCD}", f"--advertise-client-urls={ETCD}"),
        *("--listen-peer-urls=http://127.0.0.1:2380", "--unsafe-no-fsync"),
    )


def _start_api_server() -> None:
    _start(
        "api-server",
        str(BINARIES / "kube-apiserver"),
        f"--etcd-servers={ETCD}",
        *(f"--advertise-address={CONTROL_PLANE_ADDRESS}", "--bind-address=0.0.0.0"),
        *("--secure-port=6443", f"--service-cluster-ip-range={SERVICES}"),
        *("--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction"),
        "--allow-privileged",
        f"--client-ca-file={certificate_file(AUTHORITY)}",
        f"--tls-cert-file={certificate_file('api-server')}",
        f"--tls-private-key-file={key_file('api-server')}",
        f"--kubelet-client-certificate={certificate_file('admin')}",
        f"--kubelet-client-key={key_file('admin')}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--service-account-key-file={SERVICE_ACCOUNTS}",
        f"--service-account-signing-key-file={SERVICE_ACCOUNTS}",
        "--service-account-issuer=https://kubernetes.default.svc",
        # it asks etcd for what Debian's version does not have, and waits in vain
        "--feature-gates=SizeBasedListCostEstimate=false",
    )


def _start_controllers() -> None:
    _start(
        "controller-manager",
        str(BINARIES / "kube-controller-manager"),
        f"--kubeconfig={config_file('controller-manager')}",
        *("--leader-elect=false", "--use-service-account-credentials"),
        f"--service-account-private-key-file={SERVICE_ACCOUNTS}",
        f"--root-ca-file={certificate_file(AUTHORITY)}",
        f"--cluster-signing-cert-file={certificate_file(AUTHORITY)}",
        f"--cluster-signing-key-file={key_file(AUTHORITY)}",
        "--bind-address=127.0.0.1",
    )
    _start(
        "scheduler",
        str(BINARIES / "kube-scheduler"),
        f"--kubeconfig={config_file('scheduler')}",
        *("--leader-elect=false", "--bind-address=127.0.0.1"),
    )


def _operator() -> list[dict[str, Any]]:
    """The operator's own manifests, with the image that was built here."""
    documents = list(yaml.safe_load_all(kubectl("kustomize", str(OPERATOR_MANIFESTS / "default"))))
    for document in documents:
        if document["kind"] == "Deployment":
            pod = document["spec"]["template"]["spec"]
            pod["nodeSelector"] = OF_THE_CLUSTER
            for container in pod["containers"]:
                container |= {"image": OPERATOR, "imagePullPolicy": "Never"}
    return documents


def _dns() -> list[dict[str, Any]]:
    """CoreDNS, which answers for the cluster's names only: there is nothing above it to ask."""
    metadata = {"name": "dns", "namespace": "kube-system"}
    account = {"kind": "ServiceAccount", **metadata}
    watched = ["endpoints", "services", "pods", "namespaces"]
    rules = [
        {"apiGroups": [""], "resources": watched, "verbs": ["list", "watch"]},
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["list", "watch"],
        },
    ]
    corefile = (
        ".:53 {\n  errors\n  health\n  ready\n  kubernetes cluster.local in-addr.arpa {\n"
        "    ttl 5\n  }\n  cache 5\n}\n"
    )
    container = {
        "name": "dns",
        "image": DNS,
        "imagePullPolicy": "Never",
        "args": ["-conf", "/etc/coredns/Corefile"],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
        "securityContext": {
            "runAsUser": 0,
            "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]},
        },
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}},
        "volumeMounts": [{"name": "corefile", "mountPath": "/etc/coredns"}],
    }
    pod = {
        "serviceAccountName": "dns",
        "priorityClassName": "system-cluster-critical",
        "dnsPolicy": "Default",
        "nodeSelector": OF_THE_CLUSTER,
        "containers": [container],
        "volumes": [{"name": "corefile", "configMap": {"name": "dns"}}],
    }
    labels = {"k8s-app": "kube-dns"}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:dns"}
    ports = [{"name": name, "port": 53, "protocol": name.upper()} for name in ("udp", "tcp")]
    rbac = "rbac.authorization.k8s.io/v1"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
        {
            "apiVersion": rbac,
            "kind": "ClusterRole",
            "metadata": {"name": "system:dns"},
            "rules": rules,
        },
        {
            "apiVersion": rbac,
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "system:dns"},
            "roleRef": role,
            "subjects": [account],
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "data": {"Corefile": corefile},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"clusterIP": DNS_SERVICE, "selector": labels, "ports": ports},
        },
    ]
