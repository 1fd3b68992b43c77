"""The end of the last stage: from hidden states to the accepted tokens of a step, with the state of
sampling.

Shape letters: T tokens, S sampled rows, D model width, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from tramontane.proto.plan import StagePlan
from tramontane.proto.request import NOT_FINITE_TOKEN, FinishReason, Logprobs
from tramontane.proto.step import MicroBatch
from tramontane.workers.attention.rolling_cache import StageSequences
from tramontane.workers.device.cuda import copy_to_host_async
from tramontane.workers.sampling.integer_sampler import ChooseTokens
from tramontane.workers.sampling.logits_processors import LastSampledTokens, LogitsProcessor
from tramontane.workers.sampling.logprobs import LogprobTracker, Scored
from tramontane.workers.sampling.structured_output import LoadVocabulary, StructuredOutputManager
from tramontane.workers.sampling.token_sampler import DraftVerifier, SampledRows, TokenSampler


class StepTokens(NamedTuple):
    """The tokens that a step has sampled: its part of a ``StepResult``."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    finished: tuple[tuple[int, FinishReason], ...] = ()


class LastStage:
    """Samples the tokens of steps, in the order of steps. ``head`` returns the logits [S, V] of
    hidden states [S, D].

    ``last_sampled_tokens``: keeps sampled tokens that the router may not know before the next step.
    """

    def __init__(
        self,
        plan: StagePlan,
        table: StageSequences,
        head: Callable[[Tensor], Tensor],
        read_pieces: LoadVocabulary,
        last_sampled_tokens: LastSampledTokens,
        has_exact_sums: bool,
        choose: ChooseTokens | None,
    ) -> None:
        vocab_size, eos_token_ids, device = (
            plan.args.vocab_size,
            plan.args.eos_token_ids,
            table.device,
        )
        self._head, self._latest_tokens = head, last_sampled_tokens
        self.logits_processor = LogitsProcessor(vocab_size, eos_token_ids, device)
        self.structured_output = StructuredOutputManager(read_pieces, vocab_size, eos_token_ids)
        params_of = table.sampling.__getitem__
        self.token_sampler = TokenSampler(
            self.logits_processor, self.structured_output, params_of, choose
        )
        self.draft_verifier = DraftVerifier(is_needed=plan.cache.num_drafts > 0)
        self.logprobs = LogprobTracker(vocab_size, has_exact_sums)

    @property
    def is_stateful(self) -> bool:
        """Whether reading the tokens of a step changes the input of the next step."""
        return bool(self.structured_output.num_sequences or self.logprobs.num_sequences)

    def update(self, batch: MicroBatch) -> None:
        """Remove freed sequences, add new ones, count known tokens."""
        self.logits_processor.update(batch, self._latest_tokens)
        self.structured_output.update(batch)
        self.draft_verifier.update(batch)
        self.logprobs.update(batch)

    def clear(self) -> None:
        """Drop all sequences; results of steps that have begun are discarded."""
        self.logits_processor.clear()
        self.structured_output.clear()
        self.draft_verifier.clear()
        self.logprobs.clear()

    def prompt_logprobs(self, batch: MicroBatch, hidden_TD: Tensor) -> tuple[Scored, ...]:
        """Return the log-probabilities of prompts that request them."""
        return tuple(self.logprobs.prompts(batch, hidden_TD, self._head))

    def logits(self, hidden_TD: Tensor, sampled_rows: Tensor) -> Tensor:
        """Return the logits [S, V] of the rows to be sampled."""
        return self._head(hidden_TD[sampled_rows]) if len(sampled_rows) else hidden_TD[:0]

    def sample(
        self, batch: MicroBatch, logits_SV: Tensor, prompt_logprobs: tuple[Scored, ...]
    ) -> Callable[[], StepTokens]:
        """Sample a token for each row; return a function that reads the tokens, waits for the
        device, and is called once.

        A sequence whose logits are not finite ends with an error, also if these are the logits of
        its prompt's log-probabilities.
        """
        of_prompts = tuple(found for _, found in prompt_logprobs if found is not None)
        failed = {seq_id for seq_id, found in prompt_logprobs if found is None}
        if not batch.sampled_seq_ids:
            return lambda: StepTokens(
                logprobs=of_prompts,
                finished=tuple((seq_id, FinishReason.ERROR) for seq_id in failed),
            )
        rows = SampledRows.of(batch)
        sampled = self.token_sampler.sample(logits_SV, rows)
        verdict = self.draft_verifier.begin(rows, copy_to_host_async(sampled.token_ids))
        if not rows.has_drafts:
            self._latest_tokens.put(rows.seq_ids, sampled.token_ids)

        def read() -> StepTokens:
            token_ids = self.draft_verifier.accepted(verdict)
            of_rows = dict(
                self.logprobs.sampled(logits_SV, token_ids, rows.seq_ids, rows.positions)
            )
            logprobs = (*of_prompts, *(found for found in of_rows.values() if found is not None))
            if failed or None in of_rows.values():
                lost = {
                    row
                    for row, seq_id in enumerate(rows.seq_ids)
                    if seq_id in failed or of_rows.get(row, ()) is None
                }
                token_ids = tuple(
                    NOT_FINITE_TOKEN if row in lost else token_id
                    for row, token_id in enumerate(token_ids)
                )
            finished = self.token_sampler.finished(sampled, rows, token_ids)
            if failed or NOT_FINITE_TOKEN in token_ids:
                ended = failed.union(
                    s
                    for s, token in zip(rows.seq_ids, token_ids, strict=True)
                    if token == NOT_FINITE_TOKEN
                )
                finished = (*finished, *((seq_id, FinishReason.ERROR) for seq_id in ended))
            return StepTokens(token_ids, logprobs, finished)

        return read
