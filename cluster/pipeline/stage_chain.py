"""The two links over Ray: the router submits a micro-batch to the whole chain at once."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError

from tramontane.cluster.actors.stage_actor import StageHealth
from tramontane.cluster.actors.stage_control import FENCE_TIMEOUT_S
from tramontane.cluster.common.ray_errors import ray_error_message
from tramontane.proto import wire
from tramontane.proto.errors import (
    LeaseError,
    LinkError,
    PipelineError,
    PlanError,
    StaleEpochError,
)
from tramontane.proto.plan import ExpertPlan
from tramontane.proto.step import MicroBatch, StepResult

# Stages that are loading again are waited for so long: by their router (``ObjectStoreStageChain.fence``), and by a door for
# what it had
# accepted. Where router and stage die together the next router is not there before the weights are.
LOAD_TIMEOUT_S = 600.0


logger = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 3.0
UNREACHABLE_TIMEOUT_S = 5.0  # a stage that was born again is there by then, as a rule; one that is stopped never is
RESCUE_TIMEOUT_S = 30.0  # it looks for a second, and may have to reach another node
RETRY_S = 0.5
SUPERVISOR_TIMEOUT_S = 3 * FENCE_TIMEOUT_S  # it waits for stages at most twice as long
CAUSE_POLLS, CAUSE_POLL_S = 60, 0.05  # Ray may need 1.6 s to tell that an actor is dead


class ObjectStoreStageChain:
    """The object-store link: hidden states flow from producer to consumer through Ray's object store; small ones ride inline.

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
        began = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(SUPERVISOR_TIMEOUT_S):
                    epoch: int = await self._supervisor.fence.remote(self._holder)
                return epoch
            except LeaseError as error:  # Ray's error is of its cause's class too
                raise LeaseError(ray_error_message(error)) from error
            except RayError as error:  # before TimeoutError, which that of a supervisor whose stages do not answer is as well
                waited_s = time.monotonic() - began
                if waited_s > LOAD_TIMEOUT_S or not _is_restarting(error):
                    raise PipelineError(f"the stages could not be fenced: {ray_error_message(error)}") from error
                if isinstance(error, GetTimeoutError) or waited_s > UNREACHABLE_TIMEOUT_S:
                    await self.replace_hung_workers(FENCE_TIMEOUT_S)
                await asyncio.sleep(RETRY_S)
            except TimeoutError:  # it does nothing any more; another process finds everything again
                logger.warning("the supervisor does not answer, and gets a new process")
                await asyncio.to_thread(ray.kill, self._supervisor, no_restart=False)

    async def replace_hung_workers(self, limit_s: float) -> str:
        """See ``stuck``. A supervisor that is starting again, or whose answer is lost, is asked the next time."""
        try:
            async with asyncio.timeout(RESCUE_TIMEOUT_S):
                reason: str = await self._supervisor.replace_hung_workers.options(concurrency_group="rescue").remote(limit_s)
        except (RayError, TimeoutError) as error:
            logger.warning("nobody could look for what is stuck: %s", ray_error_message(error))
            return ""
        return reason

    async def move_experts(self, plan: ExpertPlan) -> int:
        """While steps run; see ``expert_moving``. Raises PlanError or PipelineError."""
        try:
            moved: int = await self._supervisor.move_experts.options(concurrency_group="moving").remote(plan)
        except PlanError as error:  # Ray's error is of its cause's class too
            raise PlanError(ray_error_message(error)) from error
        except RayError as error:
            raise PipelineError(f"experts could not be moved: {ray_error_message(error)}") from error
        return moved

    async def health(self) -> list[StageHealth]:
        """Of every stage, also while steps run. Raises PipelineError if one does not answer."""
        asked = [stage.health.options(concurrency_group="control").remote() for stage in self.stages]
        try:
            return list(await asyncio.wait_for(asyncio.gather(*asked), HEALTH_TIMEOUT_S))
        except (RayError, TimeoutError) as error:
            raise PipelineError(f"a stage does not answer: {ray_error_message(error)}") from error

    async def _result(self, ref: "ObjectRef[Any]") -> StepResult:
        try:
            return wire.decode_result(await ref)
        except RayError as error:
            raise PipelineError(f"a stage failed: {ray_error_message(error)}") from error


class DirectStageChain(ObjectStoreStageChain):
    """The direct link: every stage gets the same small message at once; hidden states do not touch Ray.

    Nothing ties these calls together, so each of them is listened to, in case it fails.
    """

    def __init__(self, stages: Sequence[ActorHandle[Any]], supervisor: ActorHandle[Any], holder: str) -> None:
        super().__init__(stages, supervisor, holder)
        self._failures: list[BaseException] = []  # of the steps since the last fence, as they are heard

    def submit(self, batch: MicroBatch) -> Awaitable[StepResult]:
        message = wire.encode_batch(batch)
        answers: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        heard: list[bytes] = []
        for stage in self.stages:
            ref: ObjectRef[bytes] = stage.linked_step.remote(message)
            ref.future().add_done_callback(partial(self._on_reply, answers, heard, self._failures))
        return self._gather(answers, self._failures)

    async def fence(self) -> int:
        epoch = await super().fence()
        self._failures = []
        return epoch

    def _on_reply(
        self, answers: "asyncio.Future[list[bytes]]", heard: list[bytes], failures: list[BaseException], answer: "Future[bytes]"
    ) -> None:
        """In a thread of Ray's. Only what decides the step wakes the loop: an error, or the last answer."""
        error = answer.exception()
        if error is None:
            heard.append(answer.result())
        else:
            failures.append(error)
        loop = answers.get_loop()
        if (error is not None or len(heard) == self.num_stages) and not loop.is_closed():
            loop.call_soon_threadsafe(self._settle, answers, error or heard)

    def _settle(self, answers: "asyncio.Future[list[bytes]]", outcome: BaseException | list[bytes]) -> None:
        if answers.done():
            return
        if isinstance(outcome, BaseException):
            answers.set_exception(outcome)
        else:
            answers.set_result(outcome)

    async def _gather(self, answers: "asyncio.Future[list[bytes]]", failures: list[BaseException]) -> StepResult:
        try:
            return merge_results([wire.decode_result(answer) for answer in await answers])
        except RayError as error:
            raise PipelineError(f"a stage failed: {ray_error_message(await _root_cause(error, failures))}") from error


async def _root_cause(error: BaseException, failures: list[BaseException]) -> BaseException:
    """That a neighbour fell silent is a consequence. The cause is heard from another stage, perhaps with a later step."""
    for _ in range(CAUSE_POLLS):
        error = next((failure for failure in failures if not isinstance(failure, LinkError)), error)
        if not isinstance(error, LinkError):
            break
        await asyncio.sleep(CAUSE_POLL_S)
    return error


def merge_results(parts: Sequence[StepResult]) -> StepResult:
    """Of all stages, in any order."""
    in_order = sorted(parts, key=lambda part: part.timings[-1].stage_id)
    timings = tuple(timing for part in in_order for timing in part.timings)
    return replace(
        in_order[-1], timings=timings, expert_choices=tuple(chosen for part in in_order for chosen in part.expert_choices)
    )


def _is_restarting(error: RayError) -> bool:
    """Whether the supervisor, or a stage that it asked, does not answer just now, or was born again meanwhile.

    A supervisor that is dead for good has been removed with its pipeline; a stage's death comes as its error.
    """
    if isinstance(error, ActorDiedError) and not isinstance(error, RayTaskError):
        return False
    return isinstance(getattr(error, "cause", error), RayActorError | GetTimeoutError | StaleEpochError)
