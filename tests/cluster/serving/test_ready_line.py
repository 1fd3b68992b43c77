"""The line by which ``tramontane serve`` says that it is ready."""

import json

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.serving.server import ReadyInfo

KEYS = {"served_model_name": "a,b", "replicas": 2, "max_replicas": 3}


def test_the_line_for_people_names_where_to_look() -> None:
    line = ReadyInfo("http://h:1", "h:2", EngineConfig.build(None, KEYS), 2, 6.12).to_line()
    assert line == (
        "ready after 6.1 s: http://h:1/v1 serves a on 2 to 3 pipelines of 2 stages, gRPC at h:2; "
        "http://h:1/ui shows it at work, Ctrl-C stops it"
    )
    single = ReadyInfo("http://h:1", None, EngineConfig.build(None, {}), 1, 0.96).to_line()
    assert single == (
        "ready after 1.0 s: http://h:1/v1 serves demo on 1 pipeline of 1 stage; http://h:1/ui shows it at work, Ctrl-C stops it"
    )


def test_the_line_for_scripts_has_every_address() -> None:
    info = ReadyInfo("http://h:1", "h:2", EngineConfig.build(None, KEYS | {"json": True}), 2, 6.1234)
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
