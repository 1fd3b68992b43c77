"""``/v1/chat/completions`` without the HTTP: a conversation becomes a prompt, and the completion of that an answer."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from tramontane.proto.errors import ParameterError, RequestError
from tramontane.proto.ports import TokenSource
from tramontane.proto.request import FinishReason
from tramontane.router.openai.chat_request import ChatRequest, chat_messages
from tramontane.router.openai.choice_text import ChoiceDetokenizer
from tramontane.router.openai.completion import ChoiceBuilder, Completion, ProgressCallback, no_progress
from tramontane.router.openai.completion_request import CompletionRequest
from tramontane.router.openai.logprobs import TokenLogprobs, chat_logprobs
from tramontane.router.openai.request_fields import SamplingFields
from tramontane.router.openai.resume_state import ChoiceState, ChoiceUpdate, ResumeState
from tramontane.router.openai.served_model import OFFLOAD_CHARS, ServedModel
from tramontane.router.structured.fields import Tool
from tramontane.router.structured.grammar import build_grammar, visible_tools
from tramontane.router.structured.validator import run_in_grammar_pool
from tramontane.router.tokenization.chat import ChatMessage, ChatTemplate, ToolFormat, ToolSpec, message_texts
from tramontane.router.tokenization.tokenizer import Tokenizer
from tramontane.router.tokenization.tool_parser import CallDelta, ToolCallParser, as_openai, merge_deltas


@dataclass(frozen=True, slots=True)
class NoChatTemplate:
    """Of a model that has no format for conversations, and why."""

    reason: str

    @property
    def tool_format(self) -> ToolFormat | None:
        return None

    def encode(self, _messages: Sequence[ChatMessage], _tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
        raise RequestError(self.reason)


async def encode_chat(
    model: ServedModel, form: ChatTemplate, messages: Sequence[ChatMessage], tools: Sequence[Tool]
) -> tuple[int, ...]:
    """Token ids up to where the assistant answers. Raises ParameterError for conversations that the format does not know."""
    size = sum(map(len, message_texts(messages)))
    specs = [tool.model_dump(exclude_none=True) for tool in tools]
    try:
        if model.tokenizer is not None:
            model.tokenizer.check_length("".join(message_texts(messages)), model.max_model_len)
        if size <= OFFLOAD_CHARS and not specs:
            return form.encode(messages, specs)
        return await asyncio.to_thread(form.encode, messages, specs)
    except RequestError as error:
        raise ParameterError(str(error), "messages") from error


class ChatChoice(ChoiceDetokenizer):
    """A text of its own, and the calls of tools that follow it, of a model that may make some."""

    def __init__(self, tokenizer: Tokenizer | None, request: ChatRequest, tool_format: ToolFormat | None) -> None:
        super().__init__(tokenizer, request.stop, request.min_tokens, is_text_start=True)
        may_call = tokenizer is not None and tool_format is not None and visible_tools(request.tools, request.tool_choice)
        self._parser = ToolCallParser(tokenizer, tool_format) if may_call and tokenizer and tool_format else None
        self._calls: list[CallDelta] = []

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's word for how it ended; None while it goes on."""
        has_calls = self._parser is not None and self._parser.num_calls > 0
        return "tool_calls" if has_calls and self.finish is FinishReason.STOP else self.finish and self.finish.value

    def resume(self, told: ChoiceState, *, is_whole: bool = False) -> None:
        super().resume(told, is_whole=is_whole)
        if not is_whole:  # else calls are taken all together, at the end
            self._calls = []

    def take_calls(self) -> list[CallDelta]:
        """What has become known of calls since the last time."""
        news, self._calls = self._calls, []
        return news

    def _piece(self, token_id: int, score: TokenLogprobs | None) -> str:
        if self._parser is not None:
            self._calls += self._parser.push(token_id)
            if self._parser.is_calling:
                return ""
        return super()._piece(token_id, score)


class ChatCompletion:
    """One request on its way. It behaves like the ``Completion`` inside."""

    def __init__(self, completion: Completion, choices: Sequence[ChatChoice], begun: ResumeState) -> None:
        self._completion, self._choices = completion, choices
        self._id, self._has_begun = f"chatcmpl-{begun.id}", bool(begun.choices)

    @classmethod
    async def prepare(
        cls,
        model: ServedModel,
        form: ChatTemplate,
        request: ChatRequest,
        arrived_at: float,
        begun: ResumeState | None = None,
    ) -> "ChatCompletion":
        """Render, tokenize and bound. Raises RequestError for what could never run."""
        if request.n > model.max_sequences:
            most = f"{model.max_sequences} sequence{'s' * (model.max_sequences > 1)}"
            raise ParameterError(f"n is {request.n}; one request may have at most {most}", "n")
        tools = visible_tools(request.tools, request.tool_choice)
        ids = await encode_chat(model, form, chat_messages(request.messages), tools)
        room = model.max_model_len - len(ids)
        if room < 1:
            raise ParameterError(
                f"the messages take {len(ids)} tokens; with a context of {model.max_model_len} positions "
                f"they may take at most {model.max_model_len - 1}",
                "messages",
            )
        grammar = await _grammar(request, form)
        choices = [ChatChoice(model.tokenizer, request, form.tool_format) for _ in range(request.n)]
        answer = ChoiceBuilder(choices, chat_logprobs, _joined_logprobs, grammar)
        inner = _as_completion(request, ids, room)
        begun = begun or ResumeState()
        return cls(await Completion.prepare(model, inner, arrived_at, answer, begun), choices, begun)

    async def run(self, source: TokenSource, tell: ProgressCallback = no_progress) -> dict[str, Any]:
        """As of a ``Completion``."""
        answer = await self._completion.run(source, tell)
        choices = [self._whole(choice) for choice in answer["choices"]]
        return {**answer, "id": self._id, "object": "chat.completion", "choices": choices}

    async def stream(self, source: TokenSource) -> AsyncGenerator[list[dict[str, Any]], None]:
        """What has changed, choice by choice, each time something is ready; ends with the last choice."""
        async with aclosing(self._completion.stream(source)) as changes:
            async for choices in changes:
                yield [self._news(choice) for choice in choices]

    @property
    def is_finished(self) -> bool:
        return self._completion.is_finished

    def take_updates(self) -> list[ChoiceUpdate]:
        """As of a ``Completion``."""
        return self._completion.take_updates()

    def opening(self) -> dict[str, Any] | None:
        """The event before all others, which says who speaks; None where it has been told."""
        if self._has_begun:
            return None
        delta = {"role": "assistant", "content": ""}
        return self.chunk(
            [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for index in range(len(self._choices))]
        )

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._completion.chunk(choices), "id": self._id, "object": "chat.completion.chunk"}

    def last_chunk(self) -> dict[str, Any]:
        return {**self._completion.last_chunk(), "id": self._id, "object": "chat.completion.chunk"}

    def _news(self, change: dict[str, Any]) -> dict[str, Any]:
        text, calls = change.pop("text"), self._choices[change["index"]].take_calls()
        content = {"content": text} if text else {}
        called = {"tool_calls": [call.as_openai() for call in calls]} if calls else {}
        return self._finish_reason(change) | {"delta": content | called}

    def _whole(self, change: dict[str, Any]) -> dict[str, Any]:
        text, calls = change.pop("text"), merge_deltas(self._choices[change["index"]].take_calls())
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        called = {"tool_calls": as_openai(calls)} if calls else {}
        return self._finish_reason(change) | {"message": message | called}

    def _finish_reason(self, change: dict[str, Any]) -> dict[str, Any]:
        if change["finish_reason"] == FinishReason.ERROR.value:
            raise ParameterError("the model's vocabulary cannot follow what response_format or tools ask for", "response_format")
        if change["finish_reason"] is not None:
            change["finish_reason"] = self._choices[change["index"]].finish_reason
        return change


async def _grammar(request: ChatRequest, form: ChatTemplate) -> str:
    if request.response_format is None and not request.tools and request.tool_choice in (None, "none"):
        return ""
    return await run_in_grammar_pool(
        lambda: build_grammar(
            request.response_format,
            request.tools,
            request.tool_choice,
            form.tool_format,
            parallel=request.parallel_tool_calls,
            num_sequences=request.n,
        )
    )


def _as_completion(request: ChatRequest, ids: tuple[int, ...], room: int) -> CompletionRequest:
    """All that the two have in common has been validated already."""
    sampling = {name: getattr(request, name) for name in SamplingFields.model_fields}
    return CompletionRequest.model_construct(
        prompt=(ids,),
        max_tokens=room if request.max_new_tokens is None else request.max_new_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        stream=request.stream,
        stream_options=request.stream_options,
        return_token_ids=request.return_token_ids,
        **sampling,
    )


def _joined_logprobs(parts: Iterable[dict[str, Any] | None]) -> dict[str, Any]:
    return {"content": [token for part in parts if part for token in part["content"]], "refusal": None}
