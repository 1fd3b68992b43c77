"""Where the words of ours go in a process of Ray Serve's."""

import logging
from contextvars import Context, ContextVar
from typing import cast

from ray.serve._private.constants import SERVE_LOGGER_NAME
from ray.serve.context import _get_serve_request_context, _RequestContext, _serve_request_context

from tramontane.cluster.config.logging import Labels, LogSettings
from tramontane.cluster.observability.tracing import carry_on

MAX_ID = 128  # characters, as over HTTP


def log_beside_ray_serve(settings: LogSettings, component: str, **fields: object) -> None:
    """Call in a replica's constructor: what we log goes where Ray Serve's own lines go, which is the process's log, in its form.

    Nothing else takes it there: Python would write it to the process's standard error, without a time.
    """
    handler = BesideRayServe()
    handler.addFilter(Labels({"component": component, **fields}))
    settings.hand_to(handler)


class BesideRayServe(logging.Handler):
    """Hands lines to Ray Serve's handlers, as they are at that moment: it makes them anew where its configuration changes."""

    def handle(self, record: logging.LogRecord) -> bool:
        if passes := bool(self.filter(record)):
            logging.getLogger(SERVE_LOGGER_NAME).handle(record)
        return passes


def serves_request_id(_context: object) -> str:
    """What Ray Serve calls the request that this task works on: over gRPC what its metadata has as request_id, or a new one."""
    return _get_serve_request_context().request_id[:MAX_ID]


def context_of(request_id: str) -> Context:
    """For a task that is part of no request, but asks other replicas on behalf of one: they name it so in their logs, and
    what they do belongs to its trace. Without an id it is nobody's."""
    context, serves_own = Context(), cast("ContextVar[_RequestContext]", _serve_request_context)
    if request_id:
        context.run(serves_own.set, _RequestContext(request_id=request_id))
        carry_on(context)
    return context
