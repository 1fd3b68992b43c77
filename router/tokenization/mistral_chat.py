"""Mistral's own instruct formats, by mistral-common: control tokens are inserted as ids, never as
text.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from mistral_common.exceptions import MistralCommonException
from mistral_common.protocol.instruct.normalize import get_normalizer
from mistral_common.protocol.instruct.request import ChatCompletionRequest, ReasoningEffort
from mistral_common.protocol.instruct.validator import ValidationMode, get_validator
from mistral_common.tokens.tokenizers import instruct
from mistral_common.tokens.tokenizers.base import TokenizerVersion
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from pydantic import ValidationError

from tramontane.proto.errors import ParameterError, RequestError
from tramontane.router.tokenization.chat import (
    VARIABLES,
    ChatMessage,
    Role,
    Thought,
    ToolFormat,
    ToolSpec,
    check_effort,
    message_texts,
)
from tramontane.router.tokenization.reasoning_parser import ReasoningFormat
from tramontane.router.tokenization.tokenizer import THINK_MARKERS, validate_text

FORMATS = {
    TokenizerVersion.v1: instruct.InstructTokenizerV1,
    TokenizerVersion.v2: instruct.InstructTokenizerV2,
    TokenizerVersion.v3: instruct.InstructTokenizerV3,
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
        self._mistral: MistralTokenizer[Any, Any, Any, Any, Any] = MistralTokenizer(
            FORMATS[version](tokenizer),
            get_validator(version, ValidationMode.serving),
            get_normalizer(version, tokenizer.model_settings_builder),
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

    @property
    def tool_format(self) -> ToolFormat | None:
        """None in version 1, which has no tools. From version 11 on each call has its own control
        tokens.
        """
        tokenizer = self._mistral.instruct_tokenizer.tokenizer
        if tokenizer.version < TokenizerVersion.v2:
            return None
        args = (
            tokenizer.get_special_token("[ARGS]")
            if tokenizer.version >= TokenizerVersion.v11
            else None
        )
        return ToolFormat(tokenizer.get_special_token("[TOOL_CALLS]"), args)

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """None unless the tokenizer has Mistral's markers of reasoning; tokenizers of version 13
        and later may have them.
        """
        tokenizer, (begin, end) = self._mistral.instruct_tokenizer.tokenizer, THINK_MARKERS[0]
        if not (tokenizer.is_special(begin) and tokenizer.is_special(end)):
            return None
        return ReasoningFormat(
            begin, end, tokenizer.get_special_token(begin), tokenizer.get_special_token(end)
        )

    @property
    def _efforts(self) -> list[str]:
        """The supported values of ``reasoning_effort``; from version 15 on the tokenizer's file may
        list some.
        """
        builder = self._mistral.instruct_tokenizer.tokenizer.model_settings_builder
        efforts = builder and builder.reasoning_effort
        return [str(each) for each in efforts.values] if efforts else []

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

        Raises ParameterError for any ``variables``: the format has none.
        """
        if variables:
            raise ParameterError(
                f"chat_template_kwargs has {next(iter(variables))}, and this model's chat format is"
                " Mistral's own, which has no variables; leave it out",
                VARIABLES,
            )
        check_effort(reasoning_effort, self._efforts)
        self._check_thoughts(messages)
        written: list[Any] = [
            _to_mistral_message(message, f"messages[{index}]")
            for index, message in enumerate(messages)
        ]
        try:
            # The model's name is required and has no effect.
            request: ChatCompletionRequest[Any] = ChatCompletionRequest(
                model="model",
                messages=written,
                tools=list(map(_known_fields, tools)) or None,
                reasoning_effort=(
                    None if reasoning_effort is None else ReasoningEffort(reasoning_effort)
                ),
            )
            with validate_text(
                *message_texts(messages), json.dumps(list(tools), ensure_ascii=False)
            ):
                return tuple(self._mistral.encode_chat_completion(request).tokens)
        except ValidationError as error:
            # ("messages", 0, "user", ...)
            field, index = error.errors(include_url=False, include_input=False)[0]["loc"][:2]
            raise RequestError(
                f"the model's format has no such conversation; look at {field}[{index}]"
            ) from error
        except MistralCommonException as error:
            raise RequestError(
                f"the model's format has no such conversation: {' '.join(str(error).split()):.300}"
            ) from error

    def _check_thoughts(self, messages: Sequence[ChatMessage]) -> None:
        """Raise RequestError for a thought in a format that cannot write it: before version 13, or
        without the markers.
        """
        version = self._mistral.instruct_tokenizer.tokenizer.version
        if version >= TokenizerVersion.v13 and self.reasoning_format is not None:
            return
        thoughtful = next((index for index, message in enumerate(messages) if message.parts), None)
        if thoughtful is not None:
            raise RequestError(
                f"messages[{thoughtful}] has a thought, and this model's format has none; leave the"
                " thought out"
            )


def _known_fields(tool: ToolSpec) -> Any:  # as mistral-common's Tool needs them
    function = {name: value for name, value in tool["function"].items() if value is not None}
    return {
        "type": "function",
        "function": {"parameters": {"type": "object", "properties": {}}} | function,
    }


def _to_mistral_message(message: ChatMessage, name: str) -> dict[str, Any]:
    """Return a message in OpenAI's format. Raises RequestError if its role does not exist."""
    if message.role not in get_args(Role):
        raise RequestError(
            f"{name}.role is {message.role!r:.60}; it must be one of"
            f" {', '.join(map(repr, get_args(Role)))}"
        )
    written: dict[str, Any] = {
        "role": message.role,
        "content": [_chunk(part) for part in message.parts] or message.content,
    }
    if message.tool_calls:
        written["content"] = written["content"] or None
        calls = [
            (call.id, {"name": call.name, "arguments": call.arguments})
            for call in message.tool_calls
        ]
        written["tool_calls"] = [
            {"id": call_id, "type": "function", "function": function} for call_id, function in calls
        ]
    if message.role == "tool":
        written["tool_call_id"] = message.tool_call_id
    if message.is_prefix:
        written["prefix"] = True
    return written


def _chunk(part: str | Thought) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "thinking", "thinking": part.text, "closed": part.closed}
