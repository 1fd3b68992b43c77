"""Tables of a GPU's reports: of the committed one, and of several."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.nightly

TESTS = Path(__file__).parent
COMMITTED = TESTS.parent / "docs" / "reports" / "h200-2026-11-26-1.json"


@pytest.fixture
def gpu_report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TESTS / "bench"))
    import gpu_report

    return gpu_report


def _part(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"state": "ok", "seconds": 1.0, "rows": list(rows), "tail": ""}


def _row(name: str, figure: str, holds: bool | None = None, detail: str = "") -> dict[str, Any]:
    return {
        "name": name,
        "figure": figure,
        "wanted": "" if holds is None else "at least 75 %",
        "holds": holds,
        "detail": detail,
    }


def _printed(
    program: ModuleType,
    paths: Sequence[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> list[str]:
    monkeypatch.setattr("sys.argv", ["gpu_report.py", *map(str, paths)])
    assert program.main() == 0
    return capsys.readouterr().out.splitlines()


def test_the_committed_report(
    gpu_report: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _printed(gpu_report, [COMMITTED], monkeypatch, capsys)
    report = json.loads(COMMITTED.read_text())
    named = [
        row["name"] for part in report.values() for row in part["rows"] or [] if "figure" in row
    ]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2 : lines.index("")]] == named
    batch_1 = (
        "| Mistral 7B, decode, batch 1, context 1k | 64% of the memory wall | at least 75 % | NO |"
        " 5.37 ms a step, "
    )
    assert any(line.startswith(batch_1) for line in lines)
    assert (
        "| mask: prefill, window None | 0.0021 | < 0.02 | yes | worst: cutlass; 2 tried |" in lines
    )
    assert "| copy | 4.16 TB/s | | | bytes read and written |" in lines
    assert "| experts | 16 rows of 8 experts | row by row | 851 | 3.31 TB/s |" in lines
    assert "| experts | 32 rows of 8 experts | grouped | 1038 | 2.72 TB/s |" in lines
    assert "| prefill | 8192 tokens, window 4096 | flash 2 | 1504 | 274 TFLOP/s |" in lines
    assert sum(line.startswith("| linear |") for line in lines) == 3 * 5
    assert {line.count("|") for line in lines if line} == {6}


def test_later_rows_replace_earlier_ones(
    gpu_report: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # the last one is no product
    times = (("grouped", 9.0), ("few: both", 8.0), ("few: route", 1.0))
    experts = [
        {"what": what, "rows": 2, "experts": 2, "us": us, "tb_per_s": 1.0} for what, us in times
    ]
    reports = [
        {
            "mistral": _part(_row("a", "60%", False), _row("b", "1", None, "x | y\nz")),
            "experts": _part(*experts),
            "masks": _part() | {"rows": None},
        },
        {
            "mistral": _part(_row("c", "3"), _row("a", "80%", True)),
            "smoke": _part({"name": "CUDA", "holds": True}),
        },
    ]
    paths = [tmp_path / f"{number}.json" for number in range(len(reports))]
    for path, report in zip(paths, reports, strict=True):
        path.write_text(json.dumps(report))
    lines = _printed(gpu_report, paths, monkeypatch, capsys)
    assert lines[2:5] == [
        "| a | 80% | at least 75 % | yes | |",
        "| b | 1 | | | x / y z |",
        "| c | 3 | | | |",
    ]
    assert lines[-1] == "| experts | 2 rows of 2 experts | few: both | 8 | 1 TB/s |", (
        "those of a report that has none are kept"
    )
    again = _printed(gpu_report, paths[::-1], monkeypatch, capsys)
    assert "| a | 60% | at least 75 % | NO | |" in again


def test_sizes_that_a_kernel_refuses_are_not_the_best(gpu_report: ModuleType) -> None:
    refused = {"what": "flash 3", "tokens": 9, "window": None, "error": "no"}
    table = [
        *gpu_report.kernels(
            [{"prefill": _part(refused, refused | {"what": "flash 2", "us": 7.0, "tflops": 2.0})}]
        )
    ]
    assert table[2:] == ["| prefill | 9 tokens, window None | flash 2 | 7 | 2 TFLOP/s |"]


def test_the_fastest_decode_kernel_of_a_case(gpu_report: ModuleType) -> None:
    case = {
        "what": "split-K",
        "batch": 4,
        "keys": 99,
        "page": 16,
        "block": 64,
        "warps": 4,
        "stages": 2,
        "tb_per_s": 3.0,
    }
    rows = [case | {"parts": parts, "us": us} for parts, us in ((4, 9.0), (8, 7.0))]
    table = [*gpu_report.kernels([{"split-k": _part(*rows)}])]
    sizes = "pages of 16, blocks of 64, 8 parts, 4 warps, 2 stages"
    assert table[2:] == [f"| split-k | 4 sequences of 99 keys | {sizes} | 7 | 3 TB/s |"]
