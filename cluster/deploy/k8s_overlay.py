"""A kustomize overlay for the KubeRay operator: the files of a folder, from a served model."""

from dataclasses import dataclass
from typing import Any

import yaml

from tramontane.cluster.deploy.k8s_documents import (
    ServedModel,
    disruption_budget,
    model_name,
    ray_service,
)
from tramontane.cluster.deploy.k8s_pieces import (
    APPLIED_APART,
    BASE,
    BUCKET,
    REDIS,
    VOLUME,
    recommended_labels,
    render_piece,
)
from tramontane.cluster.deploy.k8s_pods import IMAGE, Document

MARK = "# Written by: "
MODEL_FILE = "model.yaml"
FILES = ("kustomization.yaml", "rayservice.yaml", "disruption-budget.yaml", MODEL_FILE)
OWN_BASE = "."  # instead of the folder k8s/: the overlay's own folder


@dataclass(frozen=True, slots=True)
class Overlay:
    """A served model and the folder ``base`` with the other manifests, as seen from the overlay; if
    that is ``OWN_BASE``, they are files of the overlay.
    """

    served: ServedModel
    command: str
    base: str

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders with other manifests that it refers to."""
        volume = (VOLUME,) if self.served.model is not None else ()
        return (BASE, *volume, *((REDIS,) if self.served.redis else ()))


def overlay_files(overlay: Overlay) -> dict[str, str]:
    """Return the contents of the files, by name."""
    documents = {
        "kustomization.yaml": _kustomization(overlay),
        "rayservice.yaml": ray_service(overlay.served),
        "disruption-budget.yaml": disruption_budget(overlay.served),
    }
    if overlay.served.model is not None:
        documents[MODEL_FILE] = model_name(overlay.served)
    return {name: _dump(overlay, document) for name, document in documents.items()}


def own_files(overlay: Overlay) -> dict[str, str]:
    """Return the other manifests of an overlay that has its own, by path: those that it refers to,
    and those that are applied apart.
    """
    if overlay.base != OWN_BASE:
        return {}
    bucket = (BUCKET,) if overlay.served.model is not None else ()
    return {
        f"{folder}/{name}": f"{MARK}{overlay.command}\n{text}"
        for folder in (*overlay.folders, *bucket, *APPLIED_APART)
        for name, text in render_piece(folder, overlay.served.name).items()
    }


def _kustomization(overlay: Overlay) -> Document:
    name, _, tag = overlay.served.image.rpartition(":")
    base = "" if overlay.base == OWN_BASE else f"{overlay.base}/"
    document: Document = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [
            *(f"{base}{folder}" for folder in overlay.folders),
            "rayservice.yaml",
            "disruption-budget.yaml",
        ],
        "labels": [{"pairs": recommended_labels(overlay.served.name)}],
    }
    if overlay.served.model is not None:
        document["patches"] = [{"path": MODEL_FILE}]
    return document | {"images": [{"name": IMAGE, "newName": name, "newTag": tag}]}


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


def dump_yaml(document: Document) -> str:
    """Return the text of a document, as all files of this package have it."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120)


def _dump(overlay: Overlay, document: Document) -> str:
    return f"{MARK}{overlay.command}\n{dump_yaml(document)}"
