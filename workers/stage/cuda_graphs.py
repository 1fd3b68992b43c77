"""Steps of nothing but decodes, recorded once for each size and replayed: a GPU then waits for no launch.

A recording has fixed shapes and fixed memory. So decodes are padded to a power of two, and page tables to the widths of
``padded_width``. What differs from step to step is put into the same memory before: of each decode its token (or hidden
states, in
stages after the first), its sequence's slot and its position. All else is computed from these on the device.

Three decodes in room for four: tokens [5, 9, 2, 0], slots [0, 3, 1, S], positions [17, 400, 3, 0], where S is the scratch slot:
the fourth one writes and reads the scratch page, and its result is dropped.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tramontane.proto.plan import StagePlan
from tramontane.proto.step import MicroBatch
from tramontane.workers.attention.backend import AttentionKernels, CachedAttention
from tramontane.workers.attention.metadata import AttentionMetadata, build_decode_metadata
from tramontane.workers.attention.page_table import next_power_of_two, padded_width
from tramontane.workers.attention.rolling_cache import RollingCache, SequenceTable
from tramontane.workers.device.pinned_memory import tensor_on
from tramontane.workers.device.self_test import one_line
from tramontane.workers.model.rotary import rotary_frequencies, rotary_tables
from tramontane.workers.model.transformer import StageModel, run_to_completion

logger = logging.getLogger(__name__)

Compute = Callable[[], Tensor]
Size = tuple[int, tuple[int, ...]]  # decodes, and pages of a table for each window class


class GraphCapture(Protocol):
    def capture(self, compute: Compute) -> Compute:
        """What computes the same again, from what is then in the same memory. Its result is overwritten by the next one's."""


class CudaGraphCapture:
    """CUDA graphs. All of them share one pool of memory: no two run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, compute: Compute) -> Compute:
        """Where CUDA breaks a recording off, torch leaves this thread on the recording's stream, and what is computed instead
        would not wait for what other threads ask of the usual one.
        """
        before = torch.cuda.current_stream()
        try:
            return self._recorded(compute)
        finally:
            torch.cuda.set_stream(before)

    def _recorded(self, compute: Compute) -> Compute:
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(2):  # kernels are compiled, libraries make their buffers
                compute()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # other threads go on
            out = compute()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


class CudaGraphRunner:
    """The recordings of one stage: for few keys made when it is loaded, and for more of them when they are first needed: that
    step waits for all that the device has been given, for torch synchronizes before a recording and empties its caches.
    """

    def __init__(
        self,
        plan: StagePlan,
        model: StageModel,
        cache: RollingCache,
        table: SequenceTable,
        kernels: AttentionKernels,
        recorder: GraphCapture,
    ) -> None:
        self._plan, self._model, self._cache, self._table = plan, model, cache, table
        self._kernels, self._recorder = kernels, recorder
        self._device, self._dtype = next(iter(cache.layers.values())).k_NGd.device, getattr(torch, plan.dtype)
        self._frequencies = rotary_frequencies(plan.args).to(self._device)
        most = next_power_of_two(plan.max_num_seqs)
        self._numbers_3B = torch.zeros(3, most, dtype=torch.int64, device=self._device)  # tokens, slots, positions
        self._incoming_BD = torch.zeros(most if not plan.is_first else 0, plan.args.dim, dtype=self._dtype, device=self._device)
        self._recordings: dict[Size, Compute] = {}
        self._has_failed = False

    @property
    def sizes(self) -> list[Size]:
        """Of which there are recordings."""
        return list(self._recordings)

    def prepare(self) -> None:
        """Record the sizes that every server comes to: any number of decodes, of up to ``MIN_KEYS`` keys. The largest first: the
        others find room in its memory. For 64 sequences these are 64, 32, ... 1.
        """
        widths = tuple(padded_width([0], ring) for ring in self._table.rings)
        num_decodes = self._numbers_3B.shape[1]
        while num_decodes and self._record((num_decodes, widths)) is not None:
            num_decodes //= 2

    def run(self, batch: MicroBatch, incoming_BD: Tensor | None, begins: Callable[[], None]) -> Tensor | None:
        """Hidden states [B, D] of the decodes, or the last stage's logits [B, V] in float32. ``batch`` has no chunks.
        ``begins`` is called when its numbers are in their place.

        None where nothing can be recorded: then steps are to be computed.
        """
        decodes = batch.decodes
        num_decodes, starts = len(decodes.seq_ids), list(decodes.starts)
        size = (next_power_of_two(num_decodes), tuple(padded_width(starts, ring) for ring in self._table.rings))
        slots = [self._table.slots[seq_id] for seq_id in decodes.seq_ids]
        recording = self._recordings.get(size) or self._record(size)
        if recording is None:
            return None
        self._copy_inputs(size[0], [list(decodes.token_ids), slots, starts])
        if incoming_BD is not None:
            self._incoming_BD[:num_decodes] = incoming_BD
        begins()
        return recording()[:num_decodes].clone()  # the next one's takes its place

    def _record(self, size: Size) -> Compute | None:
        if self._has_failed:
            return None
        self._copy_inputs(size[0], [[], [], []])  # computing changes nothing then: all of it is padding
        try:
            recording = self._recordings[size] = self._recorder.capture(lambda: self._compute(size))
        except RuntimeError as error:  # what a device cannot record, or has no memory left for
            self._has_failed = True
            logger.warning("%s: no more steps are recorded: %d decodes failed (%s)", self._plan.label, size[0], one_line(error))
            return None
        return recording

    def _copy_inputs(self, num_rows: int, numbers: list[list[int]]) -> None:
        padding = (0, self._table.rings[0].scratch_slot, 0)
        padded = [row + [fill] * (num_rows - len(row)) for row, fill in zip(numbers, padding, strict=True)]
        self._numbers_3B[:, :num_rows] = tensor_on(padded, torch.int64, self._device)

    def _compute(self, size: Size) -> Tensor:
        num_rows, widths = size
        token_ids_B, slots_B, positions_B = self._numbers_3B[:, :num_rows]
        decode = tuple(
            build_decode_metadata(ring, slots_B, positions_B, width, [])
            for ring, width in zip(self._table.rings, widths, strict=True)
        )
        index = AttentionMetadata(token_ids_B, positions_B, 0, torch.arange(0), (None,) * len(decode), decode)
        hidden_BD = self._model.embed(token_ids_B) if self._plan.is_first else self._incoming_BD[:num_rows]
        rotary = rotary_tables(positions_B, self._plan.args, self._dtype, self._frequencies)
        attend = CachedAttention(self._cache, index, self._kernels)
        is_padding_B = slots_B == self._table.rings[0].scratch_slot  # which no expert is to be given
        hidden_BD = run_to_completion(self._model(hidden_BD, rotary, attend, is_padding_T=is_padding_B))
        return self._model.head(hidden_BD) if self._plan.is_last else hidden_BD
