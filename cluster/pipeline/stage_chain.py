"""Stage chains over Ray, one per kind of link: the router submits a micro-batch to all stages at
once, in a thread.
"""

import asyncio
import hashlib
import itertools
import logging
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.actors.stage_actor import StageHealth
from tramontane.cluster.actors.stage_control import find_expert_actors
from tramontane.cluster.common.node_watch import NodeLossDetector
from tramontane.cluster.common.ray_api import ray_error_message
from tramontane.cluster.pipeline.resources import WaitDescriber
from tramontane.proto import wire
from tramontane.proto.errors import LeaseError, LinkError, PipelineError, PlanError, StaleEpochError
from tramontane.proto.model_folder import RandomWeights, WeightSource
from tramontane.proto.plan import ExpertPlan, StagePlan
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.proto.timing import (
    CAUSE_POLL_S,
    CAUSE_POLLS,
    FENCE_TIMEOUT_S,
    LOAD_TIMEOUT_S,
    RESCUE_TIMEOUT_S,
    STAGE_HEALTH_TIMEOUT_S,
    SUPERVISOR_FENCE_TIMEOUT_S,
    UNREACHABLE_TIMEOUT_S,
)
from tramontane.proto.units import backoff_delays
from tramontane.workers.device.numerics import Numerics
from tramontane.workers.weights.checkpoint import CheckpointDigest, short_digest

# a router does not start before it has queried them, and they may be restarting
EXPERTS_TIMEOUT_S = 1.0
RETRY_S, MAX_RETRY_S = 0.5, 5.0
NODES_TIMEOUT_S = 2.0  # for the head node's answer
FINGERPRINT_PREFIX = "fp_"  # as OpenAI's begin
FINGERPRINT_DIGITS = 16

logger = logging.getLogger(__name__)


class ObjectStoreStageChain:
    """The object-store link: hidden states travel through Ray's object store; small ones are inline
    in the calls.

    Ray runs one caller's calls on a synchronous actor in the order of submission, so micro-batches
    enter every stage in the order of ``submit``. A thread makes the calls, one or more per stage,
    so that the event loop of the router stays free.

    Where stages take turns, the first stage's call has the result of the previous micro-batch as an
    argument, if that is still in flight. So it begins when all stages have finished the previous
    micro-batch, without the router, and knows the sampled tokens.
    """

    def __init__(
        self,
        stages: Sequence[ActorHandle[Any]],
        supervisor: ActorHandle[Any],
        holder: str,
        nodes: NodeLossDetector | None = None,
        spec: PipelineSpec | None = None,
    ) -> None:
        self.stages = stages
        self._supervisor = supervisor
        self._holder = holder
        self._nodes = nodes
        self._spec = spec
        self._waits = WaitDescriber(spec) if spec else None
        self._experts: list[ActorHandle[Any]] = []  # the expert actors, once they have been found
        # as last seen; they restart without a fence
        self._expert_numerics: list[Numerics | None] = []
        self.has_lost_node = False  # see ``StageChain``
        self._calling = ThreadPoolExecutor(1, thread_name_prefix="stage-calls")
        self._takes_turns = (
            spec is not None and len(stages) > 1 and spec.plan.max_concurrent_stages == 1
        )
        self._newest: _Step | None = None  # since the last fence
        # of the last stage; of the calling thread only
        self._newest_result: ObjectRef[bytes] | None = None
        # of the steps since the last fence, in order of arrival
        self._failures: list[BaseException] = []

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.stages)

    def submit(self, batch: MicroBatch) -> Awaitable[StepResult]:
        """Submit a micro-batch to every stage; the result raises PipelineError if one fails."""
        step, before = (
            _Step(asyncio.get_running_loop().create_future(), self._failures),
            self._newest,
        )
        is_next = (
            self._takes_turns
            and before is not None
            and (batch.decodes.has_placeholders or not before.result.done())
        )
        self._calling.submit(self._call_stages, wire.encode_batch(batch), step, is_next)
        self._newest = step
        return self._gather(step)

    def _call_stages(self, message: bytes, step: "_Step", is_next: bool) -> None:
        """Call the stages, and record their replies. Runs in a separate thread. ``is_next``: the
        step follows the last submitted one.
        """
        try:
            refs = self._start_step(message, self._newest_result if is_next else None)
            self._newest_result = refs[-1]
        except Exception as error:  # of Ray
            step.fail(error)
            return
        for ref in refs:
            ref.future().add_done_callback(partial(step.on_reply, len(refs)))

    def _start_step(
        self, message: bytes, last_result: "ObjectRef[bytes] | None"
    ) -> "list[ObjectRef[bytes]]":
        """Call all stages; return the replies that make up the result, the last stage's last."""
        carried: ObjectRef[Any] | None = last_result
        for stage in self.stages:
            carried = stage.step.remote(message, carried)
        assert carried is not None
        return [carried]

    async def fence(self) -> int:
        """Make all stages drop their sequences; return the new epoch.

        Raises LeaseError if another router holds the lease, PipelineError if a stage is lost
        permanently, cannot load, or takes longer than LOAD_TIMEOUT_S.
        """
        epoch = await self._fence()
        self._failures, self._newest = [], None
        self.has_lost_node = await self._check_nodes()
        return epoch

    async def _check_nodes(self) -> bool:
        """Return whether a node has died since the last fence; False if the head node does not
        answer.
        """
        if self._nodes is None:
            return False
        try:
            async with asyncio.timeout(NODES_TIMEOUT_S):
                return await asyncio.to_thread(self._nodes.check)
        except (RayError, TimeoutError) as error:
            logger.warning("it is not known whether a node has died: %s", ray_error_message(error))
            return False

    async def _fence(self) -> int:
        began, delays = time.monotonic(), backoff_delays(RETRY_S, MAX_RETRY_S)
        while True:
            try:
                async with asyncio.timeout(SUPERVISOR_FENCE_TIMEOUT_S):
                    fenced: tuple[int, list[ActorHandle[Any]]]
                    fenced = await self._supervisor.fence.remote(self._holder)
                epoch, self.stages = fenced
                return epoch
            except LeaseError as error:  # Ray's error also has the class of its cause
                raise LeaseError(ray_error_message(error)) from error
            # before TimeoutError, because Ray's GetTimeoutError from the supervisor is a subclass
            # of it
            except RayError as error:
                waited_s = time.monotonic() - began
                if waited_s > LOAD_TIMEOUT_S or not _is_restarting(error):
                    raise PipelineError(
                        f"the stages could not be fenced: {ray_error_message(error)}"
                    ) from error
                if isinstance(error, GetTimeoutError) or waited_s > UNREACHABLE_TIMEOUT_S:
                    await self.replace_hung_workers(FENCE_TIMEOUT_S)
                await asyncio.sleep(next(delays))
            except TimeoutError:  # it hangs; another process finds everything again
                logger.warning(
                    "the supervisor gets a new process: it has not answered a fence for %g s",
                    SUPERVISOR_FENCE_TIMEOUT_S,
                )
                await asyncio.to_thread(ray.kill, self._supervisor, no_restart=False)

    async def replace_hung_workers(self, limit_s: float) -> str:
        """Replace hung workers (see ``hang_detector``); return "" also if the supervisor does not
        answer this time.
        """
        try:
            async with asyncio.timeout(RESCUE_TIMEOUT_S):
                reason: str = await self._supervisor.replace_hung_workers.options(
                    concurrency_group="rescue"
                ).remote(limit_s)
        except (RayError, TimeoutError) as error:
            logger.warning(
                "the supervisor could not check for hung workers: %s", ray_error_message(error)
            )
            return ""
        return reason

    async def move_experts(self, plan: ExpertPlan) -> int:
        """Make the pipeline follow another expert plan while steps run; return how many copies of
        experts were loaded.

        Raises PlanError or PipelineError; see ``rebalance_experts``.
        """
        try:
            moved: int = await self._supervisor.move_experts.options(
                concurrency_group="moving"
            ).remote(plan)
        except PlanError as error:  # Ray's error also has the class of its cause
            raise PlanError(ray_error_message(error)) from error
        except RayError as error:
            raise PipelineError(
                f"experts could not be moved: {ray_error_message(error)}"
            ) from error
        return moved

    async def fingerprint(self) -> str:
        """Return the fingerprint of the current stages and expert actors; "" if it is unknown.

        An expert actor that does not answer because it restarts counts with its previous numerics.
        """
        if (spec := self._spec) is None:
            return ""
        try:
            stages, experts = await asyncio.gather(self.health(), self._read_expert_numerics(spec))
        except PipelineError as error:
            logger.warning("the pipeline's fingerprint is not known: %s", error)
            return ""
        pairs = [
            (plan, health.numerics)
            for plan, health in zip(spec.plan.stages, stages, strict=True)
            if health.numerics
        ]
        known = [numerics for numerics in experts if numerics]
        if len(pairs) < len(stages) or len(known) < (
            len(spec.plan.experts.actors) if spec.plan.experts else 0
        ):
            return ""
        weights = weights_name(
            spec.weights, spec.checkpoint_digest, spec.pieces.folder if spec.pieces else None
        )
        return pipeline_fingerprint(weights, pairs, known)

    async def _read_expert_numerics(self, spec: PipelineSpec) -> list[Numerics | None]:
        """Return the numerics of all expert actors, in order; see ``fingerprint``."""
        if spec.expert_actors is None:
            return []
        try:
            async with asyncio.timeout(EXPERTS_TIMEOUT_S):
                if not self._experts:
                    found = await asyncio.to_thread(find_expert_actors, spec)
                    self._experts = (
                        list(found.values()) if len(found) == len(spec.expert_actors.names) else []
                    )
                asked = [
                    actor.health.options(concurrency_group="control").remote()
                    for actor in self._experts
                ]
                answers = await asyncio.gather(*asked, return_exceptions=True)
        except (RayError, TimeoutError):
            answers = []
        seen = [
            None if isinstance(answer, BaseException) else answer.numerics for answer in answers
        ]
        self._expert_numerics = [
            now or before for now, before in itertools.zip_longest(seen, self._expert_numerics)
        ]
        return self._expert_numerics

    async def health(self) -> list[StageHealth]:
        """Return the health of every stage, also while steps run. Raises PipelineError if one does
        not answer.
        """
        refs = [stage.health.options(concurrency_group="control").remote() for stage in self.stages]
        try:
            return list(await asyncio.wait_for(asyncio.gather(*refs), STAGE_HEALTH_TIMEOUT_S))
        except (RayError, TimeoutError) as error:
            raise PipelineError(
                f"a stage does not answer health checks (limit {STAGE_HEALTH_TIMEOUT_S:g} s):"
                f" {ray_error_message(error)}"
            ) from error

    async def describe_wait(self) -> str:
        """Return what the pipeline waits for, where a stage is being replaced; "" if that is not
        known.
        """
        return await self._waits.describe() if self._waits else ""

    async def device_names(self) -> list[str]:
        """Return the name of every stage's device. Raises PipelineError as ``health`` does."""
        return [health.device for health in await self.health()]

    async def _gather(self, step: "_Step") -> StepResult:
        try:
            return await step.result
        except RayError as error:
            raise PipelineError(
                f"a stage failed: {ray_error_message(await _root_cause(error, step.failures))}"
            ) from error


class DirectStageChain(ObjectStoreStageChain):
    """The direct link: every stage gets the same small message at once; hidden states do not pass
    through Ray.

    The calls of a step are independent for Ray, so the failure of each is observed.
    """

    def _start_step(
        self, message: bytes, last_result: "ObjectRef[bytes] | None"
    ) -> "list[ObjectRef[bytes]]":
        first, *others = self.stages
        return [
            first.linked_step.remote(message, last_result),
            *(stage.linked_step.remote(message) for stage in others),
        ]


class _Step:
    """The replies to one micro-batch, and its result; errors are also added to ``failures``. Other
    threads call its methods.
    """

    def __init__(self, result: "asyncio.Future[StepResult]", failures: list[BaseException]) -> None:
        self.result, self.failures = result, failures
        self._received: list[StepResult] = []

    def on_reply(self, num_replies: int, reply: "Future[bytes]") -> None:
        """Record one of ``num_replies`` replies; only an error or the last reply, which decide the
        step, wake the loop.
        """
        try:
            self._received.append(wire.decode_result(reply.result()))
        except BaseException as error:  # of the stage
            self.fail(error)
            return
        if len(self._received) == num_replies:
            self._wake(merge_results(self._received))

    def fail(self, error: BaseException) -> None:
        """End the step with an error."""
        self.failures.append(error)
        self._wake(error)

    def _wake(self, outcome: BaseException | StepResult) -> None:
        loop = self.result.get_loop()
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._settle, outcome)

    def _settle(self, outcome: BaseException | StepResult) -> None:
        if self.result.done():
            return
        if isinstance(outcome, BaseException):
            self.result.set_exception(outcome)
        else:
            self.result.set_result(outcome)


async def _root_cause(error: BaseException, failures: list[BaseException]) -> BaseException:
    """Return the first failure that is not a LinkError, which is only a consequence of another
    stage's failure.

    That may arrive later, even with a later step; after CAUSE_POLLS polls the LinkError itself is
    returned.
    """
    for _ in range(CAUSE_POLLS):
        error = next((failure for failure in failures if not isinstance(failure, LinkError)), error)
        if not isinstance(error, LinkError):
            break
        await asyncio.sleep(CAUSE_POLL_S)
    return error


def merge_results(parts: Sequence[StepResult]) -> StepResult:
    """Merge the results of all stages, given in any order."""
    in_order = sorted(parts, key=lambda part: part.timings[-1].stage_id)
    timings = tuple(timing for part in in_order for timing in part.timings)
    return replace(
        in_order[-1],
        timings=timings,
        expert_choices=tuple(chosen for part in in_order for chosen in part.expert_choices),
    )


def _is_restarting(error: RayError) -> bool:
    """Return True if the supervisor, or a stage that it called, is unavailable or has restarted
    during the call.

    A permanently dead supervisor was removed with its pipeline; a stage's death arrives as the
    supervisor's error.
    """
    if isinstance(error, ActorDiedError) and not isinstance(error, RayTaskError):
        return False
    return isinstance(
        getattr(error, "cause", error), RayActorError | GetTimeoutError | StaleEpochError
    )


# The fingerprint of a pipeline: with equal fingerprints, the same request gives the same tokens.


def weights_name(weights: WeightSource, files: CheckpointDigest, model: Path | None) -> str:
    """Name the weights by the digest of the files that are read; for a model without files, by
    the model's name.
    """
    if not isinstance(weights, RandomWeights):
        return short_digest(files)
    return f"random weights of {short_digest(files) if files else model}"


def pipeline_fingerprint(
    weights: str, stages: Sequence[tuple[StagePlan, Numerics]], experts: Sequence[Numerics] = ()
) -> str:
    """Return the fingerprint of stages, in order, and of expert actors if there are any.

    If all are batch-invariant and compute in the same way, it does not depend on the distribution
    of layers and experts.
    """
    first = stages[0][0]
    common = _common_parts([*(numerics for _, numerics in stages), *experts])
    split = (
        [(plan.first_layer, plan.last_layer, numerics) for plan, numerics in stages],
        list(experts),
    )
    parts = (
        version("tramontane"),
        weights,
        first.args,
        first.dtype,
        first.quantize,
        common or split,
    )
    return (
        FINGERPRINT_PREFIX + hashlib.sha256(repr(parts).encode()).hexdigest()[:FINGERPRINT_DIGITS]
    )


def _common_parts(workers: Sequence[Numerics]) -> list[tuple[str, str]] | None:
    """Return the parts of all workers, or None if a worker is not batch-invariant or two workers
    differ.
    """
    common: dict[str, str] = {}
    for worker in workers:
        is_alike = all(common.setdefault(part, name) == name for part, name in worker.parts)
        if not (worker.is_batch_invariant and is_alike):
            return None
    return sorted(common.items())
