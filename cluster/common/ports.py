"""What listens at a port of this machine: a Tramontane server with its version and model, or another process."""

import json
import re
import time
from contextlib import suppress
from typing import Any

import httpx
import psutil

ANSWER_TIMEOUT_S = 2.0  # for all that is asked
MAX_ANSWER_BYTES = 1 << 16
RUNNING_SERVER = re.compile(r"tramontane\S* serve\b")  # a command line
ROOT_KEYS = {"ui", "docs", "openapi", "health"}  # of what our servers answer at /
EVERYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # hosts that are all interfaces, and where to ask then


def find_listener(port: int) -> psutil.Process | None:
    """Return the process that listens at a port; None if that cannot be seen, as of another user's."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
                return psutil.Process(connection.pid)
    return None


def with_parents(process: psutil.Process) -> list[tuple[int, str]]:
    """Return the ids and command lines of a process and of its ancestors without process 1. Raises psutil.Error."""
    return [(each.pid, " ".join(each.cmdline())) for each in (process, *process.parents()) if each.pid != 1]


def describe_listener(host: str, port: int) -> str:
    """Return what listens, for messages: ``Tramontane 0.2.0, which serves demo (process 17)``, or ``process 17 (nginx)``."""
    server, process = _describe_server(host, port), _describe_process(port)
    if not server:
        return process or "another process, which cannot be seen from here"
    return f"{server} ({process})" if process else server


def _describe_process(port: int) -> str:
    with suppress(psutil.Error):
        if (process := find_listener(port)) is not None:
            servers = [pid for pid, line in with_parents(process) if RUNNING_SERVER.search(line)]
            return f"process {servers[-1]}, tramontane serve" if servers else f"process {process.pid}, {process.name()}"
    return ""


def _describe_server(host: str, port: int) -> str:
    """Ask for ``/``, which needs no key, then for what needs one; return "" if it is no server of ours."""
    address = EVERYWHERE.get(host, host)
    url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    with suppress(httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError, AttributeError):
        with httpx.Client(base_url=url, timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
            if not _get_json(client, "/", deadline).keys() >= ROOT_KEYS:
                return ""
            version, models = (_get_json(client, path, deadline) for path in ("/version", "/v1/models"))
        if version is None or models is None:
            return "Tramontane, which asks for an API key"
        return f"Tramontane {version['version']}, which serves {models['data'][0]['id']}"
    return ""


def _get_json(client: httpx.Client, path: str, deadline: float) -> Any:  # noqa: ANN401 - any JSON
    """Return an answer's body, None for an error. Raises ValueError if it is long, takes long or is no JSON."""
    body = bytearray()
    with client.stream("GET", path) as response:
        for part in response.iter_bytes():
            body += part
            if len(body) > MAX_ANSWER_BYTES or time.monotonic() > deadline:
                raise ValueError(f"{path} has no end")
    return json.loads(body) if response.is_success else None
