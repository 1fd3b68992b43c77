"""The Ingress replica is killed while clients are connected through Ray Serve's proxy: they see a
pause.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serve_cluster import (
    GRPC,
    URL,
    events,
    ingress_stats,
    router_stats,
    running_application,
    wait_until_idle,
    wait_until_ready,
)

from tramontane.client import Client
from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster
from tramontane.proto.errors import ConnectionLostError

pytestmark = [
    pytest.mark.ray,
    pytest.mark.serve,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "stages": 2,
    "max_num_seqs": 32,
    "threads_per_stage": 1,
    "stream_writes_per_s": 200,
}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"max_tokens": 150, "ignore_eos": True, "seed": 3, "return_token_ids": True}
HELLO = {"messages": [{"role": "user", "content": "What news from Rome?"}]}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "ROMEO:", **LONG, **STREAMED}),
    (
        COMPLETIONS,
        {"prompt": "KING:", "n": 2, "stop": ["never said"], "logprobs": 1, **LONG, **STREAMED},
    ),
    (
        COMPLETIONS,
        {"prompt": ["What news?", "O"], "echo": True, "return_experts": [1], **LONG, **STREAMED},
    ),
    (CHAT, HELLO | LONG | STREAMED),
    (COMPLETIONS, {"prompt": "JULIET:", **LONG}),
    (CHAT, HELLO | LONG | {"n": 2}),
]


@pytest.fixture(scope="module", autouse=True)
def _app() -> Iterator[None]:
    with local_ray_cluster(num_cpus=4), running_application(**SETTINGS):
        yield


async def _answers(kill: bool) -> list[Any]:
    """All requests at once; the ingress dies when every stream has sent something."""
    received = [asyncio.Event() for _, body in REQUESTS if "stream" in body]

    async def one(client: httpx.AsyncClient, number: int, path: str, body: dict[str, Any]) -> Any:
        if "stream" not in body:
            return _lasting((await client.post(path, json=body)).raise_for_status().json())
        text = ""
        async with client.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            async for part in response.aiter_text():
                text += part
                if text.count("data: ") > 10:
                    received[number].set()
        return _joined(events(text))

    async with httpx.AsyncClient(base_url=URL, timeout=120) as client:
        request_tasks = [
            asyncio.create_task(one(client, number, *request))
            for number, request in enumerate(REQUESTS)
        ]
        if kill:
            for each in received:
                await each.wait()
            os.kill((await asyncio.to_thread(ingress_stats))["pid"], signal.SIGKILL)
        return list(await asyncio.gather(*request_tasks))


def _joined(reported: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream's events put together, however they were cut; one name and one age for all of
    them.
    """
    assert len({(event["id"], event["created"], event["object"]) for event in reported}) == 1
    whole: dict[str, Any] = {"usage": _counted(reported[-1]["usage"]), "choices": {}}
    for event in reported:
        for choice in event["choices"]:
            _add(whole["choices"].setdefault(choice["index"], {}), choice)
    return whole


def _add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if isinstance(value, dict):
            _add(whole.setdefault(name, {}), value)
        elif name in ("token_logprobs", "top_logprobs"):
            whole[name] = whole.get(name, 0) + len(
                value
            )  # the last digits may differ: what is computed again is computed together
        elif isinstance(value, str | list):
            whole[name] = whole[name] + value if name in whole else value


def _lasting(answer: dict[str, Any]) -> dict[str, Any]:
    return {
        "object": answer["object"],
        "choices": answer["choices"],
        "usage": _counted(answer["usage"]),
    }


def _counted(usage: dict[str, Any]) -> dict[str, Any]:
    """The usage without what was cached: of equal prompts that is so of the later one, and of all
    when they come again.
    """
    return {name: number for name, number in usage.items() if name != "prompt_tokens_details"}


def test_a_killed_ingress_costs_no_client_anything() -> None:
    undisturbed = asyncio.run(_answers(kill=False))
    wait_until_idle()
    before = ingress_stats()["pid"]
    assert asyncio.run(_answers(kill=True)) == undisturbed
    assert ingress_stats()["pid"] != before
    wait_until_idle()


def test_a_killed_ingress_leaves_no_sequence_running_when_its_client_leaves_too() -> None:
    with httpx.stream(
        "POST",
        f"{URL}/v1/completions",
        json={"prompt": "O", "max_tokens": 2000, "stream": True, "ignore_eos": True},
        timeout=60,
    ) as response:
        next(response.iter_bytes())
        steps = router_stats()[0]["steps"]
        os.kill(ingress_stats()["pid"], signal.SIGKILL)
    while router_stats()[0]["sequences"]:
        time.sleep(0.05)
    assert router_stats()[0]["steps"] - steps < 1500, "it did not run to its end"
    wait_until_ready()
    wait_until_idle()


def test_over_grpc_the_client_gets_an_error_when_its_ingress_is_lost() -> None:
    wait_until_ready()
    with Client(GRPC) as client:
        pieces = client.generate("O", max_tokens=500, ignore_eos=True)
        next(pieces)
        os.kill(ingress_stats()["pid"], signal.SIGKILL)
        with pytest.raises(ConnectionLostError):
            list(pieces)
    wait_until_ready()
    wait_until_idle()
