"""Prompts from arguments or standard input, validated before any process is started."""

import sys
from dataclasses import dataclass

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.proto.errors import ConfigError, RequestError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import is_preset, resolve_model_args
from tramontane.proto.request import SamplingParams
from tramontane.router.tokenization.loader import require_tokenizer
from tramontane.router.tokenization.tokenizer import Tokenizer, encode_prompt


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt; ``source`` names it in errors: ``prompt 2``, or ``line 3 of standard input``."""

    text: str
    source: str


def read_prompts(arguments: list[str] | None) -> list[Prompt]:
    """Return the arguments, or without any the lines of standard input that are not blank."""
    if arguments:  # standard input is not read: it may be a pipe that never ends
        return [Prompt(text, f"prompt {number}") for number, text in enumerate(arguments, start=1)]
    lines = enumerate(_lines_of_stdin(), start=1)
    return [
        Prompt(line, f"line {number} of standard input") for number, line in lines if line.strip()
    ]


def _lines_of_stdin() -> list[str]:
    """Return lines by the rules of editors: form feeds and Unicode separators do not end a line."""
    if sys.stdin is None or sys.stdin.isatty():
        return []
    data = sys.stdin.buffer.read()
    try:
        return [line.removesuffix("\r") for line in data.decode("utf-8").split("\n")]
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise RequestError(f"line {number} of standard input is not valid UTF-8") from None


def sampling_params(
    max_tokens: int, temperature: float, top_p: float, top_k: int, seed: int
) -> SamplingParams:
    """Return the sampling parameters of these options. Raises RequestError, which names the
    option.
    """
    try:
        return SamplingParams(max_tokens, temperature, top_p, top_k, seed=seed)
    except RequestError as error:
        name, rest = str(error).split(" ", 1)
        raise RequestError(f"--{name.replace('_', '-')} {rest}") from error


def text_model_args(config: EngineConfig) -> ModelArgs:
    """Return the arguments of a model that may have a tokenizer. Raises UserError."""
    if is_preset(config.model):
        raise ConfigError(
            f"--model {config.model} is a geometry without a tokenizer, so text cannot be turned"
            " into tokens; give a folder with one, or use serve or LLM.generate, which take token"
            " ids as well"
        )
    return resolve_model_args(config.model)


def encode_prompts(
    config: EngineConfig, prompts: list[Prompt]
) -> tuple[Tokenizer, list[tuple[int, ...]]]:
    """Tokenize. Raises UserError for prompts that could never run, before a pipeline is started for
    them.
    """
    args = text_model_args(config)
    context = min(config.max_model_len or args.max_seq_len, args.max_seq_len)
    tokenizer = require_tokenizer(config.model, args.vocab_size)
    if not prompts:
        raise RequestError(
            "there is no prompt; give it as an argument or as lines of standard input"
        )
    return tokenizer, [
        encode_prompt(tokenizer, prompt.text, context, args.vocab_size, prompt.source)
        for prompt in prompts
    ]


def sized_for_prompts(
    config: EngineConfig, prompt_ids: list[tuple[int, ...]], max_tokens: int
) -> EngineConfig:
    """Return the configuration with the cache that these prompts and their answers can fill, no
    more.
    """
    longest = max(map(len, prompt_ids)) + max_tokens
    return config.sized_for(len(prompt_ids), min(longest, text_model_args(config).max_seq_len))
