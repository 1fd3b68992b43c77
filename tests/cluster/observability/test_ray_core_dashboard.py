"""Ray's Core dashboard with our row, and the files that ``tramontane monitoring`` writes."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from time import sleep
from typing import Any

import httpx
import pytest
import yaml
from browser import LocalServer
from dashboard_queries import metric_names
from free_ports import free_port
from grafana_stub import GrafanaStub, interpolate
from real_prometheus import PROMETHEUS, running_prometheus
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from tramontane.cluster.cli.monitoring import monitoring
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.ray_settings import CORE_DASHBOARD_UID
from tramontane.cluster.deploy import monitoring_files
from tramontane.cluster.deploy.monitoring_files import ROW, core_dashboard, merge_row
from tramontane.cluster.observability.metrics import METRICS
from tramontane.cluster.ray_internals.accessors import grafana_dashboards
from tramontane.cluster.serving.server import let_dashboard_show_stages, token_file
from tramontane.proto.errors import ConfigError

Dashboard = dict[str, Any]
HEIGHT = 17  # of our row
ROW_PANELS = json.loads(ROW.read_text(encoding="utf-8"))
QUERIES = [target["expr"] for panel in ROW_PANELS for target in panel.get("targets", ())]


def test_ray_s_own_panels_are_all_there_and_only_moved_down() -> None:
    rays, merged = grafana_dashboards()["core"], core_dashboard()
    ours, theirs = merged["panels"][: len(ROW_PANELS)], merged["panels"][len(ROW_PANELS) :]
    assert ours == ROW_PANELS
    assert ours[0]["title"] == "Tramontane"
    assert len(theirs) == len(rays["panels"])
    for moved, panel in zip(theirs, rays["panels"], strict=True):
        assert _moved_up(moved) == panel, panel["title"]
    named = {"panels", "uid", "title"}
    assert {key: value for key, value in merged.items() if key not in named} == {
        k: v for k, v in rays.items() if k not in named
    }


def _moved_up(panel: Dashboard) -> Dashboard:
    nested = {"panels": [_moved_up(each) for each in panel["panels"]]} if "panels" in panel else {}
    return panel | nested | {"gridPos": panel["gridPos"] | {"y": panel["gridPos"]["y"] - HEIGHT}}


def test_panels_of_a_collapsed_row_move_with_it() -> None:
    core = {
        "uid": "x",
        "title": "x",
        "panels": [
            {
                "id": 1,
                "gridPos": {"y": 0, "h": 1},
                "panels": [{"id": 2, "gridPos": {"y": 1, "h": 8}}],
            }
        ],
    }
    before = deepcopy(core)
    (row,) = merge_row(core, [{"id": 3, "gridPos": {"y": 0, "h": 4}}])["panels"][1:]
    assert (row["gridPos"]["y"], row["panels"][0]["gridPos"]["y"]) == (4, 5)
    assert core == before
    with pytest.raises(AssertionError, match="different ids"):
        merge_row(core, [{"id": 2, "gridPos": {"y": 0, "h": 4}}])


def test_no_panel_lies_over_another() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in core_dashboard()["panels"]:
        place = panel["gridPos"]
        squares = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not squares & taken, panel["title"]
        taken |= squares


@pytest.mark.parametrize("query", QUERIES)
def test_queries_have_metrics_labels_and_variables_that_exist(query: str) -> None:
    known = {
        metric.exported: set(metric.labels) | {"le", "SessionName", "ray_io_cluster"}
        for metric in METRICS
    }
    assert metric_names(query)
    assert metric_names(query) <= known.keys()
    labels = set(re.findall(r"(\w+)[!=]~?=?\"", query)) | {
        label
        for names in re.findall(r"(?:by|on) \(([\w, ]+)\)", query)
        for label in names.split(", ")
    }
    assert labels <= set().union(*(known[name] for name in metric_names(query)))
    assert query.count('SessionName=~"$SessionName"') == len(
        re.findall(r"ray_tramontane_\w+", query)
    ), "of this Ray alone"
    assert "$" not in interpolate(query, core_dashboard(), {})


def test_a_variable_that_ray_drops_is_noticed() -> None:
    dashboard = core_dashboard()
    dashboard["templating"]["list"] = [
        each for each in dashboard["templating"]["list"] if each["name"] != "SessionName"
    ]
    with pytest.raises(KeyError, match="SessionName"):
        interpolate(QUERIES[0], dashboard, {})


# ---- the files


@pytest.fixture
def written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = tmp_path / "monitoring"
    monitoring(folder, "http://prometheus.example:9090/", "https://grafana.example")
    assert str(folder / "grafana.ini") in capsys.readouterr().out
    return folder


def test_grafana_finds_our_dashboards_and_ray_s_each_with_a_uid_of_its_own(written: Path) -> None:
    stub = GrafanaStub(written / "grafana.ini")
    assert stub.prometheus == "http://prometheus.example:9090"
    rays = {dashboard["uid"] for name, dashboard in grafana_dashboards().items() if name != "core"}
    assert stub.dashboards.keys() == rays | {CORE_DASHBOARD_UID, "tramontane"}
    assert stub.dashboards[CORE_DASHBOARD_UID] == core_dashboard()


def test_the_stub_refuses_a_uid_that_is_taken(written: Path) -> None:
    (written / "dashboards" / "x.json").write_text(json.dumps({"uid": CORE_DASHBOARD_UID}))
    with pytest.raises(AssertionError, match="taken"):
        GrafanaStub(written / "grafana.ini")


def test_ray_s_head_reads_its_environment_from_a_file(written: Path) -> None:
    shell = f"set -a; . {written / 'ray.env'}; env"
    lines = subprocess.run(
        ["sh", "-c", shell], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {line for line in lines if line.startswith(("RAY_GRAFANA", "RAY_PROMETHEUS"))} == {
        "RAY_PROMETHEUS_HOST=http://prometheus.example:9090",
        "RAY_GRAFANA_HOST=https://grafana.example",
        "RAY_GRAFANA_IFRAME_HOST=https://grafana.example",
        f"RAY_GRAFANA_DEFAULT_DASHBOARD_UID={CORE_DASHBOARD_UID}",
    }


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="there is no promtool here; apt-get install prometheus"
)
def test_prometheus_accepts_its_settings(written: Path) -> None:
    result = subprocess.run(
        ["promtool", "check", "config", written / "prometheus.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "10 rules found" in result.stdout + result.stderr
    (scrape,) = yaml.safe_load((written / "prometheus.yml").read_text())["scrape_configs"]
    (nodes,) = scrape["file_sd_configs"]
    assert nodes == {
        "files": ["/tmp/ray/prom_metrics_service_discovery.json"],
        "refresh_interval": "10s",
    }


@pytest.mark.nightly
@pytest.mark.skipif(
    PROMETHEUS is None, reason="there is no prometheus here; apt-get install prometheus"
)
def test_prometheus_may_start_before_ray_has_made_its_folder(written: Path, tmp_path: Path) -> None:
    settings = yaml.safe_load((written / "prometheus.yml").read_text())
    nodes = tmp_path / "ray" / "nodes.json"
    settings["scrape_configs"][0]["file_sd_configs"][0]["files"] = [str(nodes)]
    with running_prometheus(tmp_path, settings, free_port()) as client:
        while not _answers(client, "/-/ready"):
            sleep(0.1)
        nodes.parent.mkdir()
        nodes.write_text(
            json.dumps([{"labels": {"job": "ray"}, "targets": ["127.0.0.1:1"]}]), encoding="utf-8"
        )
        while not client.get("/api/v1/targets").json()["data"]["activeTargets"]:
            sleep(0.1)  # until pytest's own timeout


def _answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == 200
    except httpx.HTTPError:
        return False


def test_files_are_written_again_but_none_of_others(written: Path, tmp_path: Path) -> None:
    monitoring(written, "http://other:1", "http://other:2")
    assert "http://other:1" in (written / "ray.env").read_text()
    (written / "prometheus.yml").write_text("mine")
    with pytest.raises(ConfigError, match=r"prometheus\.yml was not written by this command"):
        monitoring(written)
    with pytest.raises(ConfigError, match="has files that this command has not written"):
        monitoring(tmp_path)


@pytest.mark.parametrize(
    "url",
    [
        "localhost",
        "localhost:3000",
        "http://",
        "http://x:y",
        "http://x:0",
        "ftp://x",
        "http://x:99999",
        "",
    ],
)
def test_an_address_that_is_none_is_refused(tmp_path: Path, url: str) -> None:
    for wrong in ({"prometheus": url}, {"grafana": url}):
        with pytest.raises(
            ConfigError, match=f"--{next(iter(wrong))} is '{url}'; it must be an address"
        ):
            monitoring(tmp_path / "new", **wrong)
    assert not (tmp_path / "new").exists()


def test_a_version_of_ray_without_the_dashboards_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(
        "ray.dashboard.modules.metrics.grafana_dashboard_factory.generate_default_grafana_dashboard"
    )
    with pytest.raises(
        ConfigError,
        match=r"generate_default_grafana_dashboard is missing \(breaks tramontane monitoring\)",
    ):
        monitoring(tmp_path / "new")


# ---- serve --dashboard


@contextmanager
def _server(routes: dict[str, Any]) -> Iterator[str]:
    async def answer(request: Request) -> JSONResponse:
        return JSONResponse(routes[request.url.path])

    server = LocalServer(Starlette(routes=[Route(path, answer) for path in routes]))
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


DASHBOARD_PATH = f"/api/dashboards/uid/{CORE_DASHBOARD_UID}"


@pytest.mark.parametrize(
    ("grafana", "problem"),
    [
        ({}, "no Grafana answers at {} \\(RAY_GRAFANA_HOST\\)"),
        (
            {"/api/health": {}},
            f"Grafana at {{}} has no dashboard with the UID {CORE_DASHBOARD_UID}",
        ),
        (
            {"/api/health": {}, DASHBOARD_PATH: {"dashboard": {"title": "Mine"}}},
            f"another dashboard of Grafana at {{}} has the UID {CORE_DASHBOARD_UID}: 'Mine'",
        ),
        ({"/api/health": {}, DASHBOARD_PATH: []}, "another dashboard of Grafana at {}"),
    ],
)
def test_what_the_dashboard_cannot_show_is_said(
    monkeypatch: pytest.MonkeyPatch, grafana: dict[str, Any], problem: str
) -> None:
    monkeypatch.delenv("RAY_GRAFANA_DEFAULT_DASHBOARD_UID", raising=False)
    with _server({"/api/v1/query": {}}) as prometheus, _server(grafana) as url:
        monkeypatch.setenv("RAY_PROMETHEUS_HOST", f"{prometheus}/")
        monkeypatch.setenv("RAY_GRAFANA_HOST", url)
        assert re.match(problem.format(url), let_dashboard_show_stages())
        assert "RAY_GRAFANA_DEFAULT_DASHBOARD_UID" not in os.environ, (
            "Ray's own would not be shown either"
        )
        monkeypatch.setenv("RAY_PROMETHEUS_HOST", "http://127.0.0.1:1")
        assert let_dashboard_show_stages().startswith(
            "no Prometheus answers at http://127.0.0.1:1 (RAY_PROMETHEUS_HOST); "
        )


@pytest.mark.parametrize("uid", [None, ""])
def test_the_dashboard_of_grafana_is_embedded_where_it_is_ours(
    monkeypatch: pytest.MonkeyPatch, uid: str | None
) -> None:
    monkeypatch.setenv("RAY_GRAFANA_DEFAULT_DASHBOARD_UID", uid or "")
    if uid is None:
        monkeypatch.delenv("RAY_GRAFANA_DEFAULT_DASHBOARD_UID")
    with (
        _server({"/api/v1/query": {}}) as prometheus,
        _server({"/api/health": {}, DASHBOARD_PATH: {"dashboard": core_dashboard()}}) as url,
    ):
        monkeypatch.setenv("RAY_PROMETHEUS_HOST", prometheus)
        monkeypatch.setenv("RAY_GRAFANA_HOST", url)
        assert let_dashboard_show_stages() == ""
        assert os.environ["RAY_GRAFANA_DEFAULT_DASHBOARD_UID"] == CORE_DASHBOARD_UID
        monkeypatch.setenv("RAY_GRAFANA_DEFAULT_DASHBOARD_UID", "rayDefaultDashboard")
        assert "names another dashboard, 'rayDefaultDashboard'" in let_dashboard_show_stages()


def test_the_token_is_the_user_s_alone_and_removed_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    with token_file(1) as path:
        assert path == "", "tests run without tokens"
    monkeypatch.delenv("RAY_AUTH_MODE")
    with token_file(8000) as path, token_file(8001) as other:
        assert Path(path).read_text() == Path(other).read_text() == "secret"
        assert Path(path).stat().st_mode & 0o777 == 0o600
    assert not any((tmp_path / ".tramontane").iterdir())
    (tmp_path / ".tramontane").rmdir()
    (tmp_path / ".tramontane").touch()
    with (
        pytest.raises(
            ConfigError,
            match=r"--dashboard: the token for it cannot be written to .*ray-token-8000",
        ),
        token_file(8000),
    ):
        pass


def test_a_joined_cluster_has_its_own_dashboard() -> None:
    with pytest.raises(ConfigError, match="--dashboard is for a Ray cluster that serve starts"):
        EngineConfig.build(None, {"dashboard": True, "address": "auto"})


def test_a_page_of_the_stub_names_what_grafana_has(written: Path) -> None:
    client = TestClient(GrafanaStub(written / "grafana.ini").app)
    assert client.get("/d/rayDefaultDashboard/").status_code == 404
    assert (
        client.get(DASHBOARD_PATH).json()["dashboard"]["title"]
        == monitoring_files.CORE_DASHBOARD_TITLE
    )
