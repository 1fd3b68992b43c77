"""Lines of the log: their form, and that those about a request name it, wherever it is."""

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from harness import GREEDY
from ray._common.formatters import JSONFormatter
from ray.serve._private.constants import SERVE_LOGGER_NAME
from running_router import new_scheduler, running
from scripted_chain import ScriptedChain
from stage_driver import SAMPLING
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from tiny_models import random_model, split_model, tiny_args, tiny_plan

from tramontane.cluster.actors.worker_actor import log_failures
from tramontane.cluster.config.api_keys import ApiKeys
from tramontane.cluster.config.logging import CONTAINER_LOG, LogSettings
from tramontane.cluster.http.request_middleware import AuthMiddleware
from tramontane.cluster.observability.logging import use_serve_log
from tramontane.cluster.serving.token_stream import TokenStreams, model_key
from tramontane.proto import wire
from tramontane.proto.errors import PipelineError
from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.proto.request import Request as TokenRequest
from tramontane.proto.request import (
    SamplingParams,
    format_request_ids,
    request_fields,
    requests_fields,
)
from tramontane.proto.step import Chunk, DecodeColumns, MicroBatch
from tramontane.router.engine.router import Router

logger = logging.getLogger("tramontane.cluster.test")
CACHE = CachePlan(16, (WindowClass(64, 5, 40),))


def test_ids_are_named_once_and_not_without_end() -> None:
    ids = ["a", "", "b", "a", "c"]
    assert requests_fields(ids) == {"request_ids": ["a", "b", "c"]}
    assert (
        format_request_ids(ids),
        format_request_ids(ids, max_shown=2),
        format_request_ids([""]),
    ) == (
        "a, b, c",
        "a, b and 1 more",
        "",
    )
    assert requests_fields(["", ""]) == request_fields("") == {}
    assert request_fields("a", status=200) == {"request_id": "a", "status": 200}


def test_a_line_of_json_has_all_that_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    LogSettings("json", "info").to_stderr("stage", pipeline="app-0", stage=3)
    logger.debug("not said")
    logger.info("step %d\nfailed", 7, extra=requests_fields(["a", "b"]))
    (line,) = capsys.readouterr().err.splitlines()
    said = json.loads(line)
    assert said["levelname"] == "INFO"
    assert said["message"] == "step 7\nfailed"
    assert (said["component"], said["pipeline"], said["stage"]) == ("stage", "app-0", 3)
    assert said["request_ids"] == ["a", "b"]
    assert said["name"] == logger.name
    assert said["created"] > 1.7e9


def test_a_containers_output_gets_every_line_as_json_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONTAINER_LOG, str(tmp_path / "output"))
    LogSettings().to_stderr("stage", pipeline="app-0", stage=3)
    try:
        raise KeyError("layers.7")
    except KeyError:
        logger.exception("stage 4/4 cannot load", extra=request_fields("mine"))
    assert "cannot load" in capsys.readouterr().err
    monkeypatch.delenv(CONTAINER_LOG)
    LogSettings().to_stderr("stage")  # closes the file
    logger.warning("only for standard error")
    (line,) = (tmp_path / "output").read_text(encoding="utf-8").splitlines()
    said = json.loads(line)
    assert (said["component"], said["pipeline"], said["stage"]) == ("stage", "app-0", 3)
    assert (said["message"], said["request_id"]) == ("stage 4/4 cannot load", "mine")
    assert "KeyError: 'layers.7'" in said["exc_text"]


def test_a_containers_output_leaves_out_what_the_log_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONTAINER_LOG, str(tmp_path / "output"))
    handler = logging.StreamHandler()
    handler.addFilter(lambda record: "noise" not in record.getMessage())
    LogSettings().install(handler)
    logger.warning("noise")
    logger.warning("a word")
    monkeypatch.delenv(CONTAINER_LOG)
    LogSettings().to_stderr("stage")  # closes the file
    (line,) = (tmp_path / "output").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["message"] == "a word"


def test_a_containers_output_that_cannot_be_written_to_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CONTAINER_LOG, str(tmp_path))
    LogSettings().to_stderr("stage")
    logger.warning("and the rest is said")
    first, second = capsys.readouterr().err.splitlines()
    assert f"{CONTAINER_LOG}: {tmp_path} cannot be written to: Is a directory" in first
    assert "and the rest is said" in second


def test_a_line_of_text_says_who_and_when(capsys: pytest.CaptureFixture[str]) -> None:
    LogSettings().to_stderr("supervisor", pipeline="app-0")
    logger.info("not said")
    logger.warning("request mine failed", extra=request_fields("mine"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING 20")
    assert line.endswith(" supervisor -- request mine failed")


def test_warnings_of_ray_serve_in_a_command_have_its_format(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ray_serve = logging.getLogger("ray.serve")
    monkeypatch.setattr(ray_serve, "handlers", [logging.StreamHandler()])
    monkeypatch.setattr(ray_serve, "level", logging.INFO)
    LogSettings("json").to_stderr_with_serve("command")
    ray_serve.info("deploying")
    ray_serve.warning("failed to get the length of a queue")
    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert (entry["component"], entry["message"]) == (
        "command",
        "failed to get the length of a queue",
    )


class _Kept(logging.Handler):
    """A handler of Ray Serve's."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JSONFormatter())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def serves_handler() -> Iterator[_Kept]:
    serves, kept = logging.getLogger(SERVE_LOGGER_NAME), _Kept()
    yield kept
    serves.removeHandler(kept)


def test_in_a_replica_lines_go_to_whatever_handlers_ray_serve_has_then(
    serves_handler: _Kept,
) -> None:
    use_serve_log(LogSettings(), "ingress")
    use_serve_log(LogSettings(), "router", pipeline="app-0")  # which replaces the first
    logging.getLogger(SERVE_LOGGER_NAME).addHandler(serves_handler)
    logger.warning("request mine failed", extra=request_fields("mine"))
    logger.info("not said")
    (line,) = serves_handler.lines
    said = json.loads(line)
    assert (said["message"], said["component"], said["pipeline"]) == (
        "request mine failed",
        "router",
        "app-0",
    )
    assert said["request_id"] == "mine"


async def _requested(*ids: str) -> list[int]:
    """Send requests to an application that has one path next to /health."""

    async def answer(_request: Request) -> PlainTextResponse:
        return PlainTextResponse("secret words")

    routes = [Route("/health", answer), Route("/here", answer)]
    app = AuthMiddleware(Starlette(routes=routes), ApiKeys(), sends_id=True)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://ingress"
    ) as client:
        paths = ["/here", "/nowhere", "/health"]
        return [
            (await client.get(path, headers={"x-request-id": own})).status_code
            for own, path in zip(ids, paths, strict=True)
        ]


def test_an_ingress_logs_its_answers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tramontane"):
        assert asyncio.run(_requested("first", "second", "third")) == [200, 404, 200]
    reported = [
        (vars(r)["request_id"], vars(r)["path"], vars(r)["status"])
        for r in caplog.records
        if "status" in vars(r)
    ]
    assert reported == [("first", "/here", 200), ("second", "/nowhere", 404)], (
        "health checks are frequent"
    )
    assert "secret" not in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tramontane"):
        asyncio.run(_requested("first", "second", "third"))
    assert not caplog.records


def _request(prompt_ids: tuple[int, ...], request_id: str) -> TokenRequest:
    return replace(TokenRequest.of(prompt_ids, SamplingParams(max_tokens=3)), request_id=request_id)


async def _through_a_router(num_failures: int, *requests: TokenRequest) -> list[bytes]:
    """What the router says at the end of each request: one after the other."""
    failures = [PipelineError("stage 1 died")] * num_failures

    async def gate(_batch: MicroBatch) -> None:
        if failures:
            raise failures.pop()

    channels = TokenStreams("replica")
    async with running(Router(new_scheduler(CACHE), ScriptedChain(gate))) as router:
        reading = asyncio.create_task(_read(channels))
        while not (router.is_attached and channels.num_open):
            await asyncio.sleep(0)
        said = [
            await channels.generate(
                router, "/ingress", i, wire.encode_request(request), model_key("")
            )
            for i, request in enumerate(requests)
        ]
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    return said


async def _read(channels: TokenStreams) -> None:
    async for _ in channels.subscribe("/ingress", "replica"):
        pass


def test_a_router_says_what_becomes_of_a_request(caplog: pytest.LogCaptureFixture) -> None:
    good = _request((991, 992), "good")
    too_long = _request((993,) * 300, "long")
    with caplog.at_level(logging.INFO, "tramontane"):
        asyncio.run(_through_a_router(0, good, too_long))
    lines = [(vars(record).get("request_id"), record.getMessage()) for record in caplog.records]
    about_good = [message for own_id, message in lines if own_id == "good"]
    assert [message.partition(":")[0] for message in about_good] == [
        "request good is accepted",
        "request good has ended",
    ]
    assert [message.partition(":")[0] for own_id, message in lines if own_id == "long"] == [
        "request long is refused"
    ]
    assert "991" not in caplog.text, "no tokens"


def test_a_request_that_ends_with_an_error_is_not_complete(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "tramontane"):
        asyncio.run(_through_a_router(3, _request((1,), "poison")))
    (end,) = [vars(record) for record in caplog.records if "is_complete" in vars(record)]
    assert (end["request_id"], end["is_complete"]) == ("poison", False)


def test_a_failure_of_the_pipeline_names_whom_it_keeps_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asyncio.run(_through_a_router(1, _request((1,), "waiting")))
    (failure,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "stage 1 died" in failure.getMessage()
    assert vars(failure)["request_ids"] == ["waiting"]


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [(PipelineError("a neighbor is lost"), False), (ValueError("odd"), True)],
)
def test_a_stage_names_the_requests_of_a_step_that_fails(
    caplog: pytest.LogCaptureFixture, error: Exception, has_traceback: bool
) -> None:
    args = tiny_args(n_layers=1)
    worker = split_model(random_model(args), tiny_plan(args, 1, max_num_seqs=2))[0]
    worker.fence(0)
    worker.step(MicroBatch(0, 0, (Chunk(7, 0, (1, 2), ((0,),), GREEDY, True, 2, "known"),)), None)
    failing = MicroBatch(
        0,
        1,
        (Chunk(8, 0, (1, 2), ((1,),), SAMPLING, True, 2, "new"),),
        decodes=DecodeColumns((7,), (2,), (3,)),
    )
    with pytest.raises(type(error)), log_failures(worker, failing):
        raise error
    (record,) = caplog.records
    assert vars(record)["request_ids"] == ["new", "known"]
    assert record.getMessage() == f"step 1 failed, of requests new, known: {error}"
    assert bool(record.exc_info) is has_traceback
    worker.table.update(MicroBatch(0, 1, (), freed_seq_ids=(7,)))
    assert worker.request_ids_of(failing) == ["new"], "requests that have ended are forgotten"
