"""What an ingress asks of every router: whether it is well, what it does, its experts' load, and to move experts."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

from ray.serve.handle import DeploymentHandle

from tramontane.cluster.config.expert_load import ExpertLoad, MeasuredLoad
from tramontane.cluster.ray_internals.serve import broadcast_results
from tramontane.cluster.serving.least_loaded_router import ONLY, exclude
from tramontane.proto.errors import ConfigError

READY_TIMEOUT_S = 5.0
LOOK_EVERY_S = 2.0  # for routers that are to stop, while they have requests


class RouterQueries:
    """Asked of the routers behind a Ray Serve handle."""

    def __init__(self, handle: "DeploymentHandle[Any]") -> None:
        self._handle = handle

    async def is_ready(self) -> bool:
        """Whether any router can make tokens now; the first that says so is believed."""
        return any(await self._broadcast("is_ready", is_enough=bool))

    async def expert_load(self) -> MeasuredLoad:
        """Of all pipelines that can tell theirs in time."""
        return MeasuredLoad.summed(await self._broadcast("expert_load"))

    async def activity(self, after: Mapping[str, int]) -> list[dict[str, Any]]:
        """Of all pipelines that can tell theirs in time, by name; see ``RouterReplica.activity``."""
        return sorted(await self._broadcast("activity", after), key=lambda each: str(each["name"]))

    async def _broadcast(self, method: str, *arguments: object, is_enough: Callable[[Any], bool] = lambda _: False) -> list[Any]:
        """What those answer that can, all asked at once: one that is stopped, or gone, takes nothing from the others.

        Once an answer is enough the rest is not waited for.
        """
        told: list[Any] = []
        pending = {asyncio.create_task(_answer_of(each)) for each in await self._broadcast_calls(method, *arguments)}
        try:
            while pending and not any(map(is_enough, told)):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                told += [answer for task in done if (answer := task.result()) is not None]
        finally:
            for task in pending:
                task.cancel()
        return told

    async def _broadcast_calls(self, method: str, *arguments: object) -> list[Any]:
        """The calls to all routers that Ray Serve knows."""
        with suppress(Exception):  # there is none
            async with asyncio.timeout(READY_TIMEOUT_S):
                calls: Any = self._handle.options(_by_reference=False).broadcast(method, *arguments)
                return await broadcast_results(calls)
        return []

    async def move_experts(self, load: ExpertLoad) -> tuple[int, int]:
        """Every pipeline, one after the other, follows a plan for this load: how many experts were loaded, by how many pipelines.

        Raises ConfigError where one refuses, PipelineError where one fails; those before it have done it.
        """
        num_moved = num_pipelines = 0
        async with aclosing(self._one_by_one("move_experts", load)) as answers:
            async for moved, refusal in answers:
                if refusal:
                    raise ConfigError(refusal)
                num_moved, num_pipelines = num_moved + moved, num_pipelines + 1
        return num_moved, num_pipelines

    async def _wait_until_retiring(self, replica: str, stays_s: float) -> None:
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

    async def _one_by_one(self, method: str, *arguments: object) -> AsyncGenerator[Any, None]:
        """What every router answers, each asked once the one before has answered. It answers with its name as well."""
        asked: set[str] = set()
        while True:
            answer, replica = await cancellable(self._method(method, exclude(asked)).remote(*arguments))
            if replica in asked:  # there is no other
                return
            asked.add(replica)
            yield answer

    def _method(self, name: str, wish: str, *, stream: bool = False, by_reference: bool = False) -> "DeploymentHandle[Any]":
        """Over gRPC between the replicas, unless ``by_reference``: a third less work for an ingress than with objects."""
        return self._handle.options(method_name=name, session_id=wish, stream=stream, _by_reference=by_reference)


async def _answer_of(call: Any) -> Any:  # noqa: ANN401 - of Ray Serve, to one router, which answers with its name as well
    """None where it does not answer in time."""
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            answer, _ = await call.get_async()
            return answer
    except Exception:  # whatever keeps it from answering
        call.cancel()
        return None
    except asyncio.CancelledError:
        call.cancel()
        raise


async def cancellable(response: Any) -> Any:  # noqa: ANN401 - DeploymentResponse, whose types do not say that
    """Ray Serve does not pass on by itself that whoever waits for a response has been cancelled."""
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
