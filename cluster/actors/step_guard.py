"""Guards around a worker's steps: a process that can no longer compute exits, and failed steps are
logged.
"""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tramontane.proto.errors import LinkError, TramontaneError
from tramontane.proto.request import format_request_ids, requests_fields
from tramontane.proto.step import MicroBatch

if TYPE_CHECKING:
    from tramontane.workers.stage.stage_worker import StageWorker

# in a row; one more than a poison request causes: two with other requests, the third alone
MAX_FAILURES = 4
# threads that were left in a call of NCCL; one may be due to a neighbor that died just then
MAX_ABANDONED = 3

logger = logging.getLogger(__name__)


class FailureGuard:
    """Counts the failures of one process, and ends it so that Ray starts another one, which loads
    the weights again.

    Errors of Tramontane's own classes, which may be a neighbor's fault, do not count. A kernel that
    fails leaves a CUDA context in which nothing works any more, while the process, its health
    checks and all that only uses the host's memory continue to work. So after each failure the
    device is tested.
    """

    def __init__(self, label: str, device: str, end: Callable[[], None] | None = None) -> None:
        self._label, self._device, self._end = label, device, end or _end_process
        self._num_in_a_row = 0
        self._failed_epoch: int | None = None

    @contextmanager
    def guard(self, epoch: int | None = None) -> Iterator[None]:
        """Guard one step or call. In one epoch only the first failure counts: the others were
        already in flight.
        """
        try:
            yield
        except TramontaneError:
            raise
        except Exception as error:
            if epoch is None or epoch != self._failed_epoch:
                self._num_in_a_row += 1
            self._failed_epoch = epoch
            if not device_self_test(self._device):
                self._exit(f"{self._device} no longer computes: {error}")
            elif self._num_in_a_row >= MAX_FAILURES:
                self._exit(f"{MAX_FAILURES} steps in a row have failed: {error}")
            raise
        self._num_in_a_row = 0

    @contextmanager
    def guard_connect(self) -> Iterator[None]:
        """Guard the making of channels, which leaves a thread behind where two GPUs cannot be
        connected.
        """
        try:
            yield
        except LinkError as error:
            from tramontane.workers.links.gpu_channel import num_abandoned_operations

            if (num_abandoned := num_abandoned_operations()) >= MAX_ABANDONED:
                self._exit(
                    f"{num_abandoned} threads were left in the first operation of a channel:"
                    f" {error}"
                )
            raise

    def _exit(self, why: str) -> None:
        logger.error("%s exits, and gets a new process: %s", self._label, why)
        self._end()


def _end_process() -> None:
    # an exit that Ray does not take for intended, and that does not wait for the device
    os._exit(1)


def device_self_test(device: str) -> bool:
    """Return True if the device still computes 1 + 1."""
    import torch

    try:
        return bool(torch.ones(1, device=device).add_(1).item() == 2)
    except Exception:
        return False


@contextmanager
def log_failures(worker: "StageWorker | None", batch: MicroBatch) -> Iterator[None]:
    """Log a step that fails, with its requests; errors of Tramontane's own classes need no
    traceback.
    """
    # now, because a fence forgets them, perhaps before the log
    request_ids = worker.request_ids_of(batch) if worker else []
    try:
        yield
    except Exception as error:
        what = (batch.step_id, format_request_ids(request_ids) or "-", error)
        is_ours = isinstance(error, TramontaneError)
        logger.warning(
            "step %d failed, of requests %s: %s",
            *what,
            exc_info=not is_ours,
            extra=requests_fields(request_ids),
        )
        raise
