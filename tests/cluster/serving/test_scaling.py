"""Ray Serve scales pipelines while streams run: from one to two, where a third finds no room, and
back to one.
"""

import asyncio
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from chaos_load import Load, baseline_tokens
from free_ports import free_port
from ray import serve
from serve_cluster import jobs_in, leftovers, start_serve, wait_until_ready

from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster
from tramontane.cluster.serving.app import APPLICATION, build

pytestmark = [
    pytest.mark.ray,
    pytest.mark.serve,
    pytest.mark.timeout(600),
    # see ``router_scaling_options``
    pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning"),
]

OF_A_PIPELINE = 3  # its supervisor, its stage, their placement group
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "stages": 1,
    "threads_per_stage": 1,
    "max_num_seqs": 4,
    "drain_timeout": 0,
}
SETTINGS |= {"max_replicas": 3, "upscale_delay": 0, "downscale_delay": 1, "placement_timeout": 600}


@pytest.fixture
def url() -> Iterator[str]:
    port, grpc_port = free_port(), free_port()
    with local_ray_cluster(num_cpus=2), TemporaryDirectory() as folder:
        start_serve(port, grpc_port)
        serve.run(build(SETTINGS | jobs_in(folder)), name=APPLICATION, route_prefix="/")
        wait_until_ready(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()


def _body(number: int, max_tokens: int) -> dict[str, Any]:
    about = {
        "prompt": f"KING {number}",
        "max_tokens": max_tokens,
        "temperature": 0.8,
        "seed": number,
        "n": 1,
    }
    return about | {"stream": True, "ignore_eos": True, "return_token_ids": True}


def _routers(state: str) -> int:
    number: int = (
        serve.status().applications[APPLICATION].deployments["Router"].replica_states.get(state, 0)
    )
    return number


async def _until(condition: Callable[[], bool]) -> None:
    """Bounded by pytest's own timeout."""
    while not await asyncio.to_thread(condition):
        await asyncio.sleep(0.1)


def test_pipelines_come_and_go_with_the_load_and_no_request_notices(url: str) -> None:
    async def run() -> None:
        short, long = (
            [_body(number, 40) for number in range(4)],
            [_body(number, 400) for number in range(2)],
        )
        many = Load(url, short, await baseline_tokens(url, short, 2))
        few = Load(url, long, await baseline_tokens(url, long, 2))
        streaming = asyncio.create_task(few.run(2))
        request_task = asyncio.create_task(many.run(8))
        await _until(lambda: _routers("RUNNING") == 2)
        await _until(lambda: _routers("STARTING") == 1 and len(leftovers()) > 2 * OF_A_PIPELINE)
        num_done = many.num_done
        await _until(lambda: many.num_done > num_done)  # with a third that waits for room
        many.is_over = True
        await request_task
        await _until(lambda: _routers("RUNNING") == 1 and len(leftovers()) == OF_A_PIPELINE)
        few.is_over = True
        await streaming
        assert (many.failed, many.different, few.failed, few.different) == ([], [], [], [])
        assert few.num_done > 0
        assert many.num_done > 0

    asyncio.run(run())
    serve.delete(APPLICATION)
    assert leftovers() == []
