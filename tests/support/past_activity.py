"""The activity log of a pipeline of two stages after a prompt and two decodes."""

from typing import Any

from tramontane.proto.step import Chunk, DecodeColumns, MicroBatch, StageTiming, StepResult
from tramontane.router.engine.activity_log import ActivityLog, PipelineActivity, StageInfo

BEGAN_AT, ENDED_AT = 1000.0, 1004.0
STEPS = ((8, 0), (4, 1), (0, 2))  # prefill tokens, decodes


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
    name: str = "app-1", log: ActivityLog | None = None, after: int | None = None
) -> PipelineActivity:
    """Return what ``RouterReplica.activity`` returns."""
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
    stages = [
        StageInfo(label=f"Stage {1 + i}/2 layers {4 * i}-{4 * i + 3}", stage=i) for i in range(2)
    ]
    return PipelineActivity(
        name=name, stages=stages, **numbers, **(log or log_of()).as_data(2, after)
    )


def pipeline_data(
    name: str = "app-1", log: ActivityLog | None = None, after: int | None = None
) -> dict[str, Any]:
    """Return it as in the response of ``GET /activity``."""
    return pipeline_activity(name, log, after).model_dump()
