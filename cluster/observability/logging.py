"""Where the words of ours go in a process of Ray Serve's.

What a router says of each request: that it was accepted, and how it ended. Once each, and nothing of its tokens.
"""

import logging
from collections.abc import Sequence
from contextvars import Context, ContextVar
from dataclasses import asdict
from typing import cast

from ray.serve._private.constants import SERVE_LOGGER_NAME
from ray.serve.context import _get_serve_request_context, _RequestContext, _serve_request_context

from tramontane.cluster.config.logging import ContextFilter, LogSettings
from tramontane.cluster.observability.tracing import propagate_trace
from tramontane.proto.log_fields import request_fields
from tramontane.proto.request import SequenceRequest
from tramontane.router.engine.active_request import ActiveRequest

logger = logging.getLogger(__name__)

MAX_ID = 128  # characters, as over HTTP


def use_serve_log(settings: LogSettings, component: str, **fields: object) -> None:
    """Call in a replica's constructor: what we log goes where Ray Serve's own lines go, which is the process's log, in its form.

    Nothing else takes it there: Python would write it to the process's standard error, without a time.
    """
    handler = ServeLogHandler()
    handler.addFilter(ContextFilter({"component": component, **fields}))
    settings.install(handler)


class ServeLogHandler(logging.Handler):
    """Hands lines to Ray Serve's handlers, as they are at that moment: it makes them anew where its configuration changes."""

    def handle(self, record: logging.LogRecord) -> bool:
        if passes := bool(self.filter(record)):
            logging.getLogger(SERVE_LOGGER_NAME).handle(record)
        return passes


def serve_request_id(_context: object) -> str:
    """What Ray Serve calls the request that this task works on: over gRPC what its metadata has as request_id, or a new one."""
    return _get_serve_request_context().request_id[:MAX_ID]


def request_context(request_id: str) -> Context:
    """For a task that is part of no request, but asks other replicas on behalf of one: they name it so in their logs, and
    what they do belongs to its trace. Without an id it is nobody's."""
    context, serves_own = Context(), cast("ContextVar[_RequestContext]", _serve_request_context)
    if request_id:
        context.run(serves_own.set, _RequestContext(request_id=request_id))
        propagate_trace(context)
    return context


def log_accepted(request: ActiveRequest, specs: Sequence[SequenceRequest]) -> None:
    if not logger.isEnabledFor(logging.INFO):
        return
    own_id, num_tokens = request.request_id, max(len(spec.prompt_ids) + len(spec.output_ids) for spec in specs)
    goes_on = any(spec.already_admitted or spec.output_ids for spec in specs)
    words = "request %s is accepted: %d sequence%s, the longest of %d tokens" + ", begun elsewhere" * goes_on
    extra = request_fields(own_id, sequences=len(specs), longest=num_tokens)
    logger.info(words, own_id or "-", len(specs), "s" * (len(specs) != 1), num_tokens, extra=extra)


def log_ended(request: ActiveRequest, *, is_complete: bool) -> None:
    """Not complete is one that failed, or whose client has left, or whose door is gone."""
    if not logger.isEnabledFor(logging.INFO):
        return
    own_id, what = request.request_id, "has ended" if is_complete else "is aborted"
    times = {name: round(seconds, 6) for name, seconds in asdict(request.times).items()}
    words = ", ".join(f"{name.removesuffix('_s')} {seconds:.3f} s" for name, seconds in times.items())
    logger.info("request %s %s: %s", own_id or "-", what, words, extra=request_fields(own_id, is_complete=is_complete, **times))
