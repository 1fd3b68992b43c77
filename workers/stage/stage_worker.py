"""One stage: its share of the model, its caches, and the order in which steps may run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from tramontane.proto.errors import StaleEpochError
from tramontane.proto.model_folder import WeightSource
from tramontane.proto.plan import StagePlan
from tramontane.proto.request import Logprobs
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.workers.attention.backend import CachedAttention
from tramontane.workers.attention.metadata import AttentionMetadata, build_attention_metadata
from tramontane.workers.attention.rolling_cache import RollingCache, SequenceTable
from tramontane.workers.device.pinned_memory import copy_to_host_async, to_device
from tramontane.workers.model.layers import set_fused_ops
from tramontane.workers.model.rotary import rotary_frequencies, rotary_tables
from tramontane.workers.model.transformer import StageModel, StepCoroutine, run_to_completion
from tramontane.workers.sampling.logits_processors import LogitsProcessor
from tramontane.workers.sampling.logprobs import LogprobTracker
from tramontane.workers.sampling.sampler import sample
from tramontane.workers.sampling.structured_output import LoadVocabulary, StructuredOutputManager
from tramontane.workers.stage.activation import Activation
from tramontane.workers.stage.cuda_graphs import CudaGraphRunner
from tramontane.workers.stage.device_backend import DeviceBackend, backend_for
from tramontane.workers.stage.expert_choices import NO_RECORDER, expert_choice_recorder
from tramontane.workers.stage.pending_outcome import Outcome, PendingOutcome
from tramontane.workers.stage.step_timer import StepTimer
from tramontane.workers.weights.expert_placement import supports_grouped_gemm
from tramontane.workers.weights.loader import load_module
from tramontane.workers.weights.tensor_specs import ProgressCallback, stage_tensors

NOT_FENCED = -1


class StageWorker:
    """Runs micro-batches through consecutive layers. Plain and synchronous: one caller, one thread.

    A new worker refuses steps until it is fenced: it may be the reborn successor of
    one whose caches are lost, and an old chain must not run on empty caches. ``read_pieces`` is called, in the last stage,
    when the first answer is to follow a grammar.
    """

    def __init__(
        self,
        plan: StagePlan,
        model: StageModel,
        device: str = "cpu",
        read_pieces: LoadVocabulary = tuple,
        backend: DeviceBackend | None = None,
    ) -> None:
        self.plan = plan
        self.device = torch.device(device)
        self.dtype = getattr(torch, plan.dtype)
        self.model = model
        model.finalize_weights(self.device)
        self.backend = backend or backend_for(plan, self.device)
        self.cache = RollingCache(plan, self.dtype, self.device, has_scratch=self.backend.pads_decodes)
        self.table = SequenceTable(plan.cache, plan.max_num_seqs, self.device)
        self.frequencies = rotary_frequencies(plan.args).to(self.device)
        set_fused_ops(model, self.backend.fused_ops)
        self.graphs = self._graphs()
        self.logits_processor = LogitsProcessor(plan.args.vocab_size, plan.args.eos_token_ids, self.device)
        self.structured_output = StructuredOutputManager(read_pieces, plan.args.vocab_size, plan.args.eos_token_ids)
        self.logprobs = LogprobTracker(plan.args.vocab_size)
        self.epoch = NOT_FENCED
        self.next_step_id = 0  # steps of this epoch

    @classmethod
    def load(
        cls,
        plan: StagePlan,
        weights: WeightSource,
        device: str = "cpu",
        on_tensor: ProgressCallback = lambda _read, _loaded: None,
        read_pieces: LoadVocabulary = tuple,
    ) -> "StageWorker":
        """Read or make this stage's tensors, and only those, straight to their dtype and device."""
        model = load_module(
            lambda: StageModel(plan.args, plan.layers, plan.experts_inside),
            plan.args,
            lambda layout: stage_tensors(plan.args, plan.layers, layout, plan.experts_inside),
            weights,
            plan.dtype,
            plan.quantize,
            device,
            on_tensor,
            supports_grouped_gemm(plan, device),
        )
        worker = cls(plan, model, device, read_pieces)
        worker.prepare()
        return worker

    def prepare(self) -> None:
        """Before the first step: what would make some steps wait, and changes nothing."""
        with self._inference_context():
            if self.graphs is not None:
                self.graphs.prepare()

    def fence(self, epoch: int) -> None:
        """Forget every sequence and obey ``epoch`` from now on; epochs only grow."""
        self.check_epoch_increases(epoch)
        self.table.clear()
        self.logits_processor.clear()
        self.structured_output.clear()
        self.logprobs.clear()
        self.epoch = epoch
        self.next_step_id = 0

    def check_epoch_increases(self, epoch: int) -> None:
        """Raises StaleEpochError for an epoch that is not newer than the one that is obeyed."""
        if epoch <= self.epoch:
            raise StaleEpochError(f"stage {self.plan.stage_id} is at epoch {self.epoch}; it cannot go back to {epoch}")

    def check_epoch(self, batch: MicroBatch) -> None:
        """Raises StaleEpochError for a step of another epoch than the stage is fenced to."""
        if batch.epoch != self.epoch or self.epoch == NOT_FENCED:
            raise StaleEpochError(f"stage {self.plan.stage_id} is at epoch {self.epoch}; the step is of epoch {batch.epoch}")

    def request_ids_of(self, batch: MicroBatch) -> list[str]:
        """For logs: whose tokens travel in it, as far as they are known; also while it has not been begun."""
        new = {chunk.seq_id: chunk.request_id for chunk in batch.chunks if chunk.request_id}
        known = self.table.request_ids | new
        return [known[seq_id] for seq_id in batch.seq_ids if seq_id in known]

    def check_order(self, batch: MicroBatch) -> None:
        assert batch.step_id == self.next_step_id, f"step {batch.step_id} came where {self.next_step_id} was due"

    def step(self, batch: MicroBatch, incoming: Activation | None) -> Outcome:
        """Run one micro-batch. The first stage takes token ids from the batch, the others hidden states.

        Raises as ``check_epoch`` does, and PipelineError where experts are out of reach.
        """
        return self.launch(batch, incoming).read()

    def launch(self, batch: MicroBatch, incoming: Activation | None) -> PendingOutcome:
        """As ``step``, of which the outcome is to be read: on a GPU the next step can be begun before."""
        with self._inference_context():
            return run_to_completion(self.step_coroutine(batch, incoming))

    def step_coroutine(self, batch: MicroBatch, incoming: Activation | None) -> StepCoroutine[PendingOutcome]:
        """A step that gives way in every layer, once its experts have been asked. Steps begin in their order, and none may be
        resumed before the one before it is a layer ahead: what it wrote to the next layer's caches may be needed.
        """
        notes = StepTimer(self.backend.make_event)
        self.check_epoch(batch)
        self.check_order(batch)
        self.next_step_id += 1
        self.table.update(batch)
        if self.plan.is_last:
            self.logits_processor.update(batch)
            self.structured_output.update(batch)
            self.logprobs.update(batch)
        notes.experts = expert_choice_recorder(batch, self.table, self.plan.layers)
        if self._can_replay(batch, notes):
            assert self.graphs is not None
            done = self.graphs.run(batch, self._hidden(batch, incoming), notes.start)
            if done is not None:
                return self._pending_outcome(batch, incoming, notes, done, ())
        index = build_attention_metadata(batch, self.table, self.device)
        hidden_TD = yield from notes.exclude_waits(self._layers(batch, incoming, index, notes))
        if not self.plan.is_last:
            return self._pending_outcome(batch, incoming, notes, hidden_TD, ())
        of_prompts = tuple(self.logprobs.prompts(batch, hidden_TD, self.model.head))
        logits_SV = self.model.head(hidden_TD[index.sampled_rows]) if batch.sampled_seq_ids else hidden_TD[:0]
        return self._pending_outcome(batch, incoming, notes, logits_SV, of_prompts)

    @contextmanager
    def _inference_context(self) -> Iterator[None]:
        with torch.inference_mode(), torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            yield

    def _graphs(self) -> CudaGraphRunner | None:
        """None where nothing is recorded, or cannot be: experts whose groups the host must know."""
        recorder, experts = self.backend.graph_capture, self.model.experts
        if recorder is None or (self.plan.args.moe and (experts is None or not experts.is_graph_safe)):
            return None
        return CudaGraphRunner(self.plan, self.model, self.cache, self.table, self.backend.kernels, recorder)

    def _can_replay(self, batch: MicroBatch, notes: StepTimer) -> bool:
        """Nothing but decodes, and nobody who asks which experts they choose."""
        return self.graphs is not None and not batch.chunks and bool(batch.decodes.seq_ids) and notes.experts is NO_RECORDER

    def _hidden(self, batch: MicroBatch, incoming: Activation | None) -> torch.Tensor | None:
        if incoming is None:
            assert self.plan.is_first
            return None
        assert incoming.hidden_TD.shape == (batch.num_tokens, self.plan.args.dim)
        return to_device(incoming.hidden_TD, self.device)

    def _layers(
        self, batch: MicroBatch, incoming: Activation | None, index: AttentionMetadata, notes: StepTimer
    ) -> StepCoroutine[torch.Tensor]:
        hidden_TD = self._hidden(batch, incoming)
        notes.start()
        if hidden_TD is None:
            hidden_TD = self.model.embed(index.token_ids)
        rotary = rotary_tables(index.positions, self.plan.args, self.dtype, self.frequencies)
        attend = CachedAttention(self.cache, index, self.backend.kernels)
        outcome: torch.Tensor = yield from self.model(hidden_TD, rotary, attend, notes)
        return outcome

    def _pending_outcome(
        self,
        batch: MicroBatch,
        incoming: Activation | None,
        notes: StepTimer,
        done: torch.Tensor,
        of_prompts: tuple[Logprobs, ...],
    ) -> PendingOutcome:
        """``done``: the hidden states [T, D], or in the last stage the logits [S, V] of what is to be sampled."""
        seq_ids, positions = batch.sampled_seq_ids, _sampled_positions(batch)
        sampled = copy_to_host_async(self._sample(done, seq_ids, positions)) if self.plan.is_last and seq_ids else None
        notes.stop()
        timings, choices = incoming.timings if incoming else (), incoming.choices if incoming else ()

        def read() -> Outcome:
            timing = notes.timing(self.plan.stage_id, batch.num_tokens)
            told = (*timings, timing), (*choices, *notes.experts.collect())
            if not self.plan.is_last:
                return Activation(done, *told)
            token_ids = () if sampled is None else tuple(sampled.tensor.tolist())
            logprobs = (*of_prompts, *self.logprobs.sampled(done, token_ids, seq_ids, positions))
            ended = self.structured_output.finished(seq_ids, token_ids)
            return StepResult(batch.epoch, batch.step_id, token_ids, *told, logprobs, ended)

        is_asked = bool(self.structured_output.num_sequences or self.logprobs.num_sequences) or notes.experts is not NO_RECORDER
        return PendingOutcome(None if self.plan.is_last else done, is_asked, read)

    def _sample(self, logits_SV: torch.Tensor, seq_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """A token id [S] of each sequence, on the device."""
        changed_SV = self.logits_processor.apply(logits_SV, seq_ids, positions)
        allowed_SV = self.structured_output.apply_masks(changed_SV, seq_ids)
        return sample(allowed_SV, [self.table.sampling[s] for s in seq_ids], positions)


def _sampled_positions(batch: MicroBatch) -> list[int]:
    """Of the tokens to be sampled: one further than what their logits were computed from."""
    ends = [chunk.start + chunk.num_tokens for chunk in batch.chunks if chunk.needs_sample]
    return ends + [start + 1 for start in batch.decodes.starts]
