"""``tramontane serve`` as a process that is killed and started again, with its batch jobs in a folder."""

import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

ENTRY = "from tramontane.cluster.cli.__main__ import main; main()"
TITLES = {"the Batch replica": "ray::ServeReplica:tramontane:Batch", "a stage": "ray::StageActor"}
POLL_S = 0.05


def _free_port() -> int:
    """Where neither Ray nor the kernel will put anything."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """The demo model in float32 on two stages. ``url`` stays the same; whoever asks is patient."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        jobs = ("--jobs-database", f"sqlite:///{folder}/jobs.sqlite", "--jobs-storage", f"{folder}/jobs")
        more = ("--dtype", "float32", "--stages", "2", "--threads-per-stage", "1", "--max-num-seqs", "16")
        self._command = [sys.executable, "-c", ENTRY, "serve", "--port", str(self._port), "--grpc-port", "0", *jobs, *more]
        self._process = self._started()
        stack.callback(self._stop)

    def submit(self, lines: bytes) -> str:
        """The ID of a job."""
        files = {"file": ("in.jsonl", lines)}
        file_id = self._asked(lambda: httpx.post(f"{self.url}/v1/files", data={"purpose": "batch"}, files=files, timeout=60))[
            "id"
        ]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        return str(self._asked(lambda: httpx.post(f"{self.url}/v1/batches", json=body, timeout=60))["id"])

    def num_done(self, job_id: str) -> int:
        counts = self._asked(lambda: httpx.get(f"{self.url}/v1/batches/{job_id}", timeout=10))["request_counts"]
        return int(counts["completed"]) + int(counts["failed"])

    def wait_for(self, job_id: str, num_lines: int) -> None:
        """Until so many have ended."""
        while self.num_done(job_id) < num_lines:
            time.sleep(POLL_S)

    def kill(self, victim: str) -> None:
        """kill -9. The server is started again, all else starts again by itself. Returns once it was done."""
        if victim == "the server":
            self._process.kill()
            self._process.wait()
            self._process = self._started()
            return
        while not self._killed_one(TITLES[victim]):  # it may be starting again just now
            assert self._process.poll() is None, "the server has ended by itself"
            time.sleep(POLL_S)

    def _killed_one(self, title: str) -> bool:
        """Of those whose title begins so: an actor at work shows its method, too (``ray::StageActor.step``)."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        found = [each for each in children if _title(each).startswith(title)]
        with suppress(psutil.NoSuchProcess, IndexError):
            random.choice(found).kill()
            return True
        return False

    def _started(self) -> "subprocess.Popen[bytes]":
        while True:
            process = subprocess.Popen(self._command, stdout=subprocess.PIPE, start_new_session=True)
            assert process.stdout is not None
            if process.stdout.readline():
                return process
            process.wait()  # the port of the one that was killed may not be free yet

    def _stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _asked(self, ask: Callable[[], httpx.Response]) -> dict[str, Any]:
        while True:
            with suppress(httpx.HTTPError, json.JSONDecodeError):
                answer = ask()
                if answer.status_code == httpx.codes.OK:
                    parsed: dict[str, Any] = answer.json()
                    return parsed
            time.sleep(POLL_S)


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline()).strip()
    return ""
