"""What a door counts, for Ray's metrics."""

from tramontane.cluster.observability import metric_table as table
from tramontane.cluster.observability.metrics import Follower, Metrics
from tramontane.router.engine.recent import Recent
from tramontane.router.openai.request_stats import RequestCounts


class RequestMetrics:
    """Of one door, or of whoever runs batch jobs: ``kind`` is one of the table's."""

    def __init__(self, made: Metrics, counts: RequestCounts, kind: str) -> None:
        assert kind in table.KINDS
        self._counts, self._tags = counts, {"kind": kind}
        self._counters = {metric: Follower(made.counter(metric)) for metric in table.OF_REQUESTS if metric.kind == "counter"}
        self._histograms = {metric: made.histogram(metric) for metric in table.OF_REQUESTS if metric.kind == "histogram"}

    def tell(self) -> None:
        counts = self._counts
        self._count(table.PROMPT_TOKENS, counts.prompt_tokens)
        self._count(table.GENERATION_TOKENS, counts.generation_tokens)
        for finished, number in counts.finished.items():
            self._count(table.SUCCESS, number, finished_reason=finished.value)
        for reason, number in counts.refused.items():
            self._count(table.REFUSED, number, reason=reason)
        self._observe(table.FIRST_TOKEN, counts.first_token_s)
        self._observe(table.INTER_TOKEN, counts.inter_token_s)
        self._observe(table.WHOLE, counts.whole_s)
        self._observe(table.QUEUE, counts.queue_s)

    def _count(self, metric: table.Metric, value: float, **labels: str) -> None:
        self._counters[metric].tell(value, self._tags | labels)

    def _observe(self, metric: table.Metric, seen: Recent) -> None:
        for value in seen.take():
            self._histograms[metric].observe(value, self._tags)
