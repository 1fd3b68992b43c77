"""A server, what is reported of it, and streams against it: when their tokens come and which, for
``gpu_server.py``.

Times are in seconds. Prompts are random token ids, so that no tokenizer is needed and lengths are
exact.
"""

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from free_ports import free_port
from gpu import end_children
from targets import Target, at_most

Sampling = dict[str, Any]
Prompt = list[int]
GREEDY: Sampling = {"temperature": 0}
SAMPLED: Sampling = {"temperature": 0.8, "top_p": 0.95, "seed": 1}
FIRST_ID = 3  # lower ones are control tokens
SILENCE_S = 180.0  # after which a stream has failed
EVENT = b"data: {"
TRAMONTANE = (sys.executable, "-m", "tramontane.cluster.cli")
TEMPORARY = Path(tempfile.gettempdir())
STAGE_TITLE = "ray::StageActor"
LINE_LENGTH = 600  # characters of a line of the server that a report has
STOP_S, QUERY_S = 20, 10


@dataclass
class Trace:
    """One stream: when each token came, counted from its start, and which it was. ``began`` is by
    ``time.monotonic``.

    ``timings``: what the server says of it at its end, in seconds.
    """

    began: float
    times: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    error: str = ""
    timings: dict[str, float] = field(default_factory=dict)

    def longest_gap(self, since: float) -> float:
        """Return the longest time without a token from a moment of the clock to the last token.

        Began at 10, tokens after 1, 2 and 7: since 11.5 it is the 5 between the second and the
        third.
        """
        moments = [
            max(since, self.began),
            *(self.began + each for each in self.times if self.began + each > since),
        ]
        return max((after - before for before, after in pairwise(moments)), default=0.0)


# given what has come of each stream so far
Disturb = Callable[[list[Trace]], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Load:
    """Clients that all begin at once. ``seed``: of their prompts, so that those of two loads differ
    or are the same.
    """

    streams: int
    length: int
    new_tokens: int
    sampling: Sampling = field(default_factory=lambda: GREEDY)
    seed: int = 0


def random_prompts(number: int, length: int, seed: int, vocabulary: int) -> list[Prompt]:
    """Return prompts of token ids below ``vocabulary``, the same for the same arguments."""
    rng = random.Random(seed)
    return [[rng.randrange(FIRST_ID, vocabulary) for _ in range(length)] for _ in range(number)]


def run_streams(
    url: str,
    prompts: Sequence[Prompt],
    new_tokens: int,
    sampling: Sampling = GREEDY,
    disturb: Disturb | None = None,
) -> list[Trace]:
    """Stream an answer to each prompt, all at once. ``disturb`` runs at the same time and sees what
    has come so far.
    """
    return asyncio.run(_run_streams(url, prompts, new_tokens, sampling, disturb))


async def _run_streams(
    url: str,
    prompts: Sequence[Prompt],
    new_tokens: int,
    sampling: Sampling,
    disturb: Disturb | None,
) -> list[Trace]:
    limits: dict[str, Any] = {
        "connector": aiohttp.TCPConnector(limit=0),
        "timeout": aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S),
        "read_bufsize": 2**20,
    }
    common = {
        "max_tokens": new_tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        **sampling,
    }
    common["stream_options"] = {"include_usage": True}
    traces = [Trace(time.monotonic()) for _ in prompts]
    async with aiohttp.ClientSession(**limits) as session, asyncio.TaskGroup() as group:
        for prompt, trace in zip(prompts, traces, strict=True):
            group.create_task(
                _stream(session, f"{url}/v1/completions", {"prompt": prompt, **common}, trace)
            )
        if disturb is not None:
            group.create_task(disturb(traces))
    return traces


async def _stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], trace: Trace
) -> None:
    """Fill in a trace. What goes wrong is its error, and ends no other stream."""
    trace.began = time.monotonic()
    try:
        async with session.post(url, json=body) as response:
            if response.status != aiohttp.http.HTTPStatus.OK:
                trace.error = f"{response.status} {(await response.text())[:200]}"
                return
            async for line in response.content:
                if line.startswith(EVENT):
                    _note(json.loads(line.removeprefix(b"data: ")), trace)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        trace.error = repr(error)[:200]


def _note(event: dict[str, Any], trace: Trace) -> None:
    if "error" in event:
        trace.error = str(event["error"])[:200]
    trace.timings = event.get("timings") or trace.timings
    for choice in event.get("choices", ()):
        ids = choice.get("token_ids") or []
        trace.ids += ids
        trace.times += [time.monotonic() - trace.began] * len(ids)


def load_row(load: Load, traces: Sequence[Trace], seconds: float) -> dict[str, Any]:
    """Return a row of a report: rates of the whole run, and quantiles of times in milliseconds.

    ``token_ms``: of each stream the mean time of a token after the first, of these the median and
    the 99th percentile. ``event_gap_ms``: between two events of a stream, which may have several
    tokens: 25 %, median, 99 %.
    """
    done = [trace for trace in traces if len(trace.ids) == load.new_tokens and not trace.error]
    first = [trace.times[0] for trace in done]
    means = [(trace.times[-1] - trace.times[0]) / (load.new_tokens - 1) for trace in done]
    gaps = [after - before for t in done for before, after in pairwise(t.times) if after > before]
    return {
        "streams": load.streams,
        "shape": [load.length, load.new_tokens],
        "sampling": load.sampling,
        "failed": len(traces) - len(done),
        "errors": [trace.error for trace in traces if trace.error][:2],
        "out_per_s": round(len(done) * load.new_tokens / seconds, 1),
        "all_per_s": round(len(done) * (load.new_tokens + load.length) / seconds, 1),
        "seconds": round(seconds, 2),
        "first_ms": _quantiles_ms(first, 0.5, 0.99),
        "token_ms": _quantiles_ms(means, 0.5, 0.99),
        "event_gap_ms": _quantiles_ms(gaps, 0.25, 0.5, 0.99),
    }


def _quantiles_ms(seconds: Sequence[float], *shares: float) -> list[float | None]:
    """Return the numbers at these shares of the sorted ones, in milliseconds: of 1, 2, 3 and 4 s at
    0.5 it is 3000.
    """
    ordered = sorted(seconds)
    return [
        round(ordered[min(int(share * len(ordered)), len(ordered) - 1)] * 1000, 2)
        if ordered
        else None
        for share in shares
    ]


def compared(expected: Sequence[Prompt], found: Sequence[Prompt]) -> dict[str, Any]:
    """Say how many lists of tokens are equal, and where each of the others first differs."""
    pairs = list(zip(expected, found, strict=True))
    return {
        "equal": sum(x == y for x, y in pairs),
        "texts": len(pairs),
        "first_difference": sorted(_first_difference(x, y) for x, y in pairs if x != y),
    }


def after_fault(
    expected: Sequence[Trace], found: Sequence[Trace], new_tokens: int
) -> dict[str, Any]:
    """Say which streams, during which a fault was made, are incomplete or have other tokens than
    without it.
    """
    return {
        "streams": len(found),
        "errors": [each.error for each in found if each.error][:2],
        "incomplete": sum(len(each.ids) != new_tokens for each in found),
        **compared([each.ids for each in expected], [each.ids for each in found]),
    }


def _first_difference(x: Prompt, y: Prompt) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y))
    )


class Report:
    """The rows of one part, saved after each, and its ``targets``: that nothing went wrong."""

    def __init__(self, file: Path | None, small: bool, is_on_gpu: bool) -> None:
        self._file, self._began = file, time.monotonic()
        self.small, self.is_on_gpu = small, is_on_gpu
        self.url = ""  # of the server
        self.rows: list[dict[str, Any]] = []
        self.targets: list[Target] = []
        # of checkpoints, and of tokens to compare with
        self.folder = file.parent if small and file is not None else TEMPORARY
        self.tokens = self.folder / "gpu_server_tokens.json"

    def add(self, what: str, **row: object) -> None:
        self.rows.append({"what": what, "at_s": round(time.monotonic() - self._began, 1), **row})
        print(self.rows[-1], flush=True)
        if self._file is not None:
            self._file.write_text(json.dumps(self.rows, indent=1))

    def check(self, what: str, wrong: int, **row: object) -> None:
        """Add a row that holds if nothing was wrong."""
        self.targets.append(target := at_most(f"{what}, wrong", wrong, 0))
        self.add(what, **row, wanted=target.wanted, holds=target.is_met)

    def prompts(self, number: int, length: int, seed: int) -> list[Prompt]:
        return random_prompts(number, length, seed, 900 if self.small else 30_000)

    def of_size(self, real: int, small: int) -> int:
        return small if self.small else real


@contextmanager
def serving(report: Report, *flags: str) -> Iterator[psutil.Process]:
    """Run a server. Its row has the seconds until it was ready, the times of its progress lines,
    and the GPU's memory.
    """
    ports = ("--port", str(free_port()), "--grpc-port", str(free_port()))
    command = [*TRAMONTANE, "serve", "--json", *ports, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        lines = _lines_until_ready(process)
        report.url = json.loads(lines[-1][1])["url"]
        report.add(
            "ready",
            seconds=lines[-1][0],
            flags=" ".join(flags),
            progress=lines[:-1],
            gpu=gpu_memory(),
        )
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        end_children(process.pid)
        process.kill()
        process.wait()


def _lines_until_ready(process: "subprocess.Popen[str]") -> list[tuple[float, str]]:
    """Return the lines with their seconds; a thread prints those that follow. RuntimeError if the
    process ends.
    """
    began, lines, is_over = time.monotonic(), list[tuple[float, str]](), threading.Event()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                after = round(time.monotonic() - began, 1)
                print(f"[serve {after:6.1f}] {line.rstrip()[:LINE_LENGTH]}", flush=True)
                if not is_over.is_set():
                    lines.append((after, line.rstrip()[:LINE_LENGTH]))
                if '"ready_after_s"' in line:
                    is_over.set()
        is_over.set()

    threading.Thread(target=read, daemon=True).start()
    is_over.wait()
    if not lines or '"ready_after_s"' not in lines[-1][1]:
        raise RuntimeError(f"serve has ended: {lines[-3:]}")
    return lines


def stage_pids(server: psutil.Process) -> list[int]:
    return sorted(
        each.pid for each in server.children(recursive=True) if _title(each).startswith(STAGE_TITLE)
    )


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def gpu_memory() -> str:
    """Return the GPU's memory in MiB, used and total, and of each process where the driver says it;
    "" without a GPU.
    """
    query = ("nvidia-smi", "--format=csv,noheader,nounits")
    fields = ("--query-gpu=memory.used,memory.total", "--query-compute-apps=pid,used_memory")
    with suppress(OSError, subprocess.SubprocessError):
        found = [
            subprocess.run(
                [*query, each], capture_output=True, text=True, timeout=QUERY_S, check=True
            )
            for each in fields
        ]
        return "; ".join(each.stdout.strip() for each in found)
    return ""
