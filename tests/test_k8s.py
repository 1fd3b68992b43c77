"""k8s/: every overlay renders, is what the schemas and the operator accept, and fits the
application.
"""

import copy
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from k8s_documents import (
    K8S,
    OVERLAYS,
    RENDERED,
    ROOT,
    check_schema,
    overlay,
    ray_service,
    rendered,
    serve_config,
)
from k8s_rules import Document, groups_of, offered_resources, operators_complaints, ray_container
from ray.serve.schema import ServeDeploySchema

from tramontane.cluster.cli.main import app
from tramontane.cluster.config.ray_settings import (
    POD_SETTINGS,
    RAY_SETTINGS,
    SERVE_SETTINGS,
    monitoring_settings,
)
from tramontane.cluster.deploy.k8s_overlay import MARK
from tramontane.cluster.deploy.k8s_pieces import NAME, PIECES, render_piece
from tramontane.cluster.ray_internals.symbol import RAY_VERSION
from tramontane.cluster.serving.app import validate_config

REGISTRIES = re.compile(
    r"pypi\.org|pythonhosted|pytorch\.org|anaconda|conda\.io|debian\.org|npmjs|index-url",
    re.IGNORECASE,
)


@pytest.mark.parametrize(
    "folder",
    [*(K8S / "overlays" / name for name in OVERLAYS), *(K8S / name for name in RENDERED)],
    ids=str,
)
def test_everything_renders_and_is_what_kubernetes_accepts(folder: Path) -> None:
    documents = rendered(folder)
    assert documents
    for document in documents:
        check_schema(document)
    for template in (
        group["template"] for d in documents if d["kind"] == "RayService" for group in groups_of(d)
    ):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "pod"} | template["metadata"],
            "spec": template["spec"],
        }
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_operator_accepts_it(name: str) -> None:
    assert operators_complaints(ray_service(overlay(name))) == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_shipped_overlay_is_what_the_command_writes(name: str, tmp_path: Path) -> None:
    shipped = {
        path.name: path.read_text(encoding="utf-8") for path in (K8S / "overlays" / name).iterdir()
    }
    first_lines = {text.splitlines()[0] for text in shipped.values()}
    assert len(first_lines) == 1
    command = shlex.split(first_lines.pop().removeprefix(MARK))
    assert command[:2] == ["tramontane", "k8s"]
    app([*command[1:], "--out", str(tmp_path)], standalone_mode=False)
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == shipped


@pytest.mark.parametrize("piece", PIECES)
def test_shipped_manifests_are_the_templates_with_the_usual_name(piece: str) -> None:
    shipped = {path.name: path.read_text(encoding="utf-8") for path in (K8S / piece).glob("*.yaml")}
    assert render_piece(piece, NAME) == shipped


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_application_is_one_that_ray_serve_and_we_take(name: str) -> None:
    config = serve_config(ray_service(overlay(name)))
    ServeDeploySchema.model_validate(config)
    assert "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH" in SERVE_SETTINGS
    (application,) = config["applications"]
    validate_config(application["args"])
    assert {d["name"] for d in application["deployments"]} == {"Router", "Batch", "Ingress"}


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_pods_have_what_the_application_wants(name: str) -> None:
    """One GPU or core set for each stage and expert actor; an ingress pod for each ingress replica;
    capacity for every router.
    """
    service = ray_service(overlay(name))
    (application,) = serve_config(service)["applications"]
    config = validate_config(application["args"])
    head, ingresses, *actors = groups_of(service)
    scaling = {
        deployment["name"]: deployment.get("autoscaling_config")
        or dict.fromkeys(("min_replicas", "max_replicas"), deployment["num_replicas"])
        for deployment in application["deployments"]
    }
    least, most = (scaling["Router"][key] for key in ("min_replicas", "max_replicas"))
    of_a_pipeline = (config.stages or 0) + config.expert_actors
    assert sum(group["minReplicas"] for group in actors) == least * of_a_pipeline
    assert sum(group["maxReplicas"] for group in actors) == most * of_a_pipeline
    assert {group["rayStartParams"]["num-cpus"] for group in actors} == {
        str(config.threads_per_stage)
    }
    assert {group["rayStartParams"]["num-cpus"] for group in (head, ingresses)} == {"0"}, (
        "no stage belongs there"
    )
    offered = {
        kind: amount * ingresses["replicas"]
        for kind, amount in offered_resources(ingresses).items()
    }
    for deployment in application["deployments"]:
        for kind, amount in deployment["ray_actor_options"]["resources"].items():
            offered[kind] -= amount * scaling[deployment["name"]]["max_replicas"]
    assert min(offered.values()) >= 0
    # a proxy, and so readiness, comes only with a replica: no pod may take the other's
    assert offered_resources(ingresses)["tramontane_ingress"] == 1
    (surge,) = (
        d["max_surge_percent"] for d in application["deployments"] if d["name"] == "Ingress"
    )
    assert surge == 0, "there is no room for replicas of two versions"


RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_are_safe_and_alike_to_ray(name: str) -> None:
    documents = overlay(name)
    for group in groups_of(ray_service(documents)):
        pod, container = group["template"]["spec"], ray_container(group)
        # the rules of the pod security level "restricted"
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in (container, *pod.get("initContainers", [])):
            assert each["securityContext"] == RESTRICTED
        assert container["envFrom"] == [{"configMapRef": {"name": "tramontane-settings"}}]
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert requests == limits or name == "demo", "Ray counts limits, Kubernetes requests"
        has_autoscaler = group["groupName"] == "head" and name == "autoscaled"
        assert pod["automountServiceAccountToken"] == has_autoscaler
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (
            "num-gpus" in group["rayStartParams"]
        )
        assert container["image"].endswith(("-cpu", "-cuda")), "the placeholder is replaced"
    cluster = ray_service(documents)["spec"]["rayClusterConfig"]
    if "autoscalerOptions" in cluster:  # the operator adds a container to the head's pod
        assert cluster["autoscalerOptions"]["securityContext"] == RESTRICTED
    (settings,) = (
        d
        for d in documents
        if d["kind"] == "ConfigMap" and d["metadata"]["name"] == "tramontane-settings"
    )
    ray_settings = {f"RAY_{key}": str(value) for key, value in RAY_SETTINGS.items()}
    monitoring = monitoring_settings(
        "http://prometheus-k8s.monitoring.svc:9090",
        "http://grafana.monitoring.svc:3000",
        "http://127.0.0.1:3000",
    )
    assert settings["data"] == SERVE_SETTINGS | POD_SETTINGS | ray_settings | monitoring
    assert "OMP_NUM_THREADS" not in str(documents)


@pytest.mark.parametrize("name", OVERLAYS)
def test_what_is_named_is_there(name: str) -> None:
    """Selectors find pods, ports have their names, claims are claimed; keys and passwords are made
    by those who install it.
    """
    others = ("monitoring", "ingress", "gateway")
    documents = (*overlay(name), *(d for each in others for d in rendered(K8S / each)))
    pods = [
        (g["template"]["metadata"]["labels"], _ports(g)) for g in groups_of(ray_service(documents))
    ]
    pods += [
        (d["spec"]["template"]["metadata"]["labels"], {6379, "redis"})
        for d in documents
        if d["kind"] == "StatefulSet"
    ]
    services = {
        d["metadata"]["name"]: {p["name"] for p in d["spec"]["ports"]}
        for d in documents
        if d["kind"] == "Service"
    }
    numbers = {
        d["metadata"]["name"]: {p["port"] for p in d["spec"]["ports"]}
        for d in documents
        if d["kind"] == "Service"
    }
    listeners = {
        d["metadata"]["name"]: {each["name"] for each in d["spec"]["listeners"]}
        for d in documents
        if d["kind"] == "Gateway"
    }
    for document in documents:
        for selector, ports in _selectors(document):
            found = [has for labels, has in pods if selector.items() <= labels.items()]
            assert found, (document["kind"], document["metadata"]["name"])
            assert all(ports <= has | {8000, 8080, 8265, "metrics"} for has in found), (
                document["metadata"]["name"],
                ports,
            )
        for backend in _found(document, "backend"):
            assert backend["service"]["port"]["name"] in services[backend["service"]["name"]]
        for backends in _found(document, "backendRefs"):
            assert {each["port"] for each in backends} <= numbers[backends[0]["name"]]
        for parents in _found(document, "parentRefs"):
            assert {each["sectionName"] for each in parents} <= listeners[parents[0]["name"]]
    claims = {d["metadata"]["name"] for d in documents if d["kind"] == "PersistentVolumeClaim"}
    assert {claim for d in documents for claim in _found(d, "claimName")} == claims
    assert {secret for d in documents for secret in _found(d, "secretName")} <= {
        "tramontane-api-keys",
        "tramontane-tls",
    }


def test_the_demo_fits_on_a_laptop() -> None:
    pods = [
        (quantity, group.get("replicas", 1))
        for group in groups_of(ray_service(overlay("demo")))
        for quantity in [ray_container(group)["resources"]["requests"]]
    ]
    assert sum(_amount(requests["cpu"]) * count for requests, count in pods) <= 3
    assert sum(_amount(requests["memory"]) * count for requests, count in pods) <= 6 * 2**30


def _amount(text: str) -> float:
    """Parse a quantity of Kubernetes: 500m is 0.5."""
    units = {"m": 1e-3, "Mi": 2.0**20, "Gi": 2.0**30}
    found = re.fullmatch(r"(\d+)(m|Mi|Gi)?", text)
    assert found, text
    return int(found[1]) * units.get(found[2], 1.0)


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_operators_own_service_finds_no_pod_without_a_proxy(name: str) -> None:
    """It selects all pods of the cluster but the head, and a port by its container's name."""
    service = ray_service(overlay(name))
    ports = {port["targetPort"] for port in service["spec"]["serveService"]["spec"]["ports"]}
    serving = {
        group["groupName"]
        for group in groups_of(service)
        if ports <= {port["name"] for port in ray_container(group).get("ports", ())}
    }
    assert serving == {"head", "ingress"}
    assert service["spec"]["excludeHeadPodFromServeSvc"]
    assert ports == {"serve", "serve-grpc"}


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_leave_without_a_broken_stream(name: str) -> None:
    """Ingress pods wait for their streams; a stage's pod leaves Ray at once, and counts as there
    when its raylet has joined.
    """
    documents = overlay(name)
    groups = {group["groupName"]: group for group in groups_of(ray_service(documents))}
    ingress = groups["ingress"]["template"]["spec"]
    hook = ray_container(groups["ingress"])["lifecycle"]["preStop"]["exec"]["command"]
    wait_s = int(re.findall(r"sleep (\d+)", " ".join(hook))[0])
    assert 30 <= wait_s < ingress["terminationGracePeriodSeconds"]
    assert ingress["affinity"]["podAntiAffinity"]
    stage = ray_container(groups["stages"])
    assert "ray stop" in " ".join(stage["lifecycle"]["preStop"]["exec"]["command"])
    assert stage["readinessProbe"]
    budgets = {
        each["metadata"]["name"].removeprefix("tramontane-"): each["spec"]
        for each in documents
        if each["kind"] == "PodDisruptionBudget"
    }
    assert budgets["ingress"]["minAvailable"] >= 1


def test_a_model_can_be_fetched_before_anything_else_changes() -> None:
    parts = [
        d
        for d in overlay("stages")
        if d["metadata"].get("labels", {}).get("tramontane-part") == "model"
    ]
    names, job = sorted(parts, key=lambda document: str(document["kind"]))
    assert (names["kind"], job["kind"]) == ("ConfigMap", "Job")
    assert names["data"]["name"] == "mixtral-8x7b"
    assert {reference["name"] for reference in _found(job, "configMapKeyRef")} == {
        names["metadata"]["name"]
    }


def test_keys_come_from_a_file_that_is_not_shipped(tmp_path: Path) -> None:
    folder = shutil.copytree(
        K8S / "secrets", tmp_path / "secrets", ignore=shutil.ignore_patterns("*.txt")
    )
    assert [path.name for path in folder.iterdir()] == ["kustomization.yaml"]
    (folder / "keys.txt").write_text("a-key\n")
    (secret,) = rendered(folder)
    check_schema(secret)
    (volume,) = (
        v
        for v in groups_of(ray_service(overlay("demo")))[1]["template"]["spec"]["volumes"]
        if "secret" in v
    )
    assert secret["metadata"]["name"] == volume["secret"]["secretName"]
    assert set(secret["data"]) == {
        Path(
            serve_config(ray_service(overlay("demo")))["applications"][0]["args"]["api_key_file"]
        ).name
    }


def test_the_image_is_one_for_the_pods() -> None:
    text = (K8S / "Dockerfile").read_text(encoding="utf-8")
    stages = re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
    assert {"dependencies", "project", "cpu", "cuda"} <= set(stages)
    assert not text.startswith("# syntax="), "which a builder would fetch from a registry"
    version = re.findall(r'image.version="(.*)"', text)
    assert version == [tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]]
    last = text.split("FROM ")[-1]
    users = re.findall(r"^USER (\d+)$", text, re.MULTILINE)
    pod = groups_of(ray_service(overlay("demo")))[0]["template"]["spec"]
    assert users, last
    assert {int(user) for user in users} == {pod["securityContext"]["runAsUser"]}
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for source in line.replace("--chown=1000:1000 ", "").split():
            assert (ROOT / source).exists(), source
    assert {"bash", "gcc", "libc6-dev"} <= set(text.split()), (
        "Triton compiles with them, without recommended packages"
    )
    assert re.search(
        r"ray\[[^]]*\]>=" + re.escape(RAY_VERSION.rpartition(".")[0]),
        (ROOT / "pyproject.toml").read_text(),
    )


def test_no_manifest_names_a_package_registry() -> None:
    files = [path for path in K8S.rglob("*") if path.is_file() and path.suffix != ".md"]
    assert len(files) > len(OVERLAYS)
    assert [path for path in files if REGISTRIES.search(path.read_text(encoding="utf-8"))] == []


BREAKERS: dict[str, tuple[str, Any]] = {
    "is no name": ("metadata.name", "Tramontane"),
    "is no upgradeStrategy": ("spec.upgradeStrategy.type", "Rolling"),
    "incremental upgrades": ("spec.upgradeStrategy.type", "NewClusterWithIncrementalUpgrade"),
    "have no effect": ("spec.serviceUnhealthySecondThreshold", 900),
    "below 0": ("spec.rayClusterDeletionDelaySeconds", -1),
    "has a name": (
        "spec.rayClusterConfig.headGroupSpec.headService",
        {"metadata": {"name": "head"}},
    ),
    "belong to the group": ("spec.rayClusterConfig.headGroupSpec.rayStartParams.labels", "a=b"),
    "and in the group": ("spec.rayClusterConfig.headGroupSpec.resources", {"CPU": "0"}),
    "is no label": ("spec.rayClusterConfig.workerGroupSpecs.0.labels", {"a b": "c"}),
    "must be texts": ("spec.rayClusterConfig.workerGroupSpecs.0.rayStartParams.num-cpus", 0),
    "quoted for a shell": (
        "spec.rayClusterConfig.workerGroupSpecs.0.rayStartParams.resources",
        '{"pod": 1}',
    ),
    "between their bounds": ("spec.rayClusterConfig.workerGroupSpecs.1.maxReplicas", 1),
    "is suspended": ("spec.rayClusterConfig.workerGroupSpecs.1.suspend", True),
    "belong to gcsFault": (
        "spec.rayClusterConfig.headGroupSpec.rayStartParams.redis-password",
        "secret",
    ),
    "already": ("metadata.annotations", {"ray.io/ft-enabled": "true"}),
    "without enableInTreeAutoscaling": (
        "spec.rayClusterConfig.autoscalerOptions",
        {"version": "v2"},
    ),
    "from 2.52 on": ("spec.rayClusterConfig.rayVersion", "2.51.0"),
}


@pytest.mark.parametrize("complaint", BREAKERS)
def test_each_rule_of_the_operator_is_checked(complaint: str) -> None:
    """Of the overlay with Redis, with one thing wrong."""
    path, value = BREAKERS[complaint]
    service = copy.deepcopy(ray_service(overlay("redis")))
    *parents, last = path.split(".")
    at: Any = service
    for key in parents:
        at = at[int(key) if key.isdigit() else key]
    at[last] = value
    assert any(complaint in problem for problem in operators_complaints(service))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "path", ["spec.upgrades", "spec.rayClusterConfig.headGroupSpec.template.spec.volume"]
)
def test_a_field_that_no_schema_names_is_found(path: str) -> None:
    service = copy.deepcopy(ray_service(overlay("demo")))
    *parents, last = path.split(".")
    at: Any = service
    for key in parents:
        at = at[key]
    at[last] = "x"
    with pytest.raises(jsonschema.ValidationError, match=last):
        check_schema(service)


def _ports(group: Document) -> set[int | str]:
    ports = ray_container(group).get("ports", [])
    return {port["name"] for port in ports} | {port["containerPort"] for port in ports}


def _selectors(document: Document) -> Iterator[tuple[dict[str, str], set[int | str]]]:
    """Labels of our pods that a document looks for, and the ports that it wants of them."""
    spec = document.get("spec", {})
    match document["kind"]:
        case "Service":
            yield spec["selector"], {port.get("targetPort", port["port"]) for port in spec["ports"]}
        case "PodDisruptionBudget":
            yield spec["selector"]["matchLabels"], set()
        case "PodMonitor":
            yield (
                spec["selector"]["matchLabels"],
                {end["port"] for end in spec["podMetricsEndpoints"]},
            )
        case "NetworkPolicy":
            yield (
                spec["podSelector"]["matchLabels"],
                {p["port"] for rule in spec["ingress"] for p in rule.get("ports", [])},
            )


def _found(value: Any, key: str) -> Iterator[Any]:
    """What this key has, anywhere."""
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _found(part, key)
