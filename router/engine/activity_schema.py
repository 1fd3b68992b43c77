"""What ``GET /activity`` answers, for its description: tests hold answers against these models. All times in seconds."""

from pydantic import BaseModel, ConfigDict


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ShownStage(_Shape):
    label: str
    stage: int


class Percentiles(_Shape):
    """Of the last minute."""

    p50: float
    p95: float


class PastMicroBatch(_Shape):
    """``stages``: of each its number, when it began by its own clock (since 1970), how long it computed, and how long it took."""

    number: int
    step: int
    epoch: int
    prefill_tokens: int
    decodes: int
    stages: list[tuple[int, float, float, float]]


class PipelineActivity(_Shape):
    """``busy``, a share for each stage, and ``tokens_per_s`` are of the last ten seconds; ``last`` is for the next ``after``."""

    name: str
    stages: list[ShownStage]
    busy: list[float]
    tokens_per_s: float
    running: int
    waiting: int
    pages_held: int
    pages: int
    epoch: int
    recoveries: int
    first_token_s: Percentiles | None
    inter_token_s: Percentiles | None
    micro_batches: list[PastMicroBatch]
    last: int


class Activity(_Shape):
    """``now`` is the door's clock (since 1970)."""

    now: float
    pipelines: list[PipelineActivity]
