"""Models as Mistral has published them since March 2025: an encoder of images around the text
model, and FP8 weights.

transformers writes the checkpoints and computes the logits. Of an FP8 checkpoint they are those of
``w.float() * scale``.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_once import checked_once
from harness import GREEDY, random_ids, run_in_process
from published_models import (
    SHAPES,
    SIZES,
    VISION,
    YARN,
    Published,
    Shape,
    publish,
    to_mistral_layout,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stage_driver import Driver
from tiny_models import tiny_plan
from torch import Tensor
from transformers import Ministral3Config, Mistral3Config, Mistral3ForConditionalGeneration

from tramontane.proto.errors import CheckpointError
from tramontane.proto.hf_config import from_hf_config
from tramontane.proto.mistral_params import from_mistral_params
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import Layout, detect_layout, read_model_args
from tramontane.proto.presets import PRESETS
from tramontane.proto.weight_format import Quantization
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights import tensor_reader
from tramontane.workers.weights.checkpoint import Checkpoint
from tramontane.workers.weights.tensor_names import is_vision

TOLERANCE = 1e-4
LENGTHS = (100, 37, 3)
SCALE = "language_model.model.layers.1.self_attn.k_proj.weight_scale_inv"


@dataclass(frozen=True)
class Case:
    published: Published
    folders: dict[Layout, Path]
    prompts: list[list[int]]
    logits: list[Tensor]  # transformers'
    fp8: bool


@pytest.fixture(autouse=True, scope="module")
def _checked_once() -> Iterator[None]:
    with checked_once():
        yield


@pytest.fixture(
    scope="module", params=[(name, fp8) for name in SHAPES for fp8 in (False, True)], ids=str
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    (name, fp8), folder = request.param, tmp_path_factory.mktemp("wrapped")
    scheme = "dynamic" if name == "devstral-2-123b" else "static"
    shards = "40KB" if name == "ministral-3-8b" else "5GB"
    published = publish(folder / "hf", SHAPES[name], fp8=fp8, scheme=scheme, max_shard_size=shards)
    to_mistral_layout(published.folder, folder / "mistral")
    prompts = [random_ids(n, seed=n, vocab_size=128) for n in LENGTHS]
    folders = {Layout.HUGGING_FACE: published.folder, Layout.MISTRAL: folder / "mistral"}
    return Case(published, folders, prompts, [published.logits(prompt) for prompt in prompts], fp8)


@pytest.fixture
def fp8_folder(tmp_path: Path) -> Path:
    return publish(tmp_path / "model", SHAPES["mistral-small-3.1"], fp8=True).folder


@contextmanager
def _recorded_reads() -> Iterator[list[tuple[str, int]]]:
    """Record the name and the bytes of everything that is read from tensors."""
    reads: list[tuple[str, int]] = []
    original = tensor_reader.open_safetensors

    class Slice:
        def __init__(self, name: str, inner: Any) -> None:  # safetensors' slice has no type
            self.name, self.inner = name, inner

        def __getitem__(self, rows: slice) -> Tensor:
            read: Tensor = self.inner[rows]
            reads.append((self.name, read.nbytes))
            return read

    class File:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def get_slice(self, name: str) -> Slice:
            return Slice(name, self.inner.get_slice(name))

    @contextmanager
    def opened(path: Path, framework: str) -> Iterator[File]:
        with original(path, framework) as file:
            yield File(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_reader, "open_safetensors", opened)
        yield reads


@pytest.mark.parametrize("layout", Layout)
def test_both_layouts_say_the_same(case: Case, layout: Layout) -> None:
    folder = case.folders[layout]
    assert detect_layout(folder) is layout
    args = read_model_args(folder)
    assert args.quantization is (Quantization.FP8 if case.fp8 else None)
    assert Checkpoint(folder).check(args) == "bfloat16"


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize(
    ("stages", "cut"), [(1, [100]), (2, [5, 1, 15, 16, 17, 1, 33, 12])], ids=["whole", "cut"]
)
def test_logits_are_those_of_transformers(
    case: Case, layout: Layout, stages: int, cut: list[int]
) -> None:
    folder = case.folders[layout]
    plan = tiny_plan(read_model_args(folder), stages)
    driver = Driver(plan, [StageWorker.load(stage, folder) for stage in plan.stages])
    for ours, theirs in zip(
        driver.run(case.prompts, [cut, [30, *[1] * 7], [3]]), case.logits, strict=True
    ):
        assert theirs.std() > 0.1
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


def test_greedy_tokens_are_equal_at_1_2_and_4_stages(case: Case) -> None:
    outputs = []
    for stages in (1, 2, 4):
        plan = tiny_plan(read_model_args(case.published.folder), stages)
        workers = [StageWorker.load(stage, case.published.folder) for stage in plan.stages]
        outputs.append(run_in_process(plan, workers, case.prompts, GREEDY))
    assert outputs[0] == outputs[1] == outputs[2]
    for tokens, logits in zip(outputs[0], case.logits, strict=True):
        assert tokens[0] == logits[-1].argmax().item()


@pytest.mark.parametrize("layout", Layout)
def test_the_encoder_of_images_is_not_read(case: Case, layout: Layout) -> None:
    folder = case.folders[layout]
    stored = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            # safetensors has no iterator
            stored |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert any(map(is_vision, stored)) == (
        layout is Layout.MISTRAL or SHAPES["devstral-2-123b"].rope != _rope(folder)
    )
    with _recorded_reads() as reads:
        args = read_model_args(folder)
        Checkpoint(folder).check(args)
        for stage in tiny_plan(args, 2).stages:
            StageWorker.load(stage, folder)
    assert not [name for name, _ in reads if is_vision(name)]
    needed = {
        name: tensor.nbytes
        for name, tensor in stored.items()
        if not is_vision(name) and tensor.dim()
    }
    # the last stage's, too
    tied = args.tied_embeddings * next(size for name, size in needed.items() if "embed" in name)
    assert sum(size for _, size in reads) == sum(needed.values()) + tied


def _rope(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return {
        key: config.get("rope_parameters", {}).get(key) for key in SHAPES["devstral-2-123b"].rope
    }


def test_shards_with_nothing_but_an_encoder_of_images_need_not_be_there(tmp_path: Path) -> None:
    folder = publish(
        tmp_path / "model", SHAPES["ministral-3-8b"], fp8=True, max_shard_size="10KB"
    ).folder
    of_images = [
        path for path in folder.glob("*.safetensors") if all(map(is_vision, load_file(path)))
    ]
    assert of_images
    for path in of_images:
        path.unlink()
    args = read_model_args(folder)
    Checkpoint(folder).check(args)
    StageWorker.load(tiny_plan(args).stages[0], folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("stages", [1, 2])
def test_planned_bytes_are_those_in_memory(case: Case, stages: int, dtype: str) -> None:
    folder = case.published.folder
    plan = tiny_plan(read_model_args(folder), stages, dtype=dtype)
    for stage in plan.stages:
        state = StageWorker.load(stage, folder).model.state_dict()
        held = sum(tensor.nbytes for tensor in state.values())
        assert held == pytest.approx(stage.weight_bytes + stage.padding_bytes, rel=0.02)
        numbers = [
            tensor
            for name, tensor in state.items()
            if name.startswith("layers") and tensor.dim() > 1
        ]
        assert {tensor.dtype for tensor in numbers} == {
            torch.float8_e4m3fn if case.fp8 else torch.bfloat16
        }


def test_other_formats_are_made_of_the_same_weights(fp8_folder: Path) -> None:
    """``--quantize`` of an FP8 checkpoint: FP8 changes the head only, others are made of
    ``w.float() * scale``.
    """
    prompt, args = random_ids(50, seed=0, vocab_size=128), read_model_args(fp8_folder)
    logits = {}
    for quantize in (None, *Quantization):
        plan = tiny_plan(args, quantize=quantize)
        (logits[quantize],) = Driver(plan, [StageWorker.load(plan.stages[0], fp8_folder)]).run(
            [prompt], [[50]]
        )
    exact = logits.pop(None)
    for quantize, found in logits.items():
        difference = (found - exact).norm() / exact.norm()
        assert 1e-5 < difference < (0.05 if quantize is Quantization.FP8 else 0.1), quantize


# ---- red


def _logits(folder: Path, prompt: list[int]) -> Tensor:
    plan = tiny_plan(read_model_args(folder))
    return Driver(plan, [StageWorker.load(plan.stages[0], folder)]).run([prompt], [[len(prompt)]])[
        0
    ]


def _change(folder: Path, **changes: Tensor) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | changes, path, metadata={"format": "pt"})


def test_every_scale_counts(tmp_path: Path) -> None:
    """With two scales exchanged, or one inverted, the logits are others."""
    published = publish(tmp_path / "model", SHAPES["mistral-small-3.1"], fp8=True)
    folder, prompt = published.folder, random_ids(20, seed=1, vocab_size=128)
    exact, original = published.logits(prompt), load_file(folder / "model.safetensors")
    # of its matrix, and not
    others = [
        SCALE.replace("self_attn.k_proj", name) for name in ("self_attn.v_proj", "mlp.down_proj")
    ]
    exchanged = [{SCALE: original[other], other: original[SCALE]} for other in others]
    for changes in (*exchanged, {SCALE: 1 / original[SCALE]}):
        _change(folder, **original | changes)
        assert (_logits(folder, prompt) - exact).abs().max() > 100 * TOLERANCE
    _change(folder, **original)
    torch.testing.assert_close(_logits(folder, prompt), exact, rtol=0, atol=TOLERANCE)


# ---- what is refused


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (torch.ones(64), "one scale for each matrix"),
        (torch.tensor(0.0), "must be a positive number"),
        (torch.tensor(float("nan")), "must be a positive number"),
        (torch.tensor(1, dtype=torch.int32), "of type I32"),
    ],
)
def test_scales_that_are_no_positive_number_are_refused(
    fp8_folder: Path, scale: Tensor, words: str
) -> None:
    _change(fp8_folder, **{SCALE: scale})
    with pytest.raises(CheckpointError, match=words) as refused:
        Checkpoint(fp8_folder).check(read_model_args(fp8_folder))
    assert SCALE in str(refused.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scales_may_have_any_float_type_and_one_element(
    fp8_folder: Path, dtype: torch.dtype
) -> None:
    _change(fp8_folder, **{SCALE: torch.tensor([2.0**-10], dtype=dtype)})
    args = read_model_args(fp8_folder)
    Checkpoint(fp8_folder).check(args)
    state = StageWorker.load(tiny_plan(args).stages[0], fp8_folder).model.state_dict()
    assert (state["layers.1.attention.wqkv.scale"][64:96] == 2.0**-10).all()


def test_a_scale_that_is_missing_is_named(fp8_folder: Path) -> None:
    path = fp8_folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[SCALE]
    save_file(tensors, path)
    with pytest.raises(
        CheckpointError,
        match=r"lacks the tensor model\.layers\.1\.self_attn\.k_proj\.weight_scale_inv",
    ):
        Checkpoint(fp8_folder).check(read_model_args(fp8_folder))


def test_a_layer_that_is_not_quantized_is_refused(fp8_folder: Path) -> None:
    name = SCALE.removesuffix("_scale_inv")
    _change(fp8_folder, **{name: torch.ones(32, 64, dtype=torch.bfloat16)})
    with pytest.raises(
        CheckpointError,
        match=r"k_proj\.weight .* is of type BF16; config\.json says that matrices are FP8",
    ):
        Checkpoint(fp8_folder).check(read_model_args(fp8_folder))


@pytest.mark.parametrize(
    "name", ["language_model.lm_head.weight", "language_model.model.embed_tokens.weight"]
)
def test_a_head_in_fp8_is_refused(fp8_folder: Path, name: str) -> None:
    _change(fp8_folder, **{name: torch.ones(128, 64, dtype=torch.float8_e4m3fn)})
    with pytest.raises(
        CheckpointError,
        match=rf"{name} .* is of type F8_E4M3, which only matrices of layers may be",
    ):
        Checkpoint(fp8_folder).check(read_model_args(fp8_folder))


def test_what_the_wrapper_says_alone_counts(fp8_folder: Path) -> None:
    """Published configurations have the end-of-sequence token and the data type in either place."""
    config = json.loads((fp8_folder / "config.json").read_text())
    for name in ("eos_token_id", "dtype"):
        config["text_config"].pop(name, None)
    args = from_hf_config(config | {"eos_token_id": 7, "dtype": "float16"})
    assert (args.eos_token_ids, args.dtype) == ((7,), "float16")
    assert from_hf_config(config | {"dtype": None, "torch_dtype": "float16"}).dtype == "float16"


def test_fp8_weights_without_a_word_in_the_configuration_are_refused(fp8_folder: Path) -> None:
    path = fp8_folder / "config.json"
    config, args = json.loads(path.read_text()), read_model_args(fp8_folder)
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"a scale of quantized weights, and no configuration says how"
    ):
        read_model_args(fp8_folder)
    with pytest.raises(
        CheckpointError,
        match=r"is of type F8_E4M3, and config\.json does not say how it is quantized",
    ):
        Checkpoint(fp8_folder).check(replace(args, quantization=None))


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "FP8 with a scale for each block of 128 x 128 numbers",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"format": "nvfp4-pack-quantized"}},
            },
            r"compressed-tensors \(nvfp4-pack-quantized\)",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            r"compressed-tensors \(pack-quantized\)",
        ),
        ({"quant_method": "gptq", "bits": 4}, r"GPTQ \(4 bits\)"),
        ({"quant_method": "awq"}, "AWQ"),
        ({"bits": 4}, r"an unknown format \(4 bits\)"),
        ({"bits": 4, "group_size": 64}, r"MLX \(4 bits\)"),
    ],
)
def test_other_formats_are_refused_by_name(
    fp8_folder: Path, quantization: dict[str, Any], words: str
) -> None:
    path = fp8_folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization})
    )
    with pytest.raises(
        CheckpointError,
        match=rf"quantized as {words} are not supported: .* FP8 with one scale for each matrix",
    ):
        read_model_args(fp8_folder)


def test_other_formats_of_mistrals_layout_are_refused_by_name(
    fp8_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mistral"
    to_mistral_layout(fp8_folder, folder)
    path = folder / "params.json"
    for given, words in (
        ({"qformat_weight": "nvfp4"}, "qformat_weight nvfp4"),
        ({"qformat_weight": "fp8_e4m3", "qscheme_act": "BLOCK"}, "qscheme_act BLOCK"),
    ):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization": given}))
        with pytest.raises(CheckpointError, match=words):
            read_model_args(folder)


def test_a_wrapper_around_another_model_is_refused(fp8_folder: Path) -> None:
    path = fp8_folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["model_type"] = "llama"
    path.write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError,
        match=r"text model of type 'llama'; supported: mistral, ministral3, mistral4",
    ):
        read_model_args(fp8_folder)


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        (True, False, True),
        (False, True, True),
        (True, None, True),
        (None, True, True),
        (False, False, False),
        (None, None, False),
    ],
)
def test_embeddings_are_tied_if_either_says_so(
    fp8_folder: Path, outer: bool | None, inner: bool | None, expected: bool
) -> None:
    """transformers writes ``tie_word_embeddings`` of the wrapper, whose default is true, and of the
    text model.
    """
    path = fp8_folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["tie_word_embeddings"], config["tie_word_embeddings"] = inner, outer
    path.write_text(json.dumps(config))
    assert read_model_args(fp8_folder).tied_embeddings is expected


def test_names_as_they_are_in_memory_are_known_too(tmp_path: Path) -> None:
    """transformers calls the text model ``model.language_model`` in memory, and some tools write
    these names.
    """
    published = publish(tmp_path / "model", Shape(), fp8=False)
    path, prompt = published.folder / "model.safetensors", random_ids(9, seed=2, vocab_size=128)
    renamed = {
        name.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head", "lm_head"
        ): tensor
        for name, tensor in load_file(path).items()
    }
    assert "model.language_model.norm.weight" in renamed
    save_file(renamed, path, metadata={"format": "pt"})
    torch.testing.assert_close(
        _logits(published.folder, prompt), published.logits(prompt), rtol=0, atol=TOLERANCE
    )
    copy = tmp_path / "copy"
    shutil.copytree(published.folder, copy)
    for name, words in (
        ("lm_head.extra", r"holds the tensor lm_head\.extra"),
        (
            "language_model.model.norm.weight",
            "as (language_model.model|model.language_model).norm.weight, too",
        ),
    ):
        save_file(
            renamed | {name: torch.ones(1)}, copy / "model.safetensors", metadata={"format": "pt"}
        )
        with pytest.raises(CheckpointError, match=words):
            Checkpoint(copy).check(read_model_args(copy))


# ---- the output head


def _with_stored_head(folder: Path) -> ModelArgs:
    args = Checkpoint(folder).with_stored_head(read_model_args(folder))
    Checkpoint(folder).check(args)
    return args


def _compare_with_transformers(folder: Path) -> None:
    prompt, plan = random_ids(20, seed=4, vocab_size=128), tiny_plan(_with_stored_head(folder))
    (ours,) = Driver(plan, [StageWorker.load(plan.stages[0], folder)]).run([prompt], [[20]])
    settings = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = Mistral3ForConditionalGeneration.from_pretrained(folder, **settings).eval()
    torch.testing.assert_close(
        ours, Published(folder, model).logits(prompt), rtol=0, atol=TOLERANCE
    )


def test_a_head_that_differs_from_tied_embeddings_is_used(tmp_path: Path) -> None:
    """As a fine-tune may have it. transformers warns, and does the same."""
    folder = publish(tmp_path / "model", Shape(), fp8=False).folder
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["tie_word_embeddings"] = config["tie_word_embeddings"] = True
    path.write_text(json.dumps(config))
    assert read_model_args(folder).tied_embeddings
    assert not _with_stored_head(folder).tied_embeddings
    _compare_with_transformers(folder)
    tensors = load_file(folder / "model.safetensors")
    embeddings = tensors["language_model.model.embed_tokens.weight"]
    head = embeddings.clone()
    head[-1, -1] += 1
    for same, stored in ((False, head), (False, embeddings.float()), (True, embeddings.clone())):
        _change(folder, **{"language_model.lm_head.weight": stored})
        assert _with_stored_head(folder).tied_embeddings is same


def test_what_transformers_writes_by_its_defaults(tmp_path: Path) -> None:
    """``tie_word_embeddings`` is then true of the wrapper and false of the text model, and there is
    no head.
    """
    torch.manual_seed(0)
    text = Ministral3Config(**SIZES, sliding_window=None, rope_parameters=dict(YARN))
    model = Mistral3ForConditionalGeneration(
        Mistral3Config(vision_config=VISION, text_config=text.to_dict())
    )
    model.save_pretrained(tmp_path / "model")
    assert not any(
        "lm_head" in name for name in load_file(tmp_path / "model" / "model.safetensors")
    )
    assert _with_stored_head(tmp_path / "model").tied_embeddings
    _compare_with_transformers(tmp_path / "model")


# ---- configurations as they are published


SMALL_3_1 = {
    **{
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "torch_dtype": "bfloat16",
    },
    **{
        "image_token_index": 10,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
    },
    "text_config": {
        **{
            "model_type": "mistral",
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 32_768,
            "head_dim": 128,
        },
        **{
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "vocab_size": 131_072,
        },
        **{
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e9,
            "sliding_window": None,
        },
    },
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 1024,
        "head_dim": 64,
        "vocab_size": 32_000,
        "rope_theta": 1e4,
    },
}
DEVSTRAL_2 = {
    **{
        "dim": 12_288,
        "n_layers": 88,
        "head_dim": 128,
        "hidden_dim": 28_672,
        "n_heads": 96,
        "n_kv_heads": 8,
        "rope_theta": 1e6,
    },
    **{
        "norm_eps": 1e-5,
        "vocab_size": 131_072,
        "tied_embeddings": False,
        "max_position_embeddings": 262_144,
    },
    **{
        "q_lora_rank": None,
        "qk_rope_head_dim": None,
        "qk_nope_head_dim": None,
        "kv_lora_rank": None,
        "v_head_dim": None,
    },
    "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
    "yarn": {
        "original_max_position_embeddings": 4096,
        "factor": 64,
        "apply_scale": True,
        "beta": 4,
        "alpha": 1,
    },
}


NVFP4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}


def test_published_configurations_are_the_presets() -> None:
    assert from_hf_config(SMALL_3_1) == PRESETS["mistral-small-3.1-24b"]
    assert from_mistral_params(DEVSTRAL_2) == PRESETS["devstral-2-123b"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            {"quantization": None, "quantization_config": NVFP4},
            (
                r"params\.json: weights quantized as compressed-tensors \(nvfp4-pack-quantized\)"
                r" are not supported"
            ),
        ),
        (
            {"multimodal": {"whisper_model_args": {"encoder_args": {}}}},
            r"multimodal\.whisper_model_args is set",
        ),
    ],
)
def test_what_else_is_published_is_refused_by_name(more: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        from_mistral_params(DEVSTRAL_2 | more)
