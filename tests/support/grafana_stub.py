"""A stand-in for Grafana, of which no binary is to be had: it provisions dashboards from files, and
draws their first row.

It answers what Ray's dashboard and ``serve --dashboard`` ask for, and refuses what Grafana refuses:
two files with one UID, and queries with variables that the dashboard does not have. Charts show
what Prometheus answers to the dashboard's own queries.
"""

import configparser
import json
import re
from pathlib import Path
from typing import Any

import httpx
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

BUILT_IN = {"$__rate_interval": "30s"}
SECONDS, STEP_S = 300, 5  # that a chart shows, as Ray's page asks for
WIDTH, HEIGHT = 420, 170
Series = tuple[str, list[tuple[float, float]]]
COLORS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#b877d9", "#ff7383")


class GrafanaStub:
    """``app`` serves the dashboards that the settings in ``grafana.ini`` lead to; ``requested`` are
    the pages that were.
    """

    def __init__(self, settings: Path) -> None:
        ini = configparser.ConfigParser()
        ini.read(settings)
        assert ini.getboolean("security", "allow_embedding"), "browsers show no frame"
        assert ini.getboolean("auth.anonymous", "enabled"), "frames show a form to log in"
        provisioning = Path(ini["paths"]["provisioning"])
        self.prometheus = _only(provisioning / "datasources", "datasources")["url"]
        folder = Path(_only(provisioning / "dashboards", "providers")["options"]["path"])
        self.dashboards: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.glob("*.json")):
            dashboard = json.loads(path.read_text(encoding="utf-8"))
            assert dashboard["uid"] not in self.dashboards, f"the UID of {path.name} is taken"
            self.dashboards[dashboard["uid"]] = dashboard
        self.requested: list[tuple[str, dict[str, str]]] = []
        self.app = Starlette(
            routes=[
                Route("/api/health", lambda _: JSONResponse({"database": "ok", "version": "stub"})),
                Route("/api/dashboards/uid/{uid}", self._dashboard),
                Route("/d/{uid}/", self._page),
            ]
        )

    def _dashboard(self, request: Request) -> Response:
        found = self.dashboards.get(request.path_params["uid"])
        return JSONResponse(
            {"dashboard": found} if found else {"message": "Dashboard not found"},
            200 if found else 404,
        )

    def _page(self, request: Request) -> Response:
        self.requested.append((request.path_params["uid"], dict(request.query_params)))
        dashboard = self.dashboards.get(request.path_params["uid"])
        if dashboard is None:
            return HTMLResponse("Dashboard not found", 404)
        variables = {
            name.removeprefix("var-"): value
            for name, value in request.query_params.items()
            if name.startswith("var-")
        }
        first, *panels = dashboard["panels"]
        row = panels[
            : next(number for number, panel in enumerate(panels) if panel["type"] == "row")
        ]
        charts = "".join(self._chart(panel, dashboard, variables) for panel in row)
        style = (
            "body{background:#111217;color:#ccccdc;font:13px"
            " sans-serif;margin:8px}div{display:inline-block;margin:4px}"
        )
        return HTMLResponse(f"<style>{style}</style><h3>{first['title']}</h3>{charts}")

    def _chart(
        self, panel: dict[str, Any], dashboard: dict[str, Any], variables: dict[str, str]
    ) -> str:
        lines, legend, largest = [], [], panel["fieldConfig"]["defaults"].get("max", 0)
        series = [
            each
            for target in panel["targets"]
            for each in self._series(target, dashboard, variables)
        ]
        largest = (
            max([largest, *(value for _, points in series for _, value in points)], default=1) or 1
        )
        for (name, points), color in zip(series, COLORS * len(series), strict=False):
            places = " ".join(
                f"{x * WIDTH:.1f},{HEIGHT * (1 - y / largest):.1f}" for x, y in points
            )
            lines.append(
                f"<polyline points='{places}' fill=none stroke='{color}' stroke-width=2 />"
            )
            legend.append(f"<span style='color:{color}'>{name}: {points[-1][1]:.3g}</span>")
        svg = (
            f"<svg width={WIDTH} height={HEIGHT} style='background:#181b1f'>{''.join(lines)}</svg>"
        )
        return f"<div><b>{panel['title']}</b><br>{svg}<br>{'<br>'.join(legend)}</div>"

    def _series(
        self, target: dict[str, str], dashboard: dict[str, Any], variables: dict[str, str]
    ) -> list[Series]:
        """Return the name of each series, and its points: x from 0 to 1, and the value."""
        query = interpolate(target["expr"], dashboard, variables)
        now = float(
            httpx.get(f"{self.prometheus}/api/v1/query?query=time()").json()["data"]["result"][1]
        )
        start = now - SECONDS
        asked = {"query": query, "start": start, "end": now, "step": STEP_S}
        found = httpx.get(f"{self.prometheus}/api/v1/query_range", params=asked).json()["data"][
            "result"
        ]
        return [
            (_name(target["legendFormat"], series["metric"]), points)
            for series in found
            if (points := _points(series, start))
        ]


def _name(legend: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda label: labels.get(label[1], ""), legend)


def _points(series: dict[str, Any], start: float) -> list[tuple[float, float]]:
    return [
        ((float(at) - start) / SECONDS, float(value))
        for at, value in series["values"]
        if value != "NaN"
    ]


def interpolate(query: str, dashboard: dict[str, Any], variables: dict[str, str]) -> str:
    """Insert the variables of a page's address, or else their values for all. Fails for one that
    the dashboard lacks.
    """
    known = {each["name"]: each.get("allValue") or ".*" for each in dashboard["templating"]["list"]}
    for name, value in BUILT_IN.items():
        query = query.replace(name, value)
    return re.sub(r"\$(\w+)", lambda name: variables.get(name[1], known[name[1]]), query)


def _only(folder: Path, key: str) -> Any:  # YAML
    (path,) = folder.iterdir()
    (entry,) = yaml.safe_load(path.read_text(encoding="utf-8"))[key]
    return entry
