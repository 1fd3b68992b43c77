"""``tramontane serve`` as a user runs it: the ready line, the ports, and that nothing stays
behind.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
from free_ports import free_port
from harness import GREEDY, run_in_process
from nodes import three_nodes
from ray.cluster_utils import Cluster
from serve_cluster import leftovers, listening, started_with
from tiny_models import tiny_plan

from tramontane.client import Client
from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.proto.errors import AuthenticationError, ConnectionLostError
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.presets import PRESETS, tiny_variant
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights.config_writer import to_hf_config

pytestmark = [
    pytest.mark.ray,
    pytest.mark.serve,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]

COMMAND = [str(Path(sys.executable).parent / "tramontane"), "serve"]


def _environment(home: Path, **more: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return clean | {"HOME": str(home)} | more


def _restore_signals() -> None:
    """A test run in the background of a shell would pass on that it ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def _server(
    environment: dict[str, str], *arguments: str
) -> Iterator[tuple["subprocess.Popen[str]", dict[str, Any]]]:
    """A server that is ready, and what its ready line says."""
    how: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "preexec_fn": _restore_signals,
    }
    command = [*COMMAND, "--json", "--grpc-port", str(free_port()), *arguments]
    with subprocess.Popen(command, env=environment, process_group=0, **how) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            yield process, json.loads(line)
        finally:
            if process.poll() is None:
                process.kill()


def _run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def _complete(url: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(
        f"{url}/v1/completions", json={"max_tokens": 6, "temperature": 0, **body}, timeout=120
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_it_finishes_what_runs_and_a_second_signal_ends_it(tmp_path: Path) -> None:
    """One stream ends within the time that it gets; the other one gets the reason why it does
    not.
    """
    body = {"prompt": "ROMEO:", "temperature": 0, "ignore_eos": True, "stream": True}
    port = free_port()
    with _server(_environment(tmp_path), "--port", str(port), "--drain-timeout", "600") as (
        process,
        ready,
    ):
        completions = f"{ready['url']}/v1/completions"
        with (
            httpx.stream(
                "POST", completions, json=body | {"max_tokens": 600}, timeout=120
            ) as short,
            httpx.stream(
                "POST", completions, json=body | {"max_tokens": 2000}, timeout=120
            ) as long,
        ):
            short_lines, long_lines = short.iter_lines(), long.iter_lines()
            for lines in (short_lines, long_lines):  # after comments, where a token takes long
                assert next(line for line in lines if line.startswith("data: {"))
            # to all processes of the group, as timeout and systemd do
            os.killpg(process.pid, signal.SIGTERM)
            while (health := httpx.get(f"{ready['url']}/health", timeout=60)).status_code == 200:
                time.sleep(0.01)
            assert health.json()["error"]["code"] == "draining"
            refused = httpx.post(completions, json={"prompt": "x"}, timeout=60)
            assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
            assert [line for line in short_lines if line][-1] == "data: [DONE]"
            process.send_signal(signal.SIGTERM)
            assert (
                "has stopped before this request ended" in [line for line in long_lines if line][-1]
            )
        assert process.wait(timeout=120) == 0
        assert process.stderr is not None
        assert re.search(
            r"finishing 2 requests.*ending [12] request", process.stderr.read(), re.DOTALL
        )  # one may just have ended


def test_it_listens_on_loopback_only_and_killed_outright_it_leaves_no_process(
    tmp_path: Path,
) -> None:
    port = free_port()
    with _server(_environment(tmp_path), "--port", str(port), "--link", "direct") as (
        process,
        ready,
    ):
        assert ready["url"] == f"http://127.0.0.1:{port}"
        assert (ready["model"], ready["stages"], ready["replicas"]) == ("demo", 2, 1)
        assert _complete(ready["url"], prompt="ROMEO:")["usage"]["completion_tokens"] == 6
        with Client(ready["grpc"]) as client:
            assert [model.name for model in client.models()] == ["demo"]
        sockets = listening(psutil.Process(process.pid))
        assert len(sockets) > 5, "the stages, the replicas and Ray itself"
        outside = {
            (name, ip) for name, ip in sockets if ip not in ("127.0.0.1", "::ffff:127.0.0.1", "::1")
        }
        assert outside == set()
        taken = _run(_environment(tmp_path), "--port", str(port))
        assert taken.returncode == 2
        assert taken.stderr.splitlines() == [
            f"error: --port {port} is in use by Tramontane {version('tramontane')}, which serves"
            f" demo (process {process.pid}, tramontane serve); choose another --port, or stop that"
            " first"
        ], "before anything is loaded"
        process.kill()
        process.wait()
    while started_with(tmp_path):
        time.sleep(0.1)


def test_it_ends_with_its_raylet_and_leaves_no_process(tmp_path: Path) -> None:
    """All that it could do is wait, and a supervisor that starts it again would not know."""
    with _server(_environment(tmp_path), "--port", str(free_port()), "--stages", "1") as (
        process,
        _,
    ):
        for child in psutil.Process(process.pid).children():
            if child.name() == "raylet":
                child.kill()
        assert process.wait(timeout=60) == 1
        assert process.stderr is not None
        *_, last = process.stderr.read().splitlines()
        assert re.search(r"Ray's raylet \(process \d+, signal 9\) has died.* start it again$", last)
    while started_with(tmp_path):
        time.sleep(0.1)


def test_the_mode_that_opens_ports_on_all_interfaces_is_refused_with_a_loopback_host(
    tmp_path: Path,
) -> None:
    """In one line, as all mistakes (see ``test_cli_errors.py``): here those of a process of its
    own.
    """
    run = _run(_environment(tmp_path, RAY_SERVE_ENABLE_HA_PROXY="1"))
    assert (run.returncode, run.stdout) == (2, "")
    *_, last = run.stderr.splitlines()
    assert last.startswith("error: --host 127.0.0.1 cannot be kept in Ray Serve's HAProxy mode")


@pytest.mark.parametrize("module", ["typer", "ray"])
def test_ctrl_c_while_it_is_being_imported_is_one_line(module: str) -> None:
    """The import hangs until the signal is there: that of the command line, and that of what one
    command needs.
    """
    code = (
        "import os, signal, sys\n"
        "class Slow:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == '{module}': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "from tramontane.cluster.cli.__main__ import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", code, "generate", "The"]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=_restore_signals
    )
    assert (run.returncode, run.stdout, run.stderr) == (130, "", "error: interrupted\n")


# ---- a cluster that was there before


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with three_nodes() as nodes:
        yield nodes


def _joined(cluster: Cluster, home: Path) -> dict[str, str]:
    return _environment(home, RAY_AUTH_MODE="disabled", RAY_ADDRESS=cluster.address)


def _ray_actors() -> list[str]:
    return [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]


def test_three_stages_on_three_nodes_over_http(cluster: Cluster, tmp_path: Path) -> None:
    options = [
        "--address",
        cluster.address,
        "--port",
        str(free_port()),
        "--stages",
        "3",
        "--dtype",
        "float32",
    ]
    with _server(_joined(cluster, tmp_path), *options) as (process, ready):
        assert ready["stages"] == 3
        nodes = set()
        for name in leftovers():
            if "-stage-" in name:
                stage = ray.get_actor(name, "tramontane")
                nodes.add(ray.get(stage.health.remote()).node_id)
        assert len(nodes) == 3
        prompt = "KING: what news from Rome"
        assert _complete(ready["url"], prompt=prompt, max_tokens=30)["choices"][0][
            "text"
        ] == _locally(prompt, 30)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0
    while leftovers() or _ray_actors():
        time.sleep(0.1)


def _locally(prompt: str, num_tokens: int) -> str:
    command = [
        COMMAND[0],
        "generate",
        "--local",
        "--json",
        "--dtype",
        "float32",
        "--temperature",
        "0",
    ]
    run = subprocess.run(
        [*command, "--max-tokens", str(num_tokens), prompt],
        capture_output=True,
        text=True,
        check=True,
    )
    text: str = json.loads(run.stdout)["completions"][0]["text"]
    return text


def _router_stats(cluster: Cluster, home: Path) -> list[dict[str, Any]]:
    """Queried by a process of its own: Ray Serve's handles in this one may remember another
    cluster's.
    """
    code = (
        f"import json, ray\nfrom ray import serve\nray.init(address={cluster.address!r},"
        " log_to_driver=False)\nprint(json.dumps(serve.get_deployment_handle('Router',"
        " 'tramontane').broadcast('stats').results()))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=_joined(cluster, home),
        capture_output=True,
        text=True,
        check=True,
    )
    stats: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return stats


def _only_from_here(port: str) -> None:
    """This cluster's Ray Serve opens its gRPC port on all interfaces, whatever --host is, unless
    its proxies were patched.
    """
    with Client(f"127.0.0.1:{port}") as client:
        assert [model.name for model in client.models()] == ["demo"]
    addresses = [
        each.address for all_of_one in psutil.net_if_addrs().values() for each in all_of_one
    ]
    for address in addresses:
        if address.count(".") == 3 and not address.startswith("127."):
            refusal = pytest.raises(
                (AuthenticationError, ConnectionLostError),
                match=r"its --host says so|Connection refused",
            )
            with Client(f"{address}:{port}") as client, refusal:
                client.models()


def test_two_replicas_share_the_requests_and_when_the_command_is_killed_everything_goes(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Two pipelines. The supervisor of one misses the command, and ends the application, Ray Serve,
    the pipelines and itself.
    """
    options = [
        "--address",
        cluster.address,
        "--port",
        str(free_port()),
        "--stages",
        "1",
        "--replicas",
        "2",
    ]
    with _server(_joined(cluster, tmp_path), *options) as (process, ready):
        assert (ready["replicas"], ready["stages"]) == (2, 1)
        assert len(leftovers()) == 2 * 3, "of each: a supervisor, a stage, a placement group"
        _only_from_here(ready["grpc"].rpartition(":")[2])
        before = _router_stats(cluster, tmp_path)
        assert (
            len({stats["pipeline"] for stats in before})
            == len({stats["stages"][0]["pid"] for stats in before})
            == 2
        )
        with ThreadPoolExecutor(8) as clients:
            body = {"prompt": "ROMEO:", "max_tokens": 20, "ignore_eos": True}
            answers = [clients.submit(_complete, ready["url"], **body) for _ in range(24)]
        assert {answer.result()["usage"]["completion_tokens"] for answer in answers} == {20}
        steps = {stats["pipeline"]: stats["steps"] for stats in _router_stats(cluster, tmp_path)}
        assert all(steps[stats["pipeline"]] - stats["steps"] >= 20 for stats in before), (
            "both have worked"
        )
        process.kill()
        process.wait()
        assert _complete(ready["url"], prompt="O")["usage"]["completion_tokens"] == 6, (
            "it is not missed at once"
        )
    while leftovers() or _ray_actors():
        time.sleep(0.1)


@pytest.mark.nightly
def test_random_weights_are_served_from_a_configuration_alone(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Without a tokenizer: token ids in, token ids out, and those of the same stages in this
    process.
    """
    args = tiny_variant(PRESETS["mixtral-8x7b"])
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(args)))
    options = [
        "--model",
        str(tmp_path),
        "--load-format",
        "dummy",
        "--dtype",
        "float32",
        "--stages",
        "2",
    ]
    with _server(
        _joined(cluster, tmp_path),
        "--address",
        cluster.address,
        "--port",
        str(free_port()),
        *options,
    ) as (
        process,
        ready,
    ):
        prompt = [1, 5, 9, 200]
        plan = tiny_plan(args, 2)
        expected = run_in_process(
            plan, [StageWorker.load(stage, RandomWeights()) for stage in plan.stages], [prompt]
        )
        answer = _complete(
            ready["url"],
            prompt=prompt,
            max_tokens=GREEDY.max_tokens,
            return_token_ids=True,
            ignore_eos=True,
        )
        assert [choice["token_ids"] for choice in answer["choices"]] == expected
        for stats in _router_stats(cluster, tmp_path):
            assert [stage["bytes_read"] for stage in stats["stages"]] == [0, 0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0
    while leftovers() or _ray_actors():
        time.sleep(0.1)


def test_more_pipelines_than_there_is_room_for_are_refused_with_the_numbers(
    cluster: Cluster, tmp_path: Path
) -> None:
    options = [
        "--address",
        cluster.address,
        "--port",
        str(free_port()),
        "--stages",
        "2",
        "--replicas",
        "50",
    ]
    run = _run(_joined(cluster, tmp_path), *options)
    assert run.returncode == 2
    assert (
        "error: the cluster is too small for 100 stages (100 x {CPU: 1}): it has "
        in run.stderr.splitlines()[-1]
    )
    assert not leftovers()


@pytest.mark.nightly
def test_a_node_whose_weights_differ_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """All nodes of this cluster share one disk, so the folder changes after the plan was made: as
    on a node with another one.
    """
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    ports = ["--port", str(free_port()), "--grpc-port", "0"]
    options = ["--address", cluster.address, *ports, "--stages", "2", "--model", str(model)]
    environment = _joined(cluster, tmp_path)
    with subprocess.Popen(
        [*COMMAND, *options], env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        while not any(name.endswith("-supervisor") for name in leftovers()):
            time.sleep(0.02)
        with (model / "model.safetensors").open("r+b") as file:
            file.seek(-9, os.SEEK_END)
            file.write(b"different")
        assert process.stderr is not None
        last = process.stderr.read().splitlines()[-1]
        assert process.wait() == 2
    node = ray.nodes()[0]["NodeManagerAddress"]
    assert last.startswith(f"error: the stages could not be started: on node {node} (")
    assert "model.safetensors differs from the same file on other nodes" in last
    while leftovers():
        time.sleep(0.1)
