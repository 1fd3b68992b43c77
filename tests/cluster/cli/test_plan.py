"""``tramontane plan``: its numbers are those of the plan, and its advice can be taken."""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import few_experts, random_model, tiny_args, write_checkpoint
from typer.testing import CliRunner

from tramontane.cluster.cli.main import app
from tramontane.cluster.config.engine_config import DEMO_MODEL, EngineConfig
from tramontane.cluster.pipeline.engine import pipeline_spec
from tramontane.cluster.planning.expert_planner import ExpertRequest, plan_experts
from tramontane.cluster.planning.hardware import Gpu, Hardware
from tramontane.cluster.planning.planner import MEMORY_SHARE, PlanRequest, StageBudget, make_plan
from tramontane.proto.errors import CheckpointError, ConfigError, PlanError
from tramontane.proto.model_folder import Layout, resolve_model_args
from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.proto.presets import PRESETS, tiny_variant
from tramontane.proto.request import SamplingParams
from tramontane.proto.units import GIB, format_bytes
from tramontane.proto.weight_format import Quantization
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.sequence import Sequence
from tramontane.workers.experts.expert_worker import ExpertWorker
from tramontane.workers.kernels.packed_linear import PackedLinear
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights.config_writer import to_hf_config
from tramontane.workers.weights.quantize import NUMBER_DTYPES
from tramontane.workers.weights.random_checkpoint import write_random_checkpoint
from tramontane.workers.weights.tensor_specs import stage_tensors

MAX_PANEL_COLUMNS, MAX_UNIT_NUMBERS = 32, 2  # of packed matrices, on any processor


def plan(model: str, gpu_memory: str | None, **options: Any) -> None:
    """Runs ``tramontane plan`` with these options; one that is None is not given."""
    options = {"gpu_memory": gpu_memory} | options
    words = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in options.items()
        if value is not None and value is not True
    ]
    switches = [f"--{name}" for name, value in options.items() if value is True]
    app(["plan", "--model", model, *words, *switches], standalone_mode=False)


def _be_here(monkeypatch: pytest.MonkeyPatch, machine: Hardware) -> None:
    """Let this machine be another one."""
    monkeypatch.setattr("tramontane.cluster.planning.hardware.probe_local", lambda: machine)


def _planned(
    capsys: pytest.CaptureFixture[str], model: str, gpu_memory: str, **options: Any
) -> dict[str, Any]:
    plan(model, gpu_memory, json=True, **options)
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_planned_from_its_configuration_alone(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gib = 320 if name == "mistral-large-4-1t" else 141
    data = _planned(capsys, name, f"{gib}GiB", gpus=8)
    args, stages = PRESETS[name], data["stages"]
    assert [stages[0]["first_layer"], stages[-1]["last_layer"]] == [0, args.n_layers - 1]
    # In FP8 a byte for each number of a layer's matrices, and four for each row.
    tensors = [
        t
        for stage in stages
        for t in stage_tensors(args, range(stage["first_layer"], stage["last_layer"] + 1))
    ]
    in_fp8 = [t for t in tensors if t.scale]
    in_16_bits = sum(t.num_elements * (2 if t.is_float32 else 1) for t in tensors if not t.scale)
    expected = 2 * in_16_bits + sum(t.num_elements + 4 * t.shape[0] for t in in_fp8)
    assert sum(s["weight_bytes"] for s in stages) == expected
    assert all(s["weight_bytes"] + s["cache_bytes"] <= gib * GIB * MEMORY_SHARE for s in stages)


def test_a_model_whose_answers_nothing_ends_has_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = to_hf_config(PRESETS["mistral-7b-v0.3"])
    for ids, is_noted in (([2], False), (None, True)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": ids}))
        plan(str(tmp_path), "40GiB")
        assert (
            f"note: nothing ends an answer of {tmp_path}: config.json" in capsys.readouterr().err
        ) is is_noted


def test_parameters_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    plan("mixtral-8x7b", "80GiB", gpus=2)
    assert (
        "mixtral-8x7b: 46.7 billion parameters, of which 12.9 billion compute a token\n"
        in capsys.readouterr().out
    )
    plan("mistral-7b-v0.1", "80GiB", gpus=2)
    assert "mistral-7b-v0.1: 7.2 billion parameters\n" in capsys.readouterr().out
    data = _planned(capsys, "mixtral-8x7b", "80GiB", gpus=2)
    assert (data["parameters"], data["active_parameters"]) == (46_702_792_704, 12_879_925_248)


@pytest.mark.parametrize(("options", "sizes"), [({}, [30, 20]), ({"stages": 1}, [30])])
def test_without_sizes_the_plan_is_for_the_gpus_of_this_machine(
    options: dict[str, int],
    sizes: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpus = (Gpu("big", 30 * GIB), Gpu("small", 20 * GIB, index=1))
    _be_here(monkeypatch, Hardware((8,), (GIB,), gpus))
    plan("mistral-7b-v0.1", None, json=True, **options)
    shown = capsys.readouterr()
    assert [stage["memory"] // GIB for stage in json.loads(shown.out)["stages"]] == sizes
    assert shown.err.startswith(
        f"note: without --gpu-memory the plan is for {len(sizes)} of this machine's 2 GPUs: 30 GiB"
    )


def test_memory_that_others_hold_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = (Gpu("H100", 30 * GIB, held=50 * GIB), Gpu("H100", 80 * GIB, index=1))
    _be_here(monkeypatch, Hardware((8,), (GIB,), gpus))
    plan("mistral-7b-v0.1", None, json=True)
    assert (
        "2 of this machine's 2 GPUs: 30 GiB (other processes hold 50 GiB), 80 GiB\n"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(("cores", "num_ingresses"), [(2, 1), (16, 2)])
def test_ingress_replicas_are_planned_for_the_cores_of_this_machine(
    cores: int,
    num_ingresses: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = Hardware((cores,), (GIB,), (Gpu("H100", 79 * GIB),))
    _be_here(monkeypatch, here)
    plan("mistral-7b-v0.1", None, json=True)
    assert json.loads(capsys.readouterr().out)["ingress_replicas"] == num_ingresses
    plan("mistral-7b-v0.1", None)
    said = (
        "the planner has chosen 2 ingress replicas (key ingress_replicas): 12800 tokens per second"
        " are to be expected"
    )
    assert (said in capsys.readouterr().out) is (num_ingresses == 2)


def test_of_gpus_elsewhere_the_cores_are_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert _planned(capsys, "mistral-7b-v0.1", "79GiB", gpus=1)["ingress_replicas"] is None
    plan("mistral-7b-v0.1", "79GiB", gpus=1)
    assert "ingress" not in capsys.readouterr().out


@pytest.mark.parametrize("per_gpu", [1, 4])
def test_what_a_stage_takes_besides_is_shown_and_adds_up(
    per_gpu: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of four stages on a GPU none is kept free besides; weights and cache take no more than the
    rest.
    """
    options: dict[str, Any] = {
        "gpus": 1,
        "stages_per_gpu": per_gpu,
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 2000,
    }
    data = _planned(capsys, "mistral-7b-v0.1", "79GiB", **options)
    runtime = data["runtime"]
    assert runtime["total"] == sum(size for name, size in runtime.items() if name != "total")
    for stage in data["stages"]:
        assert stage["usable"] == min(
            int(stage["memory"] * MEMORY_SHARE), stage["memory"] - runtime["total"]
        )
        assert stage["weight_bytes"] + stage["cache_bytes"] <= stage["usable"]
    plan("mistral-7b-v0.1", "79GiB", **options)
    lines = [
        [cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines()
    ]
    shown = {line[1]: line[2] for line in lines if len(line) == 4}
    spare = data["stages"][0]["memory"] - data["stages"][0]["usable"] - runtime["total"]
    expected = {"all" if name == "total" else name: size for name, size in runtime.items()} | {
        "kept free": spare
    }
    assert shown == {
        name: f"{size / GIB:.2f}" if size >= GIB else format_bytes(size)
        for name, size in expected.items()
    }
    assert (spare == 0) is (per_gpu == 4)


def test_without_a_gpu_stages_share_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Hardware((8,), (60 * GIB,), ())
    _be_here(monkeypatch, here)
    for options, number in (({}, 2), ({"stages": 3}, 3), ({"gpus": 4}, 4)):
        plan("mistral-7b-v0.1", None, json=True, **options)
        shown = capsys.readouterr()
        assert [stage["memory"] for stage in json.loads(shown.out)["stages"]] == [
            here.stage_memory(number)
        ] * number
        assert (
            f"is for {number} stages that share this machine's 60 GiB of free memory,"
            f" {60 / number:g} GiB each" in shown.err
        )
    plan("mistral-7b-v0.1", None, stages=1)
    assert (
        "is for one stage with this machine's 60 GiB of free memory, as it has no GPU\n"
        in capsys.readouterr().err
    )


def test_without_a_gpu_nothing_is_said_of_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _be_here(monkeypatch, Hardware((8,), (20 * GIB,), ()))
    for stages, needed in ((2, "each of 2 stages"), (1, "the stage")):
        with pytest.raises(PlanError) as refused:
            plan("mixtral-8x7b", None, stages=stages)
        message = str(refused.value).split("; possible: ")[1]
        memory = int(message.removesuffix(f" GiB of free memory for {needed}"))
        for less, fits in ((0, True), (1, False)):
            free = (memory - less) * stages * GIB
            _be_here(monkeypatch, Hardware((8,), (free,), ()))
            with nullcontext() if fits else pytest.raises(PlanError):
                plan("mixtral-8x7b", None, stages=stages)
        _be_here(monkeypatch, Hardware((8,), (20 * GIB,), ()))
    with pytest.raises(
        PlanError, match=r"^there would be 33 stages, but the model has only 32 layers; no stage"
    ):
        plan("mistral-7b-v0.1", None, stages=33)
    plan("mistral-7b-v0.1", None, stages=4, stages_per_gpu=2, json=True)
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["stages"]) == 4


def test_stages_that_share_a_gpu_need_fewer_of_this_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = tuple(Gpu("H200", 30 * GIB, index=index) for index in range(4))
    _be_here(monkeypatch, Hardware((8,), (GIB,), gpus))
    plan("mistral-7b-v0.1", None, stages=4, stages_per_gpu=2, json=True)
    shown = capsys.readouterr()
    assert [stage["memory"] for stage in json.loads(shown.out)["stages"]] == [15 * GIB] * 4
    assert "2 of this machine's 4 GPUs: 30 GiB, 30 GiB" in shown.err


@pytest.mark.usefixtures("bare_gpus")
def test_sizes_of_less_than_a_gib_have_their_unit(capsys: pytest.CaptureFixture[str]) -> None:
    plan(str(DEMO_MODEL), "1GiB,512MiB", max_num_seqs=64)
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in line[3:6]] for line in lines if len(line) > 6]
    assert cells == [
        ["1.00", "5.5 MiB", "5 MiB"],
        ["512 MiB", "5.5 MiB", "5 MiB"],
        ["1.50", "11 MiB", "10 MiB"],
    ]


def test_what_a_window_saves_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """A layer of Mistral 7B keeps 4 KiB per position: of 32k positions all, or a ring of 257 pages
    of 16.
    """
    data = _planned(
        capsys, "mistral-7b-v0.1", "16GiB", gpus=2, max_num_batched_tokens=512, max_num_seqs=64
    )
    stage = data["stages"][0]
    free = int(16 * GIB * MEMORY_SHARE) - stage["weight_bytes"]
    rows = {
        row["tokens"]: (row["num_seqs"], row["num_seqs_without_windows"])
        for row in stage["sequences"]
    }
    assert rows[32768] == (free // (16 * 257 * 16 * 4096), free // (16 * 32768 * 4096))
    assert rows[1024] == (free // (16 * 1024 * 4096),) * 2


@pytest.mark.parametrize(
    ("model", "gpus"), [("mixtral-8x22b", 3), ("mixtral-8x7b", 1), ("mistral-nemo-12b", 1)]
)
def test_each_way_out_is_one(model: str, gpus: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlanError) as refused:
        plan(model, "24GiB" if gpus == 1 else "80GiB", gpus=gpus)
    message = str(refused.value)
    ways = re.findall(
        r"(\d+) GPUs of ([\d.]+) GiB|--max-model-len (\d+)", message.split("possible: ")[1]
    )
    assert ways, message
    for number, memory, length in ways:
        if length:
            _planned(
                capsys,
                model,
                "24GiB" if gpus == 1 else "80GiB",
                gpus=gpus,
                max_model_len=int(length),
            )
            continue
        assert _planned(capsys, model, f"{memory}GiB", gpus=int(number))
        fewer, less = (
            (int(number) - 1, memory)
            if int(number) != gpus
            else (int(number), f"{int(memory) - 1}")
        )
        with pytest.raises(PlanError):
            plan(model, f"{less}GiB", gpus=fewer)


def test_mixed_gpus_get_what_they_can_hold(capsys: pytest.CaptureFixture[str]) -> None:
    data = _planned(capsys, "mixtral-8x7b", "24GiB,24GiB,80GiB")
    sizes = [s["last_layer"] - s["first_layer"] + 1 for s in data["stages"]]
    assert sizes[2] > 2 * max(sizes[:2])
    assert all(
        s["weight_bytes"] + s["cache_bytes"] <= s["memory"] * MEMORY_SHARE for s in data["stages"]
    )
    slow = _planned(capsys, "ministral-8b", "80GiB", gpus=2)["stages"][0]["last_layer"]
    fast = _planned(capsys, "ministral-8b", "80GiB", gpus=2, gpu_speed="3,1")["stages"][0][
        "last_layer"
    ]
    assert fast > slow


def test_busy_times_of_a_pipeline_decide_how_layers_are_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head takes as long as eight layers, so the last of two stages gets eight fewer."""
    layers = [(0, 15), (16, 31)]
    measured = _measured(
        tmp_path, {span: (busy, "L4", None) for span, busy in zip(layers, (0.4, 0.6), strict=True)}
    )
    stages = _planned(capsys, "mistral-7b-v0.1", "80GiB", gpus=2, stage_times=measured)["stages"]
    assert [(stage["first_layer"], stage["last_layer"]) for stage in stages] == [(0, 19), (20, 31)]
    assert [stage["relative_time"] for stage in stages] == pytest.approx([1, 1])
    plan("mistral-7b-v0.1", "80GiB", gpus=2)
    assert (
        capsys.readouterr().out.splitlines()[-2]
        == "time of a micro-batch, relative to the mean of the stages: 0.99, 1.01"
    )


def _measured(folder: Path, stages: dict[tuple[int, int], tuple[float, str, int | None]]) -> str:
    """Write what bench --json writes of stages: layers to busy share, device and speed."""
    rows = [(span, *rest) for span, rest in stages.items()]
    keys = ("layers", "busy_share", "device", "speed")
    (folder / "bench.json").write_text(
        json.dumps({"stages": [dict(zip(keys, row, strict=True)) for row in rows]})
    )
    return str(folder / "bench.json")


def test_busy_times_of_unlike_devices_are_compared_by_their_speeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head takes as long as eight layers. 24 layers on a GPU three times as fast took as long
    as 8 on the other one, and the last stage twice that: 40 layers' work in all, of which the fast
    GPU takes 30 and the other 2 and the head.
    """
    measured = _measured(tmp_path, {(0, 23): (0.4, "H100", 3), (24, 31): (0.8, "L4", 1)})

    def spans(gpu_speed: str | None) -> list[tuple[int, int]]:
        stages = _planned(
            capsys, "mistral-7b-v0.1", "80GiB", gpus=2, stage_times=measured, gpu_speed=gpu_speed
        )["stages"]
        assert [stage["relative_time"] for stage in stages] == pytest.approx([1, 1])
        return [(stage["first_layer"], stage["last_layer"]) for stage in stages]

    assert spans("3,1") == [(0, 29), (30, 31)]
    assert spans(None) == [(0, 19), (20, 31)], "on two like GPUs"


def test_busy_times_of_unlike_devices_without_speeds_are_refused(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    measured = _measured(tmp_path, {(0, 23): (0.4, "H100", None), (24, 31): (0.8, "L4", None)})
    line = refused(
        "plan",
        "--model",
        "mistral-7b-v0.1",
        "--gpu-memory",
        "80GiB",
        "--gpus",
        "2",
        "--stage-times",
        measured,
    )
    assert (
        line
        == f"--stage-times {measured}: stages ran on unlike devices (H100; L4) whose speeds are not"
        " known; run tramontane bench --json again with --gpu-speed, or on devices of one kind"
    )


@pytest.mark.usefixtures("bare_gpus")
def test_a_folder_is_read_for_its_configuration_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = tiny_args(n_layers=4)
    folder = write_checkpoint(tmp_path / "model", args, random_model(args))
    (folder / "model.safetensors").unlink()
    assert len(_planned(capsys, str(folder), "1GiB", gpus=2, dtype="bfloat16")["stages"]) == 2
    plan(str(folder), "1GiB", gpus=2)
    table = capsys.readouterr().out
    assert "1/2" in table
    assert "in brackets" in table


def test_stages_that_share_a_gpu_share_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    stages = _planned(capsys, "mixtral-8x7b", "80GiB,40GiB", stages_per_gpu=4)["stages"]
    assert [stage["memory"] // GIB for stage in stages] == [20] * 4 + [10] * 4
    assert stages[-1]["last_layer"] == 31
    with pytest.raises(
        PlanError, match="17 GPUs would be 34 stages, but the model has only 32 layers"
    ):
        plan("mixtral-8x7b", "80GiB", gpus=17, stages_per_gpu=2)


@pytest.mark.parametrize("per_gpu", [1, 3])
def test_ways_out_are_of_whole_gpus(per_gpu: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlanError) as refused:
        plan("mixtral-8x7b", "48GiB", gpus=1, stages_per_gpu=per_gpu)
    ways = dict(re.findall(r"(\d+) GPUs? of (\d+) GiB", str(refused.value)))
    assert len(ways) == 2
    for number, memory in ways.items():
        assert _planned(
            capsys, "mixtral-8x7b", f"{memory}GiB", gpus=int(number), stages_per_gpu=per_gpu
        )
    assert set(ways) > {"1"}
    with pytest.raises(PlanError):
        plan("mixtral-8x7b", f"{int(ways['1']) - 1}GiB", gpus=1, stages_per_gpu=per_gpu)


def test_stages_say_how_many_gpus_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert _planned(capsys, "mixtral-8x7b", "80GiB", stages=4) == _planned(
        capsys, "mixtral-8x7b", "80GiB", gpus=4
    )
    stages = _planned(capsys, "mixtral-8x7b", "80GiB", stages=5, stages_per_gpu=2)["stages"]
    assert [stage["memory"] // GIB for stage in stages] == [40] * 5
    assert (
        _planned(capsys, "mixtral-8x7b", "80GiB", stages=5, stages_per_gpu=2, gpus=3)["stages"]
        == stages
    )


def test_a_file_of_the_engines_keys_has_the_same_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("stages: 5\nstages_per_gpu: 3\ngpu_memory: 80GiB\n")
    command = ["plan", "--model", "mixtral-8x7b", "--config", str(file), "--json"]
    for flags, number in (([], 5), (["--stages", "6"], 6), (["--gpus", "3"], 9)):
        app([*command, *flags], standalone_mode=False)
        assert len(json.loads(capsys.readouterr().out)["stages"]) == number


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory": "much"}, "--gpu-memory has 'much'; it must be a size such as 24GiB"),
        ({"gpu_memory": "24GiB,0"}, "--gpu-memory has '0'"),
        (
            {"gpu_memory": "24GiB,24GiB", "stages": 3},
            "--stages is for 3 GPUs, and --gpu-memory for 2",
        ),
        (
            {"gpu_memory": "24GiB", "stages": 5, "stages_per_gpu": 2, "gpus": 4},
            "--gpus is 4, and --stages 5 with --stages-per-gpu 2 needs 3; give one of both",
        ),
        ({"gpu_memory": "24GiB,24GiB", "gpus": 3}, "--gpus is for 3 GPUs, and --gpu-memory for 2"),
        (
            {"gpu_memory": "24GiB", "gpus": 2, "gpu_speed": "1,2,3"},
            "--gpu-speed is for 3 GPUs, and --gpu-memory for 2",
        ),
        (
            {"gpu_memory": "24GiB", "gpu_speed": "fast"},
            "--gpu-speed has 'fast'; it must be whole numbers",
        ),
        (
            {"gpu_memory": "24GiB", "gpus": 0},
            "--gpus is 0; it must be at least 1 and at most 16384",
        ),
        ({"gpu_memory": "24GiB", "dtype": "int3"}, "--dtype is 'int3'; it must be 'auto'"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan("mistral-7b-v0.3", **options)
    assert message in str(refused.value)


@pytest.mark.parametrize("memory", [["--gpu-memory", "80GiB"], []])
@pytest.mark.parametrize(
    "option", ["--gpus", "--stages", "--max-model-len", "--max-num-seqs", "--page-size"]
)
@pytest.mark.parametrize("value", ["0", "-5", "1" + "0" * 12])
def test_numbers_that_can_only_be_slips_are_named(
    option: str, value: str, memory: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        app(["plan", "--model", "mixtral-8x7b", *memory, option, value], standalone_mode=False)
    assert option in str(refused.value)
    assert option != "--gpus" or not capsys.readouterr().err, (
        "no note about so many stages comes first"
    )


def test_a_model_that_is_neither_a_folder_nor_a_preset_is_named() -> None:
    with pytest.raises(
        CheckpointError, match=r"^model folder llama does not exist, and no published geometry has"
    ) as refused:
        plan("llama", "24GiB")
    assert str(refused.value).endswith(
        "a downloaded checkpoint's folder, or a name that tramontane plan --help lists"
    )


@pytest.mark.parametrize("model", ["a-b/C_7.1", "./models/mistral", "../C", "/a/C", "a/b/c", "a/"])
def test_the_command_that_downloads_a_model_is_named_if_there_is_one(model: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        resolve_model_args(Path(model))
    name = str(Path(model))
    downloads = (
        f"nothing is downloaded; for a model of Hugging Face, first run: hf download {name}"
        f" --local-dir {name}"
    )
    assert str(refused.value).endswith(downloads) == (model in ("a-b/C_7.1", "./models/mistral"))


@pytest.mark.parametrize("wanted", Quantization)
def test_quantized_weights_are_planned_and_shown(
    wanted: Quantization, capsys: pytest.CaptureFixture[str]
) -> None:
    half, byte = (
        _planned(capsys, "mistral-7b-v0.1", "24GiB", quantize=quantize)
        for quantize in (None, wanted)
    )
    assert (half["quantize"], byte["quantize"]) == (None, wanted)
    assert 0.5 < byte["stages"][0]["weight_bytes"] / half["stages"][0]["weight_bytes"] < 0.51
    assert (
        byte["stages"][0]["sequences"][-1]["num_seqs"]
        > half["stages"][0]["sequences"][-1]["num_seqs"]
    )
    plan("mistral-7b-v0.1", "24GiB", quantize=wanted)
    assert f"in bfloat16, matrices in {wanted}, contexts of 32768" in " ".join(
        capsys.readouterr().out.split()
    )


def test_keys_and_values_in_fp8_are_planned_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Of heads of 128 a position takes 132 bytes for 256, so 1.94 times as many fit."""
    # which decide what is left for pages
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
    plain, fp8 = (
        _planned(capsys, "mistral-7b-v0.3", "24GiB", kv_cache_dtype=kind, **limits)
        for kind in ("auto", "fp8")
    )
    assert (plain["kv_cache_dtype"], fp8["kv_cache_dtype"]) == ("auto", "fp8")
    pages = [data["pages"][0]["num_pages"] for data in (plain, fp8)]
    assert pages[1] == pytest.approx(pages[0] * 256 / 132, rel=1e-3)
    plan("mistral-7b-v0.3", "24GiB", kv_cache_dtype="fp8")
    assert (
        "in bfloat16, keys and values in fp8, contexts of 32768 tokens" in capsys.readouterr().out
    )
    plan("mistral-7b-v0.3", "24GiB", kv_cache_dtype="auto")
    assert "in bfloat16, contexts of 32768 tokens" in capsys.readouterr().out
    with pytest.raises(
        ConfigError, match="--kv-cache-dtype fp8 is not for models with latent attention"
    ):
        plan("mistral-small-4-119b", "80GiB,80GiB", kv_cache_dtype="fp8")


def test_matrices_in_bfloat16_remain_so_in_float32(capsys: pytest.CaptureFixture[str]) -> None:
    half, wide = (
        _planned(capsys, "mistral-7b-v0.1", "24GiB", dtype=dtype)
        for dtype in ("bfloat16", "float32")
    )
    norms = 4096 * (2 * 32 + 1)
    bytes_of = [
        sum(stage["weight_bytes"] for stage in planned["stages"]) for planned in (half, wide)
    ]
    assert bytes_of[1] - bytes_of[0] == 2 * norms
    plan("mistral-7b-v0.1", "24GiB", dtype="float32")
    assert "in float32, matrices in bfloat16, contexts of 32768" in " ".join(
        capsys.readouterr().out.split()
    )


def test_quantization_is_suggested_where_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PlanError, match=r"or --quantize int8$"):
        plan("mixtral-8x7b", "24GiB", gpus=3)
    assert (
        len(_planned(capsys, "mixtral-8x7b", "24GiB", gpus=3, quantize=Quantization.INT8)["stages"])
        == 3
    )
    for quantize in (None, Quantization.INT8):
        with pytest.raises(PlanError) as refused:
            plan("mixtral-8x7b", "24GiB", gpus=2, quantize=quantize)
        assert "--quantize" not in str(refused.value)


def test_an_unknown_quantization_is_named() -> None:
    with pytest.raises(ConfigError) as refused:
        app(
            ["plan", "--model", "mixtral-8x7b", "--gpu-memory", "80GiB", "--quantize", "int4"],
            standalone_mode=False,
        )
    message = str(refused.value)
    assert all(part in message for part in ("--quantize", "int4", "int8", "fp8"))
    assert "\n" not in message


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(
    ("dtype", "quantize"),
    [
        ("float32", None),
        ("bfloat16", None),
        ("bfloat16", Quantization.INT8),
        ("float16", Quantization.INT8),
        ("bfloat16", Quantization.FP8),
    ],
)
def test_a_loaded_stage_allocates_what_the_plan_says(
    name: str, dtype: str, quantize: Quantization | None, tmp_path: Path
) -> None:
    """Caches within 2 percent. The matrices of such small models fill no last panel."""
    args = few_experts(tiny_variant(PRESETS[name]))
    write_random_checkpoint(tmp_path / "model", args, Layout.HUGGING_FACE)
    budgets = (StageBudget(GIB),) * 2
    for stage in make_plan(
        args, PlanRequest(budgets, dtype, args.max_seq_len, 8, 16, quantize=quantize)
    ).stages:
        worker = StageWorker.load(stage, tmp_path / "model")
        weights = [*worker.model.parameters(), *worker.model.buffers()]
        caches = [t for layer in worker.cache.layers.values() for t in (layer.k_NGd, layer.v_NGd)]
        caches += worker.cache.index_keys.values()
        assert {t.dtype for t in weights} >= {
            NUMBER_DTYPES[quantize] if quantize else getattr(torch, dtype)
        }
        assert _allocated(weights) - _padding(worker.model) == stage.weight_bytes
        assert _allocated(caches) == pytest.approx(stage.cache_bytes, rel=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", [None, *Quantization])
def test_expert_actors_and_their_stages_allocate_what_the_plan_says(
    dtype: str, quantize: Quantization | None, tmp_path: Path
) -> None:
    """And none of the stages holds anything of an expert."""
    args = tiny_variant(PRESETS["mixtral-8x7b"])
    write_random_checkpoint(tmp_path / "model", args, Layout.HUGGING_FACE)
    budget = StageBudget(GIB)
    request = PlanRequest(
        (budget, budget), dtype, args.max_seq_len, 8, 16, quantize=quantize, experts_inside=False
    )
    for stage in make_plan(args, request).stages:
        model = StageWorker.load(stage, tmp_path / "model").model
        assert not [name for name in model.state_dict() if "expert" in name]
        assert _allocated(model.state_dict().values()) - _padding(model) == stage.weight_bytes
    plan = plan_experts(args, ExpertRequest((budget,) * 3, dtype, quantize, replicas=2))
    for actor in plan.actors:
        worker = ExpertWorker.load(plan, actor.actor_id, tmp_path / "model")
        assert worker.loaded_experts == set(actor.experts)
        held = [
            tensor for expert in worker._experts.values() for tensor in expert.state_dict().values()
        ]
        assert _allocated(held) - sum(map(_padding, worker._experts.values())) == actor.weight_bytes


def _allocated(held: Iterable[torch.Tensor]) -> int:
    """Bytes that are taken for these tensors."""
    return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


def _padding(model: torch.nn.Module) -> int:
    """Bytes with which last panels and units of packed matrices are filled up."""
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    return sum(
        each.weight.nbytes - each.out_features * each.in_features * each.weight.itemsize
        for each in packed
    )


@pytest.mark.parametrize("name", PRESETS)
def test_packing_fills_up_nothing_of_a_published_geometry(name: str) -> None:
    args = PRESETS[name]
    for spec in stage_tensors(args, range(args.n_layers)):
        if spec.quantizable:
            num_outputs, num_inputs = spec.parameter_shape
            assert num_outputs % MAX_PANEL_COLUMNS == 0
            assert num_inputs % MAX_UNIT_NUMBERS == 0


def test_planning_needs_neither_ray_nor_torch() -> None:
    """It would take longer to import either than to plan."""
    options = {
        "--model": "mixtral-8x22b",
        "--gpus": "4",
        "--gpu-memory": "80GiB",
        "--expert-actors": "8",
        "--expert-memory": "80GiB",
    }
    command = f"app({['plan', *chain(*options.items())]}, standalone_mode=False)"
    loaded = "print(sorted({'ray', 'torch'} & sys.modules.keys()))"
    code = f"import sys; from tramontane.cluster.cli.main import app; {command}; {loaded}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


def test_drafts_make_rings_longer_and_sequences_fewer(capsys: pytest.CaptureFixture[str]) -> None:
    """W = 4096, P = 16: 257 pages, and 47 drafts after a token make them 260."""
    drafts = '{"num_speculative_tokens": 5}'
    without, drafted = (
        _planned(
            capsys, "mistral-7b-v0.1", "24GiB", gpus=1, max_num_seqs=512, speculative_config=config
        )
        for config in (None, drafts)
    )
    assert [each["pages"][0]["ring_pages"] for each in (without, drafted)] == [257, 260]
    longest, most = (
        [stage["sequences"][-1]["num_seqs"] for stage in each["stages"]]
        for each in (without, drafted)
    )
    assert [num * 257 // 260 for num in longest] <= most <= longest
    assert without["sequences"][-1]["num_seqs"] > drafted["sequences"][-1]["num_seqs"]


@pytest.mark.parametrize("is_configured", [False, True])
@pytest.mark.parametrize(
    ("memories", "options", "shares"),
    [
        ((80,), {}, True),
        ((80, 80), {}, False),
        ((24, 80, 24), {}, False),
        ((80, 80), {"stages": 2}, True),
        ((80,), {"stages": 2, "stages_per_gpu": 2}, True),
        ((80, 80), {"stages": 1}, False),
        ((80, 80, 80), {"stages": 2, "gpus": 3}, False),
        ((80, 80, 80), {"stages": 2}, False),
        ((80, 24, 80), {"gpu_speed": "1,2,3"}, False),
    ],
)
def test_a_draft_model_is_planned_as_a_server_plans_it(
    memories: tuple[int, ...],
    options: dict[str, Any],
    shares: bool,
    is_configured: bool,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Also a server that is given the sizes, not only the GPUs."""
    args = tiny_args(n_layers=6)
    folder = write_checkpoint(tmp_path / "model", args, random_model(args))
    drafts = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 4}
    sizes = ",".join(f"{each}GiB" for each in memories)
    keys = {"speculative_config": json.dumps(drafts)} | options
    planned = _planned(capsys, str(folder), sizes, **keys)
    gpus = tuple(Gpu("GPU", size * GIB, node=str(node)) for node, size in enumerate(memories))
    hardware = Hardware((8,) * len(gpus), (GIB,) * len(gpus), gpus)
    config = EngineConfig.build(
        None,
        {"model": folder, "speculative_config": drafts}
        | {name: value for name, value in options.items() if name != "gpus"}
        | ({"gpu_memory": sizes} if is_configured else {}),
    )
    spec = pipeline_spec(config, args, hardware)
    served = spec.plan
    assert [stage["cache_bytes"] for stage in planned["stages"]] == [
        stage.cache_bytes for stage in served.stages
    ]
    assert [each["num_pages"] for each in planned["pages"]] == [
        each.num_pages for each in served.cache.classes
    ]
    assert spec.draft_model is not None
    assert planned["draft_model"] == {
        "shares_gpu": shares,
        "weights": spec.draft_model.plan.packed_bytes,
        "cache": spec.draft_model.plan.cache_bytes,
        "max_num_seqs": spec.draft_model.plan.max_num_seqs,
    }
    assert spec.draft_model.shares_gpu is shares


@pytest.mark.parametrize("options", [{"stages": 2, "gpus": 4}, {"stages": 2, "gpus": 3}])
def test_a_draft_model_has_one_gpu_more_and_no_other(
    options: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    drafts = {"method": "draft_model", "model": "/none", "num_speculative_tokens": 4}
    keys = options | {"speculative_config": json.dumps(drafts)}
    with pytest.raises(ConfigError, match="--gpus is"):
        _planned(capsys, "mistral-7b-v0.3", ",".join(["80GiB"] * 4), **keys)


def test_a_draft_model_that_no_server_would_take_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    drafts = {"method": "draft_model", "model": "/none", "num_speculative_tokens": 4}
    with pytest.raises(ConfigError, match="model folder /none does not exist"):
        _planned(capsys, "mistral-7b-v0.3", "80GiB", speculative_config=json.dumps(drafts))


@pytest.mark.parametrize(
    ("length", "num_bytes", "size"),
    [(1024, 64 * 1024 * 356, "22.2 MiB"), (32_768, 64 * 16_384 * 356, "356 MiB")],
)
def test_indexes_of_n_grams_are_part_of_the_plan(
    capsys: pytest.CaptureFixture[str], length: int, num_bytes: int, size: str
) -> None:
    """64 sequences, of each at most 16,384 tokens; for drafts from a model there are none."""
    drafts = '{"num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 5}'
    options: dict[str, Any] = {"gpus": 1, "max_num_seqs": 64, "max_model_len": length}
    planned = [
        _planned(capsys, "mistral-7b-v0.1", "80GiB", **options, speculative_config=each)
        for each in (None, drafts)
    ]
    assert [each["ngram_index_bytes"] for each in planned] == [0, num_bytes]
    plan("mistral-7b-v0.1", "80GiB", **options, speculative_config=drafts)
    assert (
        f"indexes of n-grams for drafts, up to {size} of its machine's memory"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("model", ["mistral-7b-v0.1", "ministral-8b", "mixtral-8x7b"])
def test_all_is_what_the_pages_hold(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Promised one after the other, as the router does it."""
    plan(model, "40GiB", gpus=3, max_num_seqs=512, json=True)
    reported = json.loads(capsys.readouterr().out)
    cache = CachePlan(
        16,
        tuple(WindowClass(c["window"], c["ring_pages"], c["num_pages"]) for c in reported["pages"]),
    )
    assert reported["sequences"]
    for each in reported["sequences"]:
        allocator = PageAllocator(cache)
        alike = [
            Sequence(i, (1,) * each["tokens"], SamplingParams(), each["tokens"] + 1)
            for i in range(each["num_seqs"] + 1)
        ]
        assert allocator.num_fitting(alike) == each["num_seqs"]
        alone = [
            s["num_seqs"]
            for stage in reported["stages"]
            for s in stage["sequences"]
            if s["tokens"] == each["tokens"]
        ]
        assert each["num_seqs"] <= min(alone)


@pytest.mark.parametrize(
    ("model", "memory", "options", "in_slots", "longer"),
    [
        ("mistral-7b-v0.1", "80GiB", {"gpus": 4}, (256, 32768), {}),
        ("mistral-7b-v0.3", "24GiB", {"gpus": 1}, (64, 1024), {8192: 8, 32768: 2}),
        ("mixtral-8x22b", "80GiB", {"gpus": 4}, (96, 1232), {8192: 14, 32768: 3, 65536: 1}),
        ("mixtral-8x22b", "80GiB", {"gpus": 4, "max_num_seqs": 1}, (1, 65536), {}),
        ("ministral-8b", "24GiB", {"gpus": 3, "max_num_seqs": 20}, None, None),
    ],
)
def test_the_bound_on_concurrent_sequences_is_named(
    model: str,
    memory: str,
    options: dict[str, Any],
    in_slots: tuple[int, int] | None,
    longer: dict[int, int] | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Slots, or pages for sequences longer than a slot's share of them; the page allocator admits
    just these.
    """
    data = _planned(capsys, model, memory, **options)
    plan(model, memory, **options)
    line = capsys.readouterr().out.splitlines()[-1]
    found = re.match(
        r"at once: (\d+) sequences? of up to (\d+) tokens, one per slot \(--max-num-seqs\); ", line
    )
    assert found, line
    num_slots, length = map(int, found.groups())
    of_longer = {
        int(tokens): int(number)
        for number, tokens in re.findall(r"(\d+) of (\d+) tokens", line[found.end() :])
    }
    assert in_slots in (None, (num_slots, length))
    assert longer in (None, of_longer)
    assert num_slots == data["max_num_seqs"]
    assert line.endswith("there are pages for all of them") == (not of_longer)
    cache = CachePlan(
        16, tuple(WindowClass(c["window"], c["ring_pages"], c["num_pages"]) for c in data["pages"])
    )
    for tokens, number in {length: num_slots, **of_longer}.items():
        alike = [
            Sequence(i, (1,) * (tokens - 1), SamplingParams(), tokens) for i in range(number + 1)
        ]
        fitting = PageAllocator(cache).num_fitting(alike)
        assert fitting >= num_slots if tokens == length else fitting == number < num_slots
    if of_longer:
        one_more = [
            Sequence(i, (1,) * (length + 16), SamplingParams(), length + 17)
            for i in range(num_slots)
        ]
        assert PageAllocator(cache).num_fitting(one_more) < num_slots


def test_layers_without_a_window_are_named_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    plan("ministral-8b", "24GiB", gpus=3)
    cache = capsys.readouterr().out.splitlines()[-3]
    pages = "[0-9]+ pages of 16 tokens in layers"
    assert re.search(
        f"; a cache of {pages} without a sliding window and {pages} with a sliding window of"
        " 32768$",
        cache,
    ), cache


# ---- experts on actors of their own

NUM_EXPERTS = 32 * 8  # pairs of a layer and one of its experts


def _write_load(path: Path, tokens: list[list[int]]) -> Path:
    path.write_text(json.dumps({"tokens_per_expert": tokens}))
    return path


def test_stages_without_experts_hold_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    """Together with the expert actors, all of the model and no more."""
    inside = _planned(capsys, "mixtral-8x7b", "80GiB", gpus=2)
    apart = _planned(
        capsys,
        "mixtral-8x7b",
        "24GiB",
        gpus=2,
        expert_actors=4,
        expert_memory="40GiB,24GiB,24GiB,40GiB",
    )
    assert inside["experts"] is None
    experts = apart["experts"]
    weights = [
        sum(each["weight_bytes"] for each in part)
        for part in (inside["stages"], apart["stages"], experts["actors"])
    ]
    assert weights[1] + weights[2] == weights[0]
    assert 10 * weights[1] < weights[2]
    assert [actor["memory"] // GIB for actor in experts["actors"]] == [40, 24, 24, 40]
    assert all(
        actor["weight_bytes"] <= actor["usable"] < actor["memory"] for actor in experts["actors"]
    )
    held = sorted(tuple(each) for actor in experts["actors"] for each in actor["experts"])
    assert held == [(layer, expert) for layer in range(32) for expert in range(8)]
    assert (experts["load"], experts["busiest_if_even"], experts["num_replicated"]) == (
        "even",
        None,
        0,
    )
    assert experts["busiest"] == 1.0
    assert [actor["share"] for actor in experts["actors"]] == [1.0] * 4


def test_a_measured_load_makes_fewer_hot_spots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nine of ten tokens go to the experts of one actor of the plan that assumes even load."""
    options: dict[str, Any] = {"gpus": 2, "expert_actors": 4, "expert_memory": "40GiB"}
    even = _planned(capsys, "mixtral-8x7b", "24GiB", **options)["experts"]
    tokens = [[100] * 8 for _ in range(32)]
    for layer, expert in even["actors"][2]["experts"]:
        tokens[layer][expert] = 2700
    options["expert_load"] = _write_load(tmp_path / "load.json", tokens)
    for replicas in (None, "auto"):
        experts = _planned(capsys, "mixtral-8x7b", "24GiB", **options, expert_replicas=replicas)[
            "experts"
        ]
        assert experts["load"] == "measured"
        assert experts["busiest_if_even"] == pytest.approx(3.6)
        assert experts["busiest"] == max(actor["share"] for actor in experts["actors"]) < 1.05
        assert sum(actor["share"] for actor in experts["actors"]) == pytest.approx(4)
        held = Counter(tuple(each) for actor in experts["actors"] for each in actor["experts"])
        assert experts["num_experts"] == len(held) == NUM_EXPERTS
        assert experts["num_replicated"] == sum(copies > 1 for copies in held.values())
        assert (experts["num_replicated"] > 0) == (replicas == "auto")


@pytest.mark.usefixtures("bare_gpus")
def test_the_expert_actors_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the plan that assumes even load would do with the measured one as well."""
    load = _write_load(
        tmp_path / "load.json", [[900, 100, 100, 100], [900, 100, 100, 100], [100] * 4, [100] * 4]
    )
    folder = write_checkpoint(tmp_path / "model", tiny_args(n_layers=4))
    options: dict[str, Any] = {"gpus": 2, "expert_actors": 2, "expert_memory": "1GiB"}
    plan(str(folder), "1GiB", **options)
    even = capsys.readouterr().out
    assert "expert actor" in even
    assert "all experts assumed to be alike" in " ".join(even.split())
    assert (
        "the busiest expert actor does 1.00 times the mean\nnone of 16 experts has replicas\n"
        in even
    )
    options["expert_load"] = load
    reported = _planned(capsys, str(folder), "1GiB", **options)["experts"]
    plan(str(folder), "1GiB", **options, expert_replicas="auto")
    shown = capsys.readouterr().out
    assert "by the measured load" in " ".join(shown.split())
    assert (
        f"distributed as if all experts were alike it would be {reported['busiest_if_even']:.2f}"
        " times" in shown
    )
    assert "2 of 16 experts are on 2 actors each, the others on one" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"expert_memory": "40GiB"},
            (
                "--expert-memory: only for experts on actors of their own; give --expert-actors as"
                " well"
            ),
        ),
        (
            {"expert_replicas": "2", "expert_load": Path("x")},
            "--expert-replicas, --expert-load: only for experts on actors",
        ),
        ({"expert_actors": 4}, "--expert-actors needs --expert-memory"),
        (
            {"expert_actors": 4, "expert_memory": "much"},
            "--expert-memory has 'much'; it must be a size",
        ),
        (
            {"expert_actors": 4, "expert_memory": "40GiB,24GiB"},
            "--expert-memory is for 2 actors and --expert-actors is 4",
        ),
        (
            {"expert_actors": 4, "expert_memory": "40GiB", "expert_replicas": "few"},
            "--expert-replicas is 'few'; it must be a",
        ),
        (
            {"expert_actors": 4, "expert_memory": "40GiB", "expert_replicas": "0"},
            "--expert-replicas is '0'; it must be a whole",
        ),
        (
            {"expert_actors": 4, "expert_memory": "40GiB", "expert_replicas": "5"},
            "--expert-replicas is 5; it can be at most",
        ),
        (
            {"expert_actors": 4, "expert_memory": "40GiB", "expert_load": Path("/none")},
            "--expert-load /none cannot be read",
        ),
    ],
)
def test_mistakes_about_expert_actors_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan("mixtral-8x7b", "24GiB", gpus=2, **options)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_expert_actors_that_cannot_be_are_named() -> None:
    with pytest.raises(
        PlanError, match=r"too little memory for 256 experts of 336 MiB on 4 expert actors"
    ):
        plan("mixtral-8x7b", "24GiB", gpus=2, expert_actors=4, expert_memory="10GiB")
    with pytest.raises(
        ConfigError,
        match="--expert-actors is for models of several experts per layer; this one has none",
    ):
        plan("mistral-7b-v0.1", "24GiB", gpus=2, expert_actors=4, expert_memory="10GiB")


@pytest.mark.parametrize(("n_layers", "num_experts"), [(31, 8), (32, 7), (1, 1)])
def test_the_load_of_another_model_is_refused(
    n_layers: int, num_experts: int, tmp_path: Path
) -> None:
    load = _write_load(tmp_path / "load.json", [[1] * num_experts] * n_layers)
    with pytest.raises(ConfigError) as refused:
        plan(
            "mixtral-8x7b",
            "24GiB",
            gpus=2,
            expert_actors=4,
            expert_memory="40GiB",
            expert_load=load,
        )
    assert (
        str(refused.value)
        == f"--expert-load is of {n_layers} layers with {num_experts} experts each, and the model"
        " has 32 layers with 8 experts each; it must be of the same model"
    )


def test_a_file_gives_what_no_flag_does(tmp_path: Path) -> None:
    """As it is written for ``serve``: what a plan has no use for is not read."""

    def planned(*flags: str) -> dict[str, Any]:
        outcome = CliRunner().invoke(app, ["plan", *flags, "--json"])
        assert outcome.exit_code == 0, outcome.output
        data: dict[str, Any] = json.loads(outcome.stdout)
        return data

    lines = (
        "model: mixtral-8x7b",
        "stages: 4",
        "gpu-memory: [24GiB, 24GiB, 80GiB, 80GiB]",
        "quantize: int8",
        "port: 9000",
    )
    (file := tmp_path / "tramontane.yaml").write_text("\n".join(lines))
    flags = (
        "--model",
        "mixtral-8x7b",
        "--gpus",
        "4",
        "--gpu-memory",
        "24GiB,24GiB,80GiB,80GiB",
        "--quantize",
        "int8",
    )
    assert planned("--config", str(file)) == planned(*flags)
    assert planned("--config", str(file), "--max-num-seqs", "8") == planned(
        *flags, "--max-num-seqs", "8"
    )
    file.write_text("modle: mixtral-8x7b")
    with pytest.raises(ConfigError, match=r"modle .*no such key"):
        CliRunner().invoke(app, ["plan", "--config", str(file)], catch_exceptions=False)


@pytest.mark.usefixtures("bare_gpus")
def test_the_model_of_a_file_may_be_below_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_checkpoint(tmp_path / "models/tiny", tiny_args())
    (file := tmp_path / "tramontane.yaml").write_text(
        "model: ~/models/tiny\nstages: 2\ngpu_memory: 1GiB"
    )
    outcome = CliRunner().invoke(app, ["plan", "--config", str(file), "--json"])
    assert outcome.exit_code == 0, outcome.output
    assert len(json.loads(outcome.stdout)["stages"]) == 2


@pytest.mark.parametrize(("busy", "layers"), [((1, 1), "0-15"), ((1, 2), "0-23")])
def test_a_file_may_hold_the_measured_times_themselves(
    tmp_path: Path, busy: tuple[int, int], layers: str
) -> None:
    times = [{"first": 0, "last": 15, "busy": busy[0]}, {"first": 16, "last": 31, "busy": busy[1]}]
    (file := tmp_path / "tramontane.yaml").write_text(
        json.dumps({"stage_times": times, "stages": 2, "gpu_memory": "80GiB"})
    )
    outcome = CliRunner().invoke(app, ["plan", "--model", "mistral-7b-v0.1", "--config", str(file)])
    assert outcome.exit_code == 0, outcome.output
    assert layers in outcome.stdout


@pytest.mark.parametrize(
    ("given", "likely"),
    [
        ("Mixtral-8x7B", "mixtral-8x7b"),
        ("mistral-7b-v02", "mistral-7b-v0.2"),
        ("ministral8", "ministral-8b"),
    ],
)
def test_the_most_similar_geometry_is_named(given: str, likely: str) -> None:
    with pytest.raises(
        CheckpointError, match=rf"; did you mean {re.escape(likely)}\?; --model takes"
    ):
        resolve_model_args(Path(given))
