"""The object-store link: the router submits the whole chain at once and awaits only its end."""

import asyncio
import re
import time
from collections.abc import Awaitable, Sequence
from typing import Any

from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from tramontane.cluster.actors import StageHealth
from tramontane.proto import wire
from tramontane.proto.errors import LeaseError, PipelineError
from tramontane.proto.step import MicroBatch, StepResult

FENCE_PATIENCE_S = 600.0  # while a stage that died is loading again
HEALTH_TIMEOUT_S = 3.0
RETRY_S = 0.5


class RayStageChain:
    """Hidden states flow from producer to consumer through Ray's object store; small ones ride inline.

    Ray runs one caller's calls on a synchronous actor in the order of submission, so
    micro-batches enter every stage in the order of ``submit``.
    """

    def __init__(self, stages: Sequence[ActorHandle[Any]], supervisor: ActorHandle[Any], holder: str) -> None:
        self.stages = stages
        self._supervisor = supervisor
        self._holder = holder

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def submit(self, batch: MicroBatch) -> Awaitable[StepResult]:
        message = wire.encode_batch(batch)
        carried: ObjectRef[Any] | None = None
        for stage in self.stages:
            carried = stage.step.remote(message, carried)
        assert carried is not None
        return self._result(carried)

    async def fence(self) -> int:
        """Raises LeaseError, or PipelineError when a stage is gone for good, cannot load, or takes too long."""
        give_up_at = time.monotonic() + FENCE_PATIENCE_S
        while True:
            try:
                epoch: int = await self._supervisor.fence.remote(self._holder)
                return epoch
            except LeaseError as error:  # Ray's error is of its cause's class too
                raise LeaseError(last_line(error)) from error
            except RayError as error:
                if time.monotonic() > give_up_at or not _is_restarting(error):
                    raise PipelineError(f"the stages could not be fenced: {last_line(error)}") from error
                await asyncio.sleep(RETRY_S)

    async def health(self) -> list[StageHealth]:
        """Of every stage, also while steps run. Raises PipelineError if one does not answer."""
        asked = [stage.health.options(concurrency_group="control").remote() for stage in self.stages]
        try:
            return list(await asyncio.wait_for(asyncio.gather(*asked), HEALTH_TIMEOUT_S))
        except (RayError, TimeoutError) as error:
            raise PipelineError(f"a stage does not answer: {last_line(error)}") from error

    async def _result(self, ref: "ObjectRef[Any]") -> StepResult:
        try:
            return wire.decode_result(await ref)
        except RayError as error:
            raise PipelineError(f"a stage failed: {last_line(error)}") from error


def _is_restarting(error: RayError) -> bool:
    """Whether the supervisor, or a stage that it asked, does not answer just now."""
    return isinstance(getattr(error, "cause", error), RayActorError | GetTimeoutError)


def last_line(error: BaseException) -> str:
    """Ray's errors carry remote tracebacks; their last line says what happened, after the name of the class."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^(tramontane\.[\w.]+: |ray\.exceptions\.)", "", lines[-1])
