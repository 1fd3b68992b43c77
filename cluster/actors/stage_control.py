"""Giving stages a new epoch, and with it new edges."""

import contextlib
import time
from typing import Any

import ray
from ray.actor import ActorHandle

from tramontane.proto.errors import LinkError
from tramontane.proto.plan import Link

INTERRUPT_TIMEOUT_S = 5.0  # it is answered at once, unless a process is only starting, or does nothing any more
LOOK_EVERY_S = 2.0
FENCE_TIMEOUT_S = 60.0  # a stage that is loading again may take longer: the router asks again


def fence_stages(stages: list[ActorHandle[Any]], epoch: int, holder: str, link: Link) -> None:
    """Make the stages obey ``epoch``; where the link is direct, with new edges between all of them."""
    # A step that waits, for a neighbour or for experts, must not keep the fence waiting.
    interrupted = [stage.interrupt.options(concurrency_group="control").remote(epoch) for stage in stages]
    ray.get(interrupted, timeout=INTERRUPT_TIMEOUT_S)
    _wait_for([stage.fence.remote(epoch, holder) for stage in stages], stages)
    if link == "direct":
        _link_up(stages, epoch)


def _wait_for(asked: "list[ray.ObjectRef[None]]", stages: list[ActorHandle[Any]]) -> None:
    """A stage that stops meanwhile is not waited for: one that is loading says how it is."""
    give_up_at = time.monotonic() + FENCE_TIMEOUT_S
    while ray.wait(asked, num_returns=len(asked), timeout=LOOK_EVERY_S)[1] and time.monotonic() < give_up_at:
        ray.get([stage.health.options(concurrency_group="control").remote() for stage in stages], timeout=INTERRUPT_TIMEOUT_S)
    ray.get(asked, timeout=0)


def _link_up(stages: list[ActorHandle[Any]], epoch: int) -> None:
    """If a stage dies meanwhile that is raised, rather than what its neighbours suffer from it."""
    outlets: list[Any] = ray.get([stage.listen.remote(epoch) for stage in stages], timeout=FENCE_TIMEOUT_S)
    inlets = [None, *outlets[:-1]]
    asked: list[ray.ObjectRef[None]] = [stage.connect.remote(epoch, inlet) for stage, inlet in zip(stages, inlets, strict=True)]
    for ref in ray.wait(asked, num_returns=len(asked), timeout=FENCE_TIMEOUT_S)[0]:
        with contextlib.suppress(LinkError):
            ray.get(ref)
    ray.get(asked, timeout=0)
