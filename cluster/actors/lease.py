"""The lease of a pipeline: which router may drive it, under which name, and which holder has to
yield.
"""

from dataclasses import dataclass

import ray

from tramontane.proto.errors import LeaseError


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to drive a pipeline: ``epoch`` is the last one granted to ``holder``; stages accept
    only the newest.
    """

    holder: str
    epoch: int


class LeaseManager:
    """Bookkeeping of one lease; times come from the caller.

    It has at most one holder, until the lease expires, the holder is known to be dead, or it has to
    yield to the holder of a later deployment. The manager decides which router *should* drive. A
    mistake does no harm, because every grant carries a higher epoch, and stages refuse the steps of
    any other.
    """

    def __init__(self, ttl_s: float, now: float, recovered: Lease | None = None) -> None:
        """``recovered`` is the lease of an earlier manager as the stages remember it; its holder
        gets a full term to renew.

        ``last_epoch`` is 0 until an epoch is granted.
        """
        self.lease = recovered
        self.last_epoch = recovered.epoch if recovered else 0
        self._ttl_s = ttl_s
        self._renewed_at = now

    def claim(self, holder: str, now: float, yielding: str = "") -> None:
        """Make ``holder`` the holder. Raises LeaseError while another one holds it, unless that is
        ``yielding``, which has to yield.
        """
        current = self.lease
        if (
            current
            and current.holder not in (holder, yielding)
            and now - self._renewed_at <= self._ttl_s
        ):
            raise LeaseError(f"the pipeline is driven by {current.holder}")
        self.lease = Lease(holder, self.last_epoch)
        self._renewed_at = now

    def next_epoch(self, floor: int) -> int:
        """Grant a new epoch to the holder: higher than all earlier epochs, and than ``floor``.

        floor 1000 after epoch 7: 1001. After epoch 1001: 1002.
        """
        assert self.lease is not None
        self.last_epoch = max(self.last_epoch, floor) + 1
        self.lease = Lease(self.lease.holder, self.last_epoch)
        return self.last_epoch

    def renew(self, holder: str, now: float) -> bool:
        """Renew the lease; return False if it is not this holder's. A lease without a holder is
        taken by the first that renews.
        """
        if self.lease is None:
            self.lease = Lease(holder, self.last_epoch)
        if self.lease.holder != holder:
            return False
        self._renewed_at = now
        return True

    def silent_for_s(self, now: float) -> float:
        """Return the seconds since a holder last claimed or renewed, or since the manager was
        created.
        """
        return now - self._renewed_at


def actor_holder_name(deployed_at: int = 0) -> str:
    """Return this actor's name as a holder, ``actor@deployed_at/name``.

    ``deployed_at``: the deployment of the application that a router belongs to; the router of a
    later deployment has precedence.
    """
    return f"actor@{deployed_at}/{ray.get_runtime_context().get_actor_name()}"


def driver_holder_name() -> str:
    """Return this driver's name as a holder, ``driver@0/job``."""
    return f"driver@0/{ray.get_runtime_context().get_job_id()}"


def deployment_of(holder: str) -> int:
    """Return the deployment of a holder: ``actor@7/Router#x`` gives 7."""
    return int(holder.partition("/")[0].partition("@")[2] or 0)


def must_yield(current: str, claimant: str) -> bool:
    """Return True if the current holder belongs to an older deployment or its actor is dead.

    The death of a driver cannot be detected; its lease has to expire.
    """
    return deployment_of(claimant) > deployment_of(current) or _is_dead(current)


def _is_dead(holder: str) -> bool:
    kind, _, name = holder.partition("/")
    return kind.startswith("actor@") and name not in [
        actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)
    ]
