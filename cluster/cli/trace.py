"""``tramontane trace``: record the stages' activity, as JSON with trace events, which Perfetto and
chrome://tracing open.

A pipeline is a process of the trace, a stage is a thread, a stage's work on a micro-batch is a
slice, and an arrow follows each micro-batch through its stages. Times are microseconds since the
trace began.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import httpx
from rich.console import Console

from tramontane.cluster.console.options import option
from tramontane.cluster.console.server_client import (
    DEFAULT_URL,
    Key,
    KeyFile,
    Url,
    ask_activity,
    auth_headers,
    last_seen,
    make_client,
)
from tramontane.cluster.console.terminal import check_replaceable, writing
from tramontane.proto.errors import ConfigError, PipelineUnavailableError
from tramontane.router.engine.activity_log import Activity, MicroBatchActivity, PipelineActivity

MAX_SECONDS = 3600.0
POLL_INTERVAL_S = 0.5  # a server reports 1000 micro-batches at once
WRITER = {"writer": "tramontane trace"}
FILE_START = '{"otherData": {"writer": "tramontane trace"'
MAX_LANES = 1000  # threads of one stage
# Start and end of a stage's work are not read from one clock: its next work may seem to start this
# much before the end.
CLOCK_TOLERANCE_S = 1e-3

Event = dict[str, Any]


def trace(
    output: Annotated[
        Path,
        option(
            "-o",
            "--output",
            help="File to write. A file that is not such a trace is not overwritten.",
        ),
    ],
    seconds: Annotated[float, option("--seconds", help="Length of the recording.")] = 5.0,
    url: Url = DEFAULT_URL,
    key: Key = None,
    key_file: KeyFile = None,
) -> None:
    """Record what the stages of a running server do for some seconds, as a trace for Perfetto."""
    if not 0 < seconds <= MAX_SECONDS:
        raise ConfigError(
            f"--seconds is {seconds:g}; it must be more than 0 and at most {MAX_SECONDS:g}"
        )
    check_replaceable(output, FILE_START, "-o")
    status = Console(stderr=True, highlight=False).status(f"recording for {seconds:g} s")
    with make_client(url, auth_headers(key, key_file)) as client, status:
        data = build_trace(list(_poll(client, seconds)))
    if not num_slices(data):
        raise PipelineUnavailableError(
            f"nothing ran in these {seconds:g} s, so {output} was not written; trace while"
            " requests run"
        )
    with writing(output, "-o"):
        output.write_text(json.dumps(data), encoding="utf-8")
    print(f"{num_slices(data)} slices in {output}; open it at https://ui.perfetto.dev")


def _poll(client: httpx.Client, seconds: float) -> Iterator[Activity]:
    """Yield snapshots until the first after the end, by the server's clock."""
    snapshot = ask_activity(client)
    ends_at = snapshot.now + seconds
    yield snapshot
    while snapshot.now < ends_at:
        time.sleep(min(POLL_INTERVAL_S, ends_at - snapshot.now))
        snapshot = ask_activity(client, last_seen(snapshot))
        yield snapshot


@dataclass(frozen=True, slots=True)
class StageSlice:
    """The work of one stage on one micro-batch; ``began_s`` counts from the start of the trace."""

    batch: MicroBatchActivity
    stage: int
    began_s: float
    busy_s: float
    elapsed_s: float

    @property
    def ended_s(self) -> float:
        """End, in seconds since the start of the trace."""
        return self.began_s + self.elapsed_s


def build_trace(snapshots: Sequence[Activity]) -> dict[str, Any]:
    """Return the trace of the micro-batches that began since the first snapshot, from all
    snapshots.
    """
    began_at = snapshots[0].now
    names = sorted({pipeline.name for snapshot in snapshots for pipeline in snapshot.pipelines})
    events: list[Event] = []
    for process, name in enumerate(names, 1):
        reports = [
            (snapshot.now - began_at, pipeline)
            for snapshot in snapshots
            for pipeline in snapshot.pipelines
            if pipeline.name == name
        ]
        events += [
            _metadata("process_name", process, 0, name=name),
            *_pipeline(process, [each for _, each in reports], began_at),
        ]
        events += [_counter(process, at_s, pipeline) for at_s, pipeline in reports]
    other = WRITER | {"began_at": datetime.fromtimestamp(began_at, UTC).isoformat()}
    return {"otherData": other, "displayTimeUnit": "ms", "traceEvents": events}


def num_slices(data: dict[str, Any]) -> int:
    """Return how many slices the trace has."""
    return sum(event["ph"] == "X" for event in data["traceEvents"])


def _pipeline(
    process: int, reports: Sequence[PipelineActivity], began_at: float
) -> Iterator[Event]:
    """Yield the events of one pipeline. A restarted router numbers micro-batches from 1 again, in a
    later epoch.
    """
    batches = {
        (batch.epoch, batch.number): batch
        for pipeline in reports
        for batch in pipeline.micro_batches
    }
    slices: dict[tuple[int, int], list[Event]] = {key: [] for key in batches}
    for stage in reports[0].stages:
        works = [
            work
            for batch in batches.values()
            for work in _stage_slices(batch, began_at)
            if work.stage == stage.stage
        ]
        for number, lane in enumerate(assign_lanes(works)):
            thread = stage.stage * MAX_LANES + number
            yield _metadata(
                "thread_name",
                process,
                thread,
                name=stage.label + (f" ({number + 1})" if number else ""),
            )
            yield _metadata("thread_sort_index", process, thread, sort_index=thread)
            for work, event in zip(lane, _slices(process, thread, lane), strict=True):
                slices[work.batch.epoch, work.batch.number].append(event)
                yield event
    for (epoch, number), path in slices.items():
        yield from _arrow(f"{process}.{epoch}.{number}", path)


def _stage_slices(batch: MicroBatchActivity, began_at: float) -> Iterator[StageSlice]:
    for stage, started_at, busy_s, elapsed_s in batch.stages:
        if started_at >= began_at:
            yield StageSlice(batch, stage, started_at - began_at, busy_s, elapsed_s)


def assign_lanes(works: Iterable[StageSlice]) -> list[list[StageSlice]]:
    """Assign slices to lanes in which they do not overlap: a stage that waits for expert actors has
    two at a time.

    0..3, 1..4 and 3..5 are [0..3, 3..5] and [1..4].
    """
    lanes: list[list[StageSlice]] = []
    for work in sorted(works, key=lambda each: each.began_s):
        free = next(
            (lane for lane in lanes if lane[-1].ended_s <= work.began_s + CLOCK_TOLERANCE_S), None
        )
        if free is None:
            lanes.append([work])
        else:
            free.append(work)
    return lanes


def _slices(process: int, thread: int, lane: Sequence[StageSlice]) -> Iterator[Event]:
    """Yield the events of slices; each ends when the next begins, at the latest."""
    for work, next_work in pairwise([*lane, None]):
        assert work is not None
        ended_s = work.ended_s if next_work is None else min(work.ended_s, next_work.began_s)
        batch = work.batch
        args = batch.model_dump(exclude={"stages"}) | {"busy_ms": 1e3 * work.busy_s}
        times = {"ts": _us(work.began_s), "dur": round(_us(ended_s) - _us(work.began_s), 3)}
        yield {
            "ph": "X",
            "name": _kind(batch),
            "cat": "stage",
            "pid": process,
            "tid": thread,
            **times,
            "args": args,
        }


def _kind(batch: MicroBatchActivity) -> str:
    if batch.prefill_tokens and batch.decodes:
        return "mixed"
    return "prefill" if batch.prefill_tokens else "decode"


def _arrow(key: str, path: Sequence[Event]) -> Iterator[Event]:
    """Yield an arrow from the middle of each slice to the middle of the next stage's slice."""
    if len(path) < 2:
        return
    for index, event in enumerate(path):
        end = (
            {"ph": "s"}
            if index == 0
            else {"ph": "f", "bp": "e"}
            if index == len(path) - 1
            else {"ph": "t"}
        )
        at = round(event["ts"] + event["dur"] / 2, 3)
        yield end | {
            "name": "micro-batch",
            "cat": "flow",
            "id": key,
            "pid": event["pid"],
            "tid": event["tid"],
            "ts": at,
        }


def _counter(process: int, at_s: float, pipeline: PipelineActivity) -> Event:
    args = {"running": pipeline.running, "waiting": pipeline.waiting}
    return {"ph": "C", "name": "sequences", "pid": process, "tid": 0, "ts": _us(at_s), "args": args}


def _metadata(kind: str, process: int, thread: int, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": args}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
