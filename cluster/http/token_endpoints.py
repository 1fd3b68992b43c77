"""Endpoints that generate tokens, whole or as a stream: completions, chats, and APIs that are chats
in another format; and those that only convert texts to tokens and back.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tramontane.cluster.http.body_reader import BodyReader, warning_header
from tramontane.cluster.http.errors import request_id, request_identity
from tramontane.cluster.http.failover import SCOPE_PROGRESS, SCOPE_RESUME
from tramontane.cluster.http.sse import (
    KEEP_ALIVE_S,
    Changes,
    FirstChanges,
    Pacer,
    SseResponse,
    cancel_first,
    fingerprint_header,
    sse_events,
)
from tramontane.proto.ports import TokenSource
from tramontane.router.chat_apis.conversation import Conversation
from tramontane.router.chat_apis.messages_answer import count_tokens, prepare_message
from tramontane.router.chat_apis.messages_request import parse_count_tokens, parse_messages
from tramontane.router.chat_apis.responses_answer import prepare_response
from tramontane.router.chat_apis.responses_request import parse_responses
from tramontane.router.openai.chat_completion import (
    OF_HTTPX_SSE,
    OF_MISTRAL,
    OF_OPENAI,
    ClientFormat,
    prepare_chat,
)
from tramontane.router.openai.chat_request import ChatRequest, parse_chat
from tramontane.router.openai.completion import prepare_completion
from tramontane.router.openai.completion_request import (
    CompletionRequest,
    parse_body,
    parse_completion,
)
from tramontane.router.openai.fim import FimRequest, parse_fim, prepare_fim
from tramontane.router.openai.formatter import AnswerFormatter
from tramontane.router.openai.json_limits import run_off_loop
from tramontane.router.openai.request_context import (
    TIMEOUT_HEADER,
    RequestTokenSource,
    parse_timeout,
)
from tramontane.router.openai.response_models import encode_and_free
from tramontane.router.openai.resume_state import ResumeState, no_progress
from tramontane.router.openai.served_model import ServedModel, check_model_name
from tramontane.router.openai.tokenize import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    tokenize,
)
from tramontane.router.tokenization.chat import ChatTemplate, ignored_variables

Parsed = CompletionRequest | ChatRequest | FimRequest | Conversation
Body = TypeVar("Body", CompletionRequest, ChatRequest, FimRequest, Conversation)


class TokenEndpoints:
    """The endpoints of one model. ``chat``: renders conversations as prompts."""

    def __init__(
        self,
        model: ServedModel,
        source: TokenSource,
        chat: ChatTemplate,
        bodies: BodyReader,
        pacer: Pacer,
    ) -> None:
        self._model, self._source, self._chat, self._bodies, self._pacer = (
            model,
            source,
            chat,
            bodies,
            pacer,
        )

    def routes(self) -> list[Route]:
        """Return the routes of all endpoints."""
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/fim/completions", self.fim_completions, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/messages", self.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def completions(self, request: Request) -> Response:
        """Answer ``POST /v1/completions``."""
        prepare = partial(prepare_completion, self._model)
        return await self._complete(request, parse_completion, prepare)

    async def chat_completions(self, request: Request) -> Response:
        """Answer ``POST /v1/chat/completions``."""
        prepare = partial(prepare_chat, self._model, self._chat, client=client_format(request))
        return await self._complete(request, parse_chat, prepare)

    async def fim_completions(self, request: Request) -> Response:
        """Answer ``POST /v1/fim/completions``."""
        prepare = partial(prepare_fim, self._model, client=client_format(request))
        return await self._complete(request, parse_fim, prepare)

    async def responses(self, request: Request) -> Response:
        """Answer ``POST /v1/responses``."""
        prepare = partial(prepare_response, self._model, self._chat)
        return await self._complete(request, parse_responses, prepare)

    async def messages(self, request: Request) -> Response:
        """Answer ``POST /v1/messages``."""
        prepare = partial(prepare_message, self._model, self._chat)
        return await self._complete(request, parse_messages, prepare)

    async def count_tokens(self, request: Request) -> Response:
        """Answer ``POST /v1/messages/count_tokens``."""
        parsed = await self._bodies.parse(request, parse_count_tokens)
        check_model_name(self._model, parsed.model)
        answer = await count_tokens(self._model, self._chat, parsed)
        return JSONResponse(answer.as_json(), headers=warning_header(self._ignored(parsed)))

    async def tokenize(self, request: Request) -> Response:
        """Answer ``POST /tokenize``."""
        parsed = await self._bodies.parse(request, partial(parse_body, TokenizeRequest))
        check_model_name(self._model, parsed.model)
        answer = await tokenize(self._model, self._chat, parsed)
        unused = ignored_variables(self._chat, parsed.chat_template_kwargs)
        return JSONResponse(answer.as_json(), headers=warning_header((*parsed.ignored, *unused)))

    async def detokenize(self, request: Request) -> Response:
        """Answer ``POST /detokenize``."""
        parsed = await self._bodies.parse(request, partial(parse_body, DetokenizeRequest))
        check_model_name(self._model, parsed.model)
        answer = await detokenize(self._model, parsed)
        return JSONResponse(answer.as_json(), headers=warning_header(parsed.ignored))

    async def _complete(
        self,
        request: Request,
        parse: Callable[[bytes], Body],
        prepare: Callable[[Body, float, ResumeState], Awaitable[AnswerFormatter]],
    ) -> Response:
        """Answer a request for tokens, whole or as a stream."""
        arrived_at = time.monotonic()
        resumed: ResumeState = request.scope.get(SCOPE_RESUME) or ResumeState()
        source = self._source_for(request, resumed)
        parsed: Body = await self._bodies.parse(request, parse)
        check_model_name(self._model, parsed.model)
        answer = await prepare(parsed, arrived_at, resumed)
        ignored = self._ignored(parsed)
        if parsed.stream:
            response = await self._stream(request, answer, source)
        else:
            response = await _whole_answer(answer, source, request)
        response.headers.update(warning_header(ignored))
        return response

    def _ignored(self, parsed: Parsed) -> Sequence[str]:
        """Return the fields of a request that have no effect, and count those that this model
        ignores.
        """
        of_model = tuple(self._ignored_settings(parsed))
        self._model.counts.ignored_fields += len(of_model)
        return (*parsed.ignored, *of_model)

    def _ignored_settings(self, parsed: Parsed) -> Iterator[str]:
        """Yield the settings of a request for which this model has no choice."""
        if isinstance(parsed, ChatRequest):
            yield from ignored_variables(self._chat, parsed.chat_template_kwargs)
        if isinstance(parsed, ChatRequest) and not self._chat.efforts:
            if parsed.reasoning_effort is not None:
                yield "reasoning_effort"
        elif isinstance(parsed, Conversation) and not self._chat.efforts:
            if parsed.request.reasoning_effort is not None:
                yield parsed.name_of("reasoning_effort")
            if parsed.refuses_thoughts and self._chat.reasoning_format is not None:
                yield "thinking"

    def _source_for(self, request: Request, resumed: ResumeState) -> RequestTokenSource:
        """Make the request's source before its body is read.

        Raises DrainingError, ParameterError for a bad timeout, and OverloadedError if not even one
        sequence could wait.
        """
        source = RequestTokenSource(
            self._source,
            request_identity(request),
            _deadline(request, resumed),
            request_id(request),
            self._model.counts,
        )
        if not resumed.is_resumed:
            source.check_capacity(1)
        return source

    async def _stream(
        self, request: Request, answer: AnswerFormatter, source: TokenSource
    ) -> Response:
        """Wait for the first tokens, which decide between a stream and an error with its own
        status, unless that takes long.
        """
        changes, path = answer.generation.stream(source), request.url.path
        first = await wait_for_first(changes)
        events = sse_events(self._pacer, answer, first, changes, request_id(request), path)
        return SseResponse(events, first, changes, path, answer.generation.fingerprint)


async def wait_for_first(changes: Changes) -> FirstChanges:
    """Start a generation; return its first changes, or after ``KEEP_ALIVE_S`` their future: then
    the stream begins before it is known whether it fails.
    """
    first = asyncio.ensure_future(anext(changes))
    try:
        await asyncio.wait({first}, timeout=KEEP_ALIVE_S)
    except asyncio.CancelledError:
        await cancel_first(first)
        raise
    if first.done():
        first.result()  # raises the error, which gets a status of its own
    return first


async def _whole_answer(answer: AnswerFormatter, source: TokenSource, request: Request) -> Response:
    whole = await answer.run(source, request.scope.get(SCOPE_PROGRESS, no_progress))
    body = await run_off_loop(
        answer.answer_bytes, lambda: encode_and_free(whole, answer.list_depth)
    )
    headers = fingerprint_header(answer.generation.fingerprint)
    return Response(body, media_type="application/json", headers=headers)


def client_format(request: Request) -> ClientFormat:
    """Return what a client expects of chats: Mistral's say who they are
    ("mistral-client-python/3.7.0"), and langchain-mistralai reads events by httpx-sse, and names
    only httpx.
    """
    headers = request.headers
    agent = headers.get("user-agent", "").lower()
    if "mistral" in agent:
        return OF_MISTRAL
    reads_by_httpx_sse = (
        agent.startswith("python-httpx/")  # the other headers are looked up for few requests
        and headers.get("accept") == "text/event-stream"
        and headers.get("cache-control") == "no-store"
    )
    return OF_HTTPX_SSE if reads_by_httpx_sse else OF_OPENAI


def _deadline(request: Request, resumed: ResumeState) -> float:
    """Return the deadline by the event loop's clock: of 30 s, an ingress that was lost has used 12,
    so 18 are left.

    Raises ParameterError.
    """
    return (
        asyncio.get_running_loop().time()
        + parse_timeout(request.headers.getlist(TIMEOUT_HEADER))
        - resumed.waited_s
    )
