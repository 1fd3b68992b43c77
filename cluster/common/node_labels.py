"""Where runs what the death of the head node must not take along."""

from typing import Any

# Ray's label of nodes, and the head's in clusters of KubeRay; elsewhere RAY_NODE_TYPE_NAME says it to ``ray start --head``.
NODE_GROUP, HEAD_GROUP = "ray.io/node-group", "headgroup"


def avoid_head_node() -> dict[str, Any]:
    """Ray's options of an actor: on another node than the head, if there is one."""
    return {"label_selector": {NODE_GROUP: f"!{HEAD_GROUP}"}, "fallback_strategy": [{"label_selector": {}}]}
