"""Movement of experts between the actors of a running pipeline; every call during it is answered."""

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

RETRY_S = 0.2
MAX_ATTEMPTS = 300


def rebalance_experts(spec: "PipelineSpec", new: ExpertPlan) -> int:
    """Make a pipeline follow another expert plan, and return how many copies of experts were loaded.

    For each intermediate plan, actors load the experts that it adds; then it is stored and announced to the stages; then
    actors unload the experts that it removes. A stage that misses the announcement finds an expert relocated, reads the
    plan, and calls again. An actor that restarts in between loads the plan stored at that time, so all actors are called
    again after a plan is stored. Raises PlanError if actors have no memory to exchange any, PipelineError if one is lost.
    """
    experts = spec.expert_actors
    assert experts is not None
    num_loaded = 0
    previous = experts.current_plan()
    for method in ("unload_experts", "load_experts"):  # completes a move that was interrupted
        _call_all(experts.names, method, previous)
    for plan in plan_moves(previous, new):
        _call_all(experts.names, "load_experts", plan)
        num_loaded += sum(len(set(a.experts) - set(b.experts)) for a, b in zip(plan.actors, previous.actors, strict=True))
        store_plan(spec.name, plan)
        _call_all(experts.names, "load_experts", plan)
        for stage in spec.plan.stages:
            _call_with_retry(spec.stage_name(stage.stage_id), "refresh_expert_plan")
        _call_all(experts.names, "unload_experts", plan)
        previous = plan
    return num_loaded


def _call_all(names: Sequence[str], method: str, plan: ExpertPlan) -> None:
    for actor in plan.actors:
        _call_with_retry(names[actor.actor_id], method, actor.experts)


def _call_with_retry(name: str, method: str, *arguments: object) -> None:
    """Call an actor, again while it restarts. Raises PipelineError after MAX_ATTEMPTS."""
    again = retry_if_exception_type(RayActorError)
    try:
        for attempt in Retrying(retry=again, stop=stop_after_attempt(MAX_ATTEMPTS), wait=wait_fixed(RETRY_S)):
            with attempt:
                ray.get(getattr(ray.get_actor(name, NAMESPACE), method).remote(*arguments))
    except RetryError as error:
        raise PipelineError(f"{name} was unavailable {MAX_ATTEMPTS} times in a row, so experts are not moved further") from error
