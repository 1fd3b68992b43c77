"""A request's life inside the router: the only mutable thing in the vocabulary."""

from dataclasses import dataclass, field
from enum import Enum, auto

from tramontane.proto.request import SamplingParams


class SequenceStatus(Enum):
    WAITING = auto()  # not admitted: holds nothing
    RUNNING = auto()  # admitted: pages for its full length are promised
    FINISHED = auto()  # ended or aborted; holds pages until nothing in flight can touch them


@dataclass(slots=True, eq=False)
class Sequence:
    seq_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_len: int  # positions at the most: prompt and output, within the context
    status: SequenceStatus = SequenceStatus.WAITING
    output_ids: list[int] = field(default_factory=list)
    num_dispatched: int = 0  # tokens submitted to the pipeline so far
    num_in_flight: int = 0  # micro-batches submitted and not yet back
    pages: list[list[int]] = field(default_factory=list)  # page ring per window class, in ring order

    @property
    def num_known(self) -> int:
        """Tokens whose ids are known: the prompt and what has been sampled."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_pending(self) -> int:
        """Known tokens not yet submitted; 0 while a decode token waits for its predecessor."""
        return self.num_known - self.num_dispatched

    @property
    def is_prefilling(self) -> bool:
        return self.num_dispatched < len(self.prompt_ids)

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
