"""One pipeline step: what the router sends down the chain and what comes back.

Stages keep what they were told: a chunk carries only the pages that its sequence
gained since its last chunk, and the sampling parameters only the first time.

What a busy router makes many of are named tuples: made in half the time that a frozen dataclass takes.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tramontane.proto.request import ExpertChoices, FinishReason, Logprobs, SamplingParams


class Chunk(NamedTuple):
    """A run of consecutive tokens of one sequence: a piece of a prompt.

    ``start`` is the absolute position of the first token; a chunk at position 0
    begins its sequence. ``new_pages`` has one tuple per window class, to be
    appended to the sequence's page ring. ``sampling`` comes with the first chunk, and so does
    ``num_prompt``: how many of the sequence's tokens are its prompt. What comes after them is its
    output, also where a sequence that gave its pages back begins anew with both.
    ``wants_token`` is true where the logits of the last token are to be sampled. ``request_id``, for logs, comes
    with the first chunk too.
    """

    seq_id: int
    start: int
    token_ids: tuple[int, ...]
    new_pages: tuple[tuple[int, ...], ...]
    sampling: SamplingParams | None
    needs_sample: bool
    num_prompt: int = 0
    request_id: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class DecodeColumns(NamedTuple):
    """One token of each of several sequences, whose logits are all to be sampled: columns of equal length.

    ``new_pages``: (place in the columns, pages per window class) of the few that gained any.
    """

    seq_ids: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    new_pages: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()


NO_DECODES = DecodeColumns()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens of different sequences that travel together, packed into one row, never padded.

    Chunks of several tokens stand first, then chunks of one, then decodes. ``step_id``
    counts from 0 within an ``epoch``. ``released`` names sequences that have ended
    since the step before; stages forget them before they run the others.
    """

    epoch: int
    step_id: int
    chunks: tuple[Chunk, ...]
    freed_seq_ids: tuple[int, ...] = ()
    decodes: DecodeColumns = NO_DECODES

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks) + len(self.decodes.seq_ids)

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """Sequences of which something travels, in the order of the row."""
        return *(chunk.seq_id for chunk in self.chunks), *self.decodes.seq_ids

    @property
    def sampled_seq_ids(self) -> tuple[int, ...]:
        """Sequences of which a token is to be sampled, in the order of the row."""
        return *(chunk.seq_id for chunk in self.chunks if chunk.needs_sample), *self.decodes.seq_ids


class ExpertTiming(NamedTuple):
    """What one expert actor did for one micro-batch in one stage; ``num_rows`` counts a token once for each of its experts."""

    actor_id: int
    busy_s: float
    num_rows: int


class ExpertUsage(NamedTuple):
    """Of one layer's experts for one micro-batch: from being asked to the last answer, and what each actor did."""

    wait_s: float = 0.0
    actors: tuple[ExpertTiming, ...] = ()


class StageTiming(NamedTuple):
    """When one stage worked on one micro-batch, by that stage's own clock (seconds since 1970).

    ``open_s``: from its start to its end. It is longer than ``busy_s`` where experts are on actors of their own: ``asked_s`` is
    how long those had been asked and had not all answered, in ``experts_busy_s`` of which the busiest of each layer worked.
    """

    stage_id: int
    started_at: float
    busy_s: float
    num_tokens: int
    elapsed_s: float = 0.0
    expert_wait_s: float = 0.0
    experts_busy_s: float = 0.0
    experts: tuple[ExpertTiming, ...] = ()

    @property
    def ended_at(self) -> float:
        return self.started_at + max(self.busy_s, self.elapsed_s)


@dataclass(frozen=True, slots=True)
class StepResult:
    """A token for each of the micro-batch's ``sampled_seq_ids``, and the timing of every stage that it has passed.

    ``choices``: of the experts in the layers that sequences ask for, by their ids inside the router. ``logprobs``: likewise, of
    prompts and of ``token_ids``, for those that ask.
    ``ended``: sequences that end with their token although it does not say so, likewise, and why.
    On the direct link every stage answers by itself: none but the last one has tokens, and timing and choices are its own.
    """

    epoch: int
    step_id: int
    token_ids: tuple[int, ...]
    timings: tuple[StageTiming, ...]
    expert_choices: tuple[ExpertChoices, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    finished: tuple[tuple[int, FinishReason], ...] = ()
