"""An engine in a process of its own, which gets work and answers by lines of JSON (see
peer_programs.py).
"""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

STOP_TIMEOUT_S = 60.0


class EngineError(Exception):
    """The engine's process has ended, or never started; the message has its last line."""


class EngineProcess:
    """A started engine, so that several can be measured in turns. ``about``: what it says of
    itself.

    With ``pauses`` the processes of its group are stopped while it has no work, as some engines
    wait by computing.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        environment: Mapping[str, str],
        log: Path,
        pauses: bool = False,
    ) -> None:
        self._log, self._pauses = log, pauses
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | dict(environment),
                start_new_session=True,
            )
        try:
            self.about = str(self._answer()["about"])
        except BaseException:
            self.close()
            raise
        self._pause()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def run(
        self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]
    ) -> tuple[float, list[list[int]]]:
        """Return the seconds that the prompts took, and the answers' tokens."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "sampling": sampling}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._pause()
        return answer["seconds"], answer["token_ids"]

    def close(self) -> None:
        """End the process: it gets no more work, and is killed if that does not suffice."""
        self._signal(signal.SIGCONT)
        try:
            self._process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        """Return the next line that is an answer; engines print other lines too."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(('{"about"', '{"seconds"')):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise EngineError(
            f"exited with status {self._process.wait()}:"
            f" {self._log.read_text().strip().splitlines()[-1:]}"
        )

    def _pause(self) -> None:
        if self._pauses:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
