"""Start a Ray cluster on this machine, or join one that is running, after a check of its
address.
"""

import logging
import os
import secrets
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.exceptions import AuthenticationError, RayError

from tramontane.cluster.common.own_processes import marking_started
from tramontane.cluster.common.ray_api import run_periodically
from tramontane.cluster.common.signals import defer_signals, end_at_once, keep_handler
from tramontane.cluster.config.ray_settings import (
    INLINE_LIMIT,
    ONE_MACHINE_SETTINGS,
    SERVE_SETTINGS,
)
from tramontane.cluster.planning.hardware import (
    CORES_RESOURCE,
    Hardware,
    probe_cluster,
    usable_cpus,
)
from tramontane.cluster.ray_internals.accessors import (
    head_channel,
    keep_sigterm_handler,
    mute_worker_logs,
    ping_head,
    resolve_cluster_address,
    stored_token_headers,
)
from tramontane.cluster.ray_internals.local_node import (
    assume_dashboard_packages,
    find_dead_daemon,
    keep_daemons_from_signals,
    keep_loopback_address,
    patient_start,
)
from tramontane.cluster.ray_internals.table import JOIN_SYMBOLS, RAY_SYMBOLS, assert_supported
from tramontane.proto.errors import ConfigError, PipelineError
from tramontane.proto.units import format_bytes

CONNECT_TIMEOUT_S = 5.0
DAEMON_POLL_S = 0.5
# of a local cluster: a few micro-batches of hidden states; Ray refuses less than the minimum
OBJECT_STORE_BYTES, MIN_STORE_BYTES = 512 * 2**20, 75 * 2**20
SHARED_MEMORY = Path("/dev/shm")
ADVICE_IF_REQUIRED = "give the host:port of a cluster's head node"
logger = logging.getLogger(__name__)
ADVICE = f"{ADVICE_IF_REQUIRED}, or leave --address out to start Ray on this machine"


@contextmanager
def local_ray_cluster(
    num_cpus: int, dashboard: bool = False, inline_hidden_states_below: int | None = None
) -> Iterator[str]:
    """Run a Ray cluster on this machine while the block runs; ``num_cpus`` may exceed the machine's
    cores.

    ``inline_hidden_states_below``: size in bytes from which results are put into the object store,
    if it differs from ``RAY_SETTINGS``. Yields the address of Ray's dashboard, host:port, which is
    empty without ``dashboard``. Raises PipelineError if Ray cannot be started.
    """
    assert_supported(RAY_SYMBOLS)
    # Ray requires a token in clusters that ray.init starts, and would store one in the user's home.
    # This token is discarded with the cluster. A user who sets RAY_AUTH_MODE has decided otherwise.
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    for name, value in SERVE_SETTINGS.items():
        os.environ.setdefault(name, value)  # inherited by every process that Ray starts
    try:
        with (
            _starting_ray("stopping the local Ray cluster"),
            marking_started(),
            keep_loopback_address(),
            keep_daemons_from_signals(),
            assume_dashboard_packages(),
            patient_start(dashboard),
        ):
            context = ray.init(
                address="local",
                num_cpus=num_cpus,
                resources={CORES_RESOURCE: usable_cpus()},
                include_dashboard=dashboard,
                dashboard_host="127.0.0.1",
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=_object_store_bytes(),
                _node_ip_address="127.0.0.1",
                _system_config=dict(ONE_MACHINE_SETTINGS)
                | (
                    {INLINE_LIMIT: inline_hidden_states_below} if inline_hidden_states_below else {}
                ),
            )
    except Exception as error:  # Ray raises a bare one in places
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise PipelineError(f"Ray could not be started: {reason}") from error
    with mute_worker_logs():
        try:
            yield context.dashboard_url or ""
        finally:
            ray.shutdown()


def _object_store_bytes() -> int:
    """Return the size of the object store, which is smaller where there is little shared memory;
    that is logged, as Ray's own warning is not shown.

    With 64 MiB free it is no smaller, but a file below Ray's temporary folder.
    """
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:  # Ray says what it lacks
        return OBJECT_STORE_BYTES
    if free >= OBJECT_STORE_BYTES:
        return OBJECT_STORE_BYTES
    fits = free >= MIN_STORE_BYTES
    logger.warning(
        "%s has %s free, and Ray's object store for hidden states of 1 MiB and more wants %s: it"
        " %s; give a container more by docker's --shm-size 1g, a pod by an emptyDir of medium"
        " Memory",
        *(SHARED_MEMORY, format_bytes(free), format_bytes(OBJECT_STORE_BYTES)),
        "takes what is free" if fits else "is a file in the temporary folder, which may be slow",
    )
    return free if fits else OBJECT_STORE_BYTES


@contextmanager
def ended_with_ray() -> Iterator[None]:
    """End this process, with status 1, and all that it has started, as soon as a daemon of its own
    cluster has died while the block runs.

    Ray's calls would wait for a dead daemon without a limit, also those of a clean-up.
    """

    def check() -> None:
        if daemon := find_dead_daemon():
            logger.error(
                "Ray's %s has died, and nothing can be answered without it: tramontane ends, with"
                " all that it has started; start it again",
                daemon,
            )
            end_at_once(1)

    with run_periodically(DAEMON_POLL_S, check):
        yield


@contextmanager
def join_ray_cluster(
    address: str, compare_gpus: bool = True, required: bool = False
) -> Iterator[Hardware]:
    """Connect to a running cluster while the block runs, and yield its hardware.

    ``compare_gpus``: see ``probe_cluster``. ``required``: the command cannot start Ray itself,
    which changes the advice in errors. Raises ConfigError if the cluster cannot be joined.
    """
    assert_supported(RAY_SYMBOLS, JOIN_SYMBOLS)
    check_ray_address(address, ADVICE_IF_REQUIRED if required else ADVICE)
    try:
        with _starting_ray("leaving the Ray cluster"):
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        raise ConfigError(
            f"the Ray cluster at --address {address} cannot be joined:"
            f" {str(error).splitlines()[0]}; this machine must be one of its nodes, with the same"
            " Python and Ray"
        ) from error
    with mute_worker_logs():
        try:
            yield probe_cluster(compare_gpus)
        finally:
            ray.shutdown()


@contextmanager
def _starting_ray(if_interrupted: str) -> Iterator[None]:
    """Defer signals while Ray starts, which blocks for seconds, and keep Ray and its library from
    handling SIGTERM.

    Python crashes at its exit if Ray is left half started.
    """
    try:
        with (
            keep_handler(signal.SIGTERM),
            keep_sigterm_handler(),
            defer_signals(f"Interrupted: {if_interrupted}; Ctrl-C again ends at once."),
        ):
            yield
    except KeyboardInterrupt:
        ray.shutdown()
        raise


def check_ray_address(address: str, advice: str = ADVICE) -> None:
    """Check that a cluster answers at ``auto`` or host:port and accepts this process.

    Ray itself would retry for minutes, and log many lines. ``advice`` ends the messages about a
    missing cluster. Raises ConfigError.
    """
    host, _, port = address.rpartition(":")
    if address != "auto" and ("://" in address or not host or not port.isdigit()):
        raise ConfigError(f"--address is {address!r}; it must be auto or host:port")
    resolved = _resolve_address(address, advice)
    label = address if resolved == address else f"{address} ({resolved})"
    host, _, port = resolved.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"no Ray cluster answers at --address {label}: {error}; {advice}"
        ) from error
    _check_head(resolved, label, _home_token() if address == "auto" else (), advice)


def _resolve_address(address: str, advice: str) -> str:
    """Resolve like Ray: ``auto`` is RAY_ADDRESS or a cluster on this machine; 127.0.0.1 is replaced
    by its external address.
    """
    try:
        resolved = resolve_cluster_address(address)
    except (ConnectionError, ValueError):
        resolved = None
    if resolved is not None:
        return resolved
    if named := os.environ.get("RAY_ADDRESS"):
        raise ConfigError(
            f"--address auto is what RAY_ADDRESS says, {named!r}; it must be host:port"
        )
    raise ConfigError(f"--address is auto, but no Ray cluster runs on this machine; {advice}")


def _check_head(address: str, label: str, token: tuple[tuple[str, str], ...], advice: str) -> None:
    """Check that the process at an address is a living head node, by the same call as Ray's own
    nodes.
    """
    import grpc  # a local cluster does not need it

    with head_channel(address) as channel:
        try:
            ping_head(channel, CONNECT_TIMEOUT_S, token)
        except AuthenticationError as error:  # raised by Ray in this process, not by the cluster
            raise ConfigError(
                "RAY_AUTH_MODE is token, but there is no token; set RAY_AUTH_TOKEN to the cluster's"
            ) from error
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise ConfigError(
                    f"the Ray cluster at --address {label} asks for a token, and got none or"
                    " another; set RAY_AUTH_MODE=token, and unless its token is in"
                    " ~/.ray/auth_token here, RAY_AUTH_TOKEN to that"
                ) from error
            raise ConfigError(
                f"what listens at --address {label} does not answer as a Ray cluster; {advice}"
            ) from error


def _home_token() -> tuple[tuple[str, str], ...]:
    """Return the header of the token in the user's home, or no headers.

    Without RAY_AUTH_MODE, ray.init shows a token that it finds to ``auto``, and to no other
    address.
    """
    return () if "RAY_AUTH_MODE" in os.environ else stored_token_headers()
