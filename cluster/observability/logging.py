"""Logs of Ray Serve's processes, and a router's log lines for each request.

A request is logged when it is accepted and when it ends, once each and without its tokens.
"""

import logging
from contextvars import Context

from tramontane.cluster.config.logging import ContextFilter, LogSettings
from tramontane.cluster.ray_internals.accessors import (
    bind_request_id,
    bind_trace,
    current_request_id,
    serve_logger,
)
from tramontane.proto.request import Request, request_fields
from tramontane.router.engine.active_request import ActiveRequest

MAX_ID = 128  # characters, as over HTTP

logger = logging.getLogger(__name__)


class ServeLogHandler(logging.Handler):
    """Passes records on to Ray Serve's current handlers, which it replaces when its configuration
    changes.
    """

    def handle(self, record: logging.LogRecord) -> bool:
        """Pass the record on if the filters allow it."""
        if is_allowed := bool(self.filter(record)):
            serve_logger().handle(record)
        return is_allowed


def use_serve_log(settings: LogSettings, component: str, **fields: object) -> None:
    """Send our log to the log of Ray Serve's process, in its format. To be called in a replica's
    constructor and in a proxy.

    Otherwise Python would write our lines to the process's standard error, without a timestamp.
    """
    handler = ServeLogHandler()
    handler.addFilter(ContextFilter({"component": component, **fields}))
    settings.install(handler)


def serve_request_id(_context: object) -> str:
    """Return Ray Serve's id of the request that this task works on: over gRPC, ``request_id`` of
    its metadata or a new one.
    """
    return current_request_id()[:MAX_ID]


def request_context(request_id: str) -> Context:
    """Make a context for a task that is part of no request but calls other replicas for one.

    They log this id, and their work is part of the current request's trace. Without an id the
    context is empty.
    """
    context = Context()
    if request_id:
        bind_request_id(context, request_id)
        bind_trace(context)
    return context


def log_accepted(request: Request) -> None:
    """Log that the router has accepted a request."""
    if not logger.isEnabledFor(logging.INFO):
        return
    name, number = request.request_id, len(request.sequences)
    num_tokens = max(len(each.prompt_ids) + len(each.output_ids) for each in request.sequences)
    message = (
        "request %s is accepted: %d sequence%s, the longest of %d tokens"
        + ", begun elsewhere" * request.was_accepted
    )
    extra = request_fields(name, sequences=number, longest=num_tokens)
    logger.info(message, name or "-", number, "s" * (number != 1), num_tokens, extra=extra)


def log_ended(request: ActiveRequest, *, is_complete: bool) -> None:
    """Log the end of a request. It is incomplete if it failed, its client disconnected or its
    ingress was lost.
    """
    if not logger.isEnabledFor(logging.INFO):
        return
    request_id, outcome = request.request_id, "has ended" if is_complete else "is aborted"
    times = {name: round(seconds, 6) for name, seconds in request.times._asdict().items()}
    words = ", ".join(
        f"{name.removesuffix('_s')} {seconds:.3f} s" for name, seconds in times.items()
    )
    extra = request_fields(request_id, is_complete=is_complete, **times)
    logger.info("request %s %s: %s", request_id or "-", outcome, words, extra=extra)
