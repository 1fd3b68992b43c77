"""One expert actor's work: the experts that it holds, run on what it is sent. It keeps nothing between calls."""

import time
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tramontane.proto.errors import ExpertRelocatedError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import WeightSource
from tramontane.proto.plan import ExpertId, ExpertPlan
from tramontane.workers.model.moe import ExpertSet, run_experts
from tramontane.workers.weights.loader import load_module
from tramontane.workers.weights.tensor_specs import ProgressCallback, tensors_of_experts


class ExpertCall(NamedTuple):
    """What one actor is asked to do for one layer of one micro-batch: each expert runs its group of the rows, in this order."""

    layer: int
    experts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return sum(self.sizes)


class ExpertReply(NamedTuple):
    """The rows in the order of the call, and how long the experts worked on them."""

    rows_CD: Tensor
    busy_s: float


class ExpertModule(nn.Module):
    """Named as a stage's experts are, so that the same tensors become the same parameters."""

    def __init__(self, args: ModelArgs, held: Iterable[ExpertId]) -> None:
        super().__init__()
        self.experts = ExpertSet(args, held)


class ExpertWorker:
    """Plain and synchronous: one caller of ``run`` at a time, beside which another may ``hold`` and ``release``.

    ``busy_s`` and ``num_rows`` are what its experts worked, in seconds, and what they were given, since it was made.
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
        self._held: dict[ExpertId, nn.Module] = {}
        self.busy_s, self.num_rows = 0.0, 0

    @classmethod
    def load(
        cls,
        plan: ExpertPlan,
        actor_id: int,
        weights: WeightSource,
        device: str = "cpu",
        on_tensor: ProgressCallback = lambda _read, _loaded: None,
    ) -> "ExpertWorker":
        """With this actor's experts, and only those."""
        worker = cls(plan, weights, device, on_tensor)
        worker.load_experts(plan.actors[actor_id].experts)
        return worker

    @property
    def loaded_experts(self) -> frozenset[ExpertId]:
        return frozenset(self._held)

    @property
    def num_bytes(self) -> int:
        """Of all tensors that are held."""
        return sum(tensor.nbytes for expert in self._held.values() for tensor in expert.state_dict().values())

    def load_experts(self, experts: Collection[ExpertId]) -> None:
        """Read or make the tensors of those of these experts that are not here."""
        missing = [each for each in experts if each not in self._held]
        model = load_module(
            lambda: ExpertModule(self._plan.args, missing),
            self._plan.args,
            lambda layout: tensors_of_experts(self._plan.args, missing, layout),
            self._weights,
            self._plan.dtype,
            self._plan.quantize,
            str(self.device),
            self._on_tensor,
        )
        self._held = self._held | {each: model.experts.expert(each) for each in missing}

    def unload_experts(self, kept: Collection[ExpertId]) -> None:
        """Forget all experts but these."""
        self._held = {each: module for each, module in self._held.items() if each in kept}

    def run(self, call: ExpertCall, rows_CD: Tensor) -> ExpertReply:
        """``rows_CD`` are on this worker's device, and so is the reply. Raises ExpertRelocatedError if it lacks an expert."""
        held = self._held  # as it is now: another thread may replace it
        wanted = [ExpertId(call.layer, expert) for expert in call.experts]
        if not held.keys() >= set(wanted):
            raise ExpertRelocatedError(f"not all of experts {call.experts} of layer {call.layer} are here")
        started = time.perf_counter()
        with torch.inference_mode():
            done_CD = run_experts([held[each] for each in wanted], call.sizes, rows_CD)
        reply = ExpertReply(done_CD, time.perf_counter() - started)
        self.busy_s += reply.busy_s
        self.num_rows += call.num_rows
        return reply
