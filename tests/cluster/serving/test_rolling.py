"""New versions roll in under a few streams, on a cluster with room for one pipeline; and the
application is drained.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
import ray
from chaos_load import Load, baseline_tokens, bodies
from ray import serve
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from serve_cluster import (
    GRPC_PORT,
    PORT,
    URL,
    deploy,
    events,
    ingress_stats,
    is_rollout_complete,
    jobs_in,
    router_stats,
    start_serve,
    wait_until_ready,
)

from tramontane.cluster.config.ray_settings import ONE_MACHINE_SETTINGS

pytestmark = [
    pytest.mark.ray,
    pytest.mark.serve,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]

CLIENTS, PAUSE_S = 4, 0.5
SYSTEM = {"_system_config": dict(ONE_MACHINE_SETTINGS)}
DRAIN = [
    sys.executable,
    "-c",
    "from tramontane.cluster.cli.main import main; main()",
    "drain",
    "--address",
]


@pytest.fixture(scope="module")
def settings() -> Iterator[dict[str, Any]]:
    """Of the version that is there at first."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **SYSTEM}
    )
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        with TemporaryDirectory() as folder:
            start_serve(PORT, GRPC_PORT)
            first = {
                "dtype": "float32",
                "stages": 2,
                "threads_per_stage": 1,
                "max_num_seqs": 16,
                **jobs_in(folder),
            }
            deploy(first)
            wait_until_ready()
            yield first
            serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()


def _stages() -> dict[int, int]:
    """Bytes that each has read, by process."""
    return {
        stage["pid"]: stage["bytes_read"] for router in router_stats() for stage in router["stages"]
    }


def test_versions_roll_in_while_streams_run_and_no_token_differs(settings: dict[str, Any]) -> None:
    async def scenario() -> None:
        requests = bodies(2 * CLIENTS, random.Random(1))
        expected = await baseline_tokens(URL, requests, CLIENTS)
        load = Load(URL, requests, expected, pause_s=PAUSE_S)
        running = asyncio.create_task(load.run(CLIENTS))
        try:
            before = await asyncio.to_thread(_stages)
            same = await _rolled_in(load, settings | {"max_queued_requests": 99})
            assert same == before, "the same processes, which have read nothing more"
            others = await _rolled_in(load, settings | {"max_num_seqs": 17})
            assert not others.keys() & before.keys(), (
                "they had no room next to those of the version before"
            )
        finally:
            load.is_over = True
            await running
        assert not load.failed
        assert not load.different
        assert load.num_done >= CLIENTS

    asyncio.run(scenario())


async def _rolled_in(load: Load, settings: dict[str, Any]) -> dict[int, int]:
    """Once streams run; returns the stages of this version."""
    while load.unfinished < CLIENTS - 1:
        await asyncio.sleep(0.01)
    former = await asyncio.to_thread(router_stats)
    await asyncio.to_thread(deploy, settings)
    while not await asyncio.to_thread(is_rollout_complete, former):
        await asyncio.sleep(0.1)
    return await asyncio.to_thread(_stages)


@pytest.mark.nightly
def test_what_is_drained_finishes_what_runs_and_takes_nothing_new(settings: dict[str, Any]) -> None:
    body = {
        "prompt": "ROMEO:",
        "max_tokens": 600,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    completions = f"{URL}/v1/completions"
    with httpx.stream("POST", completions, json=body, timeout=120) as stream:
        parts = stream.iter_text()
        text = next(parts)
        command = subprocess.Popen(
            [*DRAIN, ray.get_runtime_context().gcs_address], stdout=subprocess.PIPE, text=True
        )
        while (health := httpx.get(f"{URL}/health", timeout=30)).status_code == 200:
            assert command.poll() is None
            time.sleep(0.05)
        assert health.json()["error"]["code"] == "draining"
        refused = httpx.post(completions, json={"prompt": "x"}, timeout=30)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) > 0
        text += "".join(parts)
    assert len(events(text)) > 0
    out, _ = command.communicate()
    assert (command.returncode, out) == (
        0,
        "drained: no request is running, and new ones are refused\n",
    )
    assert httpx.post(completions, json={"prompt": "x"}, timeout=30).status_code == 503
    _kill_the_ingress()
    assert httpx.post(completions, json={"prompt": "x"}, timeout=30).status_code == 503, (
        "the next one is drained, too"
    )
    subprocess.run([*DRAIN, ray.get_runtime_context().gcs_address, "--undo"], check=True)
    assert (
        httpx.post(completions, json={"prompt": "x", "max_tokens": 3}, timeout=30).status_code
        == 200
    )
    subprocess.run([*DRAIN, ray.get_runtime_context().gcs_address], check=True)
    former = router_stats()
    deploy(settings | {"max_queued_requests": 98})
    while not is_rollout_complete(former):
        time.sleep(0.1)
    assert (
        httpx.post(completions, json={"prompt": "x", "max_tokens": 3}, timeout=30).status_code
        == 200
    )


def _kill_the_ingress() -> None:
    """And wait until there is another."""
    former = ingress_stats()["pid"]
    os.kill(former, signal.SIGKILL)
    while True:
        with suppress(RayError, RayServeException):
            if ingress_stats()["pid"] != former:
                return
        time.sleep(0.1)
