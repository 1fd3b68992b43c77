"""The Helm chart: by default it is the overlay, document by document, and each value changes what
it says.
"""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_charts import HelmError, nested, run_helm, template, template_text, value_names
from k8s_documents import K8S, OVERLAYS, check_schema, overlay, overlay_flags, ray_service
from k8s_documents import serve_config as serve_config_of
from k8s_rules import Document, groups_of, operators_complaints, ray_container

from tramontane.cluster.cli.main import app
from tramontane.proto.errors import ConfigError

Documents = tuple[Document, ...]
CHART = K8S / "chart"
# a chart with every value
ALL_FLAGS = (
    *("--model", "mixtral-8x7b", "--stages", "2", "--expert-actors", "4"),
    *("--gpu-memory", "24GiB", "--max-replicas", "2", "--redis"),
)
GROUPS = ("head", "ingress", "stages", "experts")
KEEP = {"helm.sh/resource-policy": "keep"}  # the one thing that an overlay does not say


def write_chart(folder: Path, *flags: str) -> Path:
    app(["k8s", *flags, "--helm", "--out", str(folder)], standalone_mode=False)
    return folder


@pytest.fixture(scope="module")
def charts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A chart with the flags of an overlay, or with all values."""
    folder = tmp_path_factory.mktemp("charts")

    def chart(name: str) -> Path:
        if not (folder / name).exists():
            write_chart(folder / name, *(overlay_flags(name) if name != "all" else ALL_FLAGS))
        return folder / name

    return chart


def _by_name(documents: Documents) -> dict[tuple[str, str], Document]:
    found = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    assert len(found) == len(documents)
    return found


def _of_kind(documents: Documents, kind: str, name: str = "") -> Document:
    (found,) = (
        each
        for each in documents
        if each["kind"] == kind and each["metadata"]["name"].endswith(name)
    )
    return found


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_chart_is_its_overlay(name: str, charts: Callable[[str], Path]) -> None:
    made, expected = _by_name(template(charts(name))), _by_name(overlay(name))
    for key, document in made.items():
        if key[0] == "PersistentVolumeClaim":
            assert document["metadata"].pop("annotations") == KEEP
        if key[0] == "RayService":  # a text, of which the content counts
            assert serve_config_of(document) == serve_config_of(expected[key])
            document["spec"]["serveConfigV2"] = expected[key]["spec"]["serveConfigV2"]
        assert document == expected.get(key), key
    assert made.keys() == expected.keys()


@pytest.mark.parametrize("name", [*OVERLAYS, "all"])
def test_helm_has_no_complaint(name: str, charts: Callable[[str], Path]) -> None:
    assert "0 chart(s) failed" in run_helm("lint", "--strict", str(charts(name)))


def test_the_shipped_chart_is_what_the_command_writes(tmp_path: Path) -> None:
    shipped, made = (_texts(folder) for folder in (CHART, write_chart(tmp_path, *_demo_flags())))
    assert made == shipped


def _demo_flags() -> tuple[str, ...]:
    return overlay_flags("demo")


def _texts(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.is_file()
    }


EVERYTHING: Document = {
    "apiKeys": {"keys": ["a-key"]},
    "gateway": {
        "enabled": True,
        "parentRefs": [{"name": "gateway", "namespace": "gateways"}],
        "hostnames": ["llm.example.com"],
        "grpcHostnames": ["grpc.llm.example.com"],
    },
    "monitoring": {"podMonitor": True, "rules": True},
}


def test_everything_is_what_kubernetes_and_the_operator_accept(
    charts: Callable[[str], Path],
) -> None:
    documents = template(charts("all"), values=EVERYTHING)
    kinds = {document["kind"] for document in documents}
    assert {"Secret", "HTTPRoute", "GRPCRoute", "PodMonitor", "PrometheusRule"} <= kinds
    for document in documents:
        check_schema(document)
    assert operators_complaints(ray_service(documents)) == []
    alerts = yaml.safe_load((K8S / "monitoring" / "alerts.yaml").read_text(encoding="utf-8"))
    assert _of_kind(documents, "PrometheusRule")["spec"] == alerts["spec"], "braces are kept"


def test_two_releases_share_no_object_and_no_label(charts: Callable[[str], Path]) -> None:
    """Nothing differs but the name, and what has no name is the same for all models."""
    first, second = (template(charts("all"), name, EVERYTHING) for name in ("alpha", "omega"))
    assert not _by_name(first).keys() & _by_name(second).keys()
    for document in first:
        assert document["metadata"]["name"].startswith("alpha")
        labels = document["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "tramontane", "kubectl get all -l ... shows all"
        assert labels["app.kubernetes.io/instance"] == "alpha"
    first_text, second_text = (
        template_text(charts("all"), name, EVERYTHING) for name in ("alpha", "omega")
    )
    assert first_text.replace("alpha", "omega") == second_text
    assert "app: alpha" in first_text
    assert "app: tramontane" not in first_text


# ---- what each value changes


def _group(documents: Documents, name: str) -> Document:
    (found,) = (each for each in groups_of(ray_service(documents)) if each["groupName"] == name)
    return found


def _pod(documents: Documents, name: str) -> Document:
    pod: Document = _group(documents, name)["template"]["spec"]
    return pod


def _containers(documents: Documents) -> list[Document]:
    pods = [_pod(documents, name) for name in GROUPS]
    return [each for pod in pods for each in (*pod["containers"], *pod.get("initContainers", []))]


def _application(documents: Documents) -> Document:
    application: Document = serve_config_of(ray_service(documents))["applications"][0]
    return application


def _deployment(documents: Documents, name: str) -> Document:
    (found,) = (each for each in _application(documents)["deployments"] if each["name"] == name)
    return found


def _counts(documents: Documents) -> dict[str, tuple[int, int, int]]:
    return {
        name: tuple(
            _group(documents, name)[key] for key in ("replicas", "minReplicas", "maxReplicas")
        )
        for name in GROUPS[1:]
    }


def _claim(documents: Documents) -> Document:
    return _of_kind(documents, "PersistentVolumeClaim")


def _job_pod(documents: Documents) -> Document:
    pod: Document = _of_kind(documents, "Job")["spec"]["template"]["spec"]
    return pod


def _redis_pod(documents: Documents) -> Document:
    pod: Document = _of_kind(documents, "StatefulSet")["spec"]["template"]["spec"]
    return pod


def _redis_claim(documents: Documents) -> Document:
    claim: Document = _of_kind(documents, "StatefulSet")["spec"]["volumeClaimTemplates"][0]["spec"]
    return claim


def _claims(documents: Documents) -> set[str]:
    pods = [*(_pod(documents, name) for name in GROUPS), _job_pod(documents)]
    return {
        volume["persistentVolumeClaim"]["claimName"]
        for pod in pods
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }


def _setting(key: str) -> Callable[[Documents], Any]:
    return lambda documents: _of_kind(documents, "ConfigMap", "-settings")["data"][key]


def _kinds(documents: Documents) -> set[str]:
    return {document["kind"] for document in documents}


def _numbers(documents: Documents) -> tuple[Any, ...]:
    scaling = _deployment(documents, "Router")["autoscaling_config"]
    budget = _of_kind(documents, "PodDisruptionBudget", "-stages")["spec"]["minAvailable"]
    return _counts(documents), scaling["min_replicas"], scaling["max_replicas"], budget


def _keys(documents: Documents) -> Any:
    data = _of_kind(documents, "Secret")["data"]
    volume = next(v for v in _pod(documents, "ingress")["volumes"] if v["name"] == "api-keys")
    assert volume["secret"]["secretName"] == _of_kind(documents, "Secret")["metadata"]["name"]
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


def _redis_secrets(documents: Documents) -> set[str]:
    options = ray_service(documents)["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    of_redis = _redis_pod(documents)["containers"][0]["env"][0]["valueFrom"]
    return {
        each["secretKeyRef"]["name"] for each in (options["redisPassword"]["valueFrom"], of_redis)
    }


def _external_redis(documents: Documents) -> Any:
    options = ray_service(documents)["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    names = [d["metadata"]["name"] for d in documents]
    return options["redisAddress"], "tramontane-redis" in names


IMAGES = ("registry.example.com/other", "9")
TOLERATION = {"key": "dedicated", "operator": "Exists"}
ENV = {"name": "NCCL_DEBUG", "value": "INFO"}
VOLUME = {"name": "scratch", "emptyDir": {}}
MOUNT = {"name": "scratch", "mountPath": "/scratch"}
AFFINITY = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
AMOUNTS = {"cpu": "7", "memory": "9Gi"}

# name of the value: another value, what changes, and into what
Case = tuple[Any, Callable[[Documents], Any], Any]
CASES: dict[str, Case] = {
    "fullnameOverride": ("nemo", lambda d: {n.split("-")[0] for _, n in _by_name(d)}, {"nemo"}),
    "image.repository": (
        IMAGES[0],
        lambda d: {c["image"].rpartition(":")[0] for c in _containers(d)},
        {IMAGES[0]},
    ),
    "image.tag": ("9", lambda d: {c["image"].rpartition(":")[2] for c in _containers(d)}, {"9"}),
    "image.pullPolicy": (
        "Always",
        lambda d: {c.get("imagePullPolicy") for c in _containers(d)},
        {"Always"},
    ),
    "image.pullSecrets": (
        [{"name": "registry"}],
        lambda d: [p["imagePullSecrets"] for p in (_pod(d, "head"), _job_pod(d), _redis_pod(d))],
        [[{"name": "registry"}]] * 3,
    ),
    "replicas": (
        2,
        _numbers,
        ({"ingress": (2, 2, 2), "stages": (4, 4, 4), "experts": (8, 8, 8)}, 2, 2, 11),
    ),
    "maxReplicas": (
        5,
        _numbers,
        ({"ingress": (2, 2, 2), "stages": (2, 2, 10), "experts": (4, 4, 20)}, 1, 5, 5),
    ),
    "spareStages": (
        3,
        _numbers,
        ({"ingress": (2, 2, 2), "stages": (5, 5, 7), "experts": (4, 4, 8)}, 1, 2, 8),
    ),
    "upgradeStrategy": (
        "NewCluster",
        lambda d: ray_service(d)["spec"]["upgradeStrategy"],
        {"type": "NewCluster"},
    ),
    "apiKeys.existingSecret": (
        "keys-of-mine",
        lambda d: [v.get("secret") for v in _pod(d, "ingress")["volumes"]][-1],
        {"secretName": "keys-of-mine"},
    ),
    "apiKeys.keys": (["one", "two"], _keys, {"keys": "one\ntwo"}),
    "service.type": (
        "LoadBalancer",
        lambda d: [_of_kind(d, "Service", n)["spec"]["type"] for n in ("-http", "-grpc")],
        ["LoadBalancer"] * 2,
    ),
    "service.annotations": (
        {"a": "b"},
        lambda d: [_of_kind(d, "Service", n)["metadata"]["annotations"] for n in ("http", "grpc")],
        [{"a": "b"}] * 2,
    ),
    "models.existingClaim": ("mine", _claims, {"mine"}),
    "models.storageClassName": ("", lambda d: _claim(d)["spec"]["storageClassName"], ""),
    "models.accessModes": (
        ["ReadOnlyMany"],
        lambda d: _claim(d)["spec"]["accessModes"],
        ["ReadOnlyMany"],
    ),
    "models.size": ("1Ti", lambda d: _claim(d)["spec"]["resources"]["requests"]["storage"], "1Ti"),
    "models.keep": (False, lambda d: _claim(d)["metadata"].get("annotations"), None),
    "models.download": (False, lambda d: "Job" in _kinds(d), False),
    "models.source": (
        "b:c",
        lambda d: _of_kind(d, "ConfigMap", "-model")["data"],
        {"name": "mixtral-8x7b", "source": "b:c"},
    ),
    "models.sourceSecret": (
        "mine",
        lambda d: _job_pod(d)["containers"][0]["envFrom"][0]["secretRef"]["name"],
        "mine",
    ),
    "models.image.repository": (
        "r",
        lambda d: _job_pod(d)["containers"][0]["image"],
        "r:1.69",
    ),
    "models.image.tag": (
        "2",
        lambda d: _job_pod(d)["containers"][0]["image"],
        "registry.example.com/rclone:2",
    ),
    "models.image.pullPolicy": (
        "Never",
        lambda d: _job_pod(d)["containers"][0]["imagePullPolicy"],
        "Never",
    ),
    "models.resources.requests": (
        AMOUNTS,
        lambda d: _job_pod(d)["containers"][0]["resources"]["requests"],
        AMOUNTS,
    ),
    "models.resources.limits": (
        AMOUNTS,
        lambda d: _job_pod(d)["containers"][0]["resources"]["limits"],
        AMOUNTS,
    ),
    "redis.address": ("redis.example.com:6380", _external_redis, ("redis.example.com:6380", False)),
    "redis.existingSecret": ("mine", _redis_secrets, {"mine"}),
    "redis.storageClassName": ("fast", lambda d: _redis_claim(d)["storageClassName"], "fast"),
    "redis.size": ("6Gi", lambda d: _redis_claim(d)["resources"]["requests"]["storage"], "6Gi"),
    "redis.image.repository": ("r", lambda d: _redis_pod(d)["containers"][0]["image"], "r:7"),
    "redis.image.tag": (
        "8",
        lambda d: _redis_pod(d)["containers"][0]["image"],
        "registry.example.com/redis:8",
    ),
    "redis.image.pullPolicy": (
        "Never",
        lambda d: _redis_pod(d)["containers"][0]["imagePullPolicy"],
        "Never",
    ),
    "redis.resources.requests": (
        AMOUNTS,
        lambda d: _redis_pod(d)["containers"][0]["resources"]["requests"],
        AMOUNTS,
    ),
    "redis.resources.limits": (
        AMOUNTS,
        lambda d: _redis_pod(d)["containers"][0]["resources"]["limits"],
        AMOUNTS,
    ),
    "redis.nodeSelector": ({"a": "b"}, lambda d: _redis_pod(d)["nodeSelector"], {"a": "b"}),
    "redis.tolerations": ([TOLERATION], lambda d: _redis_pod(d)["tolerations"], [TOLERATION]),
    "networkPolicies.enabled": (False, lambda d: "NetworkPolicy" in _kinds(d), False),
    "gateway.enabled": (True, lambda d: _kinds(d) & {"HTTPRoute", "GRPCRoute"}, {"HTTPRoute"}),
    "gateway.parentRefs": (
        [{"name": "g"}],
        lambda d: _of_kind(d, "HTTPRoute")["spec"]["parentRefs"],
        [{"name": "g"}],
    ),
    "gateway.hostnames": (
        ["a.example.com"],
        lambda d: _of_kind(d, "HTTPRoute")["spec"]["hostnames"],
        ["a.example.com"],
    ),
    "gateway.grpcHostnames": (
        ["b.example.com"],
        lambda d: _of_kind(d, "GRPCRoute")["spec"]["hostnames"],
        ["b.example.com"],
    ),
    "monitoring.podMonitor": (True, lambda d: "PodMonitor" in _kinds(d), True),
    "monitoring.rules": (True, lambda d: "PrometheusRule" in _kinds(d), True),
    "monitoring.labels": (
        {"release": "prometheus"},
        lambda d: [
            _of_kind(d, kind)["metadata"]["labels"].get("release")
            for kind in ("PodMonitor", "PrometheusRule")
        ],
        ["prometheus"] * 2,
    ),
    "dashboard.prometheusHost": ("http://p", _setting("RAY_PROMETHEUS_HOST"), "http://p"),
    "dashboard.grafanaHost": ("http://g", _setting("RAY_GRAFANA_HOST"), "http://g"),
    "dashboard.grafanaIframeHost": ("http://i", _setting("RAY_GRAFANA_IFRAME_HOST"), "http://i"),
    "ingress.replicas": (
        3,
        lambda d: (
            _counts(d)["ingress"],
            _application(d)["args"]["ingress_replicas"],
            _deployment(d, "Ingress")["num_replicas"],
        ),
        ((3, 3, 3), 3, 3),
    ),
}


def _of_group(group: str) -> dict[str, Case]:
    def metadata(documents: Documents) -> Document:
        found: Document = _group(documents, group)["template"]["metadata"]
        return found

    def container(documents: Documents) -> Document:
        return ray_container(_group(documents, group))

    gpu = {"nvidia.com/gpu": "1"} if group in ("stages", "experts") else {}
    return {
        f"{group}.resources.requests": (
            AMOUNTS,
            lambda d: container(d)["resources"]["requests"],
            AMOUNTS | gpu,
        ),
        f"{group}.resources.limits": (
            AMOUNTS,
            lambda d: container(d)["resources"]["limits"],
            AMOUNTS | gpu,
        ),
        f"{group}.nodeSelector": (
            {"a": "b"},
            lambda d: _pod(d, group)["nodeSelector"],
            {"a": "b"},
        ),
        f"{group}.tolerations": (
            [TOLERATION],
            lambda d: _pod(d, group)["tolerations"],
            [TOLERATION],
        ),
        f"{group}.affinity": (AFFINITY, lambda d: _pod(d, group)["affinity"], AFFINITY),
        f"{group}.priorityClassName": (
            "high",
            lambda d: _pod(d, group)["priorityClassName"],
            "high",
        ),
        f"{group}.podLabels": ({"team": "x"}, lambda d: metadata(d)["labels"].get("team"), "x"),
        f"{group}.podAnnotations": (
            {"a": "b"},
            lambda d: metadata(d)["annotations"],
            {"a": "b"},
        ),
        f"{group}.extraEnv": ([ENV], lambda d: container(d)["env"], [ENV]),
        f"{group}.extraVolumes": ([VOLUME], lambda d: _pod(d, group)["volumes"][-1], VOLUME),
        f"{group}.extraVolumeMounts": ([MOUNT], lambda d: container(d)["volumeMounts"][-1], MOUNT),
    }


for each_group in GROUPS:
    CASES |= _of_group(each_group)
WITH = {  # other values without which one has no effect
    "gateway": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
    "monitoring.labels": {"podMonitor": True, "rules": True},
    "replicas": {"maxReplicas": 2},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_a_value_changes_what_it_says(name: str, charts: Callable[[str], Path]) -> None:
    value, find, expected = CASES[name]
    section = name.partition(".")[0]
    values = nested(name, value)
    others = WITH.get(name, WITH.get(section))
    if others is not None and section == name:
        values |= others
    elif others is not None:
        values = {section: others | values[section]}
    documents = template(charts("all"), values=values)
    assert find(documents) == expected
    default = template(charts("all"))
    assert documents != default
    for document in documents:
        check_schema(document)
    assert operators_complaints(ray_service(documents)) == []


def test_every_value_has_a_test(charts: Callable[[str], Path]) -> None:
    values = yaml.safe_load((charts("all") / "values.yaml").read_text(encoding="utf-8"))
    assert value_names(values) == CASES.keys()


@pytest.mark.parametrize("name", sorted({case.rpartition(".")[0] for case in CASES}))
def test_a_misspelt_value_is_refused(name: str, charts: Callable[[str], Path]) -> None:
    if name.endswith(("requests", "limits")):
        return
    misspelt = nested(f"{name}.replica" if name else "replica", 2)
    with pytest.raises(HelmError, match="'replica'"):
        template(charts("all"), values=misspelt)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("replicas", 0, "minimum"),
        ("replicas", "two", "integer"),
        ("image.pullPolicy", "always", "must be one of"),
        ("models.accessModes", ["ReadWrite"], "must be one of"),
        ("models.keep", "no", "boolean"),
        ("gateway.enabled", True, "minItems"),
        ("head.podLabels", {"app": "x"}, "app"),
        ("upgradeStrategy", "Rolling", "must be one of"),
        ("stages.extraEnv", {"A": "b"}, "array"),
        ("apiKeys.keys", [""], "minLength"),
    ],
)
def test_a_value_of_another_kind_is_refused(
    name: str, value: Any, message: str, charts: Callable[[str], Path]
) -> None:
    with pytest.raises(HelmError, match=message):
        template(charts("all"), values=nested(name, value))


@pytest.mark.parametrize("name", ["mixtral.8x7b", "8x7b", "m" * 48, "mixtral-redis", "true"])
def test_a_release_that_no_object_may_be_named_after_is_refused(
    name: str, charts: Callable[[str], Path]
) -> None:
    with pytest.raises(HelmError, match="the name of the release"):
        template(charts("demo"), name)


def _notes(chart: Path, copy: Path) -> str:
    """The notes of a release nemo. Helm shows them only where it installs: a template does here."""
    shutil.copytree(chart, copy)
    (copy / "templates" / "NOTES.txt").rename(copy / "NOTES.txt")
    shown = '{{ dict "kind" "Notes" "notes" (tpl (.Files.Get "NOTES.txt") .) | toYaml }}\n'
    (copy / "templates" / "notes.yaml").write_text(shown)
    (notes,) = (each["notes"] for each in template(copy, "nemo") if each["kind"] == "Notes")
    assert isinstance(notes, str)
    return notes


def test_fewer_pipelines_at_most_than_at_least_are_refused(charts: Callable[[str], Path]) -> None:
    message = "maxReplicas is 2; it must be at least replicas, which is 3"
    with pytest.raises(HelmError, match=message):
        template(charts("all"), values={"replicas": 3})


def test_no_key_is_made_up(charts: Callable[[str], Path], tmp_path: Path) -> None:
    """Without values the Secret is the user's, and the notes say how to create it."""
    assert "Secret" not in _kinds(template(charts("all")))
    notes = _notes(charts("all"), tmp_path / "chart")
    assert "create secret generic nemo-api-keys --from-file=keys=keys.txt" in notes
    assert "create secret generic nemo-redis" in notes
    assert "KEY=$(kubectl -n default get secret nemo-api-keys -o jsonpath='{.data.keys}'" in notes
    assert '"model": "mixtral-8x7b"' in notes


def test_a_chart_of_another_origin_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text("replicas: 3\n")
    with pytest.raises(ConfigError, match=r"values\.yaml was not written by this command"):
        write_chart(tmp_path, *_demo_flags())
    (tmp_path / "Chart.yaml").write_text("name: another\n")
    with pytest.raises(ConfigError, match=r"Chart\.yaml was not written by this command"):
        write_chart(tmp_path, *_demo_flags())
    assert (tmp_path / "values.yaml").read_text() == "replicas: 3\n"


def test_a_chart_is_written_again_without_what_it_had(tmp_path: Path) -> None:
    write_chart(tmp_path, *ALL_FLAGS)
    assert (tmp_path / "templates" / "redis.yaml").exists()
    assert _texts(write_chart(tmp_path, *_demo_flags())) == _texts(CHART)


@pytest.mark.parametrize("words", [("--name", "mixtral"), ("--base", "../..")])
def test_flags_that_a_chart_has_no_use_for_are_refused(
    words: tuple[str, str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="leave out --name and --base"):
        write_chart(tmp_path, *_demo_flags(), *words)


def test_the_schema_names_what_the_values_have(charts: Callable[[str], Path]) -> None:
    """Of every chart, so that a chart without Redis has no values for it."""
    for name in (*OVERLAYS, "all"):
        schema = json.loads((charts(name) / "values.schema.json").read_text())
        values = yaml.safe_load((charts(name) / "values.yaml").read_text(encoding="utf-8"))
        assert schema["properties"].keys() == {*values, "global"}
