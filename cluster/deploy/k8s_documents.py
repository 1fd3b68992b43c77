"""The documents of a served model that depend on its plan: the RayService with its Serve config,
and a disruption budget. Pure.
"""

from dataclasses import dataclass
from typing import Any

import yaml

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.deploy.k8s_pods import (
    APP_LABEL,
    DEMO_SIZES,
    EXPERT,
    GRPC_PORT,
    HTTP_PORT,
    INGRESS_RESOURCE,
    KEYS_FILE,
    KEYS_FOLDER,
    MODELS_FOLDER,
    NUM_INGRESSES,
    ROLE_LABEL,
    ROUTER_RESOURCE,
    SERVE_PORTS,
    SERVER_SIZES,
    STAGE,
    Document,
    PodSettings,
    WorkerPodSpec,
    container_security,
    head_group,
    ingress_group,
    worker_group,
)
from tramontane.cluster.ray_internals.symbol import RAY_VERSION
from tramontane.cluster.serving.app import APPLICATION, GRPC_FUNCTIONS
from tramontane.cluster.serving.autoscaling import autoscaling_fields
from tramontane.proto.plan import PipelinePlan

# nodes with GPUs may have to be started, and the operator deploys a config only once
NODES_TIMEOUT_S = 3600.0
IDLE_TIMEOUT_S = 300  # of a node that Ray's autoscaler has started


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A served model. ``name`` is the RayService's. ``args`` are the keys of the application;
    ``config`` is built from them and the number of pipelines.

    ``model`` is the name of the model's folder; None for the demo model. ``image`` is NAME:TAG.
    ``spare_stages``: pods that wait for a stage to lose its own, for all pipelines together.
    """

    name: str
    args: dict[str, Any]
    config: EngineConfig
    plan: PipelinePlan
    model: str | None
    workers: WorkerPodSpec
    spare_stages: int
    redis: bool
    image: str

    @property
    def pods(self) -> PodSettings:
        """What its pods have in common."""
        sizes = DEMO_SIZES if self.model is None else SERVER_SIZES
        return PodSettings(self.name, self.model, sizes)

    @property
    def pods_per_pipeline(self) -> int:
        """The number of pods with a stage or an expert actor."""
        return len(self.plan.stages) + self.config.expert_actors

    @property
    def is_autoscaled(self) -> bool:
        """True if the number of pipelines may change."""
        return self.config.max_pipelines > self.config.replicas


def serve_config(served: ServedModel) -> Document:
    """Return the Ray Serve config. The number of pipelines is not in ``args``: a change there would
    replace all of them.
    """
    args: Document = {} if served.model is None else {"model": f"{MODELS_FOLDER}/{served.model}"}
    args |= {
        "api_key_file": f"{KEYS_FOLDER}/{KEYS_FILE}",
        "placement_timeout": NODES_TIMEOUT_S,
        "ingress_replicas": NUM_INGRESSES,
    }
    application = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": "tramontane.cluster.serving.app:build",
        "args": args | served.args,
        "deployments": [
            {
                "name": "Router",
                **_pipelines(served),
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


def _pipelines(served: ServedModel) -> Document:
    if not served.is_autoscaled:
        return {"num_replicas": served.config.replicas}
    return {"autoscaling_config": autoscaling_fields(served.config, served.plan.max_num_seqs)}


def _needs(resource: str) -> Document:
    return {"num_cpus": 0, "resources": {resource: 1}}


def ray_service(served: ServedModel) -> Document:
    """Return the RayService: its Serve config and its pods."""
    cluster: Document = {"rayVersion": RAY_VERSION, "authOptions": {"mode": "token"}}
    if served.redis:
        redis = f"{served.name}-redis"  # of the Service, and of the Secret
        cluster["gcsFaultToleranceOptions"] = {
            "redisAddress": f"{redis}:6379",
            "redisPassword": {"valueFrom": {"secretKeyRef": {"name": redis, "key": "password"}}},
        }
    if served.is_autoscaled:
        cluster["enableInTreeAutoscaling"] = True
        cluster["autoscalerOptions"] = {
            "version": "v2",
            "upscalingMode": "Default",
            "idleTimeoutSeconds": IDLE_TIMEOUT_S,
            # of the container that the operator adds to the head's pod
            "securityContext": container_security(),
        }
    cluster["headGroupSpec"] = head_group(served.pods, served.is_autoscaled)
    cluster["workerGroupSpecs"] = [ingress_group(served.pods), *_actors(served)]
    spec = {
        # a second cluster next to this one would need the same number of GPUs again
        "upgradeStrategy": {"type": "None"},
        "excludeHeadPodFromServeSvc": True,
        "serveService": _serve_service(),
        "serveConfigV2": yaml.safe_dump(serve_config(served), sort_keys=False),
        "rayClusterConfig": cluster,
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": served.name},
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


def _actors(served: ServedModel) -> list[Document]:
    config = served.config
    groups = [
        (STAGE, "stages", len(served.plan.stages), served.spare_stages),
        (EXPERT, "experts", config.expert_actors, 0),
    ]
    return [
        worker_group(
            role,
            name,
            (count * config.replicas + spares, count * config.max_pipelines + spares),
            served.workers,
            served.pods,
        )
        for role, name, count, spares in groups
        if count
    ]


def disruption_budget(served: ServedModel) -> Document:
    """Let nodes be drained one at a time, so that a pipeline waits for one stage only, spare pods
    or not.
    """
    num_pods = served.pods_per_pipeline * served.config.replicas + served.spare_stages
    roles = [{"key": ROLE_LABEL, "operator": "In", "values": [STAGE, EXPERT]}]
    selector = {"matchLabels": {APP_LABEL: served.name}, "matchExpressions": roles}
    spec = {"minAvailable": num_pods - 1, "selector": selector}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": f"{served.name}-stages"},
        "spec": spec,
    }


def model_name(served: ServedModel) -> Document:
    """Return the name of the model's folder, for the job that copies it into the volume."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{served.name}-model"},
        "data": {"name": served.model},
    }
