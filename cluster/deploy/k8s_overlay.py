"""A kustomize overlay for the KubeRay operator: the files of a folder, from the model and its
pipeline. Pure.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import yaml

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.ray_internals.symbol import RAY_VERSION
from tramontane.cluster.serving.app import APPLICATION, GRPC_FUNCTIONS
from tramontane.cluster.serving.autoscaling import autoscaling_fields
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.timing import TERMINATION_GRACE_S
from tramontane.proto.units import GIB

# The pods of a RayService: the head, the ingresses, and one pod for each stage and expert actor.

Document = dict[str, Any]

IMAGE = "tramontane"  # replaced by the image in kustomization.yaml
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
SETTINGS = "tramontane-settings"  # the ConfigMap with SERVE_SETTINGS and RAY_SETTINGS
KEYS_SECRET, KEYS_FOLDER, KEYS_FILE = "tramontane-api-keys", "/etc/tramontane", "keys"
MODELS_CLAIM, MODELS_FOLDER = "tramontane-models", "/models"
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
# Of the demo, whose five pods fit on a laptop: reserved are 2.5 CPUs and 5 GiB. Idle, a head uses
# 1.1 GiB, an ingress and a stage up to 0.9 GiB each (k8s/README.md).
DEMO_SIZES = PodSizes(
    GIB // 4, 3 * GIB, 2 * GIB, 3 * GIB // 2, (("cpu", "500m"), ("memory", "1Gi"))
)


@dataclass(frozen=True, slots=True)
class WorkerPodSpec:
    """The pod of a stage or an expert actor; ``memory`` is its GPU's, or the memory that it may use
    without a GPU.
    """

    threads: int
    memory: int
    has_gpu: bool


def head_group(model: str | None, sizes: PodSizes, is_autoscaled: bool) -> Document:
    """Return the head, which offers no CPU: no actor of a pipeline is placed on it, and plans do
    not count it.

    Its ports named "serve..." are those that the operator's own Service gets. Ray's autoscaler is
    a container of the head, which calls the API server of Kubernetes.
    """
    ports = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, **SERVE_PORTS}
    container = _container("ray-head", 2, sizes.head_bytes, ports, model, sizes)
    spec = _pod_spec(container, model, sizes, needs_token=is_autoscaled)
    if model is not None:  # so that the application is not deployed before the model is there
        spec["initContainers"] = [_wait_for_model(model)]
    return {
        "rayStartParams": _ray_start_params(0, sizes) | {"dashboard-host": "0.0.0.0"},
        "template": _template(HEAD, spec),
    }


def ingress_group(model: str | None, sizes: PodSizes) -> Document:
    """Return the pods of HTTP and gRPC, with the ingress replicas and the routers."""
    container = _container("ray-worker", 2, sizes.ingress_bytes, SERVE_PORTS, model, sizes)
    container["volumeMounts"].append(
        {"name": "api-keys", "mountPath": KEYS_FOLDER, "readOnly": True}
    )
    container["lifecycle"] = {
        "preStop": {
            "exec": {"command": ["/bin/sh", "-c", f"sleep {TERMINATION_GRACE_S}; ray stop"]}
        }
    }
    spec = _pod_spec(container, model, sizes)
    spec["volumes"].append({"name": "api-keys", "secret": {"secretName": KEYS_SECRET}})
    spec["terminationGracePeriodSeconds"] = TERMINATION_GRACE_S + 30
    elsewhere = {
        "labelSelector": {"matchLabels": _labels(INGRESS)},
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
    start = _ray_start_params(0, sizes) | {"resources": f"'{offered}'"}
    return _group("ingress", NUM_INGRESSES, NUM_INGRESSES, start, _template(INGRESS, spec))


def worker_group(
    role: str,
    name: str,
    pods: tuple[int, int],
    pod: WorkerPodSpec,
    model: str | None,
    sizes: PodSizes,
) -> Document:
    """Return pods with one actor each, so that Kubernetes replaces exactly the lost ones.
    ``pods``: the least and the most of them.

    They have their own readiness probe: the operator's checks Ray Serve's proxy, which only ingress
    pods have, and a PodDisruptionBudget counts only ready pods. A pod that is to end leaves Ray at
    once, so that its actor starts elsewhere without delay.
    """
    num_bytes = HOST_BYTES if pod.has_gpu else pod.memory + sizes.overhead_bytes
    container = _container("ray-worker", pod.threads + 1, num_bytes, {}, model, sizes)
    container["lifecycle"] = {"preStop": {"exec": {"command": ["ray", "stop"]}}}
    container["readinessProbe"] = {
        "httpGet": {"path": "/api/healthz", "port": AGENT_PORT},
        "periodSeconds": 5,
    }
    spec = _pod_spec(container, model, sizes)
    start = _ray_start_params(pod.threads, sizes)
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
    return _group(name, *pods, start, _template(role, spec))


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


def _labels(role: str) -> dict[str, str]:
    return {APP_LABEL: "tramontane", ROLE_LABEL: role}


def _template(role: str, spec: Document) -> Document:
    return {"metadata": {"labels": _labels(role)}, "spec": spec}


def _container(
    name: str,
    cpus: int,
    memory: int,
    ports: Mapping[str, int],
    model: str | None,
    sizes: PodSizes,
) -> Document:
    limits = {"cpu": str(cpus), "memory": f"{-(-memory // GIB)}Gi"}
    requests = dict(limits if sizes.requests is None else sizes.requests)
    mounts: list[Document] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if model is not None:
        mounts.append({"name": "models", "mountPath": MODELS_FOLDER, "readOnly": True})
    return {
        "name": name,
        "image": IMAGE,
        "envFrom": [{"configMapRef": {"name": SETTINGS}}],
        "resources": {"requests": requests, "limits": limits},
        **(
            {"ports": [{"name": port, "containerPort": number} for port, number in ports.items()]}
            if ports
            else {}
        ),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }


def _pod_spec(
    container: Document, model: str | None, sizes: PodSizes, needs_token: bool = False
) -> Document:
    """Return a pod. ``needs_token``: whether it calls the API server of Kubernetes; others execute
    code that they receive, and get no token for it.
    """
    claim = {"claimName": MODELS_CLAIM, "readOnly": True}
    store = f"{2 * sizes.store_bytes // 2**20}Mi"
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
            *([{"name": "models", "persistentVolumeClaim": claim}] if model is not None else []),
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
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "models", "mountPath": MODELS_FOLDER, "readOnly": True}],
    }


MARK = "# Written by: "
NAME = "tramontane"  # of the RayService
MODEL_FILE = "model.yaml"
FILES = ("kustomization.yaml", "rayservice.yaml", "disruption-budget.yaml", MODEL_FILE)
# nodes with GPUs may have to be started, and the operator deploys a config only once
NODES_TIMEOUT_S = 3600.0
IDLE_TIMEOUT_S = 300  # of a node that Ray's autoscaler has started
REDIS, REDIS_SECRET = "tramontane-redis", "tramontane-redis"


@dataclass(frozen=True, slots=True)
class Overlay:
    """A served model. ``args`` are the keys of the application; ``config`` is built from them and
    the number of pipelines.

    ``model`` is the name of the model's folder; None for the demo model.
    """

    command: str
    args: dict[str, Any]
    config: EngineConfig
    plan: PipelinePlan
    model: str | None
    workers: WorkerPodSpec
    redis: bool
    image: str
    base: str

    @property
    def sizes(self) -> PodSizes:
        """The size of its pods."""
        return DEMO_SIZES if self.model is None else SERVER_SIZES

    @property
    def is_autoscaled(self) -> bool:
        """True if the number of pipelines may change."""
        return self.config.max_pipelines > self.config.replicas


def overlay_files(overlay: Overlay) -> dict[str, str]:
    """Return the contents of the files, by name."""
    documents = {
        "kustomization.yaml": _kustomization(overlay),
        "rayservice.yaml": _ray_service(overlay),
        "disruption-budget.yaml": _disruption_budget(overlay),
    }
    if overlay.model is not None:
        documents[MODEL_FILE] = _model_name(overlay.model)
    return {name: _dump(overlay, document) for name, document in documents.items()}


def serve_config(overlay: Overlay) -> Document:
    """Return the Ray Serve config. The number of pipelines is not in ``args``: a change there would
    replace all of them.
    """
    args: Document = {} if overlay.model is None else {"model": f"{MODELS_FOLDER}/{overlay.model}"}
    args |= {
        "api_key_file": f"{KEYS_FOLDER}/{KEYS_FILE}",
        "placement_timeout": NODES_TIMEOUT_S,
        "ingress_replicas": NUM_INGRESSES,
    }
    application = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": "tramontane.cluster.serving.app:build",
        "args": args | overlay.args,
        "deployments": [
            {
                "name": "Router",
                **_pipelines(overlay),
                "ray_actor_options": _needs(ROUTER_RESOURCE),
            },
            {"name": "Batch", "num_replicas": 1, "ray_actor_options": _needs(ROUTER_RESOURCE)},
            {
                "name": "Ingress",
                "num_replicas": NUM_INGRESSES,
                # one after the other in an upgrade: a pod has room for one
                "max_surge_percent": 0,
                "ray_actor_options": _needs(INGRESS_RESOURCE),
            },
        ],
    }
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": HTTP_PORT},
        "grpc_options": {
            "port": GRPC_PORT,
            "enable_reflection": False,
            "grpc_servicer_functions": list(GRPC_FUNCTIONS),
        },
        "applications": [application],
    }


def _pipelines(overlay: Overlay) -> Document:
    if not overlay.is_autoscaled:
        return {"num_replicas": overlay.config.replicas}
    return {"autoscaling_config": autoscaling_fields(overlay.config, overlay.plan.max_num_seqs)}


def _needs(resource: str) -> Document:
    return {"num_cpus": 0, "resources": {resource: 1}}


def _ray_service(overlay: Overlay) -> Document:
    cluster: Document = {"rayVersion": RAY_VERSION, "authOptions": {"mode": "token"}}
    if overlay.redis:
        password = {"valueFrom": {"secretKeyRef": {"name": REDIS_SECRET, "key": "password"}}}
        cluster["gcsFaultToleranceOptions"] = {
            "redisAddress": f"{REDIS}:6379",
            "redisPassword": password,
        }
    if overlay.is_autoscaled:
        cluster["enableInTreeAutoscaling"] = True
        cluster["autoscalerOptions"] = {
            "version": "v2",
            "upscalingMode": "Default",
            "idleTimeoutSeconds": IDLE_TIMEOUT_S,
        }
    model, sizes = overlay.model, overlay.sizes
    cluster["headGroupSpec"] = head_group(model, sizes, overlay.is_autoscaled)
    cluster["workerGroupSpecs"] = [ingress_group(model, sizes), *_actors(overlay)]
    spec = {
        # a second cluster next to this one would need the same number of GPUs again
        "upgradeStrategy": {"type": "None"},
        "excludeHeadPodFromServeSvc": True,
        "serveService": _serve_service(),
        "serveConfigV2": yaml.safe_dump(serve_config(overlay), sort_keys=False),
        "rayClusterConfig": cluster,
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": NAME},
        "spec": spec,
    }


def _serve_service() -> Document:
    """Return the ports of the operator's own Service. They are named as ports of containers, which
    only pods with a proxy have, so that it sends no request to the stages' pods.
    """
    ports: list[Document] = [
        {"name": name, "port": number, "targetPort": name} for name, number in SERVE_PORTS.items()
    ]
    ports[-1]["appProtocol"] = "kubernetes.io/h2c"
    return {"spec": {"ports": ports}}


def _actors(overlay: Overlay) -> list[Document]:
    config = overlay.config
    groups = [
        (STAGE, "stages", len(overlay.plan.stages)),
        (EXPERT, "experts", config.expert_actors),
    ]
    return [
        worker_group(
            role,
            name,
            (count * config.replicas, count * config.max_pipelines),
            overlay.workers,
            overlay.model,
            overlay.sizes,
        )
        for role, name, count in groups
        if count
    ]


def _kustomization(overlay: Overlay) -> Document:
    folders = [
        "base",
        *(["models-volume"] if overlay.model is not None else []),
        *(["redis"] if overlay.redis else []),
    ]
    name, _, tag = overlay.image.rpartition(":")
    document: Document = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [
            *(f"{overlay.base}/{folder}" for folder in folders),
            "rayservice.yaml",
            "disruption-budget.yaml",
        ],
    }
    if overlay.model is not None:
        document["patches"] = [{"path": MODEL_FILE}]
    return document | {"images": [{"name": IMAGE, "newName": name, "newTag": tag}]}


def _disruption_budget(overlay: Overlay) -> Document:
    """Let nodes be drained one at a time, so that a pipeline waits for one stage only."""
    num_pods = (len(overlay.plan.stages) + overlay.config.expert_actors) * overlay.config.replicas
    roles = [{"key": ROLE_LABEL, "operator": "In", "values": [STAGE, EXPERT]}]
    selector = {"matchLabels": {APP_LABEL: NAME}, "matchExpressions": roles}
    spec = {"minAvailable": num_pods - 1, "selector": selector}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "tramontane-stages"},
        "spec": spec,
    }


def _model_name(model: str) -> Document:
    """Return the model's name, for the job that copies it into the volume."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "tramontane-model"},
        "data": {"name": model},
    }


class _Dumper(yaml.SafeDumper):
    """Write texts of several lines as blocks, and every list and mapping in full."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: no aliases."""
        return True


def _as_block(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Dumper.add_representer(str, _as_block)


def _dump(overlay: Overlay, document: Document) -> str:
    text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120)
    return f"{MARK}{overlay.command}\n{text}"
