"""A kustomize overlay for the KubeRay operator: the files of a folder, from the model and its
pipeline. Pure.
"""

from dataclasses import dataclass
from typing import Any

import yaml

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.deploy import k8s_pods as pods
from tramontane.cluster.deploy.k8s_pods import Document, WorkerPodSpec
from tramontane.cluster.ray_internals.symbols import RAY_VERSION
from tramontane.cluster.serving.app import APPLICATION, GRPC_FUNCTIONS
from tramontane.cluster.serving.autoscaling import autoscaling_fields
from tramontane.proto.plan import PipelinePlan

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
    """A served model. ``args`` are the keys of the application, ``config`` is made of them and of
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
    args: Document = (
        {} if overlay.model is None else {"model": f"{pods.MODELS_FOLDER}/{overlay.model}"}
    )
    args |= {
        "api_key_file": f"{pods.KEYS_FOLDER}/{pods.KEYS_FILE}",
        "placement_timeout": NODES_TIMEOUT_S,
        "ingress_replicas": pods.NUM_INGRESSES,
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
                "ray_actor_options": _needs(pods.ROUTER_RESOURCE),
            },
            {"name": "Batch", "num_replicas": 1, "ray_actor_options": _needs(pods.ROUTER_RESOURCE)},
            {
                "name": "Ingress",
                "num_replicas": pods.NUM_INGRESSES,
                "ray_actor_options": _needs(pods.INGRESS_RESOURCE),
            },
        ],
    }
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": pods.HTTP_PORT},
        "grpc_options": {
            "port": pods.GRPC_PORT,
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
    cluster["headGroupSpec"] = pods.head_group(overlay.model)
    cluster["workerGroupSpecs"] = [pods.ingress_group(overlay.model), *_actors(overlay)]
    spec = {
        # a second cluster next to this one would need as many GPUs again
        "upgradeStrategy": {"type": "None"},
        "excludeHeadPodFromServeSvc": True,
        "serveConfigV2": yaml.safe_dump(serve_config(overlay), sort_keys=False),
        "rayClusterConfig": cluster,
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": NAME},
        "spec": spec,
    }


def _actors(overlay: Overlay) -> list[Document]:
    config = overlay.config
    groups = [
        (pods.STAGE, "stages", len(overlay.plan.stages)),
        (pods.EXPERT, "experts", config.expert_actors),
    ]
    return [
        pods.worker_group(
            role,
            name,
            count * config.replicas,
            count * config.max_pipelines,
            overlay.workers,
            overlay.model,
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
        # as the patches below, in the form of kubectl before 1.21
        "bases": [f"{overlay.base}/{folder}" for folder in folders],
        "resources": ["rayservice.yaml", "disruption-budget.yaml"],
    }
    if overlay.model is not None:
        document["patchesStrategicMerge"] = [MODEL_FILE]
    return document | {"images": [{"name": pods.IMAGE, "newName": name, "newTag": tag}]}


def _disruption_budget(overlay: Overlay) -> Document:
    """Let nodes be drained one at a time, so that a pipeline waits for one stage only."""
    num_pods = (len(overlay.plan.stages) + overlay.config.expert_actors) * overlay.config.replicas
    roles = [{"key": pods.ROLE_LABEL, "operator": "In", "values": [pods.STAGE, pods.EXPERT]}]
    selector = {"matchLabels": {pods.APP_LABEL: NAME}, "matchExpressions": roles}
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
