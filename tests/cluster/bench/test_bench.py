"""``tramontane bench``: on a tiny engine in this process, and against API servers without a
network. No clock is used.
"""

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from scripted_chain import ScriptedChain
from tiny_models import random_model, tiny_args, tiny_plan, write_checkpoint

from tramontane.cluster.bench.online import LoadPattern, bench_online, make_client
from tramontane.cluster.bench.report import BenchDisplay, as_data
from tramontane.cluster.bench.results import (
    BenchResult,
    FailureCount,
    RoundPlan,
    Workload,
    arrivals,
)
from tramontane.cluster.cli import main as cli
from tramontane.cluster.config.measurements import MeasuredLoad, parse_stage_times_option
from tramontane.cluster.console import charts as pictures
from tramontane.cluster.http.app import HttpApp, HttpAppConfig
from tramontane.cluster.http.sse import Pacer
from tramontane.proto.errors import ConfigError, PipelineError
from tramontane.router.engine.health import PipelineHealth
from tramontane.router.engine.router import Router
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.scheduling.policy import FixedInFlightPolicy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.waiting_queue import SchedulerLimits
from tramontane.workers.device.probe import device_name

ARGS = tiny_args(n_layers=4, window=24, max_seq_len=128)
WORK = Workload(num_prompts=5, input_len=12, output_len=6, range_ratio=0.5)
ALL_AT_ONCE = LoadPattern()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", ARGS, random_model(ARGS))


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.out)
        return data


Bench = Callable[..., Ended]


@pytest.fixture
def bench(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Bench:
    """Runs ``tramontane bench`` in this process."""

    def run(*flags: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["tramontane", "bench", *map(str, flags)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return Ended(int(exit_.value.code or 0), out, err)

    return run


def _offline(model: Path) -> list[object]:
    lengths = ["--num-prompts", 5, "--input-len", 12, "--output-len", 6]
    return ["--model", model, "--local", "--stages", 2, "--threads-per-stage", 1, *lengths]


def test_offline_counts_every_token_of_a_round_and_of_that_round_alone(
    bench: Bench, model: Path
) -> None:
    ended = bench(*_offline(model), "--range-ratio", 0.5, "--warmups", 2, "--repeats", 3, "--json")
    assert ended.code == 0, ended.err
    data, requests = ended.json, WORK.requests(0, ARGS.vocab_size)
    num_in, num_out = (
        sum(r.num_prompt_tokens for r in requests),
        sum(r.num_new_tokens for r in requests),
    )
    assert (data["num_requests"], data["completed"], data["failed"], data["errors"]) == (
        5,
        5,
        0,
        [],
    )
    assert (data["total_input_tokens"], data["total_output_tokens"]) == (num_in, num_out)
    assert data["total_num_tokens"] == num_in + num_out
    assert [stage["layers"] for stage in data["stages"]] == [[0, 1], [2, 3]]
    # the last token is never fed back
    assert [stage["tokens"] for stage in data["stages"]] == [num_in + num_out - 5] * 2
    assert 0 < data["bubble"] < 1
    assert len(data["hops"]) == 1
    assert data["hops"][0]["min_ms"] <= data["hops"][0]["median_ms"]
    assert len(data["repeats_tokens_per_second"]) == 3
    assert data["tokens_per_second"] == sorted(data["repeats_tokens_per_second"])[1]
    assert (
        data["median_ttft_ms"]
        <= data["median_e2el_ms"]
        <= data["p99_e2el_ms"]
        <= 1000 * data["elapsed_time"]
    )
    assert [
        line.split(" ...")[0]
        for line in ended.err.splitlines()
        if line.startswith("round") and "%" not in line
    ] == [
        "round 1 of 5 (warm-up)",
        "round 2 of 5 (warm-up)",
        "round 3 of 5",
        "round 4 of 5",
        "round 5 of 5",
    ]


@pytest.mark.parametrize(
    ("flags", "speeds"), [((), [None, None]), (("--gpu-speed", "3,1"), [3, 1])]
)
def test_what_is_measured_offline_can_be_planned_with(
    bench: Bench, model: Path, tmp_path: Path, flags: tuple[str, ...], speeds: list[int | None]
) -> None:
    ended = bench(*_offline(model), "--warmups", 0, "--repeats", 1, "--json", *flags)
    assert ended.code == 0, ended.err
    stages = ended.json["stages"]
    assert [(stage["device"], stage["speed"]) for stage in stages] == [
        (device_name("cpu"), speed) for speed in speeds
    ]
    (tmp_path / "bench.json").write_text(ended.out)
    times = parse_stage_times_option(tmp_path / "bench.json")
    assert isinstance(times, tuple)
    assert [time.busy for time in times] == [
        s["busy_share"] * (speed or 1) for s, speed in zip(stages, speeds, strict=True)
    ]


def test_offline_prints_a_table_for_people_and_needs_no_weights(
    bench: Bench, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    flags = [tmp_path if flag is model else flag for flag in _offline(model)]
    ended = bench(*flags, "--load-format", "dummy", "--warmups", 0, "--repeats", 1)
    assert ended.code == 0, ended.err
    for part in (
        "5 requests, 60 tokens in, 30 out",
        "first token (TTFT)",
        "p99",
        "1/2",
        "2/2",
        "bubble",
        "hop 1 to 2:",
    ):
        assert part in ended.out


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--input-len", "120", "--output-len", "9"], ["129 positions", "128"]),
        (["--input-len", "20", "--max-model-len", "25"], ["26 positions", "25"]),
        (["--num-prompts", "0"], ["--num-prompts is 0"]),
        (["--num-prompts", "many"], ["--num-prompts"]),
        (["--repeats", "0"], ["--repeats is 0"]),
        (["--request-rate", "3"], ["--request-rate", "--url"]),
        (
            ["--max-concurrency", "3", "--vocab-size", "9"],
            ["--max-concurrency, --vocab-size", "--url"],
        ),
        (
            ["--url", "http://127.0.0.1:1"],
            ["--model", "--stages", "--local", "only for an engine of bench's own"],
        ),
        (["--plot", "picture.xyz"], ["picture.xyz must end in one of", "png"]),
        (["--plot", "nowhere/picture.png"], ["there is no folder nowhere"]),
        (["--stages", "9"], ["9", "stages"]),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    bench: Bench, model: Path, flags: list[str], named: list[str]
) -> None:
    ended = bench(*_offline(model), *flags)
    *_, last = ended.err.splitlines()
    assert (ended.code, ended.out) == (2, "")
    assert last.startswith("error: ")
    for part in named:
        assert part in last


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("127.0.0.1:1", 2),
        ("http://127.0.0.1:1/v1/", 1),
        ("http://", 2),
        ("http://[", 1),
        ("http://host:port", 2),
    ],
)
def test_a_server_that_is_not_there_is_one_line(bench: Bench, url: str, code: int) -> None:
    ended = bench("--url", url)
    assert (ended.code, ended.out) == (code, "")
    assert ended.err.startswith("error: --url ")
    assert ended.err.count("\n") == 1


def test_plot_without_the_library_says_how_to_get_it(
    bench: Bench, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda _: None)
    ended = bench(*_offline(model), "--plot", "picture.png")
    assert (ended.code, ended.out) == (2, "")
    assert "pip install 'tramontane[plot]'" in ended.err


@pytest.mark.parametrize("name", ["picture.png", "picture.svg"])
def test_plot_writes_a_picture(bench: Bench, model: Path, tmp_path: Path, name: str) -> None:
    ended = bench(*_offline(model), "--warmups", 0, "--repeats", 1, "--plot", tmp_path / name)
    assert ended.code == 0, ended.err
    data = (tmp_path / name).read_bytes()
    if name.endswith("png"):
        assert data.startswith(b"\x89PNG")
        assert len(data) > 10_000
    else:
        assert data.count(b"PolyCollection_") == 2  # a row for each stage
        assert data.count(b"<!-- whole answer -->") == 1


# ---- against a server


def _measure(
    client: httpx.AsyncClient,
    work: Workload = WORK,
    traffic: LoadPattern = ALL_AT_ONCE,
) -> BenchResult:
    return asyncio.run(bench_online(client, work, traffic, RoundPlan(0, 1), BenchDisplay()))


def _client(
    answer: Callable[[dict[str, Any]], Awaitable[httpx.Response]], **entry: object
) -> httpx.AsyncClient:
    """Of a server that is a function of the request's body."""

    async def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "it", **entry}]})
        assert request.url.path == "/v1/completions"
        return await answer(json.loads(request.content))

    return httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://server")


def _piece(text: str = "x") -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text}]}


def _stream(*events: dict[str, Any], done: bool = True) -> httpx.Response:
    async def body() -> AsyncIterator[bytes]:
        for event in events:
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
        if done:
            yield b"data: [DONE]\n\n"

    return httpx.Response(200, content=body())


def test_the_real_server_gets_exactly_the_workload() -> None:
    """The server's own usage is what is counted, and its vocabulary what prompts are made of."""
    plan = tiny_plan(ARGS, num_stages=2, max_num_seqs=8)
    limits = SchedulerLimits(8, 32, 128, ARGS.vocab_size)
    requests = WORK.requests(0, ARGS.vocab_size)

    async def health() -> PipelineHealth:
        return PipelineHealth("ready")

    async def expert_load() -> MeasuredLoad:
        return MeasuredLoad((), 1)

    async def run() -> BenchResult:
        router = Router(Scheduler(plan.cache, limits, FixedInFlightPolicy(2, 32)), ScriptedChain())
        running = asyncio.create_task(router.run())
        config = HttpAppConfig(
            model=ServedModel("tiny", None, 128, 16, ARGS.vocab_size),
            source=router,
            health=health,
            expert_load=expert_load,
            max_body_bytes=2**16,
            pacer=Pacer(10**9),
        )
        server = HttpApp(config)
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(server.app()), base_url="http://ingress"
        )
        try:
            return await bench_online(client, WORK, LoadPattern(), RoundPlan(1, 1), BenchDisplay())
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    outcome = asyncio.run(run())
    assert outcome.figures.failures == ()
    assert [t.num_prompt_tokens for t in outcome.round.traces] == [
        r.num_prompt_tokens for r in requests
    ]
    assert [t.num_new_tokens for t in outcome.round.traces] == [r.num_new_tokens for r in requests]
    assert all(1 <= len(t.pieces_at) <= t.num_new_tokens for t in outcome.round.traces)


def test_what_is_sent() -> None:
    bodies: list[dict[str, Any]] = []

    async def answer(body: dict[str, Any]) -> httpx.Response:
        bodies.append(body)
        return _stream(
            _piece(),
            _piece(),
            {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}},
        )

    outcome = _measure(_client(answer, vocab_size=96))
    requests = WORK.requests(0, 96)
    assert sorted(bodies, key=str) == sorted(
        (
            {
                "model": "it",
                "prompt": list(r.prompt),
                "max_tokens": r.num_new_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            for r in requests
        ),
        key=str,
    )
    assert (outcome.figures.num_prompt_tokens, outcome.figures.num_new_tokens) == (15, 45)
    assert [len(t.pieces_at) for t in outcome.round.traces] == [2] * 5


@pytest.mark.parametrize(("vocab_size", "is_text"), [(None, True), (50, False)])
def test_a_server_that_does_not_report_its_vocabulary_gets_text(
    vocab_size: int | None, is_text: bool
) -> None:
    prompts: list[Any] = []

    async def answer(body: dict[str, Any]) -> httpx.Response:
        prompts.append(body["prompt"])
        return _stream(_piece())

    outcome = _measure(_client(answer), traffic=LoadPattern(vocab_size=vocab_size))
    assert [isinstance(prompt, str) for prompt in prompts] == [is_text] * 5
    assert outcome.figures.num_new_tokens == 5  # without usage, pieces are counted


def test_requests_do_not_wait_for_each_other() -> None:
    """No request is answered before all have arrived: a client that waits would wait forever."""
    waiting = 0
    all_there = asyncio.Event()

    async def answer(_body: dict[str, Any]) -> httpx.Response:
        nonlocal waiting
        waiting += 1
        if waiting == WORK.num_prompts:
            all_there.set()
        await all_there.wait()
        return _stream(_piece())

    assert (
        _measure(_client(answer), traffic=LoadPattern(request_rate=5000)).figures.num_completed == 5
    )


def test_waiting_for_a_place_counts() -> None:
    """One at a time: each is answered after the one before, and all count from when they were
    due.
    """
    under_way = most = 0

    async def answer(_body: dict[str, Any]) -> httpx.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return _stream(_piece(), _piece())

    traces = _measure(_client(answer), traffic=LoadPattern(max_concurrency=1)).round.traces
    assert most == 1
    assert len({trace.due_at for trace in traces}) == 1
    assert all(a.pieces_at[-1] <= b.pieces_at[0] for a, b in itertools.pairwise(traces))


def test_requests_are_due_when_the_rate_says() -> None:
    async def answer(_body: dict[str, Any]) -> httpx.Response:
        return _stream(_piece())

    traces = _measure(_client(answer), traffic=LoadPattern(request_rate=1000)).round.traces
    due = arrivals(5, 1000, WORK.seed)
    assert [t.due_at - traces[0].due_at for t in traces] == pytest.approx(
        [at - due[0] for at in due], abs=1e-9
    )
    assert all(t.pieces_at[0] >= t.due_at for t in traces)


def test_every_failure_is_counted_and_shown() -> None:
    async def answer(body: dict[str, Any]) -> httpx.Response:
        match kinds[json.dumps(body["prompt"])]:
            case 0:
                return httpx.Response(429, json={"error": {"message": "too much is waiting"}})
            case 1:
                return httpx.Response(502, content=b"bad gateway")
            case 2:
                return _stream(_piece(), {"error": {"message": "a stage failed"}})
            case 3:
                return _stream(_piece(), done=False)
            case 4:
                return _stream()
            case 5:
                return httpx.Response(200, content=b"data: what?\n\n")
            case 6:
                raise httpx.ConnectError("refused")
            case _:
                return _stream(_piece())

    work = replace(WORK, num_prompts=9)
    kinds = {json.dumps(list(r.prompt)): max(i - 1, 0) for i, r in enumerate(work.requests(0, 96))}
    outcome = _measure(_client(answer, vocab_size=96), work)
    assert outcome.figures.num_completed == 1
    assert outcome.figures.failures[0] == FailureCount("HTTP 429", 2, "too much is waiting")
    assert {(f.kind, f.count) for f in outcome.figures.failures[1:]} == {
        ("HTTP 502", 1),
        ("an error in the stream", 1),
        ("RemoteProtocolError", 1),
        ("no token", 1),
        ("no event of OpenAI's", 1),
        ("ConnectError", 1),
    }
    data = as_data(outcome)
    assert (data["num_requests"], data["completed"], data["failed"]) == (9, 1, 8)
    assert data["errors"][0] == {"kind": "HTTP 429", "count": 2, "example": "too much is waiting"}


def test_if_all_fail_there_are_no_figures() -> None:
    async def answer(_body: dict[str, Any]) -> httpx.Response:
        return httpx.Response(429, json={"error": {"message": "too much is waiting"}})

    with pytest.raises(
        PipelineError, match="all 5 requests failed, 5 with HTTP 429: too much is waiting"
    ):
        _measure(_client(answer))


@pytest.mark.parametrize(
    "body", [b"hello", b"[]", b'{"data": []}', b'{"data": [7]}', b'{"data": [{"name": "it"}]}']
)
def test_a_server_that_is_something_else_is_refused(body: bytes) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=body))
    with pytest.raises(ConfigError, match="lists no model at /v1/models"):
        _measure(httpx.AsyncClient(transport=transport, base_url="http://server"))


def test_the_url_may_end_as_openais_clients_want_it() -> None:
    for url in (
        "http://host:8000",
        "http://host:8000/",
        "http://host:8000/v1",
        "http://host:8000/v1/",
    ):
        assert str(make_client(url, {}).base_url) == "http://host:8000"
    assert str(make_client("http://host/below/v1", {}).base_url) == "http://host/below/"


@pytest.mark.parametrize(
    ("traffic", "named"),
    [({"max_concurrency": 0}, "--max-concurrency"), ({"vocab_size": -1}, "--vocab-size")],
)
def test_impossible_traffic_is_refused(traffic: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LoadPattern(**traffic)


# ---- progress


def test_without_a_terminal_a_round_says_every_five_seconds_how_far_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 100.0
    display = BenchDisplay(lambda: now)
    display.begin_round(0, RoundPlan(1, 1), 200)
    for after, num_tokens in ((4.9, 20), (5.0, 30), (9.9, 10), (10.5, 40), (16, 900)):
        now = 100.0 + after
        display.advance(num_tokens)
    now = 200.0
    display.begin_round(1, RoundPlan(1, 1), 200)
    now = 202.0
    display.advance(100)
    assert capsys.readouterr().err.splitlines() == [
        "round 1 of 2 (warm-up) ...",
        "round 1 of 2 (warm-up): 25% of 200 tokens after 5 s, 10 a second ...",
        "round 1 of 2 (warm-up): 50% of 200 tokens after 10 s, 10 a second ...",
        "round 1 of 2 (warm-up): 100% of 200 tokens after 16 s, 12 a second ...",
        "round 2 of 2 ...",
    ]


def test_in_a_terminal_a_round_has_a_bar_with_its_speed(capsys: pytest.CaptureFixture[str]) -> None:
    display = BenchDisplay()
    display.stderr = Console(
        stderr=True, force_terminal=True, width=120, height=20, highlight=False
    )
    display.begin_round(0, RoundPlan(0, 1), 200)
    display.advance(50)
    display.advance(25)
    assert display._rounds_bar is not None
    display._rounds_bar.refresh()
    display.stop()
    err = capsys.readouterr().err
    assert "75 of 200 tokens" in err
    assert "tokens/s" in err


def test_a_round_of_an_engine_advances_with_every_computed_token(
    bench: Bench, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts count too: with long ones the first new token comes late."""
    totals, advanced = list[int](), list[int]()
    monkeypatch.setattr(
        BenchDisplay, "begin_round", lambda _self, _number, _rounds, total: totals.append(total)
    )
    monkeypatch.setattr(
        BenchDisplay, "advance", lambda _self, num_tokens: advanced.append(num_tokens)
    )
    assert bench(*_offline(model), "--warmups", 0, "--repeats", 1).code == 0
    assert len(totals) == 1
    assert sum(advanced) == totals[0]
    assert len(advanced) > 1
