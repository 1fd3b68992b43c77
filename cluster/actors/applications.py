"""What a supervisor asks, and tells, of the application that its pipeline belongs to, when it seems to be abandoned."""

import time

import ray
from ray.exceptions import RayError

from tramontane.cluster.actors.holders import deployed_at
from tramontane.cluster.actors.lease import Lease
from tramontane.cluster.actors.pipeline_spec import Application
from tramontane.cluster.common.deployments import is_superseded

HEAD_ANSWERS_WITHIN_S = 5.0


def head_answers() -> bool:
    """Whether it does, and has done so for some time: Ray makes whoever asks wait while it is away."""
    asked_at = time.monotonic()
    try:
        ray.util.list_named_actors()
    except RayError:
        return False
    return time.monotonic() - asked_at < HEAD_ANSWERS_WITHIN_S


def is_claimable(application: Application | None, last: Lease | None) -> bool:
    """Whether a router of a living application may still come for its pipeline; those of a newer deployment would have come."""
    from ray import serve  # rarely needed, and slow to import

    if application is None or application.name not in serve.status().applications:
        return False
    return last is None or not is_superseded(application.name, deployed_at(last.holder))


def end_application(application: Application) -> None:
    """Ray Serve does the rest by itself, if this actor is removed meanwhile."""
    from ray import serve

    applications = serve.status().applications
    if application.owns_serve and applications.keys() <= {application.name}:
        serve.shutdown()  # type: ignore[no-untyped-call]
    elif application.name in applications:
        serve.delete(application.name)
