"""A new class of error needs nothing but its class: it is answered by its own attributes, or by
those that it inherits, over HTTP and gRPC, between processes and by the command line.
"""

import asyncio
import sys
from typing import NoReturn

import grpc
import httpx
import pytest
import typer
from grpc import StatusCode
from scripted_token_source import MODEL, ScriptedSource, client_for, http_app_for

from tramontane.client import AsyncClient
from tramontane.cluster.cli import main as cli
from tramontane.cluster.console.terminal import print_errors_at_once
from tramontane.proto import wire
from tramontane.proto.errors import (
    DrainingError,
    OverloadedError,
    ParameterError,
    PipelineError,
    PipelineUnavailableError,
    QueueFullError,
    RequestError,
    TramontaneError,
    find_error,
)
from tramontane.proto.grpc_messages import DETAILS, error_from_status, status_for
from tramontane.router.grpc.handlers import add_inference
from tramontane.router.grpc.servicer import GrpcServicer

WHY = "the model has a cold"


class UnwellError(RequestError):
    """Differs from every other class in everything."""

    http_status = 418
    openai_type = "rate_limit_error"
    openai_code = "unwell"
    parameter = "seed"
    retry_after_s = 17
    grpc_code = "ABORTED"
    grpc_reason = "UNWELL"
    wire_name = "unwell"
    exit_code = 3


class QuietError(PipelineUnavailableError):
    """Sets nothing."""


class FullerError(OverloadedError):
    """Has a name of its own, and the constructor of its parent."""

    grpc_reason = "FULLER"
    wire_name = "fuller"


class StrictError(ParameterError):
    """Has a name of its own, and the constructor of its parent."""

    grpc_reason = "STRICT"
    wire_name = "strict"


def over_http(error: TramontaneError, path: str = "/v1/completions") -> httpx.Response:
    async def scenario() -> httpx.Response:
        async with client_for(http_app_for(ScriptedSource(failure=error)).app()) as client:
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            return await client.post(path, json={"prompt": "Hi"} if "compl" in path else body)

    return asyncio.run(scenario())


def test_over_http() -> None:
    response = over_http(UnwellError(WHY))
    assert (response.status_code, response.headers["retry-after"]) == (418, "17")
    expected = {"message": WHY, "type": "rate_limit_error", "param": "seed", "code": "unwell"}
    assert response.json() == {"error": expected, "message": WHY}
    assert over_http(UnwellError(WHY), "/v1/messages").status_code == 418

    quiet = over_http(QuietError(WHY))
    assert (quiet.status_code, quiet.headers["retry-after"]) == (503, "1")
    assert quiet.json()["error"]["code"] == "unavailable"


def test_over_grpc() -> None:
    async def raised_for(error: TramontaneError) -> Exception:
        server = grpc.aio.server()
        add_inference(GrpcServicer(MODEL, ScriptedSource(failure=error)), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with AsyncClient(f"127.0.0.1:{port}") as client:
                with pytest.raises(TramontaneError, match=WHY) as raised:
                    await anext(aiter(client.generate("Hello", max_tokens=9)))
                return raised.value
        finally:
            await server.stop(None)

    assert type(asyncio.run(raised_for(UnwellError(WHY)))) is UnwellError
    assert type(asyncio.run(raised_for(QuietError(WHY)))) is PipelineError
    fuller = asyncio.run(raised_for(FullerError(WHY, 9)))
    assert (type(fuller), vars(fuller)) == (FullerError, {"retry_after_s": 9})
    strict = asyncio.run(raised_for(StrictError(WHY, "top_p")))
    assert (type(strict), vars(strict)) == (StrictError, {"parameter": "top_p"})

    status = status_for(UnwellError(WHY))
    assert (status.code, status.message) == (StatusCode.ABORTED, WHY)
    assert b"RetryInfo" in status.details
    assert b"RetryInfo" not in status_for(RequestError(WHY)).details


def test_between_processes() -> None:
    def there_and_back(error: TramontaneError) -> list[TramontaneError | wire.RequestOutput]:
        refusal, replica = wire.decode_error(wire.encode_error(error, "b"))
        assert (str(refusal), replica) == (WHY, "b")
        return [refusal, wire.decode_outputs(wire.encode_outputs([(5, error)]))[0][1]]

    for error, expected in [
        (UnwellError(WHY), UnwellError),
        (QuietError(WHY), PipelineUnavailableError),
        (FullerError(WHY, 9), FullerError),
        (StrictError(WHY, "top_p"), StrictError),
        (QueueFullError(WHY, 1), QueueFullError),
        (DrainingError(WHY), PipelineError),
    ]:
        assert [type(each) for each in there_and_back(error)] == [expected, expected]
    refusal = there_and_back(FullerError(WHY, 9))[0]
    assert isinstance(refusal, FullerError)
    assert refusal.retry_after_s == 9


@pytest.mark.parametrize(("error", "expected"), [(UnwellError(WHY), 3), (QuietError(WHY), 1)])
def test_by_the_command_line(
    error: TramontaneError,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(**_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(sys, "argv", ["tramontane"])
    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == expected
    assert capsys.readouterr().err == f"error: {WHY}\n"
    with pytest.raises(typer.Exit) as early, print_errors_at_once():
        raise error
    assert early.value.exit_code == expected


def test_an_error_of_a_newer_version_is_that_of_a_failed_pipeline() -> None:
    assert find_error("wire_name", "of tomorrow") is PipelineError
    status = status_for(UnwellError(WHY))
    details = status.details.replace(b"UNWELL", b"FUTURE")
    assert type(error_from_status(status.code, WHY, [(DETAILS, details)])) is PipelineError


def test_no_two_classes_have_the_same_name() -> None:
    def below(cls: type[TramontaneError]) -> list[type[TramontaneError]]:
        return [each for child in cls.__subclasses__() for each in (child, *below(child))]

    assert UnwellError in below(TramontaneError)
    for attribute in ("grpc_reason", "wire_name"):
        names = [vars(cls)[attribute] for cls in below(TramontaneError) if attribute in vars(cls)]
        assert len(set(names)) == len(names), names
    for cls in below(TramontaneError):
        assert cls.grpc_code in StatusCode.__members__
        assert 400 <= cls.http_status < 600
