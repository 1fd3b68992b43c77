"""A real Prometheus reads a real server: every panel of the dashboard shows something, and every
alert can be judged.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from dashboard_queries import ALERTS, alerts, queries
from free_ports import free_port
from real_prometheus import PROMETHEUS, find_series, running_prometheus
from serve_cluster import router_stats, running_application

from tramontane.cluster.pipeline import ray_cluster

pytestmark = [
    pytest.mark.ray,
    pytest.mark.serve,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.skipif(
        PROMETHEUS is None, reason="there is no prometheus here; apt-get install prometheus"
    ),
]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "stages": 2,
    "expert_actors": 2,
    "threads_per_stage": 1,
    "max_num_seqs": 2,
    "max_queued_requests": 1,
}
BURST = 8  # requests at once: too many for the queue


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ray_cluster,
            "RAY_SETTINGS",
            {**ray_cluster.RAY_SETTINGS, "metrics_report_interval_ms": 1000},
        )
        with (
            ray_cluster.local_ray_cluster(num_cpus=8),
            running_application(port, free_port(), **SETTINGS),
        ):
            yield f"http://127.0.0.1:{port}"


@contextmanager
def _prometheus(folder: Path) -> Iterator[httpx.Client]:
    """It scrapes this cluster's only node, and judges our alerts."""
    target = f"127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}"
    scrape = {"job_name": "ray", "static_configs": [{"targets": [target]}]}
    with running_prometheus(
        folder, {"rule_files": [str(ALERTS)], "scrape_configs": [scrape]}, free_port()
    ) as client:
        yield client


def _values(client: httpx.Client, query: str) -> list[float]:
    return [value for _, value in find_series(client, query)]


async def _burst(url: str) -> int:
    """Returns the new tokens of all requests that were taken."""
    body = {"prompt": "What news from Rome?", "max_tokens": 30, "ignore_eos": True}
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


def test_every_panel_and_every_alert_finds_something(url: str, tmp_path: Path) -> None:
    with _prometheus(tmp_path) as client:
        tokens, missing = asyncio.run(_burst(url)), queries()
        while not _values(client, "sum(ray_tramontane_stage_busy_seconds_total)"):
            time.sleep(0.2)
        os.kill(router_stats()[0]["stages"][1]["pid"], signal.SIGKILL)  # a recovery
        while missing:  # until pytest's own timeout, which shows what is
            tokens += asyncio.run(_burst(url))
            missing = {
                place: query for place, query in missing.items() if not _values(client, query)
            }
        # A scrape that takes longer than the second that it may makes every series stale until the
        # next one.
        while (reported := _values(client, "sum(ray_tramontane_generation_tokens_total)")) != [
            tokens
        ]:
            assert not reported or reported[0] < tokens, "none is counted twice"
            time.sleep(0.2)
        while not (recoveries := _values(client, "sum(ray_tramontane_recoveries_total)")):
            time.sleep(0.2)
        assert recoveries == [1.0]
        rules = [
            rule
            for group in client.get("/api/v1/rules").json()["data"]["groups"]
            for rule in group["rules"]
        ]
        assert [rule["name"] for rule in rules] == [alert["alert"] for alert in alerts()]
        assert {rule["health"] for rule in rules} == {"ok"}
