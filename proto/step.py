"""One pipeline step: the micro-batch that the router sends through all stages, and the result that
comes back.

Stages are stateful: a chunk carries only the pages that its sequence gained since its last chunk,
and the sampling parameters only the first time. Objects that a busy router creates in large numbers
are named tuples, which take half the time of a frozen dataclass to create.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tramontane.proto.request import (
    NOT_FINITE_TOKEN,
    ExpertChoices,
    FinishReason,
    Logprobs,
    SamplingParams,
)

NO_TOKEN = -1  # the answer for a draft after one that was rejected
# in a decode column: the last token sampled for the sequence, which the router does not know yet
PLACEHOLDER_TOKEN = -1
# a micro-batch that has not returned after this time is given up, unless configured otherwise
STEP_TIMEOUT_S = 30.0

# ---- to the stages


class Chunk(NamedTuple):
    """A run of consecutive tokens of one sequence: a piece of its prompt, or of tokens to be
    recomputed.
    """

    seq_id: int
    # absolute position of the first token; in a sequence's first chunk the length of its cached
    # prefix
    start: int
    token_ids: tuple[int, ...]
    # per window class, the sequence's last pages up to the chunk's end that are new to it
    new_pages: tuple[tuple[int, ...], ...]
    sampling: SamplingParams | None  # in the first chunk only
    needs_sample: bool  # whether a token is sampled from the logits of the last token
    # in the first chunk only; known tokens after them are output, which a preempted sequence
    # computes again
    num_prompt: int = 0
    request_id: str = ""  # for logs, in the first chunk only
    # in the first chunk only: the cached prefix, where sampling depends on it
    skipped_ids: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return len(self.token_ids)


class DecodeColumns(NamedTuple):
    """Single tokens of several sequences, all of which need a sample: columns of equal length.

    A sequence has its last known token, and with speculation drafts after it: rows of the same
    sequence at the next positions. The token sampled from a row is right if all drafts up to this
    row are right; a draft is right if it is the token sampled from the row before it. Sequence 7
    knows the token 40 at position 9, and has the drafts 41 and 42: seq_ids (7, 7, 7), starts (9,
    10, 11), token_ids (40, 41, 42). Sampled are 41, 50, 60: the answer is 41, 50, NO_TOKEN, two
    tokens of the sequence.

    With asynchronous scheduling the last known token may be a ``PLACEHOLDER_TOKEN``: a step in
    flight samples it. If there is one stage, it has the token itself; the first of several stages
    gets the result of the previous step together with this step.

    ``is_lookahead``: all tokens are drafts, and the drafts before them are still in flight.
    Sequence 7 has the drafts 43 and 44 next: starts (12, 13). The first one is right if the last
    token that has been sampled for the sequence is 43, for position 12.
    """

    seq_ids: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    # Only for the few sequences that gained pages: (index of the sequence's last row, pages per
    # window class).
    new_pages: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = ()
    is_lookahead: bool = False

    @property
    def has_placeholders(self) -> bool:
        """Whether any column's token is to be taken from earlier steps."""
        return PLACEHOLDER_TOKEN in self.token_ids


NO_DECODES = DecodeColumns()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens of different sequences that travel together, packed into one row without padding.

    The row has chunks of several tokens first, then chunks of one token, then decodes.
    """

    epoch: int  # number of the fence after which the step was made; stages refuse other epochs
    step_id: int  # counts from 0 within an epoch
    chunks: tuple[Chunk, ...]
    # ended since the previous step; stages drop them before they run the other sequences
    freed_seq_ids: tuple[int, ...] = ()
    decodes: DecodeColumns = NO_DECODES

    @property
    def num_tokens(self) -> int:
        """Tokens of the row."""
        return sum(chunk.num_tokens for chunk in self.chunks) + len(self.decodes.seq_ids)

    @property
    def seq_ids(self) -> tuple[int, ...]:
        """Sequences of the row, in its order; one with drafts is repeated."""
        return *(chunk.seq_id for chunk in self.chunks), *self.decodes.seq_ids

    @property
    def sampled_seq_ids(self) -> tuple[int, ...]:
        """Sequences that get a new token, in the order of the row; one with drafts is repeated."""
        return *(chunk.seq_id for chunk in self.chunks if chunk.needs_sample), *self.decodes.seq_ids


# ---- to a draft model


class DraftRequest(NamedTuple):
    """New text of a sequence for the draft model, and the number of drafts to generate after it.

    The text is the first ``num_kept`` tokens of the old text, and then ``token_ids``. The old text
    is the text of the last call, with the drafts that it returned. The draft model has 5 6 7 and
    has drafted 8 9: tokens 8 and 4 are right. This is ``num_kept`` 4, ``token_ids`` (4,), the text
    5 6 7 8 4.
    """

    seq_id: int  # of the router; unique for the life of the caller
    num_kept: int  # 0 begins the sequence
    token_ids: tuple[int, ...]
    num_tokens: int
    sampling: SamplingParams  # penalties, biases, grammars and stop tokens have no effect on drafts


# ---- from the stages


class ExpertTiming(NamedTuple):
    """Work of one expert actor for one micro-batch in one stage. ``num_rows`` counts a token once
    per chosen expert.
    """

    actor_id: int
    busy_s: float
    num_rows: int


class ExpertUsage(NamedTuple):
    """Work of all experts of one layer for one micro-batch. ``wait_s`` is the time from the
    dispatch to the last result.
    """

    wait_s: float = 0.0
    actors: tuple[ExpertTiming, ...] = ()


class StageTiming(NamedTuple):
    """Work of one stage for one micro-batch, by the stage's own clock."""

    stage_id: int
    started_at: float  # seconds since 1970 by ``steady_time``: a stage's times never go back
    busy_s: float  # seconds for which the stage computed
    num_tokens: int
    # from start to end, longer than ``busy_s`` if expert actors run the experts
    elapsed_s: float = 0.0
    # in which expert actors had rows of this micro-batch that they had not returned
    expert_wait_s: float = 0.0
    # computing time of the busiest expert actor of each layer, summed over the layers
    experts_busy_s: float = 0.0
    experts: tuple[ExpertTiming, ...] = ()  # of each expert actor

    @property
    def ended_at(self) -> float:
        """End of the work, in seconds since 1970."""
        return self.started_at + max(self.busy_s, self.elapsed_s)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one micro-batch. Sequences are named by their ids inside the router.

    On the direct link every stage returns its own result, with its own timing and expert choices;
    only the last stage's has the other fields. On the object store the last stage returns one
    result for all.
    """

    epoch: int
    step_id: int
    # one for each of the micro-batch's ``sampled_seq_ids``, or NO_TOKEN or NOT_FINITE_TOKEN
    token_ids: tuple[int, ...]
    timings: tuple[StageTiming, ...]  # one per stage that the micro-batch has passed
    # of the layers and sequences that requested them
    expert_choices: tuple[ExpertChoices, ...] = ()
    # of prompts and of ``token_ids``, for the sequences that requested them
    logprobs: tuple[Logprobs, ...] = ()
    # (sequence, reason for its end), where its token does not show it
    finished: tuple[tuple[int, FinishReason], ...] = ()

    @property
    def num_sampled(self) -> int:
        """New tokens of all sequences."""
        return (
            len(self.token_ids)
            - self.token_ids.count(NO_TOKEN)
            - self.token_ids.count(NOT_FINITE_TOKEN)
        )

    def with_tokens(self, accepted: Sequence[int]) -> "StepResult":
        """Return the result with the tokens that sequences have accepted: rejected draft tokens do
        not count towards tokens per second.
        """
        return (
            self if len(accepted) == self.num_sampled else replace(self, token_ids=tuple(accepted))
        )
