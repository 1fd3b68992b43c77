"""Every metric that we export, in one table: the code makes them from it, and README has its rows."""

from dataclasses import dataclass
from typing import Literal

PREFIX = "tramontane_"
KINDS = ("interactive", "batch")  # of requests: of clients at a door, and lines of batch jobs
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
HOPS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5)
TOKENS = tuple(float(2**n) for n in range(14))


@dataclass(frozen=True, slots=True)
class Metric:
    """``labels`` have values that the configuration bounds, and no client chooses."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    labels: tuple[str, ...]
    meaning: str
    boundaries: tuple[float, ...] = ()  # of a histogram

    @property
    def exported(self) -> str:
        """As Prometheus has it. Ray puts its own name before, and ``_total`` behind a counter."""
        return f"ray_{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


def _counter(name: str, unit: str, labels: str, meaning: str) -> Metric:
    return Metric(name, "counter", unit, tuple(labels.split()), meaning)


def _gauge(name: str, unit: str, labels: str, meaning: str) -> Metric:
    return Metric(name, "gauge", unit, tuple(labels.split()), meaning)


def _histogram(name: str, unit: str, labels: str, meaning: str, boundaries: tuple[float, ...] = SECONDS) -> Metric:
    return Metric(name, "histogram", unit, tuple(labels.split()), meaning, boundaries)


RUNNING = _gauge("pipeline_running", "0 or 1", "pipeline", "whether the pipeline takes requests now")
ACTIVE = _counter("pipeline_active_seconds", "seconds", "pipeline", "in which any micro-batch was in flight")
STAGE_BUSY = _counter("stage_busy_seconds", "seconds", "pipeline stage", "in which the stage worked")
STAGE_WAITING = _counter("stage_waiting_seconds", "seconds", "pipeline stage", "in which others had work and the stage had not")
STAGE_TOKENS = _counter("stage_tokens", "tokens", "pipeline stage", "that went through the stage")
SCHEDULED = _counter("scheduled_tokens", "tokens", "pipeline phase", "in micro-batches, of prompts and of answers")
MICRO_BATCHES = _counter("micro_batches", "micro-batches", "pipeline", "that came back")
MICRO_BATCH_TOKENS = _histogram("micro_batch_tokens", "tokens", "pipeline", "in one micro-batch", TOKENS)
HOPS_S = _histogram("hop_seconds", "seconds", "pipeline stage", "until the free stage began what the one before had ended", HOPS)
NUM_RUNNING = _gauge("num_requests_running", "sequences", "pipeline", "that have a place in the pipeline")
NUM_WAITING = _gauge("num_requests_waiting", "sequences", "pipeline", "in the router's queue")
PAGES_HELD = _gauge("kv_cache_pages_in_use", "pages", "pipeline window", "of the rolling cache that sequences hold")
PAGES = _gauge("kv_cache_pages", "pages", "pipeline window", "that there are")
PREEMPTIONS = _counter("num_preemptions", "sequences", "pipeline", "that gave their pages back and were computed again")
RECOVERIES = _counter("recoveries", "recoveries", "pipeline", "after a stage, a node or a step failed")
PAUSES = _counter("recovery_pause_seconds", "seconds", "pipeline", "from a failure to the first token after it")
FIRST_TOKEN = _histogram("time_to_first_token_seconds", "seconds", "kind", "from a request's arrival to its first token")
INTER_TOKEN = _histogram("inter_token_latency_seconds", "seconds", "kind", "between a request's tokens")
WHOLE = _histogram("e2e_request_latency_seconds", "seconds", "kind", "from a request's arrival to its end")
QUEUE = _histogram("request_queue_time_seconds", "seconds", "kind", "of a request in the router's queue")
PROMPT_TOKENS = _counter("prompt_tokens", "tokens", "kind", "of prompts, once a request has its first token")
GENERATION_TOKENS = _counter("generation_tokens", "tokens", "kind", "that were made")
SUCCESS = _counter("request_success", "choices", "kind finished_reason", "that ended, and why")
REFUSED = _counter("requests_refused", "requests", "kind reason", "that were not taken, and why")
EXPERT_TOKENS = _counter("expert_tokens", "tokens", "pipeline stage layer expert", "that an expert was given, wherever it sits")
EXPERT_BUSY = _counter("expert_busy_seconds", "seconds", "pipeline actor", "in which the experts of an expert actor worked")
EXPERT_ROWS = _counter("expert_rows", "rows", "pipeline actor", "of hidden states that an expert actor was given")

OF_PIPELINES = (
    *(RUNNING, ACTIVE, STAGE_BUSY, STAGE_WAITING, STAGE_TOKENS, SCHEDULED, MICRO_BATCHES, MICRO_BATCH_TOKENS, HOPS_S),
    *(NUM_RUNNING, NUM_WAITING, PAGES_HELD, PAGES, PREEMPTIONS, RECOVERIES, PAUSES),
)
OF_REQUESTS = (FIRST_TOKEN, INTER_TOKEN, WHOLE, QUEUE, PROMPT_TOKENS, GENERATION_TOKENS, SUCCESS, REFUSED)
OF_EXPERTS = (EXPERT_TOKENS, EXPERT_BUSY, EXPERT_ROWS)
METRICS = OF_PIPELINES + OF_REQUESTS + OF_EXPERTS
