"""Log settings of every process: format, level, and destination of records."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tramontane.cluster.ray_internals.accessors import json_formatter, serve_logger

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

ROOT_LOGGER = "tramontane"  # the parent of all our loggers
TEXT = "%(levelname)s %(asctime)s %(component)s -- %(message)s"
# A file that also gets each line, as JSON: in a pod the output of its first process, which is all
# that ``kubectl logs`` shows, while Ray keeps the output of its workers in files.
CONTAINER_LOG = "TRAMONTANE_CONTAINER_LOG"
# in addition to Ray's: the logger, and the time in seconds since 1970
MORE_FIELDS = ("name", "created")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The format and the level, as flags and configuration give them."""

    format: LogFormat = "text"
    level: LogLevel = "warning"

    def for_ray_serve(self) -> dict[str, Any]:
        """Return Ray Serve's ``LoggingConfig``. It logs warnings only: our ingress has its own
        access log.
        """
        quiet = {"log_level": "WARNING", "enable_access_log": False}
        as_json = {"encoding": "JSON", "additional_log_standard_attrs": list(MORE_FIELDS)}
        return quiet | as_json if self.format == "json" else quiet

    def to_stderr(self, component: str, **fields: object) -> None:
        """Log to standard error, in processes that are not replicas of Ray Serve. Ray keeps an
        actor's log next to its own logs.
        """
        handler = logging.StreamHandler()
        handler.setFormatter(
            json_formatter(MORE_FIELDS) if self.format == "json" else logging.Formatter(TEXT)
        )
        handler.addFilter(ContextFilter({"component": component, **fields}))
        self.install(handler)

    def to_stderr_with_serve(self, component: str) -> None:
        """Log to standard error, and have Ray Serve's warnings in this process written in the same
        format.
        """
        self.to_stderr(component)
        ray_serve = serve_logger()
        ray_serve.handlers[:] = logging.getLogger(ROOT_LOGGER).handlers
        ray_serve.setLevel(logging.WARNING)  # a command reports its own progress

    def install(self, handler: logging.Handler) -> None:
        """Send the records of our loggers to this handler, and to ``CONTAINER_LOG``, only."""
        own = logging.getLogger(ROOT_LOGGER)
        for before in own.handlers:
            if isinstance(before, logging.FileHandler):
                before.close()
        own.handlers[:] = [handler]
        own.setLevel(self.level.upper())
        own.propagate = False
        if path := os.environ.get(CONTAINER_LOG):
            try:
                container = logging.FileHandler(path)
            except OSError as error:
                own.warning("%s: %s cannot be written to: %s", CONTAINER_LOG, path, error.strerror)
                return
            container.setFormatter(json_formatter(MORE_FIELDS))
            # they add the process's fields, and leave lines out
            container.filters[:] = handler.filters
            own.addHandler(container)


class ContextFilter(logging.Filter):
    """A filter that passes all records and adds these fields to them."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        super().__init__()
        self._fields = fields

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields."""
        vars(record).update(self._fields)
        return True
