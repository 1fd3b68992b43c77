"""What an ingress asks of every router: whether it is well, what it does, its experts' load, and to move experts."""

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from typing import Any

from ray.serve.handle import DeploymentHandle

from tramontane.cluster.expert_load import ExpertLoad, MeasuredLoad
from tramontane.cluster.least_loaded import ONLY, any_but
from tramontane.proto.errors import ConfigError

READY_TIMEOUT_S = 5.0
LOOK_EVERY_S = 2.0  # for routers that are to stop, while they have requests


class RouterQuestions:
    """Asked of the routers behind a Ray Serve handle."""

    def __init__(self, handle: "DeploymentHandle[Any]") -> None:
        self._handle = handle

    async def is_ready(self) -> bool:
        """Whether any router can make tokens now."""
        with suppress(Exception):  # whatever keeps a router from answering
            async with asyncio.timeout(READY_TIMEOUT_S), aclosing(self._each("is_ready")) as answers:
                async for is_ready in answers:
                    if is_ready:
                        return True
        return False

    async def expert_load(self) -> MeasuredLoad:
        """Of all pipelines that can tell theirs in time."""
        return MeasuredLoad.summed(await self._told("expert_load"))

    async def activity(self, after: Mapping[str, int]) -> list[dict[str, Any]]:
        """Of all pipelines that can tell theirs in time, by name; see ``RouterReplica.activity``."""
        return sorted(await self._told("activity", after), key=lambda each: str(each["name"]))

    async def _told(self, method: str, *args: object) -> list[Any]:
        """What those answer that can, in time."""
        told: list[Any] = []
        with suppress(Exception):  # whatever keeps a router from answering: the others have told theirs
            async with asyncio.timeout(READY_TIMEOUT_S), aclosing(self._each(method, *args)) as answers:
                async for answer in answers:
                    if answer is not None:
                        told.append(answer)  # a comprehension would lose them all with one
        return told

    async def move_experts(self, load: ExpertLoad) -> tuple[int, int]:
        """Every pipeline, one after the other, follows a plan for this load: how many experts were loaded, by how many pipelines.

        Raises ConfigError where one refuses, PipelineError where one fails; those before it have done it.
        """
        num_moved = num_pipelines = 0
        async with aclosing(self._each("move_experts", load)) as answers:
            async for moved, refusal in answers:
                if refusal:
                    raise ConfigError(refusal)
                num_moved, num_pipelines = num_moved + moved, num_pipelines + 1
        return num_moved, num_pipelines

    async def _leaves(self, replica: str, stays_s: float) -> None:
        """Returns once Ray Serve has given this router nothing for so long, because it is to stop, while there is another one."""
        left_at = math.inf
        while asyncio.get_running_loop().time() < left_at + stays_s:
            await asyncio.sleep(LOOK_EVERY_S)
            if not await self._has_left(replica):
                left_at = math.inf
            elif left_at == math.inf:
                left_at = asyncio.get_running_loop().time()

    async def _has_left(self, replica: str) -> bool:
        """Whether another one answers what this one is asked."""
        with suppress(Exception):  # whatever keeps routers from answering
            async with asyncio.timeout(READY_TIMEOUT_S):
                _, answers = await cancellable(self._method("is_ready", ONLY + replica).remote())
                return bool(answers != replica)
        return False

    async def _each(self, method: str, *arguments: object) -> AsyncGenerator[Any, None]:
        """What every router answers, one after the other. It answers with its name as well."""
        asked: set[str] = set()
        while True:
            answer, replica = await cancellable(self._method(method, any_but(asked)).remote(*arguments))
            if replica in asked:  # there is no other
                return
            asked.add(replica)
            yield answer

    def _method(self, name: str, wish: str, *, stream: bool = False, by_reference: bool = False) -> "DeploymentHandle[Any]":
        """Over gRPC between the replicas, unless ``by_reference``: a third less work for an ingress than with objects."""
        return self._handle.options(method_name=name, session_id=wish, stream=stream, _by_reference=by_reference)


async def cancellable(response: Any) -> Any:  # noqa: ANN401 - DeploymentResponse, whose types do not say that
    """Ray Serve does not pass on by itself that whoever waits for a response has been cancelled."""
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
