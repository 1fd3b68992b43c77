"""Spans of requests: the configuration of Ray Serve's tracing, and the spans that routers add. No
effect if tracing is off.
"""

import inspect
import logging
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from tramontane.cluster.ray_internals.accessors import (
    import_attribute,
    is_tracing_enabled,
    serve_controller,
    set_proxy_tracing,
)
from tramontane.cluster.ray_internals.table import FILE_EXPORTER
from tramontane.proto.errors import ConfigError
from tramontane.router.engine.health import HealthTracker

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

    from tramontane.router.engine.active_request import ActiveRequest

# Values of --tracing-exporter: where Ray Serve finds the function that makes the span processors of
# each process.
EXPORTERS = {"file": FILE_EXPORTER.path, "otlp": f"{__name__}:otlp"}
EXPORTER_HELP = "it must be otlp, file or MODULE:FUNCTION"
OTLP = "opentelemetry.exporter.otlp.proto.http.trace_exporter"  # of an optional package
CONTROLLER_TIMEOUT_S = 10.0
MAX_REASON = 500  # characters of an error

logger = logging.getLogger(__name__)


def otlp() -> "list[SpanProcessor]":
    """Make the processor that sends spans to a collector over HTTP.

    OpenTelemetry's own variables give its address, such as OTEL_EXPORTER_OTLP_ENDPOINT.
    """
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return [BatchSpanProcessor(import_module(OTLP).OTLPSpanExporter())]


def tracing_config(exporter: str | None, sampling_ratio: float) -> dict[str, Any] | None:
    """Return the option for Ray Serve's start. Raises ConfigError for an exporter that would make
    all its processes fail.
    """
    if exporter is None:
        return None
    path = EXPORTERS.get(exporter, exporter)
    _check(exporter, path)
    return {"enabled": True, "exporter_import_path": path, "sampling_ratio": sampling_ratio}


def _check(exporter: str, path: str) -> None:
    if path == EXPORTERS["file"]:
        return
    if ":" not in path:  # Ray would cut the name, and report that the module does not exist
        raise ConfigError(f"--tracing-exporter is {exporter!r}; {EXPORTER_HELP}")
    try:
        if path == EXPORTERS["otlp"]:
            import_module(OTLP)
        function = import_attribute(path)
    except (ImportError, AttributeError, ValueError) as error:
        remedy = "install tramontane[tracing]" if path == EXPORTERS["otlp"] else EXPORTER_HELP
        raise ConfigError(
            f"--tracing-exporter {exporter} cannot be imported: {error}; {remedy}"
        ) from None
    if not inspect.isfunction(function) or inspect.signature(function).parameters:
        raise ConfigError(
            f"--tracing-exporter {exporter} must be a function without parameters that returns span"
            " processors"
        )


def enable_proxy_tracing() -> None:
    """Set up the exporter of a Ray Serve proxy. To be called before the proxy sets up its tracing.

    Ray 2.60 configures the tracing of replicas, and that of proxies only by environment variables.
    """
    if not ray.is_initialized():
        return
    try:
        config = ray.get(
            serve_controller().get_tracing_config.remote(), timeout=CONTROLLER_TIMEOUT_S
        )
    except RayError as error:  # the proxy works without tracing
        logger.warning(
            "this proxy makes no spans, because Ray Serve's controller did not answer: %s", error
        )
        return
    if config is not None and config.enabled:
        path = config.exporter_import_path or EXPORTERS["file"]
        try:
            _check(path, path)
        except ConfigError as error:  # with which Ray Serve would not start this proxy
            logger.warning("this proxy makes no spans: %s", error)
            return
        set_proxy_tracing(path, config.sampling_ratio)


def record_spans(request: "ActiveRequest", progress: HealthTracker, *, is_complete: bool) -> None:
    """Record a request's queue, prefill and decode below Ray Serve's span of the call, if there is
    one.
    """
    if not is_tracing_enabled():
        return
    from opentelemetry import trace

    call, now = trace.get_current_span(), progress.now
    if not call.is_recording():
        return
    call.set_attributes(
        {"tramontane.request_id": request.request_id, "tramontane.is_complete": is_complete}
    )
    zero_ns, recovery = time.time_ns() - round(now * 1e9), progress.last_recovery
    if recovery is not None and recovery.seen_at >= request.arrived_at:
        call.add_event(
            "recovery",
            {"reason": recovery.reason[:MAX_REASON]},
            zero_ns + round(recovery.seen_at * 1e9),
        )
    tracer = trace.get_tracer("tramontane")
    for name, began, ended in request.phases(now):
        tracer.start_span(name, start_time=zero_ns + round(began * 1e9)).end(
            zero_ns + round(ended * 1e9)
        )
