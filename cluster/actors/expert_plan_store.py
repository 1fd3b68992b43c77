"""Which expert plan a running pipeline follows, where actors that are started again find it: the cluster's key-value store."""

from dataclasses import replace

from tramontane.cluster.ray_internals.core import kv_delete, kv_get, kv_put
from tramontane.proto.plan import ExpertPlan
from tramontane.proto.wire import decode_expert_actors, encode_expert_actors


def store_plan(pipeline: str, plan: ExpertPlan) -> None:
    """From now on this is the plan."""
    kv_put(_key(pipeline), encode_expert_actors(plan.actors))


def load_plan(pipeline: str, first: ExpertPlan) -> ExpertPlan:
    """What was recorded last, or else the plan with which the pipeline was made."""
    found = kv_get(_key(pipeline))
    return replace(first, actors=decode_expert_actors(found)) if found else first


def delete_plan(pipeline: str) -> None:
    kv_delete(_key(pipeline))


def _key(pipeline: str) -> str:
    return f"tramontane-expert-plan-{pipeline}"
