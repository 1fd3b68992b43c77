"""The benchmark of GPUs, shrunk to a CPU: every row is there, and a machine without a GPU is told so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent / "bench" / "gpu.py"
GROUPS = "logits,masks,replay,mistral,mixtral,rolling,transformers,mistral-inference,quantized,pages"


def _run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, BENCH, *flags], capture_output=True, text=True, timeout=500, check=False)


def test_every_row_of_a_shrunk_model(tmp_path: Path) -> None:
    done = _run("--small", "--device", "cpu", "--only", GROUPS, "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 1, done.stderr  # on a CPU no kernel is found
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    checks = {name: row["holds"] for name, row in rows.items() if row["wanted"].startswith("<")}
    masks = {name for name in checks if name.startswith("mask")}
    assert len(masks) == 4 * 3
    assert {name for name, holds in checks.items() if holds is not True} == masks, "kernels are for GPUs only"
    titles = [f"logits, {kind}: 16 bits against float32 on the CPU" for kind in ("dense, prefill", "dense, decode")]
    assert checks.keys() >= {*titles, "recorded steps: logits of them against computed ones, at worst"}
    unmeasured = {row["name"]: row["detail"] for row in rows.values() if row["figure"] == "not measured"}
    assert unmeasured == {"mistral-inference": "mistral_inference is not installed here"}
    for name in (
        "Mistral 7B, prefill of 16 x 2k",
        "Mistral 7B, decode, batch 64, context 1k",
        "times as fast as transformers, batch 32",
    ):
        assert rows[name]["wanted"].startswith("at least")
        assert name in done.stdout
    assert "no figures of these" in done.stdout


def test_a_failed_check_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(BENCH.parent))
    import gpu

    monkeypatch.setitem(gpu.CHECKS, "replay", lambda _size: iter([gpu.Check("tokens that differ", 30.0, 28.0)]))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--small", "--device", "cpu", "--only", "replay"])
    assert gpu.main() == 1
    assert "NO" in capsys.readouterr().out


def test_what_it_says_without_a_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = _run()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == "there is no GPU here; --small --device cpu tries the program"


@pytest.mark.parametrize(("length", "window", "pairs"), [(5, 3, 12), (5, None, 15), (3, 9, 6)])
def test_pairs_of_queries_and_keys(monkeypatch: pytest.MonkeyPatch, length: int, window: int | None, pairs: int) -> None:
    monkeypatch.syspath_prepend(str(BENCH.parent))
    import gpu_speed

    assert gpu_speed._visible_pairs(length, window) == pairs


def test_prompts_are_cut_where_a_micro_batch_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH.parent))
    import gpu_stage

    lives = [gpu_stage.Life(i, (0,) * 5, gpu_stage.GREEDY, max_len=9) for i in range(2)]
    cut = [[(life.seq_id, start, n) for life, start, n in batch] for batch in gpu_stage.packed(lives, 4)]
    assert cut == [[(0, 0, 4)], [(0, 4, 1), (1, 0, 3)], [(1, 3, 2)]]
