"""One prompt and choice of a request inside the router, with its mutable state."""

from dataclasses import dataclass, field
from enum import Enum, auto

from tramontane.proto.request import NOT_FINITE_TOKEN, FinishReason, SamplingParams
from tramontane.router.scheduling.prefix_cache import BlockHasher
from tramontane.router.scheduling.speculation_state import SpeculationState

Accepted = tuple[int, int, FinishReason | None]  # the fields of a TokenEvent


class SequenceStatus(Enum):
    """The state of a sequence between its arrival and its end."""

    WAITING = auto()  # not admitted: holds no pages
    RUNNING = auto()  # admitted: pages for all its known tokens are reserved
    # releases its pages as soon as no micro-batch in flight can access them, and then waits again
    PREEMPTED = auto()
    FINISHED = auto()  # ended or aborted; holds pages until no micro-batch in flight uses them


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt, the tokens sampled for it so far, and its slot and pages in the pipeline."""

    seq_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    max_len: int  # most positions that prompt and output may have, within the context
    priority: int = 0  # 0 is the most urgent
    owner: int = 0  # number of its API key, 0 without keys
    request_id: str = ""  # for logs
    cache_salt: str = ""  # only sequences with the same one share cached pages
    status: SequenceStatus = SequenceStatus.WAITING
    output_ids: list[int] = field(default_factory=list)
    # tokens whose ids are known: the prompt and the sampled tokens
    num_known: int = field(init=False)
    num_dispatched: int = 0  # tokens submitted to the pipeline so far, or cached there
    num_in_flight: int = 0  # micro-batches submitted and not yet completed
    # tokens after the known ones, to be sampled by steps in flight; later steps may begin with them
    num_placeholders: int = 0
    is_decoding: bool = False  # all tokens known at its admission have been computed
    # pages that it holds per window class, in the order of positions
    pages: list[list[int]] = field(default_factory=list)
    # pages per window class that no other sequence may take
    reserved_pages: list[int] = field(default_factory=list)
    end_ids: frozenset[int] = frozenset()  # tokens that end it, once it is added to a scheduler
    num_paged_positions: int = 0  # positions up to the end of the last of its pages
    num_reserved_positions: int = 0  # positions for which ``reserved_pages`` suffice
    hasher: BlockHasher = field(init=False)
    # its first chunk was submitted; before that, ``num_dispatched`` is the length of its cached
    # prefix
    is_started: bool = False
    num_registered: int = 0  # blocks that are registered with the allocator
    is_cacheable: bool = True  # whether other sequences may begin with its pages
    # how urgent it is now: its priority, or 0 after it was passed over too often
    effective_priority: int = field(init=False)
    goes_first: bool = False  # it had a slot before, or is the next to get one
    # failed micro-batches that shared some of its positions, without a token since
    num_failures: int = 0
    failed_at: tuple[int, int] = (0, 0)  # common positions: the first, and the one after the last
    num_known_at_failure: int = 0
    speculation: SpeculationState | None = None  # set when it decodes, if there is speculation
    num_draft_tokens: int = 0  # drafts that were computed, also before a preemption or a failure
    num_accepted_draft_tokens: int = 0  # draft tokens that were accepted
    # the same for all sequences of a request: the id of its first one
    request_number: int = field(init=False)
    # part of ``num_dispatched``: tokens that are charged to its account, or were cached
    num_charged: int = 0
    num_claimed: int = 0  # known tokens yet to be computed, as counted by its account
    due: int = 0  # in its account's virtual time; the lowest is computed first
    # micro-batches that took more urgent prompts while this was the oldest less urgent one
    num_passes: int = 0

    def __post_init__(self) -> None:
        self.num_known = len(self.prompt_ids) + len(self.output_ids)
        self.effective_priority = self.priority
        self.request_number = self.seq_id
        self.hasher = BlockHasher(self.cache_salt)

    def accept(self, token_id: int) -> int:
        """Append a sampled token; return how many tokens are known now."""
        self.output_ids.append(token_id)
        self.num_known += 1
        return self.num_known

    def accept_tokens(
        self, token_ids: tuple[int, ...], finish: FinishReason | None
    ) -> list[Accepted]:
        """Append sampled tokens up to the first that ends the sequence. ``finish``: the stage's
        reason to end it after the last token, if any.

        Returns the tokens, the last one with the reason if it ends the sequence. A token whose
        logits are not finite ends it with an error, and is not appended.
        """
        accepted: list[Accepted] = []
        for number, token_id in enumerate(token_ids, 1):
            if token_id == NOT_FINITE_TOKEN:
                accepted.append((self.seq_id, token_id, FinishReason.ERROR))
                break
            num_known = self.accept(token_id)
            reason = finish if number == len(token_ids) else None
            if reason is None and token_id in self.end_ids:
                reason = FinishReason.STOP
            elif reason is None and num_known >= self.max_len:
                reason = FinishReason.LENGTH
            accepted.append((self.seq_id, token_id, reason))
            if reason is not None:
                break
        return accepted

    @property
    def account(self) -> int:
        """The number of the account that is charged its tokens: the account of its key, or without
        keys of its request.
        """
        return self.owner or ~self.request_number

    @property
    def is_promoted(self) -> bool:
        """Whether it was passed over too often."""
        return self.effective_priority < self.priority

    @property
    def num_pending(self) -> int:
        """Tokens not yet submitted, known or placeholders; 0 while a decode token waits for its
        predecessor.
        """
        return self.num_known + self.num_placeholders - self.num_dispatched

    @property
    def can_skip_prefix(self) -> bool:
        """Whether its first tokens need not be computed: no values of them are returned."""
        return self.sampling.prompt_logprobs is None and not self.sampling.return_experts

    @property
    def max_cached(self) -> int:
        """Maximum number of cached positions: the very last token is never fed back."""
        return self.max_len - 1

    def known_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Return the tokens at positions start..end-1. Prompt of 3, output of 2: 2..4 are
        prompt[2:5] and output[0:2].
        """
        split = len(self.prompt_ids)
        return self.prompt_ids[start:end] + tuple(
            self.output_ids[max(start - split, 0) : max(end - split, 0)]
        )


def end_ids(sampling: SamplingParams, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """Return the tokens that end a sequence: the model's end tokens unless they are ignored, and
    the client's stop tokens.
    """
    return frozenset((*(() if sampling.ignore_eos else eos_token_ids), *sampling.stop_token_ids))


def arrival_key(sequence: Sequence) -> int:
    """Return the sort key of arrival: the router numbers sequences as they arrive."""
    return sequence.seq_id


def priority_key(sequence: Sequence) -> tuple[int, int]:
    """Return the sort key of scheduling, lowest first: by effective priority, then by arrival."""
    return sequence.effective_priority, sequence.seq_id
