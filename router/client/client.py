"""A client of the gRPC door, as ``Client`` and, for asyncio, as ``AsyncClient``. Needs no Ray and no model.

Every method raises the errors of ``tramontane.proto.errors``: RequestError and its kin for what cannot be done, OverloadedError
with the time after which to come back, AuthenticationError, UnknownJobError, DeadlineExceededError, PipelineError where the
server failed, and
ConnectionLostError where it cannot be reached. ``timeout_s`` is for the whole call; the server stops working for what is over.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing, closing
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from tramontane.proto import inference_pb2 as pb
from tramontane.proto.errors import ConnectionLostError
from tramontane.proto.inference_pb2_grpc import BatchJobsStub, InferenceStub
from tramontane.proto.job_messages import parse_job, parse_line
from tramontane.proto.jobs import Job, JobOptions, ResultLine
from tramontane.router.client import types as answers
from tramontane.router.client.types import APPLICATION, OPTIONS, Chunk, ModelInfo, Prompt, RetryPolicy, Score

R = TypeVar("R")


class Client:
    """``target`` is host:port. ``patience`` is that of ``watch_job`` and ``results`` with a server that is gone."""

    def __init__(
        self, target: str, api_key: str | None = None, *, patience: RetryPolicy | None = None, application: str = APPLICATION
    ) -> None:
        self._channel = grpc.insecure_channel(target, options=OPTIONS)
        self._inference, self._batch = InferenceStub(self._channel), BatchJobsStub(self._channel)
        self._metadata, self._patience = answers.metadata_of(api_key, application), patience or RetryPolicy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(self, prompt: Prompt, *, timeout_s: float | None = None, **parameters: Any) -> Generator[Chunk]:  # noqa: ANN401
        """Parameters are the fields of ``GenerateRequest``: max_tokens, temperature, n, ... Leaving the loop ends the request."""
        request = answers.generate_request(prompt, parameters)
        with closing(self._stream(self._inference.Generate, request, timeout_s)) as responses:
            for response in responses:
                yield from answers.pieces_of(response)

    def score(
        self, prompt: Prompt, *, logprobs: int | None = None, model: str | None = None, timeout_s: float | None = None
    ) -> Score:
        return answers.parse_score(self._call(self._inference.Score, answers.score_request(prompt, logprobs, model), timeout_s))

    def models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        return answers.parse_models(self._call(self._inference.Models, pb.ModelsRequest(), timeout_s))

    def submit_job(
        self,
        source: bytes | os.PathLike[str] | None = None,
        options: JobOptions | None = None,
        *,
        url: str | None = None,
        request_key: str | None = None,
        timeout_s: float | None = None,
    ) -> Job:
        """JSONL, as bytes or a file's path, or a URL that the server reads. Is never repeated by itself.

        Whoever loses the answer may submit again: with the same ``request_key``, a text that is nobody else's, it is the same
        job.
        """
        messages = answers.submit_requests(options or JobOptions(), source, url, request_key)
        return parse_job(self._call(self._batch.SubmitJob, messages, timeout_s))

    def get_job(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        return parse_job(self._call(self._batch.GetJob, pb.GetJobRequest(job_id=job_id), timeout_s))

    def list_jobs(self, limit: int | None = None, after: str | None = None, *, timeout_s: float | None = None) -> list[Job]:
        """The newest first, beginning behind the job ``after``."""
        told = self._call(self._batch.ListJobs, pb.ListJobsRequest(limit=limit, after=after), timeout_s)
        return [parse_job(job) for job in told.jobs]

    def cancel(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        return parse_job(self._call(self._batch.CancelJob, pb.CancelJobRequest(job_id=job_id), timeout_s))

    def watch_job(self, job_id: str) -> Generator[Job]:
        """The job now and whenever it has changed, until it has ended."""
        heard_at, job = time.monotonic(), None
        while job is None or not job.state.has_ended:
            try:
                with closing(self._stream(self._batch.WatchJob, pb.WatchJobRequest(job_id=job_id), None)) as messages:
                    for message in messages:
                        heard_at = time.monotonic()
                        job = parse_job(message)
                        yield job
            except ConnectionLostError as error:
                time.sleep(self._patience.pause(error, time.monotonic() - heard_at))

    def results(self, job_id: str, offset: int = 0) -> Generator[ResultLine]:
        """Every result from ``offset`` on, once, until the job has ended."""
        heard_at = time.monotonic()
        while True:
            try:
                request = pb.StreamResultsRequest(job_id=job_id, offset=offset)
                with closing(self._stream(self._batch.StreamResults, request, None)) as messages:
                    for message in messages:
                        heard_at = time.monotonic()
                        for line in map(parse_line, message.lines):
                            offset = line.offset + 1
                            yield line
                return
            except ConnectionLostError as error:
                time.sleep(self._patience.pause(error, time.monotonic() - heard_at))

    def _call(self, method: Callable[..., R], request: object, timeout_s: float | None) -> R:
        with answers.translate_errors(timeout_s):
            return method(request, timeout=timeout_s, metadata=self._metadata)

    def _stream(self, method: Callable[..., Any], request: object, timeout_s: float | None) -> Generator[Any]:
        call = method(request, timeout=timeout_s, metadata=self._metadata)
        try:
            with answers.translate_errors(timeout_s):
                for response in call:
                    if response.ByteSize():  # one without anything comes before an error
                        yield response
        finally:
            call.cancel()


class AsyncClient:
    """As ``Client``. Made inside a running event loop."""

    def __init__(
        self, target: str, api_key: str | None = None, *, patience: RetryPolicy | None = None, application: str = APPLICATION
    ) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=OPTIONS)
        self._inference, self._batch = InferenceStub(self._channel), BatchJobsStub(self._channel)
        self._metadata, self._patience = answers.metadata_of(api_key, application), patience or RetryPolicy()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close(None)

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout_s: float | None = None,
        **parameters: Any,  # noqa: ANN401
    ) -> AsyncGenerator[Chunk, None]:
        """See ``Client.generate``; closing the generator ends the request."""
        request = answers.generate_request(prompt, parameters)
        async with aclosing(self._stream(self._inference.Generate, request, timeout_s)) as responses:
            async for response in responses:
                for piece in answers.pieces_of(response):
                    yield piece

    async def score(
        self, prompt: Prompt, *, logprobs: int | None = None, model: str | None = None, timeout_s: float | None = None
    ) -> Score:
        request = answers.score_request(prompt, logprobs, model)
        return answers.parse_score(await self._call(self._inference.Score, request, timeout_s))

    async def models(self, *, timeout_s: float | None = None) -> list[ModelInfo]:
        return answers.parse_models(await self._call(self._inference.Models, pb.ModelsRequest(), timeout_s))

    async def submit_job(
        self,
        source: bytes | os.PathLike[str] | None = None,
        options: JobOptions | None = None,
        *,
        url: str | None = None,
        request_key: str | None = None,
        timeout_s: float | None = None,
    ) -> Job:
        messages = answers.submit_requests(options or JobOptions(), source, url, request_key)
        return parse_job(await self._call(self._batch.SubmitJob, messages, timeout_s))

    async def get_job(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        return parse_job(await self._call(self._batch.GetJob, pb.GetJobRequest(job_id=job_id), timeout_s))

    async def list_jobs(self, limit: int | None = None, after: str | None = None, *, timeout_s: float | None = None) -> list[Job]:
        told = await self._call(self._batch.ListJobs, pb.ListJobsRequest(limit=limit, after=after), timeout_s)
        return [parse_job(job) for job in told.jobs]

    async def cancel(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        return parse_job(await self._call(self._batch.CancelJob, pb.CancelJobRequest(job_id=job_id), timeout_s))

    async def watch_job(self, job_id: str) -> AsyncGenerator[Job, None]:
        heard_at, job = time.monotonic(), None
        while job is None or not job.state.has_ended:
            try:
                request = pb.WatchJobRequest(job_id=job_id)
                async with aclosing(self._stream(self._batch.WatchJob, request, None)) as messages:
                    async for message in messages:
                        heard_at = time.monotonic()
                        job = parse_job(message)
                        yield job
            except ConnectionLostError as error:
                await asyncio.sleep(self._patience.pause(error, time.monotonic() - heard_at))

    async def results(self, job_id: str, offset: int = 0) -> AsyncGenerator[ResultLine, None]:
        heard_at = time.monotonic()
        while True:
            try:
                request = pb.StreamResultsRequest(job_id=job_id, offset=offset)
                async with aclosing(self._stream(self._batch.StreamResults, request, None)) as messages:
                    async for message in messages:
                        heard_at = time.monotonic()
                        for line in map(parse_line, message.lines):
                            offset = line.offset + 1
                            yield line
                return
            except ConnectionLostError as error:
                await asyncio.sleep(self._patience.pause(error, time.monotonic() - heard_at))

    async def _call(self, method: Callable[..., Awaitable[R]], request: object, timeout_s: float | None) -> R:
        with answers.translate_errors(timeout_s):
            return await method(request, timeout=timeout_s, metadata=self._metadata)

    async def _stream(self, method: Callable[..., Any], request: object, timeout_s: float | None) -> AsyncGenerator[Any, None]:
        call = method(request, timeout=timeout_s, metadata=self._metadata)
        try:
            with answers.translate_errors(timeout_s):
                async for response in call:
                    if response.ByteSize():  # one without anything comes before an error
                        yield response
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise ConnectionLostError("the server broke the call off") from None
        finally:
            call.cancel()
