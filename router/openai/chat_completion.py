"""``/v1/chat/completions`` without HTTP: from a parsed conversation to the ``Generation`` that
answers it, and the answer as OpenAI's object or chunks.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tramontane.proto.errors import ContextLengthError, ParameterError, RequestError
from tramontane.router.openai.chat_request import ChatRequest
from tramontane.router.openai.detokenizer import ChatDetokenizer
from tramontane.router.openai.formatter import ChunkFormatter
from tramontane.router.openai.generation import Generation, GenerationRequest, LogprobsFormat
from tramontane.router.openai.json_limits import check_elements
from tramontane.router.openai.logprobs import chat_logprobs, merge_chat_logprobs
from tramontane.router.openai.response_models import (
    AnswerMessage,
    ChatAnswer,
    ChatChange,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    CompletionChange,
    Delta,
    Event,
    FunctionCall,
    ToolCall,
    content_chunks,
)
from tramontane.router.openai.resume_state import ResumeState
from tramontane.router.openai.served_model import (
    OFFLOAD_CHARS,
    ServedModel,
    ignores_eos,
    max_scored_tokens,
    tokenize_prompts,
    validate_logprobs,
    validate_sampling,
)
from tramontane.router.structured.grammar import (
    NO_TOOLS,
    Function,
    ThoughtRules,
    Tool,
    build_grammar,
    visible_tools,
)
from tramontane.router.structured.guided import answer_constraint
from tramontane.router.structured.validator import run_in_grammar_pool
from tramontane.router.tokenization.chat import (
    ChatMessage,
    ChatTemplate,
    message_texts,
)
from tramontane.router.tokenization.reasoning_parser import (
    ReasoningParser,
    is_open_after,
)
from tramontane.router.tokenization.tool_parser import ToolCallParser, call_ids, merge_deltas

# without the unknown fields that a client may have sent
TOOL_FIELDS: dict[str, Any] = {"type": True, "function": set(Function.model_fields)}
CHARS_PER_OBJECT = 64  # a message or a call takes as long as so many characters
CHAT_LOGPROBS = LogprobsFormat(chat_logprobs, merge_chat_logprobs)


@dataclass(frozen=True, slots=True)
class ClientFormat:
    """What a client expects of answers otherwise than OpenAI's clients do.

    ``whole_calls``: a streamed tool call comes in one chunk. ``ends_with_usage``: see
    ``ChunkFormatter``. ``thinks_in_content``: reasoning is a part of the content.
    """

    whole_calls: bool = False
    ends_with_usage: bool = False
    thinks_in_content: bool = False


OF_OPENAI = ClientFormat()
OF_MISTRAL = ClientFormat(whole_calls=True, ends_with_usage=True, thinks_in_content=True)
# of a client that names only httpx, and might not be Mistral's
OF_HTTPX_SSE = ClientFormat(whole_calls=True, ends_with_usage=True)


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
    whole_calls: bool

    def make(self, answer_id: str, index: int) -> ChatDetokenizer:
        """Return the detokenizer of one choice; the ids of its tool calls are derived from the
        answer's id.
        """
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
            whole_calls=self.whole_calls,
        )


class ChatFormatter(ChunkFormatter):
    """Writes the response of ``/v1/chat/completions``. ``opening_text``: the client's text that
    every answer begins with.
    """

    chunk_model = ChatChunk

    def __init__(
        self, generation: Generation, opening_text: str = "", client: ClientFormat = OF_OPENAI
    ) -> None:
        super().__init__(generation, ends_with_usage=client.ends_with_usage)
        self._opening_text, self._thinks_in_content = opening_text, client.thinks_in_content

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return OpenAI's object."""
        generation = self.generation
        head = generation.head | {"object": "chat.completion"}
        return ChatAnswer(
            **head,
            choices=[self._whole_choice(choice) for choice in choices],
            usage=generation.usage,
            timings=generation.timings,
        ).as_json()

    def opening(self) -> list[Event]:
        """Return the chunk that names the role."""
        if self.generation.has_begun:
            return []
        delta = Delta(role="assistant", content=self._opening_text)
        choices = [
            ChatChunkChoice(index=i, delta=delta, logprobs=None, finish_reason=None).as_json()
            for i in range(self.generation.request.num_sequences)
        ]
        return [Event("", self.chunk(choices, has_tokens=False))]

    def choice(self, change: CompletionChange) -> ChatChange:
        """Return the chunk's part for one choice: text, reasoning and tool calls."""
        text = self.generation.texts[change["index"]]
        assert isinstance(text, ChatDetokenizer)
        delta: dict[str, Any] = {"content": change["text"]} if change["text"] else {}
        reasoning = text.take_reasoning()
        if reasoning and self._thinks_in_content:
            delta["content"] = content_chunks(reasoning, change["text"])
        elif reasoning:
            delta["reasoning_content"] = delta["reasoning"] = reasoning
        if calls := text.take_calls():
            delta["tool_calls"] = [call.as_openai() for call in calls]
        return chat_change(change, delta, text.finish_reason if change["finish_reason"] else None)

    def _whole_choice(self, merged: dict[str, Any]) -> ChatChoice:
        choice, text = self.generation.texts[merged["index"]], merged.pop("text")
        assert isinstance(choice, ChatDetokenizer)
        calls = [
            ToolCall(
                id=call.id,
                type="function",
                function=FunctionCall(name=call.name, arguments=call.arguments),
            )
            for call in merge_deltas(choice.take_calls())
        ]
        text, reasoning = self._opening_text + text, choice.take_reasoning()
        content: Any = text if text or not calls else None
        fields: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if reasoning and self._thinks_in_content:
            content = content_chunks(reasoning, text)
        elif choice.can_think:
            fields["reasoning_content"] = fields["reasoning"] = reasoning or None
        message = AnswerMessage(role="assistant", content=content, refusal=None, **fields)
        return ChatChoice(**merged | {"message": message, "finish_reason": choice.finish_reason})


def chat_change(
    change: CompletionChange, delta: dict[str, Any], finish_reason: str | None
) -> ChatChange:
    """Return the chunk's part for one choice, with this delta."""
    made: ChatChange = {
        "index": change["index"],
        "delta": delta,
        "logprobs": change["logprobs"],
        "finish_reason": finish_reason,
    }
    if "token_ids" in change:
        made["token_ids"], made["prompt_token_ids"] = (
            change["token_ids"],
            change["prompt_token_ids"],
        )
    return made


async def prepare_chat(
    model: ServedModel,
    template: ChatTemplate,
    request: ChatRequest,
    arrived_at: float,
    resume_state: ResumeState | None = None,
    *,
    client: ClientFormat = OF_OPENAI,
) -> ChatFormatter:
    """Render, tokenize and validate. Raises RequestError for requests that can never run.

    ``client``: how it reads answers, which the body may show, too.
    """
    client = OF_MISTRAL if request.has_fields_of_mistral else client
    options = request.stream_options
    asked = None if options is None else options.stream_tool_calls
    whole_calls = request.stream and (client.whole_calls if asked is None else not asked)
    generation = await prepare_conversation(
        model, template, request, arrived_at, resume_state, whole_calls=whole_calls
    )
    return ChatFormatter(generation, request.echoed_prefix, client)


async def prepare_conversation(
    model: ServedModel,
    template: ChatTemplate,
    request: ChatRequest,
    arrived_at: float,
    resume_state: ResumeState | None = None,
    detokenizer: type[ChatDetokenizer] = ChatDetokenizer,
    *,
    whole_calls: bool = False,
) -> Generation:
    """Return the generation of a conversation's answer. ``detokenizer``: of every choice, which
    returns tool calls in pieces unless ``whole_calls``.
    """
    if request.n > model.max_sequences:
        limit = f"{model.max_sequences} sequence{'s' * (model.max_sequences > 1)}"
        raise ParameterError(f"n is {request.n}; one request may have at most {limit}", "n")
    tools = visible_tools(request.tools, request.tool_choice)
    variables, effort = request.chat_template_kwargs, request.reasoning_effort
    ids = await encode_chat(model, template, request.conversation(), tools, variables, effort)
    room = _room(model, ids)
    form, tokenizer = template.reasoning_format, model.tokenizer
    is_open = form is not None and tokenizer is not None and is_open_after(form, tokenizer, ids)
    drops_space = tokenizer is not None and tokenizer.strips_space and not request.continues_message
    grammar = await _grammar(request, template, is_open=is_open, drops_space=drops_space)
    state = resume_state or ResumeState()
    detokenizers = _Detokenizers(
        model, template, request, detokenizer, is_open, bool(grammar), whole_calls
    )
    texts = [detokenizers.make(state.id, index) for index in range(request.n)]
    generation = await _to_generation(model, request, ids, room, grammar)
    kind = "chatcmpl", "chat.completion.chunk"
    return Generation(model, generation, texts, arrived_at, state, kind)


def _room(model: ServedModel, ids: Sequence[int]) -> int:
    """Return how many tokens fit into the context after a prompt. Raises ContextLengthError if none
    does.
    """
    room = model.max_model_len - len(ids)
    if room < 1:
        raise ContextLengthError.of_prompt(len(ids), model.max_model_len).about("messages")
    return room


async def _to_generation(
    model: ServedModel, request: ChatRequest, ids: tuple[int, ...], room: int, grammar: str
) -> GenerationRequest:
    """Validate the parameters that depend on the model, and return the generation request of a
    prompt.
    """
    validate_sampling(model, request)
    prompt_ids = await tokenize_prompts(model, (ids,))
    max_tokens = room if request.max_new_tokens is None else request.max_new_tokens
    num_top = (request.top_logprobs or 0) if request.logprobs else None
    if num_top is not None and request.max_new_tokens is None:  # the answer ends at the bound
        num_scored = max_scored_tokens(num_top, is_streamed=request.stream)
        max_tokens = min(room, max(num_scored // request.n, 1))
    elif num_top is not None:
        num_new = request.n * min(max_tokens, room)
        validate_logprobs(num_new, num_top, is_streamed=request.stream)
    return GenerationRequest(
        prompt_ids=tuple(prompt_ids),
        n=request.n,
        sampling=replace(
            # routers always generate a token
            request.to_sampling_params(max(max_tokens, 1)),
            logprobs=num_top,
            grammar=grammar,
            ignore_eos=ignores_eos(model, request),
        ),
        seed=request.given_seed,
        scores_only=not max_tokens,
        returns_token_ids=request.return_token_ids,
        includes_usage=request.includes_usage,
        counts_in_chunks=request.counts_in_chunks,
        logprobs_format=CHAT_LOGPROBS,
        cache_salt=request.cache_salt or "",
    )


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


async def encode_chat(
    model: ServedModel,
    template: ChatTemplate,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool],
    variables: Mapping[str, Any] | None = None,
    reasoning_effort: str | None = None,
) -> tuple[int, ...]:
    """Return token ids up to where the assistant answers. Raises ParameterError for conversations
    that the format lacks.
    """
    texts = message_texts(messages)
    if tools and template.tool_format is None:
        raise ParameterError(NO_TOOLS, "tools")  # a format without tools would leave them out
    try:
        if model.tokenizer is not None:
            model.tokenizer.check_length("".join(texts), model.max_model_len)
        num_objects = len(messages) + sum(len(message.tool_calls) for message in messages)
        cost = sum(map(len, texts)) + CHARS_PER_OBJECT * num_objects
        if cost <= OFFLOAD_CHARS and not tools:
            return template.encode(messages, (), variables, reasoning_effort=reasoning_effort)
        return await asyncio.to_thread(
            _encode_large, model, template, messages, tools, variables, reasoning_effort
        )
    except RequestError as error:
        is_named = isinstance(error, ParameterError) and not isinstance(error, ContextLengthError)
        raise error if is_named else error.about("messages") from error


def _encode_large(
    model: ServedModel,
    template: ChatTemplate,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool],
    variables: Mapping[str, Any] | None,
    reasoning_effort: str | None,
) -> tuple[int, ...]:
    """Encode on a thread. Raises RequestError for too many tokens, and for texts whose JSON has too
    many elements.

    Templates parse the JSON of tool calls.
    """
    specs = [tool.model_dump(include=TOOL_FIELDS, exclude_none=True) for tool in tools]
    if model.tokenizer is not None:
        text = "".join((*message_texts(messages), json.dumps(specs, ensure_ascii=False)))
        model.tokenizer.check_length(text, model.max_model_len)
        model.tokenizer.check_num_tokens(text, model.max_model_len)
    for message in messages:
        for call in message.tool_calls:
            check_elements(call.arguments.encode(), "the JSON of a tool call", "messages")
        if message.role == "tool" and message.content.lstrip()[:1] in ("[", "{"):
            check_elements(message.content.encode(), "the result of a tool", "messages")
    return template.encode(messages, specs, variables, reasoning_effort=reasoning_effort)
