"""Models with latent attention (Mistral Small 4, Large 3, DeepSeek-V3): logits of transformers, and
what a stage holds.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checked_once import checked_once
from harness import random_ids
from latent_models import SHAPES, SIZES, publish, to_mistral_layout
from published_cases import CUTS, TOLERANCE, Case
from published_models import VISION
from stage_driver import Driver
from tiny_models import tiny_plan
from transformers import DeepseekV3Config, Mistral3Config, Mistral4Config

from tramontane.proto.errors import CheckpointError
from tramontane.proto.hf_config import from_hf_config
from tramontane.proto.model_folder import Layout, read_model_args
from tramontane.proto.weight_format import Quantization
from tramontane.workers.device.probe import panel_rows
from tramontane.workers.kernels.packed_linear import PackedLinear
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights.checkpoint import Checkpoint


@pytest.fixture(autouse=True, scope="module")
def _checked_once() -> Iterator[None]:
    with checked_once():
        yield


@pytest.fixture(scope="module", params=SHAPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case.of(request.param, publish(tmp_path_factory.mktemp("latent") / "hf", request.param))


@pytest.mark.parametrize("cut", CUTS)
def test_logits_are_those_of_transformers(case: Case, cut: str) -> None:
    case.check_logits(*CUTS[cut])


def test_greedy_tokens_are_equal_at_1_2_and_4_stages(case: Case) -> None:
    case.check_greedy_tokens()


# Mistral's configuration has no other groups, gates and weights. Of these the second has a factor
# of scores.
@pytest.mark.parametrize(
    "name", ["small-4", "louder scores", "large-3", "queries of hidden states"]
)
def test_mistrals_layout_is_the_same_model(name: str, tmp_path: Path) -> None:
    published, prompt = publish(tmp_path / "hf", name), random_ids(120, seed=1, vocab_size=128)
    to_mistral_layout(published.folder, tmp_path / "mistral")
    args = read_model_args(tmp_path / "mistral")
    checkpoint = Checkpoint(tmp_path / "mistral")
    assert checkpoint.layout is Layout.MISTRAL
    assert checkpoint.check(args) == "float32"
    assert args == replace(
        read_model_args(published.folder), dtype=args.dtype, max_seq_len=args.max_seq_len
    )
    plan = tiny_plan(args)
    (logits,) = Driver(plan, [StageWorker.load(plan.stages[0], tmp_path / "mistral")]).run(
        [prompt], [[120]]
    )
    torch.testing.assert_close(logits, published.logits(prompt), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("stages", [1, 2])
def test_planned_bytes_are_those_in_memory(case: Case, stages: int) -> None:
    folder = case.published.folder
    args = read_model_args(folder)
    assert args.latent is not None
    for stage in tiny_plan(args, stages, max_num_seqs=3, panel_rows=panel_rows()).stages:
        worker = StageWorker.load(stage, folder)
        held = sum(tensor.nbytes for tensor in worker.model.state_dict().values())
        assert held == pytest.approx(stage.weight_bytes + stage.padding_bytes, rel=0.02)
        caches = {
            tensor.data_ptr(): tensor.nbytes
            for cache in worker.cache.layers.values()
            for tensor in (cache.k_NGd, cache.v_NGd)
        }
        assert sum(caches.values()) == stage.cache_bytes
        rows = stage.cache.classes[0].num_pages * stage.cache.page_size
        assert stage.cache_bytes == len(stage.layers) * rows * args.latent.cached_dim * 4


@pytest.mark.parametrize("scales_per_expert", [1, 2])
@pytest.mark.parametrize("name", ["small-4", "odd"])
def test_published_in_fp8_with_an_encoder_of_images(
    name: str, scales_per_expert: int, tmp_path: Path
) -> None:
    """Experts in one tensor, with a scale for each expert's matrix, or one for its gate rows and
    one for its up rows.
    """
    published = publish(tmp_path / "hf", name, wrapped=True, scales_per_expert=scales_per_expert)
    args, prompt = read_model_args(published.folder), random_ids(60, seed=3, vocab_size=128)
    assert args.quantization is Quantization.FP8
    assert Checkpoint(published.folder).check(args) == "bfloat16"
    plan = tiny_plan(args, 2)
    workers = [StageWorker.load(stage, published.folder) for stage in plan.stages]
    experts = [
        module for module in workers[0].model.experts.modules() if isinstance(module, PackedLinear)
    ]
    assert {module.weight.dtype for module in experts} == {torch.float8_e4m3fn}
    (logits,) = Driver(plan, workers).run([prompt], [[25, 1, 34]])
    torch.testing.assert_close(logits, published.logits(prompt), rtol=0, atol=TOLERANCE)


def test_of_deepseek_what_it_does_not_compute_in_transformers_is_refused() -> None:
    settings = SIZES | SHAPES["deepseek"]
    config = DeepseekV3Config(**settings).to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    published = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    assert from_hf_config(config) == from_hf_config(config | published)
    with pytest.raises(
        CheckpointError,
        match=r"scoring_func = 'softmax' is not supported for DeepseekV3ForCausalLM",
    ):
        from_hf_config(config | {"scoring_func": "softmax"})
    scaled = {**config["rope_parameters"], "llama_4_scaling_beta": 0.1}
    with pytest.raises(
        CheckpointError,
        match=r"llama_4_scaling_beta = 0.1 is not supported for DeepseekV3ForCausalLM",
    ):
        from_hf_config(config | {"rope_parameters": scaled})


def test_queries_of_hidden_states_in_a_model_with_an_encoder_of_images() -> None:
    text = Mistral4Config(**(SIZES | SHAPES["queries of hidden states"])).to_dict()
    assert text["q_lora_rank"] is None
    alone = from_hf_config(text | {"architectures": ["Mistral4ForCausalLM"]})
    wrapped = Mistral3Config(
        text_config=text, vision_config=VISION, tie_word_embeddings=False
    ).to_dict()
    assert (
        from_hf_config(wrapped | {"architectures": ["Mistral3ForConditionalGeneration"]}) == alone
    )


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("norm_topk_prob", None, "lacks the key 'norm_topk_prob'"),
        ("kv_lora_rank", None, "lacks the key 'kv_lora_rank'"),
        ("rope_interleave", False, "rope_interleave is false, and that is not supported"),
        ("qk_rope_head_dim", 7, "qk_rope_head_dim is 7; rotary embedding needs an even one"),
        ("n_group", 3, "8 experts cannot form 3 groups of two or more"),
        ("topk_group", 2, "2 groups of experts cannot be chosen from 1"),
        (
            "scoring_func",
            "sigmoid",
            "scoring_func = 'sigmoid' is not supported for Mistral4ForCausalLM",
        ),
        (
            "topk_method",
            "group_limited_greedy",
            "topk_method = 'group_limited_greedy' is not supported",
        ),
        ("moe_layer_freq", 2, "moe_layer_freq = 2 is not supported"),
    ],
)
def test_what_a_configuration_lacks_or_says_otherwise_is_refused(
    key: str, value: object, words: str, tmp_path: Path
) -> None:
    folder = publish(tmp_path / "model", "small-4").folder
    config = json.loads((folder / "config.json").read_text())
    if value is None:
        del config[key]
    else:
        config[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=words):
        read_model_args(folder)
