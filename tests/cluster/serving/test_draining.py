"""A server that is to stop: what runs ends well, what is new is refused, and a second signal waits
for nothing.
"""

import asyncio
import os
import signal
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from event_loops import in_event_loop
from ray import serve
from scripted_chain import no_gate
from scripted_token_source import MODEL, ScriptedSource, client_for, http_app_for
from simulated_routers import Handle, Replica, harness, request_tokens, stuck

from tramontane.cluster.cli.main import app
from tramontane.cluster.common import ray_api
from tramontane.cluster.common.signals import SIGNALS, SignalCounter
from tramontane.cluster.http.app import HttpApp, HttpAppConfig
from tramontane.cluster.http.sse import Pacer
from tramontane.cluster.pipeline import ray_cluster
from tramontane.cluster.serving import draining
from tramontane.cluster.serving.app import APPLICATION
from tramontane.cluster.serving.pipeline_client import PipelineClient
from tramontane.proto.errors import DrainingError, PipelineError


@in_event_loop
async def test_what_runs_ends_well_and_what_is_new_is_refused() -> None:
    release = asyncio.Event()

    async def gate(_batch: object) -> None:
        await release.wait()

    replica = Replica("a", gate)
    async with harness([replica], running="a") as routers:
        running = asyncio.create_task(request_tokens(routers))
        while not replica.router.num_requests:
            await asyncio.sleep(0)
        assert routers.drain() == 1
        with pytest.raises(DrainingError):
            routers.check_capacity(1)
        with pytest.raises(DrainingError):
            await request_tokens(routers)
        release.set()
        assert await running == 5
        assert routers.drain() == 0
        assert replica.call_counts["generate"] == 2, (
            "the one that runs: without a stream, and with it"
        )


@in_event_loop
async def test_a_server_that_is_no_longer_to_stop_accepts_requests() -> None:
    async with harness([Replica("a")], running="a") as routers:
        routers.drain()
        routers.resume()
        routers.check_capacity(1)
        assert (await routers.health()).status == "ready"
        assert await request_tokens(routers) == 5


@in_event_loop
async def test_what_does_not_end_in_time_ends_with_the_reason_and_frees_its_slot() -> None:
    replica = Replica("a", stuck)
    async with harness([replica], running="a") as routers:
        running = asyncio.create_task(request_tokens(routers))
        while not replica.router.num_requests:
            await asyncio.sleep(0)
        routers.drain()
        routers.end_all()
        with pytest.raises(DrainingError, match="has stopped before this request ended"):
            await running
        while replica.router.num_requests:
            await asyncio.sleep(0)
        assert routers.drain() == 0


@pytest.mark.parametrize(
    ("left", "words"),
    [(1, "1 request still runs after 4 s"), (2, "2 requests still run after 4 s")],
)
def test_the_command_counts_what_is_left(
    left: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "join_ray_cluster", lambda *_, **__: nullcontext())
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=[APPLICATION]))
    monkeypatch.setattr(draining, "drain", lambda *_: left)
    with pytest.raises(PipelineError, match=words):
        app(["drain", "--address", "auto", "--drain-timeout", "4"], standalone_mode=False)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/health"])
def test_a_draining_server_says_so(path: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        handle: Any = Handle([Replica("a", no_gate)])
        routers = PipelineClient(handle, max_unaccepted=10)
        routers.drain()
        config = HttpAppConfig(
            model=MODEL,
            source=routers,
            health=routers.health,
            expert_load=routers.queries.expert_load,
            max_body_bytes=2**16,
            pacer=Pacer(10**9),
        )
        server = HttpApp(config)
        async with client_for(server.app()) as client:
            body = (
                {"messages": [{"role": "user", "content": "x"}]}
                if "chat" in path
                else {"prompt": "x"}
            )
            response = await (
                client.get(path) if path == "/health" else client.post(path, json=body)
            )
            assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
            assert int(response.headers["retry-after"]) > 0
        routers.close()

    asyncio.run(scenario())
    assert not caplog.records, "repeated requests do not fill the log"


@pytest.mark.parametrize("fails_at", [0, 2])
@in_event_loop
async def test_a_stream_that_is_ended_gets_the_reason(fails_at: int) -> None:
    source = ScriptedSource(failure=DrainingError("the server has stopped"), fails_at=fails_at)
    async with client_for(http_app_for(source).app()) as client:
        response = await client.post("/v1/completions", json={"prompt": "ROMEO:", "stream": True})
        assert response.status_code == (200 if fails_at else 503)
        assert "the server has stopped" in response.text
        assert '"code":"draining"' in response.text.replace(" ", "")


@pytest.fixture
def ingress(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls to ingress replicas; they have three requests, then two, then none."""
    calls: list[str] = []
    left = iter(
        [
            [3],
            [2],
            [RuntimeError("it is just being started"), 2],
            [RuntimeError("it does not answer"), 0],
            [0, 0],
        ]
    )

    def each(method: str) -> list[Any]:
        calls.append(method)
        return next(left) if method == "drain" else []

    monkeypatch.setattr(draining, "_broadcast", each)
    monkeypatch.setattr(
        draining, "mark_drained", lambda application: calls.append(f"noted {application}")
    )
    return calls


def test_requests_have_half_a_minute_where_nothing_else_is_configured() -> None:
    assert [draining.drain_time_s(configured) for configured in (None, 0.0, 7.0)] == [30, 0, 7]


def test_draining_ends_with_the_last_request(ingress: list[str]) -> None:
    said: list[str] = []
    draining.stop(3600, said.append, lambda _: False)
    assert ingress == ["noted tramontane", *["drain"] * 5], (
        "one that does not answer may have a request"
    )
    assert said == [
        f"finishing {left}, for 3600 s at most"
        for left in ("3 requests", "2 requests", "1 request")
    ]


@pytest.mark.parametrize("is_signalled", [False, True])
def test_a_limit_and_a_second_signal_end_what_runs(ingress: list[str], is_signalled: bool) -> None:
    draining.stop(
        *(
            (3600, lambda _: None, lambda _: True)
            if is_signalled
            else (0, lambda _: None, lambda _: False)
        )
    )
    # the first of the five answers is that of draining
    ended_until_none_has_one = ["end_all", "drain"] * 4
    assert ingress == ["noted tramontane", "drain", *ended_until_none_has_one]


def test_requests_that_cannot_be_ended_do_not_keep_the_server(
    ingress: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "END_TIMEOUT_S", 0.0)
    draining.stop(0, lambda _: None, lambda _: False)
    assert ingress == ["noted tramontane", "drain", "end_all", "drain"]


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_are_counted(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with SignalCounter() as signals:
        os.kill(os.getpid(), number)
        assert signals.wait_next()
        assert not signals.wait_next(0.0)
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert signals.wait_next(3600)
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_a_drained_deployment_stays_so_and_a_later_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also for an ingress that starts again when nothing drains it any more."""
    kept: dict[str, bytes] = {}
    monkeypatch.setattr(ray_api, "kv_put", kept.__setitem__)
    monkeypatch.setattr(ray_api, "kv_get", kept.get)
    monkeypatch.setattr(ray_api, "kv_delete", kept.pop)
    assert not ray_api.is_drained("app", 7)
    ray_api.mark_drained("app")
    assert not ray_api.is_drained("app", 7), "of no deployment that is known"
    kept["tramontane-deployment-app"] = b"7"
    ray_api.mark_drained("app")
    kept["tramontane-deployment-app"] = b"8"
    assert [ray_api.is_drained("app", at) for at in (6, 7, 8)] == [True, True, False]
    assert not ray_api.is_drained("another", 7)
    ray_api.clear_drained("app")
    assert not ray_api.is_drained("app", 7)
