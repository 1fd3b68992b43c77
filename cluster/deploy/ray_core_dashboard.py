"""Ray's Core dashboard for Grafana, with the stages of the pipelines in its first row.

The Metrics page of Ray's dashboard embeds the dashboard of Grafana whose UID is in
RAY_GRAFANA_DEFAULT_DASHBOARD_UID.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tramontane.cluster.config.ray_settings import CORE_DASHBOARD_TITLE, CORE_DASHBOARD_UID
from tramontane.cluster.ray_internals.accessors import grafana_dashboards

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
    """Yield the panels and those of collapsed rows."""
    for panel in panels:
        yield panel
        yield from panel.get("panels", ())
