"""Export of counters to Ray's metrics: of a router, and of an ingress or the batch runner."""

from tramontane.cluster.observability import metrics as table
from tramontane.cluster.observability.metrics import DeltaCounter, MetricFactory
from tramontane.router.engine.router import Router
from tramontane.router.engine.stats import PipelineSnapshot, SampleBuffer
from tramontane.router.openai.request_context import RequestStats


class PipelineMetrics:
    """Metrics of one pipeline. Its routers follow one another; ``export`` gets the current one, in
    a separate thread.
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
        """Export the router's state and the increments of its counters; a new router's counters
        start at 0.
        """
        if self._router is not router:
            if self._router is not None:
                self._export_counts(self._router)  # its last counts
            self._router = router
            for counter in self._counters.values():
                counter.reset()
        self._export_counts(router)
        self._set(table.RUNNING, float(router.is_ready))
        self._export_queue(router.snapshot())

    def _export_counts(self, router: Router) -> None:
        counts, now = router.stats, router.snapshot()
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
        self._inc(table.PREFIX_QUERIES, now.num_prefix_queries)
        self._inc(table.PREFIX_HITS, now.num_prefix_hits)
        self._inc(table.SPEC_DRAFTS, now.num_drafts)
        self._inc(table.SPEC_DRAFT_TOKENS, now.num_draft_tokens)
        self._inc(table.SPEC_ACCEPTED, now.num_accepted_draft_tokens)
        self._inc(table.PREEMPTIONS, now.num_preempted)
        self._inc(table.RECOVERIES, now.num_recoveries)
        self._inc(table.PAUSES, now.paused_s)
        for tokens in counts.micro_batch_tokens.take():
            self._tokens.observe(tokens, self._tags)

    def _export_queue(self, now: PipelineSnapshot) -> None:
        self._set(table.NUM_RUNNING, now.num_running)
        self._set(table.NUM_WAITING, now.num_waiting)
        for kind in now.pages:
            window = str(kind.window or "none")
            self._set(table.PAGES, kind.num_pages, window=window)
            self._set(table.PAGES_HELD, kind.num_pages - kind.num_free, window=window)
            self._set(table.PAGES_CACHED, kind.num_cached, window=window)

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
        """Export the increments of the counters."""
        counts = self._counts
        self._inc(table.PROMPT_TOKENS, counts.prompt_tokens)
        self._inc(table.GENERATION_TOKENS, counts.generation_tokens)
        for finished, number in counts.finished.items():
            self._inc(table.SUCCESS, number, finished_reason=finished.value)
        for reason, number in counts.refused.items():
            self._inc(table.REFUSED, number, reason=reason)
        self._inc(table.IGNORED_FIELDS, counts.ignored_fields)
        self._observe(table.FIRST_TOKEN, counts.first_token_s)
        self._observe(table.INTER_TOKEN, counts.inter_token_s)
        self._observe(table.E2E_LATENCY, counts.whole_s)
        self._observe(table.QUEUE, counts.queue_s)

    def _inc(self, metric: table.Metric, value: float, **labels: str) -> None:
        self._counters[metric].update(value, self._tags | labels)

    def _observe(self, metric: table.Metric, samples: SampleBuffer) -> None:
        for value in samples.take():
            self._histograms[metric].observe(value, self._tags)
