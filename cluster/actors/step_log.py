"""What a stage says of a step that fails: whose it was. Nothing of the steps that do not."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tramontane.proto.errors import TramontaneError
from tramontane.proto.log_fields import about_all, named
from tramontane.proto.step import MicroBatch

if TYPE_CHECKING:
    from tramontane.workers.stage.stage_worker import StageWorker

logger = logging.getLogger(__name__)


@contextmanager
def failures_logged(worker: "StageWorker | None", batch: MicroBatch) -> Iterator[None]:
    """What our own errors say, of a neighbour that is gone for example, needs no traceback."""
    try:
        yield
    except Exception as error:
        request_ids = worker.request_ids_of(batch) if worker else []
        what = (batch.step_id, named(request_ids) or "-", error)
        is_ours = isinstance(error, TramontaneError)
        logger.warning("step %d failed, of requests %s: %s", *what, exc_info=not is_ours, extra=about_all(request_ids))
        raise
