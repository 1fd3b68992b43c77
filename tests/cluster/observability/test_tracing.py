"""Spans of requests: what Ray Serve gets of them, and what a router adds below its own."""

import math
from collections.abc import Sequence as Spans
from types import SimpleNamespace

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from ray.serve._private import tracing_utils
from ray.serve.schema import TracingConfig

from tramontane.cluster.observability import tracing
from tramontane.cluster.observability.logging import request_context
from tramontane.cluster.observability.tracing import otlp, record_spans, tracing_config
from tramontane.proto.errors import ConfigError
from tramontane.proto.request import SamplingParams
from tramontane.router.engine.active_request import ActiveRequest
from tramontane.router.engine.health import HealthTracker
from tramontane.router.scheduling.sequence import Sequence


def two_processors(_one: object, _other: object) -> list[object]:
    """No exporter: it would get no arguments."""
    return []


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What is exported in this process, as if Ray Serve had begun its tracing here."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    monkeypatch.setattr(tracing_utils, "_tracing_enabled", True)
    return exporter


def _request(started_at: float = 2.0, first_token_at: float = 5.0) -> ActiveRequest:
    sequence = Sequence(0, (1, 2), SamplingParams(), 9, request_id="mine")
    request = ActiveRequest([sequence], lambda _: None, 1.0)
    request.started_at, request.first_token_at, request.last_token_at = (
        started_at,
        first_token_at,
        first_token_at + 4,
    )
    return request


def test_without_an_exporter_there_is_no_tracing() -> None:
    assert tracing_config(None, 1.0) is None


@pytest.mark.parametrize(
    "exporter", ["file", "otlp", "tramontane.cluster.observability.tracing:otlp"]
)
def test_ray_serve_accepts_the_configuration(exporter: str) -> None:
    reported = TracingConfig(**(tracing_config(exporter, 0.25) or {}))
    assert (reported.enabled, reported.sampling_ratio) == (True, 0.25)
    assert ":" in reported.exporter_import_path


@pytest.mark.parametrize(
    "exporter",
    ["console", "no.such:thing", "math:nothing", "math:pi", f"{__name__}:two_processors"],
)
def test_what_every_process_would_fail_with_is_refused_at_once(exporter: str) -> None:
    with pytest.raises(ConfigError, match="--tracing-exporter"):
        tracing_config(exporter, 1.0)


@pytest.mark.parametrize(
    ("path", "is_taken"),
    [("tramontane.cluster.observability.tracing:otlp", True), ("no.such:thing", False)],
)
def test_a_proxy_goes_without_spans_where_it_cannot_make_them(
    monkeypatch: pytest.MonkeyPatch, path: str, is_taken: bool
) -> None:
    config = TracingConfig(enabled=True, exporter_import_path=path, sampling_ratio=0.5)
    controller = SimpleNamespace(get_tracing_config=SimpleNamespace(remote=lambda: config))
    fake = SimpleNamespace(is_initialized=lambda: True, get=lambda ref, timeout: ref)
    monkeypatch.setattr(tracing, "ray", fake)
    monkeypatch.setattr(tracing, "serve_controller", lambda: controller)
    monkeypatch.setattr(tracing_utils, "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH", "")
    monkeypatch.setattr(tracing_utils, "RAY_SERVE_TRACING_SAMPLING_RATIO", 0.0)
    tracing.enable_proxy_tracing()
    assert (path == tracing_utils.RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH) is is_taken


@pytest.mark.parametrize("exporter", ["nosuch", "math.pi"])
def test_a_name_without_a_colon_is_not_looked_for(exporter: str) -> None:
    with pytest.raises(ConfigError) as error:
        tracing_config(exporter, 1.0)
    assert (
        str(error.value)
        == f"--tracing-exporter is {exporter!r}; it must be otlp, file or MODULE:FUNCTION"
    )


class Collector(SpanExporter):
    """Keeps the names of the spans of each call to it."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def export(self, spans: Spans[ReadableSpan]) -> SpanExportResult:
        self.calls.append([span.name for span in spans])
        return SpanExportResult.SUCCESS


def test_a_collector_gets_spans_in_bunches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for twenty spans, in the order of their ends, and none while a request waits for
    it.
    """
    collector = Collector()
    # ms until it is called for fewer spans than make a bunch
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    monkeypatch.setattr(
        tracing,
        "import_module",
        {tracing.OTLP: SimpleNamespace(OTLPSpanExporter=lambda: collector)}.get,
    )
    (processor,) = otlp()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    names = [f"span {number}" for number in range(20)]
    for name in names:
        provider.get_tracer("test").start_span(name).end()
    assert collector.calls == []
    assert processor.force_flush()
    assert collector.calls == [names]
    processor.shutdown()
    assert collector.calls == [names]


def test_a_router_reports_where_a_requests_time_went(spans: InMemorySpanExporter) -> None:
    progress = HealthTracker(lambda: 10.0)
    progress.on_failure("stage 1 died")
    with trace.get_tracer("").start_as_current_span("call"):
        record_spans(_request(), progress, is_complete=True)
    *phases, call = spans.get_finished_spans()
    took = {span.name: ((span.end_time or 0) - (span.start_time or 0)) / 1e9 for span in phases}
    assert took == pytest.approx({"queue": 1.0, "prefill": 3.0, "decode": 4.0})
    assert {span.parent and span.parent.span_id for span in phases} == {call.context.span_id}
    assert call.attributes == {"tramontane.request_id": "mine", "tramontane.is_complete": True}
    assert [(event.name, dict(event.attributes or {})) for event in call.events] == [
        ("recovery", {"reason": "stage 1 died"})
    ]


def test_a_request_that_never_began_was_in_the_queue_all_the_time(
    spans: InMemorySpanExporter,
) -> None:
    with trace.get_tracer("").start_as_current_span("call"):
        record_spans(_request(math.inf, math.inf), HealthTracker(lambda: 10.0), is_complete=False)
    queue, call = spans.get_finished_spans()
    assert (queue.name, call.events) == ("queue", ())
    assert ((queue.end_time or 0) - (queue.start_time or 0)) / 1e9 == pytest.approx(9.0)


def test_what_is_off_or_not_sampled_leaves_nothing(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_spans(_request(), HealthTracker(lambda: 10.0), is_complete=True)  # of no trace
    monkeypatch.setattr(tracing_utils, "_tracing_enabled", False)
    with trace.get_tracer("").start_as_current_span("call"):
        record_spans(_request(), HealthTracker(lambda: 10.0), is_complete=True)
    (call,) = spans.get_finished_spans()
    assert not call.attributes


@pytest.mark.usefixtures("spans")
@pytest.mark.parametrize(("is_on", "request_id"), [(True, "mine"), (False, "mine"), (True, "")])
def test_a_call_for_a_request_belongs_to_its_trace(
    is_on: bool, request_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream of a router's tokens is begun in a request, and belongs to none."""
    monkeypatch.setattr(tracing_utils, "_tracing_enabled", is_on)
    with trace.get_tracer("").start_as_current_span("ingress") as ingress_span:
        context = request_context(request_id)
    assert (context.run(trace.get_current_span) is ingress_span) is (is_on and bool(request_id))
