"""Memory while a published model is loaded, at its peak and afterwards, against the planned bytes;
in a process of its own.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tramontane.proto.model_folder import Layout
from tramontane.proto.presets import PRESETS
from tramontane.proto.weight_format import Quantization
from tramontane.workers.weights.random_checkpoint import write_random_checkpoint

# 190 million parameters in layers and 21 million in 16 bits.
ARGS = replace(
    PRESETS["ministral-3-8b"],
    dim=1280,
    n_layers=10,
    hidden_dim=4096,
    n_heads=8,
    n_kv_heads=2,
    vocab_size=4096,
    windows=(None,) * 10,
)
MAX_PEAK = 1.15  # of what a stage holds; a tensor is read in chunks of up to 16 MiB
VISION_BYTES = 2**26  # more than that leaves room for
LOAD = """
import json, re, sys
from dataclasses import replace
from pathlib import Path
from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.proto.model_folder import RandomWeights, read_model_args
from tramontane.workers.device.probe import panel_rows
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.weights.loader import load_module
from tramontane.workers.weights.tensor_specs import stage_tensors

def status(name):
    return int(re.search(rf"{name}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def load(args, weights, reads):
    request = PlanRequest((StageBudget(2**31),), "bfloat16", 64, 1, 16, panel_rows=panel_rows())
    plan = make_plan(args, request).stages[0]
    specs = lambda layout: stage_tensors(args, plan.layers, layout)
    on_tensor = lambda read, _: reads.append(read)
    make = lambda: StageModel(args, plan.layers)
    return plan, load_module(make, specs, plan, weights, "cpu", on_tensor)

folder, reads = Path(sys.argv[1]), []
args = read_model_args(folder)
# compiles kernels, imports what is imported late
load(replace(args, dim=64, n_layers=1, windows=(None,)), RandomWeights(), [])
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
plan, model = load(args, folder, reads)
peak = status("VmHWM") - before
held = sum(tensor.nbytes for tensor in model.state_dict().values())
planned = plan.weight_bytes + plan.padding_bytes
print(json.dumps({"planned": planned, "held": held, "peak": peak, "read": sum(reads)}))
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "quantization"),
    [
        (Layout.HUGGING_FACE, Quantization.FP8),
        (Layout.MISTRAL, Quantization.FP8),
        (Layout.MISTRAL, None),
    ],
    ids=str,
)
def test_the_peak_of_loading_is_little_above_what_is_held(
    tmp_path: Path, layout: Layout, quantization: Quantization | None
) -> None:
    """With an encoder of images in the same file."""
    write_random_checkpoint(
        tmp_path / "model", replace(ARGS, quantization=quantization), layout, part_bytes=2**30
    )
    [path] = (tmp_path / "model").glob("*.safetensors")
    needed, other = load_file(path), path.with_suffix(".new")
    save_file(
        needed | {"vision_tower.weight": torch.ones(VISION_BYTES, dtype=torch.uint8)},
        other,
        metadata={"format": "pt"},
    )
    other.replace(path)
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "model")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["held"] == pytest.approx(found["planned"], rel=0.02)
    assert 0.9 * found["held"] < found["peak"] <= MAX_PEAK * found["held"]
    assert found["read"] == sum(tensor.nbytes for tensor in needed.values() if tensor.dim()), (
        "but for the scales"
    )
