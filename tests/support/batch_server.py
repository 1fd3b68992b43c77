"""``tramontane serve`` as a process that can be killed and restarted, with its batch jobs in a
folder.
"""

import json
import random
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from free_ports import free_port
from serve_process import TRAMONTANE, jobs_flags

TITLES = {"the Batch replica": "ray::ServeReplica:tramontane:Batch", "a stage": "ray::StageActor"}
POLL_S = 0.05


class Server:
    """The demo model in float32 on two stages. ``url`` never changes, and requests are repeated
    until they succeed.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        ports = f"--port {self._port} --grpc-port 0"
        more = "--dtype float32 --stages 2 --threads-per-stage 1 --max-num-seqs 16"
        flags = [*ports.split(), *more.split(), *jobs_flags(folder)]
        self._command = [*TRAMONTANE, "serve", *flags]
        self._process = self._start()
        stack.callback(self._stop)

    def submit(self, lines: bytes) -> str:
        """Submit a job and return its ID."""
        files = {"file": ("in.jsonl", lines)}
        upload = self._request(
            lambda: httpx.post(
                f"{self.url}/v1/files", data={"purpose": "batch"}, files=files, timeout=60
            )
        )
        body = {
            "input_file_id": upload["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        return str(
            self._request(lambda: httpx.post(f"{self.url}/v1/batches", json=body, timeout=60))["id"]
        )

    def num_done(self, job_id: str) -> int:
        counts = self._request(lambda: httpx.get(f"{self.url}/v1/batches/{job_id}", timeout=10))[
            "request_counts"
        ]
        return int(counts["completed"]) + int(counts["failed"])

    def wait_for(self, job_id: str, num_lines: int) -> None:
        """Wait until ``num_lines`` lines of the job have ended."""
        while self.num_done(job_id) < num_lines:
            time.sleep(POLL_S)

    def kill(self, victim: str) -> None:
        """Kill the victim with SIGKILL. The server is restarted here; Ray restarts all other
        processes.
        """
        if victim == "the server":
            self._process.kill()
            self._process.wait()
            self._process = self._start()
            return
        while not self._kill_one(TITLES[victim]):  # it may be restarting
            assert self._process.poll() is None, "the server ended although it was not killed"
            time.sleep(POLL_S)

    def _kill_one(self, title: str) -> bool:
        """Kill one process whose title begins so. A busy actor's title ends with its method
        (``ray::StageActor.step``).
        """
        children = psutil.Process(self._process.pid).children(recursive=True)
        found = [each for each in children if _title(each).startswith(title)]
        with suppress(psutil.NoSuchProcess, IndexError):
            random.choice(found).kill()
            return True
        return False

    def _start(self) -> "subprocess.Popen[bytes]":
        while True:
            process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, start_new_session=True
            )
            assert process.stdout is not None
            if process.stdout.readline():
                return process
            process.wait()  # the port of the killed server may not be free yet

    def _stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _request(self, send: Callable[[], httpx.Response]) -> dict[str, Any]:
        while True:
            with suppress(httpx.HTTPError, json.JSONDecodeError):
                answer = send()
                if answer.status_code == httpx.codes.OK:
                    parsed: dict[str, Any] = answer.json()
                    return parsed
            time.sleep(POLL_S)


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline()).strip()
    return ""
