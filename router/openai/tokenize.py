"""``/tokenize`` and ``/detokenize``, with vLLM's names and formats."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue

from tramontane.proto.errors import ParameterError
from tramontane.router.openai.chat_completion import encode_chat
from tramontane.router.openai.chat_request import (
    Messages,
    Tools,
    check_continuation,
    conversation,
    opens_answer,
)
from tramontane.router.openai.completion_request import Text
from tramontane.router.openai.json_limits import MAX_ITEMS
from tramontane.router.openai.response_models import Answer
from tramontane.router.openai.served_model import ServedModel, offload_if_large
from tramontane.router.structured.guided import MAX_TOKEN_ID
from tramontane.router.structured.request_model import RequestBody, default_if_null
from tramontane.router.tokenization.chat import VARIABLES, ChatTemplate, ReasoningEffort
from tramontane.router.tokenization.template_chat import TemplateVariables
from tramontane.router.tokenization.tokenizer import Tokenizer

PROMPT_OR_MESSAGES: list[JsonValue] = [  # null counts as absent
    {
        "required": ["prompt"],
        "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}},
    },
    {
        "required": ["messages"],
        "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}},
    },
]
# fields that do not apply to a text
OF_MESSAGES = ("tools", "reasoning_effort", VARIABLES, "continue_final_message")
TokenId = Annotated[int, Field(ge=0, lt=MAX_TOKEN_ID)]


class TokenizeRequest(RequestBody):
    """Body of ``POST /tokenize``: either a text, or a conversation up to where the assistant
    answers or continues.
    """

    model_config = ConfigDict(json_schema_extra={"oneOf": PROMPT_OR_MESSAGES})

    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_special_tokens: Literal[True] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[bool, default_if_null(False)] = False


class DetokenizeRequest(RequestBody):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[tuple[TokenId, ...], Field(strict=False, fail_fast=True)]


class Tokens(Answer):
    """Token ids of a text or a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: None


class Detokenized(Answer):
    """Text of token ids."""

    prompt: str


async def tokenize(model: ServedModel, chat: ChatTemplate, request: TokenizeRequest) -> Tokens:
    """Tokenize as completions and chats do. Raises RequestError for input that is certainly longer
    than the context.
    """
    if (request.prompt is None) == (request.messages is None):
        raise ParameterError("give either prompt or messages", "prompt")
    if request.messages is not None:
        continue_final, variables = request.continue_final_message, request.chat_template_kwargs
        check_continuation(
            request.messages,
            continue_final=continue_final,
            opens_answer=opens_answer(request.add_generation_prompt, variables),
        )
        messages = conversation(request.messages, continue_final=continue_final)
        ids = await encode_chat(
            model, chat, messages, request.tools or (), variables, request.reasoning_effort
        )
    else:
        if given := next((name for name in OF_MESSAGES if getattr(request, name)), None):
            raise ParameterError(f"{given} is for messages, not for a prompt; leave it out", given)
        if request.add_generation_prompt is False:
            raise ParameterError(
                "add_generation_prompt is for messages, not for a prompt; leave it out",
                "add_generation_prompt",
            )
        ids = await _encode_text(model, request.prompt or "")
    if len(ids) > MAX_ITEMS:  # the answer is one piece of JSON
        raise ParameterError(
            f"these are {len(ids)} tokens; one request may have at most {MAX_ITEMS}",
            _given(request),
        )
    return Tokens(
        count=len(ids), max_model_len=model.max_model_len, tokens=list(ids), token_strs=None
    )


def _given(request: TokenizeRequest) -> str:
    return "prompt" if request.messages is None else "messages"


async def _encode_text(model: ServedModel, text: str) -> tuple[int, ...]:
    tokenizer = _require_tokenizer(model, "prompt")

    def encode() -> tuple[int, ...]:
        tokenizer.check_length(text, model.max_model_len)
        tokenizer.check_num_tokens(text, model.max_model_len)
        return tokenizer.encode(text)

    return await offload_if_large(len(text), encode)


async def detokenize(model: ServedModel, request: DetokenizeRequest) -> Detokenized:
    """Decode; ids without a piece decode to "". Raises RequestError for more tokens than the
    context has positions.
    """
    tokenizer = _require_tokenizer(model, "tokens")
    if len(request.tokens) > model.max_model_len:
        raise ParameterError(
            f"tokens has {len(request.tokens)}; the context has {model.max_model_len} positions",
            "tokens",
        )
    if unknown := [token_id for token_id in request.tokens if token_id >= model.vocab_size]:
        raise ParameterError(
            f"token {unknown[0]} is not in the model's vocabulary of {model.vocab_size}", "tokens"
        )
    return Detokenized(
        prompt=await offload_if_large(len(request.tokens), lambda: tokenizer.decode(request.tokens))
    )


def _require_tokenizer(model: ServedModel, parameter: str) -> Tokenizer:
    if model.tokenizer is None:
        raise ParameterError(
            "this model has no tokenizer; it accepts and returns token ids only", parameter
        )
    return model.tokenizer
