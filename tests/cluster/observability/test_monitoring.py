"""The dashboard and the alerts that we ship, as files."""

import re
from pathlib import Path

import pytest
import yaml
from dashboard_queries import ALERTS, alerts, compared, metric_names, panels, queries

from tramontane.cluster.observability.metrics import FORMER_METRICS, METRICS

PAGE = (Path(__file__).parents[3] / "docs" / "observability.md").read_text(encoding="utf-8")


def test_every_query_uses_metrics_of_the_table_and_every_metric_is_used() -> None:
    known = {metric.exported for metric in METRICS}
    requested = {place: metric_names(query) for place, query in queries().items()}
    assert all(names and names <= known for names in requested.values()), requested
    shown = set().union(
        *(requested[place] for place in requested if not place.startswith("Tramontane"))
    )
    former = {metric.exported for metric in FORMER_METRICS}
    assert known - shown - former == {"ray_tramontane_pipeline_active_seconds_total"}, (
        "which the bubble says"
    )
    assert not former & shown


def test_labels_in_queries_are_labels_of_their_metrics() -> None:
    labels = {metric.exported: set(metric.labels) | {"le"} for metric in METRICS}
    for place, query in queries().items():
        possible = set().union(*(labels[name] for name in metric_names(query)))
        used = set(re.findall(r"(\w+)[!=]~?=?\"", query))
        for names in re.findall(r"(?:by|on) \(([\w, ]+)\)", query):
            used |= set(names.split(", "))
        assert used <= possible, place


def test_panels_do_not_lie_over_each_other_and_use_the_chosen_source() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        squares = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not squares & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= squares
        assert panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_says_what_to_do_and_the_documentation_names_it(alert: dict[str, object]) -> None:
    annotations = alert["annotations"]
    assert isinstance(annotations, dict)
    assert set(annotations) == {"summary", "runbook"}
    assert alert["labels"] in ({"severity": "critical"}, {"severity": "warning"})
    assert str(alert["expr"]) != compared(str(alert["expr"])), "it has a bound"
    rows = [
        line
        for line in PAGE.splitlines()
        if f"`{alert['alert']}`" in line and line.startswith("| `ray_")
    ]
    assert len(rows) == 1
    assert rows[0].split("`")[1] in metric_names(str(alert["expr"])), (
        "next to the metric that it watches"
    )
    for flag in re.findall(r"--[a-z-]+", str(annotations["runbook"])):
        assert f"`{flag}" in PAGE, flag


def test_the_rules_for_kubernetes_are_the_same() -> None:
    ours = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    for_kubernetes = yaml.safe_load(
        (Path(__file__).parents[3] / "k8s" / "monitoring" / "alerts.yaml").read_text(
            encoding="utf-8"
        )
    )
    assert for_kubernetes["spec"] == ours
