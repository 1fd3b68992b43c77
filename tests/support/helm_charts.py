"""Charts that the command writes, and what Helm makes of them."""

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from k8s_rules import Document

BUILT = Path.home() / ".cache" / "tramontane-helm" / "helm"  # by make helm


class HelmError(Exception):
    """Helm refused a chart or its values; the message is Helm's."""


def find_helm() -> str:
    """Return the program; skips the test where there is none."""
    candidates = (os.environ.get("TRAMONTANE_HELM"), shutil.which("helm"), str(BUILT))
    for candidate in candidates:
        if candidate and Path(candidate).is_file():
            return candidate
    pytest.skip("Helm is not installed here; make helm builds it, TRAMONTANE_HELM names it")


def run_helm(*arguments: str) -> str:
    """Return the output. Raises HelmError if Helm fails; its configuration is not the user's."""
    with TemporaryDirectory(prefix="helm-") as home:
        folders = {f"HELM_{kind}_HOME": f"{home}/{kind}" for kind in ("CACHE", "CONFIG", "DATA")}
        done = subprocess.run(
            [find_helm(), *arguments],
            env={**os.environ, **folders},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    if done.returncode != 0:
        raise HelmError(done.stderr + done.stdout)
    return done.stdout


def template_text(chart: Path, release: str = "tramontane", values: Document | None = None) -> str:
    """Return what Helm would apply, with these values."""
    return _template(chart, release, json.dumps(values or {}))


def template(
    chart: Path, release: str = "tramontane", values: Document | None = None
) -> tuple[Document, ...]:
    """Return the documents that Helm would apply, with these values."""
    text = template_text(chart, release, values)
    return tuple(document for document in yaml.safe_load_all(text) if document)


@cache
def _template(chart: Path, release: str, values: str) -> str:
    with TemporaryDirectory(prefix="helm-") as folder:
        file = Path(folder) / "values.json"
        file.write_text(values)
        return run_helm("template", release, str(chart), "--values", str(file))


def value_names(values: Document, prefix: str = "") -> set[str]:
    """Return the names of all values, with dots: those of objects of Kubernetes are one value."""
    names = set[str]()
    for key, value in values.items():
        name = f"{prefix}{key}"
        is_object = key in ("requests", "limits") or not isinstance(value, dict) or not value
        names |= {name} if is_object else value_names(value, f"{name}.")
    return names


def nested(name: str, value: Any) -> Document:
    """Return {"image": {"tag": 1}} for ``image.tag`` and 1."""
    for key in reversed(name.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value
