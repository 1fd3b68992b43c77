"""``tramontane top``: requests for what is new, the timelines, the frames, the command."""

import io
import itertools
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from activity_records import ENDED_AT, log_of, pipeline_data
from rich.console import Console

from tramontane.cluster.cli import main as cli
from tramontane.cluster.cli import top as top_command
from tramontane.cluster.cli.top import History, render
from tramontane.cluster.common.signals import SIGNALS
from tramontane.cluster.config.measurements import MeasuredLoad
from tramontane.cluster.console import server_client as activity_client
from tramontane.cluster.console.charts import bin_activity, render_timeline
from tramontane.cluster.console.server_client import ask_activity, last_seen, poll_activity
from tramontane.proto.errors import ConfigError, PipelineUnavailableError
from tramontane.router.engine.activity_log import Activity, MicroBatchActivity, PipelineActivity

Handler = Callable[[httpx.Request], httpx.Response]


def _activity(*pipelines: dict[str, Any], now: float = ENDED_AT) -> str:
    return json.dumps({"now": now, "pipelines": pipelines})


def _look(*pipelines: dict[str, Any], now: float = ENDED_AT) -> Activity:
    return Activity.model_validate_json(_activity(*pipelines, now=now))


def _client(handler: Handler) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(handler), base_url="http://ingress")


def _saying(status: int, body: str) -> httpx.Client:
    return _client(lambda _: httpx.Response(status, text=body))


# ---- requests


def test_it_requests_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every pipeline; a server that does not answer for a while is tried again."""
    monkeypatch.setattr(activity_client, "POLL_INTERVAL_S", 0.0)
    requested: list[list[tuple[str, str]]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requested.append(request.url.params.multi_items())
        if len(requested) == 3:
            raise httpx.ConnectError("refused")
        return httpx.Response(
            200, text=_activity(pipeline_data(), pipeline_data("a&b:2", log_of(((1, 0),))))
        )

    first, second, third, fourth = itertools.islice(poll_activity(_client(answer)), 4)
    assert isinstance(first, Activity)
    assert last_seen(first) == {"app-1": 3, "a&b:2": 1}
    assert first == second == fourth
    assert (
        third == "--url http://ingress does not answer: refused; is tramontane serve running there?"
    )
    assert requested == [[], *[[("after", "app-1:3"), ("after", "a&b:2:1")]] * 3]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, '{"error": {}}'),
        (200, "<html>"),
        (200, "{}"),
        (200, "[" * 100_000),
        (200, _activity(pipeline_data() | {"busy": [0.5]})),
        (200, _activity(pipeline_data() | {"name": 7})),
        (200, _activity(pipeline_data()).replace("1000.5", "NaN")),
        (200, _activity(pipeline_data()).replace("1000.5", "1e999")),
    ],
)
def test_a_server_without_activity_is_named(status: int, body: str) -> None:
    expected = (
        f"--url http://ingress answers GET /activity with HTTP {status} and no activity; is it"
        " Tramontane"
    )
    with pytest.raises(ConfigError, match=re.escape(expected)):
        ask_activity(_saying(status, body))


def test_a_server_that_stops_is_no_mistake_of_the_users() -> None:
    with pytest.raises(
        PipelineUnavailableError,
        match="http://ingress answers GET /activity with HTTP 503; try again soon",
    ):
        ask_activity(_saying(503, "{}"))


# ---- the timelines


def _past(
    prefill: int, decodes: int, *stages: tuple[int, float, float, float], number: int = 1
) -> MicroBatchActivity:
    return MicroBatchActivity(
        number=number, step=0, epoch=0, prefill_tokens=prefill, decodes=decodes, stages=list(stages)
    )


def test_a_column_has_what_was_computed_in_it() -> None:
    mixed = _past(3, 1, (0, 10.5, 1.5, 1.5), (1, 11.0, 0.5, 1.0))
    assert bin_activity([mixed], 0, 10.0, 1.0, 2) == [(0.375, 0.125), (0.75, 0.25)]
    assert bin_activity([mixed], 1, 10.0, 1.0, 2) == [
        (0.0, 0.0),
        (0.375, 0.125),
    ], "half of it waited for experts"
    around = [
        _past(0, 1, (0, 8.0, 2.5, 2.5)),
        _past(1, 0, (0, 11.75, 9.0, 9.0)),
        _past(1, 0, (0, 1e300, 1.0, 0.0)),
    ]
    assert bin_activity(around, 0, 10.0, 1.0, 2) == [(0.0, 0.5), (0.25, 0.0)]


def test_a_character_says_what_and_how_much() -> None:
    """Legible without colors."""
    shown = render_timeline(
        [
            (0.0, 0.0),
            (0.0, 0.125),
            (0.0, 1.0),
            (0.0, 1.1),
            (0.1, 0.0),
            (1.0, 0.0),
            (0.3, 0.2),
            (0.2, 0.3),
        ],
        1.0,
    )
    assert shown.plain == " ▂██░▓▒▅"
    assert [str(span.style) for span in shown.spans] == ["cyan"] * 4 + ["yellow"] * 3 + ["cyan"]


def _pipeline(*batches: MicroBatchActivity) -> PipelineActivity:
    return PipelineActivity.model_validate(
        {**pipeline_data(), "micro_batches": [batch.model_dump() for batch in batches]}
    )


def test_what_was_drawn_only_moves() -> None:
    history = History()
    history.add(
        _pipeline(_past(0, 1, (0, 101.0, 1.0, 1.0)), _past(1, 0, (0, 104.0, 1.0, 1.0), number=2)),
        105.3,
    )
    assert history.timeline(0, 105.3, 10).plain == "      █  ▓"
    assert history.timeline(0, 105.9, 10).plain == "      █  ▓"
    history.add(_pipeline(_past(0, 1, (0, 105.0, 0.5, 0.5), number=3)), 106.1)
    assert history.timeline(0, 106.1, 10).plain == "     █  ▓▅"


def test_what_has_left_the_timeline_is_forgotten_and_another_router_begins_anew() -> None:
    history = History()
    for number in range(1, 100):
        history.add(
            _pipeline(_past(0, 1, (0, float(number), 1.0, 1.0), number=number)), number + 1.0
        )
    assert [batch.number for batch in history._batches] == list(range(89, 100))
    history.add(_pipeline(_past(0, 1, (0, 100.0, 1.0, 1.0), number=1)), 101.0)
    assert [batch.number for batch in history._batches] == [1]


# ---- the frames


def _lines(shown: Any, width: int = 80) -> list[str]:  # whatever rich can print
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_frame_says_what_the_pipeline_does() -> None:
    waits = {"first_token_s": {"p50": 0.05, "p95": 1.25}}
    reported = _look(pipeline_data() | {"busy": [0.83, 0.2], "tokens_per_s": 41.7} | waits)
    [frame] = render([reported], "http://ingress", 80, lambda: None)
    assert _lines(frame) == [
        "http://ingress: 1 pipeline",
        "the last 10 s: ░▒▓ prompts  ▁▂▃▄▅▆▇█ decodes",
        "",
        "app-1",
        "42 new tokens/s, 2 running, 1 waiting, 3 of 40 pages, 1 recovery",
        "first token p50 50 ms p95 1.25 s, between tokens -",
        "9 pages cached, 64% of prompt tokens hit, 75% of drafts right",
        "Stage 1/2 layers 0-3  83% ████████··                           ▓▓░ ▓▓░ ▅█▅     ",
        "Stage 2/2 layers 4-7  20% ██········                             ▒▒░ ▒▒░ ▂▅▃   ",
    ]


def test_a_pipeline_that_has_drafted_nothing_says_nothing_of_drafts() -> None:
    [frame] = render(
        [_look(pipeline_data() | {"draft_tokens": 0, "pages_cached": 1})],
        "http://ingress",
        80,
        lambda: None,
    )
    assert "1 page cached, 64% of prompt tokens hit" in _lines(frame)


def test_no_line_is_wrapped() -> None:
    [frame] = render(
        [_look(pipeline_data(), pipeline_data("app-2"))], "http://ingress", 80, lambda: None
    )
    assert len(_lines(frame)) == 2 + 2 * 7


def test_an_error_is_shown_above_the_last_report() -> None:
    later = pipeline_data(log=log_of((*[(8, 0)] * 3, (0, 2))), after=3)
    reported = [_look(pipeline_data()), "no answer", _look(later, now=1005.0), _look()]
    first, wrong, third, last = map(_lines, render(reported, "http://ingress", 80, lambda: None))
    assert wrong == ["no answer; this is the last report", *first]
    assert third[7].count("▓") == first[7].count("▓"), "the last report is still drawn"
    assert len(third[7].replace(" ", "")) > len(first[7].replace(" ", ""))
    assert last[0] == "http://ingress: no pipeline runs now"


def test_experts_come_below_where_there_are_any() -> None:
    loads = iter([MeasuredLoad(((10, 10), (0, 20)), 1), MeasuredLoad(((10, 40), (0, 30)), 1), None])
    reported = [_look(pipeline_data(), now=ENDED_AT + second) for second in range(3)]
    first, second, third = (
        _lines(frame) for frame in render(reported, "http://ingress", 80, lambda: next(loads))
    )
    assert "since loading: % of each layer's tokens by expert" in first
    at = second.index("the last 1 s: % of each layer's tokens by expert")
    assert second[at + 1 : at + 4] == [
        "layer     0     1 ",
        "    0   0.0 100.0*",
        "    1   0.0 100.0*",
    ]
    assert not any("expert" in line for line in third)


# ---- the command


def _run(monkeypatch: pytest.MonkeyPatch, handler: Handler, *arguments: str) -> None:
    monkeypatch.setattr(top_command, "make_client", lambda _url, _headers: _client(handler))
    monkeypatch.setattr(activity_client, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # of this process, which continues
    assert cli.app(["top", *arguments], standalone_mode=False) is None, (
        "another answer is an exit code"
    )


def _without_experts(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/experts":
        return httpx.Response(404, json={"error": {"message": "sorry", "code": "no_experts"}})
    return httpx.Response(200, text=_activity(pipeline_data()))


def test_once_is_one_look(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(monkeypatch, _without_experts, "--once")
    out = capsys.readouterr().out
    assert out.count("Stage 1/2 layers 0-3") == 1
    assert "busiest" not in out


def test_experts_are_requested_until_there_are_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends when it is interrupted, without a complaint."""
    load = {"tokens_per_expert": [[1, 2], [3, 0]], "pipelines": 1}
    wait, none = (
        {"error": {"message": "wait", "code": None}},
        {"error": {"message": "sorry", "code": "no_experts"}},
    )
    experts = iter([(200, load), (503, wait), (500, wait), (200, load), (404, none)])
    num_requests = itertools.count(1)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/experts":
            status, data = next(experts)
            return httpx.Response(status, json=data)
        if next(num_requests) > 6:
            raise KeyboardInterrupt
        return httpx.Response(200, text=_activity(pipeline_data()))

    _run(monkeypatch, answer)
    out = capsys.readouterr().out
    assert (out.count("Stage 2/2"), out.count("busiest: ")) == (6, 2)


def test_json_is_a_line_for_each_look(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    num_requests = itertools.count(1)

    def answer(_request: httpx.Request) -> httpx.Response:
        number = next(num_requests)
        if number > 3:
            raise KeyboardInterrupt
        return (
            httpx.Response(200, text=_activity(pipeline_data()))
            if number != 2
            else httpx.Response(503)
        )

    _run(monkeypatch, answer, "--json")
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == [
        json.loads(_activity(pipeline_data()))
    ] * 2
    assert err == "note: --url http://ingress answers GET /activity with HTTP 503; try again soon\n"


def test_two_signals_end_it_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``timeout`` sends them; the second one arrives while the connection is closed."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}

    class Client(httpx.Client):
        def close(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            super().close()

        def __exit__(self, *_: object) -> None:
            self.close()

    def answer(_request: httpx.Request) -> httpx.Response:
        os.kill(os.getpid(), signal.SIGTERM)
        return httpx.Response(200, text=_activity(pipeline_data()))

    client = Client(transport=httpx.MockTransport(answer), base_url="http://ingress")
    monkeypatch.setattr(top_command, "make_client", lambda _url, _headers: client)
    monkeypatch.setattr(sys, "argv", ["tramontane", "top"])
    try:
        with pytest.raises(SystemExit) as exit_:
            cli.main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert (exit_.value.code, capsys.readouterr().err) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ["--url", "localhost:8000"],
            "--url is 'localhost:8000'; it must begin with http:// or https://",
        ),
        (["--api-key", "a b"], "--api-key must be printable ASCII without spaces"),
    ],
)
def test_mistakes_are_one_line(
    refused: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], named: str
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert refused("top", *arguments).startswith(named)
