"""A real Prometheus reads a real server: every panel of the dashboard shows something, every alert
can be judged, and Ray's own dashboard shows the stages at work in a real browser. A stand-in takes
the place of Grafana.
"""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import yaml
from browser import TIMEOUT_MS, LocalServer, browser
from dashboard_queries import alerts, queries
from free_ports import free_port
from grafana_stub import GrafanaStub, interpolate
from real_prometheus import PROMETHEUS, find_series, running_prometheus
from serve_cluster import router_stats, running_application

from tramontane.cluster.cli.monitoring import monitoring
from tramontane.cluster.config.ray_settings import CORE_DASHBOARD_UID, monitoring_settings
from tramontane.cluster.deploy.monitoring_files import ROW
from tramontane.cluster.pipeline import ray_cluster
from tramontane.cluster.serving.server import let_dashboard_show_stages

pytestmark = [
    pytest.mark.ray,
    pytest.mark.serve,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.skipif(
        PROMETHEUS is None, reason="there is no prometheus here; apt-get install prometheus"
    ),
]
NUM_STAGES = 2
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "stages": NUM_STAGES,
    "expert_actors": 2,
    "threads_per_stage": 1,
    "max_num_seqs": 2,
    "max_queued_requests": 1,
}
BURST = 8  # requests at once: too many for the queue
PAUSE_S = 0.3  # between two requests, and between two looks at what Prometheus has
# That both see the same time: Prometheus' rate is of as many seconds as /activity has.
BUSY_WINDOW = {"$__rate_interval": "10s"}
STAGE_PANELS = ("Stages at work", "Bubble of each stage")


@dataclass(frozen=True)
class Monitored:
    """A server, and what watches it."""

    url: str
    dashboard: str
    prometheus: httpx.Client
    grafana: GrafanaStub


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitored]:
    folder, ports = tmp_path_factory.mktemp("monitoring") / "files", [free_port() for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(
            ray_cluster,
            "ONE_MACHINE_SETTINGS",
            {**ray_cluster.ONE_MACHINE_SETTINGS, "metrics_report_interval_ms": 1000},
        )
        monitoring(folder, f"http://127.0.0.1:{ports[0]}")
        settings = yaml.safe_load((folder / "prometheus.yml").read_text(encoding="utf-8"))
        prometheus = stack.enter_context(running_prometheus(folder, settings, ports[0]))
        stub = GrafanaStub(folder / "grafana.ini")
        grafana = LocalServer(stub.app)
        grafana.start()
        stack.callback(grafana.stop)
        addresses = monitoring_settings(f"http://127.0.0.1:{ports[0]}", grafana.url)
        del addresses["RAY_GRAFANA_DEFAULT_DASHBOARD_UID"]  # which the command sets
        for name, value in addresses.items():
            patch.setenv(name, value)
        patch.setenv("RAY_GRAFANA_DEFAULT_DASHBOARD_UID", "")
        while problem := let_dashboard_show_stages():
            assert problem.startswith("no Prometheus answers")
            assert "Grafana" not in problem
            sleep(0.1)  # until Prometheus has started
        patch.setenv("RAY_GRAFANA_DEFAULT_DASHBOARD_UID", CORE_DASHBOARD_UID)
        dashboard = stack.enter_context(ray_cluster.local_ray_cluster(num_cpus=8, dashboard=True))
        stack.enter_context(running_application(ports[1], ports[2], **SETTINGS))
        url = f"http://127.0.0.1:{ports[1]}"
        yield Monitored(url, f"http://{dashboard}", prometheus, stub)


@pytest.fixture(scope="module")
def at_work(monitored: Monitored) -> Iterator[Monitored]:
    """The server, whose stages compute for a part of the time: tests wait for Prometheus. From here
    on requests are counted that no test has sent.
    """
    url, stopped = monitored.url, threading.Event()

    def stream() -> None:
        body = {"prompt": "What news from Rome?", "max_tokens": 60, "ignore_eos": True}
        with httpx.Client(timeout=60) as client, suppress(httpx.HTTPError):
            while not stopped.wait(PAUSE_S):
                client.post(f"{url}/v1/completions", json=body)

    thread = threading.Thread(target=stream)
    thread.start()
    yield monitored
    stopped.set()
    thread.join()


def _values(client: httpx.Client, query: str) -> list[float]:
    return [value for _, value in find_series(client, query)]


async def _burst(url: str) -> int:
    """Returns the new tokens of all requests that were taken."""
    body = {"prompt": "What news from Rome?", "max_tokens": 30, "ignore_eos": True}
    body |= {"user": "a"}  # has no effect, which is a metric
    async with httpx.AsyncClient(timeout=120) as client:
        answers = await asyncio.gather(
            *(client.post(f"{url}/v1/completions", json=body) for _ in range(BURST))
        )
    assert {answer.status_code for answer in answers} <= {200, 429}
    return sum(
        answer.json()["usage"]["completion_tokens"]
        for answer in answers
        if answer.status_code == 200
    )


def test_every_panel_and_every_alert_finds_something(monitored: Monitored) -> None:
    client, url = monitored.prometheus, monitored.url
    tokens, missing = asyncio.run(_burst(url)), queries()
    while not _values(client, "sum(ray_tramontane_stage_busy_seconds_total)"):
        sleep(PAUSE_S)
    os.kill(router_stats()[0]["stages"][1]["pid"], signal.SIGKILL)  # a recovery
    while missing:  # until pytest's own timeout, which shows what is
        sleep(PAUSE_S)
        tokens += asyncio.run(_burst(url))
        missing = {place: query for place, query in missing.items() if not _values(client, query)}
    # A scrape that takes longer than the second that it may makes every series stale until the
    # next one.
    while (reported := _values(client, "sum(ray_tramontane_generation_tokens_total)")) != [tokens]:
        assert not reported or reported[0] < tokens, "none is counted twice"
        sleep(PAUSE_S)
    while not (recoveries := _values(client, "sum(ray_tramontane_recoveries_total)")):
        sleep(PAUSE_S)
    assert recoveries == [1.0]
    rules = [
        rule
        for group in client.get("/api/v1/rules").json()["data"]["groups"]
        for rule in group["rules"]
    ]
    assert [rule["name"] for rule in rules] == [alert["alert"] for alert in alerts()]
    assert {rule["health"] for rule in rules} == {"ok"}


def test_every_query_of_the_row_finds_a_series_for_each_live_stage(at_work: Monitored) -> None:
    """Within a fifth of the server's own figures, as soon as both are of the same ten seconds."""
    dashboard = at_work.grafana.dashboards[CORE_DASHBOARD_UID]
    row = json.loads(ROW.read_text(encoding="utf-8"))
    of_row = {
        f"{panel['title']} {target['refId']}": interpolate(
            target["expr"].replace(*next(iter(BUSY_WINDOW.items()))), dashboard, {}
        )
        for panel in row
        for target in panel.get("targets", ())
    }
    missing = set(of_row)
    while missing:
        missing = {name for name in missing if not find_series(at_work.prometheus, of_row[name])}
        sleep(0.2)
    for title in STAGE_PANELS:
        series = find_series(at_work.prometheus, of_row[f"{title} A"])
        assert sorted(labels["stage"] for labels, _ in series) == [
            str(stage) for stage in range(NUM_STAGES)
        ], title
    hops = find_series(at_work.prometheus, of_row["Hops between stages A"])
    assert [labels["stage"] for labels, _ in hops] == [str(stage) for stage in range(1, NUM_STAGES)]
    while True:  # until pytest's own timeout
        (pipeline,) = httpx.get(f"{at_work.url}/activity", timeout=30).json()["pipelines"]
        series = find_series(at_work.prometheus, of_row["Stages at work A"])
        shown = {int(labels["stage"]): value for labels, value in series}
        if len(shown) == NUM_STAGES and all(
            abs(shown[stage] - busy) < 0.2 * busy for stage, busy in enumerate(pipeline["busy"])
        ):
            assert min(pipeline["busy"]) > 0.02, "they are at work"
            break
        sleep(0.3)


@pytest.mark.nightly
def test_ray_s_metrics_page_embeds_the_dashboard_that_begins_with_our_row(
    at_work: Monitored,
) -> None:
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": 1400, "height": 900})
        page.goto(f"{at_work.dashboard}/#/metrics")
        source = page.locator("iframe").first.get_attribute("src", timeout=TIMEOUT_MS)
        assert source
        frame = page.frame_locator("iframe")
        frame.get_by_text("Stages at work").wait_for(timeout=TIMEOUT_MS)
        assert frame.locator("h3").inner_text() == "Tramontane"
        assert frame.get_by_text("stage 1:").first.is_visible()
        if picture := os.environ.get("TRAMONTANE_PICTURE"):  # for docs/observability.md
            page.screenshot(path=Path(picture))
    address = urlsplit(source)
    assert address.path == f"/d/{CORE_DASHBOARD_UID}/"
    variables = parse_qs(address.query)
    assert variables["var-datasource"] == ["Prometheus"]
    assert variables["var-SessionName"][0].startswith("session_")
    uid, requested = at_work.grafana.requested[-1]
    assert uid == CORE_DASHBOARD_UID
    assert requested["var-SessionName"] == variables["var-SessionName"][0]
