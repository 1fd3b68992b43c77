"""One expert actor's work: the experts that it holds, run on what it is sent. It keeps nothing between calls."""

import time
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tramontane.proto.expert_plan import ExpertActorPlan, ExpertPlan
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import Weights
from tramontane.workers.experts import ExpertSet
from tramontane.workers.tensor_names import OnTensor, tensors_of_experts
from tramontane.workers.weights import with_weights


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


class ExpertModel(nn.Module):
    """Named as a stage's experts are, so that the same tensors become the same parameters."""

    def __init__(self, args: ModelArgs, plan: ExpertActorPlan) -> None:
        super().__init__()
        self.experts = ExpertSet(args, plan.experts)


class ExpertWorker:
    """Plain and synchronous: one caller at a time."""

    def __init__(self, plan: ExpertActorPlan, model: ExpertModel, device: str = "cpu") -> None:
        self.plan = plan
        self.device = torch.device(device)
        self.model = model

    @classmethod
    def load(
        cls,
        plan: ExpertPlan,
        actor_id: int,
        weights: Weights,
        device: str = "cpu",
        on_tensor: OnTensor = lambda _read, _loaded: None,
    ) -> "ExpertWorker":
        """Read or make the tensors of this actor's experts, and only those."""
        own = plan.actors[actor_id]
        model = with_weights(
            lambda: ExpertModel(plan.args, own),
            plan.args,
            lambda layout: tensors_of_experts(plan.args, own.experts, layout),
            weights,
            plan.dtype,
            plan.quantize,
            device,
            on_tensor,
        )
        return cls(own, model, device)

    def run(self, call: ExpertCall, rows_CD: Tensor) -> ExpertReply:
        """``rows_CD`` are on this worker's device, and so is the reply."""
        started = time.perf_counter()
        with torch.inference_mode():
            done_CD = self.model.experts.run(call.layer, call.experts, call.sizes, rows_CD)
        return ExpertReply(done_CD, time.perf_counter() - started)
