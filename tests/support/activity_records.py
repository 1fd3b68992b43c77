"""What routers report of pipelines that do not exist: of two stages after a prompt and two decodes,
and of any that compute forever.
"""

import time
from collections.abc import Mapping
from typing import Any

from tramontane.proto.step import Chunk, DecodeColumns, MicroBatch, StageTiming, StepResult
from tramontane.router.engine.activity_log import (
    ActivityLog,
    MicroBatchActivity,
    Percentiles,
    PipelineActivity,
    StageInfo,
)

BEGAN_AT, ENDED_AT = 1000.0, 1004.0
STEPS = ((8, 0), (4, 1), (0, 2))  # prefill tokens, decodes
PERIOD_S = 0.2  # from one micro-batch to the next, in every stage that computes forever
# there: tokens of prompts, decodes; neither: a bubble
KINDS = ((0, 12), (0, 12), (180, 8), (0, 12), (480, 0), (0, 0))
SHOWN_S = 6.0  # of activity that a client gets with its first request


def log_of(steps: tuple[tuple[int, int], ...] = STEPS) -> ActivityLog:
    """Return a log with one step per second.

    The first stage computes for half a second. The second one takes as long, half of which it waits
    for experts.
    """
    now = [BEGAN_AT]
    log = ActivityLog(lambda: now[0])
    for step, (prefill, decodes) in enumerate(steps):
        began = BEGAN_AT + step
        now[0] = began + 1
        chunks = (Chunk(9, 0, (1,) * prefill, ((),), None, needs_sample=True),) if prefill else ()
        batch = MicroBatch(5, step, chunks, (), DecodeColumns(*([tuple(range(decodes))] * 3)))
        timings = (
            StageTiming(0, began, 0.5, prefill + decodes),
            StageTiming(1, began + 0.5, 0.25, prefill + decodes, 0.5),
        )
        log.record(batch, StepResult(5, step, (5,) * len(batch.sampled_seq_ids), timings))
    now[0] = ENDED_AT
    return log


def pipeline_activity(
    name: str = "app-1", log: ActivityLog | None = None, after: int | None = None, **fields: Any
) -> PipelineActivity:
    """Return what ``RouterReplica.activity`` returns, with these fields instead of the usual."""
    numbers = {
        "running": 2,
        "waiting": 1,
        "pages_held": 3,
        "pages": 40,
        "pages_cached": 9,
        "prefix_cache_queries": 50,
        "prefix_cache_hits": 32,
        "draft_tokens": 40,
        "accepted_tokens": 30,
        "epoch": 5,
        "recoveries": 1,
    }
    reported = numbers | {"stages": _stages(2, 8)} | (log or log_of()).as_data(2, after)
    return PipelineActivity(name=name, **reported | fields)


def _stages(num_stages: int, num_layers: int) -> list[StageInfo]:
    bounds = [round(num_layers * stage / num_stages) for stage in range(num_stages + 1)]
    return [
        StageInfo(
            label=f"Stage {i + 1}/{num_stages} layers {bounds[i]}-{bounds[i + 1] - 1}", stage=i
        )
        for i in range(num_stages)
    ]


def pipeline_data(
    name: str = "app-1", log: ActivityLog | None = None, after: int | None = None
) -> dict[str, Any]:
    """Return it as in the response of ``GET /activity``."""
    return pipeline_activity(name, log, after).model_dump()


class EndlessActivity:
    """Answers for pipelines whose micro-batches are functions of their numbers.

    ``pipelines`` has the number of stages by name; ``recoveries`` is the number of recoveries of
    each.
    """

    def __init__(self, pipelines: dict[str, int]) -> None:
        self.pipelines = pipelines
        self.recoveries = 0
        self.requested = 0
        self.begins_at = time.time() - SHOWN_S

    async def report(self, after: Mapping[str, int]) -> list[PipelineActivity]:
        """Return what ``ActivityEndpoint`` expects from routers."""
        self.requested += 1
        now = time.time()
        return [self._pipeline(name, after.get(name, -1), now) for name in self.pipelines]

    def _pipeline(self, name: str, after: int, now: float) -> PipelineActivity:
        num_stages = self.pipelines[name]
        last = int((now - self.begins_at) / PERIOD_S) - num_stages
        return pipeline_activity(
            name,
            stages=_stages(num_stages, 8),
            busy=[0.83 - 0.09 * stage for stage in range(num_stages)],
            tokens_per_s=1234.5,
            running=12,
            waiting=3,
            pages_held=96,
            pages=256,
            pages_cached=130,
            prefix_cache_queries=5120,
            prefix_cache_hits=3840,
            draft_tokens=0,
            accepted_tokens=0,
            epoch=1 + self.recoveries,
            recoveries=self.recoveries,
            first_token_s=Percentiles(p50=0.182, p95=1.25),
            inter_token_s=None,
            micro_batches=[
                self._batch(number, num_stages)
                for number in range(after + 1, last + 1)
                if any(KINDS[number % len(KINDS)])
            ],
            last=max(last, after),
        )

    def _batch(self, number: int, num_stages: int) -> MicroBatchActivity:
        prefill, decodes = KINDS[number % len(KINDS)]
        begun, busy = self.begins_at + number * PERIOD_S, PERIOD_S * (0.55 if prefill == 0 else 0.9)
        return MicroBatchActivity(
            number=number,
            step=number,
            epoch=1 + self.recoveries,
            prefill_tokens=prefill,
            decodes=decodes,
            stages=[(stage, begun + stage * PERIOD_S, busy, busy) for stage in range(num_stages)],
        )
