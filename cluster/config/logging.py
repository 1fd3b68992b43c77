"""What the log of each process looks like, and where it goes."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tramontane.cluster.ray_internals.core import json_formatter

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

ROOT_LOGGER = "tramontane"  # above all loggers of ours
TEXT = "%(levelname)s %(asctime)s %(component)s -- %(message)s"
MORE_FIELDS = ("name", "created")  # beside Ray's: whose line it is, and when, in seconds since 1970


@dataclass(frozen=True, slots=True)
class LogSettings:
    """As flags and configuration say."""

    format: LogFormat = "text"
    level: LogLevel = "warning"

    def for_ray_serve(self) -> dict[str, Any]:
        """Its ``LoggingConfig``. Its own lines only where something is wrong: doors say what they have answered."""
        quiet = {"log_level": "WARNING", "enable_access_log": False}
        as_json = {"encoding": "JSON", "additional_log_standard_attrs": list(MORE_FIELDS)}
        return quiet | as_json if self.format == "json" else quiet

    def to_stderr(self, component: str, **fields: object) -> None:
        """Of this process, which is no replica of Ray Serve's. Ray keeps an actor's standard error beside its own logs."""
        handler = logging.StreamHandler()
        handler.setFormatter(json_formatter(MORE_FIELDS) if self.format == "json" else logging.Formatter(TEXT))
        handler.addFilter(ContextFilter({"component": component, **fields}))
        self.install(handler)

    def install(self, handler: logging.Handler) -> None:
        """All that is ours, and to nobody else."""
        own = logging.getLogger(ROOT_LOGGER)
        own.handlers[:] = [handler]
        own.setLevel(self.level.upper())
        own.propagate = False


class ContextFilter(logging.Filter):
    """Lets everything pass, with these fields, which say where it comes from."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        super().__init__()
        self._fields = fields

    def filter(self, record: logging.LogRecord) -> bool:
        vars(record).update(self._fields)
        return True
