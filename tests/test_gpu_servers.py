"""Servers in the benchmark of GPUs: each part with a small model on a CPU, its flags, and the
tables of its reports.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main
from free_ports import free_port
from targets import exit_status

from tramontane.cluster.cli.main import app

TESTS = Path(__file__).parent
BENCH = TESTS / "bench"
REPORTS = [
    TESTS.parent / "docs" / "reports" / f"h100-2026-11-28-servers-{number}.json"
    for number in (1, 2)
]


@pytest.fixture
def gpu_server(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu_server

    return gpu_server


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import gpu_server_report

    return gpu_server_report


@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.serve
def test_servers_of_a_small_model_on_a_cpu(tmp_path: Path) -> None:
    """Two servers, of which a stage is killed under load; then their figures are in the table."""
    parts = ("serve-where", "serve-one", "serve-exact")
    flags = (
        "--small",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "out"),
        "--budget",
        "36000",
        "--parts",
        ",".join(parts),
    )
    done = subprocess.run(
        [sys.executable, str(BENCH / "gpu.py"), *flags], capture_output=True, text=True, check=False
    )
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    log = (tmp_path / "out" / "log.txt").read_text()
    assert {name: part["state"] for name, part in report.items()} == dict.fromkeys(parts, "ok"), (
        log[-4000:]
    )
    assert done.returncode == 0
    (kill,) = [row for row in report["serve-exact"]["rows"] if row["what"].startswith("kill -9")]
    assert (kill["incomplete"], kill["equal"], kill["processes_before"], kill["that_survived"]) == (
        0,
        4,
        2,
        1,
    )
    assert kill["pause_s"][1] > 0
    (*_, after) = report["serve-exact"]["rows"]
    assert (after["what"], after["equal"]) == ("tokens", 4)
    (first,) = [row for row in report["serve-one"]["rows"] if row["what"].startswith("first token")]
    for name in ("of_4", "of_32"):
        phases = first[f"phases_{name}"]
        router_ms = [sum(each) for each in zip(phases["queue"], phases["prefill"], strict=True)]
        assert len(router_ms) == 5
        assert all(
            0 < part <= whole + 0.2 for part, whole in zip(router_ms, first[name], strict=True)
        ), "of the client's time"
        assert all(
            0 < stages <= prefill
            for stages, prefill in zip(phases["stages"], phases["prefill"], strict=True)
        )
    loads = [row for row in report["serve-one"]["rows"] if "out_per_s" in row]
    assert [(row["streams"], row["failed"]) for row in loads] == [
        (n, 0) for n in (2, 1, 4, 4, 4, 4, 4)
    ]
    shown = subprocess.run(
        [sys.executable, str(BENCH / "gpu_report.py"), str(tmp_path / "out" / "report.json")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "| Mistral 7B | load, 4 streams | | " in shown
    assert "| two stages, --batch-invariant | pause, kill -9 of stage process 0 | | " in shown


@pytest.mark.nightly
def test_every_part_is_known_to_the_driver(gpu_server: ModuleType) -> None:
    import gpu

    assert gpu.SERVERS.keys() == {f"serve-{name}" for name in gpu_server.PARTS}
    assert not gpu.SERVERS.keys() & gpu.PARTS.keys(), "without --parts no server is started"


@pytest.mark.nightly
@pytest.mark.parametrize("small", [False, True])
def test_serve_takes_the_flags_of_every_part(
    gpu_server: ModuleType, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, ...]] = []

    @contextmanager
    def serving(_report: object, *flags: str) -> Iterator[None]:
        given.append(flags)
        raise InterruptedError
        yield

    monkeypatch.setattr(gpu_server, "serving", serving)
    monkeypatch.setattr(gpu_server, "checkpoint", lambda _report, name: Path("/models") / name)
    with_servers = gpu_server.PARTS.keys() - {"where", "latent", "correct"}
    for name in with_servers:
        with pytest.raises(InterruptedError):
            gpu_server.PARTS[name](gpu_server.Report(None, small, not small))
    assert len(given) == len(with_servers)
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    for flags in given:
        parsed = command.make_context("serve", list(flags)).params
        assert parsed["stages"] in (1, 2)
        assert str(parsed["model"]).startswith("/models/") == (
            small or "/models/" in " ".join(flags)
        )


@pytest.mark.parametrize(
    ("flags", "num_gpus", "is_on_gpu"),
    [
        (["one"], 1, True),
        (["one"], 0, None),
        (["one", "--small"], 0, False),
        (["one", "--small", "--device", "cpu"], 1, False),
        (["where"], 0, True),
    ],
)
def test_without_a_gpu_only_small_models_are_served(
    gpu_server: ModuleType,
    flags: list[str],
    num_gpus: int,
    is_on_gpu: bool | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The real ones would be computed by the CPU for hours. What finds a GPU can be asked
    anywhere.
    """
    ran: list[bool] = []
    monkeypatch.setattr(gpu_server, "num_visible_gpus", lambda: num_gpus)
    monkeypatch.setitem(gpu_server.PARTS, flags[0], lambda report: ran.append(report.is_on_gpu))
    monkeypatch.setattr(sys, "argv", ["gpu_server.py", *flags])
    if is_on_gpu is None:
        with pytest.raises(SystemExit) as ended:
            gpu_server.main()
        assert ended.value.code == 2
    else:
        assert gpu_server.main() == 0
    assert ran == ([] if is_on_gpu is None else [is_on_gpu])
    assert ("no GPU is available" in capsys.readouterr().err) is (
        num_gpus == 0 and flags[0] == "one"
    )


@pytest.mark.nightly
def test_a_row_that_does_not_hold_is_the_exit_status(
    gpu_server: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    report = gpu_server.Report(file, True, False)
    report.check("fine", 0)
    assert exit_status(report.targets) == 0
    report.check("kill", 2, incomplete=2)
    report.check("fine again", 0)
    assert exit_status(report.targets) == 1
    assert [row["holds"] for row in json.loads(file.read_text())] == [True, False, True]


@pytest.mark.nightly
def test_streams_that_fail_are_counted(gpu_server: ModuleType) -> None:
    """Nothing listens at this port: each stream says why, and none ends the others."""
    report = gpu_server.Report(None, True, False)
    report.url = f"http://127.0.0.1:{free_port()}"
    gpu_server.load(report, "load", 3)
    (row,) = report.rows
    assert (row["failed"], row["out_per_s"], row["token_ms"], row["holds"]) == (
        3,
        0.0,
        [None, None],
        False,
    )
    assert "ClientConnectorError" in row["errors"][0]


@pytest.mark.nightly
def test_a_server_that_does_not_start_is_an_error(gpu_server: ModuleType, tmp_path: Path) -> None:
    report = gpu_server.Report(None, True, False)
    with (
        pytest.raises(RuntimeError, match=r"serve has ended: .*missing does not exist"),
        gpu_server.serving(report, "--model", str(tmp_path / "missing")),
    ):
        pass


@pytest.mark.nightly
def test_figures_of_a_load(gpu_server: ModuleType) -> None:
    """Two streams of three tokens: 1, 1 and 4 s after their start, and 2, 2 and 6; a third one
    failed.
    """
    import gpu_server_load as load

    good = [
        load.Trace(0.0, [1.0, 1.0, 4.0], [5, 6, 7]),
        load.Trace(0.0, [2.0, 2.0, 6.0], [5, 6, 7]),
    ]
    bad = [load.Trace(0.0, [1.0], [5], "503"), load.Trace(0.0, [1.0], [5])]
    row = load.load_row(load.Load(4, 10, 3), [*good, *bad], 6.0)
    assert (row["failed"], row["errors"]) == (2, ["503"]), "the last one ended early"
    assert (row["out_per_s"], row["all_per_s"]) == (1.0, round(26 / 6, 1))
    assert row["first_ms"] == [2000, 2000]
    assert row["token_ms"] == [2000, 2000], "1.5 and 2 s"
    assert row["event_gap_ms"] == [3000, 4000, 4000], "3 and 4 s; two tokens in one event are none"


@pytest.mark.nightly
@pytest.mark.parametrize(("since", "longest"), [(0.0, 5.0), (11.5, 5.0), (14.0, 3.0), (17.0, 0.0)])
def test_the_longest_gap_after_a_fault(
    gpu_server: ModuleType, since: float, longest: float
) -> None:
    import gpu_server_load as load

    assert load.Trace(10.0, [1.0, 2.0, 7.0], [1, 2, 3]).longest_gap(since) == longest


@pytest.mark.nightly
def test_where_texts_part(gpu_server: ModuleType) -> None:
    import gpu_server_load as load

    row = load.compared([[1, 2, 3], [1, 2], [4], [7, 8]], [[1, 2, 3], [1, 3], [], [7]])
    assert row == {"equal": 1, "texts": 4, "first_difference": [0, 1, 1]}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("found", "must_be_equal", "holds"),
    [
        ([[1, 2], [3, 4]], True, True),
        ([[1, 2], [3, 5]], False, True),
        ([[1, 2], [3, 5]], True, False),
        ([[1, 2], [3]], False, False),
    ],
)
def test_a_kill_that_loses_a_token_or_changes_one_is_an_error(
    gpu_server: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    found: list[list[int]],
    must_be_equal: bool,
    holds: bool,
) -> None:
    import gpu_server_load as load

    answers = iter([[[1, 2], [3, 4]], found])
    monkeypatch.setattr(gpu_server, "stage_pids", lambda _: [1, 2])
    monkeypatch.setattr(gpu_server, "gpu_memory", lambda: None)
    monkeypatch.setattr(
        gpu_server,
        "run_streams",
        lambda *_: [load.Trace(0.0, [1.0] * len(ids), ids) for ids in next(answers)],
    )
    report = gpu_server.Report(None, True, False)
    report.of_size = lambda _real, _small: 2
    gpu_server.kill_under_load(report, None, 0, must_be_equal)
    (row,) = report.rows
    assert (row["holds"], row["that_survived"], row["streams"]) == (holds, 2, 2)
    assert row["incomplete"] == sum(len(ids) != 2 for ids in found)


@pytest.mark.nightly
def test_the_table_of_the_committed_reports(table: ModuleType) -> None:
    first, second = (json.loads(path.read_text()) for path in REPORTS)
    lines = [*table.server_table([first, second], [first])]
    assert {line.count("|") for line in lines} == {8}
    begins = (
        "| Mistral 7B | ready | 47.4 s | 47.4 s | at most 30 s | NO | --model mistral-7b-v0.1 ",
        (
            "| Mistral 7B | load, 64 streams | 2,280 out/s | 2,280 out/s | at least 3,200 out/s |"
            " NO | 19.4 ms a token; first "
        ),
        (
            "| two stages on the GPU | of the speed of one stage, 64 streams | 0.921 | 0.921 | at"
            " least 0.85 | yes | 2,099 over "
        ),
        (
            "| two stages, --batch-invariant | of the speed without --batch-invariant, 64 streams |"
            " | 0.528 | at least 0.75 | NO | "
        ),
        (
            "| two stages, --batch-invariant | pause, kill -9 of stage process 0 | | 8.6 s | at"
            " most 5 s | NO | 0 of 16 incomplete, 16 texts equal, 1 survived |"
        ),
        (
            "| Mixtral 8x7B, FP8 | gap between events over a token, 64 streams | | 3.95 | at most"
            " 1.2 | NO | 162.94 over 41.27 ms |"
        ),
        "| two layers of Small 4 | loaded | | 99.4 s | at most 5 s | NO | |",
    )
    for begin in begins:
        assert any(line.startswith(begin) for line in lines), begin


@pytest.mark.nightly
def test_sampled_and_greedy_with_the_same_prompts(table: ModuleType) -> None:
    def row(what: str, rate: float, **more: Any) -> dict[str, Any]:
        times = {"first_ms": [1.0, 2.0], "token_ms": [1.0, 1.0], "event_gap_ms": [1.0, 1.2, 3.0]}
        return (
            {"what": what, "streams": 64, "shape": [1024, 128], "failed": 0, "out_per_s": rate}
            | times
            | more
        )

    rows = [
        row("load, cached prompts", 4000.0),
        row("load, cached prompts, sampled", 3600.0),
        row("load", 9.0, failed=2),
    ]
    first: dict[str, Any] = {
        "what": "first token, alone, ms",
        "of_16": [9.0, 4.0],
        "of_256": [9.0, None],
        "of_1024": [40.0, 46.5],
    }
    first["phases_of_1024"] = {"ingress": [9.0, 3.0], "stages": [31.0, 30.0]}
    fault = {"what": "kill -9 of stage process 1", "incomplete": 1, "streams": 16, "equal": 14}
    fault |= {"that_survived": 3, "pause_s": [2.0, 4.5]}
    equal = {"what": "tokens", "of": "two stages", "equal": 15, "texts": 16}
    found = [*table.part_figures([*rows, first, fault, equal])]
    figures = {each.name: each for each in found}
    assert [name for name in figures if "over greedy" in name or "alone" in name] == [
        "first token of 16, alone",
        "first token of 1024, alone",
        "sampled over greedy, cached prompts",
    ], "none of what is missing, and one ratio"
    assert figures["pause, kill -9 of stage process 1"][1:] == (
        4.5,
        "s",
        "1 of 16 incomplete, 14 texts equal, 3 survived",
    )
    assert figures["equal texts, two stages"][1:] == (15, "", "of 16")
    assert [each.name for each in found if each.name.startswith("gap")] == [
        "gap between events over a token, 64 streams"
    ]
    assert figures["sampled over greedy, cached prompts"].value == 0.9
    assert figures["first token of 1024, alone"][1:] == (
        46.5,
        "ms",
        "in order: [40.0, 46.5]; ingress 3.0; stages 30.0",
    )
    assert figures["gap between events over a token, 64 streams"].value == 1.2
    assert figures["load, 64 streams"].detail.startswith("2 FAILED; ")
    assert [*table.server_table([{"smoke": {"rows": None}}])] == []
