"""Checks before an application starts: the store of batch jobs, free resources, ports, a running
Ray Serve.

Otherwise errors would show only when the model is loaded, or only in the logs of Ray Serve, which
retries.
"""

import errno
import json
import os
import re
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import psutil

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.pipeline.lifecycle import PLACEMENT_ATTEMPT_S
from tramontane.cluster.pipeline.resources import (
    check_placeable,
    describe_shortage,
    describe_wait,
    no_room_error,
    read_resources,
)
from tramontane.cluster.planning.hardware import usable_memory
from tramontane.cluster.ray_internals.accessors import running_serve_options
from tramontane.cluster.serving.app import GRPC_FUNCTIONS
from tramontane.cluster.serving.batch_replica import job_settings
from tramontane.proto.errors import ConfigError, PlanError
from tramontane.proto.units import format_bytes
from tramontane.router.batch.database import Database
from tramontane.router.batch.files import JobStorage
from tramontane.router.batch.urls import UrlReader

# Describes the listener at a port of this machine: a Tramontane server with its version and model,
# or another process.

ANSWER_TIMEOUT_S = 2.0  # for all requests together
MAX_ANSWER_BYTES = 1 << 16
RUNNING_SERVER = re.compile(r"tramontane\S* serve\b")  # a command line
ROOT_KEYS = {"ui", "docs", "openapi", "health"}  # keys in our servers' response to /
# hosts that are all interfaces, and where to ask then
EVERYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}

Address = IPv4Address | IPv6Address


def find_listener(host: str, port: int) -> psutil.Process | None:
    """Return the process that listens on our address; None if it is not visible, as another user's
    process.

    Several processes may listen on the port, on other addresses: a listener on 127.0.0.2 does not
    block 127.0.0.1, listeners on 127.0.0.1 and on all addresses do. The closest match is returned.
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
    """Return 0 for the same address and more for all addresses; None if both can be bound. ``::``
    includes IPv4.
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
    """Describe the listener, for messages: ``Tramontane 0.2.0, which serves demo (process 17)``, or
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
    """Return the description of a Tramontane server; "" for another server, and for no response
    within ANSWER_TIMEOUT_S.

    The client bounds only the time between two bytes, so it runs on a daemon thread, which may be
    left running.
    """
    answers: list[str] = []
    asking = Thread(target=lambda: answers.append(_ask(host, port)), daemon=True)
    asking.start()
    asking.join(ANSWER_TIMEOUT_S)
    return answers[0] if answers else ""


def _ask(host: str, port: int) -> str:
    """Request ``/``, which needs no key, then paths that need one; return "" if it is not a
    Tramontane server.
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
    """Return a response's body, None for an error. Raises ValueError if it is long or not JSON."""
    body = bytearray()
    with client.stream("GET", path) as response:
        for part in response.iter_bytes():
            body += part
            if len(body) > MAX_ANSWER_BYTES:
                raise ValueError(f"{path} has no end")
    return json.loads(body) if response.is_success else None


POLL_INTERVAL_S = 0.1
RESOURCES_TIMEOUT_S = 5.0
PORT_TIMEOUT_S = 15.0
# Of serve with the demo model of 11 MiB, anonymous and shared memory at its peak, as the kernel
# counts it for a control group: 1209, 1526 and 2174 MiB with 1, 2 and 4 stages, 1833 MiB with two
# pipelines of one stage.
MIB = 2**20
SERVER_BYTES, PIPELINE_BYTES, WORKER_BYTES = 580 * MIB, 300 * MIB, 310 * MIB


def check_job_storage(config: EngineConfig) -> None:
    """Create the folders that the configuration names for batch jobs. Raises ConfigError if one
    cannot be used.

    A store on another machine need not exist yet. Without a writable home directory there are no
    batch jobs, but all other features work.
    """
    settings = job_settings(config.with_absolute_paths())
    database, storage = Database(settings.database), JobStorage(settings.storage)
    UrlReader(settings.url_prefixes)
    if config.jobs_database is not None and database.file is not None:
        _check_folder("--jobs-database", database.file.parent, 0o700)
        if database.file.is_dir():
            raise ConfigError(f"--jobs-database: {database.file} is a folder; name a file in it")
    if config.jobs_storage is not None and storage.folder is not None:
        _check_folder("--jobs-storage", storage.folder, 0o777)


def _check_folder(flag: str, folder: Path, mode: int) -> None:
    try:
        folder.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{flag}: {folder} cannot be made: {error.strerror}; name another place"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag}: {folder} cannot be written to; name another place, or allow it")


def check_resources(spec: PipelineSpec, num_pipelines: int, report: Callable[[str], None]) -> None:
    """Raise PlanError unless the cluster has enough free resources for the pipelines' stages.

    Where Ray's autoscaler may add nodes, it does so once the stages wait for them; then missing
    resources are only reported.
    """
    check_placeable(spec, read_resources(), num_pipelines)
    # Ray counts resources of processes that have just ended as free a little later
    deadline = time.monotonic() + RESOURCES_TIMEOUT_S
    while shortage := describe_shortage(spec, cluster := read_resources(), num_pipelines):
        if cluster.may_grow_for(spec):
            wait = describe_wait(
                spec, PLACEMENT_ATTEMPT_S + spec.placement_timeout_s, shortage, num_pipelines
            )
            report(f"{wait}; Ray Serve repeats the attempt some times")
            return
        if time.monotonic() >= deadline:
            raise no_room_error(spec, cluster, num_pipelines)
        time.sleep(POLL_INTERVAL_S)


def check_memory(spec: PipelineSpec, num_pipelines: int) -> None:
    """Raise PlanError unless this machine, or its container, has the memory that Ray, Ray Serve and
    the processes of a server take without any weights.

    With less the start takes minutes and ends in a kill, or never.
    """
    num_workers = num_pipelines * spec.num_workers
    need = SERVER_BYTES + num_pipelines * PIPELINE_BYTES + num_workers * WORKER_BYTES
    free = usable_memory() + psutil.Process().memory_info().rss  # this process is part of the need
    if free < need:
        workers = f"{num_workers} worker{'s' * (num_workers != 1)}"
        raise PlanError(
            f"Ray and {workers} need {format_bytes(need)} of memory without weights and caches, and"
            f" can have {format_bytes(free)} here; give the container or the machine more, or use"
            " fewer --stages"
        )


def check_ports(config: EngineConfig, report: Callable[[str], None]) -> None:
    """Raise ConfigError unless the HTTP and gRPC addresses can be bound here.

    Waits up to ``PORT_TIMEOUT_S`` for a port that a Ray cluster uses: the cluster of a killed
    server needs some seconds to end.
    """
    if config.grpc_port == config.port:
        raise ConfigError(
            f"--grpc-port and --port are both {config.port}; choose another --grpc-port"
        )
    _check_port(config.host, config.port, "--port", report)
    if config.grpc_port:
        _check_port(config.host, config.grpc_port, "--grpc-port", report)


def _check_port(host: str, port: int, flag: str, report: Callable[[str], None]) -> None:
    deadline = time.monotonic() + PORT_TIMEOUT_S
    is_reported = False
    while (error := _bind_error(host, port)) is not None:
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        if not (in_use and _may_be_released(host, port)) or time.monotonic() > deadline:
            raise ConfigError(_describe_unavailable(host, port, flag, error)) from error
        if not is_reported:
            report(
                f"waiting up to {PORT_TIMEOUT_S:.0f} s for {flag} {port}, which another process"
                " still has"
            )
        is_reported = True
        time.sleep(POLL_INTERVAL_S)


def _describe_unavailable(host: str, port: int, flag: str, error: OSError | UnicodeError) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return (
            f"{flag} {port} is in use by {describe_listener(host, port)}; choose another {flag}, or"
            " stop that first"
        )
    match error:
        case UnicodeError() | socket.gaierror():
            return (
                f"--host {host} is no address, and no name of one; give an address of this machine,"
                " such as 127.0.0.1"
            )
        case OSError(errno=errno.EADDRNOTAVAIL):
            return (
                f"--host {host} is not an address of this machine; give one that is, or 0.0.0.0 for"
                " all of them"
            )
        case OSError(errno=errno.EAFNOSUPPORT):
            return (
                f"--host {host} is an IPv6 address, and this machine has no IPv6; give an IPv4"
                " address"
            )
        case OSError(errno=errno.EACCES | errno.EPERM):
            return (
                f"{flag} {port} is for root alone on this machine, as low numbers are; choose a"
                f" higher {flag}"
            )
        case _:
            code = errno.errorcode.get(error.errno or 0, "no code")
            return (
                f"--host {host} {flag} {port} cannot be opened ({code}); choose another {flag} or"
                " --host"
            )


def _may_be_released(host: str, port: int) -> bool:
    """Return False if the listener is not of Ray, or is of the cluster of a running ``tramontane
    serve``.

    Process 1 does not count: it is the parent of processes that a killed server left, and in a
    container its command line is often the server's, such as ``tini -- tramontane serve``.
    """
    with suppress(psutil.Error):
        if (process := find_listener(host, port)) is not None:
            titles = [line for _, line in with_parents(process)]
            is_ray = any(title.startswith("ray::") or "raylet" in title for title in titles)
            return is_ray and not any(RUNNING_SERVER.search(title) for title in titles)
    return True


def _bind_error(host: str, port: int) -> OSError | UnicodeError | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError) as error:
            return error
    return None


def check_running_serve(config: EngineConfig, report: Callable[[str], None]) -> bool:
    """Return whether there will be gRPC, and report features that Ray Serve lacks because it was
    started without them.

    Raises ConfigError if the addresses that it was first started with differ from the
    configuration's.
    """
    http, grpc = running_serve_options()
    if (http.host, http.port) != (config.host, config.port):
        raise ConfigError(
            f"Ray Serve runs on this cluster already, at {http.host}:{http.port}; give --host"
            f" {http.host} --port {http.port}, or shut it down first with: serve shutdown"
        )
    if config.tracing_exporter is not None:
        report(
            "Ray Serve, and with it tracing, stays as it was started on this cluster, whatever"
            " --tracing-exporter says"
        )
    if not config.grpc_port:
        return False
    if not set(GRPC_FUNCTIONS) <= set(grpc.grpc_servicer_functions) or not grpc.port:
        report(
            "gRPC is off, because Ray Serve was started on this cluster without it; shut it down"
            " first to have both"
        )
        return False
    if grpc.port != config.grpc_port:
        raise ConfigError(
            f"Ray Serve runs on this cluster already, with gRPC at port {grpc.port}; give"
            f" --grpc-port {grpc.port}, or 0 for none"
        )
    return True
