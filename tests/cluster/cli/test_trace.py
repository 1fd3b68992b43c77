"""``tramontane trace``: the file keeps the rules of its format, and says what the stages did."""

import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from activity_records import BEGAN_AT, log_of, pipeline_data

from tramontane.cluster.cli import main as cli
from tramontane.cluster.cli import trace as trace_command
from tramontane.cluster.cli.trace import StageSlice, assign_lanes, build_trace, num_slices
from tramontane.router.engine.activity_log import Activity, MicroBatchActivity

Event = dict[str, Any]


def _looks(*pipelines: dict[str, Any], began_at: float = BEGAN_AT) -> list[Activity]:
    """Of each look one pipeline, or all in one where there is one look; a second between them."""
    data = [
        {"now": began_at + second, "pipelines": [pipeline]}
        for second, pipeline in enumerate(pipelines)
    ]
    return [Activity.model_validate_json(json.dumps(each)) for each in data]


def _check(data: dict[str, Any]) -> None:
    """The rules of trace events (JSON object format): what each kind must have, and how they go
    together.
    """
    data = json.loads(json.dumps(data, allow_nan=False))
    assert data["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = data["traceEvents"]
    for event in events:
        assert event["ph"] in "MXCstf"
        assert all(type(event[key]) is int for key in ("pid", "tid"))
        assert event["ts"] >= 0
        assert type(event["name"]) is str
    slices = _slices_by_thread(events)
    for own in slices.values():
        own.sort(key=lambda event: float(event["ts"]))
        assert all(event["dur"] >= 0 for event in own)
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in itertools.pairwise(own)), (
            "one after the other"
        )
    named = {(e["pid"], e["tid"]) for e in events if (e["ph"], e["name"]) == ("M", "thread_name")}
    processes = {e["pid"] for e in events if (e["ph"], e["name"]) == ("M", "process_name")}
    assert slices.keys() <= named
    assert {event["pid"] for event in events} == processes
    assert all(
        type(value) in (int, float)
        for e in events
        if e["ph"] == "C"
        for value in e["args"].values()
    )
    _check_arrows(events, slices)


def _slices_by_thread(events: Sequence[Event]) -> dict[tuple[int, int], list[Event]]:
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)
    return slices


def _check_arrows(events: Sequence[Event], slices: dict[tuple[int, int], list[Event]]) -> None:
    """Each begins, continues and ends inside slices, in this order, with the end bound to the slice
    around it.
    """
    arrows: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            arrows[event["id"]].append(event)
            assert any(
                s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
                for s in slices[event["pid"], event["tid"]]
            )
    for path in arrows.values():
        assert [event["ph"] for event in path] == ["s", *["t"] * (len(path) - 2), "f"]
        assert path[-1]["bp"] == "e"
        assert len({(event["name"], event["cat"]) for event in path}) == 1
        assert [event["ts"] for event in path] == sorted(event["ts"] for event in path)


def test_each_stages_work_is_a_slice() -> None:
    data = build_trace(_looks(pipeline_data()))
    _check(data)
    names = {(e["name"], e["tid"]): e["args"] for e in data["traceEvents"] if e["ph"] == "M"}
    assert names["process_name", 0] == {"name": "app-1"}
    assert names["thread_name", 1000] == {"name": "Stage 2/2 layers 4-7"}
    slices = [event for event in data["traceEvents"] if event["ph"] == "X"]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in slices] == [
        ("prefill", 0, 0, 500_000),
        ("mixed", 0, 1_000_000, 500_000),
        ("decode", 0, 2_000_000, 500_000),
        ("prefill", 1000, 500_000, 500_000),
        ("mixed", 1000, 1_500_000, 500_000),
        ("decode", 1000, 2_500_000, 500_000),
    ]
    assert slices[4]["args"] == {
        "number": 2,
        "step": 1,
        "epoch": 5,
        "prefill_tokens": 4,
        "decodes": 1,
        "busy_ms": 250.0,
    }
    assert sum(event["ph"] == "s" for event in data["traceEvents"]) == 3
    assert num_slices(data) == 6


def test_only_what_began_since_the_first_look_is_in_it_and_once() -> None:
    """A micro-batch may be reported twice; a router that begins anew counts from one again, in a
    later epoch.
    """
    anew = pipeline_data(log=log_of(((0, 1),)))
    for batch in anew["micro_batches"]:
        batch["epoch"] = 6
    data = build_trace(
        _looks(
            pipeline_data(), pipeline_data(), pipeline_data(after=2), anew, began_at=BEGAN_AT + 1.2
        )
    )
    _check(data)
    reported = [
        (e["tid"], e["args"]["number"], e["args"]["epoch"])
        for e in data["traceEvents"]
        if e["ph"] == "X"
    ]
    assert reported == [(0, 3, 5), (1000, 2, 5), (1000, 3, 5)]
    data = build_trace(_looks(pipeline_data(), anew))
    assert num_slices(data) == 8, "of two routers"


def test_pipelines_are_processes() -> None:
    look = {"now": BEGAN_AT, "pipelines": [pipeline_data("app-2"), pipeline_data("app-1")]}
    data = build_trace([Activity.model_validate_json(json.dumps(look))])
    _check(data)
    named = {
        e["pid"]: e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"
    }
    assert named == {1: "app-1", 2: "app-2"}
    assert len({event["id"] for event in data["traceEvents"] if event["ph"] == "s"}) == 6


def _work(began_s: float, ended_s: float) -> StageSlice:
    batch = MicroBatchActivity(number=1, step=0, epoch=0, prefill_tokens=0, decodes=1, stages=[])
    return StageSlice(batch, 0, began_s, 1.0, ended_s - began_s)


def test_slices_that_overlap_are_in_different_lanes() -> None:
    spans = [
        [(w.began_s, w.ended_s) for w in lane]
        for lane in assign_lanes([_work(1, 4), _work(0, 3), _work(3, 5)])
    ]
    assert spans == [[(0, 3), (3, 5)], [(1, 4)]]


def test_clocks_that_differ_a_little_make_no_second_lane() -> None:
    pipeline = pipeline_data()
    for batch, began_s in zip(pipeline["micro_batches"], (0.0, 0.4995, 1.3), strict=True):
        batch["stages"] = [
            (0, BEGAN_AT + began_s, 0.5, 0.5),
            (1, BEGAN_AT + began_s + 0.1, 0.5, 0.9),
        ]
    data = build_trace(_looks(pipeline))
    _check(data)
    threads = [e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"]
    assert threads == ["Stage 1/2 layers 0-3", "Stage 2/2 layers 4-7", "Stage 2/2 layers 4-7 (2)"]
    assert [e["dur"] for e in data["traceEvents"] if e["ph"] == "X" and e["tid"] == 0] == [
        499_500,
        500_000,
        500_000,
    ]


# ---- the command


def _run(
    monkeypatch: pytest.MonkeyPatch, pipelines: Sequence[dict[str, Any]], *arguments: object
) -> list[list[tuple[str, str]]]:
    """At each request the server is a second further. Returns the requests."""
    requested: list[list[tuple[str, str]]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requested.append(request.url.params.multi_items())
        return httpx.Response(
            200, json={"now": BEGAN_AT + len(requested) - 1, "pipelines": list(pipelines)}
        )

    client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://ingress")
    monkeypatch.setattr(trace_command, "make_client", lambda _url, _headers: client)
    monkeypatch.setattr(trace_command.time, "sleep", lambda _: None)
    assert cli.app(["trace", *map(str, arguments)], standalone_mode=False) is None
    return requested


def test_it_polls_until_the_time_is_over_and_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json"
    for _ in range(2):  # a trace of ours takes the place of the last one
        requested = _run(monkeypatch, [pipeline_data()], "-o", file, "--seconds", 2.5)
        assert requested == [[], *[[("after", "app-1:3")]] * 3]
        data = json.loads(file.read_text())
        _check(data)
        assert num_slices(data) == 6
        assert data["otherData"] == {
            "writer": "tramontane trace",
            "began_at": "1970-01-01T00:16:40+00:00",
        }
        assert (
            capsys.readouterr().out == f"6 slices in {file}; open it at https://ui.perfetto.dev\n"
        )


def test_nothing_is_written_where_nothing_ran(
    refused: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    idle = httpx.MockTransport(
        lambda _: httpx.Response(200, json={"now": next(now), "pipelines": []})
    )
    now = itertools.count(1000)
    monkeypatch.setattr(
        trace_command,
        "make_client",
        lambda _url, _headers: httpx.Client(transport=idle, base_url="http://ingress"),
    )
    monkeypatch.setattr(trace_command.time, "sleep", lambda _: None)
    file = tmp_path / "trace.json"
    assert refused("trace", "-o", file, code=1).startswith("nothing ran in these 5 s")
    assert not file.exists()


@pytest.mark.parametrize("seconds", ["0", "-1", "3601", "nan", "inf"])
def test_senseless_times_are_refused(refused: Any, tmp_path: Path, seconds: str) -> None:
    expected = f"--seconds is {float(seconds):g}; it must be more than 0 and at most 3600"
    assert refused("trace", "-o", tmp_path / "trace.json", "--seconds", seconds) == expected


def test_other_files_are_left_alone(refused: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"traceEvents": []}')
    assert (
        refused("trace", "-o", file) == f"{file} was not written by this command; choose another -o"
    )
    assert file.read_text() == '{"traceEvents": []}'
    assert refused("trace", "-o", tmp_path) == f"-o {tmp_path} cannot be read: Is a directory"
    missing = tmp_path / "missing"
    assert (
        refused("trace", "-o", missing / "trace.json")
        == f"-o {missing}/trace.json: there is no folder {missing}"
    )


def test_a_server_that_does_not_answer_is_named(refused: Any, tmp_path: Path) -> None:
    said = refused("trace", "-o", tmp_path / "trace.json", "--url", "http://127.0.0.1:1", code=1)
    assert said.startswith("--url http://127.0.0.1:1 does not answer: ")
