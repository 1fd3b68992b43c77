"""The expert plan of a running pipeline, in the cluster's key-value store, where actors that restart find it."""

from dataclasses import replace

from tramontane.cluster.ray_internals.core import kv_delete, kv_get, kv_put
from tramontane.proto.plan import ExpertPlan
from tramontane.proto.wire import decode_expert_actors, encode_expert_actors


def store_plan(pipeline: str, plan: ExpertPlan) -> None:
    """Make ``plan`` the one that the pipeline follows."""
    kv_put(_key(pipeline), encode_expert_actors(plan.actors))


def load_plan(pipeline: str, first: ExpertPlan) -> ExpertPlan:
    """Return the plan that was stored last, or else ``first``, with which the pipeline was created."""
    value = kv_get(_key(pipeline))
    return replace(first, actors=decode_expert_actors(value)) if value else first


def delete_plan(pipeline: str) -> None:
    """Delete the stored plan of a pipeline."""
    kv_delete(_key(pipeline))


def _key(pipeline: str) -> str:
    return f"tramontane-expert-plan-{pipeline}"
