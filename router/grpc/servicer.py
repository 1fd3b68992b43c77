"""The implementation of the gRPC services, independent of server and network: messages in, messages
out.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, ExitStack, aclosing, nullcontext
from functools import partial, wraps
from typing import Any, Protocol, TypeVar

from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionResponse

from tramontane.proto import inference_pb2 as pb
from tramontane.proto.errors import (
    AuthenticationError,
    ParameterError,
    RequestError,
    UnimplementedError,
)
from tramontane.proto.grpc_messages import job_message, line_message, parse_options, status_for
from tramontane.proto.jobs import Job, JobService
from tramontane.proto.ports import TokenSource
from tramontane.proto.request import Identity, request_fields
from tramontane.proto.units import format_bytes
from tramontane.router.grpc.handlers import (
    MAX_MESSAGE_BYTES,
    MalformedMessage,
    reflection_responses,
)
from tramontane.router.grpc.messages import (
    SerializedMessage,
    parse_generate,
    parse_score,
    to_generate_response,
    to_models_response,
    to_score_response,
)
from tramontane.router.openai.completion import prepare_completion
from tramontane.router.openai.completion_request import CompletionRequest
from tramontane.router.openai.formatter import CompletionFormatter
from tramontane.router.openai.json_limits import run_off_loop
from tramontane.router.openai.request_context import RequestTokenSource
from tramontane.router.openai.served_model import ServedModel, check_model_name

# Requests of the service BatchJobs: uploads and parameters; and the coalescing of results into
# messages.

MAX_OFFSET = 2**53

T = TypeVar("T")


async def submit(jobs: JobService, requests: AsyncIterator[Any]) -> Job:
    """Submit an upload: a message with options, then either the pieces of a text or one URL. Raises
    RequestError.
    """
    first = await anext(requests, None)
    if isinstance(first, MalformedMessage):
        raise RequestError(first.message)
    if first is None or first.WhichOneof("part") != "options":
        raise RequestError("the first message must hold options")
    options = parse_options(first.options)
    key = first.request_key if first.HasField("request_key") else None
    second = await anext(requests, None)
    if isinstance(second, pb.SubmitJobRequest) and second.WhichOneof("part") == "url":
        if await anext(requests, None) is not None:
            raise RequestError("nothing may follow a url")
        return await jobs.submit_url(second.url, options, key)
    return await jobs.submit(_pieces(second, requests), options, key)


async def _pieces(first: Any, rest: AsyncIterator[Any]) -> AsyncGenerator[bytes, None]:
    message = first
    while message is not None:
        if isinstance(message, MalformedMessage):
            raise RequestError(message.message)
        if message.WhichOneof("part") != "data":
            raise RequestError("after the options there must be either data or one url")
        yield message.data
        message = await anext(rest, None)
    # Ray Serve's stream ends without an error when its client has left
    if getattr(rest, "is_cancelled", lambda: False)():
        raise RequestError("the upload was broken off")


def validate_offset(offset: int) -> int:
    """Return ``offset``. Raises ParameterError if it is out of range."""
    if not 0 <= offset < MAX_OFFSET:
        raise ParameterError(
            f"offset is {offset}; it must be a number of results, from 0", "offset"
        )
    return offset


def parse_limit(request: pb.ListJobsRequest) -> int:
    """Return how many jobs to list, 20 by default. Raises ParameterError."""
    limit = request.limit if request.HasField("limit") else 20
    if not 1 <= limit <= 100:
        raise ParameterError(f"limit is {limit}; it must be from 1 to 100", "limit")
    return limit


async def coalesce(
    source: AsyncGenerator[T, None], size: Callable[[T], int], max_size: int
) -> AsyncGenerator[list[T], None]:
    """Yield lists of ready items, in order, with sizes of up to ``max_size`` in total; a larger
    item is alone in its list.

    Sizes 3, 4, 5 that are all ready, and a ``max_size`` of 8: first the items of 3 and 4, then the
    item of 5. Closing this closes the source.
    """
    async with aclosing(source):
        upcoming = asyncio.create_task(_next(source))
        try:
            while items := await upcoming:
                num_left = max_size - size(items[0])
                while True:
                    upcoming = asyncio.create_task(_next(source))
                    await asyncio.sleep(0)  # an item that is ready arrives during this
                    if not upcoming.done() or upcoming.exception():
                        break
                    following = upcoming.result()
                    if not following or size(following[0]) > num_left:
                        break
                    items += following
                    num_left -= size(following[0])
                yield items
        finally:
            upcoming.cancel()
            await asyncio.wait([upcoming])
            if not upcoming.cancelled():
                upcoming.exception()  # retrieved, so that asyncio does not log it


async def _next(source: AsyncGenerator[T, None]) -> list[T]:
    """Return a list of the next item, or an empty one at the end."""
    try:
        return [await anext(source)]
    except StopAsyncIteration:
        return []


logger = logging.getLogger(__name__)

FINGERPRINT_KEY = "x-tramontane-fingerprint"  # in trailing metadata
RESULT_BYTES = 2**20  # of one message, unless a single result is larger

Q = TypeVar("Q", pb.GenerateRequest, pb.ScoreRequest)
R = TypeVar("R")
Request = Any  # a message, or a stream of messages
Context = Any  # gRPC's own, or Ray Serve's substitute
Method = Callable[["GrpcServicer", Request, Context], R]


class Authenticator(Protocol):
    """Checks API keys."""

    def authenticate(self, authorization: str | None) -> Identity | None:
        """Return the identity of the API key; None unless ``authorization`` is ``Bearer`` and a
        known key.
        """
        ...


class WritePacer(Protocol):
    """Limits how often streams write: see ``Pacer`` in ``cluster/http/sse.py``."""

    def open_stream(self) -> AbstractContextManager[None]:
        """Count a stream to which is written during the block."""
        ...

    async def wait_turn(self, last_write: float) -> None:
        """Wait until a stream that wrote at ``last_write`` may write again."""
        ...


class NoPacing:
    """A pacer without limits."""

    def open_stream(self) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    async def wait_turn(self, last_write: float) -> None:
        """Return at once."""


def _respond(
    empty: Callable[[], R],
) -> Callable[[Method[Awaitable[R]]], Method[Coroutine[Any, Any, R]]]:
    """Check a call before its method runs. If the check or the method fails, set the status and
    return ``empty()``, which no client sees.
    """

    def decorate(method: Method[Awaitable[R]]) -> Method[Coroutine[Any, Any, R]]:
        @wraps(method)
        async def respond(self: "GrpcServicer", request: Request, grpc_context: Context) -> R:
            try:
                self._check(request, grpc_context)
                return await method(self, request, grpc_context)
            except Exception as error:
                self._set_status(error, grpc_context)
                return empty()

        return respond

    return decorate


def _stream(
    empty: Callable[[], R],
) -> Callable[[Method[AsyncGenerator[R, None]]], Method[AsyncGenerator[R, None]]]:
    """Do the same for a stream, where ``empty()`` comes before the error: Ray Serve sends a status
    only with a message.
    """

    def decorate(method: Method[AsyncGenerator[R, None]]) -> Method[AsyncGenerator[R, None]]:
        @wraps(method)
        async def stream(
            self: "GrpcServicer", request: Request, grpc_context: Context
        ) -> AsyncGenerator[R, None]:
            try:
                self._check(request, grpc_context)
                async with aclosing(method(self, request, grpc_context)) as responses:
                    async for response in responses:
                        yield response
            except Exception as error:
                self._set_status(error, grpc_context)
                yield empty()

        return stream

    return decorate


def _name_fingerprint(fingerprint: str | None, context: Context) -> None:
    """Add the fingerprint of the last tokens to the trailing metadata, if it is known. Ray Serve
    sends it with the next message.
    """
    if fingerprint is not None:
        context.set_trailing_metadata([(FINGERPRINT_KEY, fingerprint)])


class GrpcServicer:
    """Implements the methods of both services, by their names in ``inference.proto``, and
    reflection.

    Their second argument is gRPC's context, or Ray Serve's substitute, which Ray Serve passes by
    that name. Closing a stream or cancelling a call ends its work. ``allow_peer`` gets a peer in
    gRPC's notation, such as ``ipv4:10.0.0.7:50123``. ``id_of`` returns the request id of a call
    from its context, for the log. ``jobs`` returns the batch jobs of a tenant.
    """

    def __init__(
        self,
        model: ServedModel,
        source: TokenSource,
        jobs: Callable[[str], JobService] | None = None,
        keys: Authenticator | None = None,
        allow_peer: Callable[[str], bool] = lambda _: True,
        pace: WritePacer | None = None,
        max_message: int = MAX_MESSAGE_BYTES,
        id_of: Callable[[Any], str] = lambda _: "",
    ) -> None:
        self._model, self._source, self._jobs_of = model, source, jobs
        self._keys, self._allow_peer, self._pace, self._max_message = (
            keys,
            allow_peer,
            pace or NoPacing(),
            max_message,
        )
        self._id_of = id_of

    # ---- Inference

    @_stream(pb.GenerateResponse)
    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: Context
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Stream the continuation of a prompt."""
        answer, source = await self._prepare(parse_generate, request, grpc_context)
        generation = answer.generation
        clock = asyncio.get_running_loop().time
        has_begun, fingerprint = False, None
        with ExitStack() as open_streams:
            async with aclosing(generation.stream(source)) as stream:
                async for changes in stream:
                    if not has_begun:  # no data was written to it while it waited
                        has_begun = True
                        open_streams.enter_context(self._pace.open_stream())
                    response = await run_off_loop(
                        generation.change_bytes, partial(to_generate_response, changes)
                    )
                    if generation.is_finished:
                        response.usage.MergeFrom(pb.Usage(**generation.usage.as_json()))
                        response.timings.MergeFrom(pb.Timings(**generation.timings.as_json()))
                    if generation.fingerprint != fingerprint:
                        fingerprint = generation.fingerprint
                        _name_fingerprint(fingerprint, grpc_context)
                    yield response
                    if not generation.is_finished:
                        await self._pace.wait_turn(clock())

    @_respond(SerializedMessage)
    async def Score(self, request: pb.ScoreRequest, grpc_context: Context) -> SerializedMessage:
        """Return the log-probabilities of a prompt, as a ScoreResponse."""
        answer, source = await self._prepare(parse_score, request, grpc_context)
        result = await answer.run(source)
        _name_fingerprint(answer.generation.fingerprint, grpc_context)
        return await run_off_loop(answer.answer_bytes, lambda: to_score_response(result))

    @_respond(pb.ModelsResponse)
    async def Models(self, request: pb.ModelsRequest, grpc_context: Context) -> pb.ModelsResponse:
        """Return the served models."""
        return to_models_response(self._model)

    # ---- BatchJobs

    @_respond(pb.Job)
    async def SubmitJob(self, requests: AsyncIterator[Any], grpc_context: Context) -> pb.Job:
        """Submit a batch job."""
        return job_message(await submit(self._jobs(grpc_context), requests))

    @_respond(pb.Job)
    async def GetJob(self, request: pb.GetJobRequest, grpc_context: Context) -> pb.Job:
        """Return a batch job."""
        return job_message(await self._jobs(grpc_context).get(request.job_id))

    @_respond(pb.ListJobsResponse)
    async def ListJobs(
        self, request: pb.ListJobsRequest, grpc_context: Context
    ) -> pb.ListJobsResponse:
        """Return the newest batch jobs."""
        after = request.after if request.HasField("after") else None
        return pb.ListJobsResponse(
            jobs=map(job_message, await self._jobs(grpc_context).list(parse_limit(request), after))
        )

    @_stream(pb.Job)
    async def WatchJob(
        self, request: pb.WatchJobRequest, grpc_context: Context
    ) -> AsyncGenerator[pb.Job, None]:
        """Stream a batch job after every change, until it has ended."""
        async with aclosing(self._jobs(grpc_context).watch(request.job_id)) as changes:
            async for job in changes:
                yield job_message(job)

    @_stream(pb.StreamResultsResponse)
    async def StreamResults(
        self, request: pb.StreamResultsRequest, grpc_context: Context
    ) -> AsyncGenerator[pb.StreamResultsResponse, None]:
        """Stream the results of a batch job, until it has ended."""
        results = self._jobs(grpc_context).results(request.job_id, validate_offset(request.offset))
        async with aclosing(
            coalesce(results, lambda line: len(line.body), RESULT_BYTES)
        ) as batches:
            async for lines in batches:
                yield pb.StreamResultsResponse(lines=map(line_message, lines))

    @_respond(pb.Job)
    async def CancelJob(self, request: pb.CancelJobRequest, grpc_context: Context) -> pb.Job:
        """Cancel a batch job."""
        return job_message(await self._jobs(grpc_context).cancel(request.job_id))

    # ---- reflection

    @_stream(ServerReflectionResponse)
    async def ServerReflectionInfo(
        self, requests: AsyncIterator[Any], grpc_context: Context
    ) -> AsyncGenerator[Any, None]:
        """Answer reflection requests."""
        async with aclosing(reflection_responses(requests)) as responses:
            async for response in responses:
                yield response

    # ---- common to all methods

    async def _prepare(
        self, parse: Callable[[Q], CompletionRequest], request: Q, context: Context
    ) -> tuple[CompletionFormatter, RequestTokenSource]:
        """Parse, bound and tokenize a request, which then runs by its token source. Raises
        TramontaneError.
        """
        arrived_at = time.monotonic()
        parsed = await run_off_loop(request.ByteSize(), lambda: parse(request))
        check_model_name(self._model, parsed.model)
        source = RequestTokenSource(
            self._source,
            self._identity(context),
            request_id=self._id_of(context),
            counts=self._model.counts,
        )
        source.check_capacity(1)  # before tokens are made; ``generate`` asks for all sequences
        return await prepare_completion(self._model, parsed, arrived_at), source

    def _check(self, request: Request, context: Context) -> None:
        if logger.isEnabledFor(logging.INFO):
            own_id, kind = self._id_of(context), type(request).__name__
            logger.info(
                "request %s came over gRPC: %s",
                own_id or "-",
                kind,
                extra=request_fields(own_id, kind=kind),
            )
        if not self._allow_peer(context.peer()):
            raise AuthenticationError(
                "this server accepts only clients on its own machine; its --host says so"
            )
        self._identity(context)
        if isinstance(request, MalformedMessage):
            raise RequestError(request.message)
        # a stream of messages has no size
        size = request.ByteSize() if hasattr(request, "ByteSize") else 0
        if size > self._max_message:
            raise RequestError(
                f"the message is larger than {format_bytes(self._max_message)}; send less at once"
            )

    def _identity(self, context: Context) -> Identity:
        """Return the identity of the caller. Raises AuthenticationError."""
        given = next(
            (value for name, value in context.invocation_metadata() if name == "authorization"),
            None,
        )
        identity = Identity() if self._keys is None else self._keys.authenticate(given)
        if identity is None:
            raise AuthenticationError(
                "the API key is missing or wrong; give api_key=... to our client, or metadata,"
                " authorization: Bearer KEY"
            )
        return identity

    def _set_status(self, error: Exception, context: Context) -> None:
        status_for(error, self._id_of(context)).apply(context)

    def _jobs(self, context: Context) -> JobService:
        """Return the batch jobs that the caller may see."""
        if self._jobs_of is None:
            raise UnimplementedError("this server does not accept batch jobs")
        return self._jobs_of(self._identity(context).tenant)
