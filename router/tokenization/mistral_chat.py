"""Mistral's own instruct formats, by mistral-common: control tokens are inserted as ids, never as
text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from mistral_common.exceptions import MistralCommonException
from mistral_common.protocol.instruct import messages as mistral
from mistral_common.protocol.instruct.chunk import TextChunk, ThinkChunk
from mistral_common.protocol.instruct.normalize import InstructRequestNormalizer, get_normalizer
from mistral_common.protocol.instruct.request import (
    ChatCompletionRequest,
    InstructRequest,
    ReasoningEffort,
)
from mistral_common.protocol.instruct.tool_calls import FunctionCall, Tool
from mistral_common.protocol.instruct.tool_calls import ToolCall as MistralToolCall
from mistral_common.tokens.tokenizers import instruct
from mistral_common.tokens.tokenizers.base import TokenizerVersion
from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from pydantic import ValidationError

from tramontane.proto.errors import RequestError
from tramontane.router.tokenization.chat import (
    ChatMessage,
    Role,
    Thought,
    ToolFormat,
    ToolSpec,
    message_texts,
    supported_effort,
)
from tramontane.router.tokenization.history import HistoryFormat, repair_history
from tramontane.router.tokenization.reasoning_parser import ReasoningFormat
from tramontane.router.tokenization.tokenizer import THINK_MARKERS, validate_text


class _TextBeforeCalls:
    """Writes an answer with a text and calls as the model has written it: the calls after the
    text. mistral-common writes these from version 7 on and refuses them before.
    """

    def encode_assistant_message(
        self, message: mistral.AssistantMessage, is_before_last_user_message: bool
    ) -> list[int]:
        encode: Callable[[mistral.AssistantMessage, bool], list[int]]
        encode = super().encode_assistant_message  # type: ignore[misc]
        if not (message.content and message.tool_calls):
            return encode(message, is_before_last_user_message)
        # Version 2 leaves out the calls before the last message of the user.
        calls = encode(message.model_copy(update={"content": None}), is_before_last_user_message)
        text = message.model_copy(update={"tool_calls": None, "prefix": bool(calls)})
        return encode(text, is_before_last_user_message) + calls

    def _validate_tool_results(self, request: Any) -> None:
        """Allow several results of one answer, each in a block of its own, in version 2, too."""


class _InstructTokenizerV2(_TextBeforeCalls, instruct.InstructTokenizerV2[Any, Any, Any]):
    pass


class _InstructTokenizerV3(_TextBeforeCalls, instruct.InstructTokenizerV3[Any, Any, Any]):
    pass


class _TextBeforeCallsNormalizer(InstructRequestNormalizer[Any, Any, Any, Any, Any]):
    _allow_tool_call_and_content = True


Message = (
    mistral.UserMessage | mistral.AssistantMessage | mistral.ToolMessage | mistral.SystemMessage
)
FORMATS = {
    TokenizerVersion.v1: instruct.InstructTokenizerV1,
    TokenizerVersion.v2: _InstructTokenizerV2,
    TokenizerVersion.v3: _InstructTokenizerV3,
    TokenizerVersion.v7: instruct.InstructTokenizerV7,
    TokenizerVersion.v11: instruct.InstructTokenizerV11,
    TokenizerVersion.v13: instruct.InstructTokenizerV13,
    TokenizerVersion.v15: instruct.InstructTokenizerV15,
}
# The control token that each version of the SentencePiece models introduced, newest first; version
# 1 has none.
INTRODUCED_TOKENS = {
    TokenizerVersion.v7: "[SYSTEM_PROMPT]",
    TokenizerVersion.v3: "[PREFIX]",
    TokenizerVersion.v2: "[INST]",
}


class MistralChatTemplate:
    """Chat template in the format of the tokenizer's version. In version 1 a user who types
    "[INST]" begins an instruction.
    """

    def __init__(self, tokenizer: Tekkenizer | SentencePieceTokenizer) -> None:
        version = tokenizer.version
        self._tokenizer: instruct.InstructTokenizerBase[Any, Any, Any] = FORMATS[version](tokenizer)
        self._normalizer: InstructRequestNormalizer[Any, Any, Any, Any, Any] = (
            get_normalizer(version, tokenizer.model_settings_builder)
            if version >= TokenizerVersion.v7
            else _TextBeforeCallsNormalizer(
                mistral.UserMessage,
                mistral.AssistantMessage,
                mistral.ToolMessage,
                mistral.SystemMessage,
                InstructRequest[Message, Tool],
                None,
            )
        )
        self._history = HistoryFormat(
            self._thinking_roles(),
            has_tools=self.tool_format is not None,
            parses_results=version < TokenizerVersion.v7,
            system_first=version < TokenizerVersion.v7,
        )

    @classmethod
    def from_sentencepiece(cls, path: Path) -> "MistralChatTemplate":
        """Load the template for a SentencePiece model.

        Its version is in the file's name (tokenizer.model.v3), else its control tokens show it.
        """
        tokenizer = SentencePieceTokenizer(path)
        if path.suffix == ".model":
            versions = (
                version
                for version, token in INTRODUCED_TOKENS.items()
                if tokenizer.is_special(token)
            )
            tokenizer = SentencePieceTokenizer(path, next(versions, TokenizerVersion.v1))
        return cls(tokenizer)

    @cached_property  # asked several times per request
    def tool_format(self) -> ToolFormat | None:
        """None in version 1, which has no tools. From version 11 on each call has its own control
        tokens, in version 11 also for its id.
        """
        tokenizer = self._tokenizer.tokenizer
        version, token_id = tokenizer.version, tokenizer.get_special_token
        if version < TokenizerVersion.v2:
            return None
        return ToolFormat(
            token_id("[TOOL_CALLS]"),
            token_id("[ARGS]") if version >= TokenizerVersion.v11 else None,
            token_id("[CALL_ID]") if version == TokenizerVersion.v11 else None,
        )

    @cached_property  # asked several times per request
    def reasoning_format(self) -> ReasoningFormat | None:
        """None unless the tokenizer has Mistral's markers of reasoning; tokenizers of version 13
        and later may have them.
        """
        tokenizer, (begin, end) = self._tokenizer.tokenizer, THINK_MARKERS[0]
        if not (tokenizer.is_special(begin) and tokenizer.is_special(end)):
            return None
        return ReasoningFormat(
            begin, end, tokenizer.get_special_token(begin), tokenizer.get_special_token(end)
        )

    @cached_property  # asked several times per request
    def efforts(self) -> Sequence[str]:
        """The supported values of ``reasoning_effort``; from version 15 on the tokenizer's file may
        list some.
        """
        builder = self._tokenizer.tokenizer.model_settings_builder
        efforts = builder and builder.reasoning_effort
        return [str(each) for each in efforts.values] if efforts else []

    def unused_variables(self, variables: Mapping[str, Any]) -> Sequence[str]:
        """Return all variables: the format has none."""
        return list(variables)

    def encode(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        reasoning_effort: str | None = None,
    ) -> tuple[int, ...]:
        """Return token ids up to the beginning of the assistant's answer. Raises RequestError if
        the format does not support the conversation.

        ``variables`` have no effect: the format has none.
        """
        effort = supported_effort(reasoning_effort, self.efforts)
        history = repair_history(messages, self._history)
        try:
            request: ChatCompletionRequest[Any] = ChatCompletionRequest(
                messages=list(map(_to_mistral_message, history)),
                tools=list(map(_known_fields, tools)) or None,
                reasoning_effort=None if effort is None else ReasoningEffort(effort),
            )
            with validate_text(
                *message_texts(messages), json.dumps(list(tools), ensure_ascii=False)
            ):
                # mistral-common's validator would refuse much that its formats can write.
                normalized = self._normalizer.from_chat_completion_request(request)
                return tuple(self._tokenizer.encode_instruct(normalized).tokens)
        except ValidationError as error:  # whose words are about mistral-common's classes
            raise RequestError("the model's format has no such conversation") from error
        except (MistralCommonException, RecursionError) as error:
            raise RequestError(
                f"the model's format has no such conversation: {' '.join(str(error).split()):.300}"
            ) from error

    def _thinking_roles(self) -> frozenset[Role]:
        """Return whose messages may have thoughts: none before version 13 or without the markers,
        and system messages only in version 13.
        """
        version = self._tokenizer.tokenizer.version
        if version < TokenizerVersion.v13 or self.reasoning_format is None:
            return frozenset()
        if version > TokenizerVersion.v13:
            return frozenset(("assistant",))
        return frozenset(("assistant", "system"))


def _known_fields(tool: ToolSpec) -> Any:  # as mistral-common's Tool needs them
    function = {name: value for name, value in tool["function"].items() if value is not None}
    return {
        "type": "function",
        "function": {"parameters": {"type": "object", "properties": {}}} | function,
    }


def _to_mistral_message(message: ChatMessage) -> Message:
    """Return mistral-common's object. Raises RequestError if the role does not exist."""
    content: Any = [_chunk(part) for part in message.parts] or message.content
    match message.role:
        case "system":
            return mistral.SystemMessage(content=content)
        case "user":
            return mistral.UserMessage(content=content)
        case "assistant":
            calls = [
                MistralToolCall(
                    id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments)
                )
                for call in message.tool_calls
            ]
            return mistral.AssistantMessage(
                content=content or None, tool_calls=calls or None, prefix=message.is_prefix
            )
        case "tool":
            return mistral.ToolMessage(
                content=content, tool_call_id=message.tool_call_id, name=message.name or None
            )
        case _:
            raise RequestError(
                f"a message has the role {message.role!r:.60}; it must be one of"
                f" {', '.join(map(repr, get_args(Role)))}"
            )


def _chunk(part: str | Thought) -> TextChunk | ThinkChunk:
    if isinstance(part, str):
        return TextChunk(text=part)
    return ThinkChunk(thinking=part.text, closed=part.closed)
