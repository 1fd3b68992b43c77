"""The implementation of the gRPC services, independent of server and network: messages in, messages out."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol, TypeVar

from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionResponse

from tramontane.proto import inference_pb2 as pb
from tramontane.proto.errors import AuthenticationError, RequestError, UnimplementedError
from tramontane.proto.grpc_status import status_for
from tramontane.proto.job_messages import job_message, line_message
from tramontane.proto.jobs import JobService
from tramontane.proto.log_fields import request_fields
from tramontane.proto.ports import TokenSource
from tramontane.router.grpc.coalesce import aclosing_if_generator, coalesce
from tramontane.router.grpc.handlers import MalformedMessage, reflection_responses
from tramontane.router.grpc.job_requests import parse_limit, submit, validate_offset
from tramontane.router.grpc.messages import (
    parse_generate,
    parse_score,
    to_generate_response,
    to_models_response,
    to_score_response,
)
from tramontane.router.openai.completion import Completion
from tramontane.router.openai.request_context import RequestTokenSource
from tramontane.router.openai.served_model import ServedModel, check_model_name

logger = logging.getLogger(__name__)

RESULT_BYTES = 2**20  # of one message, unless a single result is larger
MAX_MESSAGE_BYTES = 8 * 2**20

R = TypeVar("R")


class Authenticator(Protocol):
    """Checks API keys."""

    def authenticate(self, authorization: str | None) -> int | None:
        """Return the number of the API key; None unless ``authorization`` is ``Bearer`` and a known key."""
        ...


class WritePacer(Protocol):
    """Limits how often streams write: see ``Pacer`` in ``cluster/http/sse.py``."""

    num_streams: int

    async def wait_turn(self, last_write: float) -> None:
        """Wait until a stream that wrote at ``last_write`` may write again."""
        ...


class NoPacing:
    """A pacer without limits."""

    num_streams = 0

    async def wait_turn(self, last_write: float) -> None:
        """Return at once."""


class GrpcServicer:
    """Implements the methods of both services, by their names in ``inference.proto``, and reflection.

    Their second argument is gRPC's context, or Ray Serve's substitute, which Ray Serve passes by that name. Closing a stream
    or cancelling a call ends its work. ``allow_peer`` gets a peer as gRPC names it, such as ``ipv4:10.0.0.7:50123``.
    ``id_of`` returns the request id of a call from its context, for the log.
    """

    def __init__(
        self,
        model: ServedModel,
        source: TokenSource,
        jobs: JobService | None = None,
        keys: Authenticator | None = None,
        allow_peer: Callable[[str], bool] = lambda _: True,
        pace: WritePacer | None = None,
        max_message: int = MAX_MESSAGE_BYTES,
        id_of: Callable[[Any], str] = lambda _: "",
    ) -> None:
        self._model, self._source, self._stored_jobs = model, source, jobs
        self._keys, self._allow_peer, self._pace, self._max_message = keys, allow_peer, pace or NoPacing(), max_message
        self._id_of = id_of

    # ---- Inference

    async def Generate(self, request: Any, grpc_context: Any) -> AsyncGenerator[pb.GenerateResponse, None]:  # noqa: ANN401
        """Stream the continuation of a prompt."""
        generate = partial(self._generate, grpc_context)
        async with aclosing(self._stream(generate, request, grpc_context, pb.GenerateResponse())) as responses:
            async for response in responses:
                yield response

    async def Score(self, request: Any, grpc_context: Any) -> pb.ScoreResponse:  # noqa: ANN401
        """Return the log-probabilities of a prompt."""
        return await self._respond(partial(self._score, grpc_context), request, grpc_context, pb.ScoreResponse())

    async def Models(self, request: Any, grpc_context: Any) -> pb.ModelsResponse:  # noqa: ANN401
        """Return the served models."""
        return await self._respond(self._models, request, grpc_context, pb.ModelsResponse())

    # ---- BatchJobs

    async def SubmitJob(self, requests: Any, grpc_context: Any) -> pb.Job:  # noqa: ANN401
        """Submit a batch job."""
        return await self._respond(self._submit_job, requests, grpc_context, pb.Job())

    async def GetJob(self, request: Any, grpc_context: Any) -> pb.Job:  # noqa: ANN401
        """Return a batch job."""
        return await self._respond(self._get_job, request, grpc_context, pb.Job())

    async def ListJobs(self, request: Any, grpc_context: Any) -> pb.ListJobsResponse:  # noqa: ANN401
        """Return the newest batch jobs."""
        return await self._respond(self._list_jobs, request, grpc_context, pb.ListJobsResponse())

    async def WatchJob(self, request: Any, grpc_context: Any) -> AsyncGenerator[pb.Job, None]:  # noqa: ANN401
        """Stream a batch job after every change, until it has ended."""
        async with aclosing(self._stream(self._watch_job, request, grpc_context, pb.Job())) as responses:
            async for response in responses:
                yield response

    async def StreamResults(self, request: Any, grpc_context: Any) -> AsyncGenerator[pb.StreamResultsResponse, None]:  # noqa: ANN401
        """Stream the results of a batch job, until it has ended."""
        async with aclosing(self._stream(self._results, request, grpc_context, pb.StreamResultsResponse())) as responses:
            async for response in responses:
                yield response

    async def CancelJob(self, request: Any, grpc_context: Any) -> pb.Job:  # noqa: ANN401
        """Cancel a batch job."""
        return await self._respond(self._cancel_job, request, grpc_context, pb.Job())

    # ---- reflection

    async def ServerReflectionInfo(self, requests: Any, grpc_context: Any) -> AsyncGenerator[Any, None]:  # noqa: ANN401
        """Answer reflection requests."""
        async with aclosing(self._stream(reflection_responses, requests, grpc_context, ServerReflectionResponse())) as responses:
            async for response in responses:
                yield response

    # ---- common to all methods

    async def _respond(self, method: Callable[[Any], Awaitable[R]], request: Any, context: Any, empty: R) -> R:  # noqa: ANN401
        """Return the response of ``method``; with an error ``empty``, which no client sees."""
        try:
            self._check(request, context)
            return await method(request)
        except Exception as error:
            status_for(error, self._id_of(context)).apply(context)
            return empty

    async def _stream(
        self,
        method: Callable[[Any], AsyncGenerator[R, None]],
        request: Any,  # noqa: ANN401
        context: Any,  # noqa: ANN401
        empty: R,
    ) -> AsyncGenerator[R, None]:
        """Yield the responses of ``method``; before an error ``empty``: Ray Serve sends a status only with a message."""
        try:
            self._check(request, context)
            async with aclosing(method(request)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            status_for(error, self._id_of(context)).apply(context)
            yield empty

    def _check(self, request: Any, context: Any) -> None:  # noqa: ANN401
        if logger.isEnabledFor(logging.INFO):
            own_id, kind = self._id_of(context), type(request).__name__
            logger.info("request %s came over gRPC: %s", own_id or "-", kind, extra=request_fields(own_id, kind=kind))
        if not self._allow_peer(context.peer()):
            raise AuthenticationError("this server accepts only clients on its own machine; its --host says so")
        if self._owner(context) is None:
            raise AuthenticationError(
                "the API key is missing or wrong; give api_key=... to our client, or metadata, authorization: Bearer KEY"
            )
        if isinstance(request, MalformedMessage):
            raise RequestError(request.message)
        size = request.ByteSize() if hasattr(request, "ByteSize") else 0  # a stream of messages has none
        if size > self._max_message:
            raise RequestError(f"the message has {size} bytes; it may have at most {self._max_message}")

    def _owner(self, context: Any) -> int | None:  # noqa: ANN401
        """Return the number of the call's API key, 0 without authentication, None for a missing or unknown key."""
        given = next((value for name, value in context.invocation_metadata() if name == "authorization"), None)
        return 0 if self._keys is None else self._keys.authenticate(given)

    # ---- implementations; all may raise TramontaneError

    async def _generate(self, context: Any, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse, None]:  # noqa: ANN401
        arrived_at = time.monotonic()
        parsed = parse_generate(request)
        check_model_name(self._model, parsed.model)
        source = RequestTokenSource(self._source, self._owner(context) or 0, request_id=self._id_of(context))
        source.check_capacity(parsed.num_sequences)
        completion = await Completion.prepare(self._model, parsed, arrived_at)
        clock = asyncio.get_running_loop().time
        self._pace.num_streams += 1
        try:
            async with aclosing(completion.stream(source)) as stream:
                async for changes in stream:
                    response = to_generate_response(changes)
                    if completion.is_finished:
                        response.usage.MergeFrom(pb.Usage(**completion.usage.as_json()))
                        response.timings.MergeFrom(pb.Timings(**completion.timings.as_json()))
                    yield response
                    if not completion.is_finished:
                        await self._pace.wait_turn(clock())
        finally:
            self._pace.num_streams -= 1

    async def _score(self, context: Any, request: pb.ScoreRequest) -> pb.ScoreResponse:  # noqa: ANN401
        arrived_at = time.monotonic()
        parsed = parse_score(request)
        check_model_name(self._model, parsed.model)
        source = RequestTokenSource(self._source, self._owner(context) or 0, request_id=self._id_of(context))
        source.check_capacity(parsed.num_sequences)
        completion = await Completion.prepare(self._model, parsed, arrived_at)
        return to_score_response(await completion.run(source))

    async def _models(self, _request: pb.ModelsRequest) -> pb.ModelsResponse:
        return to_models_response(self._model)

    async def _submit_job(self, requests: AsyncIterator[Any]) -> pb.Job:
        return job_message(await submit(self._jobs, requests))

    async def _get_job(self, request: pb.GetJobRequest) -> pb.Job:
        return job_message(await self._jobs.get(request.job_id))

    async def _list_jobs(self, request: pb.ListJobsRequest) -> pb.ListJobsResponse:
        after = request.after if request.HasField("after") else None
        return pb.ListJobsResponse(jobs=map(job_message, await self._jobs.list(parse_limit(request), after)))

    async def _watch_job(self, request: pb.WatchJobRequest) -> AsyncGenerator[pb.Job, None]:
        changes = self._jobs.watch(request.job_id)
        async with aclosing_if_generator(changes):
            async for job in changes:
                yield job_message(job)

    async def _results(self, request: pb.StreamResultsRequest) -> AsyncGenerator[pb.StreamResultsResponse, None]:
        results = self._jobs.results(request.job_id, validate_offset(request.offset))
        async with aclosing(coalesce(results, lambda line: len(line.body), RESULT_BYTES)) as batches:
            async for lines in batches:
                yield pb.StreamResultsResponse(lines=map(line_message, lines))

    async def _cancel_job(self, request: pb.CancelJobRequest) -> pb.Job:
        return job_message(await self._jobs.cancel(request.job_id))

    @property
    def _jobs(self) -> JobService:
        if self._stored_jobs is None:
            raise UnimplementedError("this server does not accept batch jobs")
        return self._stored_jobs
