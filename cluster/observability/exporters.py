"""What a router counts, for Ray's metrics.

What a door counts, for Ray's metrics.
"""

from tramontane.cluster.observability import metrics as table
from tramontane.cluster.observability.metrics import DeltaCounter, Metrics
from tramontane.router.engine.health import HealthTracker
from tramontane.router.engine.pipeline_stats import PipelineStats, SampleBuffer
from tramontane.router.engine.router import Router
from tramontane.router.openai.request_stats import RequestStats
from tramontane.router.scheduling.scheduler import Scheduler


class PipelineMetrics:
    """Of one pipeline, whose routers follow one another. It is told of the one of the moment, in a thread of its own."""

    def __init__(self, made: Metrics, pipeline: str) -> None:
        self._tags = {"pipeline": pipeline}
        self._router: Router | None = None
        kinds = [metric for metric in table.OF_PIPELINES if metric.kind == "counter"]
        self._counters = {metric: DeltaCounter(made.counter(metric)) for metric in kinds}
        self._gauges = {metric: made.gauge(metric) for metric in table.OF_PIPELINES if metric.kind == "gauge"}
        self._tokens, self._hops = made.histogram(table.MICRO_BATCH_TOKENS), made.histogram(table.HOPS_S)

    def export(self, router: Router) -> None:
        if self._router is not router:
            if self._router is not None:
                self._export_counts(self._router)  # the last of it
            self._router = router
            for counter in self._counters.values():
                counter.reset()
        self._export_counts(router)
        self._set(table.RUNNING, float(router.is_ready))
        self._tell_queue(router.scheduler)

    def _export_counts(self, router: Router) -> None:
        counts: PipelineStats = router.stats
        progress: HealthTracker = router.health
        for stage_id in range(len(counts.busy_s)):
            stage = {"stage": str(stage_id)}
            self._inc(table.STAGE_BUSY, counts.busy_s[stage_id], **stage)
            self._inc(table.STAGE_WAITING, counts.waiting_s(stage_id), **stage)
            self._inc(table.STAGE_TOKENS, counts.stage_tokens[stage_id], **stage)
            for seconds in counts.hops_s[stage_id].take():
                self._hops.observe(seconds, self._tags | stage)
        self._inc(table.ACTIVE, counts.active_s)
        self._inc(table.SCHEDULED, counts.prefill_tokens, phase="prefill")
        self._inc(table.SCHEDULED, counts.decode_tokens, phase="decode")
        self._inc(table.MICRO_BATCHES, counts.num_micro_batches)
        self._inc(table.PREEMPTIONS, router.scheduler.num_preempted)
        self._inc(table.RECOVERIES, progress.num_recoveries)
        self._inc(table.PAUSES, progress.paused_s)
        self._observe_sizes(counts.micro_batch_tokens)

    def _observe_sizes(self, sizes: SampleBuffer) -> None:
        for tokens in sizes.take():
            self._tokens.observe(tokens, self._tags)

    def _tell_queue(self, scheduler: Scheduler) -> None:
        self._set(table.NUM_RUNNING, scheduler.num_running)
        self._set(table.NUM_WAITING, scheduler.num_waiting)
        for kind, num_free in zip(scheduler.allocator.cache.classes, scheduler.allocator.num_free, strict=True):
            window = str(kind.window or "none")
            self._set(table.PAGES, kind.num_pages, window=window)
            self._set(table.PAGES_HELD, kind.num_pages - num_free, window=window)

    def _inc(self, metric: table.Metric, value: float, **labels: str) -> None:
        self._counters[metric].update(value, self._tags | labels)

    def _set(self, metric: table.Metric, value: float, **labels: str) -> None:
        self._gauges[metric].set(value, self._tags | labels)


class RequestMetrics:
    """Of one door, or of whoever runs batch jobs: ``kind`` is one of the table's."""

    def __init__(self, made: Metrics, counts: RequestStats, kind: str) -> None:
        assert kind in table.REQUEST_KINDS
        self._counts, self._tags = counts, {"kind": kind}
        self._counters = {metric: DeltaCounter(made.counter(metric)) for metric in table.OF_REQUESTS if metric.kind == "counter"}
        self._histograms = {metric: made.histogram(metric) for metric in table.OF_REQUESTS if metric.kind == "histogram"}

    def export(self) -> None:
        counts = self._counts
        self._inc(table.PROMPT_TOKENS, counts.prompt_tokens)
        self._inc(table.GENERATION_TOKENS, counts.generation_tokens)
        for finished, number in counts.finished.items():
            self._inc(table.SUCCESS, number, finished_reason=finished.value)
        for reason, number in counts.refused.items():
            self._inc(table.REFUSED, number, reason=reason)
        self._observe(table.FIRST_TOKEN, counts.first_token_s)
        self._observe(table.INTER_TOKEN, counts.inter_token_s)
        self._observe(table.WHOLE, counts.whole_s)
        self._observe(table.QUEUE, counts.queue_s)

    def _inc(self, metric: table.Metric, value: float, **labels: str) -> None:
        self._counters[metric].update(value, self._tags | labels)

    def _observe(self, metric: table.Metric, seen: SampleBuffer) -> None:
        for value in seen.take():
            self._histograms[metric].observe(value, self._tags)
