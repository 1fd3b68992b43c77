"""Rules of the KubeRay operator beyond its CRDs, and rules of this project. Each rule yields the
problems that it finds.
"""

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

Document = dict[str, Any]

DNS_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL_KEY = re.compile(
    r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
MAX_SERVICE_NAME = 47
UPGRADES = {"None", "NewCluster", "NewClusterWithIncrementalUpgrade"}
WITHOUT_EFFECT = {"serviceUnhealthySecondThreshold", "deploymentUnhealthySecondThreshold"}
RESOURCES = {"num-cpus", "num-gpus", "memory", "resources"}
OF_REDIS = {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"}
OLDEST_WITH_TOKENS = (2, 52)


def operators_complaints(service: Document) -> list[str]:
    """Return the problems of a RayService that its CRD accepts."""
    spec, cluster = service["spec"], service["spec"]["rayClusterConfig"]
    return [
        *_about_the_service(service),
        *_about_upgrades(spec),
        *(problem for group in groups_of(service) for problem in _about_group(group)),
        *_about_redis(service),
        *_about_autoscaling(cluster),
        *_about_tokens(cluster),
    ]


def groups_of(service: Document) -> list[Document]:
    """Return all node groups; that of the head is called ``head``."""
    cluster = service["spec"]["rayClusterConfig"]
    return [{"groupName": "head", **cluster["headGroupSpec"]}, *cluster.get("workerGroupSpecs", [])]


def ray_container(group: Document) -> Document:
    container: Document = group["template"]["spec"]["containers"][0]
    return container


def offered_resources(group: Document) -> dict[str, float]:
    """Return the Ray resources of one pod of a group, as the operator reads them (getResourcesMap
    of its common/pod.go) and as a shell does.
    """
    text = group["rayStartParams"].get("resources", "'{}'")
    offered: dict[str, float] = json.loads(text.strip("'\"` "))
    if shlex.split(text) != [json.dumps(offered)]:
        raise ValueError(f"a shell reads {text!r} in another way than the operator")
    return offered


def _about_the_service(service: Document) -> Iterator[str]:
    name, spec = service["metadata"]["name"], service["spec"]
    if len(name) > MAX_SERVICE_NAME or not DNS_NAME.fullmatch(name):
        yield f"{name} is no name for a RayService"
    if deprecated := WITHOUT_EFFECT & spec.keys():
        yield f"{deprecated} have no effect"
    if (
        spec["rayClusterConfig"]["headGroupSpec"]
        .get("headService", {})
        .get("metadata", {})
        .get("name")
    ):
        yield "the head's service has a name"
    if spec.get("rayClusterDeletionDelaySeconds", 0) < 0:
        yield "rayClusterDeletionDelaySeconds is below 0"
    if not any(
        port["name"] == "serve"
        for group in groups_of(service)
        for port in ray_container(group).get("ports", [])
    ):
        yield "no container has a port called serve"


def _about_upgrades(spec: Document) -> Iterator[str]:
    strategy = spec.get("upgradeStrategy", {})
    kind = strategy.get("type", "NewCluster")
    if kind not in UPGRADES:
        yield f"{kind} is no upgradeStrategy"
    if kind == "NewClusterWithIncrementalUpgrade":
        if not spec["rayClusterConfig"].get("enableInTreeAutoscaling"):
            yield "incremental upgrades need the autoscaler"
        if not strategy.get("clusterUpgradeOptions", {}).get("gatewayClassName"):
            yield "incremental upgrades need clusterUpgradeOptions"


def _about_group(group: Document) -> Iterator[str]:
    name, start = group["groupName"], group.get("rayStartParams", {})
    if "labels" in start:
        yield f"{name}: labels belong to the group, not to rayStartParams"
    if RESOURCES & start.keys() and group.get("resources"):
        yield f"{name}: resources are in rayStartParams and in the group"
    for key, value in group.get("labels", {}).items():
        if not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
            yield f"{name}: {key}={value} is no label"
    if wrong := [key for key, value in start.items() if not isinstance(value, str)]:
        yield f"{name}: {wrong} must be texts"
    try:
        offered_resources(group)
    except (TypeError, ValueError):
        yield f"{name}: resources must be JSON, quoted for a shell"
    if (
        "replicas" in group
        and not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    ):
        yield f"{name}: replicas are not between their bounds"
    if group.get("suspend"):
        yield f"{name}: is suspended"


def _about_redis(service: Document) -> Iterator[str]:
    head = groups_of(service)[0]
    environment = OF_REDIS & {variable["name"] for variable in ray_container(head).get("env", [])}
    start = {"redis-password", "redis-username"} & head["rayStartParams"].keys()
    if environment or start:
        yield f"{environment | start}: belong to gcsFaultToleranceOptions"
    annotations = service["metadata"].get("annotations", {}).keys() & {
        "ray.io/ft-enabled",
        "ray.io/external-storage-namespace",
    }
    if annotations and "gcsFaultToleranceOptions" in service["spec"]["rayClusterConfig"]:
        yield f"{annotations}: said by gcsFaultToleranceOptions already"


def _about_autoscaling(cluster: Document) -> Iterator[str]:
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]
    by_variable = any(
        v["name"] == "RAY_enable_autoscaler_v2"
        for group in groups
        for v in ray_container(group).get("env", [])
    )
    if by_variable:
        yield "which autoscaler it is autoscalerOptions.version says"
    if "autoscalerOptions" in cluster and not cluster.get("enableInTreeAutoscaling"):
        yield "autoscalerOptions without enableInTreeAutoscaling"
    restarts = {group["template"]["spec"].get("restartPolicy", "Never") for group in groups}
    if cluster.get("enableInTreeAutoscaling") and restarts != {"Never"}:
        yield "with the autoscaler pods must not be restarted"


def _about_tokens(cluster: Document) -> Iterator[str]:
    if cluster.get("authOptions", {}).get("mode") != "token":
        return
    numbers = re.match(r"(\d+)\.(\d+)\.\d+$", cluster.get("rayVersion", ""))
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST_WITH_TOKENS:
        yield "tokens need a rayVersion from 2.52 on"
