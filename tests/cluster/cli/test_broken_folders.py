"""Ways to break a checkpoint's folder, in both layouts: each is answered by one line that names the
file and the fault.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_args, write_tokenizer

from tramontane.cluster.cli import main as cli
from tramontane.proto.errors import TramontaneError
from tramontane.proto.model_folder import Layout
from tramontane.workers.weights.random_checkpoint import write_random_checkpoint

Refused = Callable[..., str]
Damage = Callable[[Path], object]

VOCAB = 300
ARGS = replace(tiny_args(n_layers=3, max_seq_len=128), vocab_size=VOCAB)
HF, MISTRAL = Layout.HUGGING_FACE, Layout.MISTRAL
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 14483464192\n"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"
Q_PROJ, WQ = "model.layers.1.self_attn.q_proj.weight", "layers.1.attention.wq.weight"


class Way(NamedTuple):
    """What is done to a folder, the file of it that the answer names ("." is the folder itself),
    and what the answer says.
    """

    damage: Damage
    names: str
    says: str


# ---- damages


def _written(name: str, data: bytes | str) -> Damage:
    return lambda folder: (folder / name).write_bytes(
        data.encode() if isinstance(data, str) else data
    )


def _without(*names: str) -> Damage:
    return lambda folder: [(folder / name).unlink() for name in names]


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("weights")


def _set(file: str, **changes: object) -> Damage:
    """Keys of the configuration; ``...`` takes one away."""

    def change(folder: Path) -> None:
        config: dict[str, Any] = json.loads((folder / file).read_text()) | changes
        (folder / file).write_text(
            json.dumps({key: value for key, value in config.items() if value is not ...})
        )

    return change


def _hf(**changes: object) -> Damage:
    return _set("config.json", **changes)


def _params(**changes: object) -> Damage:
    return _set("params.json", **changes)


def _rope(**changes: object) -> Damage:
    return _hf(rope_parameters={"rope_theta": 1e4, **changes})


def _tensors(file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file)

    return rewrite


def _hf_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    return _tensors("model.safetensors", change)


def _cut(file: str, keep: int) -> Damage:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:keep])


def _in_two(
    after: Damage, first: str = "model-00001-of-00002.safetensors", index: bool = True
) -> Damage:
    """Weights in two files with an index, which ``after`` damages."""

    def shard(folder: Path) -> None:
        (single,) = folder.glob("*.safetensors")
        tensors = load_file(single)
        single.unlink()
        here = {name: tensor for name, tensor in tensors.items() if "layers.0." in name}
        second = first.replace("00001", "00002", 1)
        save_file(here, folder / first)
        save_file(
            {name: tensor for name, tensor in tensors.items() if name not in here}, folder / second
        )
        if index:
            weight_map = {name: first if name in here else second for name in tensors}
            (folder / f"{single.name}.index.json").write_text(
                json.dumps({"weight_map": weight_map})
            )
        after(folder)

    return shard


def _index(text: str) -> Damage:
    return _in_two(_written("model.safetensors.index.json", text))


def _header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _adapter(folder: Path) -> None:
    _emptied(folder)
    (folder / "adapter_config.json").write_text("{}")
    save_file({"lora_A.weight": torch.ones(2, 32)}, folder / "adapter_model.safetensors")


def _pickled(name: str) -> Damage:
    def convert(folder: Path) -> None:
        (single,) = folder.glob("*.safetensors")
        torch.save(load_file(single), folder / name)
        single.unlink()

    return convert


# ---- the ways

NO_TOKENIZER = (
    "has no tokenizer: there is none of tekken.json, tokenizer.json, tokenizer.model and"
    " tokenizer.model.v1 to .v7m1, so text cannot be turned into tokens; copy one of them from"
    " where the checkpoint was published, or give token ids to the API of tramontane serve or to"
    " LLM.generate"
)
EITHER = {
    "no such folder": Way(shutil.rmtree, ".", "does not exist; --model takes a"),
    "a file instead of a folder": Way(_a_file, ".", "is a file; --model takes a"),
    "an empty folder": Way(
        _emptied, ".", "has neither config.json (Hugging Face's layout) nor params.json"
    ),
    "no tokenizer": Way(_without("tokenizer.model"), ".", NO_TOKENIZER),
    "a tokenizer of garbage": Way(
        _written("tokenizer.model", b"\x00garbage"),
        "tokenizer.model",
        "is not a SentencePiece model",
    ),
}

HUGGING_FACE = {
    # the configuration as a file
    "half a config": Way(
        _written("config.json", '{"hidden_size": 32,'),
        "config.json",
        "is not valid JSON: Expecting property name",
    ),
    "an error page": Way(
        _written("config.json", "<!DOCTYPE html>"),
        "config.json",
        "is not valid JSON: Expecting value",
    ),
    "a config in another encoding": Way(
        _written("config.json", "{}".encode("utf-16")), "config.json", "is not valid JSON: 'utf-8'"
    ),
    "a config that is a list": Way(
        _written("config.json", "[]"), "config.json", "holds no JSON object"
    ),
    "a deep config": Way(
        _written("config.json", "[" * 100_000),
        "config.json",
        "is not valid JSON: maximum recursion depth",
    ),
    # what it describes
    "another architecture": Way(
        _hf(architectures=["LlamaForCausalLM"]), "config.json", "describes LlamaForCausalLM"
    ),
    "a missing key": Way(
        _hf(num_key_value_heads=...), "config.json", "lacks the key 'num_key_value_heads'"
    ),
    "a negative number": Way(
        _hf(num_hidden_layers=-1),
        "config.json",
        "n_layers is -1; it must be a positive whole number",
    ),
    "no layers": Way(_hf(num_hidden_layers=0), "config.json", "n_layers is 0; it"),
    "more layers than there are atoms": Way(
        _hf(num_hidden_layers=10**80),
        "config.json",
        f"n_layers is {10**80}; it must be at most 1024",
    ),
    "a billion layers": Way(
        _hf(num_hidden_layers=10**9), "config.json", f"n_layers is {10**9}; it must be at most 1024"
    ),
    "a billion experts": Way(
        _hf(num_local_experts=10**9), "config.json", f"num_experts is {10**9}"
    ),
    "an absurd width": Way(_hf(hidden_size=10**30), "config.json", f"dim is {10**30}"),
    "heads without width": Way(
        _hf(head_dim=0), "config.json", "head_dim is 0; it must be a positive whole number"
    ),
    "an absurd context": Way(
        _hf(max_position_embeddings=10**30),
        "config.json",
        f"max_seq_len is {10**30}; it must be at most 2147483647",
    ),
    "a number as text": Way(_hf(hidden_size="32"), "config.json", "dim is '32'"),
    "a number that is none": Way(_hf(rms_norm_eps=float("nan")), "config.json", "norm_eps is nan"),
    "NaN layers": Way(_hf(num_hidden_layers=float("nan")), "config.json", "n_layers is nan"),
    "an infinite base": Way(_rope(rope_theta=float("inf")), "config.json", "rope_theta is inf"),
    "no heads": Way(_hf(num_attention_heads=0), "config.json", "n_heads is 0"),
    "heads that cannot be shared": Way(
        _hf(num_key_value_heads=3), "config.json", "4 query heads cannot share 3 key heads evenly"
    ),
    "an odd head": Way(
        _hf(head_dim=7), "config.json", "head_dim is 7; rotary embedding needs an even one"
    ),
    "a context that is nothing": Way(
        _hf(max_position_embeddings=None), "config.json", "max_seq_len is None"
    ),
    "an epsilon that is nothing": Way(
        _hf(rms_norm_eps=None), "config.json", "wrong type: float() argument must be"
    ),
    "an epsilon that is text": Way(
        _hf(rms_norm_eps="tiny"),
        "config.json",
        "wrong type: could not convert string to float: 'tiny'",
    ),
    "an architecture that is a number": Way(
        _hf(architectures=5), "config.json", "wrong type: 'int' object is not subscriptable"
    ),
    "a rotation that is a number": Way(
        _hf(rope_parameters=3), "config.json", "wrong type: 'int' object has no attribute"
    ),
    "a layer more than there is": Way(
        _hf(num_hidden_layers=4), ".", "lacks the tensor model.layers.3.input_layernorm.weight"
    ),
    "a larger vocabulary": Way(
        _hf(vocab_size=301), "model.safetensors", "has shape (300, 32); config.json needs (301, 32)"
    ),
    "a window that is wide": Way(
        _hf(sliding_window="wide"), "config.json", "window of layer 0 is 'wide'"
    ),
    "an empty window": Way(_hf(sliding_window=0), "config.json", "window of layer 0 is 0; it"),
    "half a window": Way(_hf(sliding_window=2.5), "config.json", "window of layer 0 is 2.5"),
    "a layer too few with a kind": Way(
        _hf(layer_types=["full_attention"] * 2),
        "config.json",
        "2 attention windows are given for 3 layers",
    ),
    "a kind of layer that is not known": Way(
        _hf(layer_types=["chunked_attention"] * 3),
        "config.json",
        "layers of type 'chunked_attention'",
    ),
    "an unknown scaling": Way(
        _rope(rope_type="longrope"),
        "config.json",
        "rotary scaling of type 'longrope' is not supported",
    ),
    "yarn without a factor": Way(
        _rope(rope_type="yarn"), "config.json", "rotary scaling of type 'yarn' lacks factor"
    ),
    "yarn with a negative factor": Way(
        _rope(rope_type="yarn", factor=-2, original_max_position_embeddings=64),
        "config.json",
        "factor is -2.0",
    ),
    "more experts chosen than there are": Way(
        _hf(num_experts_per_tok=9), "config.json", "9 experts per token cannot be chosen from 4"
    ),
    "weights of another type": Way(
        _hf(dtype="int8"), "config.json", "weights of type int8 are not supported"
    ),
    "a quantized checkpoint": Way(
        _hf(quantization_config={"quant_method": "awq"}),
        "config.json",
        "weights quantized as AWQ are not supported",
    ),
    "a truth that is text": Way(
        _hf(tie_word_embeddings="false"), "config.json", "tie_word_embeddings is 'false'"
    ),
    "biases": Way(_hf(attention_bias=True), "config.json", "attention_bias is set"),
    "another activation": Way(
        _hf(hidden_act="gelu"), "config.json", "activation 'gelu' is not supported"
    ),
    "an end of sequence that is no token": Way(
        _hf(eos_token_id="</s>"), "config.json", "eos_token_id is '</s>'"
    ),
    "an end of sequence past the vocabulary": Way(
        _hf(eos_token_id=[2, VOCAB]),
        "config.json",
        f"end-of-sequence token {VOCAB} is not in the vocabulary of {VOCAB}",
    ),
    # the weights as files
    "no weights": Way(
        _without("model.safetensors"),
        ".",
        "has neither model.safetensors nor model.safetensors.index.json",
    ),
    "only a pickle": Way(_pickled("pytorch_model.bin"), ".", "has only pytorch_model.bin"),
    "a pointer of Git LFS": Way(
        _written("model.safetensors", LFS_POINTER), "model.safetensors", "is a pointer of Git LFS"
    ),
    "empty weights": Way(
        _written("model.safetensors", b""),
        "model.safetensors",
        "is damaged or truncated: Error while deserializing header: header too small",
    ),
    "weights cut short": Way(
        _cut("model.safetensors", -1),
        "model.safetensors",
        "is damaged or truncated: Error while deserializing header: incomplete metadata",
    ),
    "half a header": Way(
        _cut("model.safetensors", 100),
        "model.safetensors",
        "/model.safetensors is damaged or truncated: Error while deserializing header: invalid"
        " header length",
    ),
    "garbage for a header": Way(
        _written("model.safetensors", _header(b"garbage!")),
        "model.safetensors",
        "is damaged or truncated: Error while deserializing header: invalid JSON",
    ),
    "a header without end": Way(
        _written("model.safetensors", b"\xff" * 64),
        "model.safetensors",
        "is damaged or truncated: Error while deserializing header: header too large",
    ),
    "an index that is no JSON": Way(
        _index("{"), "model.safetensors.index.json", "is not a safetensors index"
    ),
    "an index that names a missing file": Way(
        _in_two(_without("model-00002-of-00002.safetensors")),
        "model-00002-of-00002.safetensors",
        "is missing",
    ),
    "an index that leaves its folder": Way(
        _index('{"weight_map": {"a": "../../secret.safetensors"}}'),
        "model.safetensors.index.json",
        "'../../secret.safetensors', which is not in its folder",
    ),
    "a shard cut short": Way(
        _in_two(_cut("model-00002-of-00002.safetensors", 1000)),
        "model-00002-of-00002.safetensors",
        "model-00002-of-00002.safetensors is damaged or truncated: Error while deserializing"
        " header: invalid header",
    ),
    "an index that names a pickle": Way(
        _index('{"weight_map": {"a": "pytorch_model.bin"}}'),
        "model.safetensors.index.json",
        "'pytorch_model.bin'; only safetensors is ever opened",
    ),
    "a shard that the index does not name": Way(
        _in_two(
            lambda folder: save_file(
                {"x": torch.ones(1)}, folder / "model-00099-of-00099.safetensors"
            )
        ),
        "model-00099-of-00099.safetensors",
        "is not named by model.safetensors.index.json",
    ),
    "a tensor that the index does not name": Way(
        _in_two(
            _tensors("model-00002-of-00002.safetensors", lambda t: t.update({"x": torch.ones(1)}))
        ),
        "model-00002-of-00002.safetensors",
        "holds the tensor x, but model.safetensors.index.json does not name it",
    ),
    "a tensor in two shards of an index": Way(
        _in_two(
            _tensors(
                "model-00002-of-00002.safetensors", lambda t: t.update({K_PROJ: torch.ones(16, 32)})
            )
        ),
        "model-00002-of-00002.safetensors",
        "but model.safetensors.index.json says it is in model-00001-of-00002.safetensors",
    ),
    "a tensor in two shards": Way(
        _in_two(
            _tensors(
                "model-00002-of-00002.safetensors", lambda t: t.update({K_PROJ: torch.ones(16, 32)})
            ),
            index=False,
        ),
        "model-00001-of-00002.safetensors",
        "and in model-00002-of-00002.safetensors; one of the files does not belong here",
    ),
    # the tensors
    "a missing tensor": Way(
        _hf_tensors(lambda t: t.pop(Q_PROJ)), ".", f"lacks the tensor {Q_PROJ}"
    ),
    "no tensors": Way(_hf_tensors(dict.clear), ".", "lacks the tensor model.embed_tokens.weight"),
    "a missing head": Way(
        _hf_tensors(lambda t: t.pop("lm_head.weight")), ".", "lacks the tensor lm_head.weight"
    ),
    "a tensor too many": Way(
        _hf_tensors(lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.ones(2)})),
        "model.safetensors",
        "holds the tensor model.layers.3.mlp.up_proj.weight",
    ),
    "the tensors of an adapter": Way(
        _hf_tensors(
            lambda t: t.update(
                {"base_model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2)}
            )
        ),
        "model.safetensors",
        "q_proj.lora_A.weight",
    ),
    "a tensor of another shape": Way(
        _hf_tensors(lambda t: t.update({Q_PROJ: torch.ones(7, 32)})),
        "model.safetensors",
        "has shape (7, 32); config.json needs (32, 32)",
    ),
    "a tensor of whole numbers": Way(
        _hf_tensors(lambda t: t.update({Q_PROJ: torch.ones(32, 32, dtype=torch.int8)})),
        "model.safetensors",
        "is of type I8",
    ),
    "a tensor of eight bits": Way(
        _hf_tensors(lambda t: t.update({Q_PROJ: torch.ones(32, 32).to(torch.float8_e4m3fn)})),
        "model.safetensors",
        "is of type F8_E4M3",
    ),
}

MISTRALS_OWN = {
    "an adapter instead of a model": Way(_adapter, ".", "holds an adapter, not a model"),
    "half of params": Way(_written("params.json", "{"), "params.json", "is not valid JSON"),
    "params that are text": Way(
        _written("params.json", '"text"'), "params.json", "holds no JSON object"
    ),
    "a missing parameter": Way(_params(n_heads=...), "params.json", "lacks the key 'n_heads'"),
    "another kind of model": Way(
        _params(model_type="mamba"), "params.json", "describes a model of type 'mamba'"
    ),
    "weights quantized in another way": Way(
        _params(quantization={"qformat_weight": "nvfp4"}),
        "params.json",
        "quantized as qformat_weight nvfp4 are not supported",
    ),
    "an adapter's rank": Way(_params(lora={"rank": 64}), "params.json", "lora is set"),
    "shared experts": Way(
        _params(moe={"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1}),
        "params.json",
        "moe.num_shared_experts is set",
    ),
    "a negative size": Way(_params(hidden_dim=-48), "params.json", "hidden_dim is -48"),
    "a million layers": Way(_params(n_layers=10**6), "params.json", f"n_layers is {10**6}"),
    "layers that are text": Way(_params(n_layers="three"), "params.json", "n_layers is 'three'"),
    "an infinite epsilon": Way(_params(norm_eps=float("inf")), "params.json", "norm_eps is inf"),
    "uneven heads": Way(
        _params(n_kv_heads=3), "params.json", "4 query heads cannot share 3 key heads evenly"
    ),
    "a pattern of windows that does not repeat": Way(
        _params(sliding_window=[None, 24]),
        "params.json",
        "sliding_window has 2 entries for 3 layers",
    ),
    "a window that is text": Way(
        _params(sliding_window="wide"), "params.json", "window of layer 0 is 'wide'"
    ),
    "llama's scaling alone": Way(
        _params(llama_4_scaling={"original_max_position_embeddings": 8, "beta": 0.1}),
        "params.json",
        "llama_4_scaling is not that of the yarn block",
    ),
    "weights of params of another type": Way(
        _params(dtype="float8"), "params.json", "weights of type float8"
    ),
    "a matrix in two files": Way(
        _in_two(
            _tensors(
                "consolidated-00002-of-00002.safetensors",
                lambda t: t.update({"layers.0.attention.wk.weight": torch.ones(16, 32)}),
            ),
            "consolidated-00001-of-00002.safetensors",
            index=False,
        ),
        "consolidated-00001-of-00002.safetensors",
        "and in consolidated-00002-of-00002.safetensors; one of the files",
    ),
    "no consolidated weights": Way(
        _without("consolidated.safetensors"), ".", "has neither consolidated.safetensors nor"
    ),
    "only an old pickle": Way(_pickled("consolidated.00.pth"), ".", "has only consolidated.00.pth"),
    "a missing matrix": Way(
        _tensors("consolidated.safetensors", lambda t: t.pop(WQ)), ".", f"lacks the tensor {WQ}"
    ),
    "a misshapen matrix": Way(
        _tensors("consolidated.safetensors", lambda t: t.update({WQ: torch.ones(32)})),
        "consolidated.safetensors",
        "has shape (32,); params.json needs (32, 32)",
    ),
    "names of the other layout": Way(
        _tensors("consolidated.safetensors", lambda t: t.update({Q_PROJ: torch.ones(1)})),
        "consolidated.safetensors",
        f"holds the tensor {Q_PROJ}",
    ),
}

WAYS = {
    **{(layout, name): way for layout in Layout for name, way in EITHER.items()},
    **{(HF, name): way for name, way in HUGGING_FACE.items()},
    **{(MISTRAL, name): way for name, way in MISTRALS_OWN.items()},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, Path]:
    """A checkpoint in each layout, with a tokenizer."""
    folders = {layout: tmp_path_factory.mktemp("whole") / layout.name for layout in Layout}
    for layout, folder in folders.items():
        write_random_checkpoint(folder, ARGS, layout)
        write_tokenizer(folder, VOCAB)
    return folders


def _answer(refused: Refused, folder: Path) -> str:
    return refused("generate", "--model", folder, "--local", "The")


@pytest.mark.parametrize("layout", Layout)
def test_the_folder_that_is_broken_was_whole(
    whole: dict[Layout, Path], layout: Layout, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.app(
        ["generate", "--model", str(whole[layout]), "--local", "--max-tokens", "1", "The"],
        standalone_mode=False,
    )
    assert capsys.readouterr().out.startswith("The")


@pytest.mark.parametrize(
    ("layout", "name"),
    WAYS,
    ids=lambda part: part.name.lower() if isinstance(part, Layout) else part,
)
def test_a_broken_folder_is_answered_by_one_line(
    refused: Refused, whole: dict[Layout, Path], tmp_path: Path, layout: Layout, name: str
) -> None:
    way = WAYS[layout, name]
    folder = shutil.copytree(whole[layout], tmp_path / "model")
    way.damage(folder)
    message = _answer(refused, folder)
    assert str(folder / way.names) in message
    assert way.says in message


@pytest.mark.parametrize(
    ("layout", "name"),
    WAYS,
    ids=lambda part: part.name.lower() if isinstance(part, Layout) else part,
)
def test_a_plan_says_what_a_server_would_refuse(
    whole: dict[Layout, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    layout: Layout,
    name: str,
) -> None:
    """In the same words: it is refused, too, if the configuration is wrong, and has a note if the
    weights are.

    A plan needs no tokenizer, and no weights.
    """
    way, folder = WAYS[layout, name], shutil.copytree(whole[layout], tmp_path / "model")
    way.damage(folder)
    try:
        cli.app(["plan", "--model", str(folder), "--gpu-memory", "4GiB"], standalone_mode=False)
        said, is_planned = capsys.readouterr().err, True
    except TramontaneError as error:
        said, is_planned = str(error), False
    has_note = "note: the plan is of the configuration alone" in said
    if "tokenizer" in way.names + way.says or (
        is_planned and not any(folder.glob("*.safetensors*"))
    ):
        assert is_planned
        assert not has_note
        return
    assert way.says in said
    assert str(folder / way.names) in said
    assert has_note == is_planned


def test_every_fault_has_an_answer_of_its_own() -> None:
    for ways in (EITHER | HUGGING_FACE, EITHER | MISTRALS_OWN):
        said = [way.says for way in ways.values()]
        assert not [
            (one, other) for one in said for other in said if one is not other and one in other
        ]
    assert len(EITHER | HUGGING_FACE | MISTRALS_OWN) >= 20


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("config.json", "cannot be read: Permission denied"),
        ("model.safetensors", "cannot be read: Permission denied"),
        ("tokenizer.model", ""),
        (".", "is not readable"),
    ],
)
def test_what_may_not_be_read_is_named(
    refused: Refused, whole: dict[Layout, Path], tmp_path: Path, name: str, says: str
) -> None:
    folder = shutil.copytree(whole[HF], tmp_path / "model")
    (folder / name).chmod(0)
    if os.access(folder / name, os.R_OK):
        pytest.skip("this user, root as a rule, may read everything")
    message = _answer(refused, folder)
    (folder / name).chmod(0o700)
    assert str(folder / name) in message
    assert says in message
