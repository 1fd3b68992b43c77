"""A folder that is not the same everywhere is found out, and the file that differs is named."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import INDEX_NAME, SINGLE_NAME, tiny_args, write_checkpoint

from tramontane.proto.errors import CheckpointError
from tramontane.workers.weights import checkpoint
from tramontane.workers.weights.checkpoint import (
    NUM_SAMPLES,
    SAMPLE_BYTES,
    Checkpoint,
    check_checkpoint_digest,
)

BIG = 1_000_000
DISTANCE, LAST_SAMPLE = 15_808, 995_904  # for BIG bytes: (1,000,000 - 4096) / 63, and 63 times that
WHOLE = NUM_SAMPLES * SAMPLE_BYTES


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("original") / "model", tiny_args(n_layers=1))


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def _resize(path: Path, size: int) -> None:
    """A valid file of exactly ``size`` bytes: one tensor of bytes fills it."""
    save_file({"filling": torch.zeros(0, dtype=torch.uint8)}, path)
    header = path.stat().st_size
    for _ in range(3):  # the header grows with the number of digits in it
        save_file({"filling": torch.arange(size - header, dtype=torch.int64).to(torch.uint8)}, path)
        header += path.stat().st_size - size
    assert path.stat().st_size == size


def _with_file_of(folder: Path, size: int) -> Path:
    _resize(folder / SINGLE_NAME, size)
    return folder


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def _differs_after(folder: Path, name: str, change: Callable[[Path], object]) -> str:
    """The message for the file ``name`` after ``change``."""
    expected = Checkpoint(folder).digest()
    change(folder / name)
    with pytest.raises(CheckpointError) as refused:
        check_checkpoint_digest(folder, expected)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_equal_folders_are_equal_wherever_they_are(original: Path, copy: Path) -> None:
    expected = Checkpoint(original).digest()
    assert [name for name, _ in expected] == ["config.json", SINGLE_NAME]
    assert Checkpoint(copy).digest() == expected
    check_checkpoint_digest(copy, expected)


def test_files_that_hold_no_model_do_not_matter(original: Path, copy: Path) -> None:
    (copy / "README.md").write_text("another text")
    check_checkpoint_digest(copy, Checkpoint(original).digest())
    assert Checkpoint(copy).digest() == Checkpoint(original).digest()


def test_every_shard_is_in_it(copy: Path) -> None:
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    for name, file in shards.items():
        save_file({name: torch.ones(3)}, copy / file)
    (copy / SINGLE_NAME).unlink()
    (copy / INDEX_NAME).write_text(
        '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    )
    assert set(dict(Checkpoint(copy).digest())) == {"config.json", *shards.values()}
    message = _differs_after(copy, "model-2.safetensors", lambda path: _flip(path, -1))
    assert message.startswith(f"{copy / 'model-2.safetensors'} differs")


@pytest.mark.parametrize("name", ["config.json", SINGLE_NAME])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.5, 1.0])
def test_one_byte_of_a_small_file_is_noticed(copy: Path, name: str, part: float) -> None:
    position = int(part * ((copy / name).stat().st_size - 1))
    message = _differs_after(copy, name, lambda path: _flip(path, position))
    assert message.startswith(f"{copy / name} differs")


@pytest.mark.parametrize("name", ["config.json", SINGLE_NAME])
def test_a_byte_more_or_less_is_noticed(copy: Path, name: str) -> None:
    data = (copy / name).read_bytes()
    for changed in (data + b" ", data[:-1], b""):
        assert str(copy / name) in _differs_after(
            copy, name, lambda path, changed=changed: path.write_bytes(changed)
        )
        (copy / name).write_bytes(data)


@pytest.mark.parametrize("position", [0, 1, WHOLE // 2, WHOLE - SAMPLE_BYTES, WHOLE - 1])
def test_a_file_of_as_many_bytes_as_are_sampled_is_read_whole(copy: Path, position: int) -> None:
    message = _differs_after(
        _with_file_of(copy, WHOLE), SINGLE_NAME, lambda path: _flip(path, position)
    )
    assert message.startswith(f"{copy / SINGLE_NAME} differs")


@pytest.mark.parametrize(
    "position",
    [
        0,
        SAMPLE_BYTES - 1,
        DISTANCE,
        DISTANCE + SAMPLE_BYTES - 1,
        40 * DISTANCE,
        LAST_SAMPLE,
        LAST_SAMPLE + SAMPLE_BYTES - 1,
    ],
)
def test_the_first_and_last_bytes_of_a_big_files_samples_are_noticed(
    copy: Path, position: int
) -> None:
    message = _differs_after(
        _with_file_of(copy, BIG), SINGLE_NAME, lambda path: _flip(path, position)
    )
    assert message.startswith(f"{copy / SINGLE_NAME} differs")


@pytest.mark.parametrize(
    "position", [SAMPLE_BYTES, DISTANCE - 1, DISTANCE + SAMPLE_BYTES, LAST_SAMPLE - 1]
)
def test_between_the_samples_a_big_file_is_not_read(copy: Path, position: int) -> None:
    folder = _with_file_of(copy, BIG)
    expected = Checkpoint(folder).digest()
    _flip(folder / SINGLE_NAME, position)
    check_checkpoint_digest(folder, expected)


def test_the_worked_example_of_the_sampling_holds() -> None:
    assert (NUM_SAMPLES, SAMPLE_BYTES) == (64, 4096)
    assert (BIG - SAMPLE_BYTES) // (NUM_SAMPLES - 1) == DISTANCE
    assert (NUM_SAMPLES - 1) * DISTANCE == LAST_SAMPLE
    docstring = str(checkpoint._digest.__doc__).replace(",", "")
    assert f"= {DISTANCE} the" in docstring
    assert f" {LAST_SAMPLE}." in docstring


@pytest.mark.parametrize("size", [WHOLE + 1, WHOLE + NUM_SAMPLES, BIG, BIG + NUM_SAMPLES - 2])
def test_the_last_byte_of_a_big_file_is_noticed(copy: Path, size: int) -> None:
    message = _differs_after(
        _with_file_of(copy, size), SINGLE_NAME, lambda path: _flip(path, size - 1)
    )
    assert message.startswith(f"{copy / SINGLE_NAME} differs")


def test_a_big_file_that_only_grew_is_noticed(copy: Path) -> None:
    folder = _with_file_of(copy, BIG)
    message = _differs_after(
        folder, SINGLE_NAME, lambda path: path.write_bytes(path.read_bytes() + b"\0")
    )
    assert message.startswith(f"{folder / SINGLE_NAME} differs")


@pytest.mark.parametrize("name", ["config.json", SINGLE_NAME])
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    message = _differs_after(copy, name, lambda path: path.unlink())
    assert message == f"{copy / name} is missing, but other nodes have it"


def test_of_several_files_the_one_that_differs_is_named(original: Path, copy: Path) -> None:
    _flip(copy / SINGLE_NAME, -1)
    with pytest.raises(CheckpointError, match=SINGLE_NAME):
        check_checkpoint_digest(copy, Checkpoint(original).digest())


def test_another_tokenizer_is_noticed(copy: Path) -> None:
    """Its pieces would mean other ids to the ingress than to the client."""
    (copy / "tokenizer.model").write_bytes(b"pieces")
    message = _differs_after(copy, "tokenizer.model", lambda path: path.write_bytes(b"Pieces"))
    assert message.startswith(f"{copy / 'tokenizer.model'} differs")
