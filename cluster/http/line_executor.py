"""Lines of batch jobs, answered as requests over HTTP are."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tramontane.proto.errors import ParameterError
from tramontane.proto.jobs import Endpoint
from tramontane.proto.ports import TokenSource
from tramontane.router.chat_apis.conversation import Conversation
from tramontane.router.chat_apis.responses_answer import prepare_response
from tramontane.router.chat_apis.responses_request import parse_responses
from tramontane.router.openai.chat_completion import prepare_chat
from tramontane.router.openai.chat_request import ChatRequest, parse_chat
from tramontane.router.openai.completion import prepare_completion
from tramontane.router.openai.completion_request import CompletionRequest, parse_completion
from tramontane.router.openai.errors import unknown_parameter
from tramontane.router.openai.fim import FimRequest, parse_fim, prepare_fim
from tramontane.router.openai.resume_state import ResumeState
from tramontane.router.openai.served_model import ServedModel, check_model_name
from tramontane.router.tokenization.chat import ChatTemplate


@dataclass(frozen=True, slots=True)
class LineExecutor:
    """Computes the response to one line of a batch job, with a model, its chat template and a
    source of tokens. ``refuses_unknown``: lines with unknown fields fail.
    """

    model: ServedModel
    chat: ChatTemplate
    source: TokenSource
    refuses_unknown: bool = False

    async def completion(self, body: bytes) -> dict[str, Any]:
        """Return the response of ``/v1/completions``."""
        request = parse_completion(body)
        self._check(request)
        return await (await prepare_completion(self.model, request, time.monotonic())).run(
            self.source
        )

    async def chat_completion(self, body: bytes) -> dict[str, Any]:
        """Return the response of ``/v1/chat/completions``."""
        request = parse_chat(body)
        self._check(request)
        return await (await prepare_chat(self.model, self.chat, request, time.monotonic())).run(
            self.source
        )

    async def fim_completion(self, body: bytes) -> dict[str, Any]:
        """Return the response of ``/v1/fim/completions``."""
        request = parse_fim(body)
        self._check(request)
        return await (await prepare_fim(self.model, request, time.monotonic())).run(self.source)

    async def response(self, body: bytes) -> dict[str, Any]:
        """Return the response of ``/v1/responses``."""
        conversation = parse_responses(body)
        self._check(conversation)
        prepared = await prepare_response(
            self.model, self.chat, conversation, time.monotonic(), ResumeState()
        )
        return await prepared.run(self.source)

    def _check(self, request: CompletionRequest | ChatRequest | FimRequest | Conversation) -> None:
        if request.stream:
            raise ParameterError("stream is not for lines of a batch job; leave it out", "stream")
        if self.refuses_unknown and request.unknown:
            raise unknown_parameter(request.unknown)
        self.model.counts.ignored_fields += len(request.ignored)
        check_model_name(self.model, request.model)


# By endpoint of a line. A new endpoint is added here and to ``router.batch.jobs.Endpoint``.
HANDLERS: Mapping[Endpoint, Callable[[LineExecutor, bytes], Awaitable[dict[str, Any]]]] = (
    MappingProxyType(
        {
            "/v1/completions": LineExecutor.completion,
            "/v1/chat/completions": LineExecutor.chat_completion,
            "/v1/fim/completions": LineExecutor.fim_completion,
            "/v1/responses": LineExecutor.response,
        }
    )
)
