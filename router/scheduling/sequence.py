"""A request's life inside the router: the only mutable thing in the vocabulary."""

from dataclasses import dataclass, field
from enum import Enum, auto

from tramontane.proto.request import SamplingParams


class SequenceStatus(Enum):
    WAITING = auto()  # not admitted: holds nothing
    RUNNING = auto()  # admitted: pages for all that is known of it are promised
    PREEMPTED = auto()  # gives its pages back as soon as nothing in flight can touch them, and then waits again
    FINISHED = auto()  # ended or aborted; holds pages until nothing in flight can touch them


@dataclass(slots=True, eq=False)
class Sequence:
    seq_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_len: int  # positions at the most: prompt and output, within the context
    priority: int = 0  # 0 is the most urgent
    owner: int = 0  # whose it is: among equals owners take turns
    request_id: str = ""  # for logs
    status: SequenceStatus = SequenceStatus.WAITING
    output_ids: list[int] = field(default_factory=list)
    num_known: int = field(init=False)  # tokens whose ids are known: the prompt and what has been sampled
    num_dispatched: int = 0  # tokens submitted to the pipeline so far
    num_in_flight: int = 0  # micro-batches submitted and not yet back
    is_decoding: bool = False  # all that was known at its admission has been computed
    pages: list[list[int]] = field(default_factory=list)  # page ring per window class, in ring order
    reserved_pages: list[int] = field(default_factory=list)  # pages per window class that nobody else may take
    num_paged_positions: int = 0  # positions for which its pages suffice
    num_reserved_positions: int = 0  # positions for which those that it is promised do
    effective_priority: int = field(init=False)  # how urgent it is now: its priority, or 0 once it has been passed over often
    was_scheduled: bool = False  # it was given a place before, or is the next to get one
    num_failures: int = 0  # of micro-batches that had the same of its positions, without a token since
    failed_at: tuple[int, int] = (0, 0)  # these positions: the first, and the one after the last
    num_known_at_failure: int = 0
    num_skipped: int = 0  # micro-batches that took more urgent prompts while this was the first to be left behind

    def __post_init__(self) -> None:
        self.num_known = len(self.prompt_ids) + len(self.output_ids)
        self.effective_priority = self.priority

    def accept(self, token_id: int) -> int:
        """A token was sampled; returns how many are known now."""
        self.output_ids.append(token_id)
        self.num_known += 1
        return self.num_known

    @property
    def num_pending(self) -> int:
        """Known tokens not yet submitted; 0 while a decode token waits for its predecessor."""
        return self.num_known - self.num_dispatched

    @property
    def max_cached(self) -> int:
        """Positions that are ever cached: the last token of all is never fed back."""
        return self.max_len - 1

    def known_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens at positions start..end-1, from prompt and output alike.

        Prompt of 3, output of 2: positions 2..4 are prompt[2:5] and output[0:2].
        """
        split = len(self.prompt_ids)
        return self.prompt_ids[start:end] + tuple(self.output_ids[max(start - split, 0) : max(end - split, 0)])


def arrival_key(sequence: Sequence) -> int:
    """The router numbers them as they come."""
    return sequence.seq_id


def priority_key(sequence: Sequence) -> tuple[int, int]:
    """The lower, the sooner: by how urgent it is, of equals by arrival."""
    return sequence.effective_priority, sequence.seq_id
