"""Mixture of experts (Mixtral, arXiv 2401.04088, section 2.1): grouping tokens by expert, running
experts, counting tokens.

``ExpertPermutation`` sorts the choices of a micro-batch by expert, ``LocalExperts`` runs the
experts of a stage on the groups, and ``ExpertTokenCounter`` adds up how many tokens each expert was
given.

Shape letters: T tokens, k experts of each, C = T * k choices, D model width, E experts of a layer,
L layers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from tramontane.proto.model_args import ModelArgs
from tramontane.proto.plan import ExpertId
from tramontane.workers.device.kernel_selection import WITHOUT_MEMORY, KernelSelector
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.kernels.packed_linear import PackedLinear
from tramontane.workers.kernels.quantized_linear import QuantizedLinear
from tramontane.workers.kernels.row_invariance import RowProducts
from tramontane.workers.model.expert_kernels import (
    MAX_SMALL_BATCH_ROWS,
    ProductBySize,
    StackedExperts,
    as_stacked_view,
    select_gpu_kernels,
)
from tramontane.workers.model.layers import FeedForward


def group_sizes(ends: Sequence[int]) -> list[int]:
    """Return the sizes of groups with these ends: groups that end at 2, 2 and 5 have 2, 0 and 3
    rows.
    """
    return [end - start for start, end in pairwise([0, *ends])]


@dataclass(frozen=True, slots=True)
class ExpertPermutation:
    """A micro-batch's choices sorted by expert, so that each expert runs once, on its group.

    Example with k = 2: three tokens choose [[1, 0], [1, 2], [0, 1]]. Flattened choices [1, 0, 1, 2,
    0, 1] sort (stably) to choice numbers [1, 4, 0, 2, 5, 3], that is tokens [0, 2, 0, 1, 2, 1] in
    groups of 2, 3 and 1, which end at 2, 5 and 6. Choices of nonexistent experts, which padding
    has, come after all groups.

    Only ``sizes`` reads tensors on the host.
    """

    order_C: Tensor
    offsets_E: Tensor  # int32, where each group ends

    @classmethod
    def of(cls, expert_ids_Tk: Tensor, num_experts: int) -> "ExpertPermutation":
        """Sort the choices of T tokens."""
        sorted_C, order_C = torch.sort(expert_ids_Tk.reshape(-1), stable=True)
        experts_E = torch.arange(num_experts, device=sorted_C.device)
        return cls(order_C, torch.searchsorted(sorted_C, experts_E, right=True, out_int32=True))

    @property
    def sizes(self) -> list[int]:
        """The sizes of the groups, one per expert. On a GPU this waits for the device."""
        return group_sizes(self.offsets_E.tolist())

    def permute(self, hidden_TD: Tensor) -> Tensor:
        """Return the token of each choice, group after group: [C, D]."""
        return hidden_TD[self.order_C // (len(self.order_C) // len(hidden_TD))]

    def combine(self, done_CD: Tensor, weights_Tk: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, [T, D]; the order of addition is fixed.

        Rows without an expert may be missing at the end. The result for their tokens is undefined.
        """
        by_choice_CD = done_CD.new_empty(len(self.order_C), done_CD.shape[1])
        by_choice_CD.index_copy_(0, self.order_C[: len(done_CD)], done_CD)
        return (by_choice_CD.view(*weights_Tk.shape, -1) * weights_Tk[..., None]).sum(dim=1)


def run_experts(experts: Sequence[FeedForward], sizes: Sequence[int], rows_CD: Tensor) -> Tensor:
    """Run each expert on its group of rows: sizes [2, 3] are rows 0 and 1, and 2 to 4. Experts
    without rows do not run.

    Rows after the last group are left out of the result: [sum of sizes, D]. Packed experts are two
    products of all groups, with the same results.
    """
    rows_CD = rows_CD[: sum(sizes)]
    if not len(rows_CD):
        return rows_CD
    w13 = [expert.w13 for expert in experts if isinstance(expert.w13, PackedLinear)]
    w2 = [expert.w2 for expert in experts if isinstance(expert.w2, PackedLinear)]
    if w13 and w2:  # a model's matrices are all packed, or all not packed
        silu_and_mul = experts[0].fused_ops.silu_and_mul
        gate_up_C2F = w13[0].matmul.multiply_groups(rows_CD, w13, sizes)
        return w2[0].matmul.multiply_groups(silu_and_mul(gate_up_C2F), w2, sizes)
    groups = torch.split(rows_CD, list(sizes))
    return torch.cat(
        [expert(group) for expert, group in zip(experts, groups, strict=True) if len(group)]
    )


def layers_with_experts(args: ModelArgs, layers: range) -> range:
    """Return the layers with experts among consecutive layers: the first layers of a model may have
    none.
    """
    return range(max(layers.start, args.moe_layers.start), min(layers.stop, args.moe_layers.stop))


class ExpertSet(nn.Module):
    """Some experts of some layers, by their global numbers."""

    def __init__(self, args: ModelArgs, expert_ids: Iterable[ExpertId]) -> None:
        super().__init__()
        by_layer: dict[str, nn.ModuleDict] = {}
        for layer, expert in expert_ids:
            by_layer.setdefault(str(layer), nn.ModuleDict())[str(expert)] = FeedForward(
                args.dim, args.expert_dim
            )
        self.layers = nn.ModuleDict(by_layer)

    def expert(self, expert_id: ExpertId) -> FeedForward:
        """Return one expert."""
        experts = self.layers[str(expert_id.layer)]
        assert isinstance(experts, nn.ModuleDict)
        expert = experts[str(expert_id.expert)]
        assert isinstance(expert, FeedForward)
        return expert


class LocalExperts(ExpertSet):
    """All experts of a stage's layers, inside the stage."""

    def __init__(self, args: ModelArgs, layers: range) -> None:
        num_experts = args.moe.num_experts if args.moe else 0
        own = layers_with_experts(args, layers)
        super().__init__(
            args, (ExpertId(layer, expert) for layer in own for expert in range(num_experts))
        )
        self._stacks: dict[int, StackedExperts] = {}

    def finalize_weights(
        self,
        dtype: torch.dtype,
        products: RowProducts | None = None,
        selector: KernelSelector = WITHOUT_MEMORY,
    ) -> None:
        """Use grouped products, once weights are loaded, in the layers whose experts are contiguous
        in memory.

        These are ``products``, or else the fastest that ``selector`` finds for hidden states of
        this dtype.
        """
        stacks = {
            int(layer): _stack_weights(list(experts.children()))
            for layer, experts in self.layers.items()
        }
        found = {layer: stack for layer, stack in stacks.items() if stack is not None}
        if products is None:
            self._stacks = select_gpu_kernels(found, dtype, selector)
        else:
            product = products.grouped
            self._stacks = {
                layer: stack._replace(w13_product=product, w2_product=product)
                for layer, stack in found.items()
            }

    @property
    def is_graph_safe(self) -> bool:
        """Whether ``forward`` never waits for the device and launches the same kernels for any
        choice of experts.

        A CUDA graph may then contain it. Also true of a stage without experts.
        """
        return len(self._stacks) == len(self.layers)

    @property
    def first_stack(self) -> StackedExperts | None:
        """The experts of one layer, if they are grouped products: all layers are computed in the
        same way.
        """
        return next(iter(self._stacks.values()), None)

    @property
    def kernel_name(self) -> str:
        """How products of many experts are computed."""
        stack = self.first_stack
        if stack is None:
            return "one by one"
        by_size = [
            each.name
            for each in (stack.w13_product, stack.w2_product)
            if isinstance(each, ProductBySize)
        ]
        return "; ".join(
            ["grouped, few rows apart" if stack.has_small_batch_kernel else "grouped", *by_size]
        )

    def stack_for_small(self, layer: int, num_choices: int) -> StackedExperts | None:
        """Return a layer's weights if ``StackedExperts.mix_small`` is to compute this number of
        choices, or None.
        """
        stack = self._stacks.get(layer)
        is_for_few = (
            stack is not None
            and stack.has_small_batch_kernel
            and num_choices <= MAX_SMALL_BATCH_ROWS
        )
        return stack if is_for_few else None

    def forward(self, layer: int, rows_CD: Tensor, groups: ExpertPermutation) -> Tensor:
        """Run each expert of a layer on its group of rows.

        Returns [C, D]; rows after the last group are undefined or missing.
        """
        if layer in self._stacks:
            return self._stacks[layer].run(
                rows_CD, groups.offsets_E, self.expert(ExpertId(layer, 0)).fused_ops.silu_and_mul
            )
        experts = [
            each for each in self.layers[str(layer)].children() if isinstance(each, FeedForward)
        ]
        return run_experts(experts, groups.sizes, rows_CD)


def _stack_weights(experts: Sequence[nn.Module]) -> StackedExperts | None:
    """Return the experts' weights as stacks, or None if they are not contiguous in memory."""
    w13, w2 = ([expert.get_submodule(name) for expert in experts] for name in ("w13", "w2"))
    plain = (
        as_stacked_view([each.weight for each in own if isinstance(each, Linear | QuantizedLinear)])
        for own in (w13, w2)
    )
    scales = (
        as_stacked_view([each.scale for each in own if isinstance(each, QuantizedLinear)])
        for own in (w13, w2)
    )
    (w13_E2FD, w2_EDF), (w13_scale_E2F, w2_scale_ED) = plain, scales
    if w13_E2FD is None or w2_EDF is None:
        return None
    are_quantized = any(isinstance(each, QuantizedLinear) for each in (*w13, *w2))
    if are_quantized and (w13_scale_E2F is None or w2_scale_ED is None):
        return None
    return StackedExperts(w13_E2FD, w2_EDF, w13_scale_E2F=w13_scale_E2F, w2_scale_ED=w2_scale_ED)


class ExpertTokenCounter:
    """Number of tokens routed to each expert of some layers, counted on the device of the tokens.

    One thread adds, any other may read. On a GPU adding does not wait, and may be part of a CUDA
    graph.

    Ends of groups are added, not their sizes: groups of 2, 0, 3 and of 1, 1, 0 end at 2, 2, 5 and
    at 1, 2, 2. That is 3, 4, 7 in all, the ends of groups of 3, 1, 3.
    """

    def __init__(self, layers: range, num_experts: int) -> None:
        self._layers = layers if num_experts else range(0)
        self._ends_LE = torch.zeros(len(self._layers), num_experts, dtype=torch.int64, device="cpu")
        self._read_stream: torch.cuda.Stream | None = None  # on a GPU

    def to_device(self, device: torch.device) -> None:
        """Move to the device of the tokens, before any are added."""
        self._ends_LE = self._ends_LE.to(device)
        self._read_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def count(self, layer: int, ends_E: Tensor) -> None:
        """Add a micro-batch of a layer; ``ends_E`` are the ends of the experts' groups."""
        self.total_ends_E(layer).add_(ends_E)

    def total_ends_E(self, layer: int) -> Tensor:
        """Return the tensor that ``count`` adds to (int64), for kernels that add to it
        themselves.
        """
        return self._ends_LE[layer - self._layers.start]

    def clear(self) -> None:
        """Reset all counts."""
        self._ends_LE.zero_()

    def read(self) -> dict[int, list[int]]:
        """Return each expert's tokens by layer.

        Does not wait for a step that runs on a GPU: some of its layers may be counted already.
        """
        with torch.cuda.stream(self._read_stream):  # no effect without a stream
            ends_LE = self._ends_LE.tolist()
        return {layer: group_sizes(ends) for layer, ends in zip(self._layers, ends_LE, strict=True)}
