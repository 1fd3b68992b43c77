"""``/v1/chat/completions`` without HTTP: a conversation becomes a prompt, whose completion becomes
the answer.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from tramontane.proto.errors import ParameterError, RequestError
from tramontane.proto.ports import TokenSource
from tramontane.router.openai.chat_request import ChatRequest
from tramontane.router.openai.choice_text import ChatDetokenizer, ChoiceBuilder
from tramontane.router.openai.completion import Completion
from tramontane.router.openai.completion_request import CompletionRequest, SamplingFields
from tramontane.router.openai.logprobs import chat_logprobs, merge_chat_logprobs
from tramontane.router.openai.responses import (
    AnswerMessage,
    ChatAnswer,
    ChatChange,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    CompletionChange,
    Delta,
    FunctionCall,
    ToolCall,
    Usage,
)
from tramontane.router.openai.resume_state import (
    ChoiceUpdate,
    ProgressCallback,
    ResumeState,
    no_progress,
)
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.openai.tokenize import encode_chat
from tramontane.router.structured.grammar import ThoughtRules, build_grammar, visible_tools
from tramontane.router.structured.guided import answer_constraint
from tramontane.router.structured.validator import run_in_grammar_pool
from tramontane.router.tokenization.chat import ChatMessage, ChatTemplate, ToolFormat, ToolSpec
from tramontane.router.tokenization.reasoning_parser import (
    ReasoningFormat,
    ReasoningParser,
    is_open_after,
)
from tramontane.router.tokenization.tool_parser import ToolCallParser, call_ids, merge_deltas


@dataclass(frozen=True, slots=True)
class NoChatTemplate:
    """Template of a model that has no format for conversations: it refuses all of them, with
    ``reason``.
    """

    reason: str

    @property
    def tool_format(self) -> ToolFormat | None:
        """Always None: there are no tools."""
        return None

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """Always None: there are no thoughts."""
        return None

    def encode(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        reasoning_effort: str | None = None,
    ) -> tuple[int, ...]:
        """Raise RequestError."""
        raise RequestError(self.reason)


@dataclass(frozen=True, slots=True)
class _Detokenizers:
    """Makes the detokenizers of a request's choices. ``is_open``: the prompt ends inside a
    thought.
    """

    model: ServedModel
    template: ChatTemplate
    request: ChatRequest
    kind: type[ChatDetokenizer]
    is_open: bool
    has_grammar: bool

    def make(self, answer_id: str, index: int) -> ChatDetokenizer:
        """Return the detokenizer of one choice; ids of its calls follow from the answer's."""
        request, tokenizer = self.request, self.model.tokenizer
        tool_format, form = self.template.tool_format, self.template.reasoning_format
        is_start, tools, thoughts = not request.continues_message, None, None
        if tokenizer and tool_format and visible_tools(request.tools, request.tool_choice):
            tools = ToolCallParser(tokenizer, tool_format, call_ids(f"{answer_id} {index}"))
        if tokenizer and form:
            thoughts = ReasoningParser(
                form,
                tokenizer,
                is_open=self.is_open,
                only_first=self.has_grammar,
                is_text_start=is_start,
            )
        return self.kind(
            tokenizer,
            request.stop,
            request.min_tokens,
            is_text_start=is_start,
            stop_token_ids=request.stop_token_ids,
            includes_stop=request.include_stop_str_in_output,
            tools=tools,
            thoughts=thoughts,
        )


class ChatCompletion:
    """One chat request in progress, with the interface of the ``Completion`` that it wraps."""

    def __init__(
        self,
        completion: Completion,
        choices: Sequence[ChatDetokenizer],
        *,
        has_begun: bool,
        opening_text: str = "",
    ) -> None:
        self._completion, self._choices, self.has_begun = completion, choices, has_begun
        self._num_choices = len(choices)
        self._opening_text = opening_text  # of the client, with which every answer begins

    @classmethod
    async def prepare(
        cls,
        model: ServedModel,
        template: ChatTemplate,
        request: ChatRequest,
        arrived_at: float,
        resume_state: ResumeState | None = None,
        detokenizer: type[ChatDetokenizer] = ChatDetokenizer,
    ) -> "ChatCompletion":
        """Render, tokenize and validate. Raises RequestError for what can never run.
        ``detokenizer``: of every choice.
        """
        if request.n > model.max_sequences:
            limit = f"{model.max_sequences} sequence{'s' * (model.max_sequences > 1)}"
            raise ParameterError(f"n is {request.n}; one request may have at most {limit}", "n")
        tools = visible_tools(request.tools, request.tool_choice)
        variables, effort = request.chat_template_kwargs, request.reasoning_effort
        ids = await encode_chat(model, template, request.conversation(), tools, variables, effort)
        max_new_tokens = model.max_model_len - len(ids)
        if max_new_tokens < 1:
            raise ParameterError(
                f"the messages take {len(ids)} tokens; with a context of {model.max_model_len}"
                f" positions they may take at most {model.max_model_len - 1}",
                "messages",
            )
        form = template.reasoning_format
        is_open = (
            form is not None
            and model.tokenizer is not None
            and is_open_after(form, model.tokenizer, ids)
        )
        drops_space = (
            model.tokenizer is not None
            and model.tokenizer.strips_space
            and not request.continues_message
        )
        grammar = await _grammar(request, template, is_open=is_open, drops_space=drops_space)
        state = resume_state or ResumeState()
        detokenizers = _Detokenizers(model, template, request, detokenizer, is_open, bool(grammar))
        choices = [detokenizers.make(state.id, index) for index in range(request.n)]
        builder = ChoiceBuilder(
            choices,
            chat_logprobs,
            merge_chat_logprobs,
            grammar,
            "chatcmpl",
            "chat.completion.chunk",
            ChatChunk,
        )
        completion_request = _to_completion_request(request, ids, max_new_tokens)
        completion = await Completion.prepare(model, completion_request, arrived_at, builder, state)
        return cls(
            completion, choices, has_begun=bool(state.choices), opening_text=request.echoed_prefix
        )

    async def run(
        self, source: TokenSource, report: ProgressCallback = no_progress
    ) -> dict[str, Any]:
        """Return the whole answer, as ``Completion.run`` does."""
        inner = self._completion
        choices = [self._to_choice(choice) for choice in await inner.collect(source, report)]
        head = inner.head | {"object": "chat.completion"}
        return ChatAnswer(
            **head, choices=choices, usage=inner.usage, timings=inner.timings
        ).as_json()

    async def stream(self, source: TokenSource) -> AsyncGenerator[list[ChatChange], None]:
        """Yield changes as ``Completion.stream`` does."""
        async with aclosing(self._completion.stream(source)) as batches:
            async for changes in batches:
                yield [self._to_delta(change) for change in changes]

    @property
    def is_finished(self) -> bool:
        """True once every choice has finished."""
        return self._completion.is_finished

    @property
    def includes_usage(self) -> bool:
        """See ``Completion``."""
        return self._completion.includes_usage

    @property
    def fingerprint(self) -> str | None:
        """See ``Completion``."""
        return self._completion.fingerprint

    @property
    def choices(self) -> Sequence[ChatDetokenizer]:
        """The choices, as far as they have come."""
        return self._choices

    @property
    def head(self) -> Mapping[str, Any]:
        """Fields of every answer and chunk."""
        return self._completion.head

    @property
    def usage(self) -> Usage:
        """See ``Completion``."""
        return self._completion.usage

    @property
    def change_bytes(self) -> int:
        """See ``Completion``."""
        return self._completion.change_bytes

    @property
    def answer_bytes(self) -> int:
        """See ``Completion``."""
        return self._completion.answer_bytes

    def take_updates(self) -> list[ChoiceUpdate]:
        """Return what another ingress needs, as ``Completion.take_updates`` does."""
        return self._completion.take_updates()

    def opening(self) -> dict[str, Any] | None:
        """Return the first event, which names the role; None if the client has received it."""
        if self.has_begun:
            return None
        delta = Delta(role="assistant", content=self._opening_text)
        choices = (
            ChatChunkChoice(index=i, delta=delta, logprobs=None, finish_reason=None)
            for i in range(self._num_choices)
        )
        return self._completion.chunk([choice.as_json() for choice in choices], has_tokens=False)

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return one server-sent event."""
        return self._completion.chunk(choices)

    def last_chunk(self) -> dict[str, Any]:
        """Return the event with the usage."""
        return self._completion.last_chunk()

    def _to_delta(self, change: CompletionChange) -> ChatChange:
        choice = self._choices[change["index"]]
        delta: dict[str, Any] = {"content": change["text"]} if change["text"] else {}
        if reasoning := choice.take_reasoning():
            delta["reasoning_content"] = delta["reasoning"] = reasoning
        if calls := choice.take_calls():
            delta["tool_calls"] = [call.as_openai() for call in calls]
        chat_change: ChatChange = {
            "index": change["index"],
            "delta": delta,
            "logprobs": change["logprobs"],
            "finish_reason": choice.finish_reason if change["finish_reason"] else None,
        }
        if "token_ids" in change:
            chat_change["token_ids"], chat_change["prompt_token_ids"] = (
                change["token_ids"],
                change["prompt_token_ids"],
            )
        return chat_change

    def _to_choice(self, merged: dict[str, Any]) -> ChatChoice:
        choice, text = self._choices[merged["index"]], merged.pop("text")
        calls = [
            ToolCall(
                id=call.id,
                type="function",
                function=FunctionCall(name=call.name, arguments=call.arguments),
            )
            for call in merge_deltas(choice.take_calls())
        ]
        text = self._opening_text + text
        content = text if text or not calls else None
        fields: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if choice.can_think:
            fields["reasoning_content"] = fields["reasoning"] = choice.take_reasoning() or None
        message = AnswerMessage(role="assistant", content=content, refusal=None, **fields)
        return ChatChoice(**merged | {"message": message, "finish_reason": choice.finish_reason})


async def _grammar(
    request: ChatRequest, template: ChatTemplate, *, is_open: bool, drops_space: bool
) -> str:
    constraint = answer_constraint(request)
    if constraint is None and not request.tools and request.tool_choice in (None, "none", "auto"):
        return ""
    form = template.reasoning_format
    return await run_in_grammar_pool(
        lambda: build_grammar(
            constraint,
            request.tools,
            request.tool_choice,
            template.tool_format,
            parallel=request.parallel_tool_calls,
            num_sequences=request.n,
            thoughts=None if form is None else ThoughtRules(form, is_open),
            drops_space=drops_space,
        )
    )


def _to_completion_request(
    request: ChatRequest, ids: tuple[int, ...], max_new_tokens: int
) -> CompletionRequest:
    """Return the request for the chat's prompt. The fields that it shares have been validated."""
    sampling = {name: getattr(request, name) for name in SamplingFields.model_fields}
    return CompletionRequest.model_construct(
        prompt=(ids,),
        max_tokens=max_new_tokens if request.max_new_tokens is None else request.max_new_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        **sampling,
    )
