"""Measurements: how tokens are spread over experts, summed, written, read, shown; busy times of
stages, read.
"""

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tramontane.cluster.cli import experts as expert_watch
from tramontane.cluster.cli import main as cli
from tramontane.cluster.cli.experts import LoadWindow, fetch_load, render, totals
from tramontane.cluster.config.measurements import (
    MeasuredLoad,
    StageTime,
    load_as_data,
    parse_stage_times_option,
    read_load,
)
from tramontane.cluster.console.charts import (
    CELL,
    busiest_summary,
    cell_style,
    heat_legend,
    heat_map,
)
from tramontane.proto.errors import ConfigError, PipelineUnavailableError
from tramontane.router.openai.response_models import ExpertTokens

LOAD = ((10, 20, 30, 40), (5, 5, 5, 5), (0, 0, 0, 0))


def _answer(load: MeasuredLoad) -> str:
    tokens = [list(layer) for layer in load.tokens]
    return ExpertTokens(tokens_per_expert=tokens, pipelines=load.num_pipelines).model_dump_json()


# ---- the numbers and their file


def test_pipelines_are_added_up() -> None:
    assert MeasuredLoad.summed([((1, 2), (3, 0)), ((1, 0), (0, 1))]) == MeasuredLoad(
        ((2, 2), (3, 1)), 2
    )
    assert MeasuredLoad.summed([]) == MeasuredLoad((), 0)
    assert MeasuredLoad.summed([(), ()]) == MeasuredLoad((), 2)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    for text in (json.dumps(load_as_data(LOAD)), _answer(MeasuredLoad(LOAD, 3))):
        file.write_text(text)
        assert read_load(file) == LOAD
    assert MeasuredLoad.from_data(json.loads(_answer(MeasuredLoad(LOAD, 3)))) == MeasuredLoad(
        LOAD, 3
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[]", "it has no tokens_per_expert"),
        ("{}", "it has no tokens_per_expert"),
        ('{"tokens_per_expert": [1, 2]}', "it has no tokens_per_expert"),
        (
            '{"tokens_per_expert": [[1, 2.5]]}',
            "tokens_per_expert must be a list of whole numbers for each layer",
        ),
        ('{"tokens_per_expert": [[1, -2]]}', "must be a list of whole numbers"),
        ('{"tokens_per_expert": ["ab"]}', "must be a list of whole numbers"),
    ],
)
def test_a_file_that_holds_no_load_is_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "load.json").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(named)) as refused:
        read_load(tmp_path / "load.json")
    assert str(tmp_path / "load.json") in str(refused.value)
    assert "\n" not in str(refused.value)


# ---- busy times of stages


def _stages(*stages: tuple[Any, Any, Any], devices: Any = "LL", speeds: Any = (None, None)) -> str:
    keys = ("layers", "busy_share", "device", "speed")
    rows = zip(stages, devices, speeds, strict=False)
    return json.dumps(
        {"stages": [dict(zip(keys, (span, busy, *on), strict=True)) for (*span, busy), *on in rows]}
    )


def _on(devices: Sequence[Any], speeds: Sequence[Any]) -> str:
    """Two stages of three layers, busy for 25 % and 75 % of the time."""
    return _stages((0, 2, 0.25), (3, 5, 0.75), devices=devices, speeds=speeds)


def test_busy_times_are_read_from_what_a_benchmark_prints(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(_stages((0, 8, 0.9), (9, 15, 1)))
    times = (StageTime(0, 8, 0.9), StageTime(9, 15, 1))
    assert parse_stage_times_option(str(file)) == parse_stage_times_option(file) == times
    assert parse_stage_times_option(times) is times


@pytest.mark.parametrize(
    ("devices", "speeds", "busy"),
    [
        ("LL", (None, None), (0.25, 0.75)),
        ("LL", (4, 4), (1, 3)),  # the same ratio
        ("HL", (3, 1), (0.75, 0.75)),
        ("LL", (3, 1), (0.75, 0.75)),  # as --gpu-speed says, although the names are the same
    ],
)
def test_busy_times_are_those_of_like_devices(
    tmp_path: Path, devices: str, speeds: tuple[Any, Any], busy: tuple[float, float]
) -> None:
    (tmp_path / "bench.json").write_text(_on(devices, speeds))
    assert parse_stage_times_option(tmp_path / "bench.json") == (
        StageTime(0, 2, busy[0]),
        StageTime(3, 5, busy[1]),
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "is not what tramontane bench --json writes: it is not JSON"),
        ("[]", "it has no stages"),
        ('{"stages": null}', "it has no stages"),
        ('{"stages": [{"layers": [0, 1]}]}', "it has no stages"),
        ('{"stages": []}', "stages must have two stages or more"),
        (
            _stages((0, 15, 0.9)),
            "stages must have two stages or more: with one, the output head cannot be separated",
        ),
        (
            _stages((0, 7, 0.9), (9, 15, 0.9)),
            "the first and the last layer of each stage, without gaps",
        ),
        (_stages((0, 7, 0.9), (8, 7, 0.9)), "without gaps"),
        (_stages((1, 7, 0.9), (8, 9, 0.9)), "without gaps"),
        (_stages((0, 7.0, 0.9), (8, 9, 0.9)), "without gaps"),
        (_stages((0, 7, 0.0), (8, 9, 0.9)), "a busy_share above 0 for each stage"),
        (_stages((0, 7, True), (8, 9, 0.9)), "a busy_share above 0"),
        (_stages((0, 7, 0.5), (8, 9, float("inf"))), "a busy_share above 0"),
        (
            _on(["A100", "L4"], (None, None)),
            (
                "stages ran on unlike devices (A100; L4) whose speeds are not known; run tramontane"
                " bench --json again with --gpu-speed, or on devices of one kind"
            ),
        ),
        (_on("HL", (3, None)), "stages must have a speed above 0 for each stage, or none"),
        (_on("HL", (3, 0)), "a speed above 0"),
        (_on("HL", (3, True)), "a speed above 0"),
        (_on("LL", (3, 1.5)), "a speed above 0"),
        (_on(("", "L"), (None, None)), "stages have no device, by which their times are compared"),
        (_on((5, "L"), (None, None)), "have no device"),
        (
            # of an earlier version
            json.dumps({"stages": [{"layers": [n, n], "busy_share": 0.5} for n in (0, 1)]}),
            (
                "stages have no device, by which their times are compared; run tramontane bench"
                " --json again"
            ),
        ),
    ],
)
def test_a_file_without_busy_times_is_named(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(named)) as refused:
        parse_stage_times_option(tmp_path / "bench.json")
    assert str(refused.value).startswith(f"--stage-times {tmp_path / 'bench.json'}")


# ---- requests to a server


def _client(status: int, body: str) -> httpx.Client:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/experts"
        return httpx.Response(status, text=body)

    return httpx.Client(transport=httpx.MockTransport(answer), base_url="http://ingress")


def _error(code: str | None, message: str = "sorry") -> str:
    return json.dumps(
        {
            "error": {
                "message": message,
                "type": "invalid_request_error",
                "param": None,
                "code": code,
            }
        }
    )


def test_the_load_of_a_server_is_requested() -> None:
    assert fetch_load(_client(200, _answer(MeasuredLoad(LOAD, 2)))) == MeasuredLoad(LOAD, 2)


@pytest.mark.parametrize(
    ("status", "body", "named"),
    [
        (404, _error("no_experts"), "serves a model that has no experts"),
        (404, _error(None), "is it Tramontane?"),
        (404, "<html>", "answers GET /experts with HTTP 404"),
        (200, "{}", "is it Tramontane?"),
        (200, "[" * 100_000, "is it Tramontane?"),
        (200, '"text"', "is it Tramontane?"),
        (200, '{"tokens_per_expert": [], "pipelines": 1}', "is it Tramontane?"),
        (200, '{"tokens_per_expert": [[]], "pipelines": 1}', "is it Tramontane?"),
        (200, '{"tokens_per_expert": [[1], [1, 2]], "pipelines": 1}', "is it Tramontane?"),
        (200, '{"tokens_per_expert": [[1]], "pipelines": Infinity}', "is it Tramontane?"),
        (500, "[]", "answers GET /experts with HTTP 500"),
    ],
)
def test_a_server_without_load_is_named(status: int, body: str, named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)) as refused:
        fetch_load(_client(status, body))
    assert "--url http://ingress" in str(refused.value)


def test_a_pipeline_that_is_down_is_no_mistake_of_the_users() -> None:
    with pytest.raises(
        PipelineUnavailableError, match="http://ingress: no pipeline can tell; try again soon"
    ):
        fetch_load(_client(503, _error("unavailable", "no pipeline can tell")))


# ---- the picture


def _plain(*shown: Any, width: int = 80) -> list[str]:  # whatever rich can print
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(*shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_each_cell_is_a_share_of_its_layer() -> None:
    """Legible without color: the number, and a mark at the most."""
    assert _plain(heat_map(LOAD, 80)) == [
        "layer     0     1     2     3 ",
        "    0  10.0  20.0  30.0  40.0*",
        "    1  25.0* 25.0  25.0  25.0 ",
        "    2     -     -     -     - ",
    ]
    assert busiest_summary(LOAD) == "busiest: expert 3 of layer 0, 1.60 times its layer's mean"
    assert busiest_summary(((0, 0),)) == "no expert has received a token"


def test_each_cell_is_shaded_by_its_layers_mean() -> None:
    shades = {
        (span.start // CELL - 1, str(span.style))
        for span in heat_map(((10, 20, 30, 40),), 80).split("\n")[1].spans
    }
    assert shades == {
        (0, cell_style(0.4)),
        (1, cell_style(0.8)),
        (2, cell_style(1.2)),
        (3, cell_style(1.6)),
    }
    assert len({cell_style(times) for times in (0.4, 0.7, 1.0, 1.4, 1.9, 5.0)}) == 6
    assert [str(span.style) for span in heat_legend().spans] == [
        cell_style(times) for times in (0.4, 0.7, 1.0, 1.4, 1.9, 5.0)
    ]


@given(st.integers(1, 200), st.integers(1, 5), st.integers(12, 200))
def test_many_experts_do_not_break_the_layout(
    num_experts: int, num_layers: int, width: int
) -> None:
    load = ((10**9,) + (0,) * (num_experts - 1),) * num_layers
    lines = heat_map(load, width).plain.split("\n")
    assert max(map(len, lines)) <= width
    heads = [line.split()[1:] for line in lines if line.startswith("layer")]
    assert [int(expert) for head in heads for expert in head] == list(range(num_experts)), (
        "each once"
    )
    assert max(map(len, heads)) - min(map(len, heads)) < len(heads), (
        "blocks of about the same width"
    )
    assert sum(line.count("100.0*") for line in lines) == num_layers


def test_64_experts_fit_in_80_columns() -> None:
    lines = _plain(totals(MeasuredLoad((tuple(range(64)),) * 3, 2), 80))
    assert lines[0] == "since loading, 2 pipelines: % of each layer's tokens, * its busiest"
    assert len(lines) == 6 * (1 + 3) + 5 + 3, (
        "six blocks with empty lines between them, and three lines around: none is wrapped"
    )


# ---- over time


def _grown(times: int) -> MeasuredLoad:
    return MeasuredLoad(((10 * times, times), (0, 3 * times)), 1)


def test_recent_is_what_was_added_within_the_span() -> None:
    recent = LoadWindow()
    recent.add(100.0, _grown(1))
    assert (recent.span_s, recent.tokens) == (0.0, ((0, 0), (0, 0)))
    for second in range(1, 31):
        recent.add(100.0 + second, _grown(1 + second))
    assert (recent.span_s, recent.tokens) == (10.0, ((100, 10), (0, 30)))


@pytest.mark.parametrize(
    "new", [_grown(4), MeasuredLoad(_grown(6).tokens, 2), MeasuredLoad(((9, 9, 9),) * 2, 1)]
)
def test_recent_begins_anew_where_totals_do(new: MeasuredLoad) -> None:
    """A stage was loaded again, or a pipeline came or went: what lies between is no work."""
    recent = LoadWindow()
    recent.add(0.0, _grown(1))
    recent.add(1.0, _grown(5))
    recent.add(2.0, new)
    assert recent.span_s == 0.0
    assert sum(map(sum, recent.tokens)) == 0


def test_a_frame_says_what_it_shows() -> None:
    looks = [(0.0, _grown(100)), (2.0, _grown(300)), (3.0, None), (4.0, _grown(301))]
    first, second, third, fourth = (_plain(frame) for frame in render(looks, 80))
    assert first[0].startswith("the last 0 s: %")
    assert second[0].startswith("the last 2 s: %")
    assert (
        second.index("since loading, 1 pipeline: % of each layer's tokens, * its busiest")
        == len(second) // 2
    )
    assert third == ["no pipeline can report its load now; this is the last report", *second]
    assert fourth[0].startswith("the last 4 s: %")


# ---- the command


def _run(monkeypatch: pytest.MonkeyPatch, client: httpx.Client, *arguments: str) -> None:
    monkeypatch.setattr(expert_watch, "make_client", lambda _url, _headers: client)
    assert cli.app(["experts", *arguments], standalone_mode=False) is None, (
        "another answer is an exit code"
    )


def test_json_is_the_file_that_plans_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _run(monkeypatch, _client(200, _answer(MeasuredLoad(LOAD, 2))), "--json")
    (tmp_path / "load.json").write_text(capsys.readouterr().out)
    assert json.loads((tmp_path / "load.json").read_text()) == {
        "tokens_per_expert": [list(row) for row in LOAD]
    }
    assert read_load(tmp_path / "load.json") == LOAD


def test_the_picture_goes_to_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(monkeypatch, _client(200, _answer(MeasuredLoad(LOAD, 2))))
    assert "    0  10.0  20.0  30.0  40.0*" in capsys.readouterr().out


def test_watching_ends_when_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a complaint; and a pipeline that is down for a while does not end it."""
    requested = iter([(200, _answer(_grown(n))) for n in (1, 2)] + [(503, _error("unavailable"))])

    def answer(_request: httpx.Request) -> httpx.Response:
        try:
            status, body = next(requested)
        except StopIteration:
            raise KeyboardInterrupt from None
        return httpx.Response(status, text=body)

    monkeypatch.setattr(expert_watch, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # of this process, which continues
    _run(
        monkeypatch,
        httpx.Client(transport=httpx.MockTransport(answer), base_url="http://ingress"),
        "--watch",
    )
    assert capsys.readouterr().out.count("since loading") == 3, (
        "two looks, and the last one once more"
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (
            ["--url", "localhost:8000"],
            "--url is 'localhost:8000'; it must begin with http:// or https://",
        ),
        (["--json", "--watch"], "--watch updates a terminal, so --json cannot be used with it"),
    ],
)
def test_mistakes_are_one_line(
    refused: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], named: str
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert refused("experts", *arguments).startswith(named)
