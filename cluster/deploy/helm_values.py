"""The values of a chart: what values.yaml and the other files of the chart say of them, and their
JSON Schema, by which Helm refuses a value that is misspelt or of another type.
"""

from importlib.metadata import version
from typing import Any

from tramontane.cluster.deploy.k8s_documents import ServedModel
from tramontane.cluster.deploy.k8s_pieces import MAX_NAME
from tramontane.cluster.deploy.k8s_pods import APP_LABEL, MODELS_FOLDER, ROLE_LABEL

Schema = dict[str, Any]

GROUPS = ("head", "ingress", "stages", "experts")  # of pods; names of values
TEXT: Schema = {"type": "string"}
TEXTS: Schema = {"type": "array", "items": {"type": "string", "minLength": 1}}
SWITCH: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 1}
OBJECT: Schema = {"type": "object"}  # of Kubernetes, which has a schema of its own for it
OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}
WORDS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
NAMED: Schema = {
    "type": "array",
    "items": {"type": "object", "required": ["name"], "properties": {"name": TEXT}},
}
QUANTITY: Schema = {"type": ["string", "integer"]}
STORAGE_CLASS: Schema = {"type": ["string", "null"]}
ACCESS_MODES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {"enum": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]},
}
PULL_POLICY: Schema = {"enum": ["", "Always", "IfNotPresent", "Never"]}


def template_variables(served: ServedModel, values: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of the templates of the chart's own files. ``values`` are those that the
    documents had.
    """
    repository, _, tag = served.image.rpartition(":")
    return {
        "version": version("tramontane"),
        "image": {"repository": repository, "tag": tag},
        "model": served.model,
        "model_name": served.config.model_name,
        "folder": served.model and f"{MODELS_FOLDER}/{served.model}",
        "replicas": served.config.replicas,
        "max_replicas": served.config.max_pipelines if served.is_autoscaled else None,
        "spare_stages": served.spare_stages,
        "redis": served.redis,
        "max_name": MAX_NAME,
        "groups": [group for group in GROUPS if group in values],
        "groups_of": values,
        **values,
    }


def values_schema(served: ServedModel) -> Schema:
    """Return the schema of the values that a chart of this model has."""
    present = [name for name in GROUPS if name != "experts" or served.config.expert_actors]
    properties = {
        "fullnameOverride": TEXT,
        "image": _image(pullSecrets=NAMED),
        "replicas": COUNT,
        **({"maxReplicas": COUNT} if served.is_autoscaled else {}),
        "spareStages": {"type": "integer", "minimum": 0},
        "upgradeStrategy": {"enum": ["None", "NewCluster"]},
        "apiKeys": _closed(existingSecret=TEXT, keys=TEXTS),
        "service": _closed(
            type={"enum": ["", "ClusterIP", "NodePort", "LoadBalancer"]}, annotations=WORDS
        ),
        **({"models": _models()} if served.model is not None else {}),
        **({"redis": _redis()} if served.redis else {}),
        "networkPolicies": _closed(enabled=SWITCH),
        "gateway": _closed(enabled=SWITCH, parentRefs=NAMED, hostnames=TEXTS, grpcHostnames=TEXTS)
        | _needs_parents(),
        "monitoring": _closed(podMonitor=SWITCH, rules=SWITCH, labels=WORDS),
        "dashboard": _closed(prometheusHost=TEXT, grafanaHost=TEXT, grafanaIframeHost=TEXT),
        **{name: _group(name) for name in present},
        "global": OBJECT,  # which Helm gives every chart
    }
    return {"$schema": "http://json-schema.org/draft-07/schema#", **_closed(**properties)}


def _closed(**properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _needs_parents() -> Schema:
    """Return the condition that routes have a gateway: without one they have no effect."""
    enabled = {"properties": {"enabled": {"const": True}}}
    return {"if": enabled, "then": {"properties": {"parentRefs": {"minItems": 1}}}}


def _image(**more: Schema) -> Schema:
    part = {"type": "string", "minLength": 1}
    return _closed(repository=part, tag=part, pullPolicy=PULL_POLICY, **more)


def _resources() -> Schema:
    amounts = {"type": "object", "additionalProperties": {"type": ["string", "number", "null"]}}
    return _closed(requests=amounts, limits=amounts)


def _group(name: str) -> Schema:
    return _closed(
        **({"replicas": COUNT} if name == "ingress" else {}),
        resources=_resources(),
        nodeSelector=WORDS,
        tolerations=OBJECTS,
        affinity=OBJECT,
        priorityClassName=TEXT,
        podLabels=WORDS | {"propertyNames": {"not": {"enum": [APP_LABEL, ROLE_LABEL]}}},
        podAnnotations=WORDS,
        extraEnv=NAMED,
        extraVolumes=NAMED,
        extraVolumeMounts=NAMED,
    )


def _models() -> Schema:
    return _closed(
        existingClaim=TEXT,
        storageClassName=STORAGE_CLASS,
        accessModes=ACCESS_MODES,
        size=QUANTITY,
        keep=SWITCH,
        download=SWITCH,
        source=TEXT,
        sourceSecret=TEXT,
        image=_image(),
        resources=_resources(),
    )


def _redis() -> Schema:
    return _closed(
        address=TEXT,
        existingSecret=TEXT,
        storageClassName=STORAGE_CLASS,
        size=QUANTITY,
        image=_image(),
        resources=_resources(),
        nodeSelector=WORDS,
        tolerations=OBJECTS,
    )
