"""Export of the counts of a router, and of those of an ingress or the batch runner, to Ray's
metrics.
"""

from tramontane.cluster.observability import metrics as table
from tramontane.cluster.observability.metrics import DeltaCounter, MetricFactory
from tramontane.router.engine.health import HealthTracker
from tramontane.router.engine.router import Router
from tramontane.router.engine.stats import PipelineStats, SampleBuffer
from tramontane.router.openai.request_context import RequestStats
from tramontane.router.scheduling.scheduler import Scheduler


class PipelineMetrics:
    """Metrics of one pipeline. Its routers follow one another; ``export`` gets the current one, in
    a thread of its own.
    """

    def __init__(self, factory: MetricFactory, pipeline: str) -> None:
        self._tags = {"pipeline": pipeline}
        self._router: Router | None = None
        counters = [metric for metric in table.PIPELINE_METRICS if metric.kind == "counter"]
        self._counters = {metric: DeltaCounter(factory.counter(metric)) for metric in counters}
        self._gauges = {
            metric: factory.gauge(metric)
            for metric in table.PIPELINE_METRICS
            if metric.kind == "gauge"
        }
        self._tokens, self._hops = (
            factory.histogram(table.MICRO_BATCH_TOKENS),
            factory.histogram(table.HOPS_S),
        )

    def export(self, router: Router) -> None:
        """Export the router's state and what its counts have grown by; a new router's counts start
        at 0.
        """
        if self._router is not router:
            if self._router is not None:
                self._export_counts(self._router)  # what it counted last
            self._router = router
            for counter in self._counters.values():
                counter.reset()
        self._export_counts(router)
        self._set(table.RUNNING, float(router.is_ready))
        self._export_queue(router.scheduler)

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
        self._inc(table.PREFIX_QUERIES, router.scheduler.allocator.num_queried)
        self._inc(table.PREFIX_HITS, router.scheduler.allocator.num_hit)
        drafts = router.scheduler.draft_counts
        self._inc(table.SPEC_DRAFTS, drafts.num_drafts)
        self._inc(table.SPEC_DRAFT_TOKENS, drafts.num_draft_tokens)
        self._inc(table.SPEC_ACCEPTED, drafts.num_accepted_tokens)
        self._inc(table.PREEMPTIONS, router.scheduler.num_preempted)
        self._inc(table.RECOVERIES, progress.num_recoveries)
        self._inc(table.PAUSES, progress.paused_s)
        for tokens in counts.micro_batch_tokens.take():
            self._tokens.observe(tokens, self._tags)

    def _export_queue(self, scheduler: Scheduler) -> None:
        self._set(table.NUM_RUNNING, scheduler.num_running)
        self._set(table.NUM_WAITING, scheduler.num_waiting)
        allocator = scheduler.allocator
        for kind, num_free, num_cached in zip(
            allocator.cache.classes, allocator.num_free, allocator.num_cached, strict=True
        ):
            window = str(kind.window or "none")
            self._set(table.PAGES, kind.num_pages, window=window)
            self._set(table.PAGES_HELD, kind.num_pages - num_free, window=window)
            self._set(table.PAGES_CACHED, num_cached, window=window)

    def _inc(self, metric: table.Metric, value: float, **labels: str) -> None:
        self._counters[metric].update(value, self._tags | labels)

    def _set(self, metric: table.Metric, value: float, **labels: str) -> None:
        self._gauges[metric].set(value, self._tags | labels)


class RequestMetrics:
    """Metrics of the requests of one ingress, or of the batch runner; ``kind`` is one of
    ``REQUEST_KINDS``.
    """

    def __init__(self, factory: MetricFactory, counts: RequestStats, kind: str) -> None:
        assert kind in table.REQUEST_KINDS
        self._counts, self._tags = counts, {"kind": kind}
        counters = [metric for metric in table.REQUEST_METRICS if metric.kind == "counter"]
        self._counters = {metric: DeltaCounter(factory.counter(metric)) for metric in counters}
        self._histograms = {
            metric: factory.histogram(metric)
            for metric in table.REQUEST_METRICS
            if metric.kind == "histogram"
        }

    def export(self) -> None:
        """Export what the counts have grown by."""
        counts = self._counts
        self._inc(table.PROMPT_TOKENS, counts.prompt_tokens)
        self._inc(table.GENERATION_TOKENS, counts.generation_tokens)
        for finished, number in counts.finished.items():
            self._inc(table.SUCCESS, number, finished_reason=finished.value)
        for reason, number in counts.refused.items():
            self._inc(table.REFUSED, number, reason=reason)
        self._observe(table.FIRST_TOKEN, counts.first_token_s)
        self._observe(table.INTER_TOKEN, counts.inter_token_s)
        self._observe(table.E2E_LATENCY, counts.whole_s)
        self._observe(table.QUEUE, counts.queue_s)

    def _inc(self, metric: table.Metric, value: float, **labels: str) -> None:
        self._counters[metric].update(value, self._tags | labels)

    def _observe(self, metric: table.Metric, samples: SampleBuffer) -> None:
        for value in samples.take():
            self._histograms[metric].observe(value, self._tags)
