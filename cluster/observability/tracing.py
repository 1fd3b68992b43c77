"""Spans of requests: what Ray Serve's own tracing is told, and what doors and routers add to it. None of it where it is off."""

import inspect
import logging
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

import ray
from ray._common.utils import import_attr
from ray.exceptions import RayError
from ray.serve._private import tracing_utils
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve._private.tracing_utils import get_trace_context, is_tracing_enabled, set_trace_context

from tramontane.proto.errors import ConfigError
from tramontane.router.engine.health import HealthTracker

if TYPE_CHECKING:
    from contextvars import Context

    from opentelemetry.sdk.trace import SpanProcessor

    from tramontane.router.engine.active_request import ActiveRequest

logger = logging.getLogger(__name__)

# By what a flag calls them: where Ray Serve finds what makes the span processors of each process. Its own writes files.
EXPORTERS = {"file": "ray.serve._private.tracing_utils:default_tracing_exporter", "otlp": f"{__name__}:otlp"}
OF_RAY_SERVE = "file"
EXPORTER_HELP = "it must be otlp, file or MODULE:FUNCTION"
OTLP = "opentelemetry.exporter.otlp.proto.http.trace_exporter"  # of a package that not everybody has
CONTROLLER_ANSWERS_S = 10.0
REASON = 500  # characters of what failed


def otlp() -> "list[SpanProcessor]":
    """To a collector, over HTTP. Where that is, OpenTelemetry's own variables say, such as OTEL_EXPORTER_OTLP_ENDPOINT."""
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return [BatchSpanProcessor(import_module(OTLP).OTLPSpanExporter())]


def tracing_config(exporter: str | None, sampling_ratio: float) -> dict[str, Any] | None:
    """For Ray Serve's start. Raises ConfigError for what every process of it would fail with."""
    if exporter is None:
        return None
    path = EXPORTERS.get(exporter, exporter)
    _check(exporter, path)
    return {"enabled": True, "exporter_import_path": path, "sampling_ratio": sampling_ratio}


def _check(exporter: str, path: str) -> None:
    if path == EXPORTERS[OF_RAY_SERVE]:
        return
    if ":" not in path:  # Ray would cut the name, and then say that it finds no such module
        raise ConfigError(f"--tracing-exporter is {exporter!r}; {EXPORTER_HELP}")
    try:
        if path == EXPORTERS["otlp"]:
            import_module(OTLP)
        function = import_attr(path)
    except (ImportError, AttributeError, ValueError) as error:
        way_out = "install tramontane[tracing]" if path == EXPORTERS["otlp"] else EXPORTER_HELP
        raise ConfigError(f"--tracing-exporter {exporter} cannot be imported: {error}; {way_out}") from None
    if not inspect.isfunction(function) or inspect.signature(function).parameters:
        raise ConfigError(f"--tracing-exporter {exporter} must be a function without parameters that gives span processors")


def enable_proxy_tracing() -> None:
    """Call in a proxy of Ray Serve's before it sets up its tracing: Ray 2.60 tells replicas how, proxies only by variables."""
    if not ray.is_initialized():
        return
    controller: Any = ray.get_actor(SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
    try:
        config = ray.get(controller.get_tracing_config.remote(), timeout=CONTROLLER_ANSWERS_S)
    except RayError as error:  # the proxy works without
        logger.warning("this proxy makes no spans, as Ray Serve's controller did not say how: %s", error)
        return
    if config is not None and config.enabled:
        path = config.exporter_import_path or EXPORTERS[OF_RAY_SERVE]
        try:
            _check(path, path)
        except ConfigError as error:  # with which Ray Serve would not start this proxy
            logger.warning("this proxy makes no spans: %s", error)
            return
        of_proxy: Any = tracing_utils
        of_proxy.RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH = path
        of_proxy.RAY_SERVE_TRACING_SAMPLING_RATIO = config.sampling_ratio


def propagate_trace(context: "Context") -> None:
    """What is called in this context belongs to the trace of whoever is asked now."""
    if is_tracing_enabled() and (trace := get_trace_context()) is not None:
        context.run(set_trace_context, trace)


def record_spans(request: "ActiveRequest", progress: HealthTracker, *, is_complete: bool) -> None:
    """Its queue, prefill and decode, below the span that Ray Serve has for the call, if it has one."""
    if not is_tracing_enabled():
        return
    from opentelemetry import trace

    call, now = trace.get_current_span(), progress.now
    if not call.is_recording():
        return
    call.set_attributes({"tramontane.request_id": request.request_id, "tramontane.is_complete": is_complete})
    zero_ns, recovery = time.time_ns() - round(now * 1e9), progress.last_recovery
    if recovery is not None and recovery.seen_at >= request.arrived_at:
        call.add_event("recovery", {"reason": recovery.reason[:REASON]}, zero_ns + round(recovery.seen_at * 1e9))
    tracer = trace.get_tracer("tramontane")
    for name, began, ended in request.phases(now):
        tracer.start_span(name, start_time=zero_ns + round(began * 1e9)).end(zero_ns + round(ended * 1e9))
