"""Where batch jobs are to be kept, looked at before anything starts: later it would be known only once the model is loaded.

What must be free before the application is started: Ray Serve would try again and again, and say so in its own logs only.
"""

import errno
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.serve.context import _get_global_client

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.serving.app import GRPC_FUNCTIONS
from tramontane.cluster.serving.batch_replica import job_settings
from tramontane.proto.errors import ConfigError, PlanError
from tramontane.router.batch.database import Database
from tramontane.router.batch.storage import JobStorage, UrlReader


def check_job_storage(config: EngineConfig) -> None:
    """Makes the folders that were named. Raises ConfigError.

    What is on another machine need not be there yet; and without a home to write to there are no batch jobs, but all else.
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
        raise ConfigError(f"{flag}: {folder} cannot be made: {error.strerror}; name another place") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag}: {folder} cannot be written to; name another place, or allow it")


FREE_POLL_S = 0.1
ROOM_TIMEOUT_S = 5.0
PORT_TIMEOUT_S = 15.0


def check_resources(spec: PipelineSpec, num_pipelines: int) -> None:
    """Raises PlanError unless the cluster has free what the pipelines' stages need."""
    for name in spec.bundles[0]:
        of_a_pipeline = sum(bundle[name] for bundle in spec.bundles)
        needed = of_a_pipeline * num_pipelines
        deadline = time.monotonic() + ROOM_TIMEOUT_S  # what has just ended is counted as free a little later
        while needed > (free := ray.available_resources()).get(name, 0) and time.monotonic() < deadline:  # type: ignore[no-untyped-call]
            time.sleep(FREE_POLL_S)
        if needed > free.get(name, 0):
            raise PlanError(
                f"{num_pipelines} x {spec.num_workers} stages of {of_a_pipeline / spec.num_workers:g} {name} each "
                f"need {needed:g}, and the cluster "
                f"has {free.get(name, 0):g} free; use fewer --replicas, --stages or --threads-per-stage"
            )


def check_ports(config: EngineConfig, report: Callable[[str], None]) -> None:
    """Raises ConfigError unless the addresses can be bound here. One that is in use is waited for a little: a server that was
    killed has a cluster that needs some seconds to end."""
    if config.grpc_port == config.port:
        raise ConfigError(f"--grpc-port and --port are both {config.port}; choose another --grpc-port")
    _check_port(config.host, config.port, "--port", report)
    if config.grpc_port:
        _check_port(config.host, config.grpc_port, "--grpc-port", report)


def _check_port(host: str, port: int, flag: str, report: Callable[[str], None]) -> None:
    deadline = time.monotonic() + PORT_TIMEOUT_S
    is_told = False
    while (error := _bind_error(host, port)) is not None:
        in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        if not in_use or time.monotonic() > deadline:
            raise ConfigError(f"--host {host} {flag} {port} cannot be had: {error}; choose another {flag} or --host") from error
        if not is_told:
            report(f"waiting for {flag} {port}, which another process still has")
        is_told = True
        time.sleep(FREE_POLL_S)


def _bind_error(host: str, port: int) -> OSError | UnicodeError | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError) as error:
            return error
    return None


def check_running_serve(config: EngineConfig) -> bool:
    """Ray Serve's addresses are the cluster's: the first who starts it decides. Returns whether there is gRPC.

    Raises ConfigError if they are others than the configuration's.
    """
    client: Any = _get_global_client()
    host, port = client.http_config.host, client.http_config.port
    if (host, port) != (config.host, config.port):
        raise ConfigError(
            f"Ray Serve runs on this cluster already, at {host}:{port}; "
            f"give --host {host} --port {port}, or shut it down first with: serve shutdown"
        )
    grpc_options = ray.get(client._controller.get_grpc_config.remote())
    if not set(GRPC_FUNCTIONS) <= set(grpc_options.grpc_servicer_functions) or not grpc_options.port or not config.grpc_port:
        return False
    if grpc_options.port != config.grpc_port:
        raise ConfigError(
            f"Ray Serve runs on this cluster already, with gRPC at port {grpc_options.port}; "
            f"give --grpc-port {grpc_options.port}, or 0 for none"
        )
    return True
