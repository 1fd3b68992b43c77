"""Documents of k8s/ as kubectl renders them, and their validation against schemas."""

import json
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from k8s_rules import Document

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
CRDS = ROOT.parent / "shared" / "schemas" / "kuberay"
OVERLAYS = sorted(path.name for path in (K8S / "overlays").iterdir())
# secrets/ needs a file of keys
RENDERED = (
    *("base", "models-volume", "models-bucket", "redis"),
    *("gateway", "ingress", "monitoring"),
)
WITHOUT_A_SCHEMA = {"PodMonitor", "PrometheusRule"}  # of the Prometheus operator


@cache
def rendered(folder: Path) -> tuple[Document, ...]:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed here")
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if 'unknown field "patches"' in done.stderr or "unmarshal" in done.stderr:
        pytest.skip("this kubectl is older than 1.21, and does not know today's kustomize")
    assert (done.returncode, done.stderr) == (0, ""), "no warnings either"
    return tuple(document for document in yaml.safe_load_all(done.stdout) if document)


def overlay(name: str) -> tuple[Document, ...]:
    return rendered(K8S / "overlays" / name)


def overlay_flags(name: str) -> tuple[str, ...]:
    """The flags with which a shipped overlay was written."""
    first = (K8S / "overlays" / name / "kustomization.yaml").read_text().splitlines()[0]
    return tuple(shlex.split(first.removeprefix("# Written by: tramontane k8s")))


def ray_service(documents: tuple[Document, ...]) -> Document:
    (service,) = (document for document in documents if document["kind"] == "RayService")
    return service


def serve_config(service: Document) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(service["spec"]["serveConfigV2"])
    return config


def check_schema(document: Document) -> None:
    """Validate a document; raises a validation error. Unknown fields are errors too: Kubernetes
    would drop them silently.
    """
    if document["apiVersion"] == "ray.io/v1":
        if error := best_match(_crd(document["kind"]).iter_errors(document)):
            raise error
    elif document["apiVersion"] == "gateway.networking.k8s.io/v1":
        if error := best_match(_gateway_api(document["kind"]).iter_errors(document)):
            raise error
    elif document["kind"] not in WITHOUT_A_SCHEMA:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@cache
def _gateway_api(kind: str) -> Draft202012Validator:
    file = Path(__file__).with_name("gateway_api.json")
    schema: Document = json.loads(file.read_text(encoding="utf-8"))["schemas"][kind]
    schema["properties"]["metadata"]["additionalProperties"] = True
    return Draft202012Validator(_closed(schema))


@cache
def _crd(kind: str) -> Draft202012Validator:
    path = CRDS / f"ray.io_{kind.lower()}s.yaml"
    if not path.is_file():
        pytest.skip("needs the KubeRay CRDs, which are not part of the project")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the file has a megabyte and a half
    versions = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)["spec"]["versions"]
    schema: Document = next(version for version in versions if version["name"] == "v1")["schema"][
        "openAPIV3Schema"
    ]
    schema["properties"]["metadata"]["additionalProperties"] = True
    return Draft202012Validator(_closed(schema))


def _closed(schema: Document) -> Document:
    """Forbid properties that the schema does not name."""
    for part in [
        *schema.get("properties", {}).values(),
        schema.get("items"),
        schema.get("additionalProperties"),
    ]:
        if isinstance(part, dict):
            _closed(part)
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    return schema
