"""Moving experts between the actors of a running pipeline: nothing that is asked meanwhile goes without an answer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayActorError
from tenacity import RetryError, Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from tramontane.cluster.actors.expert_plan_store import store_plan
from tramontane.cluster.actors.worker_actor import NAMESPACE
from tramontane.cluster.planning.expert_planner import plan_moves
from tramontane.proto.errors import PipelineError
from tramontane.proto.plan import ExpertPlan

if TYPE_CHECKING:
    from tramontane.cluster.actors.pipeline_spec import PipelineSpec

RETRY_S, MAX_TRIES = 0.2, 300


def rebalance_experts(spec: "PipelineSpec", new: ExpertPlan) -> int:
    """Returns how many copies of experts were loaded. Raises PlanError if actors have no room to exchange any.

    For each plan on the way: actors load what they lack of it; from then on it is the plan, of which stages are told; actors
    forget what it does not give them. A stage that has missed this finds an expert gone, looks for the plan, and asks again.
    An actor that dies meanwhile loads what was the plan when it was started again, so all are asked once more afterwards.
    """
    experts = spec.expert_actors
    assert experts is not None
    num_loaded = 0
    before = experts.current_plan()
    for method in ("unload_experts", "load_experts"):  # what a move that was broken off has left, or left out
        _call_all(experts.names, method, before)
    for plan in plan_moves(before, new):
        _call_all(experts.names, "load_experts", plan)
        num_loaded += sum(len(set(a.experts) - set(b.experts)) for a, b in zip(plan.actors, before.actors, strict=True))
        store_plan(spec.name, plan)
        _call_all(experts.names, "load_experts", plan)
        for stage in spec.plan.stages:
            _call_with_retry(spec.stage_name(stage.stage_id), "refresh_expert_plan")
        _call_all(experts.names, "unload_experts", plan)
        before = plan
    return num_loaded


def _call_all(names: Sequence[str], method: str, plan: ExpertPlan) -> None:
    for actor in plan.actors:
        _call_with_retry(names[actor.actor_id], method, actor.experts)


def _call_with_retry(name: str, method: str, *arguments: object) -> None:
    """Again, where the actor is just being restarted. Raises PipelineError if that takes too long, or happens again and again."""
    try:
        for attempt in Retrying(
            retry=retry_if_exception_type(RayActorError), stop=stop_after_attempt(MAX_TRIES), wait=wait_fixed(RETRY_S)
        ):
            with attempt:
                ray.get(getattr(ray.get_actor(name, NAMESPACE), method).remote(*arguments))
    except RetryError as error:
        raise PipelineError(f"{name} does not come back; experts stay where they are") from error
