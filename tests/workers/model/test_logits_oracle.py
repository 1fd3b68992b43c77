"""Logits at every position equal those of transformers' Mistral and Mixtral, however the prompt is
cut.

The checkpoint is transformers' own (save_pretrained), so its config.json and tensor names are part
of the test.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checked_once import checked_once
from stage_driver import Driver
from tiny_models import INDEX_NAME, tiny_plan
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, MixtralConfig, MixtralForCausalLM

from tramontane.proto.model_folder import read_model_args
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights.checkpoint import Checkpoint

TOLERANCE = 1e-4
WINDOW = 16
LENGTH = 100
VOCAB = 96
# pages of other sizes are tried with it only: kernels are compiled for both, neither affects the
# other
USUAL_HEAD_DIM = 8


@dataclass(frozen=True)
class Case:
    """One small model. The width is 32, so with 4 heads a head_dim of 8 is the usual one."""

    moe: bool
    window: int | None
    kv_heads: int
    head_dim: int = USUAL_HEAD_DIM
    tied: bool = False
    theta: float = 10_000.0
    shard: str = "1GB"

    @property
    def name(self) -> str:
        parts = [
            "mixtral" if self.moe else "mistral",
            f"W{self.window}",
            f"G{self.kv_heads}",
            f"d{self.head_dim}",
        ]
        return "-".join([*parts, "tied"] if self.tied else parts)


CASES = [
    Case(moe=False, window=WINDOW, kv_heads=4),
    Case(moe=False, window=WINDOW, kv_heads=2, head_dim=12, theta=1e6, shard="30KB"),
    Case(moe=False, window=WINDOW, kv_heads=1, tied=True),
    Case(moe=False, window=None, kv_heads=4, head_dim=6, tied=True),
    Case(moe=False, window=None, kv_heads=2, theta=500.0),
    Case(moe=False, window=None, kv_heads=1, head_dim=16),
    Case(moe=True, window=WINDOW, kv_heads=4, head_dim=12, tied=True),
    Case(moe=True, window=WINDOW, kv_heads=2, theta=1e6, shard="30KB"),
    Case(moe=True, window=WINDOW, kv_heads=1),
    Case(moe=True, window=None, kv_heads=4),
    Case(moe=True, window=None, kv_heads=2, head_dim=16, tied=True, theta=500.0),
    Case(moe=True, window=None, kv_heads=1, head_dim=6),
]

# (stages, page size, chunk lengths of the long prompt and of its company, which is packed into the
# same steps)
CUTS = [
    pytest.param(1, 16, [LENGTH], [37], id="whole"),
    pytest.param(3, 16, [5, 1, 15, 16, 17, 1, 33, 12], [1, 2, 30, 1, 1, 1, 1], id="mixed"),
    pytest.param(2, 1, [40, *[1] * 20, 40], [3, 17, *[1] * 17], id="prompt, decode, prompt"),
    pytest.param(1, 7, [1] * LENGTH, [20, 17], id="one by one"),
]


class Saved:
    """A transformers model, its folder, and its logits for two prompts."""

    def __init__(self, case: Case, folder: Path) -> None:
        config: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": case.kv_heads,
            "head_dim": case.head_dim,
            "vocab_size": VOCAB,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-3,  # large enough to be missed
            "sliding_window": case.window,
            "tie_word_embeddings": case.tied,
            "rope_parameters": {"rope_type": "default", "rope_theta": case.theta},
            "attn_implementation": "eager",
        }
        torch.manual_seed(len(case.name))
        model = (
            MixtralForCausalLM(MixtralConfig(**config, num_local_experts=4, num_experts_per_tok=2))
            if case.moe
            else MistralForCausalLM(MistralConfig(**config))
        )
        with torch.no_grad():
            # norms differ from one, or swapping two of them would not show
            for parameter in model.parameters():
                parameter.normal_(1.0, 0.3) if parameter.dim() == 1 else parameter.normal_(0.0, 0.3)
        model.eval().save_pretrained(folder, max_shard_size=case.shard)
        assert (folder / INDEX_NAME).exists() == (case.shard != "1GB")
        self.folder = folder
        self.prompts = [torch.randint(VOCAB, (n,)).tolist() for n in (LENGTH, 37)]
        self.logits = [self._forward(model, prompt) for prompt in self.prompts]
        if case.window:
            model.config.sliding_window = None
            unwindowed = self._forward(model, self.prompts[0])
            differs = (unwindowed - self.logits[0]).abs().amax(-1) > 100 * TOLERANCE
            # the oracle itself sees the window, and from where on
            assert not differs[: case.window].any()
            assert differs[case.window + 3 :].all()

    @staticmethod
    def _forward(model: torch.nn.Module, prompt: list[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor([prompt]), use_cache=False).logits[0]
        return logits


@pytest.fixture(autouse=True, scope="module")
def _checked_once() -> Iterator[None]:
    with checked_once():
        yield


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(request.param, tmp_path_factory.mktemp("oracle") / request.param.name)


@pytest.mark.parametrize(("stages", "page_size", "cut", "company"), CUTS)
def test_logits_are_those_of_transformers(
    saved: Saved, stages: int, page_size: int, cut: list[int], company: list[int]
) -> None:
    args = read_model_args(saved.folder)
    plan = tiny_plan(args, stages, page_size if args.head_dim == USUAL_HEAD_DIM else 16)
    Checkpoint(saved.folder).check(args)
    driver = Driver(plan, [StageWorker.load(stage, saved.folder) for stage in plan.stages])
    for ours, theirs in zip(driver.run(saved.prompts, [cut, company]), saved.logits, strict=True):
        assert ours.shape == theirs.shape
        assert theirs.std() > 0.1
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
