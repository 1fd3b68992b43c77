"""Configuration of Prometheus, Grafana and Ray's head node that makes Ray's dashboard show the
stages at work.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tramontane.cluster.config.ray_settings import (
    CORE_DASHBOARD_TITLE,
    CORE_DASHBOARD_UID,
    monitoring_settings,
)
from tramontane.cluster.ray_internals.accessors import grafana_dashboards

# Ray's Core dashboard for Grafana, with the stages of the pipelines in its first row.
#
# The Metrics page of Ray's dashboard embeds the dashboard of Grafana whose UID is in
# RAY_GRAFANA_DEFAULT_DASHBOARD_UID.

Panel = Mapping[str, Any]

MONITORING = Path(__file__).parents[1] / "monitoring"
ROW = MONITORING / "ray_core_row.json"


def core_dashboard() -> dict[str, Any]:
    """Return the dashboard of this version of Ray with our row."""
    return merge_row(grafana_dashboards()["core"], json.loads(ROW.read_text(encoding="utf-8")))


def other_dashboards() -> dict[str, dict[str, Any]]:
    """Return Ray's other dashboards, and ours, by name."""
    rays = grafana_dashboards()
    del rays["core"]
    ours = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
    return {f"ray_{name}": dashboard for name, dashboard in rays.items()} | {"tramontane": ours}


def merge_row(core: Mapping[str, Any], row: Sequence[Panel]) -> dict[str, Any]:
    """Return ``core`` with the panels of ``row`` above its own, which are moved down by their
    height and not changed otherwise.

    Our panels end at y = 17: Ray's first row moves from y = 0 to 17, and the panels below it from 1
    to 18.
    """
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in row)
    ids = [panel["id"] for panel in _with_nested([*row, *core["panels"]])]
    assert len(set(ids)) == len(ids), "Grafana needs different ids"
    assert core["uid"] != CORE_DASHBOARD_UID or core["title"] != CORE_DASHBOARD_TITLE, (
        "the row is there already"
    )
    panels = [*row, *(_moved_down(panel, height) for panel in core["panels"])]
    return {**core, "uid": CORE_DASHBOARD_UID, "title": CORE_DASHBOARD_TITLE, "panels": panels}


def _moved_down(panel: Panel, height: int) -> Panel:
    nested = (
        {"panels": [_moved_down(each, height) for each in panel["panels"]]}
        if "panels" in panel
        else {}
    )
    return {**panel, **nested, "gridPos": {**panel["gridPos"], "y": panel["gridPos"]["y"] + height}}


def _with_nested(panels: Sequence[Panel]) -> Iterator[Panel]:
    """Yield the panels and the panels inside collapsed rows."""
    for panel in panels:
        yield panel
        yield from panel.get("panels", ())


MARK = "# Written by: tramontane monitoring"
PROMETHEUS_FILE, GRAFANA_FILE, ENVIRONMENT_FILE = "prometheus.yml", "grafana.ini", "ray.env"
# Ray's list of its nodes, on the head
DISCOVERY_FILE = "/tmp/ray/prom_metrics_service_discovery.json"
SCRAPE_INTERVAL = "10s"  # Ray reports its values as often
DATA_SOURCE = "Prometheus"  # as Ray's dashboard calls it without RAY_PROMETHEUS_NAME


def monitoring_files(folder: Path, prometheus: str, grafana: str) -> dict[str, str]:
    """Return the content of the files by their paths in ``folder``, whose own path is in some of
    them.

    ``prometheus``, ``grafana``: their addresses, as Ray's head node and browsers reach them.
    """
    dashboards = {"ray_core": core_dashboard(), **other_dashboards()}
    files = {
        f"dashboards/{name}.json": json.dumps(dashboard, indent=1) + "\n"
        for name, dashboard in dashboards.items()
    }
    provider = {
        "name": "Tramontane",
        "folder": "Ray",
        "type": "file",
        "options": {"path": str(folder / "dashboards")},
    }
    source = {
        "name": DATA_SOURCE,
        "type": "prometheus",
        "url": prometheus,
        "access": "proxy",
        "isDefault": True,
    }
    return files | {
        PROMETHEUS_FILE: _with_mark(_prometheus(folder)),
        "alerts.yaml": (MONITORING / "alerts.yaml").read_text(encoding="utf-8"),
        GRAFANA_FILE: f"{MARK}\n{_grafana(folder)}",
        "provisioning/dashboards/tramontane.yaml": _with_mark(
            {"apiVersion": 1, "providers": [provider]}
        ),
        "provisioning/datasources/tramontane.yaml": _with_mark(
            {"apiVersion": 1, "datasources": [source]}
        ),
        ENVIRONMENT_FILE: f"{MARK}\n{_environment(prometheus, grafana)}",
    }


def _prometheus(folder: Path) -> dict[str, Any]:
    # A folder that Ray has not made yet cannot be watched for changes, so without an interval it
    # would be read 5 minutes later.
    nodes = {"files": [DISCOVERY_FILE], "refresh_interval": SCRAPE_INTERVAL}
    return {
        "global": {"scrape_interval": SCRAPE_INTERVAL, "evaluation_interval": SCRAPE_INTERVAL},
        "rule_files": [str(folder / "alerts.yaml")],
        "scrape_configs": [{"job_name": "ray", "file_sd_configs": [nodes]}],
    }


def _grafana(folder: Path) -> str:
    """Return Grafana's own settings: Ray's dashboard shows it in frames, to users who have not
    logged in to Grafana.
    """
    return (
        "[security]\nallow_embedding = true\n\n"
        "[auth.anonymous]\nenabled = true\norg_role = Viewer\n\n"
        f"[paths]\nprovisioning = {folder / 'provisioning'}\n"
    )


def _environment(prometheus: str, grafana: str) -> str:
    """Return the file for a shell: ``set -a; . ray.env``."""
    return "".join(
        f"{name}={shlex.quote(value)}\n"
        for name, value in monitoring_settings(prometheus, grafana).items()
    )


def _with_mark(settings: dict[str, Any]) -> str:
    return f"{MARK}\n{yaml.safe_dump(settings, sort_keys=False, width=float('inf'))}"
