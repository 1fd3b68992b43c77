"""The requests of a benchmark and their times. Pure: the same seed gives the same requests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tramontane.proto.errors import ConfigError

WORDS = (
    "wind",
    "sea",
    "sun",
    "rain",
    "hill",
    "stone",
    "road",
    "house",
    "gate",
    "light",
    "night",
    "day",
)


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request. The prompt is text, of about the given length, if the size of the vocabulary is
    unknown.
    """

    prompt: tuple[int, ...] | str
    num_prompt_tokens: int
    num_new_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests of a benchmark.

    ``range_ratio`` 0: every prompt and answer has exactly its length. 0.5: any length from half of
    it to one and a half.
    """

    num_prompts: int = 64
    input_len: int = 128
    output_len: int = 64
    range_ratio: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len"):
            if not 1 <= (value := getattr(self, name)) <= 2**24:
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {value}; it must be at least 1 and at most"
                    f" {2**24}"
                )
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(
                f"--range-ratio is {self.range_ratio}; it must be 0 (fixed lengths) or more, and"
                " below 1"
            )
        if self.seed < 0:
            raise ConfigError(f"--seed is {self.seed}; bench needs one that is not negative")

    @property
    def max_positions(self) -> int:
        """Positions that a request may need."""
        return self._bounds(self.input_len)[1] + self._bounds(self.output_len)[1]

    def requests(self, number: int, vocab_size: int | None) -> list[BenchRequest]:
        """Return the requests of one round: all rounds have the same lengths, but other tokens, so
        that no prompt cache helps.
        """
        lengths = np.random.default_rng(self.seed)
        ins, outs = (
            lengths.integers(*self._bounds(n), self.num_prompts, endpoint=True)
            for n in (self.input_len, self.output_len)
        )
        tokens = np.random.default_rng((self.seed, number))
        return [
            BenchRequest(_prompt(tokens, int(i), vocab_size), int(i), int(o))
            for i, o in zip(ins, outs, strict=True)
        ]

    def _bounds(self, length: int) -> tuple[int, int]:
        """Return the shortest and the longest length: 96 and 160 for 128 with a ratio of 0.25."""
        return max(1, math.ceil(length * (1 - self.range_ratio))), math.floor(
            length * (1 + self.range_ratio)
        )


def _prompt(
    tokens: np.random.Generator, length: int, vocab_size: int | None
) -> tuple[int, ...] | str:
    if vocab_size is None:
        return " ".join(WORDS[i] for i in tokens.integers(len(WORDS), size=length))
    return tuple(tokens.integers(vocab_size, size=length).tolist())


def arrivals(num_requests: int, rate: float, seed: int) -> Sequence[float]:
    """Return seconds from the start: a Poisson process of ``rate`` requests per second, or
    (infinity) all of them at 0.
    """
    if not rate > 0:
        raise ConfigError(
            f"--request-rate is {rate}; it must be above 0, or inf for all requests at once"
        )
    gaps = np.random.default_rng(seed).exponential(1 / rate, num_requests)
    return np.cumsum(gaps).tolist()  # type: ignore[no-any-return]
