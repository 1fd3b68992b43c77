"""``/v1/fim/completions`` without HTTP: a completion between a prompt and a suffix, in the shape of
a chat's answer.
"""

from typing import Any

from tramontane.router.fim.fim_request import FimRequest
from tramontane.router.openai.chat_completion import ChatCompletion
from tramontane.router.openai.choice_text import ChoiceBuilder, completion_grammar, make_detokenizer
from tramontane.router.openai.chunks import ChatChange, ChatChunk, CompletionChange
from tramontane.router.openai.completion import Completion
from tramontane.router.openai.logprobs import chat_logprobs, merge_chat_logprobs
from tramontane.router.openai.responses import AnswerMessage, ChatChoice
from tramontane.router.openai.resume_state import ResumeState
from tramontane.router.openai.served_model import ServedModel


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
