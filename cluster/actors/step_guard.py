"""A worker whose process can no longer compute ends it: Ray starts another one, which loads the weights anew.

What a stage says of a step that fails: whose it was. Nothing of the steps that do not.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tramontane.proto.errors import TramontaneError
from tramontane.proto.log_fields import format_request_ids, requests_fields
from tramontane.proto.step import MicroBatch

if TYPE_CHECKING:
    from tramontane.workers.stage.stage_worker import StageWorker


logger = logging.getLogger(__name__)

MAX_FAILURES = 4  # in a row, one more than a request causes that is to blame: two in company, the third alone


class FailureGuard:
    """Of one process: what fails in it, and is neither a neighbour's doing nor told by an error of ours.

    A kernel that fails leaves a CUDA context in which nothing works any more, while the process, its health checks and all
    that only concerns the host's memory go on. So whatever fails, the device is asked whether it still computes.
    """

    def __init__(self, label: str, device: str, end: Callable[[], None] | None = None) -> None:
        self._label, self._device, self._end = label, device, end or _end_process
        self._num_in_a_row = 0
        self._failed_epoch: int | None = None

    @contextmanager
    def guard(self, epoch: int | None = None) -> Iterator[None]:
        """Around each thing that the process is there for. In one epoch only the first failure counts: the rest was under way."""
        try:
            yield
        except TramontaneError:
            raise
        except Exception as error:
            if epoch is None or epoch != self._failed_epoch:
                self._num_in_a_row += 1
            self._failed_epoch = epoch
            if not device_self_test(self._device):
                self._exit(f"{self._device} computes no more: {error}")
            elif self._num_in_a_row >= MAX_FAILURES:
                self._exit(f"{MAX_FAILURES} failures in a row: {error}")
            raise
        self._num_in_a_row = 0

    def _exit(self, why: str) -> None:
        logger.error("%s ends its process, and gets a new one: %s", self._label, why)
        self._end()


def _end_process() -> None:
    os._exit(1)  # an exit that Ray does not take for intended, and that waits for no device


def device_self_test(device: str) -> bool:
    """Whether the device still does what it is told."""
    import torch

    try:
        return bool(torch.ones(1, device=device).add_(1).item() == 2)
    except Exception:
        return False


@contextmanager
def log_failures(worker: "StageWorker | None", batch: MicroBatch) -> Iterator[None]:
    """What our own errors say, of a neighbour that is gone for example, needs no traceback."""
    try:
        yield
    except Exception as error:
        request_ids = worker.request_ids_of(batch) if worker else []
        what = (batch.step_id, format_request_ids(request_ids) or "-", error)
        is_ours = isinstance(error, TramontaneError)
        logger.warning("step %d failed, of requests %s: %s", *what, exc_info=not is_ours, extra=requests_fields(request_ids))
        raise
