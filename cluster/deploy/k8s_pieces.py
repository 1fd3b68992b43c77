"""The manifests that do not depend on a model's plan, in folders: Services, NetworkPolicies,
volumes, Redis, monitoring, gateways. They are templates, whose only variable is the name.
"""

import re
from functools import cache
from pathlib import Path

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tramontane.proto.errors import ConfigError

NAME = "tramontane"  # of the objects in k8s/
MANIFESTS = Path(__file__).parents[1] / "manifests"
ALERTS = Path(__file__).parents[1] / "monitoring" / "alerts.yaml"
BASE, VOLUME, BUCKET, REDIS = "base", "models-volume", "models-bucket", "redis"
MONITORING, GATEWAY = "monitoring", "gateway"
APPLIED_APART = ("secrets", "ingress", MONITORING)  # by commands of their own
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
    if not isinstance(yaml.safe_load(name), str) or len(name) == 1:
        raise ConfigError(f"{option} is {name}, which YAML does not read as text; choose another")


def render_piece(piece: str, name: str) -> dict[str, str]:
    """Return the files of one folder, by their names, for objects of this name."""
    paths = sorted((MANIFESTS / piece).glob(f"*{SUFFIX}"))
    assert paths, f"{piece} has no templates"
    return {
        path.name.removesuffix(SUFFIX): _environment()
        .get_template(f"{piece}/{path.name}")
        .render(name=name, alerts=_indented_alerts())
        for path in paths
    }


@cache
def _environment() -> Environment:
    # alerts have braces of their own
    return Environment(
        loader=FileSystemLoader(MANIFESTS),
        undefined=StrictUndefined,
        variable_start_string="[[",
        variable_end_string="]]",
        keep_trailing_newline=True,
    )


@cache
def _indented_alerts() -> str:
    lines = ALERTS.read_text(encoding="utf-8").splitlines()
    return "\n".join(f"  {line}" for line in lines if not line.startswith("#"))
