"""Who drives a pipeline: the names under which leases are held, and who has to make way for whom."""

import ray


def actor_as_holder(deployed_at: int = 0) -> str:
    """The actor that we are, as the holder of a lease: ``actor@deployed_at/name``.

    ``deployed_at`` says to which deployment of its application a router belongs; of two, the later one has more.
    """
    return f"actor@{deployed_at}/{ray.get_runtime_context().get_actor_name()}"


def driver_as_holder() -> str:
    """The driver that we are: ``driver@0/job``."""
    return f"driver@0/{ray.get_runtime_context().get_job_id()}"


def deployed_at(holder: str) -> int:
    """``actor@7/Router#x`` gives 7."""
    return int(holder.partition("/")[0].partition("@")[2] or 0)


def must_make_way(current: str, claimant: str) -> bool:
    """For a later deployment's router, and where Ray knows that the actor is dead; a driver's death shows only in its silence."""
    return deployed_at(claimant) > deployed_at(current) or _is_gone(current)


def _is_gone(holder: str) -> bool:
    kind, _, name = holder.partition("/")
    return kind.startswith("actor@") and name not in [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
