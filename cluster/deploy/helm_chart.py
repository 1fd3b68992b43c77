"""A Helm chart of a served model: the documents of its overlay, with expressions of Helm in the
places that the chart's values set.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

from tramontane.cluster.deploy.helm_expressions import (
    FULL_NAME,
    Expressions,
    configure_pod,
    set_image,
)
from tramontane.cluster.deploy.helm_values import template_variables, values_schema
from tramontane.cluster.deploy.k8s_documents import (
    ServedModel,
    disruption_budget,
    model_name,
    ray_service,
)
from tramontane.cluster.deploy.k8s_overlay import MARK
from tramontane.cluster.deploy.k8s_pieces import (
    BASE,
    GATEWAY,
    MONITORING,
    REDIS,
    VOLUME,
    recommended_labels,
    render_piece,
    render_template,
)
from tramontane.cluster.deploy.k8s_pods import NUM_INGRESSES, Document

CHART_FILE = "Chart.yaml"
OPTIONAL_TEMPLATES = ("models.yaml", "redis.yaml")  # which a chart of another model may not have
REPLICAS, SPARES = "int .Values.replicas", "int .Values.spareStages"
MAX_REPLICAS = 'include "tramontane.maxReplicas" . | int'
NUM_INGRESS_PODS = "int .Values.ingress.replicas"
HOSTS = {  # values of the settings' addresses
    "RAY_PROMETHEUS_HOST": "prometheusHost",
    "RAY_GRAFANA_HOST": "grafanaHost",
    "RAY_GRAFANA_IFRAME_HOST": "grafanaIframeHost",
}


@dataclass(frozen=True, slots=True)
class _Template:
    """Documents of one file; each is there if its condition holds, all if that is empty."""

    name: str
    documents: tuple[tuple[str, Document], ...]


def chart_files(served: ServedModel, command: str) -> dict[str, str]:
    """Return the contents of the chart's files, by path."""
    expressions = Expressions()
    named = replace(served, name=expressions.inline(FULL_NAME))
    values: dict[str, Any] = {}
    templates = list(_templates(named, expressions, values))
    mark = f"{MARK}{command}"
    variables = template_variables(served, values)
    files = {
        CHART_FILE: f"{mark}\n{render_template('chart/Chart.yaml', **variables)}",
        "values.yaml": f"{mark}\n{render_template('chart/values.yaml', **variables)}",
        "values.schema.json": json.dumps(values_schema(served), indent=2) + "\n",
        "templates/_helpers.tpl": render_template("chart/_helpers.tpl", **variables),
        "templates/NOTES.txt": render_template("chart/NOTES.txt", **variables),
    }
    for template in templates:
        for _, document in template.documents:
            _label(document, named.name)
        texts = [_conditional(expressions, *each) for each in template.documents]
        files[f"templates/{template.name}.yaml"] = f"{mark}\n" + "---\n".join(texts)
    return files


def _label(document: Document, name: str) -> None:
    metadata = document["metadata"]
    metadata["labels"] = recommended_labels(name) | metadata.get("labels", {})


def _conditional(expressions: Expressions, condition: str, document: Document) -> str:
    text = expressions.dump(document)
    return f"{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n" if condition else text


def _templates(
    served: ServedModel, expressions: Expressions, values: dict[str, Any]
) -> Iterator[_Template]:
    """Yield the chart's templates; ``values`` gets what they have taken out of the documents."""
    service = _configured_service(served, expressions, values)
    yield _Template("rayservice", (("", service),))
    yield from _base(served, expressions, values)
    yield _Template("api-keys", (_keys_secret(served, expressions),))
    if served.model is not None:
        yield _Template("models", tuple(_models(served, expressions, values)))
    if served.redis:
        yield _Template("redis", tuple(_redis(served, expressions, values)))
    yield _Template("gateway", tuple(_routes(served, expressions)))
    yield _Template("monitoring", tuple(_monitoring(served, expressions)))


def _base(
    served: ServedModel, expressions: Expressions, values: dict[str, Any]
) -> Iterator[_Template]:
    """Yield what every model has next to its pods."""
    budget = disruption_budget(served)
    pods = f"mul {served.pods_per_pipeline} ({REPLICAS})"
    budget["spec"]["minAvailable"] = expressions.inline(f"sub (add ({pods}) ({SPARES})) 1")
    base = {name: _documents(text) for name, text in render_piece(BASE, served.name).items()}
    budgets = [*base["disruption-budgets.yaml"], budget]
    yield _Template("disruption-budgets", _always(budgets))
    for document in base["services.yaml"]:
        expressions.optional_text(document["spec"], "type", ".Values.service.type")
        expressions.optional(document["metadata"], "annotations", ".Values.service.annotations")
    yield _Template("services", _always(base["services.yaml"]))
    (settings,) = base["settings.yaml"]
    values["dashboard"] = {HOSTS[key]: settings["data"][key] for key in HOSTS}
    for key, value in HOSTS.items():
        settings["data"][key] = expressions.inline(f".Values.dashboard.{value} | quote")
    yield _Template("settings", (("", settings),))
    policies = base["network-policies.yaml"]
    yield _Template("network-policies", _if(".Values.networkPolicies.enabled", policies))


def _documents(text: str) -> list[Document]:
    return list(yaml.safe_load_all(text))


def _always(documents: list[Document]) -> tuple[tuple[str, Document], ...]:
    return _if("", documents)


def _if(condition: str, documents: list[Document]) -> tuple[tuple[str, Document], ...]:
    return tuple((condition, document) for document in documents)


def _configured_service(
    served: ServedModel, expressions: Expressions, values: dict[str, Any]
) -> Document:
    """Return the RayService, with the numbers of pods and the values of each group."""
    service = ray_service(served)
    spec = service["spec"]
    cluster = spec["rayClusterConfig"]
    spec["upgradeStrategy"]["type"] = expressions.inline(".Values.upgradeStrategy | quote")
    config = yaml.safe_load(spec["serveConfigV2"])
    _configure_application(config["applications"][0], served, expressions)
    spec["serveConfigV2"] = yaml.safe_dump(config, sort_keys=False)
    groups = {"head": cluster["headGroupSpec"]}
    groups |= {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    for name, group in groups.items():
        _name_volumes(group["template"]["spec"]["volumes"], expressions)
        values[name] = configure_pod(expressions, group["template"], name)
        if name != "head":
            _configure_counts(group, served, expressions)
    values["ingress"] = {"replicas": NUM_INGRESSES} | values["ingress"]
    if served.redis:
        _configure_redis(cluster["gcsFaultToleranceOptions"], expressions)
    return service


def _configure_redis(options: Document, expressions: Expressions) -> None:
    address = f'default (printf "%s-redis:6379" ({FULL_NAME})) .Values.redis.address'
    options["redisAddress"] = expressions.inline(f"{address} | quote")
    password = options["redisPassword"]["valueFrom"]["secretKeyRef"]
    password["name"] = _named(expressions, ".Values.redis.existingSecret", "redis")


def _named(expressions: Expressions, value: str, suffix: str) -> str:
    """Return the name that a value has, or else the chart's own."""
    return expressions.inline(f'default (printf "%s-{suffix}" ({FULL_NAME})) {value}')


def _name_volumes(volumes: list[Any], expressions: Expressions) -> None:
    """Take the names of the claim of checkpoints and of the Secret of API keys from values."""
    for volume in volumes:
        if "persistentVolumeClaim" in volume:
            claim = _named(expressions, ".Values.models.existingClaim", "models")
            volume["persistentVolumeClaim"]["claimName"] = claim
        if "secret" in volume:
            keys = _named(expressions, ".Values.apiKeys.existingSecret", "api-keys")
            volume["secret"]["secretName"] = keys


def _configure_application(
    application: Document, served: ServedModel, expressions: Expressions
) -> None:
    ingresses = expressions.inline(NUM_INGRESS_PODS)
    application["args"]["ingress_replicas"] = ingresses
    deployments = {each["name"]: each for each in application["deployments"]}
    deployments["Ingress"]["num_replicas"] = ingresses
    router = deployments["Router"]
    if served.is_autoscaled:
        router["autoscaling_config"]["min_replicas"] = expressions.inline(REPLICAS)
        router["autoscaling_config"]["max_replicas"] = expressions.inline(MAX_REPLICAS)
    else:
        router["num_replicas"] = expressions.inline(REPLICAS)


def _configure_counts(group: Document, served: ServedModel, expressions: Expressions) -> None:
    if group["groupName"] == "ingress":
        least = most = NUM_INGRESS_PODS
    else:
        has_spares = group["groupName"] == "stages"
        num_pods = group["replicas"] - (served.spare_stages if has_spares else 0)
        per_pipeline = num_pods // served.config.replicas
        least = f"mul {per_pipeline} ({REPLICAS})"
        most = f"mul {per_pipeline} ({MAX_REPLICAS})" if served.is_autoscaled else least
        if has_spares:
            least, most = (f"add ({count}) ({SPARES})" for count in (least, most))
    group["replicas"] = group["minReplicas"] = expressions.inline(least)
    group["maxReplicas"] = expressions.inline(most)


def _keys_secret(served: ServedModel, expressions: Expressions) -> tuple[str, Document]:
    """Return the Secret that is there only if the values have keys."""
    keys = expressions.inline(r'join "\n" .Values.apiKeys.keys | b64enc')
    return "and .Values.apiKeys.keys (not .Values.apiKeys.existingSecret)", {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": served.pods.keys_secret},
        "data": {"keys": keys},
    }


def _models(
    served: ServedModel, expressions: Expressions, values: dict[str, Any]
) -> Iterator[tuple[str, Document]]:
    """Yield the volume of checkpoints and the job that fills it."""
    files = {name: _documents(text) for name, text in render_piece(VOLUME, served.name).items()}
    (claim,), (job,), (names,) = (
        files[name] for name in ("claim.yaml", "download.yaml", "model.yaml")
    )
    (image,) = files["kustomization.yaml"][0]["images"]
    container = job["spec"]["template"]["spec"]["containers"][0]
    values["models"] = {
        "accessModes": claim["spec"]["accessModes"],
        "size": claim["spec"]["resources"]["requests"]["storage"],
        "source": names["data"]["source"],
        "image": {"repository": image["newName"], "tag": image["newTag"]},
        "resources": container["resources"],
    }
    spec = claim["spec"]
    spec["accessModes"] = expressions.block(".Values.models.accessModes")
    spec["resources"]["requests"]["storage"] = expressions.inline(".Values.models.size | quote")
    _storage_class(expressions, spec, ".Values.models.storageClassName")
    keep = "annotations:\n  helm.sh/resource-policy: keep"
    claim["metadata"][expressions.lines_if(".Values.models.keep", keep)] = None
    yield "not .Values.models.existingClaim", claim
    names["data"] |= model_name(served)["data"]
    names["data"]["source"] = expressions.inline(".Values.models.source | quote")
    yield ".Values.models.download", names
    set_image(expressions, container, ".Values.models.image")
    container["resources"] = expressions.block(".Values.models.resources")
    (secret,) = container["envFrom"]
    secret["secretRef"]["name"] = _named(
        expressions, ".Values.models.sourceSecret", "models-source"
    )
    pod = job["spec"]["template"]["spec"]
    expressions.optional(pod, "imagePullSecrets", ".Values.image.pullSecrets")
    _name_volumes(pod["volumes"], expressions)
    yield ".Values.models.download", job


def _storage_class(expressions: Expressions, spec: Document, value: str) -> None:
    """Give a claim the class of a value: an empty one is a class, and null is none."""
    line = f"storageClassName: {{{{ {value} | quote }}}}"
    spec[expressions.lines_if(f'kindIs "string" {value}', line)] = None


def _redis(
    served: ServedModel, expressions: Expressions, values: dict[str, Any]
) -> Iterator[tuple[str, Document]]:
    """Yield the chart's own Redis, for values without the address of another."""
    files = {name: _documents(text) for name, text in render_piece(REDIS, served.name).items()}
    (image,) = files["kustomization.yaml"][0]["images"]
    for document in files["redis.yaml"]:
        condition = "not .Values.redis.address"
        if document["kind"] == "NetworkPolicy":
            condition = f"and .Values.networkPolicies.enabled ({condition})"
        if document["kind"] == "StatefulSet":
            pod = document["spec"]["template"]["spec"]
            container = pod["containers"][0]
            claim = document["spec"]["volumeClaimTemplates"][0]["spec"]
            values["redis_values"] = {
                "image": {"repository": image["newName"], "tag": image["newTag"]},
                "size": claim["resources"]["requests"]["storage"],
                "resources": container["resources"],
            }
            set_image(expressions, container, ".Values.redis.image")
            container["resources"] = expressions.block(".Values.redis.resources")
            size = expressions.inline(".Values.redis.size | quote")
            claim["resources"]["requests"]["storage"] = size
            _storage_class(expressions, claim, ".Values.redis.storageClassName")
            expressions.optional(pod, "imagePullSecrets", ".Values.image.pullSecrets")
            expressions.optional(pod, "nodeSelector", ".Values.redis.nodeSelector")
            expressions.optional(pod, "tolerations", ".Values.redis.tolerations")
            secret = container["env"][0]["valueFrom"]["secretKeyRef"]
            secret["name"] = _named(expressions, ".Values.redis.existingSecret", "redis")
        yield condition, document


def _routes(served: ServedModel, expressions: Expressions) -> Iterator[tuple[str, Document]]:
    """Yield the routes of the Gateway API; the gateway is not the chart's."""
    for document in _documents(render_piece(GATEWAY, served.name)["routes.yaml"]):
        spec, is_http = document["spec"], document["kind"] == "HTTPRoute"
        hosts = ".Values.gateway.hostnames" if is_http else ".Values.gateway.grpcHostnames"
        spec["parentRefs"] = expressions.block(".Values.gateway.parentRefs")
        del spec["hostnames"]
        expressions.optional(spec, "hostnames", hosts)
        yield f"and .Values.gateway.enabled {'' if is_http else hosts}".rstrip(), document


def _monitoring(served: ServedModel, expressions: Expressions) -> Iterator[tuple[str, Document]]:
    """Yield what the Prometheus operator reads."""
    conditions = {
        "PodMonitor": ".Values.monitoring.podMonitor",
        "NetworkPolicy": "and .Values.monitoring.podMonitor .Values.networkPolicies.enabled",
        "PrometheusRule": ".Values.monitoring.rules",
    }
    files = render_piece(MONITORING, served.name)
    for name in ("pod-monitor.yaml", "network-policy.yaml", "alerts.yaml"):
        (document,) = copy.deepcopy(_documents(files[name]))
        if document["kind"] != "NetworkPolicy":
            more = expressions.more(".Values.monitoring.labels")
            document["metadata"]["labels"] = {more: None}
        yield conditions[document["kind"]], document
