"""CUDA graphs of decode-only steps: captured once for each size and replayed, so that a GPU does
not wait for kernel launches.

A graph has fixed shapes and fixed memory. So decodes are padded to the sizes of ``padded_rows``,
and page tables to the widths of ``padded_width``. The inputs of a step are copied to the graph's
memory first: for each decode its token (or hidden states, in stages after the first), its
sequence's slot and its position. Everything else is computed from these inputs on the device.

Three decodes, padded to four: tokens [5, 9, 2, 0], slots [0, 3, 1, S], positions [17, 400, 3, 0],
where S is the scratch slot: the fourth row writes and reads the scratch page, and its result is
dropped.

Shape letters: B decodes with padding, D model width, V vocabulary size.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor

from tramontane.proto.plan import StagePlan
from tramontane.proto.step import MicroBatch
from tramontane.workers.attention.backend import AttentionKernels, CachedAttention
from tramontane.workers.attention.metadata import AttentionMetadata, build_decode_metadata
from tramontane.workers.attention.rolling_cache import (
    RollingCache,
    StageSequences,
    next_power_of_two,
    padded_width,
)
from tramontane.workers.device.cuda import fill
from tramontane.workers.device.self_test import one_line
from tramontane.workers.model.rotary import rotary_tables
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.sampling.logits_processors import LastSampledTokens

logger = logging.getLogger(__name__)

Compute = Callable[[], Tensor]
# Captures a computation on a device. The returned function computes it again from the current
# contents of the same memory. The next call, also of another graph, overwrites its result.
GraphCapture = Callable[[Compute], Compute]
Cut = Callable[[], None]
# The same in pieces: each call of the function passed to the computation ends a capture and begins
# the next one. The returned functions compute the pieces again if all are called in order; the last
# one returns the result.
PiecewiseCapture = Callable[[Callable[[Cut], Tensor]], list[Compute]]
# decodes, and pages of a table for each window class, 0 where kernels need no tables
Size = tuple[int, tuple[int, ...]]


def padded_rows(num_decodes: int) -> int:
    """Round up to a number of decodes for which there are graphs: 1, 2, 4, 8, then in steps of 8 to
    64, and then in steps of 16.

    3 -> 4, 9 -> 16, 33 -> 40, 65 -> 80, 129 -> 144, where a power of two would be 256. Matrix
    products take as long for each of the numbers between two multiples of 8.
    """
    if num_decodes <= 8:
        return next_power_of_two(num_decodes)
    step = 8 if num_decodes <= 64 else 16
    return -(-num_decodes // step) * step


class CudaGraphCapture:
    """The ``GraphCapture`` as CUDA graphs. All of them share one memory pool: no two run at the
    same time.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all graphs: torch keeps a workspace of cuBLAS, 32 MiB on Hopper, for each
        # stream that has ever been used.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # All graphs that were begun: torch 2.12 and 2.13 free the stream's workspaces with a graph,
        # also those that other graphs use.
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def __call__(self, compute: Compute) -> Compute:
        """Capture a CUDA graph."""
        (graph,) = self.in_pieces(lambda _cut: compute())
        return graph

    def in_pieces(self, compute: Callable[[Cut], Tensor]) -> list[Compute]:
        """Capture a CUDA graph, or several one after the other. Restores the current stream, also
        after an error.

        Tensors may be made in one graph and read in later ones. Their memory is from the pool, and
        later captures reuse it when the tensors are no longer referenced, as within one graph. If
        CUDA aborts a capture, torch leaves this thread on the capture's stream, and later work
        would not wait for work that other threads launch on the default stream.
        """
        stream = torch.cuda.current_stream()
        try:
            return self._capture(compute)
        finally:
            torch.cuda.set_stream(stream)

    def _capture(self, compute: Callable[[Cut], Tensor]) -> list[Compute]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):  # kernels are compiled, libraries allocate their buffers
                compute(lambda: None)
        torch.cuda.current_stream().wait_stream(self._stream)
        graphs: list[torch.cuda.CUDAGraph] = []
        with ExitStack() as recording:

            def begin() -> None:
                graphs.append(torch.cuda.CUDAGraph())
                self._graphs.append(graphs[-1])
                # Other threads may use CUDA during the capture.
                graph = torch.cuda.graph(
                    graphs[-1], self._pool, self._stream, capture_error_mode="thread_local"
                )
                recording.enter_context(graph)

            def cut() -> None:
                recording.close()
                begin()

            begin()
            out = compute(cut)

        def replay_of(graph: torch.cuda.CUDAGraph) -> Compute:
            def replay() -> Tensor:
                graph.replay()
                return out

            return replay

        return [replay_of(graph) for graph in graphs]


class CudaGraphRunner:
    """The CUDA graphs of one stage.

    ``prepare`` captures all graphs if the attention kernel needs no page tables. Otherwise it
    captures the graphs for few keys; graphs for more keys are captured when they are first needed.
    Such a step waits for all work of the device, because torch synchronizes before a capture and
    empties its caches.
    """

    def __init__(
        self,
        plan: StagePlan,
        model: StageModel,
        cache: RollingCache,
        table: StageSequences,
        kernels: AttentionKernels,
        graph_capture: GraphCapture,
        last_sampled_tokens: LastSampledTokens | None = None,
    ) -> None:
        self._plan, self._model, self._cache, self._table = plan, model, cache, table
        self._latest_tokens = last_sampled_tokens
        self._kernels, self._graph_capture = kernels, graph_capture
        self._device, self._dtype = (
            next(iter(cache.layers.values())).k_NGd.device,
            getattr(torch, plan.dtype),
        )
        self._frequencies = model.rotary_frequencies.to(self._device)
        max_rows = padded_rows(plan.max_num_seqs)
        self._max_rows = max_rows
        self._inputs: dict[int, Tensor] = {}  # [3, B] of tokens, slots and positions, by B
        num_incoming = 0 if plan.is_first else max_rows
        self._incoming_BD = torch.zeros(
            num_incoming, plan.args.dim, dtype=self._dtype, device=self._device
        )
        # Shared by all graphs: memory that a graph returns is never given to another one, and the
        # sizes of 256 decodes would keep ten times the largest size's logits.
        self._logits_BV = torch.empty(
            max_rows if plan.is_last else 0, plan.args.vocab_size, device=self._device
        )
        self._graphs: dict[Size, Compute] = {}
        self._has_failed = False

    @property
    def sizes(self) -> list[Size]:
        """The sizes for which there are graphs."""
        return list(self._graphs)

    def prepare(self) -> None:
        """Capture the sizes that every server needs: any number of decodes, up to ``MIN_KEYS``
        keys.

        The largest comes first, so that the others fit into its memory. For 64 sequences these are
        64, 56, ... 8, 4, 2, 1.
        """
        widths = self._widths([0])
        for num_rows in sorted(
            {padded_rows(n) for n in range(1, self._max_rows + 1)}, reverse=True
        ):
            if self._record((num_rows, widths)) is None:
                return

    def run(
        self, batch: MicroBatch, incoming_BD: Tensor | None, on_inputs_copied: Callable[[], None]
    ) -> Tensor | None:
        """Return hidden states [B, D] of the decodes, or the last stage's logits [B, V] in float32.
        ``batch`` has no chunks.

        Returns None if the size cannot be recorded; the step then has to be computed eagerly.
        """
        decodes = batch.decodes
        num_decodes, starts = len(decodes.seq_ids), list(decodes.starts)
        size = (padded_rows(num_decodes), self._widths(starts))
        slots = [self._table.slots[seq_id] for seq_id in decodes.seq_ids]
        graph = self._graphs.get(size) or self._record(size)
        if graph is None:
            return None
        self._copy_inputs(size[0], [list(decodes.token_ids), slots, starts])
        if incoming_BD is not None:
            self._incoming_BD[:num_decodes] = incoming_BD
        on_inputs_copied()
        return graph()[:num_decodes].clone()  # the next replay overwrites it

    def _widths(self, starts: list[int]) -> tuple[int, ...]:
        needs_tables = self._kernels.needs_page_tables
        return tuple(
            padded_width(starts, ring) if needs_tables else 0 for ring in self._table.rings
        )

    def _record(self, size: Size) -> Compute | None:
        if self._has_failed:
            return None
        # padding only: computing it changes no cache
        self._copy_inputs(size[0], [[], [], []])
        try:
            graph = self._graphs[size] = self._graph_capture(lambda: self._compute(size))
        except RuntimeError as error:  # the device cannot capture it, or has no memory left
            self._has_failed = True
            logger.warning(
                "%s records no more CUDA graphs: capturing %d decodes failed (%s)",
                self._plan.label,
                size[0],
                one_line(error),
            )
            return None
        return graph

    def _copy_inputs(self, num_rows: int, inputs: list[list[int]]) -> None:
        padding = (0, self._table.rings[0].scratch_slot, 0)
        padded = [
            row + [fill] * (num_rows - len(row)) for row, fill in zip(inputs, padding, strict=True)
        ]
        if num_rows not in self._inputs:
            self._inputs[num_rows] = torch.zeros(
                3, num_rows, dtype=torch.int64, device=self._device
            )
        fill(self._inputs[num_rows], padded)

    def _compute(self, size: Size) -> Tensor:
        num_rows, widths = size
        token_ids_B, slots_B, positions_B = self._inputs[num_rows]
        if self._latest_tokens is not None:
            token_ids_B = self._latest_tokens.fill_in(token_ids_B, slots_B)
        decode = tuple(
            build_decode_metadata(ring, slots_B, positions_B, width, [], self._kernels.cache_rows)
            for ring, width in zip(self._table.rings, widths, strict=True)
        )
        metadata = AttentionMetadata(
            token_ids_B, positions_B, 0, torch.arange(0), (None,) * len(decode), decode
        )
        hidden_BD = (
            self._model.embed(token_ids_B) if self._plan.is_first else self._incoming_BD[:num_rows]
        )
        rotary = rotary_tables(
            positions_B,
            self._plan.args,
            self._dtype,
            self._frequencies,
            self._model.fused_ops.cos_sin,
        )
        attend = CachedAttention(self._cache, metadata, self._kernels)
        is_padding_B = slots_B == self._table.rings[0].scratch_slot
        out_BD: Tensor = self._model(hidden_BD, rotary, attend, is_padding_T=is_padding_B)
        if not self._plan.is_last:
            return out_BD
        logits_BV: Tensor = self._model.head(out_BD, self._logits_BV[:num_rows])
        return logits_BV
