"""What is known of an application's deployments, in the cluster's key-value store.

Which is the newest: routers of older ones make way. And which have been drained: a door of theirs that is born again is, too.
"""

import time

from tramontane.cluster.ray_internals.core import kv_delete, kv_get, kv_put

TTL_NS = 900 * 10**9


def record_deployment(application: str, deployed_at: int) -> None:
    """``deployed_at`` is when the application was built, in nanoseconds; nothing happens where a newer one is known."""
    if deployed_at > newest_deployment(application):
        kv_put(_key(application), str(deployed_at).encode())


def is_superseded(application: str, deployed_at: int) -> bool:
    """Whether a newer one is known, of whose routers something may still be heard: one that could not load is not waited for."""
    newest = newest_deployment(application)
    return newest > deployed_at and time.time_ns() - newest < TTL_NS


def mark_drained(application: str) -> None:
    """Its newest deployment takes nothing new any more; a later one will."""
    kv_put(_drained_key(application), str(newest_deployment(application)).encode())


def clear_drained(application: str) -> None:
    """It takes new requests again."""
    kv_delete(_drained_key(application))


def is_drained(application: str, deployed_at: int) -> bool:
    """Whether that was said of this deployment, or of a later one."""
    found = kv_get(_drained_key(application))
    return deployed_at <= int(found or 0)


def newest_deployment(application: str) -> int:
    """0 where none is known."""
    found = kv_get(_key(application))
    return int(found or 0)


def _key(application: str) -> str:
    return f"tramontane-deployment-{application}"


def _drained_key(application: str) -> str:
    return f"tramontane-drained-{application}"
