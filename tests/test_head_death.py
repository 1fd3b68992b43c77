"""The head node dies with everything on it, and comes back: what other nodes generate continues,
with the same tokens.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
from free_ports import free_port
from killable_head import KillableHead, killable_head
from ray import serve
from ray.serve.config import HTTPOptions
from serve_cluster import leftovers

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.serving.app import APPLICATION, application

pytestmark = [
    pytest.mark.ray,
    pytest.mark.serve,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]

PORT = free_port()
URL = f"http://127.0.0.1:{PORT}"
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "stages": 2,
    "max_num_seqs": 8,
    "threads_per_stage": 1,
}
BODY = {"max_tokens": 80, "ignore_eos": True, "seed": 3, "return_token_ids": True, "stream": True}
PROMPTS = ["ROMEO:", "KING: what news?"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[KillableHead]:
    with killable_head("one", "two") as cluster:
        yield cluster


@asynccontextmanager
async def _not_by_way_of(head: list[int]) -> AsyncIterator[httpx.AsyncClient]:
    """All nodes of this machine share Ray Serve's port: a client whose connection another proxy has
    accepted than the head's.
    """
    while True:
        async with httpx.AsyncClient(base_url=URL, timeout=120) as client:
            answer = await client.get("/v1/models")
            ours = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
            ends = [
                each
                for each in psutil.net_connections("tcp")
                if each.raddr and each.raddr.port == ours
            ]
            if [each.pid for each in ends if each.laddr.port == PORT and each.pid not in head]:
                yield client
                return


async def _tokens(
    prompt: str, head: list[int], connected: asyncio.Barrier, begun: asyncio.Event
) -> list[int]:
    """Of a stream; ``begun`` after some of them. None is requested before all have found a
    connection: that may take several.
    """
    tokens: list[int] = []
    async with _not_by_way_of(head) as client:
        await connected.wait()
        async with client.stream(
            "POST", "/v1/completions", json=BODY | {"prompt": prompt}
        ) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    tokens += [
                        token
                        for choice in json.loads(line[6:])["choices"]
                        for token in choice["token_ids"]
                    ]
                if len(tokens) > 10:
                    begun.set()
    return tokens


class _Streams:
    """Of all prompts, each with its own connection."""

    def __init__(self, head: list[int]) -> None:
        self._begun = [asyncio.Event() for _ in PROMPTS]
        connected = asyncio.Barrier(len(PROMPTS))
        requested = zip(PROMPTS, self._begun, strict=True)
        self._requested = [
            asyncio.create_task(_tokens(prompt, head, connected, begun))
            for prompt, begun in requested
        ]

    async def begun(self) -> None:
        for each in self._begun:
            await each.wait()
        assert not any(each.done() for each in self._requested)

    async def ends(self) -> list[list[int]]:
        return list(await asyncio.gather(*self._requested))


def _stage(number: int) -> psutil.Process:
    name = next(name for name in leftovers() if name.endswith(f"-stage-{number}"))
    return psutil.Process(ray.get(ray.get_actor(name, "tramontane").health.remote()).pid)


def _health() -> int:
    return httpx.get(f"{URL}/health", timeout=60).status_code


async def _without_head(cluster: KillableHead, stage: psutil.Process) -> None:
    on_head = [each.pid for each in cluster.members(cluster.processes["head"])]
    expected = await _Streams(on_head).ends()
    assert [len(tokens) for tokens in expected] == [BODY["max_tokens"]] * 2

    streams = _Streams(on_head)
    await streams.begun()
    cluster.kill("head")
    assert await streams.ends() == expected
    assert await _Streams([]).ends() == expected, "new ones too"
    assert _health() == 200

    streams = _Streams([])
    await streams.begun()
    stage.kill()  # nothing can start it again just now
    cluster.start("head")
    assert await streams.ends() == expected
    assert await _Streams([]).ends() == expected


def test_streams_continue_without_the_head_node_and_what_dies_in_that_time_comes_back_with_it(
    cluster: KillableHead, tmp_path: Path
) -> None:
    with cluster.connected("one"):
        serve.start(
            http_options=HTTPOptions(host="127.0.0.1", port=PORT),
            logging_config={"log_level": "WARNING"},
        )
        jobs = {"jobs_database": f"sqlite:///{tmp_path}/jobs.sqlite", "jobs_storage": str(tmp_path)}
        serve.run(
            application(EngineConfig.build(None, SETTINGS | jobs)),
            name=APPLICATION,
            route_prefix="/",
        )
        before, stage = sorted(leftovers()), _stage(1)
    asyncio.run(_without_head(cluster, stage))
    with cluster.connected("one"):
        assert (sorted(leftovers()), _health()) == (before, 200)
        assert _stage(1).pid != stage.pid
