"""``/v1/fim/completions`` without HTTP: a completion between a prompt and a suffix, in the shape of
a chat's answer.
"""

from typing import Annotated, Any

from tramontane.proto.errors import ParameterError
from tramontane.router.openai.chat_completion import ChatCompletion
from tramontane.router.openai.choice_text import ChoiceBuilder, completion_grammar, make_detokenizer
from tramontane.router.openai.completion import Completion
from tramontane.router.openai.completion_request import (
    CompletionRequest,
    SamplingFields,
    Text,
    parse_body,
)
from tramontane.router.openai.logprobs import chat_logprobs, merge_chat_logprobs
from tramontane.router.openai.responses import (
    AnswerMessage,
    ChatChange,
    ChatChoice,
    ChatChunk,
    CompletionChange,
)
from tramontane.router.openai.resume_state import ResumeState
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.structured.request_model import bounded, default_if_null

# Requests for the text between a prompt and a suffix, with the fields of Mistral's API and the
# sampling parameters of others.


class FimRequest(SamplingFields):
    """Body of ``POST /v1/fim/completions``."""

    model: str | None = None
    prompt: Text
    suffix: Annotated[Text, default_if_null("")] = ""
    max_tokens: Annotated[int | None, bounded("max_tokens")] = None

    def as_completion(self, max_model_len: int) -> CompletionRequest:
        """Return the completion with the same answer; without max_tokens as long as the context has
        room for.
        """
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


class FimCompletion(ChatCompletion):
    """One request in progress. Its answers have the shape of a chat's, and no tool calls."""

    def __init__(self, completion: Completion, num_choices: int, *, has_begun: bool) -> None:
        super().__init__(completion, (), has_begun=has_begun)
        self._num_choices = num_choices

    @classmethod
    async def of_request(
        cls,
        model: ServedModel,
        request: FimRequest,
        arrived_at: float,
        resume_state: ResumeState | None = None,
    ) -> "FimCompletion":
        """Tokenize and validate. Raises ParameterError for what can never run."""
        completion_request, state = (
            request.as_completion(model.max_model_len),
            resume_state or ResumeState(),
        )
        texts = [
            make_detokenizer(model.tokenizer, completion_request)
            for _ in range(min(request.n, model.max_sequences))
        ]
        grammar = await completion_grammar(model.tokenizer, completion_request)
        builder = ChoiceBuilder(
            texts,
            chat_logprobs,
            merge_chat_logprobs,
            grammar,
            "fim",
            "chat.completion.chunk",
            ChatChunk,
        )
        completion = await Completion.prepare(model, completion_request, arrived_at, builder, state)
        return cls(completion, request.n, has_begun=bool(state.choices))

    def _to_delta(self, change: CompletionChange) -> ChatChange:
        delta = {"content": change["text"]} if change["text"] else {}
        chat_change: ChatChange = {
            "index": change["index"],
            "delta": delta,
            "logprobs": None,
            "finish_reason": change["finish_reason"],
        }
        if "token_ids" in change:
            chat_change["token_ids"], chat_change["prompt_token_ids"] = (
                change["token_ids"],
                change["prompt_token_ids"],
            )
        return chat_change

    def _to_choice(self, merged: dict[str, Any]) -> ChatChoice:
        message = AnswerMessage(role="assistant", content=merged.pop("text"), refusal=None)
        return ChatChoice(**merged | {"message": message})
