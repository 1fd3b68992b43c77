"""Inputs of ``LLM``: sampling parameters, and prompts and conversations, which become token ids."""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from tramontane.proto import request
from tramontane.proto.errors import RequestError
from tramontane.router.openai.detokenizer import ChatDetokenizer
from tramontane.router.openai.sampling_values import parse_stops
from tramontane.router.tokenization.chat import (
    ChatMessage,
    ChatTemplate,
    Thought,
    check_effort,
    with_thoughts,
)
from tramontane.router.tokenization.loader import (
    load_chat_template,
    load_tokenizer,
    require_tokenizer,
)
from tramontane.router.tokenization.reasoning_parser import ReasoningParser, is_open_after
from tramontane.router.tokenization.tokenizer import encode_prompt

Prompt = str | Sequence[int]
Message = ChatMessage | Mapping[str, str]
ROLES = ("system", "user", "assistant")
MESSAGE = (
    f'{{"role": "user", "content": "..."}} with a role of {", ".join(ROLES)}; an answer may have'
    ' its "reasoning" too'
)
MAX_COMPLETIONS = 1024  # per prompt
_DEFAULTS = {
    field.name: field.default
    for field in fields(request.SamplingParams)
    if not isinstance(field.default, str | tuple)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(request.SamplingParams):
    """Sampling parameters of a program: the parameters of one sequence, and further ones for a
    prompt and its text.

    Attributes:
        n: completions per prompt, from 1 to ``MAX_COMPLETIONS``.
        stop: texts, or one text, that end a completion, which does not include them.
        stop_token_ids: a list of tokens that end a completion; its text does not include them.
    """

    n: int = 1
    stop: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, default in _DEFAULTS.items():
            value, kind = getattr(self, name), Real if isinstance(default, float) else Integral
            if not isinstance(value, kind) and (value is not None or default is not None):
                raise RequestError(
                    f"{name} is {value!r}; it must be a"
                    f" {'number' if kind is Real else 'whole number'}"
                )
        if not is_list(self.stop_token_ids) or not all(
            type(each) is int and each >= 0 for each in self.stop_token_ids
        ):
            raise RequestError(
                f"stop_token_ids is {reprlib.repr(self.stop_token_ids)}; it must be a list of"
                " token ids"
            )
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        request.SamplingParams.__post_init__(self)
        if type(self.n) is not int or not 1 <= self.n <= MAX_COMPLETIONS:  # a bool is an int, too
            raise RequestError(
                f"n is {self.n!r}; it must be a whole number from 1 to {MAX_COMPLETIONS}"
            )
        try:
            object.__setattr__(self, "stop", parse_stops(self.stop))
        except ValueError as error:
            raise RequestError(f"stop: {error}") from None

    def of_choice(self, choice: int) -> request.SamplingParams:
        """Return the parameters of one sequence, as sent to the pipeline."""
        values = {field.name: getattr(self, field.name) for field in fields(request.SamplingParams)}
        return request.SamplingParams(**values | {"choice": choice})


class PromptEncoder:
    """Encodes for one model. ``name``: the name of a prompt in errors, such as ``prompt 2``.

    Raises:
        CheckpointError: the tokenizer of ``folder`` is damaged, or larger than the model's
            vocabulary.
    """

    def __init__(self, folder: Path, max_model_len: int, vocab_size: int) -> None:
        self.tokenizer = load_tokenizer(folder, vocab_size)
        self._folder, self._max_model_len, self._vocab_size = folder, max_model_len, vocab_size
        self._template: ChatTemplate | None = None

    def encode(self, prompt: Prompt, name: str) -> tuple[int, ...]:
        """Return the ids of a text, or the ids themselves.

        Raises:
            RequestError: it cannot be continued.
            CheckpointError: it is a text, and the folder has no tokenizer.
        """
        if not isinstance(prompt, str) and not is_list(prompt):
            raise RequestError(
                f"{name} is {reprlib.repr(prompt)}; it must be a text, or a list of token ids"
            )
        if not isinstance(prompt, str) and (
            wrong := [each for each in prompt if not isinstance(each, int)]
        ):
            raise RequestError(
                f"{name} has {wrong[0]!r}, which is no token id; give a text, or a list of whole"
                " numbers"
            )
        if isinstance(prompt, str) and self.tokenizer is None:
            # raises the error that names the files
            require_tokenizer(self._folder, self._vocab_size)
        return encode_prompt(self.tokenizer, prompt, self._max_model_len, self._vocab_size, name)

    def encode_chat(
        self, messages: Sequence[Message], name: str, reasoning_effort: str | None = None
    ) -> tuple[int, ...]:
        """Return the ids of a conversation, up to where the assistant answers. Raises RequestError,
        CheckpointError.
        """
        if not is_list(messages):
            raise RequestError(
                f"{name} is {reprlib.repr(messages)}; it must be a list of messages, each {MESSAGE}"
            )
        if not messages:
            raise RequestError(f"{name} has no messages")
        if self._template is None:
            self._template = load_chat_template(
                self._folder, require_tokenizer(self._folder, self._vocab_size)
            )
        check_effort(reasoning_effort, self._template.efforts)
        chat_messages = [_to_chat_message(message, name) for message in messages]
        ids = self._template.encode(chat_messages, reasoning_effort=reasoning_effort)
        return encode_prompt(self.tokenizer, ids, self._max_model_len, self._vocab_size, name)

    def answer_text(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> ChatDetokenizer:
        """Return the detokenizer of the answer to an encoded conversation, for its text and its
        reasoning.
        """
        form, thoughts = self._template and self._template.reasoning_format, None
        if form and self.tokenizer:
            thoughts = ReasoningParser(
                form, self.tokenizer, is_open=is_open_after(form, self.tokenizer, prompt_ids)
            )
        return ChatDetokenizer(
            self.tokenizer,
            sampling.stop,
            sampling.min_tokens,
            stop_token_ids=sampling.stop_token_ids,
            thoughts=thoughts,
        )


def as_prompts(given: Any) -> list[Prompt]:  # the program's input is validated
    """Return a list of prompts, where one text or one list of token ids is one prompt. Raises
    RequestError.
    """
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Iterable) or isinstance(given, Mapping | bytes | bytearray):
        shown = reprlib.repr(given)
        raise RequestError(
            f"prompts is {shown}; it must be a text, a list of token ids, or a list of texts or of"
            " such lists"
        )
    prompts = list(given)
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def as_conversations(given: Any) -> Sequence[Any]:
    """Return a list of conversations, where one list of messages is one conversation;
    ``encode_chat`` checks each.
    """
    return given if is_list(given) and given and is_list(given[0]) else [given]


def is_list(value: object) -> bool:
    """Return whether a value is a list or another sequence, but neither text nor bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _to_chat_message(message: Message, name: str) -> ChatMessage:
    if isinstance(message, ChatMessage):
        return message
    if isinstance(message, Mapping) and {"role", "content"} <= message.keys() <= {
        "role",
        "content",
        "reasoning",
    }:
        role, content, thought = message["role"], message["content"], message.get("reasoning", "")
        if (
            role in ROLES
            and isinstance(content, str)
            and isinstance(thought, str)
            and (not thought or role == "assistant")
        ):
            thoughts = (Thought(thought),) if thought else ()
            # one of ROLES
            return with_thoughts(role, (*thoughts, content))  # type: ignore[arg-type]
    raise RequestError(f"{name} has {reprlib.repr(message)}; a message must be {MESSAGE}")
