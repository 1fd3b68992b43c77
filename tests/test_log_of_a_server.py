"""A server's log as JSON, and its spans: by what a client calls its request it is found in ingress,
router and stages.
"""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from free_ports import free_port
from serve_cluster import started_with

pytestmark = [
    pytest.mark.ray,
    pytest.mark.serve,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]

COMMAND = [
    sys.executable,
    "-c",
    "from tramontane.cluster.cli.__main__ import main; main()",
    "serve",
]
FLAGS = [
    "--link",
    "direct",
    "--log-format",
    "json",
    "--log-level",
    "info",
    "--json",
    "--tracing-exporter",
    "file",
]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"  # a client's own
ROUTER_LOGS = "serve/replica_tramontane_Router_*.log"


@contextmanager
def _serving(folder: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A server whose Ray writes into this folder, and its URL."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment = clean | {"HOME": folder, "RAY_TMPDIR": folder}
    ports = ["--port", str(free_port()), "--grpc-port", str(free_port())]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*COMMAND, *FLAGS, *ports], env=environment, **pipes) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())["url"]
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.communicate()


def _lines(folder: str, pattern: str) -> list[dict[str, Any]]:
    """Ray begins an actor's standard error with lines of its own, which are no JSON."""
    texts = [
        file.read_text(encoding="utf-8")
        for file in Path(folder).glob(f"ray/session_2*/logs/{pattern}")
    ]
    return [
        json.loads(line) for text in texts for line in text.splitlines() if line.startswith("{")
    ]


def _naming(request_id: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        line
        for line in lines
        if line.get("request_id") == request_id or request_id in line.get("request_ids", ())
    ]


def _spans(folder: str) -> list[dict[str, Any]]:
    """Ray Serve writes one object after the other, each on several lines."""
    spans, decoder = [], json.JSONDecoder()
    for file in Path(folder).glob("ray/session_2*/logs/serve/spans/*"):
        text = file.read_text(encoding="utf-8").strip()
        while text:
            span, end = decoder.raw_decode(text)
            spans.append(span)
            text = text[end:].lstrip()
    return spans


def _message(line: str) -> str:
    return str(json.loads(line)["message"])


def _first_stage(folder: str) -> int:
    """Its process: Ray puts what an actor says of itself, and its process's number, on the log of
    its standard error.
    """
    (log,) = [
        f
        for f in Path(folder).glob("ray/session_2*/logs/worker-*.err")
        if ":actor_name:Stage 1/" in f.read_text()
    ]
    return int(log.stem.rpartition("-")[2])


def _complete(url: str) -> str:
    """Return the events of a completion that the client calls mine/1."""
    body = {
        "prompt": "ROMEO:",
        "max_tokens": 20,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    headers = {"x-request-id": "mine/1", "traceparent": f"00-{TRACE}-{PARENT}-01"}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=300).text


def test_a_request_is_found_in_the_lines_of_all_whom_it_met() -> None:
    """And a signal ends the server, without a process that stays."""
    with TemporaryDirectory(prefix="log") as folder:  # whose name is short: Ray makes sockets in it
        with _serving(folder) as (process, url):
            first_stage = _first_stage(folder)
            os.kill(first_stage, signal.SIGSTOP)
            with ThreadPoolExecutor(1) as client:
                answer = client.submit(_complete, url)
                while not _naming("mine/1", _lines(folder, ROUTER_LOGS)):
                    time.sleep(0.05)
                time.sleep(1)  # until the second stage waits for hidden states of the prompt
                os.kill(first_stage, signal.SIGKILL)
                assert answer.result().endswith("data: [DONE]\n\n")
            assert process.stderr is not None
            about = (
                m
                for m in map(_message, process.stderr)
                if m.startswith("pipeline ") and "new processes for all" not in m
            )
            lost, again = itertools.islice(about, 2)
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)  # once more, as a user may do
            printed, errors = process.communicate(timeout=120)
            assert (process.returncode, printed) == (0, ""), (
                "nothing of Ray's, which may be read by a machine"
            )
        assert started_with(folder) == []
        ingress, router = (
            _lines(folder, "serve/replica_tramontane_Ingress_*.log"),
            _lines(folder, ROUTER_LOGS),
        )
        spans = _spans(folder)
        stages = [line for line in _lines(folder, "worker-*.err") if line["component"] == "stage"]
    assert all(json.loads(line)["component"] == "command" for line in errors.splitlines())
    cause = r"process \d+ on node \w{8} (has ended|cannot be reached)"
    assert re.fullmatch(
        rf"pipeline \S+ has lost Stage 1/2 layers 0-3, which gets a new process: {cause}", lost
    )
    assert re.fullmatch(
        r"pipeline \S+ runs again: replaced after \d+\.\d s, first token after \d+\.\d s", again
    )
    (answered,) = _naming("mine/1", ingress)
    assert (answered["component"], answered["status"], answered["path"]) == (
        "ingress",
        200,
        "/v1/completions",
    )
    of_router = _naming("mine/1", router)
    assert {line["component"] for line in of_router} == {"router"}
    received = [line["message"].partition(":")[0] for line in of_router]
    assert received[0] == "request mine/1 is accepted"
    assert "the pipeline failed, and its requests are computed again" in received
    assert received[-1] == "request mine/1 has ended"
    assert {(line["stage"], line["pipeline"]) for line in _naming("mine/1", stages)} == {
        (1, of_router[0]["pipeline"])
    }
    assert "ROMEO" not in json.dumps([*ingress, *router, *stages, *spans])
    _check_spans([span for span in spans if span["context"]["trace_id"] == f"0x{TRACE}"])


def _check_spans(spans: list[dict[str, Any]]) -> None:
    """From the client's own, through the proxy and the ingress, to what the router did; with the
    failure where it was.
    """
    by_id = {span["context"]["span_id"]: span for span in spans}
    (decode,) = [span for span in spans if span["name"] == "decode"]
    line, above = [], decode["parent_id"]
    while above in by_id:
        line.append(by_id[above])
        above = line[-1]["parent_id"]
    assert above == f"0x{PARENT}"
    call, *_, proxy = line
    assert call["name"].startswith("replica_handle_request Router")
    assert (call["attributes"]["request_id"], call["attributes"]["tramontane.is_complete"]) == (
        "mine/1",
        True,
    )
    assert [event["name"] for event in call["events"]] == ["recovery"]
    assert any(span["name"].startswith("replica_handle_request Ingress") for span in line)
    assert proxy["name"].startswith("proxy_http_request")
    phases = [span for span in spans if span["parent_id"] == decode["parent_id"]]
    assert sorted(span["name"] for span in phases) == ["decode", "prefill", "queue"]
    in_order = sorted(phases, key=lambda span: str(span["end_time"]))
    assert [span["name"] for span in in_order] == ["queue", "prefill", "decode"]
    assert (
        call["start_time"]
        <= in_order[0]["start_time"]
        <= in_order[-1]["end_time"]
        <= call["end_time"]
    )
