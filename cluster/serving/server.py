"""``tramontane serve``: start the application in a cluster, report that it is ready, and remove it
at the end.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions

from tramontane.cluster.actors.pipeline_spec import STAGE_SUFFIX, SUPERVISOR_SUFFIX
from tramontane.cluster.actors.supervisor_client import send_heartbeats
from tramontane.cluster.actors.worker_actor import actor_names
from tramontane.cluster.common.process_age import process_age_s
from tramontane.cluster.common.ray_api import ray_error_message
from tramontane.cluster.common.signals import SignalCounter, undone_at_end
from tramontane.cluster.config.api_keys import ApiKeys
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.ray_settings import (
    CORE_DASHBOARD_TITLE,
    CORE_DASHBOARD_UID,
    GRAFANA,
    PROMETHEUS,
)
from tramontane.cluster.observability.tracing import tracing_config
from tramontane.cluster.pipeline.engine import joined_pipeline_spec, pipeline_spec, validate_model
from tramontane.cluster.pipeline.lifecycle import shut_down_pipeline
from tramontane.cluster.pipeline.load_progress import ShowLoading, report_losses, show_progress
from tramontane.cluster.pipeline.ray_cluster import (
    ended_with_ray,
    join_ray_cluster,
    local_ray_cluster,
)
from tramontane.cluster.planning.hardware import Hardware, check_ray_gpus, probe_local
from tramontane.cluster.planning.ingresses import choose_num_ingresses, describe_ingresses
from tramontane.cluster.ray_internals.accessors import is_ha_proxy_enabled
from tramontane.cluster.ray_internals.table import RAY_SYMBOLS, SERVE_SYMBOLS, assert_supported
from tramontane.cluster.serve_patches.proxy import LOOPBACK, format_host
from tramontane.cluster.serving.app import APPLICATION, application, grpc_options
from tramontane.cluster.serving.batch_replica import HOME_FOLDER
from tramontane.cluster.serving.draining import (
    StopLimit,
    drain_time_s,
    shut_down_serve,
    stop,
)
from tramontane.cluster.serving.preflight import (
    check_job_storage,
    check_memory,
    check_ports,
    check_resources,
    check_running_serve,
)
from tramontane.proto import errors
from tramontane.proto.errors import ConfigError, PipelineError
from tramontane.proto.plan import PipelinePlan

# Ray's dashboard on the cluster that ``serve`` starts: its token, and whether it can show the
# stages of the pipelines.

TIMEOUT_S = 3.0
PROMETHEUS_HOST, GRAFANA_HOST, UID = (
    "RAY_PROMETHEUS_HOST",
    "RAY_GRAFANA_HOST",
    "RAY_GRAFANA_DEFAULT_DASHBOARD_UID",
)


def let_dashboard_show_stages() -> str:
    """Have Ray's dashboard, which inherits this environment, embed our panels, or return why it
    cannot.
    """
    prometheus, grafana = (
        os.environ.get(PROMETHEUS_HOST, PROMETHEUS),
        os.environ.get(GRAFANA_HOST, GRAFANA),
    )
    problem = _missing_panels(prometheus.rstrip("/"), grafana.rstrip("/"))
    if not problem:
        # an empty variable counts as unset
        uid = os.environ[UID] = os.environ.get(UID) or CORE_DASHBOARD_UID
        problem = (
            "" if uid == CORE_DASHBOARD_UID else f"{UID} names another dashboard, {uid!r}; unset it"
        )
    return problem


def _missing_panels(prometheus: str, grafana: str) -> str:
    missing = []
    if _get(f"{prometheus}/api/v1/query?query=vector(1)") is None:
        missing.append(f"no Prometheus answers at {prometheus} ({PROMETHEUS_HOST})")
    if _get(f"{grafana}/api/health") is None:
        missing.append(f"no Grafana answers at {grafana} ({GRAFANA_HOST})")
    else:
        found = _get(f"{grafana}/api/dashboards/uid/{CORE_DASHBOARD_UID}")
        if found is None:
            missing.append(
                f"Grafana at {grafana} has no dashboard with the UID {CORE_DASHBOARD_UID} for"
                " anonymous users"
            )
        elif (title := _title(found)) != CORE_DASHBOARD_TITLE:
            missing.append(
                f"another dashboard of Grafana at {grafana} has the UID {CORE_DASHBOARD_UID}:"
                f" {title!r}"
            )
    return "; ".join(missing)


def _get(url: str) -> Any:  # JSON
    """Return the JSON of an answer with status 200, or None."""
    try:
        response = httpx.get(url, timeout=TIMEOUT_S, trust_env=False)
        return response.json() if response.status_code == 200 else None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None


def _title(answer: Any) -> str:  # JSON
    try:
        return str(answer["dashboard"]["title"])
    except (KeyError, TypeError):
        return ""


@contextmanager
def token_file(port: int) -> Iterator[str]:
    """Keep the token of Ray's dashboard in a file of the user's while the block runs, and yield the
    file's path.

    Yields "" if the cluster needs no token. ``port``: the HTTP port, which no other server of this
    machine has.
    """
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    if not token or os.environ.get("RAY_AUTH_MODE", "token") != "token":
        yield ""
        return
    path = Path.home() / HOME_FOLDER / f"ray-token-{port}"
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.unlink(missing_ok=True)
        with open(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
        ) as file:
            file.write(token)
    except OSError as error:
        raise ConfigError(
            f"--dashboard: the token for it cannot be written to {path}: {error.strerror}"
        ) from error
    with undone_at_end(lambda: path.unlink(missing_ok=True)):
        yield str(path)


Report = Callable[[str], None]

READY_POLL_INTERVAL_S = 0.1
READY_TIMEOUT_S = 60.0
# wildcard addresses, and the loopback addresses to connect to instead
ALL_INTERFACES = {"0.0.0.0": "127.0.0.1", "::": "::1"}
# names of our pipelines only: see ``adopt_or_create_pipeline``
OUR_PIPELINES = rf"{APPLICATION}-[0-9a-f]{{8}}-\d+"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyInfo:
    """An application that is ready. Seconds count from the start of the process."""

    url: str
    grpc: str | None  # host:port
    config: EngineConfig
    num_stages: int
    ready_after_s: float
    dashboard: str = ""  # Ray's, host:port

    def to_line(self) -> str:
        """Return the line that announces it, as JSON if configured."""
        if self.config.json_output:
            fields = {
                "url": self.url,
                "base_url": f"{self.url}/v1",
                "grpc": self.grpc,
                "model": self.config.model_name,
            }
            fields["ui"] = f"{self.url}/ui"
            fields |= {"dashboard": f"http://{self.dashboard}"} if self.dashboard else {}
            numbers = {
                "replicas": self.config.replicas,
                "max_replicas": self.config.max_pipelines,
                "stages": self.num_stages,
                "ready_after_s": round(self.ready_after_s, 3),
            }
            return json.dumps(fields | numbers)
        low, high = self.config.replicas, self.config.max_pipelines
        pipelines = (
            f"{low} to {high} pipelines" if high > low else f"{low} pipeline{'s' * (low != 1)}"
        )
        stages = f"{self.num_stages} stage{'s' * (self.num_stages != 1)}"
        interfaces = (
            f", on all interfaces ({self.config.host})"
            if self.config.host in ALL_INTERFACES
            else ""
        )
        dashboard = f", Ray's dashboard is http://{self.dashboard}" if self.dashboard else ""
        return (
            f"ready after {self.ready_after_s:.1f} s: {self.url}/v1 serves {self.config.model_name}"
            f" on {pipelines} of {stages}{f', gRPC at {self.grpc}' * bool(self.grpc)}{interfaces};"
            f" {self.url}/ui shows it at work{dashboard}, Ctrl-C stops it"
        )


def run_server(
    config: EngineConfig,
    report: Report,
    show_loading: ShowLoading,
    announce: Callable[[ReadyInfo], None],
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; then finish running requests, and remove everything
    that was started.

    Raises UserError before anything is started if something cannot work.
    """
    if config.local:
        raise ConfigError(
            "serve always runs on a Ray cluster, so --local cannot be used with it; leave that out,"
            " or use generate, chat or bench, which can run in one process"
        )
    config.logs.to_stderr_with_serve("command")
    if config.log_format == "json":
        report, show_loading = _log_progress, lambda _: None
    assert_supported(RAY_SYMBOLS, SERVE_SYMBOLS)
    # raises ConfigError before anything starts
    tracing_config(config.tracing_exporter, config.tracing_sampling_ratio)
    if is_ha_proxy_enabled() and config.host in LOOPBACK:
        raise ConfigError(
            f"--host {config.host} cannot be kept in Ray Serve's HAProxy mode, which opens ports on"
            " all interfaces; unset RAY_SERVE_ENABLE_HA_PROXY, or give another --host"
        )
    ApiKeys(config.api_key, config.api_key_file)  # raises ConfigError before anything starts
    check_job_storage(config)
    cluster = _own_cluster if config.address is None else _joined_cluster
    drain_s = drain_time_s(config.drain_timeout)
    with (
        StopLimit(config.address) as limit,
        cluster(config, report, show_loading, limit) as (has_grpc, dashboard),
    ):
        host = format_host(ALL_INTERFACES.get(config.host, config.host))
        url = f"http://{host}:{config.port}"
        _wait_until_healthy(url)
        grpc = f"{host}:{config.grpc_port}" if has_grpc else None
        num_stages = len(actor_names(rf"{OUR_PIPELINES}{STAGE_SUFFIX}\d+")) // config.replicas
        ready = ReadyInfo(url, grpc, config, num_stages, process_age_s(), dashboard)
        with SignalCounter() as signals:
            with report_losses(OUR_PIPELINES, logger.warning):
                announce(ready)
                signals.wait_next()
                limit.begin(drain_s)  # before the block's end, which waits for an answer of Ray
            stop(drain_s, report, signals.wait_next)


def _log_progress(message: str) -> None:
    """Log a step of the startup at any log level: it shows what the command waits for."""
    progress = logging.getLogger(f"{__name__}.progress")
    progress.setLevel(logging.INFO)
    progress.info(message)


@contextmanager
def _own_cluster(
    config: EngineConfig, report: Report, show_loading: ShowLoading, limit: StopLimit
) -> Iterator[tuple[bool, str]]:
    """Serve in our own cluster, which always ends with this process.

    Yields whether gRPC is enabled, and the address of Ray's dashboard, if requested.
    """
    check_ports(config, report)
    report("checking the checkpoint")
    hardware = probe_local()
    # raises PlanError before Ray is started
    spec = pipeline_spec(config, validate_model(config), hardware)
    check_memory(spec, config.replicas)
    problem = let_dashboard_show_stages() if config.dashboard else ""
    report("starting Ray")
    num_cpus = config.max_pipelines * spec.num_workers * spec.threads_per_stage
    with (
        local_ray_cluster(
            num_cpus, config.dashboard, config.inline_hidden_states_below
        ) as dashboard,
        _announced(dashboard, problem, config.port, report),
        ended_with_ray(),
    ):
        check_ray_gpus(hardware)
        report("starting Ray Serve")
        _start_serve(config)
        config = _with_choices(config, spec.plan, hardware, report)
        report(
            f"loading {spec.describe_workers(config.replicas)},"
            f" {spec.plan.describe_memory(config.replicas)}"
        )
        with _remove_at_end(report, lambda: shut_down_serve(limit), limit):
            with show_progress(OUR_PIPELINES, spec.plan, show_loading, config.replicas):
                _run(config, launched=False, owns_serve=False)
            yield config.grpc_port > 0, dashboard


@contextmanager
def _announced(dashboard: str, problem: str, port: int, report: Report) -> Iterator[None]:
    """Report the address of Ray's dashboard, if there is one, and its missing features."""
    if not dashboard:
        yield
        return
    with token_file(port) as token:
        asks = f", with the token in {token}" if token else ""
        shows = (
            f"does not show the stages: {problem}; see tramontane monitoring --help"
            if problem
            else "shows the stages"
        )
        report(f"Ray's dashboard is at http://{dashboard}{asks}; its Metrics page {shows}")
        yield


@contextmanager
def _joined_cluster(
    config: EngineConfig, report: Report, show_loading: ShowLoading, limit: StopLimit
) -> Iterator[tuple[bool, str]]:
    """Serve on a cluster that stays. Yields whether there is gRPC, without which Ray Serve may have
    been started, and "".
    """
    report(f"joining Ray at {config.address}")
    assert config.address is not None
    with join_ray_cluster(config.address, compare_gpus=config.gpu_speed is None) as hardware:
        spec = joined_pipeline_spec(config, validate_model(config), hardware)
        owns_serve = not serve.status().proxies
        if APPLICATION in serve.status().applications:
            raise ConfigError(
                f"an application named {APPLICATION} is on this cluster already; end the command"
                " that serves it, or remove it with: python -c 'from ray import serve;"
                f' serve.delete("{APPLICATION}")\''
            )
        if owns_serve:
            check_ports(config, report)
        check_resources(spec, config.replicas, report)
        has_grpc = config.grpc_port > 0 if owns_serve else check_running_serve(config, report)
        with _remove_at_end(report, lambda: _remove(owns_serve), limit):
            if owns_serve:
                report("starting Ray Serve")
                _start_serve(config)
            config = _with_choices(config, spec.plan, hardware, report)
            report(
                f"loading {spec.describe_workers(config.replicas)},"
                f" {spec.plan.describe_memory(config.replicas)}"
            )
            with send_heartbeats(_supervisors):
                with show_progress(OUR_PIPELINES, spec.plan, show_loading, config.replicas):
                    _run(config, launched=True, owns_serve=owns_serve)
                yield has_grpc, ""


def _with_choices(
    config: EngineConfig, plan: PipelinePlan, hardware: Hardware, report: Report
) -> EngineConfig:
    """Report the planner's choices; return the configuration with the number of ingress
    replicas.
    """
    for choice in plan.chosen:
        report(choice.describe())
    num_ingresses = choose_num_ingresses(config, plan, hardware)
    if num_ingresses == config.num_ingresses:
        return config
    report(describe_ingresses(config, plan, num_ingresses))
    return config.model_copy(update={"ingress_replicas": num_ingresses})


@contextmanager
def _remove_at_end(report: Report, remove: Callable[[], None], limit: StopLimit) -> Iterator[None]:
    """Run ``remove`` at the end. It takes seconds, and a second Ctrl-C must not interrupt it."""
    try:
        yield
    finally:
        limit.begin()  # it has begun if a signal has ended the block
        with SignalCounter():
            report("stopping")
            remove()


def _start_serve(config: EngineConfig) -> None:
    options = HTTPOptions(host=config.host, port=config.port)
    try:
        serve.start(
            proxy_location="EveryNode",
            http_options=options,
            grpc_options=grpc_options(config.grpc_port),
            tracing_config=tracing_config(config.tracing_exporter, config.tracing_sampling_ratio),
            # its lines only name requests
            logging_config=config.logs.for_ray_serve() | {"enable_access_log": True},
        )
    except (RuntimeError, TimeoutError, RayError) as error:  # on another node, perhaps
        raise ConfigError(
            f"Ray Serve cannot listen at --host {config.host} --port {config.port} --grpc-port"
            f" {config.grpc_port}: {ray_error_message(error)}; choose others"
        ) from error


def _run(config: EngineConfig, launched: bool, owns_serve: bool) -> None:
    try:
        app = application(
            config, launched, owns_serve, grpc_on_loopback_only=config.host in LOOPBACK
        )
        serve.run(app, name=APPLICATION, route_prefix="/")
    except (RuntimeError, RayError) as error:
        raise _deployment_error() or PipelineError(
            f"Ray Serve refused the application: {error}"
        ) from error


def _deployment_error() -> Exception | None:
    """Find why the deployment failed: the last of our own errors in the traceback that Ray Serve
    has as text.
    """
    status = serve.status().applications.get(APPLICATION)
    text = (
        "\n".join(deployment.message for deployment in status.deployments.values())
        if status
        else ""
    )
    found = re.findall(r"tramontane\.proto\.errors\.(\w+): (.*)", text)
    return getattr(errors, found[-1][0])(found[-1][1].strip()) if found else None


def _wait_until_healthy(url: str) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError, ValueError):
            if httpx.get(f"{url}/health", timeout=10, trust_env=False).json() == {
                "status": "ready"
            }:
                return
        time.sleep(READY_POLL_INTERVAL_S)
    raise PipelineError(f"the application is deployed, but nothing answers at {url}/health")


def _remove(owns_serve: bool) -> None:
    """Remove the application. Replicas remove their pipelines when they stop; pipelines of dead
    replicas are removed here.
    """
    # Ray Serve may exceed its own timeout, which does not affect the next steps
    with suppress(Exception):
        serve.delete(APPLICATION)
    for name in _supervisors():
        shut_down_pipeline(name.removesuffix(SUPERVISOR_SUFFIX))
    if owns_serve and not serve.status().applications:
        serve.shutdown()  # type: ignore[no-untyped-call]


def _supervisors() -> list[str]:
    return actor_names(OUR_PIPELINES + SUPERVISOR_SUFFIX)
