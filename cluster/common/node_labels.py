"""Scheduling options that keep actors off the head node, so that they survive its death."""

from typing import Any

# Ray's label of nodes and its value for the head in clusters of KubeRay. Elsewhere ``ray start --head`` takes it from
# RAY_NODE_TYPE_NAME.
NODE_GROUP, HEAD_GROUP = "ray.io/node-group", "headgroup"


def avoid_head_node() -> dict[str, Any]:
    """Return Ray's options for an actor that runs on the head node only if there is no other."""
    return {"label_selector": {NODE_GROUP: f"!{HEAD_GROUP}"}, "fallback_strategy": [{"label_selector": {}}]}
