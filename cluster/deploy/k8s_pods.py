"""The pods of a RayService: the head, the ingresses, and one pod for each stage and expert actor.
Pure.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tramontane.proto.timing import TERMINATION_GRACE_S
from tramontane.proto.units import GIB

Document = dict[str, Any]

IMAGE = "tramontane"  # a placeholder, for which kustomization.yaml has the image
APP_LABEL, ROLE_LABEL = "app", "tramontane-role"
HEAD, INGRESS, STAGE, EXPERT = "head", "ingress", "stage", "expert"
NUM_INGRESSES = 2  # one may fail
HTTP_PORT, GRPC_PORT = 8000, 9000
SERVE_PORTS = MappingProxyType({"serve": HTTP_PORT, "serve-grpc": GRPC_PORT})
AGENT_PORT = 52365  # of Ray's agent in every pod, which reports the health of the pod's raylet
USER = 1000  # of the image
# Ray resources that only an ingress pod offers: for one ingress replica and any number of routers.
# None is placed on the head, whose death would then end their requests, nor on a pod with a GPU.
# Ray Serve gives a proxy only to a pod with a replica: with room for two, the one pod that is left
# by the loss of the other would take both, and the successor of the lost pod would never be ready.
INGRESS_RESOURCE, ROUTER_RESOURCE = "tramontane_ingress", "tramontane_router"
ROUTERS_PER_INGRESS = 100
KEYS_FOLDER, KEYS_FILE = "/etc/tramontane", "keys"
MODELS_FOLDER = "/models"
# of a GPU's pod: Ray, CUDA's host memory, and parts of the checkpoint while it is loaded
HOST_BYTES = 12 * GIB


@dataclass(frozen=True, slots=True)
class PodSizes:
    """The size of the pods, next to what the plan of the stages needs.

    ``store_bytes``: Ray's object store in each pod, for some micro-batches of hidden states.
    ``overhead_bytes``: of a pod without a GPU, in addition to its stage's memory. ``requests``:
    what each pod reserves on its node; None for as much as its limits.
    """

    store_bytes: int
    head_bytes: int
    ingress_bytes: int
    overhead_bytes: int
    requests: tuple[tuple[str, str], ...] | None = None


SERVER_SIZES = PodSizes(GIB, 8 * GIB, 6 * GIB, 3 * GIB)
# Of the demo, whose five pods fit on a laptop: reserved are 2.5 CPUs and 5 GiB. Idle, a head had
# 0.8 GiB, an ingress and a stage 0.5 GiB each (docs/reports/kubernetes-2026-11-30.md).
DEMO_SIZES = PodSizes(
    GIB // 4, 3 * GIB, 2 * GIB, 3 * GIB // 2, (("cpu", "500m"), ("memory", "1Gi"))
)


@dataclass(frozen=True, slots=True)
class PodSettings:
    """What all pods have in common. ``name`` is that of the RayService, in every other name and in
    the label ``app``; ``model`` is the folder's name, None for the demo model.
    """

    name: str
    model: str | None
    sizes: PodSizes

    @property
    def environment(self) -> str:
        """The ConfigMap with SERVE_SETTINGS and RAY_SETTINGS."""
        return f"{self.name}-settings"

    @property
    def keys_secret(self) -> str:
        """The Secret of the API keys."""
        return f"{self.name}-api-keys"

    @property
    def models_claim(self) -> str:
        """The claim of the volume with checkpoints."""
        return f"{self.name}-models"

    def labels(self, role: str) -> dict[str, str]:
        """Return the labels by which selectors find the pods of a role."""
        return {APP_LABEL: self.name, ROLE_LABEL: role}


@dataclass(frozen=True, slots=True)
class WorkerPodSpec:
    """The pod of a stage or an expert actor; ``memory`` is its GPU's, or the memory that it may use
    without a GPU.
    """

    threads: int
    memory: int
    has_gpu: bool


def head_group(pods: PodSettings, is_autoscaled: bool) -> Document:
    """Return the head, which offers no CPU: no actor of a pipeline is placed on it, and plans do
    not count it.

    Its ports named "serve..." are those that the operator's own Service gets. Ray's autoscaler is
    a container of the head, which calls the API server of Kubernetes.
    """
    ports = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, **SERVE_PORTS}
    container = _container("ray-head", 2, pods.sizes.head_bytes, ports, pods)
    spec = _pod_spec(container, pods, needs_token=is_autoscaled)
    if pods.model is not None:  # so that the application is not deployed before the model is there
        spec["initContainers"] = [_wait_for_model(pods.model)]
    return {
        "rayStartParams": _ray_start_params(0, pods.sizes) | {"dashboard-host": "0.0.0.0"},
        "template": _template(pods.labels(HEAD), spec),
    }


def ingress_group(pods: PodSettings) -> Document:
    """Return the pods of HTTP and gRPC, with the ingress replicas and the routers."""
    container = _container("ray-worker", 2, pods.sizes.ingress_bytes, SERVE_PORTS, pods)
    container["volumeMounts"].append(
        {"name": "api-keys", "mountPath": KEYS_FOLDER, "readOnly": True}
    )
    container["lifecycle"] = {
        "preStop": {
            "exec": {"command": ["/bin/sh", "-c", f"sleep {TERMINATION_GRACE_S}; ray stop"]}
        }
    }
    spec = _pod_spec(container, pods)
    spec["volumes"].append({"name": "api-keys", "secret": {"secretName": pods.keys_secret}})
    spec["terminationGracePeriodSeconds"] = TERMINATION_GRACE_S + 30
    elsewhere = {
        "labelSelector": {"matchLabels": pods.labels(INGRESS)},
        "topologyKey": "kubernetes.io/hostname",
    }
    preferred = {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 100, "podAffinityTerm": elsewhere}
        ]
    }
    spec["affinity"] = {"podAntiAffinity": preferred}
    offered = json.dumps({INGRESS_RESOURCE: 1, ROUTER_RESOURCE: ROUTERS_PER_INGRESS})
    # in single quotes: the operator puts it into a shell command, and parses what is between them
    start = _ray_start_params(0, pods.sizes) | {"resources": f"'{offered}'"}
    template = _template(pods.labels(INGRESS), spec)
    return _group("ingress", NUM_INGRESSES, NUM_INGRESSES, start, template)


def worker_group(
    role: str, name: str, counts: tuple[int, int], pod: WorkerPodSpec, pods: PodSettings
) -> Document:
    """Return pods with one actor each, so that Kubernetes replaces exactly the lost ones.
    ``counts``: the least and the most of them.

    They have their own readiness probe: the operator's checks Ray Serve's proxy, which only ingress
    pods have, and a PodDisruptionBudget counts only ready pods. A pod that is to end leaves Ray at
    once, so that its actor starts elsewhere without delay.
    """
    num_bytes = HOST_BYTES if pod.has_gpu else pod.memory + pods.sizes.overhead_bytes
    container = _container("ray-worker", pod.threads + 1, num_bytes, {}, pods)
    container["lifecycle"] = {"preStop": {"exec": {"command": ["ray", "stop"]}}}
    container["readinessProbe"] = {
        "httpGet": {"path": "/api/healthz", "port": AGENT_PORT},
        "periodSeconds": 5,
    }
    spec = _pod_spec(container, pods)
    start = _ray_start_params(pod.threads, pods.sizes)
    if pod.has_gpu:
        for kind in ("requests", "limits"):
            container["resources"][kind]["nvidia.com/gpu"] = "1"
        start |= {"num-gpus": "1"}
        spec["tolerations"] = [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        ]
    else:
        # the memory that the plan assumes; Ray would count all memory of the pod
        start |= {"memory": str(pod.memory)}
    return _group(name, *counts, start, _template(pods.labels(role), spec))


def _group(
    name: str, min_pods: int, max_pods: int, start: dict[str, str], template: Document
) -> Document:
    counts = {"replicas": min_pods, "minReplicas": min_pods, "maxReplicas": max_pods}
    return {"groupName": name, **counts, "rayStartParams": start, "template": template}


def _ray_start_params(num_cpus: int, sizes: PodSizes) -> dict[str, str]:
    """Return the parameters of ``ray start``. OMP_NUM_THREADS is not set, so Ray derives the
    actors' threads from num-cpus. A log monitor would send the lines of workers to drivers, of
    which there are none.
    """
    return {
        "num-cpus": str(num_cpus),
        "object-store-memory": str(sizes.store_bytes),
        "include-log-monitor": "false",
    }


def _template(labels: dict[str, str], spec: Document) -> Document:
    return {"metadata": {"labels": labels}, "spec": spec}


def _container(
    name: str, cpus: int, memory: int, ports: Mapping[str, int], pods: PodSettings
) -> Document:
    limits = {"cpu": str(cpus), "memory": f"{-(-memory // GIB)}Gi"}
    requests = dict(limits if pods.sizes.requests is None else pods.sizes.requests)
    mounts: list[Document] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if pods.model is not None:
        mounts.append({"name": "models", "mountPath": MODELS_FOLDER, "readOnly": True})
    return {
        "name": name,
        "image": IMAGE,
        "envFrom": [{"configMapRef": {"name": pods.environment}}],
        "resources": {"requests": requests, "limits": limits},
        **(
            {"ports": [{"name": port, "containerPort": number} for port, number in ports.items()]}
            if ports
            else {}
        ),
        "securityContext": container_security(),
        "volumeMounts": mounts,
    }


def container_security() -> Document:
    """Return what the pod security level "restricted" asks of each container."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _pod_spec(container: Document, pods: PodSettings, needs_token: bool = False) -> Document:
    """Return a pod. ``needs_token``: whether it calls the API server of Kubernetes; others execute
    code that they receive, and get no token for it.
    """
    claim = {"claimName": pods.models_claim, "readOnly": True}
    models = [{"name": "models", "persistentVolumeClaim": claim}]
    store = f"{2 * pods.sizes.store_bytes // 2**20}Mi"
    return {
        "automountServiceAccountToken": needs_token,
        "securityContext": {
            **{"runAsNonRoot": True, "runAsUser": USER, "fsGroup": USER},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {
                "name": "shm",
                "emptyDir": {"medium": "Memory", "sizeLimit": store},
            },
            *(models if pods.model is not None else []),
        ],
    }


def _wait_for_model(model: str) -> Document:
    until = (
        f"until [ -d {MODELS_FOLDER}/{model} ]; do echo waiting for {MODELS_FOLDER}/{model}; sleep"
        " 10; done"
    )
    amount = {"cpu": "100m", "memory": "64Mi"}
    return {
        "name": "wait-for-model",
        "image": IMAGE,
        "command": ["/bin/sh", "-c", until],
        "resources": {"requests": amount, "limits": dict(amount)},
        "securityContext": container_security(),
        "volumeMounts": [{"name": "models", "mountPath": MODELS_FOLDER, "readOnly": True}],
    }
