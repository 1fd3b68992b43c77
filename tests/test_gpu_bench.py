"""The benchmark of GPUs with small models on a CPU: all rows exist, and a missing GPU is an
error.
"""

import itertools
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.nightly

BENCH = Path(__file__).parent / "bench" / "gpu_rows.py"
GROUPS = (
    "logits,masks,replay,pieces,mistral,mixtral,rolling,transformers,mistral-inference,quantized,pages,"
    "invariance,invariance-cost"
)


def _run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, BENCH, *flags], capture_output=True, text=True, timeout=500, check=False
    )


def test_every_row_of_a_shrunk_model(tmp_path: Path) -> None:
    done = _run(
        "--small", "--device", "cpu", "--only", GROUPS, "--json", str(tmp_path / "rows.json")
    )
    assert done.returncode == 1, done.stderr  # on a CPU no kernel is found
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    checks = {name: row["holds"] for name, row in rows.items() if row["wanted"].startswith("<")}
    masks = {name for name in checks if name.startswith("mask")}
    assert len(masks) == 4 * 3
    assert {name for name, holds in checks.items() if holds is not True} == masks, (
        "kernels are for GPUs only"
    )
    titles = [
        f"logits, {kind}: 16 bits against float32 on the CPU"
        for kind in ("dense, prefill", "dense, decode")
    ]
    assert checks.keys() >= {*titles, "CUDA graphs: logits against eager steps, at worst"}
    assert checks.keys() >= {
        f"batch invariance, {kind}: steps with other logits in company"
        for kind in ("dense", "experts")
    }
    unmeasured = {
        row["name"]: row["detail"] for row in rows.values() if row["figure"] == "not measured"
    }
    assert unmeasured == {"mistral-inference": "mistral_inference is not installed"}
    for name in (
        "Mistral 7B, prefill of 16 x 2k",
        "Mistral 7B, decode, batch 64, context 1k",
        "times as fast as transformers, batch 32",
    ):
        assert rows[name]["wanted"].startswith("at least")
        assert name in done.stdout
    assert (
        "--batch-invariant: speed of Mixtral 8x7B, decode, batch 64, context 1024, over that"
        " without" in rows
    )
    assert "these figures do not describe the real ones" in done.stdout


def test_a_failed_check_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCH.parent))
    import gpu_rows

    monkeypatch.setitem(
        gpu_rows.CHECKS,
        "replay",
        lambda _size: iter([gpu_rows.Check("tokens that differ", 30.0, 28.0)]),
    )
    monkeypatch.setattr(
        sys, "argv", ["gpu_rows.py", "--small", "--device", "cpu", "--only", "replay"]
    )
    assert gpu_rows.main() == 1
    assert "NO" in capsys.readouterr().out


def test_a_missing_gpu_is_an_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = _run()
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.splitlines()[-1]
        == "no GPU is available; --small --device cpu tries the program on a CPU"
    )


@pytest.mark.parametrize(
    ("check_of", "logits_of"),
    [("replay_check", "forced_logits"), ("pieces_check", "prompt_logits")],
)
def test_a_nan_fails_the_check_in_any_step(
    check_of: str, logits_of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first replayed step, a later one, or none has logits that are NaN."""
    monkeypatch.syspath_prepend(str(BENCH.parent))
    import gpu_checks

    steps, computed = [torch.ones(3), torch.ones(3)], [torch.ones(3), torch.ones(3)]
    backend = SimpleNamespace(graph_capture=None, piecewise_capture=None)
    runner = SimpleNamespace(worker=SimpleNamespace(graphs=None, pieces=None, backend=backend))
    monkeypatch.setattr(gpu_checks, "running", lambda *_, **__: nullcontext(runner))
    for wrong in (None, 0, 1):
        replayed = [
            torch.full((3,), torch.nan) if step == wrong else logits
            for step, logits in enumerate(steps)
        ]
        results = itertools.cycle([replayed, computed])
        monkeypatch.setattr(gpu_checks, logits_of, lambda *_, results=results: next(results))
        (check,) = getattr(gpu_checks, check_of)("cpu", True)
        assert check.holds == (wrong is None)


def test_rows_with_nan_count_as_different(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH.parent))
    import gpu_checks

    wrong_SV = torch.tensor([[1.0], [1.0], [1.0], [torch.nan], [torch.nan]])
    logits = {"cuda": (wrong_SV, wrong_SV), "cpu": (torch.ones(5, 1), torch.ones(5, 1))}
    monkeypatch.setattr(
        gpu_checks, "_logits", lambda _args, device, _dtype, _drawn_on: logits[device]
    )
    parted = [
        check.figure for check in gpu_checks.logits_check("cuda", True) if "differ" in check.name
    ]
    assert parted == [pytest.approx(2 / 5)] * 2


@pytest.mark.parametrize(("code", "errors"), [(0, 0), (1, 0), (0, 3), (1, 3)])
def test_checks_that_fail_under_the_sanitizer_fail_it(
    monkeypatch: pytest.MonkeyPatch, code: int, errors: int
) -> None:
    monkeypatch.syspath_prepend(str(BENCH.parent))
    import gpu_checks

    summary = f"========= ERROR SUMMARY: {errors} errors"
    monkeypatch.setattr(gpu_checks.shutil, "which", lambda _name: "/usr/bin/compute-sanitizer")
    monkeypatch.setattr(
        gpu_checks.subprocess,
        "run",
        lambda command, **_: subprocess.CompletedProcess(command, code, stdout=summary, stderr=""),
    )
    checks = gpu_checks.sanitizer_check()
    assert next(checks).holds == (errors == 0)
    if code:
        with pytest.raises(
            RuntimeError, match=r"gpu_rows\.py exited with status 1 under compute-sanitizer"
        ):
            next(checks)
    else:
        assert not [*checks]


def test_the_share_is_of_the_bytes_of_the_middle_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys grow by 2 bytes per step: after 6 + 40 steps 40 are timed, from 92 to 172 bytes. With 48
    bytes of weights, 10 bytes per second and 100 s per step the share is (48 + 132) / 10 / 100.
    """
    monkeypatch.syspath_prepend(str(BENCH.parent))
    import gpu_speed
    from gpu_stage import StepTimes

    class Runner:
        sequences, worker = (0,), SimpleNamespace(model=SimpleNamespace(expert_load={}))
        plan, room = SimpleNamespace(args=SimpleNamespace(moe=None)), 1000
        num_steps = 0

        def decode(self, num_steps: int, *, ahead: bool = False) -> StepTimes:
            self.num_steps += num_steps
            return StepTimes((100.0 if ahead else 120.0,) * num_steps, (50.0,) * num_steps)

        def live_bytes(self) -> float:
            return 2.0 * self.num_steps

    monkeypatch.setattr(gpu_speed, "weight_bytes_read", lambda _runner, _experts: 48.0)
    row = gpu_speed._decode_row("a row", Runner(), gpu_speed.Walls(10.0, 1.0), None)  # type: ignore[arg-type]
    assert row.share == pytest.approx(0.18)
    assert (
        row.detail
        == "100000.00 ms a step, 50000.00 of it on the device; 0 tokens/s; 120000.00 ms where"
        " tokens are waited for"
    )


def test_steps_that_are_launched_ahead_sample_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCH.parent))
    import gpu_stage

    last, args = [], gpu_stage.shrunk(gpu_stage.MISTRAL_7B)
    with gpu_stage.running(args, "cpu", max_num_seqs=3, max_len=64) as runner:
        for ahead in (False, True):
            runner.prefill(3, 20, 32)
            assert [len(runner.decode(n, ahead=ahead).whole) for n in (1, 5, 4)] == [1, 5, 4]
            last.append(runner.last)
    assert last[0] == last[1]
    assert len(set(last[0].values())) > 1


def test_products_and_prefills_are_timed_by_their_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds warm up, then 3, 1 and 8 s by this clock; prefills of 2, 5 and 1 s."""
    monkeypatch.syspath_prepend(str(BENCH.parent))
    import gpu_speed

    ticks = itertools.accumulate([0, 50, 1, 60, 1, 70, 1, 3, 1, 1, 1, 8])
    assert gpu_speed._seconds(lambda: None, "cpu", rounds=3, clock=lambda: next(ticks)) == 3
    seconds = iter((2.0, 5.0, 1.0))
    model = torch.nn.Linear(1, 1)
    runner = SimpleNamespace(
        prefill=lambda *_: next(seconds),
        plan=SimpleNamespace(args=SimpleNamespace(windows=(None,), n_heads=1, head_dim=1)),
        worker=SimpleNamespace(model=model),
    )
    row = gpu_speed._prefill_row(gpu_speed.Size("cpu", True), runner, gpu_speed.Walls(1.0, 1.0))  # type: ignore[arg-type]
    assert row.detail.startswith("2.00 s, ")


@pytest.mark.parametrize(
    ("free_gib", "num_bytes"), [(130, 2**32), (8, 2**32), (7.9, 2**31), (6, 2**31), (2, 2**30)]
)
def test_the_wall_is_of_copies_that_hide_the_host(
    monkeypatch: pytest.MonkeyPatch, free_gib: float, num_bytes: int
) -> None:
    """Unless two buffers of that size do not fit."""
    monkeypatch.syspath_prepend(str(BENCH.parent))
    import gpu_speed

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (int(free_gib * 2**30), 2**37))
    assert gpu_speed.copied_bytes("cuda") == num_bytes
    assert gpu_speed.copied_bytes("cpu") == gpu_speed.copied_bytes("cuda", small=True) == 2**26


def test_shares_of_expert_products_are_of_the_same_wall(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCH.parent))
    import products

    requested: list[int] = []
    monkeypatch.setattr(products, "copied_bytes", lambda _device: 12345)
    monkeypatch.setattr(
        products,
        "memory_bandwidth",
        lambda _device, num_bytes: requested.append(num_bytes) or 10**12,
    )
    arguments = "experts --cpu --dim 64 --hidden 96 --rows 2"
    monkeypatch.setattr(sys, "argv", ["products.py", *arguments.split()])
    with pytest.raises(SystemExit):
        products.main()
    assert requested == [12345]
    assert "1.00 TB/s" in capsys.readouterr().out


@pytest.mark.parametrize(("length", "window", "pairs"), [(5, 3, 12), (5, None, 15), (3, 9, 6)])
def test_pairs_of_queries_and_keys(
    monkeypatch: pytest.MonkeyPatch, length: int, window: int | None, pairs: int
) -> None:
    monkeypatch.syspath_prepend(str(BENCH.parent))
    import gpu_speed

    assert gpu_speed._visible_pairs(length, window) == pairs


def test_prompts_are_cut_where_a_micro_batch_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH.parent))
    import gpu_stage

    sequences = [gpu_stage.Sequence(i, (0,) * 5, gpu_stage.GREEDY, max_len=9) for i in range(2)]
    cut = [
        [(each.seq_id, start, n) for each, start, n in batch]
        for batch in gpu_stage.packed(sequences, 4)
    ]
    assert cut == [[(0, 0, 4)], [(0, 4, 1), (1, 0, 3)], [(1, 3, 2)]]


@pytest.mark.parametrize(
    ("free_gib", "layers", "quantize"),
    [(141, 32, None), (102, 32, None), (79, 32, "fp8"), (39, 16, "fp8"), (11, 4, "fp8")],
)
def test_mixtral_is_measured_as_it_fits_into_memory(
    monkeypatch: pytest.MonkeyPatch, free_gib: int, layers: int, quantize: str | None
) -> None:
    """In 16 bits on 141 GB, in fp8 on an H100 of 80, and of smaller GPUs some of the layers."""
    monkeypatch.syspath_prepend(str(BENCH.parent))
    import gpu_stage

    args, chosen = gpu_stage.that_fits(gpu_stage.MIXTRAL_8X7B, free_gib * 2**30, 64, 1280)
    assert (args.n_layers, len(args.windows), chosen) == (layers, layers, quantize)


def test_the_part_mixtral_asks_the_gpu_for_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH.parent))
    import gpu_speed
    import gpu_stage

    asked: list[tuple[int, str | None]] = []

    def running(args: object, _device: str, *, quantize: str | None, **_sizes: object) -> object:
        asked.append((args.n_layers, quantize))  # type: ignore[attr-defined]
        return nullcontext(SimpleNamespace(prefill=lambda *_: 0.0))

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (79 * 2**30, 80 * 2**30))
    monkeypatch.setattr(gpu_speed, "running", running)
    monkeypatch.setattr(gpu_speed, "_decode_row", lambda name, *_: name)
    rows = list(
        gpu_speed.mixtral_decode(gpu_speed.Size("cuda", small=False), gpu_speed.Walls(3e12, 7e14))
    )
    assert asked == [(32, "fp8")]
    assert rows == [f"Mixtral 8x7B in fp8, decode, batch {batch}, context 1k" for batch in (1, 64)]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (2**30, 80 * 2**30))
    with pytest.raises(gpu_stage.UnavailableError, match=r"1\.0 GiB of memory are free"):
        list(
            gpu_speed.mixtral_decode(
                gpu_speed.Size("cuda", small=False), gpu_speed.Walls(3e12, 7e14)
            )
        )
