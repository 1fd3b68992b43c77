"""Check at load that a stage's result for a token depends only on that token and the tokens before
it in its sequence.

Two sequences pass through a layer, once as two whole chunks and then token by token and in other
pieces. All bits must be equal.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tramontane.proto.plan import CachePlan, StagePlan, WindowClass, ring_pages
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.workers.attention.backend import AttentionKernels
from tramontane.workers.attention.metadata import build_attention_metadata
from tramontane.workers.attention.rolling_cache import RollingCache, StageSequences
from tramontane.workers.attention.sparse_attention import make_attention_fn
from tramontane.workers.kernels.fused_ops import EAGER, why_no_kernels
from tramontane.workers.kernels.head_products import HeadProducts
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.kernels.quantized_linear import QuantizedLinear
from tramontane.workers.kernels.row_invariance import (
    RowProducts,
    differing_row_count,
    find_group_dependence,
    find_row_dependence,
    try_invariance,
)
from tramontane.workers.model.rotary import MakeRotaryTables
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.stage.device_backend import DeviceBackend

LENGTHS = (70, 22)  # of the sequences: the keys of the first are in several blocks of every kernel
WHOLE = ((70,), (22,))  # sizes of their chunks, step by step
PIECES = ((1, 1, 2, 24, 1, 38, 1, 2), (7, 1, 1, 13))


def check_batch_invariance(
    plan: StagePlan,
    model: StageModel,
    device: torch.device,
    backend: DeviceBackend,
    rotary_tables: MakeRotaryTables,
) -> bool:
    """Return whether the stage is batch-invariant; False if it need not be, without a try.

    Clears the counts of the experts' tokens. Raises ConfigError if the plan requires batch
    invariance and the stage is not batch-invariant.
    """
    is_invariant = try_invariance(
        plan.label,
        plan.batch_invariant,
        device,
        lambda: _find_dependence(plan, model, device, backend, rotary_tables),
    )
    model.clear_expert_load()
    return is_invariant


def _find_dependence(
    plan: StagePlan,
    model: StageModel,
    device: torch.device,
    backend: DeviceBackend,
    rotary_tables: MakeRotaryTables,
) -> str:
    """Describe an operation whose result depends on the rest of the batch; "" if none does."""
    dtype = getattr(torch, plan.dtype)
    check = _LayerCheck(plan, model, device, dtype, backend.kernels, rotary_tables)
    return (
        _find_kernels_of_pytorch(model, backend)
        or find_row_dependence(model, dtype, device, backend.row_products)
        or _find_in_groups(model, dtype, backend.row_products)
        or check.find_in_layers()
        or check.find_in_head()
    )


def _find_in_groups(model: StageModel, dtype: torch.dtype, products: RowProducts | None) -> str:
    """Check the matrices of one layer's experts and of head products, if ``products`` compute them
    in groups.
    """
    if products is None:
        return ""
    groups: list[tuple[Tensor, Tensor | None]] = []
    if model.experts is not None and (stack := model.experts.first_stack) is not None:
        groups += [(stack.w13_E2FD, stack.w13_scale_E2F), (stack.w2_EDF, stack.w2_scale_ED)]
    heads = (each.weight_HNK for each in model.modules() if isinstance(each, HeadProducts))
    groups += {
        weight_HNK.shape: (weight_HNK, None) for weight_HNK in heads if weight_HNK is not None
    }.values()
    problems = (find_group_dependence(*matrices, dtype, products) for matrices in groups)
    return next((problem for problem in problems if problem), "")


def _find_kernels_of_pytorch(model: StageModel, backend: DeviceBackend) -> str:
    """Describe the operations that PyTorch or a library computes instead of our kernels in C or
    Triton, whose order of summation is known; "" if there are none.
    """
    parts = {
        "products": any(
            isinstance(each, Linear | QuantizedLinear) and each.product is None
            for each in model.modules()
        ),
        "attention": not backend.kernels.is_batch_invariant,
        "norms": backend.fused_ops is EAGER,
    }
    names = [name for name, is_pytorch in parts.items() if is_pytorch]
    return (
        f"PyTorch computes {' and '.join(names)}, since there are no kernels in C"
        f" ({why_no_kernels()})"
        if names
        else ""
    )


@dataclass(frozen=True, slots=True)
class _LayerCheck:
    plan: StagePlan
    model: StageModel
    device: torch.device
    dtype: torch.dtype
    kernels: AttentionKernels
    rotary_tables: MakeRotaryTables

    def find_in_layers(self) -> str:
        """Check one layer of each kind. Other layers have the same shapes, or reuse the keys or the
        key selection of one of these layers.
        """
        args = self.plan.args
        own = [layer for layer in reversed(self.plan.layers) if args.kv_source(layer) == layer]
        own = [layer for layer in own if args.index_source(layer) in (layer, None)]
        first_of_kind = {
            (
                args.windows[layer],
                layer in args.moe_layers,
                args.sparse and args.sparse.rope_layers[layer],
            ): layer
            for layer in own
        }
        for layer in sorted(first_of_kind.values()):
            whole = self._run_layer(layer, WHOLE, is_first_of_stage=True)
            if not all(
                map(torch.equal, whole, self._run_layer(layer, PIECES, is_first_of_stage=False))
            ):
                return (
                    f"layer {layer} gives the tokens of a prompt other bits one by one, or in"
                    " smaller chunks"
                )
        return ""

    def find_in_head(self) -> str:
        if not self.plan.is_last:
            return ""
        hidden_TD = _random(sum(LENGTHS), self.plan.args.dim).to(self.device, self.dtype)
        count = differing_row_count(self.model.head, hidden_TD)
        return (
            f"the logits of {count} of {len(hidden_TD)} tokens have other bits than among all of"
            " them"
            if count
            else ""
        )

    def _run_layer(
        self, layer: int, chunks: tuple[tuple[int, ...], ...], is_first_of_stage: bool
    ) -> tuple[Tensor, ...]:
        """Return a layer's outputs for the sequences, one per token, if they are cut into chunks of
        these sizes.
        """
        plan = _plan_of_layer(self.plan, layer)
        cache, table = (
            RollingCache(plan, self.dtype, self.device),
            StageSequences(plan.cache, len(LENGTHS), self.device),
        )
        inputs = [_random(length, plan.args.dim).to(self.device, self.dtype) for length in LENGTHS]
        done: list[list[tuple[Tensor, ...]]] = [[] for _ in LENGTHS]
        for batch in _micro_batches(plan.cache, chunks):
            table.update(batch)
            metadata = build_attention_metadata(batch, table, self.device, self.kernels.reads_pages)
            attend = make_attention_fn(plan.args, cache, metadata, self.kernels, batch, table)
            h_TD = torch.cat(
                [
                    inputs[chunk.seq_id][chunk.start : chunk.start + chunk.num_tokens]
                    for chunk in batch.chunks
                ]
            )
            added = (h_TD + h_TD, None) if is_first_of_stage else (h_TD, h_TD)
            outs = self.model.block(layer)(*added, self.rotary_tables(metadata.positions), attend)
            if self.model.experts is None and self.model.block(layer).gate is not None:
                outs = (*outs, self.model.choose_experts(layer, outs[1])[1])
                if (shared_TD := self.model.run_shared_experts(layer, outs[1])) is not None:
                    outs = (*outs, shared_TD)
            else:
                outs = (*outs, self.model.feed_forward(layer, outs[1]))
            pieces = zip(
                *(torch.split(out, [chunk.num_tokens for chunk in batch.chunks]) for out in outs),
                strict=True,
            )
            for chunk, piece in zip(batch.chunks, pieces, strict=True):
                done[chunk.seq_id].append(piece)
        return tuple(
            torch.cat(parts)
            for parts in zip(*(piece for pieces in done for piece in pieces), strict=True)
        )


def _random(num_tokens: int, width: int) -> Tensor:
    return torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(num_tokens))


def _plan_of_layer(plan: StagePlan, layer: int) -> StagePlan:
    """Return the plan of a stage with only this layer, whose cache has room for the sequences."""
    size = plan.cache.page_size
    rings = [ring_pages(each.window, size, max(LENGTHS)) for each in plan.cache.classes]
    classes = tuple(
        WindowClass(each.window, ring, len(LENGTHS) * ring)
        for each, ring in zip(plan.cache.classes, rings, strict=True)
    )
    return replace(plan, first_layer=layer, last_layer=layer + 1, cache=CachePlan(size, classes))


def _micro_batches(cache: CachePlan, chunks: tuple[tuple[int, ...], ...]) -> list[MicroBatch]:
    """Return micro-batches; the i-th has the i-th chunk of each sequence. Single tokens come
    last.
    """
    starts, batches = [0] * len(chunks), []
    for step in range(max(map(len, chunks))):
        parts = []
        for seq_id, sizes in enumerate(chunks):
            if step < len(sizes):
                parts.append(_chunk(cache, seq_id, starts[seq_id], sizes[step]))
                starts[seq_id] += sizes[step]
        batches.append(
            MicroBatch(0, step, tuple(sorted(parts, key=lambda chunk: chunk.num_tokens == 1)))
        )
    return batches


def _chunk(cache: CachePlan, seq_id: int, start: int, num_tokens: int) -> Chunk:
    """Return a chunk. Page n of a sequence is the page of its table entry: for sequence 1, with
    rings of 3 pages, 3, 4, 5, 3, ...
    """
    pages = []
    for each in cache.classes:
        indices = each.new_pages(start, start + num_tokens, cache.page_size)
        pages.append(tuple(seq_id * each.ring_pages + n % each.ring_pages for n in indices))
    return Chunk(
        seq_id, start, (0,) * num_tokens, tuple(pages), None if start else SamplingParams(), False
    )
