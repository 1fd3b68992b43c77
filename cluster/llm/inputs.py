"""What a program gives ``LLM``: sampling parameters, and prompts and conversations, which become token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from tramontane.proto import request
from tramontane.proto.errors import RequestError
from tramontane.router.openai.request_fields import parse_stops
from tramontane.router.tokenization.chat import ChatMessage, ChatTemplate
from tramontane.router.tokenization.loader import load_chat_template, load_tokenizer, require_tokenizer
from tramontane.router.tokenization.tokenizer import encode_prompt

Prompt = str | Sequence[int]
Message = ChatMessage | Mapping[str, str]
ROLES = ("system", "user", "assistant")
MAX_COMPLETIONS = 1024  # per prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(request.SamplingParams):
    """Sampling parameters of a program: those of one sequence, and two that concern a prompt and its text.

    Attributes:
        n: completions per prompt, from 1 to ``MAX_COMPLETIONS``.
        stop: texts, or one text, that end a completion, which does not include them.
    """

    n: int = 1
    stop: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        request.SamplingParams.__post_init__(self)
        if type(self.n) is not int or not 1 <= self.n <= MAX_COMPLETIONS:  # a bool is an int, too
            raise RequestError(f"n is {self.n!r}; it must be a whole number from 1 to {MAX_COMPLETIONS}")
        try:
            object.__setattr__(self, "stop", parse_stops(self.stop))
        except ValueError as error:
            raise RequestError(f"stop: {error}") from None

    def of_choice(self, choice: int) -> request.SamplingParams:
        """Return the parameters of one sequence, as they are sent to the pipeline."""
        values = {field.name: getattr(self, field.name) for field in fields(request.SamplingParams)}
        return request.SamplingParams(**values | {"choice": choice})


class PromptEncoder:
    """Encodes for one model. ``name`` is how errors name a prompt, such as ``prompt 2``.

    Raises:
        CheckpointError: the tokenizer of ``folder`` is damaged, or larger than the model's vocabulary.
    """

    def __init__(self, folder: Path, max_model_len: int, vocab_size: int) -> None:
        self.tokenizer = load_tokenizer(folder, vocab_size)
        self._folder, self._max_model_len, self._vocab_size = folder, max_model_len, vocab_size
        self._template: ChatTemplate | None = None

    def encode(self, prompt: Prompt, name: str) -> tuple[int, ...]:
        """Return the ids of a text, or the ids themselves.

        Raises:
            RequestError: nothing can be generated from it.
            CheckpointError: it is a text, and the folder has no tokenizer.
        """
        if not isinstance(prompt, str) and (wrong := [each for each in prompt if not isinstance(each, int)]):
            raise RequestError(f"{name} has {wrong[0]!r}, which is no token id; give a text, or a list of whole numbers")
        if isinstance(prompt, str) and self.tokenizer is None:
            require_tokenizer(self._folder, self._vocab_size)  # raises the error that names the files
        return encode_prompt(self.tokenizer, prompt, self._max_model_len, self._vocab_size, name)

    def encode_chat(self, messages: Sequence[Message], name: str) -> tuple[int, ...]:
        """Return the ids of a conversation, up to where the assistant answers. Raises RequestError, CheckpointError."""
        if not messages:
            raise RequestError(f"{name} has no messages")
        if self._template is None:
            self._template = load_chat_template(self._folder, require_tokenizer(self._folder, self._vocab_size))
        ids = self._template.encode([_to_chat_message(message, name) for message in messages])
        return encode_prompt(self.tokenizer, ids, self._max_model_len, self._vocab_size, name)


def _to_chat_message(message: Message, name: str) -> ChatMessage:
    if isinstance(message, ChatMessage):
        return message
    role, content = message.get("role"), message.get("content")
    if role not in ROLES or not isinstance(content, str) or len(message) != 2:
        raise RequestError(f'{name}: a message is {{"role": "user", "content": "..."}} with a role of {", ".join(ROLES)}')
    return ChatMessage(role, content)  # type: ignore[arg-type] # one of ROLES
