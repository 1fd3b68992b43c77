"""The pods of a RayService: the head, the doors, and one pod for each stage and expert actor."""

import json
from dataclasses import dataclass
from typing import Any

from tramontane.proto.byte_size import GIB

Document = dict[str, Any]

IMAGE = "tramontane"  # which kustomize replaces, as kustomization.yaml says
APP_LABEL, ROLE_LABEL = "app", "tramontane-role"
HEAD, DOOR, STAGE, EXPERT = "head", "door", "stage", "expert"
NUM_DOORS = 2  # one may go
HTTP_PORT, GRPC_PORT = 8000, 9000
AGENT_PORT = 52365  # of Ray's agent in every pod, which says whether the pod's raylet is well
USER = 1000  # of the image
# Ray's words for what only a door's pod offers: one ingress replica each, and any number of routers. Neither is put on the head,
# whose death would then take the answers along, nor on a GPU's pod.
INGRESS_RESOURCE, ROUTER_RESOURCE = "tramontane_ingress", "tramontane_router"
ROUTERS_PER_DOOR = 100
SETTINGS = "tramontane-settings"  # the ConfigMap with SERVE_SETTINGS and RAY_SETTINGS
KEYS_SECRET, KEYS_FOLDER, KEYS_FILE = "tramontane-api-keys", "/etc/tramontane", "keys"
MODELS_CLAIM, MODELS_FOLDER = "tramontane-models", "/models"
STORE_BYTES = GIB  # Ray's object store in each pod: some micro-batches of hidden states
HOST_BYTES = 12 * GIB  # of a GPU's pod: Ray, CUDA's host side, and pieces of the checkpoint on their way
OVERHEAD_BYTES = 3 * GIB  # of a pod without a GPU, beside what its stage may use
HEAD_BYTES, DOOR_BYTES = 8 * GIB, 6 * GIB
TERMINATION_GRACE_S = 120  # for which a door that is to go still finishes streams; the Service sends it no new ones


@dataclass(frozen=True, slots=True)
class WorkerPodSpec:
    """What each stage or expert actor gets; ``memory`` is of its GPU, or without one what it may use."""

    threads: int
    memory: int
    has_gpu: bool


def head_group(model: str | None) -> Document:
    """It offers no CPU: nothing of a pipeline is placed here, and plans do not count it."""
    ports = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "serve": HTTP_PORT}
    container = _container("ray-head", 2, HEAD_BYTES, ports, model)
    spec = _pod_spec(container, model)
    if model is not None:  # so that nothing is deployed before there is a model to deploy
        spec["initContainers"] = [_waiting_for(model)]
    return {"rayStartParams": _ray_start_params(0) | {"dashboard-host": "0.0.0.0"}, "template": _template(HEAD, spec)}


def ingress_group(model: str | None) -> Document:
    """HTTP and gRPC, the ingress replicas behind them, and the routers."""
    container = _container("ray-worker", 2, DOOR_BYTES, {"serve": HTTP_PORT, "serve-grpc": GRPC_PORT}, model)
    container["volumeMounts"].append({"name": "api-keys", "mountPath": KEYS_FOLDER, "readOnly": True})
    container["lifecycle"] = {"preStop": {"exec": {"command": ["/bin/sh", "-c", f"sleep {TERMINATION_GRACE_S}; ray stop"]}}}
    spec = _pod_spec(container, model)
    spec["volumes"].append({"name": "api-keys", "secret": {"secretName": KEYS_SECRET}})
    spec["terminationGracePeriodSeconds"] = TERMINATION_GRACE_S + 30
    elsewhere = {"labelSelector": {"matchLabels": _labels(DOOR)}, "topologyKey": "kubernetes.io/hostname"}
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": elsewhere}]}
    spec["affinity"] = {"podAntiAffinity": preferred}
    offered = json.dumps({INGRESS_RESOURCE: 1, ROUTER_RESOURCE: ROUTERS_PER_DOOR})
    start = _ray_start_params(0) | {"resources": json.dumps(offered)}  # quoted twice: the operator puts it into a shell's line
    return _group("doors", NUM_DOORS, NUM_DOORS, start, _template(DOOR, spec))


def worker_group(role: str, name: str, least: int, most: int, each: WorkerPodSpec, model: str | None) -> Document:
    """One actor per pod, so that Kubernetes replaces one where one is lost.

    The pods have a readiness probe of their own: the operator's asks for Ray Serve's proxy, which is in the doors' only, and a
    PodDisruptionBudget counts none that are not ready.
    """
    container = _container("ray-worker", each.threads + 1, _pod_bytes(each), {}, model)
    container["readinessProbe"] = {"httpGet": {"path": "/api/healthz", "port": AGENT_PORT}, "periodSeconds": 5}
    spec = _pod_spec(container, model)
    start = _ray_start_params(each.threads)
    if each.has_gpu:
        for kind in ("requests", "limits"):
            container["resources"][kind]["nvidia.com/gpu"] = "1"
        start |= {"num-gpus": "1"}
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    else:
        start |= {"memory": str(each.memory)}  # with which the stage is planned; Ray would count all of the pod's
    return _group(name, least, most, start, _template(role, spec))


def _group(name: str, least: int, most: int, start: dict[str, str], template: Document) -> Document:
    counts = {"replicas": least, "minReplicas": least, "maxReplicas": most}
    return {"groupName": name, **counts, "rayStartParams": start, "template": template}


def _ray_start_params(num_cpus: int) -> dict[str, str]:
    """Also how many threads Ray gives those actors' libraries: OMP_NUM_THREADS is set nowhere."""
    return {"num-cpus": str(num_cpus), "object-store-memory": str(STORE_BYTES)}


def _pod_bytes(each: WorkerPodSpec) -> int:
    return HOST_BYTES if each.has_gpu else each.memory + OVERHEAD_BYTES


def _labels(role: str) -> dict[str, str]:
    return {APP_LABEL: "tramontane", ROLE_LABEL: role}


def _template(role: str, spec: Document) -> Document:
    return {"metadata": {"labels": _labels(role)}, "spec": spec}


def _container(name: str, cpus: int, memory: int, ports: dict[str, int], model: str | None) -> Document:
    amount = {"cpu": str(cpus), "memory": f"{-(-memory // GIB)}Gi"}
    mounts: list[Document] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if model is not None:
        mounts.append({"name": "models", "mountPath": MODELS_FOLDER, "readOnly": True})
    return {
        "name": name,
        "image": IMAGE,
        "envFrom": [{"configMapRef": {"name": SETTINGS}}],
        "resources": {"requests": dict(amount), "limits": dict(amount)},
        **({"ports": [{"name": port, "containerPort": number} for port, number in ports.items()]} if ports else {}),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }


def _pod_spec(container: Document, model: str | None) -> Document:
    claim = {"claimName": MODELS_CLAIM, "readOnly": True}
    return {
        "securityContext": {
            **{"runAsNonRoot": True, "runAsUser": USER, "fsGroup": USER},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{2 * STORE_BYTES // GIB}Gi"}},
            *([{"name": "models", "persistentVolumeClaim": claim}] if model is not None else []),
        ],
    }


def _waiting_for(model: str) -> Document:
    until = f"until [ -d {MODELS_FOLDER}/{model} ]; do echo waiting for {MODELS_FOLDER}/{model}; sleep 10; done"
    amount = {"cpu": "100m", "memory": "64Mi"}
    return {
        "name": "wait-for-model",
        "image": IMAGE,
        "command": ["/bin/sh", "-c", until],
        "resources": {"requests": amount, "limits": dict(amount)},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "models", "mountPath": MODELS_FOLDER, "readOnly": True}],
    }
