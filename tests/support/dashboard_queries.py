"""The queries of the Grafana dashboard and of the alert rules, in a form that Prometheus can
evaluate.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "cluster" / "monitoring"
DASHBOARD, ALERTS = FOLDER / "dashboard.json", FOLDER / "alerts.yaml"
COMPARISON = re.compile(r" [<>] [0-9.]+")
VARIABLES = {"$__rate_interval": "30s", "$pipeline": ".*"}  # values that Grafana would insert


def panels() -> list[dict[str, Any]]:
    """Return the panels with a chart."""
    return [
        panel
        for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
        if panel["type"] != "row"
    ]


def alerts() -> list[dict[str, Any]]:
    return [
        rule
        for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    ]


def queries() -> dict[str, str]:
    """Return all queries by their origin: those of every panel, and of every alert the side that is
    compared with its bound.
    """
    return dict(_of_panels()) | {alert["alert"]: compared(alert["expr"]) for alert in alerts()}


def compared(expression: str) -> str:
    """Remove comparisons with numbers: ``a > 5 and b > 0`` becomes ``a and b``."""
    return COMPARISON.sub("", expression)


def _of_panels() -> Iterator[tuple[str, str]]:
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            yield f"{panel['title']} {target['refId']}", expression


def metric_names(expression: str) -> set[str]:
    """Return the application's metric names as declared, without the suffix of a histogram's
    buckets.
    """
    return {
        re.sub("_bucket$", "", name) for name in re.findall(r"\bray_tramontane_\w+", expression)
    }
