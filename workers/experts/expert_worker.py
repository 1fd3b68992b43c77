"""One expert actor's work: run the experts that it holds on the rows of a call. It keeps no state
between calls.
"""

import time
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tramontane.proto.errors import ExpertRelocatedError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import WeightSource
from tramontane.proto.plan import ExpertId, ExpertPlan
from tramontane.workers.device.numerics import Numerics
from tramontane.workers.kernels.fused_ops import EAGER, FusedOps, native_ops, row_wise_ops
from tramontane.workers.kernels.kernel_names import name_kernels
from tramontane.workers.kernels.row_invariance import (
    RowProducts,
    find_row_dependence,
    set_row_products,
    triton_products,
    triton_refusal,
    try_invariance,
)
from tramontane.workers.model.layers import FeedForward, set_fused_ops
from tramontane.workers.model.moe import ExpertSet, run_experts
from tramontane.workers.weights.loader import load_module
from tramontane.workers.weights.tensor_specs import ProgressCallback, expert_tensors


class ExpertCall(NamedTuple):
    """The work of one actor for one layer of one micro-batch: each expert runs its group of the
    rows, in this order.
    """

    layer: int
    experts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """The rows of all groups."""
        return sum(self.sizes)


class ExpertReply(NamedTuple):
    """The resulting rows in the order of the call, and how long the experts worked on them."""

    rows_CD: Tensor
    busy_s: float


class ExpertModule(nn.Module):
    """Experts with the parameter names that they have in a stage, so that they load from the same
    tensors.
    """

    def __init__(self, args: ModelArgs, expert_ids: Iterable[ExpertId]) -> None:
        super().__init__()
        self.experts = ExpertSet(args, expert_ids)


class ExpertWorker:
    """The experts of one actor. Plain and synchronous: one thread calls ``run``, another may load
    and unload experts.

    ``busy_s`` and ``num_rows``: seconds that its experts have computed, and the rows that they have
    received.
    """

    def __init__(
        self,
        plan: ExpertPlan,
        weights: WeightSource,
        device: str = "cpu",
        on_tensor: ProgressCallback = lambda _read, _loaded: None,
    ) -> None:
        self.device = torch.device(device)
        self._plan, self._weights, self._on_tensor = plan, weights, on_tensor
        self._experts: dict[ExpertId, FeedForward] = {}
        self._fused_ops, self._products = EAGER, None
        if self.device.type == "cpu":
            self._fused_ops = native_ops(plan.args, getattr(torch, plan.dtype))
        elif plan.batch_invariant:
            self._fused_ops, self._products = self._row_wise()
        self.busy_s, self.num_rows = 0.0, 0
        self.numerics = Numerics()  # until ``load`` has determined them

    @classmethod
    def load(
        cls,
        plan: ExpertPlan,
        actor_id: int,
        weights: WeightSource,
        device: str = "cpu",
        on_tensor: ProgressCallback = lambda _read, _loaded: None,
    ) -> "ExpertWorker":
        """Load this actor's experts only."""
        worker = cls(plan, weights, device, on_tensor)
        worker.load_experts(plan.actors[actor_id].experts)
        experts, dtype = nn.ModuleList(worker._experts.values()), getattr(torch, plan.dtype)
        is_invariant = try_invariance(
            plan.actors[actor_id].label,
            plan.batch_invariant,
            worker.device,
            lambda: find_row_dependence(experts, dtype, worker.device, worker._products),
        )
        names = name_kernels(experts, worker._fused_ops, worker.device, dtype)
        worker.numerics = Numerics.of(names, device, is_batch_invariant=is_invariant)
        return worker

    def _row_wise(self) -> tuple[FusedOps, RowProducts]:
        """Return the operations and products that stages with this option also use."""
        try:
            return row_wise_ops(), triton_products(self.device, self._plan.weight_format)
        except Exception as error:  # compilers, drivers and imports raise errors of any kind
            raise triton_refusal("Experts", error) from error

    @property
    def loaded_experts(self) -> frozenset[ExpertId]:
        """The experts that are loaded now."""
        return frozenset(self._experts)

    @property
    def num_bytes(self) -> int:
        """The bytes of all loaded tensors."""
        return sum(
            tensor.nbytes
            for expert in self._experts.values()
            for tensor in expert.state_dict().values()
        )

    def load_experts(self, experts: Collection[ExpertId]) -> None:
        """Read or make the tensors of the experts that are not loaded yet."""
        missing = [each for each in experts if each not in self._experts]
        model = load_module(
            lambda: ExpertModule(self._plan.args, missing),
            lambda layout: [
                spec for each in missing for spec in expert_tensors(self._plan.args, *each, layout)
            ],
            self._plan,
            self._weights,
            str(self.device),
            self._on_tensor,
        )
        set_fused_ops(model, self._fused_ops)
        set_row_products(model, self._products)
        self._experts = self._experts | {each: model.experts.expert(each) for each in missing}

    def unload_experts(self, kept: Collection[ExpertId]) -> None:
        """Unload all experts but these."""
        self._experts = {each: module for each, module in self._experts.items() if each in kept}

    def run(self, call: ExpertCall, rows_CD: Tensor) -> ExpertReply:
        """Run the experts of a call. ``rows_CD`` and the reply are on this worker's device.

        Raises ExpertRelocatedError if an expert is not loaded.
        """
        loaded = self._experts  # read once: another thread may replace it
        expert_ids = [ExpertId(call.layer, expert) for expert in call.experts]
        if not loaded.keys() >= set(expert_ids):
            raise ExpertRelocatedError(
                f"not all of experts {call.experts} of layer {call.layer} are loaded"
            )
        started = time.perf_counter()
        with torch.inference_mode():
            done_CD = run_experts([loaded[each] for each in expert_ids], call.sizes, rows_CD)
        reply = ExpertReply(done_CD, time.perf_counter() - started)
        self.busy_s += reply.busy_s
        self.num_rows += call.num_rows
        return reply
