"""Random checkpoints: the same model in both layouts, in files of bounded size, and never over
somebody's own.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import INDEX_NAME, tiny_args

from tramontane.cluster.cli.make_random import LayoutName, Scale, make_random
from tramontane.proto.errors import ConfigError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import Layout, detect_layout, read_model_args
from tramontane.proto.presets import PRESETS, tiny_variant
from tramontane.proto.weight_format import Quantization, WeightFormat
from tramontane.workers.weights import random_checkpoint
from tramontane.workers.weights.checkpoint import Checkpoint
from tramontane.workers.weights.random_checkpoint import random_state, write_random_checkpoint
from tramontane.workers.weights.tensor_specs import stage_tensors

MODELS = {
    "mixtral": tiny_args(n_layers=3),
    "mistral": tiny_args(n_layers=3, moe=False),
    "tied": tiny_args(n_layers=2, tied=True),
}


@pytest.mark.parametrize("args", MODELS.values(), ids=MODELS)
def test_both_layouts_hold_the_model_that_is_made_without_a_disk(
    tmp_path: Path, args: ModelArgs
) -> None:
    layers, weights = range(args.n_layers), WeightFormat("float32", stored=args.dtype)
    made = random_state(partial(stage_tensors, args, layers), weights, "cpu")
    for layout in Layout:
        write_random_checkpoint(tmp_path / layout.name, args, layout)
        checkpoint = Checkpoint(tmp_path / layout.name)
        checkpoint.check(args)
        read = checkpoint.load(partial(stage_tensors, args, layers), weights, "cpu")
        assert read.keys() == made.keys()
        assert all(torch.equal(read[name], made[name]) for name in made)
    if args.tied_embeddings:
        assert torch.equal(made["output.weight"], made["tok_embeddings.weight"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("quantize", [None, *Quantization])
@pytest.mark.parametrize("name", ["mixtral-8x7b", "ministral-3-8b"])  # the second is in FP8
def test_random_weights_are_those_of_the_checkpoint_in_any_dtype(
    tmp_path: Path, dtype: str, quantize: Quantization | None, name: str
) -> None:
    args = tiny_variant(PRESETS[name])
    written: list[int] = []
    write_random_checkpoint(
        tmp_path / "model", args, Layout.MISTRAL, written.append, part_bytes=2**16
    )
    stored = [
        tensor
        for path in (tmp_path / "model").glob("*.safetensors")
        for tensor in load_file(path).values()
    ]
    assert sum(written) == sum(tensor.nbytes for tensor in stored)
    weights = WeightFormat.of(args, dtype, quantize)
    read = Checkpoint(tmp_path / "model").load(
        partial(stage_tensors, args, range(2)), weights, "cpu"
    )
    received: list[tuple[int, int]] = []
    made = random_state(
        partial(stage_tensors, args, range(2)),
        weights,
        "cpu",
        lambda *sizes: received.append(sizes),
    )
    assert made.keys() == read.keys()
    assert all(
        torch.equal(made[name], read[name]) and made[name].dtype is read[name].dtype
        for name in read
    )
    assert all(num_read == 0 for num_read, _ in received)
    assert sum(num_made for _, num_made in received) == sum(
        tensor.nbytes for tensor in made.values()
    )


def test_the_layouts_differ_in_their_rows(tmp_path: Path) -> None:
    """Or one of them would not be in the order that its readers expect."""
    for layout in Layout:
        write_random_checkpoint(tmp_path / layout.name, MODELS["mistral"], layout)
    ours = load_file(tmp_path / "HUGGING_FACE" / "model.safetensors")[
        "model.layers.0.self_attn.q_proj.weight"
    ]
    mistrals = load_file(tmp_path / "MISTRAL" / "consolidated.safetensors")[
        "layers.0.attention.wq.weight"
    ]
    assert torch.equal(ours[0:8], mistrals[[0, 2, 4, 6, 1, 3, 5, 7]])  # of a head of 8
    assert not torch.equal(ours, mistrals)


def test_no_file_is_larger_than_requested(tmp_path: Path) -> None:
    args, folder, limit = MODELS["mixtral"], tmp_path / "model", 40_000
    received: list[int] = []
    write_random_checkpoint(folder, args, Layout.HUGGING_FACE, received.append, part_bytes=limit)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == len(received) > 3
    assert all(sum(t.nbytes for t in load_file(file).values()) <= limit for file in files)
    index = json.loads((folder / INDEX_NAME).read_text())
    assert (
        index["metadata"]["total_size"]
        == sum(received)
        == sum(t.nbytes for file in files for t in load_file(file).values())
    )
    Checkpoint(folder).check(args)


def test_the_command_writes_a_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_random("ministral-8b", tmp_path / "model", Scale.SMALL, LayoutName.MISTRAL)
    assert detect_layout(tmp_path / "model") is Layout.MISTRAL
    assert read_model_args(tmp_path / "model") == tiny_variant(PRESETS["ministral-8b"])
    writing, written = capsys.readouterr().err.splitlines()
    assert writing.startswith("writing ")
    assert "4 layers" in written
    with pytest.raises(ConfigError, match="is not empty; give a folder"):
        make_random("ministral-8b", tmp_path / "model", Scale.SMALL)
    with pytest.raises(
        ConfigError, match=r"'llama' is no published geometry; there are mistral-7b-v0\.1, "
    ):
        make_random("llama", tmp_path / "other")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        make_random("ministral-8b", tmp_path / "file" / "model", Scale.SMALL)
    assert capsys.readouterr().err == "", "nothing is announced that is then refused"


def test_a_half_written_folder_is_no_model(tmp_path: Path) -> None:
    class Full(Exception):
        pass

    def full(_bytes: int) -> None:
        raise Full

    with pytest.raises(Full):
        write_random_checkpoint(tmp_path, MODELS["mistral"], Layout.HUGGING_FACE, full)
    assert not (tmp_path / "config.json").exists()


def test_nothing_is_left_of_a_checkpoint_that_could_not_be_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = MODELS["mistral"]

    def interrupt(_written: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_random_checkpoint(
            tmp_path / "model", args, Layout.HUGGING_FACE, interrupt, part_bytes=1
        )
    assert not (tmp_path / "model").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(KeyboardInterrupt):
        write_random_checkpoint(tmp_path / "empty", args, Layout.HUGGING_FACE, interrupt)
    assert list((tmp_path / "empty").iterdir()) == [], "it was there before"
    monkeypatch.setattr(random_checkpoint, "save_file", _full_disk)
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be written: .*No space left"):
        write_random_checkpoint(tmp_path / "model", args, Layout.HUGGING_FACE)
    assert not (tmp_path / "model").exists()


def _full_disk(*_given: object, **_named: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_disk_without_room_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(ConfigError, match=r"needs 115 KiB, and 1,000 B are free there"):
        write_random_checkpoint(tmp_path / "model", MODELS["mistral"], Layout.MISTRAL)
    assert not (tmp_path / "model").exists()
