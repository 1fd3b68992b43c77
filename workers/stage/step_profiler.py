"""Profiles of served steps by PyTorch's profiler: the breakdown of a stage's time under the load of
a real server.

The environment requests one, as ``TRAMONTANE_PROFILE=FOLDER:FIRST:STEPS``: each stage skips the
first steps that it serves, records the requested number, and writes two files: a trace for Perfetto
or Chrome, and a table of operations and kernels. Steps take longer while they are recorded, and one
step waits for the files.
"""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tramontane.proto.plan import StagePlan
from tramontane.workers.stage.step_profile import read_profile

MAX_ROWS = 100  # of the table

logger = logging.getLogger(__name__)


class StepProfiler:
    """Counts the steps of a stage, and profiles ``num_steps`` steps beginning with number
    ``first``.
    """

    def __init__(
        self, folder: Path, first: int, num_steps: int, plan: StagePlan, device: torch.device
    ) -> None:
        self._folder, self._first, self._num_steps, self._plan = folder, first, num_steps, plan
        self._device = device
        self._num_begun = 0
        self._profile: profile | None = None

    @classmethod
    def from_environment(cls, plan: StagePlan, device: torch.device) -> "StepProfiler | None":
        """Return the profiler requested by ``TRAMONTANE_PROFILE``, or None without it. Raises
        ConfigError if it is malformed.
        """
        wanted = read_profile()
        return (
            None
            if wanted is None
            else cls(wanted.folder, wanted.first, wanted.num_steps, plan, device)
        )

    @property
    def is_recording(self) -> bool:
        """Whether the step that has begun is recorded."""
        return self._profile is not None

    def begin_step(self) -> None:
        """Call it where a step begins. Of 20 steps from 200 on, the 201st starts the recording and
        the 221st ends it.
        """
        self._num_begun += 1
        if self._num_begun == self._first + 1:
            self._start()
        elif self.is_recording and self._num_begun == self._first + self._num_steps + 1:
            self._write()

    def _start(self) -> None:
        on_gpu = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_gpu])
        self._profile.start()
        logger.info("%s records %d steps for %s", self._plan.label, self._num_steps, self._folder)

    def _write(self) -> None:
        """Write the files. If that fails, the stage continues to serve."""
        recorded, self._profile = self._profile, None
        assert recorded is not None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        recorded.stop()
        name = f"stage-{self._plan.stage_id}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(self._folder / f"{name}.json"))
            order = (
                "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
            )
            table = recorded.key_averages().table(sort_by=order, row_limit=MAX_ROWS)
            (self._folder / f"{name}.txt").write_text(table, encoding="utf-8")
        except (OSError, RuntimeError) as error:
            logger.warning(
                "%s cannot write its profile to %s: %s", self._plan.label, self._folder, error
            )
            return
        logger.info(
            "%s has written %s.json and %s.txt to %s", self._plan.label, name, name, self._folder
        )
