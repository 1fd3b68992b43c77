"""Every published model, scaled down with its shape ratios, in both layouts: transformers' logits,
and the paper's.

The weights are written by us in both layouts and read by transformers from the Hugging Face one;
the plain reference reads Mistral's own layout, tensor by tensor, and knows nothing of ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checked_once import checked_once
from harness import GREEDY, random_ids, run_in_process
from safetensors.torch import load_file
from stage_driver import Driver
from tiny_models import few_experts, tiny_plan
from torch import Tensor
from torch.nn import functional as F

from tramontane.proto.errors import ConfigError
from tramontane.proto.hf_config import from_hf_config
from tramontane.proto.mistral_params import from_mistral_params
from tramontane.proto.model_args import ModelArgs, YarnScaling
from tramontane.proto.model_folder import Layout, detect_layout, read_model_args
from tramontane.proto.presets import PRESETS, tiny_variant
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights.checkpoint import Checkpoint
from tramontane.workers.weights.config_writer import to_hf_config, to_mistral_params
from tramontane.workers.weights.random_checkpoint import write_random_checkpoint
from tramontane.workers.weights.tensor_specs import stage_tensors

TOLERANCE = 1e-4
# Devstral 2 and Ministral 3 are published with it; tied embeddings come with Ministral 3B.
YARN = YarnScaling(factor=16.0, original_max_seq_len=32, llama4_beta=0.1)
# In FP8: test_wrapped_models.py.
MODELS = {  # sparse attention: test_sparse_models.py
    name: replace(few_experts(tiny_variant(args)), dtype="float32", quantization=None)
    for name, args in PRESETS.items()
    if not args.sparse
}
MODELS["tied"] = replace(MODELS["mistral-7b-v0.3"], tied_embeddings=True)
MODELS["yarn"] = replace(MODELS["mistral-nemo-12b"], rope_scaling=YARN)
MODELS["yarn, louder"] = replace(
    MODELS["tied"], rope_scaling=replace(YARN, llama4_beta=0.0, attention_factor=1.2772588722239782)
)
LENGTHS = (100, 37, 3)


@dataclass(frozen=True)
class Written:
    args: ModelArgs
    folders: dict[Layout, Path]
    prompts: list[list[int]]
    logits: list[Tensor]  # transformers'


@pytest.fixture(autouse=True, scope="module")
def _checked_once() -> Iterator[None]:
    with checked_once():
        yield


@pytest.fixture(scope="module", params=MODELS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    args = MODELS[request.param]
    folders = {}
    for layout in Layout:
        folders[layout] = tmp_path_factory.mktemp("published") / layout.name
        write_random_checkpoint(folders[layout], args, layout, part_bytes=2**20)
    kind: Any = getattr(transformers, to_hf_config(args)["architectures"][0])
    model = kind.from_pretrained(folders[Layout.HUGGING_FACE], attn_implementation="eager").eval()
    prompts = [random_ids(n, seed=n, vocab_size=args.vocab_size) for n in LENGTHS]
    with torch.inference_mode():
        logits = [model(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]
    return Written(args, folders, prompts, logits)


@pytest.mark.parametrize("layout", Layout)
def test_both_layouts_are_detected_and_say_the_same(written: Written, layout: Layout) -> None:
    folder = written.folders[layout]
    assert detect_layout(folder) is layout
    assert read_model_args(folder) == written.args
    Checkpoint(folder).check(written.args)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize(
    ("stages", "cut"), [(1, [100]), (2, [5, 1, 15, 16, 17, 1, 33, 12])], ids=["whole", "cut"]
)
def test_logits_are_those_of_transformers(
    written: Written, layout: Layout, stages: int, cut: list[int]
) -> None:
    plan = tiny_plan(written.args, stages)
    driver = Driver(
        plan, [StageWorker.load(stage, written.folders[layout]) for stage in plan.stages]
    )
    ours = driver.run(written.prompts, [cut, [30, *[1] * 7], [3]])
    for our, their in zip(ours, written.logits, strict=True):
        assert their.std() > 0.1
        torch.testing.assert_close(our, their, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layout", Layout)
def test_greedy_tokens_are_equal_at_1_2_and_4_stages(written: Written, layout: Layout) -> None:
    outputs = []
    for stages in (1, 2, min(4, written.args.n_layers)):
        plan = tiny_plan(written.args, stages)
        workers = [StageWorker.load(stage, written.folders[layout]) for stage in plan.stages]
        outputs.append(run_in_process(plan, workers, written.prompts, GREEDY))
    assert outputs[0] == outputs[1] == outputs[2]
    if not written.args.tied_embeddings:  # then a random model repeats its last token
        assert all(len(set(tokens)) > 1 for tokens in outputs[0])
    for tokens, logits in zip(outputs[0], written.logits, strict=True):
        assert tokens[0] == logits[-1].argmax().item()


# ---- Mistral's layout against the papers' formulas, written down plainly


def _rotate_pairs(x_THd: Tensor, args: ModelArgs) -> Tensor:
    """RoFormer, eq. 13: elements 2i and 2i+1 are one complex number, turned by position *
    theta^(-2i/d).
    """
    tokens, _, width = x_THd.shape
    pairs = torch.view_as_complex(x_THd.double().reshape(*x_THd.shape[:-1], -1, 2))
    frequencies = args.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(tokens, dtype=torch.float64), frequencies)
    return torch.view_as_real(
        pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    ).flatten(-2)


def _norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return x_TD / (x_TD.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight_D


def _reference_logits(tensors: dict[str, Tensor], args: ModelArgs, prompt: list[int]) -> Tensor:
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    h_TD = weights["tok_embeddings.weight"][prompt]
    position = torch.arange(len(prompt))
    for layer, window in enumerate(args.windows):
        own = {
            name.removeprefix(f"layers.{layer}."): w
            for name, w in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        x_TD = _norm(h_TD, own["attention_norm.weight"], args.norm_eps)
        q, k, v = (
            (x_TD @ own[f"attention.{w}.weight"].T).view(len(prompt), heads, args.head_dim)
            for w, heads in (("wq", args.n_heads), ("wk", args.n_kv_heads), ("wv", args.n_kv_heads))
        )
        q, k = _rotate_pairs(q, args), _rotate_pairs(k, args)
        seen = position[None, :] <= position[:, None]
        if window is not None:
            seen &= position[None, :] > position[:, None] - window
        heads = []
        for head in range(args.n_heads):
            shared = head // (args.n_heads // args.n_kv_heads)
            scores = q[:, head] @ k[:, shared].T / args.head_dim**0.5
            heads.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[:, shared])
        h_TD = h_TD + torch.cat(heads, -1) @ own["attention.wo.weight"].T
        x_TD = _norm(h_TD, own["ffn_norm.weight"], args.norm_eps)
        h_TD = h_TD + (
            _mixture(own, args, x_TD) if args.moe else _swiglu(own, "feed_forward", x_TD)
        )
    head = weights["tok_embeddings.weight" if args.tied_embeddings else "output.weight"]
    return _norm(h_TD, weights["norm.weight"], args.norm_eps) @ head.T


def _swiglu(own: dict[str, Tensor], name: str, x_TD: Tensor) -> Tensor:
    return (F.silu(x_TD @ own[f"{name}.w1.weight"].T) * (x_TD @ own[f"{name}.w3.weight"].T)) @ own[
        f"{name}.w2.weight"
    ].T


def _mixture(own: dict[str, Tensor], args: ModelArgs, x_TD: Tensor) -> Tensor:
    """Mixtral, section 2.1: softmax over the top two logits of the gate, token by token."""
    assert args.moe
    out = torch.zeros_like(x_TD)
    for token, x_D in enumerate(x_TD):
        chosen = (x_D @ own["feed_forward.gate.weight"].T).topk(args.moe.num_experts_per_tok)
        for share, expert in zip(chosen.values.softmax(-1), chosen.indices.tolist(), strict=True):
            out[token] += share * _swiglu(own, f"feed_forward.experts.{expert}", x_D[None])[0]
    return out


def test_mistrals_layout_gives_what_the_papers_say(written: Written) -> None:
    if written.args.rope_scaling:
        pytest.skip("the reference has no scaled rotation; transformers is the oracle for it")
    folder = written.folders[Layout.MISTRAL]
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("consolidated*.safetensors"):
        tensors |= load_file(path)
    plan = tiny_plan(written.args, 1)
    driver = Driver(plan, [StageWorker.load(plan.stages[0], folder)])
    for prompt, ours in zip(
        written.prompts, driver.run(written.prompts, [[n] for n in LENGTHS]), strict=True
    ):
        torch.testing.assert_close(
            ours.double(), _reference_logits(tensors, written.args, prompt), rtol=0, atol=TOLERANCE
        )


# ---- the configurations as they were published


PUBLISHED_PARAMS = {
    # no rope_theta: with a window it is 10,000
    "mistral-7b-v0.1": {"sliding_window": 4096, "vocab_size": 32000},
    "mistral-7b-v0.2": {"rope_theta": 1e6, "vocab_size": 32000},
    "mistral-7b-v0.3": {"rope_theta": 1e6, "vocab_size": 32768},
    # 1e6 without a window
    "mixtral-8x7b": {"vocab_size": 32000, "moe": {"num_experts_per_tok": 2, "num_experts": 8}},
    "ministral-8b": {
        "n_layers": 36,
        "hidden_dim": 12288,
        "rope_theta": 1e8,
        "vocab_size": 131072,
        "_sliding_window": [None, 32768, 32768, 32768],
    },
}


@pytest.mark.parametrize("name", PUBLISHED_PARAMS)
def test_published_params_are_the_preset(name: str) -> None:
    common = {
        "dim": 4096,
        "n_layers": 32,
        "head_dim": 128,
        "hidden_dim": 14336,
        "n_heads": 32,
        "n_kv_heads": 8,
        "norm_eps": 1e-5,
    }
    assert from_mistral_params(common | PUBLISHED_PARAMS[name]) == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_both_configurations(name: str) -> None:
    assert from_hf_config(to_hf_config(PRESETS[name])) == PRESETS[name]
    if PRESETS[name].sparse:
        with pytest.raises(
            ConfigError, match="Mistral's own layout does not describe sparse attention"
        ):
            to_mistral_params(PRESETS[name])
    else:
        assert from_mistral_params(to_mistral_params(PRESETS[name])) == PRESETS[name]


BILLIONS = {
    "mistral-7b-v0.1": 7.24,
    "mixtral-8x7b": 46.70,
    "mixtral-8x22b": 140.62,
    "mistral-nemo-12b": 12.25,
    "ministral-8b": 8.02,
    "codestral-22b": 22.25,
    "mistral-large-2-123b": 122.61,
    "mistral-small-24b": 23.57,
    "devstral-small-2-24b": 23.57,
    "ministral-3-3b": 3.43,
    "ministral-3-8b": 8.49,
    "ministral-3-14b": 13.51,
    "mistral-medium-3.5-128b": 125.03,  # without the encoder of images
}


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_presets_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert PRESETS[name].num_parameters / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_the_tensors(name: str) -> None:
    args = PRESETS[name]
    specs = {spec.name: spec for spec in stage_tensors(args, range(args.n_layers))}.values()
    assert args.num_parameters == sum(spec.num_elements for spec in specs)
    if args.moe:
        of_experts = sum(spec.num_elements for spec in specs if ".experts." in spec.name)
        unused = (
            of_experts
            * (args.moe.num_experts - args.moe.num_experts_per_tok)
            // args.moe.num_experts
        )
        assert args.num_active_parameters == args.num_parameters - unused
    else:
        assert args.num_active_parameters == args.num_parameters


def test_presets_are_the_defaults_of_transformers() -> None:
    """Which are those of a published model where the class was made for one."""
    for name, config in {
        "ministral-3-8b": transformers.Ministral3Config(),
        "mistral-small-3.1-24b": transformers.Mistral3Config().text_config,
        "mistral-7b-v0.1": transformers.MistralConfig(
            max_position_embeddings=32768, rms_norm_eps=1e-5, head_dim=128
        ),
    }.items():
        architecture = to_hf_config(PRESETS[name])["architectures"]
        described = config.to_dict() | {"architectures": architecture, "dtype": "bfloat16"}
        # which a file adds
        assert from_hf_config(described) == replace(PRESETS[name], quantization=None), name


def test_small_4_has_the_size_of_transformers() -> None:
    config = transformers.Mistral4Config()
    with torch.device("meta"):
        model = transformers.Mistral4ForCausalLM(config)
    args = PRESETS["mistral-small-4-119b"]
    assert args.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    unused = (
        (config.n_routed_experts - config.num_experts_per_tok)
        * 3
        * config.hidden_size
        * config.moe_intermediate_size
    )
    assert args.num_active_parameters == args.num_parameters - config.num_hidden_layers * unused
    assert args.num_parameters == sum(
        spec.num_elements for spec in stage_tensors(args, range(args.n_layers))
    )


def test_large_4_is_the_default_of_transformers() -> None:
    config = transformers.MistralLarge4Config()
    with torch.device("meta"):
        model = transformers.MistralLarge4ForConditionalGeneration(config)
    args = PRESETS["mistral-large-4-1t"]
    assert (
        from_hf_config(
            config.to_dict() | {"architectures": ["MistralLarge4ForConditionalGeneration"]}
        )
        == args
    )
    text = [*model.model.language_model.parameters(), *model.lm_head.parameters()]
    assert args.num_parameters == sum(parameter.numel() for parameter in text)
    assert args.num_parameters == sum(
        spec.num_elements for spec in stage_tensors(args, range(args.n_layers))
    )
    assert (round(args.num_parameters / 1e9), round(args.num_active_parameters / 1e9)) == (1050, 53)


def test_large_3_has_its_published_size() -> None:
    """673 billion parameters and 39 active ones, and an encoder of images of 2.5 billion."""
    args = PRESETS["mistral-large-3-675b"]
    assert args.num_parameters / 1e9 == pytest.approx(673, abs=1)
    assert args.num_active_parameters / 1e9 == pytest.approx(39.5, abs=0.6)
