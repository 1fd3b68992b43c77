"""Giving stages a new epoch, and with it new edges."""

import contextlib
from typing import Any

import ray
from ray.actor import ActorHandle

from tramontane.proto.errors import LinkError
from tramontane.proto.plan import Link

INTERRUPT_TIMEOUT_S = 5.0  # it is answered at once, unless a process is only starting, or does nothing any more
FENCE_TIMEOUT_S = 60.0  # a stage that is loading again may take longer: the router asks again


def fence_stages(stages: list[ActorHandle[Any]], epoch: int, holder: str, link: Link) -> None:
    """Make the stages obey ``epoch``; where the link is direct, with new edges between all of them."""
    # A step that waits, for a neighbour or for experts, must not keep the fence waiting.
    interrupted = [stage.interrupt.options(concurrency_group="control").remote(epoch) for stage in stages]
    ray.get(interrupted, timeout=INTERRUPT_TIMEOUT_S)
    ray.get([stage.fence.remote(epoch, holder) for stage in stages], timeout=FENCE_TIMEOUT_S)
    if link == "direct":
        _link_up(stages, epoch)


def _link_up(stages: list[ActorHandle[Any]], epoch: int) -> None:
    """If a stage dies meanwhile that is raised, rather than what its neighbours suffer from it."""
    outlets: list[Any] = ray.get([stage.listen.remote(epoch) for stage in stages], timeout=FENCE_TIMEOUT_S)
    inlets = [None, *outlets[:-1]]
    asked: list[ray.ObjectRef[None]] = [stage.connect.remote(epoch, inlet) for stage, inlet in zip(stages, inlets, strict=True)]
    for ref in ray.wait(asked, num_returns=len(asked), timeout=FENCE_TIMEOUT_S)[0]:
        with contextlib.suppress(LinkError):
            ray.get(ref)
    ray.get(asked, timeout=0)
