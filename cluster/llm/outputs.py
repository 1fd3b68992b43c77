"""Results of offline generation, in the shape that vLLM's ``RequestOutput`` has."""

from dataclasses import dataclass

from tramontane.proto.request import FinishReason


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt. ``index`` counts the completions of the same prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """A prompt and its completions. ``prompt`` is None where the prompt was given as token ids."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
