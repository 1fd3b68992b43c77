"""Tokens of a micro-batch: logits are processed, masked and sampled, row by row where drafts change
what the next row may be.

Shape letters: S sampled rows, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tramontane.proto.request import NOT_FINITE_TOKEN, FinishReason, SamplingParams
from tramontane.proto.step import NO_TOKEN
from tramontane.workers.device.pinned_memory import tensor_on
from tramontane.workers.sampling.draft_verifier import SampledRows
from tramontane.workers.sampling.integer_sampler import ChooseTokens
from tramontane.workers.sampling.logits_processors import LogitsProcessor
from tramontane.workers.sampling.sampler import sample
from tramontane.workers.sampling.structured_output import StructuredOutputManager

Finished = tuple[int, FinishReason]


@dataclass(slots=True)
class SampledTokens:
    """What has been sampled: ``token_ids`` [S] on the device, and the sequences whose grammars have
    been advanced already.
    """

    token_ids: Tensor
    advanced: set[int] = field(default_factory=set)
    finished: list[Finished] = field(default_factory=list)


class TokenSampler:
    """Samples the tokens of the last stage's rows, by ``LogitsProcessor`` and
    ``StructuredOutputManager``.

    ``params_of`` returns a sequence's parameters; ``choose``: see ``sample``. Where parameters make
    a row depend on the tokens before it, the rows of drafts are sampled one after the other, for as
    long as drafts are right; all others at once.
    """

    def __init__(
        self,
        logits_processor: LogitsProcessor,
        structured_output: StructuredOutputManager,
        params_of: Callable[[int], SamplingParams],
        choose: ChooseTokens | None,
    ) -> None:
        self._logits_processor, self._structured_output = logits_processor, structured_output
        self._params_of, self._choose = params_of, choose

    def sample(self, logits_SV: Tensor, rows: SampledRows) -> SampledTokens:
        """Sample a token for each row. Waits for the device only where a sequence with drafts
        depends on its tokens.
        """
        if not rows.has_drafts:
            return SampledTokens(self._sample(logits_SV, rows.seq_ids, rows.positions))
        drafted = dict.fromkeys(
            s for s, draft in zip(rows.seq_ids, rows.drafts, strict=True) if draft is not None
        )
        dependent = {seq_id for seq_id in drafted if self._params_of(seq_id).needs_tokens}
        at_once = [
            row
            for row, s in enumerate(rows.seq_ids)
            if s not in dependent or rows.drafts[row] is None
        ]
        sampled = SampledTokens(
            torch.full((len(rows.seq_ids),), NO_TOKEN, dtype=torch.int64, device=logits_SV.device)
        )
        self._sample_rows(logits_SV, rows, at_once, sampled)
        for seq_id in dependent:
            self._sample_in_order(logits_SV, rows, seq_id, sampled)
        return sampled

    def finished(
        self, sampled: SampledTokens, rows: SampledRows, token_ids: Sequence[int]
    ) -> tuple[Finished, ...]:
        """Advance grammars by the accepted tokens; return the sequences that end with them."""
        own = [
            (seq_id, token_id)
            for seq_id, token_id in zip(rows.seq_ids, token_ids, strict=True)
            if token_id not in (NO_TOKEN, NOT_FINITE_TOKEN) and seq_id not in sampled.advanced
        ]
        seq_ids, tokens = [seq_id for seq_id, _ in own], [token_id for _, token_id in own]
        return (*sampled.finished, *self._structured_output.finished(seq_ids, tokens))

    def _sample_in_order(
        self, logits_SV: Tensor, rows: SampledRows, seq_id: int, sampled: SampledTokens
    ) -> None:
        """Sample the rows of one sequence up to the first wrong draft, the end of its grammar, or
        logits that are not finite.
        """
        sampled.advanced.add(seq_id)
        row = rows.seq_ids.index(seq_id)
        while True:
            token_id = int(sampled.token_ids[row])
            if token_id == NOT_FINITE_TOKEN:
                return
            if ended := self._structured_output.finished((seq_id,), (token_id,)):
                sampled.finished += ended
                return
            row += 1
            # another sequence begins with a row without one
            if row == len(rows.seq_ids) or rows.drafts[row] != token_id:
                return
            self._logits_processor.count_draft(seq_id, token_id)
            self._sample_rows(logits_SV, rows, [row], sampled)

    def _sample_rows(
        self, logits_SV: Tensor, rows: SampledRows, chosen: list[int], sampled: SampledTokens
    ) -> None:
        index = tensor_on(chosen, torch.int64, logits_SV.device)
        seq_ids, positions = (
            [rows.seq_ids[row] for row in chosen],
            [rows.positions[row] for row in chosen],
        )
        sampled.token_ids[index] = self._sample(logits_SV[index], seq_ids, positions)

    def _sample(
        self, logits_SV: Tensor, seq_ids: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        changed_SV = self._logits_processor.apply(logits_SV, seq_ids, positions)
        allowed_SV = self._structured_output.apply_masks(changed_SV, seq_ids)
        return sample(allowed_SV, [self._params_of(s) for s in seq_ids], positions, self._choose)
