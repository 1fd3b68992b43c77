"""One stage: its layers of the model, its caches, and the order in which steps may run."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from tramontane.proto.errors import StaleEpochError
from tramontane.proto.model_folder import WeightSource
from tramontane.proto.plan import StagePlan
from tramontane.proto.step import PLACEHOLDER_TOKEN, MicroBatch, StepResult
from tramontane.workers.attention.backend import CachedAttention
from tramontane.workers.attention.metadata import AttentionMetadata, build_attention_metadata
from tramontane.workers.attention.rolling_cache import RollingCache, StageSequences
from tramontane.workers.attention.sparse_attention import make_attention_fn
from tramontane.workers.device.compile_watch import report_compilations
from tramontane.workers.device.cuda import to_device
from tramontane.workers.device.numerics import Numerics
from tramontane.workers.device.probe import device_name
from tramontane.workers.experts.remote_experts import (
    RemoteExperts,
    StepCoroutine,
    forward_with_remote_experts,
)
from tramontane.workers.model.grouped_query_attention import AttentionFn
from tramontane.workers.model.layers import set_fused_ops
from tramontane.workers.model.rotary import RotaryTables, make_rotary_tables
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.sampling.logits_processors import LastSampledTokens
from tramontane.workers.sampling.logprobs import Scored
from tramontane.workers.sampling.structured_output import LoadVocabulary
from tramontane.workers.stage.batch_invariance import check_batch_invariance
from tramontane.workers.stage.cuda_graphs import CudaGraphRunner
from tramontane.workers.stage.device_backend import (
    DeviceBackend,
    compile_native_kernels,
    select_backend,
)
from tramontane.workers.stage.hidden_states import HiddenStates, StageInput, StageOutput
from tramontane.workers.stage.last_stage import LastStage
from tramontane.workers.stage.piecewise_graphs import PiecewiseGraphRunner
from tramontane.workers.stage.stage_numerics import stage_numerics
from tramontane.workers.stage.step_profiler import StepProfiler
from tramontane.workers.stage.step_record import (
    NO_RECORDER,
    BegunStep,
    PendingStep,
    StepTimer,
    expert_choice_recorder,
)
from tramontane.workers.stage.warm_up import warm_up_runs
from tramontane.workers.weights.loader import load_module, supports_grouped_gemm
from tramontane.workers.weights.tensor_specs import ProgressCallback, stage_tensors

logger = logging.getLogger(__name__)

NOT_FENCED, WARM_UP_EPOCH = -1, -2


class StageWorker:
    """Run micro-batches through consecutive layers. Plain and synchronous: one caller, one thread.

    A new worker refuses steps until it is fenced: it may be the restart of a worker whose caches
    are lost, and the old chain must not run on empty caches. ``step`` checks that; an executor
    checks it when a step gets its turn, before ``launch`` or ``step_coroutine``. ``read_pieces`` is
    called in the last stage when the first request with a grammar arrives.
    """

    def __init__(
        self,
        plan: StagePlan,
        model: StageModel,
        device: str = "cpu",
        read_pieces: LoadVocabulary = tuple,
        backend: DeviceBackend | None = None,
        on_activity: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.plan = plan
        self.device = torch.device(device)
        self.dtype = getattr(torch, plan.dtype)
        self.model = model
        on_activity("choosing kernels")
        self.backend = backend or select_backend(plan, self.device)
        model.finalize_weights(self.device, self.backend.row_products, self.backend.selector)
        if self.device.type == "cuda":  # on other devices caches take memory as they fill
            on_activity("allocating caches")
        self.cache = RollingCache(
            plan, self.dtype, self.device, has_scratch=self.backend.pads_decodes
        )
        self.table = StageSequences(plan.cache, plan.max_num_seqs, self.device)
        set_fused_ops(
            model,
            self.backend.fused_ops,
            rotates_in_cache=self.backend.kernels.rotate_and_write is not None,
        )
        cos_sin, frequencies = (
            self.backend.fused_ops.cos_sin,
            model.rotary_frequencies.to(self.device),
        )
        self.rotary_tables = make_rotary_tables(plan.args, self.dtype, frequencies, cos_sin)
        # The tokens that the last stage has sampled; the only stage of a pipeline also embeds them
        # (else see ``fill_in``).
        self.last_sampled_tokens = (
            LastSampledTokens(plan.max_num_seqs + 1, self.table.slots, self.device)
            if plan.is_last
            else None
        )
        self.graphs, self.pieces = self._graph_runners()
        self.last_stage = None
        if self.last_sampled_tokens is not None:
            sampling = self.backend.has_exact_sums, self.backend.choose_tokens
            self.last_stage = LastStage(
                plan, self.table, model.head, read_pieces, self.last_sampled_tokens, *sampling
            )
        self.numerics = Numerics()  # until ``load`` has determined them
        self.profiler: StepProfiler | None = None  # of served steps, if requested at ``load``
        self.epoch = NOT_FENCED
        self.next_step_id = 0  # steps of this epoch
        # the sequences that the last step has sampled a token for
        self._sampled_seq_ids: tuple[int, ...] = ()

    @classmethod
    def load(
        cls,
        plan: StagePlan,
        weights: WeightSource,
        device: str = "cpu",
        on_tensor: ProgressCallback = lambda _read, _loaded: None,
        read_pieces: LoadVocabulary = tuple,
        on_activity: Callable[[str], None] = lambda _: None,
    ) -> "StageWorker":
        """Read or make the tensors of this stage only, directly in their dtype and on their device.

        ``on_activity`` is called with the names of later phases, such as ``choosing kernels``.
        """
        # checked first, as it may raise
        profiler = StepProfiler.from_environment(plan, torch.device(device))
        if torch.device(device).type == "cpu":
            compile_native_kernels(plan)
        model = load_module(
            lambda: StageModel(plan.args, plan.layers, plan.experts_inside),
            lambda layout: stage_tensors(plan.args, plan.layers, layout, plan.experts_inside),
            plan,
            weights,
            device,
            on_tensor,
            supports_grouped_gemm(plan, device),
            on_activity,
        )
        worker = cls(plan, model, device, read_pieces, on_activity=on_activity)
        if worker.graphs is not None:
            on_activity("recording CUDA graphs")
        worker.prepare()
        if worker.device.type == "cuda" and worker.has_experts:
            on_activity("computing prompts of every length once")
            worker.warm_up()
        is_invariant = check_batch_invariance(
            plan, model, worker.device, worker.backend, worker.rotary_tables
        )
        kinds = worker.dtype, plan.kv_cache_dtype
        worker.numerics = stage_numerics(
            model, worker.backend, worker.device, *kinds, is_batch_invariant=is_invariant
        )
        if worker.device.type == "cuda":
            report_compilations(plan.label)
        worker.profiler = profiler
        return worker

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a check has shown that a token's bits depend only on that token and the tokens
        before it.
        """
        return self.numerics.is_batch_invariant

    @property
    def device_name(self) -> str:
        """Name of the kind of device."""
        return device_name(str(self.device))

    def prepare(self) -> None:
        """Capture the CUDA graphs of common sizes before the first step. Changes no state."""
        with self._inference_context():
            if self.graphs is not None:
                self.graphs.prepare()
            if self.pieces is not None:
                self.pieces.prepare()

    @property
    def has_experts(self) -> bool:
        """Whether the layers can be computed here: their experts, if any, are not on actors."""
        return self.plan.experts_inside or not self.plan.args.moe

    def warm_up(self) -> None:
        """Compute the steps of ``warm_up.py``, before the first fence. No sequence remains, and
        written pages are not read later.

        Prompts that do not fit into the device's memory are skipped: the micro-batches of requests
        may all be smaller.
        """
        assert self.epoch == NOT_FENCED
        for run in warm_up_runs(self.plan, WARM_UP_EPOCH):
            self._begin_epoch(WARM_UP_EPOCH)
            try:
                for batch in run:
                    hidden_TD = torch.zeros(batch.num_tokens, self.plan.args.dim, dtype=self.dtype)
                    self.step(batch, None if self.plan.is_first else HiddenStates(hidden_TD, ()))
            except torch.OutOfMemoryError:
                why = (
                    "%s has no memory for a micro-batch of %d tokens; the first of this size, if"
                    " any, takes longer"
                )
                logger.warning(why, self.plan.label, batch.num_tokens)
                torch.cuda.empty_cache()  # defragments memory for the other steps
        self._begin_epoch(NOT_FENCED)
        self.model.clear_expert_load()

    def fence(self, epoch: int) -> None:
        """Drop every sequence and accept only steps of ``epoch`` from now on; epochs only grow."""
        self.check_epoch_increases(epoch)
        self._begin_epoch(epoch)

    def _begin_epoch(self, epoch: int) -> None:
        self.table.clear()
        if self.last_stage is not None:
            self.last_stage.clear()
        self.epoch = epoch
        self.next_step_id = 0

    def check_epoch_increases(self, epoch: int) -> None:
        """Raise StaleEpochError for an epoch that is not newer than the current one."""
        if epoch <= self.epoch:
            raise StaleEpochError(
                f"stage {self.plan.stage_id} is at epoch {self.epoch}; it cannot go back to {epoch}"
            )

    def check_epoch(self, batch: MicroBatch) -> None:
        """Raise StaleEpochError for a step of another epoch than the stage's current one."""
        if batch.epoch != self.epoch or self.epoch == NOT_FENCED:
            raise StaleEpochError(
                f"stage {self.plan.stage_id} is at epoch {self.epoch}; the step is of epoch"
                f" {batch.epoch}"
            )

    def request_ids_of(self, batch: MicroBatch) -> list[str]:
        """Return the known request ids of a micro-batch, for logs. The step need not have begun."""
        known = self.table.request_ids | {
            chunk.seq_id: chunk.request_id for chunk in batch.chunks if chunk.request_id
        }
        return [known[seq_id] for seq_id in batch.seq_ids if seq_id in known]

    def check_order(self, batch: MicroBatch) -> None:
        """Assert that this is the next step of the epoch."""
        assert batch.step_id == self.next_step_id, (
            f"step {batch.step_id} came where {self.next_step_id} was due"
        )

    def fill_in(self, batch: MicroBatch, last: StepResult) -> MicroBatch:
        """Replace placeholders in the micro-batch with the tokens of the previous step, which has
        returned.

        The first of several stages has not sampled the tokens itself. Sequences 4 and 7 got the
        tokens 50 and 60, and the columns are (7, placeholder), (9, 30): (7, 60), (9, 30). A
        sequence without a token has ended; it is computed with token 0, and its result is dropped.
        """
        if not batch.decodes.has_placeholders:
            return batch
        assert (
            (last.epoch, last.step_id)
            == (batch.epoch, batch.step_id - 1)
            == (self.epoch, self.next_step_id - 1)
        )
        tokens = dict(zip(self._sampled_seq_ids, last.token_ids, strict=True))
        decodes = batch.decodes
        pairs = zip(decodes.seq_ids, decodes.token_ids, strict=True)
        known = tuple(
            max(tokens[seq_id], 0) if token == PLACEHOLDER_TOKEN else token
            for seq_id, token in pairs
        )
        return replace(batch, decodes=decodes._replace(token_ids=known))

    def step(self, batch: MicroBatch, incoming: StageInput) -> StageOutput:
        """Run one micro-batch. The first stage takes token ids from the batch, the others hidden
        states.

        Raises StaleEpochError for a step of another epoch.
        """
        self.check_epoch(batch)
        self.check_order(batch)
        return self.launch(batch, incoming).read()

    def launch(self, batch: MicroBatch, incoming: StageInput) -> PendingStep:
        """Begin a step as ``step`` does, after a check of its epoch and order. On a GPU the next
        step can be launched before the outcome is read.
        """
        with self._inference_context():
            step = self._begin(batch, incoming)
            if (done := self._replay_graph(step)) is not None:
                return self._sample(step, done)
            metadata = self._attention_metadata(step)
            step.timer.start()
            if self._fits_pieces(step):
                hidden_TD = self._replay_pieces(step, metadata)
            else:
                hidden_TD = self.model(*self._layer_inputs(step, metadata), step.choices.record)
            return self._finish(step, metadata, hidden_TD)

    def step_coroutine(
        self, batch: MicroBatch, incoming: StageInput, experts: RemoteExperts
    ) -> StepCoroutine[PendingStep]:
        """Run a step whose experts are on actors, after a check of its epoch and order; yields in
        every layer after its experts have been called.

        Steps begin in order, and a step may only be resumed while the previous step is a layer
        ahead: it may need the cache entries that the previous step writes in the next layer. Raises
        PipelineError if an expert is permanently unavailable.
        """
        step = self._begin(batch, incoming)
        metadata = self._attention_metadata(step)
        step.timer.start()
        inputs = self._layer_inputs(step, metadata)
        layers = forward_with_remote_experts(
            self.model, experts, *inputs, step.choices.record, step.timer.record_usage
        )
        hidden_TD = yield from step.timer.exclude_waits(layers)
        return self._finish(step, metadata, hidden_TD)

    @contextmanager
    def _inference_context(self) -> Iterator[None]:
        with (
            torch.inference_mode(),
            torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext(),
        ):
            yield

    def _graph_runners(self) -> tuple[CudaGraphRunner | None, PiecewiseGraphRunner | None]:
        """Return the graph runners for decode-only steps and for steps with prompts.

        None if the device has no graphs, or the host must know the experts' groups or the selected
        keys.
        """
        backend, experts = self.backend, self.model.experts
        if self.plan.args.sparse or (
            self.plan.args.moe and (experts is None or not experts.is_graph_safe)
        ):
            return None, None
        graphs = pieces = None
        if backend.graph_capture is not None:
            state, tokens = (
                (self.cache, self.table),
                self.last_sampled_tokens if self.plan.is_first else None,
            )
            graphs = CudaGraphRunner(
                self.plan, self.model, *state, backend.kernels, backend.graph_capture, tokens
            )
        if backend.piecewise_capture is not None:
            pieces = PiecewiseGraphRunner(
                self.plan, self.model, backend.piecewise_capture, self.device
            )
        return graphs, pieces

    # ---- one step, in the order of its parts

    def _begin(self, batch: MicroBatch, incoming: StageInput) -> BegunStep:
        """Start the transfer of the hidden states to the device, and update the state of the
        sequences.
        """
        if self.profiler is not None:
            self.profiler.begin_step()
        timer = StepTimer(self.backend.make_event)
        if isinstance(incoming, StepResult):
            batch, incoming = self.fill_in(batch, incoming), None
        assert (incoming is None) == self.plan.is_first
        if incoming is not None:
            assert incoming.hidden_TD.shape == (batch.num_tokens, self.plan.args.dim)
            incoming = replace(incoming, hidden_TD=to_device(incoming.hidden_TD, self.device))
        self.next_step_id += 1
        self._sampled_seq_ids = batch.sampled_seq_ids
        self.table.update(batch)
        if self.last_stage is not None:
            self.last_stage.update(batch)
        choices = expert_choice_recorder(batch, self.table, self.plan.layers)
        return BegunStep(batch, incoming, timer, choices)

    def _replay_graph(self, step: BegunStep) -> Tensor | None:
        """Compute a decode-only step by a CUDA graph, unless a sequence returns its expert choices.

        Returns hidden states or logits as ``_sample`` takes them, or None if the step has to be
        computed eagerly.
        """
        is_decode_only = not step.batch.chunks and bool(step.batch.decodes.seq_ids)
        if self.graphs is None or not is_decode_only or step.choices is not NO_RECORDER:
            return None
        self.table.flush()
        hidden_TD = None if step.incoming is None else step.incoming.hidden_TD
        return self.graphs.run(step.batch, hidden_TD, step.timer.start)

    def _attention_metadata(self, step: BegunStep) -> AttentionMetadata:
        return build_attention_metadata(
            step.batch, self.table, self.device, self.backend.kernels.reads_pages
        )

    def _fits_pieces(self, step: BegunStep) -> bool:
        """Whether piecewise CUDA graphs compute the layers: in steps with prompts, unless a
        sequence returns its expert choices.
        """
        return (
            self.pieces is not None
            and bool(step.batch.chunks)
            and self.pieces.has_size_for(step.batch.num_tokens)
            and step.choices is NO_RECORDER
        )

    def _replay_pieces(self, step: BegunStep, metadata: AttentionMetadata) -> Tensor:
        """Return the hidden states after the layers, [T, D]."""
        assert self.pieces is not None
        if step.incoming is None:
            begin_T = self._token_ids(step.batch, metadata)
        else:
            begin_T = step.incoming.hidden_TD
        attend = CachedAttention(self.cache, metadata, self.backend.kernels)
        return self.pieces.run(begin_T, metadata.positions, attend)

    def _layer_inputs(
        self, step: BegunStep, metadata: AttentionMetadata
    ) -> tuple[Tensor, RotaryTables, AttentionFn]:
        """Return the arguments of ``StageModel.forward``."""
        if step.incoming is None:
            hidden_TD = self.model.embed(self._token_ids(step.batch, metadata))
        else:
            hidden_TD = step.incoming.hidden_TD
        rotary = self.rotary_tables(metadata.positions)
        attend = make_attention_fn(
            self.plan.args, self.cache, metadata, self.backend.kernels, step.batch, self.table
        )
        return hidden_TD, rotary, attend

    def _token_ids(self, batch: MicroBatch, metadata: AttentionMetadata) -> Tensor:
        """Return the token of each row, [T]; placeholders are replaced by sampled tokens."""
        if not batch.decodes.has_placeholders:
            return metadata.token_ids
        assert self.last_sampled_tokens is not None, "a stage that samples elsewhere has none left"
        assert metadata.decode[0] is not None
        chunks_T, ones_B = metadata.token_ids.tensor_split([metadata.num_prefill_tokens])
        return torch.cat(
            [chunks_T, self.last_sampled_tokens.fill_in(ones_B, metadata.decode[0].slots)]
        )

    def _finish(
        self, step: BegunStep, metadata: AttentionMetadata, hidden_TD: Tensor
    ) -> PendingStep:
        """End a step after the layers: in the last stage with logits and samples."""
        if self.last_stage is None:
            return self._sample(step, hidden_TD)
        prompt_logprobs = self.last_stage.prompt_logprobs(step.batch, hidden_TD)
        logits_SV = self.last_stage.logits(hidden_TD, metadata.sampled_rows)
        return self._sample(step, logits_SV, prompt_logprobs)

    def _sample(
        self, step: BegunStep, done: Tensor, prompt_logprobs: tuple[Scored, ...] = ()
    ) -> PendingStep:
        """Sample in the last stage. ``done``: there the logits [S, V] of the rows to be sampled,
        elsewhere the hidden states [T, D].
        """
        last, read_tokens, is_stateful = self.last_stage, None, step.choices is not NO_RECORDER
        if last is not None:
            read_tokens = last.sample(step.batch, done, prompt_logprobs)
            is_stateful = is_stateful or last.is_stateful
        step.timer.stop()
        hidden_TD = done if last is None else None
        return PendingStep(step, self.plan.stage_id, hidden_TD, read_tokens, is_stateful)
