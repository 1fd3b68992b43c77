"""A stage chain within this process, without Ray."""

import asyncio
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Self

from tramontane.cluster.actors.worker_actor import READY
from tramontane.cluster.pipeline.load_progress import LoadProgress, ShowLoading
from tramontane.cluster.pipeline.stage_chain import pipeline_fingerprint
from tramontane.proto.errors import PipelineError, TramontaneError
from tramontane.proto.model_folder import WeightSource
from tramontane.proto.plan import PipelinePlan, StagePlan
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.workers.sampling.structured_output import LoadVocabulary
from tramontane.workers.stage.hidden_states import HiddenStates
from tramontane.workers.stage.stage_worker import StageWorker


class LocalStageChain:
    """``StageChain`` whose stages run one after the other in one thread, so that the event loop
    stays free.

    ``weights``: the name of the weights, see ``weights_name``.
    """

    def __init__(self, stages: Sequence[StageWorker], weights: str = "") -> None:
        self.stages, self._weights = stages, weights
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stages")

    @classmethod
    def load(
        cls,
        plan: PipelinePlan,
        weights: WeightSource,
        devices: Sequence[str],
        show: ShowLoading | None = None,
        read_pieces: LoadVocabulary = tuple,
        name: str = "",
    ) -> Self:
        """Load one stage after the other, each to the next device. ``read_pieces``: see
        ``StageWorker``.

        ``name``: of the weights.
        """
        progress = [LoadProgress(stage.label, 0, stage.weight_bytes) for stage in plan.stages]

        def load_stage(number: int, stage: StagePlan) -> StageWorker:
            def set_progress(num_loaded: int = 0, activity: str = "") -> None:
                loaded = progress[number].num_bytes + num_loaded
                progress[number] = replace(progress[number], num_bytes=loaded, activity=activity)
                if show is not None:
                    show(list(progress))

            device = devices[number % len(devices)]
            on_tensor, on_activity = (
                (lambda _read, n: set_progress(n)),
                (lambda text: set_progress(activity=text)),
            )
            worker = StageWorker.load(stage, weights, device, on_tensor, read_pieces, on_activity)
            set_progress(activity=READY)
            return worker

        return cls([load_stage(number, stage) for number, stage in enumerate(plan.stages)], name)

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.stages)

    @property
    def has_lost_node(self) -> bool:
        """False: there is no other node."""
        return False

    def submit(self, batch: MicroBatch) -> Awaitable[StepResult]:
        """Queue a micro-batch; the result raises PipelineError if a stage fails."""
        return asyncio.get_running_loop().run_in_executor(self._thread, self._run, batch)

    async def fence(self) -> int:
        """Make the stages drop their sequences; return the new epoch."""
        epoch = max(stage.epoch for stage in self.stages) + 1
        for stage in self.stages:
            await asyncio.get_running_loop().run_in_executor(self._thread, stage.fence, epoch)
        return epoch

    async def replace_hung_workers(self, limit_s: float) -> str:
        """Return "": a stage of this process cannot be replaced."""
        return ""

    async def fingerprint(self) -> str:
        """Return the fingerprint of the stages."""
        return pipeline_fingerprint(
            self._weights, [(stage.plan, stage.numerics) for stage in self.stages]
        )

    async def device_names(self) -> list[str]:
        """Return the name of every stage's device."""
        return [stage.device_name for stage in self.stages]

    def close(self) -> None:
        """Cancel waiting work, and wait for running work."""
        self._thread.shutdown(cancel_futures=True)

    def _run(self, batch: MicroBatch) -> StepResult:
        carried: HiddenStates | StepResult | None = None
        try:
            for stage in self.stages:
                assert not isinstance(carried, StepResult)
                carried = stage.step(batch, carried)
        except TramontaneError:
            raise
        except Exception as error:
            raise PipelineError(f"a stage failed: {error!r}") from error
        assert isinstance(carried, StepResult)
        return carried
