"""Ports for servers that a test or a benchmark starts."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Return a free port that no other process takes before the server does.

    Ray's own processes listen at ports of 10000 to 19999 and at ports that the kernel chooses
    (32768 and above on Linux). A free port from the kernel would often be taken by one of them
    before Ray Serve binds it. Tests begin with the same seed, which would give those that run at
    once the same ports.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
