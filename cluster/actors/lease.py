"""Who may drive a pipeline. Pure bookkeeping: the time comes from outside.

Who drives a pipeline: the names under which leases are held, and who has to make way for whom.
"""

from dataclasses import dataclass

import ray

from tramontane.proto.errors import LeaseError


@dataclass(frozen=True, slots=True)
class Lease:
    """``epoch`` is the last one that was given to ``holder``; stages obey the newest they have heard of."""

    holder: str
    epoch: int


class LeaseManager:
    """One holder at a time, until it lapses, is known to be gone, or has to make way for a later deployment's.

    The book decides who *should* drive; what makes a mistake harmless is that every
    grant carries a higher epoch, and that stages refuse steps of any other.
    """

    def __init__(self, ttl_s: float, now: float, recovered: Lease | None = None) -> None:
        """``found`` is what stages remember of an earlier book; its holder gets a full term to renew."""
        self.lease = recovered
        self._last_epoch = recovered.epoch if recovered else 0
        self._ttl_s = ttl_s
        self._renewed_at = now

    def claim(self, holder: str, now: float, current_makes_way: bool = False) -> None:
        """Make ``holder`` the holder. Raises LeaseError while somebody else is."""
        current = self.lease
        if current and current.holder != holder and not current_makes_way and now - self._renewed_at <= self._ttl_s:
            raise LeaseError(f"the pipeline is driven by {current.holder}")
        self.lease = Lease(holder, self._last_epoch)
        self._renewed_at = now

    def next_epoch(self, floor: int) -> int:
        """A new epoch for the holder: higher than all before, and than ``floor``.

        floor 1000 after epoch 7: 1001. After epoch 1001: 1002.
        """
        assert self.lease is not None
        self._last_epoch = max(self._last_epoch, floor) + 1
        self.lease = Lease(self.lease.holder, self._last_epoch)
        return self._last_epoch

    def renew(self, holder: str, now: float) -> bool:
        """False if the lease is not this holder's (any more). One that the book has forgotten is whoever's renews it."""
        if self.lease is None:
            self.lease = Lease(holder, self._last_epoch)
        if self.lease.holder != holder:
            return False
        self._renewed_at = now
        return True

    def silent_for_s(self, now: float) -> float:
        """Seconds since the last sign of life of a holder, or since the book was opened."""
        return now - self._renewed_at


def actor_holder_name(deployed_at: int = 0) -> str:
    """The actor that we are, as the holder of a lease: ``actor@deployed_at/name``.

    ``deployed_at`` says to which deployment of its application a router belongs; of two, the later one has more.
    """
    return f"actor@{deployed_at}/{ray.get_runtime_context().get_actor_name()}"


def driver_holder_name() -> str:
    """The driver that we are: ``driver@0/job``."""
    return f"driver@0/{ray.get_runtime_context().get_job_id()}"


def deployed_at(holder: str) -> int:
    """``actor@7/Router#x`` gives 7."""
    return int(holder.partition("/")[0].partition("@")[2] or 0)


def must_yield(current: str, claimant: str) -> bool:
    """For a later deployment's router, and where Ray knows that the actor is dead; a driver's death shows only in its silence."""
    return deployed_at(claimant) > deployed_at(current) or _is_dead(current)


def _is_dead(holder: str) -> bool:
    kind, _, name = holder.partition("/")
    return kind.startswith("actor@") and name not in [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
