"""The manifests that do not depend on a model's plan, in folders: Services, NetworkPolicies,
volumes, Redis, monitoring, gateways. They are templates, whose only variable is the name.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tramontane.proto.errors import ConfigError

NAME = "tramontane"  # of the objects in k8s/
MANIFESTS = Path(__file__).parents[1] / "manifests"
ALERTS = Path(__file__).parents[1] / "monitoring" / "alerts.yaml"
BASE, VOLUME, BUCKET, REDIS = "base", "models-volume", "models-bucket", "redis"
MONITORING, GATEWAY = "monitoring", "gateway"
APPLIED_APART = ("secrets", GATEWAY, "ingress", MONITORING)  # by commands of their own
PIECES = (BASE, VOLUME, BUCKET, REDIS, *APPLIED_APART)
SUFFIX = ".j2"
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # names of Services begin with a letter
MAX_NAME = 47  # of a RayService: the operator makes names of pods and Services from it


def check_name(name: str, option: str) -> None:
    """Raise ConfigError unless objects may have this name, those derived from it included."""
    if not LABEL.fullmatch(name):
        raise ConfigError(
            f"{option} is {name!r}; it must be small letters, digits and dashes, with a letter"
            " first and no dash at the end, such as mixtral"
        )
    if len(name) > MAX_NAME:
        raise ConfigError(
            f"{option} has {len(name)} characters; it may have {MAX_NAME}, since the operator makes"
            " other names from it"
        )
    if name.endswith(f"-{REDIS}"):
        raise ConfigError(
            f"{option} is {name}, which is the label of another model's Redis; choose one that does"
            f" not end in -{REDIS}"
        )
    if not isinstance(yaml.safe_load(name), str) or name in ("y", "n"):
        raise ConfigError(f"{option} is {name}, which YAML does not read as text; choose another")


def recommended_labels(name: str) -> dict[str, str]:
    """Return the labels of a model's objects by which Kubernetes' own tools show what belongs
    together. Its pods have those of the operator.
    """
    return {"app.kubernetes.io/name": NAME, "app.kubernetes.io/instance": name}


def render_piece(piece: str, name: str) -> dict[str, str]:
    """Return the files of one folder, by their names, for objects of this name."""
    names = [path.name.removesuffix(SUFFIX) for path in sorted((MANIFESTS / piece).iterdir())]
    alerts = _indented_alerts()
    return {each: render_template(f"{piece}/{each}", name=name, alerts=alerts) for each in names}


def render_template(path: str, **variables: Any) -> str:
    """Return the text of a template; ``path`` is below ``MANIFESTS``, without its suffix."""
    return _environment().get_template(f"{path}{SUFFIX}").render(**variables)


@cache
def _environment() -> Environment:
    # alerts and charts have braces of their own
    environment = Environment(
        loader=FileSystemLoader(MANIFESTS),
        undefined=StrictUndefined,
        variable_start_string="[[",
        variable_end_string="]]",
        block_start_string="[%",
        block_end_string="%]",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["yaml"] = _to_yaml
    return environment


def _to_yaml(value: Any, indent: int = 0) -> str:
    """Return a value on one line, or lines with this indent if one is given."""
    text = yaml.safe_dump(value, sort_keys=False, default_flow_style=None if indent else True)
    text = text.removesuffix("...\n").strip()
    return text.replace("\n", "\n" + " " * indent)


@cache
def _indented_alerts() -> str:
    lines = ALERTS.read_text(encoding="utf-8").splitlines()
    return "\n".join(f"  {line}" for line in lines if not line.startswith("#"))
