"""Models with sparse latent attention (Mistral Large 4): logits of transformers, and what a stage
holds.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import random_ids
from published_cases import CUTS, TOLERANCE, Case
from published_models import Published
from safetensors.torch import load_file, save_file
from sparse_models import SHAPES, YARN, publish_sparse, text_config
from stage_driver import Driver
from tiny_models import few_experts, tiny_plan
from transformers import AutoConfig, MistralLarge4Config, MistralLarge4ForConditionalGeneration

from tramontane.proto.errors import CheckpointError, PlanError
from tramontane.proto.hf_config import from_hf_config
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import Layout, read_model_args
from tramontane.proto.presets import PRESETS, tiny_variant
from tramontane.workers.attention import sparse_attention
from tramontane.workers.attention.sdpa_backend import cpu_kernels
from tramontane.workers.attention.sparse_attention import chosen_rows
from tramontane.workers.device.probe import panel_rows
from tramontane.workers.stage import stage_worker
from tramontane.workers.stage.device_backend import DeviceBackend
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights.checkpoint import Checkpoint
from tramontane.workers.weights.config_writer import to_hf_config
from tramontane.workers.weights.random_checkpoint import write_random_checkpoint


@pytest.fixture(scope="module", params=SHAPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case.of(
        request.param, publish_sparse(tmp_path_factory.mktemp("sparse") / "hf", request.param)
    )


@pytest.mark.parametrize("cut", CUTS)
def test_logits_are_those_of_transformers(case: Case, cut: str) -> None:
    case.check_logits(*CUTS[cut])


def test_the_first_token_for_which_an_indexer_chooses(case: Case) -> None:
    """It is the last of a chunk, with nothing else in the micro-batch."""
    args = read_model_args(case.published.folder)
    assert args.sparse is not None
    plan, prompt = tiny_plan(args), case.prompts[0][: args.sparse.index_topk + 1]
    (ours,) = Driver(plan, [StageWorker.load(plan.stages[0], case.published.folder)]).run(
        [prompt], [[len(prompt)]]
    )
    torch.testing.assert_close(ours, case.logits[0][: len(prompt)], rtol=0, atol=TOLERANCE)


def test_greedy_tokens_are_equal_at_any_number_of_stages(case: Case) -> None:
    case.check_greedy_tokens()


def test_planned_bytes_are_those_in_memory(case: Case) -> None:
    args = read_model_args(case.published.folder)
    assert args.latent is not None
    assert args.sparse is not None
    for stage in tiny_plan(
        args, len(args.layer_groups), max_num_seqs=3, panel_rows=panel_rows()
    ).stages:
        worker = StageWorker.load(stage, case.published.folder)
        held = sum(tensor.nbytes for tensor in worker.model.state_dict().values())
        assert held == pytest.approx(stage.weight_bytes + stage.padding_bytes, rel=0.02)
        tensors = [cache.k_NGd for cache in worker.cache.layers.values()] + list(
            worker.cache.index_keys.values()
        )
        assert (
            sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
            == stage.cache_bytes
        )


def test_in_bfloat16_gates_and_rotary_factors_are_in_float32_and_draft_networks_are_not_read(
    tmp_path: Path,
) -> None:
    """As the model is published, and written by transformers."""
    folder = publish_sparse(tmp_path / "model", "defaults").folder
    path, float32 = folder / "model.safetensors", ("gate.weight", "lerope.alpha")
    stored = {
        name: tensor if name.endswith(float32) else tensor.bfloat16()
        for name, tensor in load_file(path).items()
    }
    save_file(
        {**stored, "mtp_dspark.layers.0.attention.wq.weight": torch.ones(2, 2)},
        path,
        metadata={"format": "pt"},
    )
    args = read_model_args(folder)
    assert Checkpoint(folder).check(args) == "bfloat16"
    args = replace(args, dtype="bfloat16")
    plan = tiny_plan(args, dtype="bfloat16", panel_rows=panel_rows())
    model = StageWorker.load(plan.stages[0], folder).model
    assert model.rotary_alpha is not None
    torch.testing.assert_close(model.rotary_alpha, stored["lerope.alpha"], rtol=0, atol=0)
    gate = model.block(1).gate
    assert gate is not None
    x_TD = torch.randn(50, args.dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    scores_TE = torch.softmax(x_TD.float() @ stored["layers.1.gate.weight"].T, dim=-1)
    experts_Tk = gate(x_TD)[0]
    assert (
        experts_Tk.sort().values.tolist()
        == scores_TE.topk(gate.top_k).indices.sort().values.tolist()
    )
    held = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert held == pytest.approx(
        plan.stages[0].weight_bytes + plan.stages[0].padding_bytes, rel=0.002
    )


def test_layers_that_share_are_in_one_stage() -> None:
    args = to_model_args("shared")
    assert args.layer_groups == (range(2), range(2, 4), range(4, 6), range(6, 7))
    assert [stage.layers for stage in tiny_plan(args, 4).stages] == list(args.layer_groups)
    with pytest.raises(
        PlanError,
        match=r"--stages is 5, but the model's 7 layers .* only 4 stages: .* such as layers 0 to 1",
    ):
        tiny_plan(args, 5)
    assert to_model_args("interleaved").layer_groups == (range(6),)
    assert [args.cached_numbers(layer) for layer in range(7)] == [48, 20, 48, 0, 48, 28, 48]


def test_pytorch_computes_the_same_as_the_kernels_in_c(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_worker, "select_backend", lambda *_: DeviceBackend(cpu_kernels()))
    plan = tiny_plan(read_model_args(case.published.folder))
    worker = StageWorker.load(plan.stages[0], case.published.folder)
    assert not worker.is_batch_invariant
    (logits,) = Driver(plan, [worker]).run(case.prompts[:1], [[5, 1, 15, 16, 17, 1, 33, 32]])
    torch.testing.assert_close(logits, case.logits[0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kernels", ["C", "PyTorch"])
def test_scores_of_a_few_tokens_at_a_time_are_the_same(
    case: Case, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of contexts so long that the scores of all tokens of a chunk would take too much
    memory.
    """
    if kernels == "PyTorch":
        monkeypatch.setattr(stage_worker, "select_backend", lambda *_: DeviceBackend(cpu_kernels()))
    monkeypatch.setattr(sparse_attention, "MAX_SCORES", 2000)
    plan = tiny_plan(read_model_args(case.published.folder))
    (logits,) = Driver(plan, [StageWorker.load(plan.stages[0], case.published.folder)]).run(
        case.prompts[:1], [[50, 70]]
    )
    torch.testing.assert_close(logits, case.logits[0], rtol=0, atol=TOLERANCE)


def test_keys_of_the_own_sequence_are_chosen_whatever_their_scores_are() -> None:
    """Of an overflow in 16 bits; entry 0 of the rows is another sequence's."""
    nan, inf = torch.nan, torch.inf
    scores = torch.tensor([[nan, nan, nan, nan], [nan, 2, nan, nan], [-inf, inf, nan, 1]])
    rows = chosen_rows(scores, torch.tensor([3, 2, 2]), torch.tensor([10, 20, 30, 40]), 2)
    assert rows.tolist() == [[10, 20], [10, 20], [10, 20]]


def test_equal_scores_choose_earlier_keys() -> None:
    scores = torch.tensor([[5.0, 1, 3, 3, 9], [2, 2, 2, 2, 2], [0, -1, 0, 0, 0], [1, 2, 3, 4, 5]])
    rows = chosen_rows(scores, torch.tensor([3, 4, 1, 0]), torch.tensor([10, 20, 30, 40, 50]), 2)
    assert rows.tolist() == [[10, 30], [10, 20], [10, 20], [10, 0]]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "kv_source_layers",
            [0, 0, 1, 2, 4, 5, 6],
            "layer 2 cannot use layer 1 .kv_source_layers.: it must be itself",
        ),
        (
            "kv_source_layers",
            [0, 0, 0, 0, 4, 5, 6],
            "layer 2 cannot use the cache of layer 0: only one of them has rotary",
        ),
        ("kv_source_layers", [0, 0, 2], "kv_source_layers has 3 entries for 7 layers"),
        (
            "indexer_types",
            ["shared"] * 7,
            "the first layer's indexer is 'shared', and there is none before it",
        ),
        ("indexer_types", ["full"] * 3, "indexer_types has 3 entries for 7 layers"),
        ("indexer_types", [], "indexer_types has 0 entries for 7 layers"),
        ("indexer_types", ["full"] * 6 + ["half"], "indexers of type 'half' are not supported"),
        (
            "layer_types",
            ["full_attention"] * 7,
            "layers of type 'full_attention' are not supported",
        ),
        (
            "kv_source_layers",
            [0, 1, 2, 2, 0, 1, 6],
            "layer 4 cannot use the cache of layer 0: that of layer 1, which later layers",
        ),
        (
            "mlp_layer_types",
            ["sparse"] * 6 + ["dense"],
            "mlp_layer_types must be 'dense' for the first layers, and 'sparse'",
        ),
        (
            "mlp_layer_types",
            ["dense", "sparse"],
            "mlp_layer_types must be 'dense' for the first layers, and 'sparse'",
        ),
        (
            "scoring_func",
            "sigmoid",
            "scoring_func = 'sigmoid' is not supported for MistralLarge4TextModel",
        ),
        (
            "rope_parameters",
            YARN | {"llama_4_scaling_beta": 0.1},
            "llama_4_scaling_beta = 0.1 is not supported for MistralLarge4",
        ),
        ("index_head_dim", 8, "qk_rope_head_dim is 10; index_head_dim, 8, must not be less"),
        (
            "final_logit_softcapping",
            0.0,
            "final_logit_softcapping is 0.0; it must be a positive number",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(key: str, value: object, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        to_model_args("shared", **{key: value})


def to_model_args(name: str, **changes: object) -> ModelArgs:
    """Return the geometry of a shape without making the model."""
    config = MistralLarge4Config(
        text_config=text_config(name).to_dict(), tie_word_embeddings=False
    ).to_dict()
    config["architectures"] = ["MistralLarge4ForConditionalGeneration"]
    return from_hf_config({**config, "text_config": {**config["text_config"], **changes}})


def test_a_written_configuration_is_read_again_and_by_transformers(tmp_path: Path) -> None:
    args = to_model_args("shared")
    config = to_hf_config(args)
    assert from_hf_config(config) == args
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = AutoConfig.from_pretrained(tmp_path).text_config
    assert theirs.kv_source_layers == [0, 0, 2, 2, 4, 5, 6]
    assert theirs.indexer_types == SHAPES["shared"]["indexer_types"]


def test_a_random_checkpoint_is_loaded_by_transformers_and_gives_its_logits(tmp_path: Path) -> None:
    """With few experts, and many heads of the indexer: a key has the score 0 if all are negative,
    and of equals any is right.
    """
    args = few_experts(
        replace(tiny_variant(PRESETS["mistral-large-4-1t"]), dtype="float32", vocab_size=128)
    )
    args = replace(args, sparse=args.sparse and replace(args.sparse, index_n_heads=32))
    write_random_checkpoint(tmp_path / "model", args, Layout.HUGGING_FACE)
    settings = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert not config.get("vision_config")
    plan, prompt = tiny_plan(args), random_ids(90, seed=5, vocab_size=128)
    model = MistralLarge4ForConditionalGeneration.from_pretrained(
        tmp_path / "model", dtype=torch.float32, **settings
    ).eval()
    (logits,) = Driver(plan, [StageWorker.load(plan.stages[0], tmp_path / "model")]).run(
        [prompt], [[40, 50]]
    )
    torch.testing.assert_close(
        logits, Published(tmp_path, model).logits(prompt), rtol=0, atol=TOLERANCE
    )
