"""Clients of the gRPC API: ``AsyncClient`` for asyncio, ``Client`` without it.

Every method raises the errors of ``tramontane.proto.errors``: RequestError and its subclasses for
invalid requests, OverloadedError with the time after which to try again, AuthenticationError,
UnknownJobError, DeadlineExceededError, PipelineError if the server failed, and ConnectionLostError
if it cannot be reached. ``timeout_s`` is for the whole call; the server stops working on a call
that is over.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator
from contextlib import aclosing, suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import grpc
import grpc.aio

from tramontane.proto import inference_pb2 as pb
from tramontane.proto.errors import ConnectionLostError
from tramontane.proto.grpc_messages import parse_job, parse_line
from tramontane.proto.inference_pb2_grpc import BatchJobsStub, InferenceStub
from tramontane.proto.jobs import Job, JobOptions, ResultLine
from tramontane.router.client import messages
from tramontane.router.client.messages import (
    Chunk,
    ModelInfo,
    Prompt,
    RetryPolicy,
    Score,
    check_api_key,
    check_target,
)

# Ray Serve's gRPC proxy needs the application's name if there are several
APPLICATION = "tramontane"
CHANNEL_OPTIONS = (("grpc.max_receive_message_length", 64 * 2**20),)

P = ParamSpec("P")
R = TypeVar("R")


class AsyncClient:
    """A client for asyncio; create it inside a running event loop.

    ``target`` is host:port. ``retry_policy`` is for ``watch_job`` and ``results``, which resume
    after a lost connection. Raises ConfigError for a target or a key that cannot be used.
    """

    def __init__(
        self,
        target: str,
        api_key: str | None = None,
        *,
        retry_policy: RetryPolicy | None = None,
        application: str = APPLICATION,
    ) -> None:
        check_target(target)
        check_api_key(api_key)
        self._target, self._channel = target, self._connect(target)
        self._inference, self._batch = InferenceStub(self._channel), BatchJobsStub(self._channel)
        authorization = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._metadata = (("application", application), *authorization)
        self._retry_policy = retry_policy or RetryPolicy()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls that run are cancelled."""
        await self._channel.close(None)

    async def generate(
        self,
        /,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        **parameters: Any,
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the output as it is generated; closing the generator cancels the request.

        ``parameters`` are the fields of ``GenerateRequest``: max_tokens, temperature, n, ...
        """
        request = messages.generate_request(prompt, parameters)
        async with aclosing(
            self._stream(self._inference.Generate, request, timeout_s)
        ) as responses:
            async for response in responses:
                for chunk in messages.parse_chunks(response):
                    yield chunk

    async def score(
        self,
        prompt: Prompt,
        *,
        logprobs: int | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> Score:
        """Return the prompt's log-probabilities, with ``logprobs`` alternatives of each token."""
        request = messages.score_request(prompt, logprobs, model)
        return messages.parse_score(await self._call(self._inference.Score, request, timeout_s))

    async def models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        """Return the served models."""
        return messages.parse_models(
            await self._call(self._inference.Models, pb.ModelsRequest(), timeout_s)
        )

    async def submit_job(
        self,
        source: bytes | os.PathLike[str] | None = None,
        options: JobOptions | None = None,
        *,
        url: str | None = None,
        request_key: str | None = None,
        timeout_s: float | None = None,
    ) -> Job:
        """Submit a batch job: JSONL as bytes, a file's path, or a URL that the server reads. It is
        never repeated automatically.

        After a lost response, submit again with the same ``request_key``, a text that no other job
        uses: it is the same job. With other lines or options the key is refused.
        """
        requests = messages.submit_requests(options or JobOptions(), source, url, request_key)
        return parse_job(await self._call(self._batch.SubmitJob, requests, timeout_s))

    async def get_job(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """Return a batch job."""
        return parse_job(
            await self._call(
                self._batch.GetJob,
                messages.request_message(pb.GetJobRequest, job_id=job_id),
                timeout_s,
            )
        )

    async def list_jobs(
        self, limit: int | None = None, after: str | None = None, *, timeout_s: float | None = None
    ) -> list[Job]:
        """Return the newest batch jobs first, starting behind the job ``after``."""
        response = await self._call(
            self._batch.ListJobs,
            messages.request_message(pb.ListJobsRequest, limit=limit, after=after),
            timeout_s,
        )
        return [parse_job(job) for job in response.jobs]

    async def cancel(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """Cancel a batch job."""
        return parse_job(
            await self._call(
                self._batch.CancelJob,
                messages.request_message(pb.CancelJobRequest, job_id=job_id),
                timeout_s,
            )
        )

    async def watch_job(self, job_id: str) -> AsyncGenerator[Job, None]:
        """Yield the job now and after every change, until it has ended."""
        request = messages.request_message(pb.WatchJobRequest, job_id=job_id)
        while True:
            async with aclosing(
                self._resumed_stream(self._batch.WatchJob, lambda: request)
            ) as responses:
                async for response in responses:
                    yield (job := parse_job(response))
                    if job.state.has_ended:
                        return

    async def results(self, job_id: str, offset: int = 0) -> AsyncGenerator[ResultLine, None]:
        """Yield every result from ``offset`` on, once, until the job has ended."""

        def request() -> pb.StreamResultsRequest:
            return messages.request_message(pb.StreamResultsRequest, job_id=job_id, offset=offset)

        async with aclosing(self._resumed_stream(self._batch.StreamResults, request)) as responses:
            async for response in responses:
                for line in map(parse_line, response.lines):
                    offset = line.offset + 1
                    yield line

    async def _resumed_stream(
        self, method: Callable[..., Any], request: Callable[[], object]
    ) -> AsyncGenerator[Any, None]:
        """Yield the messages of a stream. If the connection is lost, call the method again with a
        new ``request()``.
        """
        heard_at = time.monotonic()
        while True:
            try:
                async with aclosing(self._stream(method, request(), None)) as responses:
                    async for response in responses:
                        heard_at = time.monotonic()
                        yield response
                return
            except ConnectionLostError as error:
                await self._sleep(self._retry_policy.pause(error, time.monotonic() - heard_at))

    async def _call(
        self, method: Callable[..., Any], request: object, timeout_s: float | None
    ) -> Any:
        messages.check_timeout(timeout_s)
        with messages.translate_errors(self._target, timeout_s):
            return await self._result(method(request, timeout=timeout_s, metadata=self._metadata))

    async def _stream(
        self, method: Callable[..., Any], request: object, timeout_s: float | None
    ) -> AsyncGenerator[Any, None]:
        messages.check_timeout(timeout_s)
        call = method(request, timeout=timeout_s, metadata=self._metadata)
        try:
            with messages.translate_errors(self._target, timeout_s):
                async for response in self._responses(call):
                    if response.ByteSize():  # an empty message precedes an error
                        yield response
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise ConnectionLostError("the server broke the call off") from None
        finally:
            call.cancel()

    # The waiting operations, in addition to close. _BlockingClient overrides all five.

    def _connect(self, target: str) -> Any:  # a channel
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _result(self, call: Any) -> Any:
        return await call

    def _responses(self, call: Any) -> AsyncIterator[Any]:
        return aiter(call)


class _BlockingClient(AsyncClient):
    """An AsyncClient over gRPC's blocking API: its methods block where the AsyncClient's coroutines
    are suspended.
    """

    async def close(self) -> None:
        self._channel.close()

    def _connect(self, target: str) -> Any:
        return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)

    async def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def _result(self, call: Any) -> Any:  # the response itself
        return call

    async def _responses(self, call: Any) -> AsyncGenerator[Any, None]:
        for response in call:
            yield response


def _run(coroutine: Coroutine[Any, Any, R]) -> R:
    """Return the result of a coroutine that is never suspended, and so needs no event loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: R = stop.value
        return result
    raise AssertionError("a blocking call was suspended")


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate["Client", P], R]:
    @wraps(method)
    def call(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> R:
        return _run(method(self._client, *args, **kwargs))

    return call


def _blocking_stream(
    method: Callable[Concatenate[AsyncClient, P], AsyncGenerator[R, None]],
) -> Callable[Concatenate["Client", P], Generator[R]]:
    @wraps(method)
    def stream(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> Generator[R]:
        items = method(self._client, *args, **kwargs)
        try:
            with suppress(StopAsyncIteration):
                while True:
                    yield _run(anext(items))
        finally:
            _run(items.aclose())

    return stream


class Client:
    """A client without asyncio, for any number of threads. Arguments and methods are the same as
    ``AsyncClient``'s.
    """

    def __init__(
        self,
        target: str,
        api_key: str | None = None,
        *,
        retry_policy: RetryPolicy | None = None,
        application: str = APPLICATION,
    ) -> None:
        self._client = _BlockingClient(
            target, api_key, retry_policy=retry_policy, application=application
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls that run are cancelled."""
        _run(self._client.close())

    generate = _blocking_stream(AsyncClient.generate)
    score = _blocking(AsyncClient.score)
    models = _blocking(AsyncClient.models)
    submit_job = _blocking(AsyncClient.submit_job)
    get_job = _blocking(AsyncClient.get_job)
    list_jobs = _blocking(AsyncClient.list_jobs)
    cancel = _blocking(AsyncClient.cancel)
    watch_job = _blocking_stream(AsyncClient.watch_job)
    results = _blocking_stream(AsyncClient.results)
