"""The Ray actor of a draft model, and the router's calls to it."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from tramontane.cluster.actors.hang_detector import replace_hung_workers
from tramontane.cluster.actors.pipeline_spec import DraftModelSpec, PipelineSpec, WorkerSettings
from tramontane.cluster.actors.stage_actor import bundle_options
from tramontane.cluster.actors.worker_actor import NAMESPACE, WorkerActor, WorkerHealth
from tramontane.cluster.common.ray_api import ray_error_message
from tramontane.proto.errors import PipelineError
from tramontane.proto.step import DraftRequest

if TYPE_CHECKING:
    from tramontane.workers.stage.draft_model import DraftModel

CALL_TIMEOUT_S = 60.0  # of one call, which computes a bounded number of tokens


class DraftActor(WorkerActor["DraftModel"]):
    """A ``DraftModel`` behind Ray. A new process has no sequences, and reports them as not held."""

    def __init__(self, spec: DraftModelSpec, settings: WorkerSettings) -> None:
        if settings.logs is not None:
            settings.logs.to_stderr("draft model", pipeline=settings.pipeline)
        self._plan = spec.plan
        self._drafting_since: float | None = None
        super().__init__("the draft model", spec.plan.weight_bytes, settings)

    def _load(self) -> "DraftModel":
        from tramontane.workers.stage.draft_model import DraftModel
        from tramontane.workers.stage.stage_worker import StageWorker

        settings = self._settings
        worker = StageWorker.load(
            self._plan,
            settings.weights,
            settings.device,
            self._on_tensor,
            on_activity=self._on_activity,
        )
        return DraftModel(worker)

    def _exporter(self) -> Callable[[], None]:
        return lambda: None  # its work shows in the metrics of drafts

    @ray.method(enable_task_events=False, concurrency_group="drafting")
    def draft(
        self, requests: Sequence[DraftRequest], ended: Sequence[int]
    ) -> list[tuple[int, ...] | None]:
        """Return drafts of each request; see ``DraftModel.draft``."""
        import torch

        model = self._wait_until_loaded()
        torch.set_num_threads(self._settings.threads)  # applies to this thread only
        self._drafting_since = time.monotonic()
        try:
            with self._failure_guard.guard():
                return model.draft(requests, ended)
        finally:
            self._drafting_since = None

    @property
    def _busy_for_s(self) -> float:
        since = self._drafting_since
        return 0.0 if since is None else time.monotonic() - since

    @ray.method(concurrency_group="control")
    def health(self) -> WorkerHealth:
        """Return the actor's health, also while it drafts or loads."""
        return WorkerHealth(**self._health())


def create_draft_actor(spec: PipelineSpec, group: PlacementGroup) -> ActorHandle[Any]:
    """Create the named, detached actor of the draft model in its bundle, or return the existing
    one.
    """
    assert spec.draft_model is not None
    actor: Any = ray.remote(
        concurrency_groups={"control": 2, "drafting": 1}, max_restarts=-1, max_task_retries=0
    )(DraftActor)  # type: ignore[call-overload]
    draft_model = spec.draft_model
    share = spec.gpu_share if draft_model.shares_gpu else 1
    options = bundle_options(spec, spec.bundle_of_draft_model, group, share)
    settings = replace(
        spec.worker_settings,
        weights=draft_model.weights,
        checkpoint_digest=draft_model.checkpoint_digest,
    )
    create = actor.options(**options, name=spec.draft_name).remote
    return cast("ActorHandle[Any]", create(draft_model, settings))


class RayDraftModel:
    """``DraftPort`` of the draft model of a pipeline."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._actor: ActorHandle[Any] | None = None

    async def draft(
        self, requests: Sequence[DraftRequest], ended: Sequence[int]
    ) -> list[tuple[int, ...] | None]:
        """Call the actor. Raises PipelineError if it cannot be reached or does not answer within
        ``CALL_TIMEOUT_S``.

        Then it gets a new process, unless it is only loading.
        """
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                if self._actor is None:
                    self._actor = await asyncio.to_thread(ray.get_actor, self._name, NAMESPACE)
                answer: list[tuple[int, ...] | None] = await self._actor.draft.remote(
                    list(requests), list(ended)
                )
                return answer
        except (RayError, TimeoutError, ValueError) as error:
            actor, self._actor = self._actor, None  # another actor may have its name
            if isinstance(error, TimeoutError) and actor is not None:
                await asyncio.to_thread(
                    replace_hung_workers, {self._name: actor}, CALL_TIMEOUT_S / 2
                )
            raise PipelineError(
                f"the draft model does not answer: {ray_error_message(error)}"
            ) from error


def draft_port(spec: PipelineSpec) -> RayDraftModel | None:
    """Return the router's port to a pipeline's draft model, if it has one."""
    return RayDraftModel(spec.draft_name) if spec.draft_model else None
