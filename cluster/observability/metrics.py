"""The table of all metrics, and the export of counters to Ray's metrics: once a second, and only
increments.

The code makes the metrics from the table, and docs/observability.md has its rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ray.util.metrics import Counter, Gauge, Histogram

PREFIX = "tramontane_"
# requests of clients at an ingress, and lines of batch jobs
REQUEST_KINDS = ("interactive", "batch")
SECONDS_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
)
HOP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5)
TOKEN_BUCKETS = tuple(float(2**n) for n in range(14))


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric that we export. Values of ``labels`` are bounded by the configuration; clients
    cannot add any.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    labels: tuple[str, ...]
    meaning: str
    boundaries: tuple[float, ...] = ()  # of a histogram's buckets

    @property
    def exported(self) -> str:
        """Its name in Prometheus. Ray adds the prefix ``ray_``, and ``_total`` to a counter."""
        return f"ray_{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


def _counter(name: str, unit: str, labels: str, meaning: str) -> Metric:
    return Metric(name, "counter", unit, tuple(labels.split()), meaning)


def _gauge(name: str, unit: str, labels: str, meaning: str) -> Metric:
    return Metric(name, "gauge", unit, tuple(labels.split()), meaning)


def _histogram(
    name: str, unit: str, labels: str, meaning: str, boundaries: tuple[float, ...] = SECONDS_BUCKETS
) -> Metric:
    return Metric(name, "histogram", unit, tuple(labels.split()), meaning, boundaries)


RUNNING = _gauge(
    "pipeline_running",
    "0 or 1",
    "pipeline",
    "Whether the pipeline accepts requests now (1) or not (0).",
)
ACTIVE = _counter(
    "pipeline_active_seconds",
    "seconds",
    "pipeline",
    "Time in which at least one micro-batch was in flight.",
)
STAGE_BUSY = _counter(
    "stage_busy_seconds", "seconds", "pipeline stage", "Time in which the stage computed."
)
STAGE_WAITING = _counter(
    "stage_waiting_seconds",
    "seconds",
    "pipeline stage",
    "Time in which the stage did not compute although a micro-batch was in flight.",
)
STAGE_TOKENS = _counter(
    "stage_tokens", "tokens", "pipeline stage", "Tokens that the stage processed."
)
SCHEDULED = _counter(
    "scheduled_tokens", "tokens", "pipeline phase", "Tokens in micro-batches, by phase."
)
MICRO_BATCHES = _counter(
    "micro_batches", "micro-batches", "pipeline", "Micro-batches that the pipeline completed."
)
MICRO_BATCH_TOKENS = _histogram(
    "micro_batch_tokens", "tokens", "pipeline", "Tokens in a micro-batch.", TOKEN_BUCKETS
)
HOPS_S = _histogram(
    "hop_seconds",
    "seconds",
    "pipeline stage",
    "Time until the stage, once free, started a micro-batch that the previous stage had finished.",
    HOP_BUCKETS,
)
NUM_RUNNING = _gauge(
    "num_requests_running", "sequences", "pipeline", "Sequences that hold a slot in the pipeline."
)
NUM_WAITING = _gauge(
    "num_requests_waiting", "sequences", "pipeline", "Sequences in the router's waiting queue."
)
PAGES_HELD = _gauge(
    "kv_cache_pages_in_use",
    "pages",
    "pipeline window",
    "Pages of the rolling KV cache that sequences hold.",
)
PAGES = _gauge(
    "kv_cache_pages", "pages", "pipeline window", "Pages of the rolling KV cache in total."
)
PAGES_CACHED = _gauge(
    "kv_cache_pages_cached",
    "pages",
    "pipeline window",
    "Pages that no sequence holds and whose contents are kept for reuse.",
)
PREFIX_QUERIES = _counter(
    "prefix_cache_queries",
    "tokens",
    "pipeline",
    "Tokens of sequences that began or were started again, looked up in the prefix cache.",
)
PREFIX_HITS = _counter(
    "prefix_cache_hits",
    "tokens",
    "pipeline",
    "Tokens of these sequences that were found in the prefix cache.",
)
SPEC_DRAFTS = _counter(
    "spec_decode_num_drafts",
    "drafts",
    "pipeline",
    "Drafts of one or several tokens in micro-batches.",
)
SPEC_DRAFT_TOKENS = _counter(
    "spec_decode_num_draft_tokens", "tokens", "pipeline", "Draft tokens in micro-batches."
)
SPEC_ACCEPTED = _counter(
    "spec_decode_num_accepted_tokens",
    "tokens",
    "pipeline",
    "Draft tokens that were accepted.",
)
PREEMPTIONS = _counter(
    "num_preemptions",
    "sequences",
    "pipeline",
    "Sequences that were preempted: they released their pages and were computed again.",
)
RECOVERIES = _counter(
    "recoveries",
    "recoveries",
    "pipeline",
    "Recoveries of the pipeline after a stage, a node or a step failed.",
)
PAUSES = _counter(
    "recovery_pause_seconds",
    "seconds",
    "pipeline",
    "Time from a failure to the first token of any request after it.",
)
FIRST_TOKEN = _histogram(
    "time_to_first_token_seconds",
    "seconds",
    "kind",
    "Time from the arrival of a request to its first token.",
)
INTER_TOKEN = _histogram(
    "inter_token_latency_seconds", "seconds", "kind", "Time between two tokens of a request."
)
E2E_LATENCY = _histogram(
    "e2e_request_latency_seconds",
    "seconds",
    "kind",
    "Time from the arrival of a request to its end.",
)
QUEUE = _histogram(
    "request_queue_time_seconds",
    "seconds",
    "kind",
    "Time that a request spent in the router's waiting queue.",
)
PROMPT_TOKENS = _counter(
    "prompt_tokens", "tokens", "kind", "Prompt tokens, counted when a request has its first token."
)
GENERATION_TOKENS = _counter("generation_tokens", "tokens", "kind", "Tokens that were generated.")
SUCCESS = _counter(
    "request_success", "choices", "kind finished_reason", "Choices that ended, by reason."
)
REFUSED = _counter(
    "requests_refused", "requests", "kind reason", "Requests that were refused, by reason."
)
IGNORED_FIELDS = _counter(
    "ignored_fields",
    "fields",
    "kind",
    "Different fields of requests that had no effect, which the Warning header names.",
)
TRANSFERS = _counter(
    "hidden_state_transfers",
    "transfers",
    "pipeline stage transport",
    "Hidden states of micro-batches that the stage handed to the next one, by transport.",
)
TRANSFERRED_BYTES = _counter(
    "hidden_state_bytes",
    "bytes",
    "pipeline stage transport",
    "Bytes of hidden states that the stage handed to the next one, by transport.",
)
# the names of 0.2, which 0.4 will not export
SENT_HOPS = _counter(
    "sent_hops",
    "hops",
    "pipeline stage way",
    "Former name of hidden_state_transfers, exported until 0.4.",
)
SENT_BYTES = _counter(
    "sent_bytes",
    "bytes",
    "pipeline stage way",
    "Former name of hidden_state_bytes, exported until 0.4.",
)
EXPERT_TOKENS = _counter(
    "expert_tokens",
    "tokens",
    "pipeline stage layer expert",
    "Tokens that were routed to an expert, on a stage or on an expert actor.",
)
EXPERT_BUSY = _counter(
    "expert_busy_seconds",
    "seconds",
    "pipeline actor",
    "Time in which the experts of an expert actor computed.",
)
EXPERT_ROWS = _counter(
    "expert_rows", "rows", "pipeline actor", "Rows of hidden states that an expert actor received."
)

PIPELINE_METRICS = (
    *(
        RUNNING,
        ACTIVE,
        STAGE_BUSY,
        STAGE_WAITING,
        STAGE_TOKENS,
        SCHEDULED,
        MICRO_BATCHES,
        MICRO_BATCH_TOKENS,
        HOPS_S,
    ),
    *(NUM_RUNNING, NUM_WAITING, PAGES_HELD, PAGES, PAGES_CACHED, PREFIX_QUERIES, PREFIX_HITS),
    *(SPEC_DRAFTS, SPEC_DRAFT_TOKENS, SPEC_ACCEPTED),
    *(PREEMPTIONS, RECOVERIES, PAUSES),
)
REQUEST_METRICS = (
    FIRST_TOKEN,
    INTER_TOKEN,
    E2E_LATENCY,
    QUEUE,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    SUCCESS,
    REFUSED,
    IGNORED_FIELDS,
)
FORMER_METRICS = (SENT_HOPS, SENT_BYTES)
STAGE_ACTOR_METRICS = (TRANSFERS, TRANSFERRED_BYTES, *FORMER_METRICS)
EXPERT_METRICS = (EXPERT_TOKENS, EXPERT_BUSY, EXPERT_ROWS)
METRICS = PIPELINE_METRICS + STAGE_ACTOR_METRICS + REQUEST_METRICS + EXPERT_METRICS

Tags = dict[str, str]


class MetricFactory:
    """Makes metrics that Ray exports from this process. A process may make each metric once."""

    def counter(self, metric: Metric) -> Counter:
        """Make a counter, which refuses increments that are not positive."""
        return Counter(PREFIX + metric.name, metric.meaning, metric.labels)

    def gauge(self, metric: Metric) -> Gauge:
        """Make a gauge. Ray drops a series that is not set again within two of its reports."""
        return Gauge(PREFIX + metric.name, metric.meaning, metric.labels)

    def histogram(self, metric: Metric) -> Histogram:
        """Make a histogram with the table's bucket boundaries."""
        return Histogram(
            PREFIX + metric.name, metric.meaning, list(metric.boundaries), metric.labels
        )


class DeltaCounter:
    """Makes a counter follow totals that are counted elsewhere: adds the increment of each since
    the last update.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._exported: dict[tuple[str, ...], float] = {}  # total by series

    def update(self, value: float, tags: Tags) -> None:
        """Export ``value``, the total so far under these tags."""
        series = tuple(tags.values())
        increment = value - self._exported.get(series, 0)
        if increment > 0:  # Ray's counter refuses 0
            self._counter.inc(increment, tags)
            self._exported[series] = value

    def reset(self) -> None:
        """Follow other totals from now on, which start at 0."""
        self._exported.clear()


class StageActorMetrics:
    """Exports the counters of a stage's own process: the tokens routed to its layers' experts, and
    hidden states by transport.
    """

    def __init__(self, factory: MetricFactory, pipeline: str, stage_id: int) -> None:
        self._tokens = DeltaCounter(factory.counter(EXPERT_TOKENS))
        self._transfers, self._num_bytes, self._hops, self._sent_bytes = (
            DeltaCounter(factory.counter(metric)) for metric in STAGE_ACTOR_METRICS
        )
        self._tags = {"pipeline": pipeline, "stage": str(stage_id)}

    def export(
        self, load: Mapping[int, Sequence[int]], sent: Mapping[str, tuple[int, int]]
    ) -> None:
        """Export the totals so far: tokens of each expert, by the global number of its layer, and
        transfers and bytes by transport.
        """
        for layer, tokens in load.items():
            for expert, number in enumerate(tokens):
                self._tokens.update(
                    number, self._tags | {"layer": str(layer), "expert": str(expert)}
                )
        for transport, (transfers, num_bytes) in sent.items():
            tags, former = self._tags | {"transport": transport}, self._tags | {"way": transport}
            self._transfers.update(transfers, tags)
            self._num_bytes.update(num_bytes, tags)
            self._hops.update(transfers, former)
            self._sent_bytes.update(num_bytes, former)


class ExpertWorkMetrics:
    """Exports the work of an expert actor."""

    def __init__(self, factory: MetricFactory, pipeline: str, actor_id: int) -> None:
        self._busy_s, self._rows = (
            DeltaCounter(factory.counter(metric)) for metric in (EXPERT_BUSY, EXPERT_ROWS)
        )
        self._tags = {"pipeline": pipeline, "actor": str(actor_id)}

    def export(self, busy_s: float, num_rows: int) -> None:
        """Export the totals so far."""
        self._busy_s.update(busy_s, self._tags)
        self._rows.update(num_rows, self._tags)
