"""The line by which ``tramontane serve`` says that it is ready."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.serving import server
from tramontane.cluster.serving.server import ReadyInfo

KEYS = {"served_model_name": "a,b", "replicas": 2, "max_replicas": 3}


def test_the_line_for_people_names_where_to_look() -> None:
    line = ReadyInfo("http://h:1", "h:2", EngineConfig.build(None, KEYS), 2, 6.12).to_line()
    assert (
        line == "ready after 6.1 s: http://h:1/v1 serves a on 2 to 3 pipelines of 2 stages, gRPC at"
        " h:2; "
        "http://h:1/ui shows it at work, Ctrl-C stops it"
    )
    single = ReadyInfo("http://h:1", None, EngineConfig.build(None, {}), 1, 0.96).to_line()
    assert (
        single
        == "ready after 1.0 s: http://h:1/v1 serves demo on 1 pipeline of 1 stage; http://h:1/ui"
        " shows it at work, Ctrl-C stops it"
    )


@pytest.mark.parametrize(
    ("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("10.0.0.1", "10.0.0.1")]
)
def test_the_address_is_one_that_can_be_opened(
    host: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing connects to 0.0.0.0, to which a server is bound that listens on all interfaces."""
    lines: list[str] = []
    fake: dict[str, object] = {
        name: lambda *_: None for name in ("assert_supported", "check_job_storage", "stop")
    }
    fake |= {
        "_wait_until_healthy": lines.append,
        "actor_names": lambda _: ["stage"],
        "is_ha_proxy_enabled": lambda: False,
    }
    fake |= {
        "_own_cluster": lambda *_: nullcontext((True, "")),
        "report_losses": lambda *_: nullcontext(),
    }
    fake["SignalCounter"] = lambda: nullcontext(SimpleNamespace(wait_next=lambda: None))
    for name, value in fake.items():
        monkeypatch.setattr(server, name, value)
    config = EngineConfig.build(None, {"host": host, "port": 8001, "grpc_port": 9001})
    server.run_server(
        config, lambda _: None, lambda _: None, lambda ready: lines.append(ready.to_line())
    )
    where = f", on all interfaces ({host})" if host != shown else ""
    assert lines[0] == f"http://{shown}:8001"
    assert (
        f" http://{shown}:8001/v1 serves demo on 1 pipeline of 1 stage, gRPC at"
        f" {shown}:9001{where}; http://{shown}:8001/ui" in lines[1]
    )


def test_the_line_for_scripts_has_every_address() -> None:
    info = ReadyInfo(
        "http://h:1", "h:2", EngineConfig.build(None, KEYS | {"json": True}), 2, 6.1234
    )
    assert json.loads(info.to_line()) == {
        "url": "http://h:1",
        "base_url": "http://h:1/v1",
        "grpc": "h:2",
        "model": "a",
        "ui": "http://h:1/ui",
        "replicas": 2,
        "max_replicas": 3,
        "stages": 2,
        "ready_after_s": 6.123,
    }
