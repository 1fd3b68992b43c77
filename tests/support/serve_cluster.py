"""A Tramontane server for tests: the real application on a local Ray cluster, and the resources
that it holds.
"""

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
import ray
from free_ports import free_port
from ray import serve
from ray.serve import context as serve_context
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.serving.app import APPLICATION, application, grpc_options

PORT, GRPC_PORT = free_port(), free_port()
URL = f"http://127.0.0.1:{PORT}"
GRPC = f"127.0.0.1:{GRPC_PORT}"
# whatever the number of pipelines: ``ingress_stats`` asks any replica
ONE_INGRESS = {"ingress_replicas": 1}


@contextmanager
def running_application(
    port: int = PORT, grpc_port: int = GRPC_PORT, **settings: Any
) -> Iterator[None]:
    """Run the application on the connected cluster, with batch jobs in a temporary folder. Ray
    Serve keeps running afterwards.
    """
    start_serve(port, grpc_port)
    with TemporaryDirectory() as folder:
        config = EngineConfig.build(None, jobs_in(folder) | ONE_INGRESS | settings)
        serve.run(application(config), name=APPLICATION, route_prefix="/")
        wait_until_ready(f"http://127.0.0.1:{port}")
        try:
            yield
        finally:
            serve.delete(APPLICATION)


def start_serve(port: int, grpc_port: int) -> None:
    serve.start(
        # no test kills the head node: a client's connection dies with its proxy
        proxy_location="HeadOnly",
        http_options=HTTPOptions(host="127.0.0.1", port=port),
        grpc_options=grpc_options(grpc_port),
        logging_config={"log_level": "WARNING"},
    )


def jobs_in(folder: str) -> dict[str, str]:
    return {"jobs_database": f"sqlite:///{folder}/jobs.sqlite", "jobs_storage": folder}


def deploy(settings: dict[str, Any], num_routers: int = 1, **router_options: Any) -> None:
    """Send to Ray Serve's controller what ``serve deploy`` sends; 0 routers remove the
    application.
    """
    described = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": "tramontane.cluster.serving.app:build",
        "args": ONE_INGRESS | settings,
        "deployments": [{"name": "Router", "num_replicas": num_routers, **router_options}],
    }
    client: Any = _get_global_client()
    client.deploy_apps(
        ServeDeploySchema.model_validate({"applications": [described] if num_routers else []})
    )


def is_rollout_complete(former: list[dict[str, Any]], num_left: int = 4) -> bool:
    """Return True if nothing is left of the version with these routers; one pipeline has 4 actors
    and placement groups.
    """
    application = serve.status().applications[APPLICATION]
    states = {state for each in application.deployments.values() for state in each.replica_states}
    if application.status != "RUNNING" or states != {"RUNNING"} or len(leftovers()) != num_left:
        return False
    return not {stats["pid"] for stats in former} & {
        stats["pid"] for stats in router_stats(stages=False)
    }


def wait_until_ready(url: str = URL) -> None:
    """Wait until ``/health`` is 200. Bounded by pytest's timeout."""
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=10).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)


def router_stats(stages: bool = True) -> list[dict[str, Any]]:
    """Return the statistics of every Router replica. Without ``stages`` this works while stages are
    stopped.
    """
    handle = serve.get_deployment_handle("Router", APPLICATION)
    answers: list[dict[str, Any]] = handle.broadcast("stats", stages).results()
    # requests would not fail
    assert not any(failures := [stats["policy_failure"] for stats in answers]), failures
    return answers


@contextmanager
def stopped_stages(routers: list[dict[str, Any]]) -> Iterator[None]:
    """Stop the processes of these routers' stages for the block (SIGSTOP, then SIGCONT)."""
    stages = [psutil.Process(stage["pid"]) for router in routers for stage in router["stages"]]
    for stage in stages:
        stage.suspend()
    try:
        yield
    finally:
        for stage in stages:
            stage.resume()


def ingress_stats() -> dict[str, Any]:
    handle = serve.get_deployment_handle("Ingress", APPLICATION)
    answer: dict[str, Any] = handle.stats.remote().result()
    return answer


def num_proxy_calls() -> int:
    """Return how many of the proxy's calls to replicas are unfinished (HTTP and gRPC)."""

    # a nested function is pickled by value: the proxy cannot import this file
    def num_calls(_proxy: object) -> int:
        return sum(map(len, serve_context._in_flight_requests.values()))

    (proxy,) = [
        actor
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if "SERVE_PROXY_ACTOR" in actor["name"]
    ]
    handle: Any = ray.get_actor(**proxy)
    found: int = ray.get(handle.__ray_call__.remote(num_calls))
    return found


def processes() -> dict[str, Any]:
    """Return the PIDs of proxy, ingress, routers and stages, with epochs: equal before and after a
    harmless event.
    """
    (listener,) = {
        c.pid
        for c in psutil.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port == PORT
    }
    routers = sorted(
        (s["pid"], s["epoch"], *(stage["pid"] for stage in s["stages"])) for s in router_stats()
    )
    return {"proxy": listener, "ingress": ingress_stats()["pid"], "routers": routers}


def wait_until_idle() -> list[dict[str, Any]]:
    """Wait until no slot, page or request is held; returns the last statistics."""
    while True:
        stats = router_stats()
        if (
            all(s["sequences"] == s["waiting"] == s["pages_held"] == 0 for s in stats)
            and ingress_stats()["requests"] == 0
        ):
            return stats
        time.sleep(0.05)


def complete(**body: Any) -> dict[str, Any]:
    response = httpx.post(f"{URL}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def post_request(
    body: bytes, *headers: bytes, line: bytes = b"POST /v1/completions HTTP/1.1"
) -> bytes:
    """Return a raw request with these headers and a host, and no others."""
    return b"\r\n".join([line, b"Host: ingress", *headers, b"", body])


def content_length(body: bytes) -> bytes:
    return b"Content-Length: %d" % len(body)


def exchange(request: bytes) -> tuple[int, bytes]:
    """Send exactly these bytes; return the answer's status and body."""
    with socket.create_connection(("127.0.0.1", PORT)) as connection:
        connection.sendall(request)
        with HTTPResponse(connection) as response:
            response.begin()
            return response.status, response.read()


def send_and_leave(request: bytes, *, abruptly: bool, having_read: int = 0) -> None:
    """Send these bytes, read the beginning of the answer and disconnect; ``abruptly`` with a
    reset.
    """
    with socket.create_connection(("127.0.0.1", PORT)) as connection:
        connection.sendall(request)
        while having_read > 0:
            having_read -= len(connection.recv(having_read))
        if abruptly:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def events(text: str) -> list[dict[str, Any]]:
    """Return the server-sent events of a complete stream, without the final ``[DONE]``."""
    lines = [line for line in text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def listening(process: psutil.Process) -> set[tuple[str, str]]:
    """Return (process name, address) of all listening sockets of this process and its
    descendants.
    """
    found = set()
    for each in [process, *process.children(recursive=True)]:
        try:
            found |= {
                (each.name(), c.laddr.ip)
                for c in each.net_connections("inet")
                if c.status == psutil.CONN_LISTEN
            }
        except psutil.NoSuchProcess:
            continue
    return found


def started_with(home: str | Path) -> list[psutil.Process]:
    """Processes that inherited this home."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOME") == str(home):
                found.append(process)
        except psutil.Error:
            continue
    return found


def leftovers(prefix: str = APPLICATION) -> list[str]:
    """Return the names of pipelines' named actors and of placement groups that are not removed."""
    actors = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True)]
    groups = [
        g["name"] for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"
    ]
    return [name for name in actors + groups if name.startswith(f"{prefix}-")]
