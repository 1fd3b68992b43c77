"""One stage: its share of the model, its caches, and the order in which steps may run."""

import torch

from tramontane.proto.errors import StaleEpochError
from tramontane.proto.model_folder import Weights
from tramontane.proto.plan import StagePlan
from tramontane.proto.request import Logprobs
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.workers.activation import Activation
from tramontane.workers.attention import CachedAttention, Kernels, SdpaKernels
from tramontane.workers.chosen_experts import asked_experts
from tramontane.workers.grammar import Constraints, ReadPieces
from tramontane.workers.logit_changes import LogitChanges
from tramontane.workers.logprobs import LogprobKeeper
from tramontane.workers.model import StageModel
from tramontane.workers.rolling_cache import RollingCache, SequenceTable
from tramontane.workers.rotary import rotary_tables
from tramontane.workers.sampler import sample
from tramontane.workers.step_index import StepIndex, build_step_index
from tramontane.workers.step_notes import StepNotes
from tramontane.workers.tensor_names import OnTensor, stage_tensors
from tramontane.workers.waiting import Waiting, completed
from tramontane.workers.weights import with_weights

NOT_FENCED = -1


class StageWorker:
    """Runs micro-batches through consecutive layers. Plain and synchronous: one caller, one thread.

    A new worker refuses steps until it is fenced: it may be the reborn successor of
    one whose caches are lost, and an old chain must not run on empty caches. ``read_pieces`` is called, in the last stage,
    when the first answer is to follow a grammar.
    """

    def __init__(self, plan: StagePlan, model: StageModel, device: str = "cpu", read_pieces: ReadPieces = tuple) -> None:
        self.plan = plan
        self.device = torch.device(device)
        self.dtype = getattr(torch, plan.dtype)
        self.model = model
        self.kernels = _kernels_for(self.device)
        self.cache = RollingCache(plan, self.dtype, self.device)
        self.table = SequenceTable(plan.cache, plan.max_num_seqs, self.device)
        self.logit_changes = LogitChanges(plan.args.vocab_size, plan.args.eos_token_ids, self.device)
        self.constraints = Constraints(read_pieces, plan.args.vocab_size, plan.args.eos_token_ids)
        self.logprobs = LogprobKeeper(plan.args.vocab_size)
        self.epoch = NOT_FENCED
        self.num_begun = 0  # steps of this epoch

    @classmethod
    def load(
        cls,
        plan: StagePlan,
        weights: Weights,
        device: str = "cpu",
        on_tensor: OnTensor = lambda _read, _loaded: None,
        read_pieces: ReadPieces = tuple,
    ) -> "StageWorker":
        """Read or make this stage's tensors, and only those, straight to their dtype and device."""
        model = with_weights(
            lambda: StageModel(plan.args, plan.layers, plan.experts_inside),
            plan.args,
            lambda layout: stage_tensors(plan.args, plan.layers, layout, plan.experts_inside),
            weights,
            plan.dtype,
            plan.quantize,
            device,
            on_tensor,
        )
        return cls(plan, model, device, read_pieces)

    def fence(self, epoch: int) -> None:
        """Forget every sequence and obey ``epoch`` from now on; epochs only grow."""
        self.check_newer(epoch)
        self.table.clear()
        self.logit_changes.clear()
        self.constraints.clear()
        self.logprobs.clear()
        self.epoch = epoch
        self.num_begun = 0

    def check_newer(self, epoch: int) -> None:
        """Raises StaleEpochError for an epoch that is not newer than the one that is obeyed."""
        if epoch <= self.epoch:
            raise StaleEpochError(f"stage {self.plan.stage_id} is at epoch {self.epoch}; it cannot go back to {epoch}")

    def check_epoch(self, batch: MicroBatch) -> None:
        """Raises StaleEpochError for a step of another epoch than the stage is fenced to."""
        if batch.epoch != self.epoch or self.epoch == NOT_FENCED:
            raise StaleEpochError(f"stage {self.plan.stage_id} is at epoch {self.epoch}; the step is of epoch {batch.epoch}")

    def check_turn(self, batch: MicroBatch) -> None:
        assert batch.step_id == self.num_begun, f"step {batch.step_id} came where {self.num_begun} was due"

    def step(self, batch: MicroBatch, incoming: Activation | None) -> Activation | StepResult:
        """Run one micro-batch. The first stage takes token ids from the batch, the others hidden states.

        Raises as ``check_epoch`` does, and PipelineError where experts are out of reach.
        """
        with torch.inference_mode():
            return completed(self.open(batch, incoming))

    def open(self, batch: MicroBatch, incoming: Activation | None) -> Waiting[Activation | StepResult]:
        """A step that gives way in every layer, once its experts have been asked. Steps begin in their order, and none may be
        resumed before the one before it is a layer ahead: what it wrote to the next layer's caches may be needed.
        """
        notes = StepNotes()
        self.check_epoch(batch)
        self.check_turn(batch)
        self.num_begun += 1
        self.table.update(batch)
        if self.plan.is_last:
            self.logit_changes.update(batch)
            self.constraints.update(batch)
            self.logprobs.update(batch)
        notes.experts = asked_experts(batch, self.table, self.plan.layers)
        index = build_step_index(batch, self.table, self.device)
        hidden_TD = yield from notes.timed(self._layers(batch, incoming, index, notes))
        token_ids, logprobs = self._sample(batch, hidden_TD, index) if self.plan.is_last else ((), ())
        timings = (*(incoming.timings if incoming else ()), notes.timing(self.plan.stage_id, batch.num_tokens))
        choices = (*(incoming.choices if incoming else ()), *notes.experts.choices())
        if self.plan.is_last:
            return StepResult(
                batch.epoch,
                batch.step_id,
                token_ids,
                timings,
                choices,
                logprobs,
                self.constraints.ended(batch.sampled_ids, token_ids),
            )
        return Activation(hidden_TD, timings, choices)

    def _layers(
        self, batch: MicroBatch, incoming: Activation | None, index: StepIndex, notes: StepNotes
    ) -> Waiting[torch.Tensor]:
        if incoming is None:
            assert self.plan.is_first
            hidden_TD = self.model.embed(index.token_ids)
        else:
            hidden_TD = incoming.hidden_TD.to(self.device)
        assert hidden_TD.shape == (batch.num_tokens, self.plan.args.dim)
        rotary = rotary_tables(index.positions, self.plan.args, self.dtype)
        outcome: torch.Tensor = yield from self.model(hidden_TD, rotary, CachedAttention(self.cache, index, self.kernels), notes)
        return outcome

    def _sample(
        self, batch: MicroBatch, hidden_TD: torch.Tensor, index: StepIndex
    ) -> tuple[tuple[int, ...], tuple[Logprobs, ...]]:
        """Token ids, and what is asked of the probabilities of them and of prompts."""
        of_prompts = tuple(self.logprobs.prompts(batch, hidden_TD, self.model.head))
        seq_ids = batch.sampled_ids
        if not seq_ids:
            return (), of_prompts
        positions = [c.start + c.num_tokens for c in batch.chunks if c.wants_token] + [p + 1 for p in batch.decodes.starts]
        logits_SV = self.model.head(hidden_TD[index.sampled_rows])
        changed_SV = self.logit_changes.apply(logits_SV, seq_ids, positions)
        allowed_SV = self.constraints.masked(changed_SV, seq_ids)
        token_ids = tuple(sample(allowed_SV, [self.table.sampling[s] for s in seq_ids], positions))
        return token_ids, (*of_prompts, *self.logprobs.sampled(logits_SV, token_ids, seq_ids, positions))


def _kernels_for(device: torch.device) -> Kernels:
    if device.type == "cuda":
        from tramontane.workers.xformers_kernels import XformersKernels  # not installed on every platform

        return XformersKernels()
    return SdpaKernels()
