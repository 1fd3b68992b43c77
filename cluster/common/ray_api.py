"""Uses of Ray's public interface that several packages share: messages of its errors, and the
cluster's nodes.
"""

import re
from typing import Any

import ray

# Ray's label of nodes and its value for the head in clusters of KubeRay. Elsewhere ``ray start
# --head`` takes it from RAY_NODE_TYPE_NAME.
NODE_GROUP, HEAD_GROUP = "ray.io/node-group", "headgroup"


def ray_error_message(error: BaseException) -> str:
    """Return the last line of an error, without its class: Ray's errors carry remote tracebacks,
    and end with the cause.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^(tramontane\.[\w.]+: |ray\.exceptions\.)", "", lines[-1])


def avoid_head_node() -> dict[str, Any]:
    """Return the options of an actor that runs on the head node only if there is no other, and so
    survives the head's death.
    """
    return {
        "label_selector": {NODE_GROUP: f"!{HEAD_GROUP}"},
        "fallback_strategy": [{"label_selector": {}}],
    }


def list_used_nodes(group: str) -> set[str]:
    """Return Ray's ids of the nodes that have a bundle of the placement group with this name."""
    groups: dict[str, Any] = ray.util.placement_group_table()
    return {
        node
        for each in groups.values()
        if each["name"] == group
        for node in each["bundles_to_node_id"].values()
    }


def list_dead_nodes() -> set[str]:
    """Return Ray's ids of the nodes that it has declared dead."""
    return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}  # type: ignore[no-untyped-call]
