"""A head node by ``ray start --head --block``, as in a pod, which is started again if it ends."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

ATTEMPTS = 3


@contextmanager
def blocking_head(
    options: Mapping[str, object],
    environment: Mapping[str, str],
    log: Path,
    is_up: Callable[[], bool],
) -> Iterator[None]:
    """Start a head node with these options for the block, once it is up.

    Its raylet gives up if its agents need more than Ray's fixed wait for them, as on a machine
    whose cores are all taken. A pod is started again then, and so is this.
    """
    words = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *words]
    for attempt in range(1, ATTEMPTS + 1):
        with log.open("w") as file:
            head = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        try:
            while not (up := is_up()) and head.poll() is None:
                time.sleep(0.2)
            assert up or attempt < ATTEMPTS, log.read_text()
            if up:
                yield
                return
        finally:
            _kill(head)


def _kill(head: "subprocess.Popen[bytes]") -> None:
    """Kill it with its children: by SIGTERM, Ray takes half a minute to end."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(head.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    head.kill()
    head.wait(60)
