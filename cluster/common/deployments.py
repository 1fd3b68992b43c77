"""Deployments of a Ray Serve application, recorded in the cluster's key-value store.

The store gives every build of an application a number, higher than those before it. It also keeps
the newest deployment, to which routers of older ones yield, and the deployment that was drained, so
that an ingress replica of it which restarts is drained as well.
"""

import time

from tramontane.cluster.ray_internals.accessors import kv_delete, kv_get, kv_put

TTL_NS = 900 * 10**9


def number_deployment(application: str, build_id: str) -> int:
    """Return the number of a build, ``deployed_at``: the time in ns at which the first of its
    replicas asked, or a later one.

    It is higher than all numbers before, whatever the clocks of the nodes and of the deploying
    machine say: a build that starts at 5 after another one got 9 gets 10. All replicas of a build
    get the same number.
    """
    newest = newest_deployment(application)
    kv_put(
        _build_key(application, build_id),
        str(max(time.time_ns(), newest + 1)).encode(),
        overwrite=False,
    )
    deployed_at = int(kv_get(_build_key(application, build_id)) or 0)
    if deployed_at > newest:
        kv_put(_key(application), str(deployed_at).encode())
    return deployed_at


class DeploymentWatch:
    """Notices newer deployments of an application.

    A deployment counts for TTL_NS, as routers of one that failed to load never come. How old it is
    already is read from the wall clock once, when this process sees it first; from then on the
    monotonic clock counts. A deployment of a machine whose clock is ahead is as if it were new.
    """

    def __init__(self, application: str) -> None:
        self.application = application
        self._newest = self._counts_until_ns = 0

    def is_superseded(self, deployed_at: int) -> bool:
        """Return True if a newer deployment is recorded, and counts."""
        newest = newest_deployment(self.application)
        if newest != self._newest:
            age_ns = max(time.time_ns() - newest, 0)
            self._newest, self._counts_until_ns = newest, time.monotonic_ns() + TTL_NS - age_ns
        return newest > deployed_at and time.monotonic_ns() < self._counts_until_ns


def mark_drained(application: str) -> None:
    """Record that the newest deployment accepts no new requests; a later deployment will accept
    them.
    """
    kv_put(_drained_key(application), str(newest_deployment(application)).encode())


def clear_drained(application: str) -> None:
    """Record that the application accepts new requests again."""
    kv_delete(_drained_key(application))


def is_drained(application: str, deployed_at: int) -> bool:
    """Return True if this deployment, or a later one, was marked as drained."""
    return deployed_at <= int(kv_get(_drained_key(application)) or 0)


def newest_deployment(application: str) -> int:
    """Return the number of the newest deployment, see ``number_deployment``; 0 if none is
    recorded.
    """
    return int(kv_get(_key(application)) or 0)


def _key(application: str) -> str:
    return f"tramontane-deployment-{application}"


def _build_key(application: str, build_id: str) -> str:
    return f"tramontane-build-{application}-{build_id}"


def _drained_key(application: str) -> str:
    return f"tramontane-drained-{application}"
