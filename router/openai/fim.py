"""``/v1/fim/completions`` without HTTP: a completion between a prompt and a suffix, in the format
of a chat's answer.
"""

from typing import Annotated, Any

from tramontane.proto.errors import ParameterError
from tramontane.router.openai.chat_completion import (
    CHAT_LOGPROBS,
    OF_OPENAI,
    ChatFormatter,
    ClientFormat,
    chat_change,
)
from tramontane.router.openai.completion import prepare_text
from tramontane.router.openai.completion_request import (
    CompletionRequest,
    SamplingFields,
    Text,
    parse_body,
)
from tramontane.router.openai.response_models import (
    AnswerMessage,
    ChatChange,
    ChatChoice,
    CompletionChange,
)
from tramontane.router.openai.resume_state import ResumeState
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.structured.request_model import bounded, default_if_null

# Requests for the text between a prompt and a suffix, with the fields of Mistral's API and the
# other APIs' sampling parameters.


class FimRequest(SamplingFields):
    """Body of ``POST /v1/fim/completions``."""

    model: str | None = None
    prompt: Text
    suffix: Annotated[Text, default_if_null("")] = ""
    max_tokens: Annotated[int | None, bounded("max_tokens")] = None

    def as_completion(self, max_model_len: int) -> CompletionRequest:
        """Return the completion with the same answer; without max_tokens it fills the context."""
        shared = {name: getattr(self, name) for name in SamplingFields.model_fields}
        max_tokens = max_model_len if self.max_tokens is None else self.max_tokens
        return CompletionRequest.model_construct(
            prompt=(self.prompt,), suffix=self.suffix, max_tokens=max_tokens, **shared
        )


def parse_fim(body: bytes) -> FimRequest:
    """Parse and validate a body. Raises ParameterError, which names the first problem."""
    request = parse_body(FimRequest, body)
    request.check_combinations()
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        raise ParameterError(
            f"min_tokens is {request.min_tokens}, above max_tokens, {request.max_tokens}",
            "min_tokens",
        )
    return request


class FimFormatter(ChatFormatter):
    """Writes answers in the format of a chat's, without reasoning and tool calls."""

    def choice(self, change: CompletionChange) -> ChatChange:
        """Return the chunk's part for one choice."""
        delta = {"content": change["text"]} if change["text"] else {}
        return chat_change(change, delta, change["finish_reason"])

    def _whole_choice(self, merged: dict[str, Any]) -> ChatChoice:
        message = AnswerMessage(role="assistant", content=merged.pop("text"), refusal=None)
        return ChatChoice(**merged | {"message": message})


async def prepare_fim(
    model: ServedModel,
    request: FimRequest,
    arrived_at: float,
    resume_state: ResumeState | None = None,
    *,
    client: ClientFormat = OF_OPENAI,
) -> FimFormatter:
    """Tokenize and validate. Raises ParameterError for requests that can never run.

    ``client``: how it reads answers.
    """
    text = request.as_completion(model.max_model_len)
    kind = "fim", "chat.completion.chunk"
    return FimFormatter(
        await prepare_text(model, text, arrived_at, resume_state, kind, CHAT_LOGPROBS),
        client=client,
    )
