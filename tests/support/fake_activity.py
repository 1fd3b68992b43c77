"""Answers of ``GET /activity`` for pipelines that do not exist; each micro-batch is a function of
its number.
"""

import time
from collections.abc import Mapping, Sequence

from tramontane.router.engine.activity_log import (
    MicroBatchActivity,
    Percentiles,
    PipelineActivity,
    StageInfo,
)

PERIOD_S = 0.2  # from one micro-batch to the next, in every stage
# tokens of prompts, decodes; neither: a bubble
KINDS = ((0, 12), (0, 12), (180, 8), (0, 12), (480, 0), (0, 0))
SHOWN_S = 6.0  # of activity that a client gets with its first request


class FakeActivity:
    """``pipelines`` has the number of stages by name; ``recoveries`` is the number of recoveries of
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
        bounds = [round(8 * stage / num_stages) for stage in range(num_stages + 1)]
        labels = [
            f"Stage {i + 1}/{num_stages} layers {bounds[i]}-{bounds[i + 1] - 1}"
            for i in range(num_stages)
        ]
        last = int((now - self.begins_at) / PERIOD_S) - num_stages
        return PipelineActivity(
            name=name,
            stages=[StageInfo(label=label, stage=stage) for stage, label in enumerate(labels)],
            busy=[0.83 - 0.09 * stage for stage in range(num_stages)],
            tokens_per_s=1234.5,
            running=12,
            waiting=3,
            pages_held=96,
            pages=256,
            pages_cached=130,
            prefix_cache_queries=5120,
            prefix_cache_hits=3840,
            epoch=1 + self.recoveries,
            recoveries=self.recoveries,
            first_token_s=Percentiles(p50=0.182, p95=1.25),
            inter_token_s=None,
            micro_batches=[
                self._batch(number, num_stages)
                for number in range(after + 1, last + 1)
                if any(_kind(number))
            ],
            last=max(last, after),
        )

    def _batch(self, number: int, num_stages: int) -> MicroBatchActivity:
        prefill, decodes = _kind(number)
        begun, busy = self.begins_at + number * PERIOD_S, PERIOD_S * (0.55 if prefill == 0 else 0.9)
        stages = [(stage, begun + stage * PERIOD_S, busy, busy) for stage in range(num_stages)]
        epoch = 1 + self.recoveries
        return MicroBatchActivity(
            number=number,
            step=number,
            epoch=epoch,
            prefill_tokens=prefill,
            decodes=decodes,
            stages=stages,
        )


def _kind(number: int) -> Sequence[int]:
    return KINDS[number % len(KINDS)]
