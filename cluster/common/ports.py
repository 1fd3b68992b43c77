"""What listens at a port of this machine: a Tramontane server with its version and model, or
another process.
"""

import json
import re
import socket
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from threading import Thread
from typing import Any

import httpx
import psutil

ANSWER_TIMEOUT_S = 2.0  # for all that is asked
MAX_ANSWER_BYTES = 1 << 16
RUNNING_SERVER = re.compile(r"tramontane\S* serve\b")  # a command line
ROOT_KEYS = {"ui", "docs", "openapi", "health"}  # of what our servers answer at /
# hosts that are all interfaces, and where to ask then
EVERYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}

Address = IPv4Address | IPv6Address


def find_listener(host: str, port: int) -> psutil.Process | None:
    """Return the process that listens where we would; None if that cannot be seen, as of another
    user's.

    Several may listen at the port, at other addresses: that at 127.0.0.2 does not keep us from
    127.0.0.1, those at 127.0.0.1 and at all addresses do. The nearest is returned.
    """
    ours = _resolve(host, port)
    with suppress(psutil.Error):
        held = [
            (_distance(ours, _as_address(address)), connection.pid)
            for connection in psutil.net_connections("tcp")
            for address in connection.laddr[:1]
            if connection.status == psutil.CONN_LISTEN
            and connection.laddr[1:] == (port,)
            and connection.pid
        ]
        if near := [(distance, pid) for distance, pid in held if distance is not None]:
            return psutil.Process(min(near)[1])
    return None


def _resolve(host: str, port: int) -> Address | None:
    """Return the address of a host; None for a name without one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError, UnicodeError):
        return _as_address(str(socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4][0]))
    return None


def _as_address(text: str) -> Address:
    """Return an address, ``::ffff:127.0.0.1`` as 127.0.0.1."""
    address = ip_address(text)
    return (address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address


def _distance(ours: Address | None, theirs: Address) -> int | None:
    """Return 0 for the same address and more for all addresses; None if both may be listened at.
    ``::`` takes IPv4 along.
    """
    if ours == theirs:
        return 0
    if ours is None:
        return None
    wide, narrow = (theirs, ours) if theirs.is_unspecified else (ours, theirs)
    if wide.version == narrow.version:
        return 1 if wide.is_unspecified else None
    return 2 if IPv6Address(0) in (ours, theirs) else None


def with_parents(process: psutil.Process) -> list[tuple[int, str]]:
    """Return the ids and command lines of a process and of its ancestors without process 1. Raises
    psutil.Error.
    """
    return [
        (each.pid, " ".join(each.cmdline()))
        for each in (process, *process.parents())
        if each.pid != 1
    ]


def describe_listener(host: str, port: int) -> str:
    """Return what listens, for messages: ``Tramontane 0.2.0, which serves demo (process 17)``, or
    ``process 17 (nginx)``.
    """
    server, process = _describe_server(host, port), _describe_process(host, port)
    if not server:
        return process or "another process, which cannot be seen from here"
    return f"{server} ({process})" if process else server


def _describe_process(host: str, port: int) -> str:
    with suppress(psutil.Error):
        if (process := find_listener(host, port)) is not None:
            servers = [pid for pid, line in with_parents(process) if RUNNING_SERVER.search(line)]
            return (
                f"process {servers[-1]}, tramontane serve"
                if servers
                else f"process {process.pid}, {process.name()}"
            )
    return ""


def _describe_server(host: str, port: int) -> str:
    """Return what a server of ours says of itself; "" for another, and for one that has not
    answered after ANSWER_TIMEOUT_S.

    The client bounds only the time between two bytes, so it gets a thread, which may be left
    behind.
    """
    answers: list[str] = []
    asking = Thread(target=lambda: answers.append(_ask(host, port)), daemon=True)
    asking.start()
    asking.join(ANSWER_TIMEOUT_S)
    return answers[0] if answers else ""


def _ask(host: str, port: int) -> str:
    """Ask for ``/``, which needs no key, then for what needs one; return "" if it is no server of
    ours.
    """
    address = EVERYWHERE.get(host, host)
    url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
    with suppress(
        httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError, AttributeError
    ):
        with httpx.Client(base_url=url, timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
            if not _get_json(client, "/").keys() >= ROOT_KEYS:
                return ""
            version, models = (_get_json(client, path) for path in ("/version", "/v1/models"))
        if version is None or models is None:
            return "Tramontane, which asks for an API key"
        return f"Tramontane {version['version']}, which serves {models['data'][0]['id']}"
    return ""


def _get_json(client: httpx.Client, path: str) -> Any:  # any JSON
    """Return an answer's body, None for an error. Raises ValueError if it is long or is no JSON."""
    body = bytearray()
    with client.stream("GET", path) as response:
        for part in response.iter_bytes():
            body += part
            if len(body) > MAX_ANSWER_BYTES:
                raise ValueError(f"{path} has no end")
    return json.loads(body) if response.is_success else None
