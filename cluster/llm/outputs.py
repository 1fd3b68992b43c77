"""Results of offline generation, in the shape that vLLM's ``RequestOutput`` has."""

from dataclasses import dataclass

from tramontane.proto.request import FinishReason


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability, and the likeliest tokens at its position: (token id, log-probability), likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt. ``index`` counts the completions of the same prompt.

    ``logprobs`` has an entry per token if ``SamplingParams.logprobs`` asks for them, or else is empty.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """A prompt and its completions. ``prompt`` is None where the prompt was given as token ids.

    ``prompt_logprobs`` has an entry per token of the prompt after the first if ``SamplingParams.prompt_logprobs`` asks for
    them, or else is empty.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
