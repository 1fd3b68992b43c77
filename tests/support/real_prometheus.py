"""A Prometheus that scrapes every second, for as long as a block runs."""

import math
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

PROMETHEUS = shutil.which("prometheus")


@contextmanager
def running_prometheus(folder: Path, settings: dict[str, Any], port: int) -> Iterator[httpx.Client]:
    """Run it with these settings in this folder, but with intervals of a second."""
    settings |= {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}}
    (folder / "every-second.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    address = f"127.0.0.1:{port}"
    flags = {
        "config.file": folder / "every-second.yml",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": address,
    }
    assert PROMETHEUS
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [PROMETHEUS, *(f"--{k}={v}" for k, v in flags.items())], stdout=log, stderr=log
        )
        try:
            with httpx.Client(base_url=f"http://{address}", timeout=30) as client:
                yield client
        finally:
            process.terminate()
            process.wait()


def find_series(client: httpx.Client, query: str) -> list[tuple[dict[str, str], float]]:
    """Return labels and value of all series that the query finds; none while Prometheus is
    starting.
    """
    try:
        answer = client.get("/api/v1/query", params={"query": query})
    except httpx.HTTPError:
        return []
    assert answer.status_code in (200, 503), f"{query}: {answer.text}"
    found = answer.json()["data"]["result"] if answer.status_code == 200 else []
    return [
        (series["metric"], value)
        for series in found
        if not math.isnan(value := float(series["value"][1]))
    ]
