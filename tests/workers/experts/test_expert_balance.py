"""A gate that prefers two experts: what the busiest expert actor does, without replicas and with
planned ones.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import PROMPTS, run_prompts, scheduler_for
from local_expert_actors import ExpertActors, expert_plan, ping_pong_chain
from tiny_models import random_model, tiny_args, tiny_plan, write_checkpoint

from tramontane.cluster.config.measurements import per_expert
from tramontane.proto.model_args import ModelArgs, MoeArgs
from tramontane.proto.plan import ExpertPlan
from tramontane.workers.model.layers import TransformerBlock
from tramontane.workers.model.transformer import StageModel

ARGS = replace(tiny_args(n_layers=4), moe=MoeArgs(num_experts=8, num_experts_per_tok=2))
ACTORS = 4
LIMIT = 1.5  # times the mean: what the busiest actor may do
CHOSEN = [prompt for prompt in PROMPTS if len(prompt) <= 130]


def _biased(args: ModelArgs) -> StageModel:
    """Every token has the same large first number, by which the gates of all layers choose experts
    0 and 1 nearly always.
    """
    model = random_model(args)
    assert model.tok_embeddings is not None
    with torch.no_grad():
        model.tok_embeddings.weight[:, 0] = 6.0
        for block in model.layers.values():
            assert isinstance(block, TransformerBlock)
            assert block.gate is not None
            block.gate.scores.weight[:, 0] = torch.tensor([4.0, 4.0, *[0.0] * 6])
    return model


def _busiest(folder: Path, experts: ExpertPlan) -> tuple[float, list[list[int]], list[list[int]]]:
    """Rows of the busiest actor by the mean, the load of every expert by layer, and the tokens."""
    plan, actors = tiny_plan(ARGS, 2), ExpertActors(experts, folder)
    with ping_pong_chain(plan, folder, actors) as chain:
        outputs = asyncio.run(run_prompts(chain, scheduler_for(plan, 64), CHOSEN))
        load = [
            tokens for stage in chain.stages for tokens in stage.worker.model.expert_load.values()
        ]
    rows = [worker.num_rows for worker in actors.workers]
    return max(rows) * len(rows) / sum(rows), load, outputs


def test_replicas_of_hot_experts_even_the_load_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path / "model", ARGS, _biased(ARGS))
    without, load, tokens = _busiest(folder, expert_plan(ARGS, ACTORS))
    hot = sum(sum(layer[:2]) for layer in load) / sum(map(sum, load))
    assert hot > 0.9, "or the gate is not biased"
    measured = per_expert(tuple(map(tuple, load)))
    moved, _, also = _busiest(folder, expert_plan(ARGS, ACTORS, 1, measured))
    spread, _, same = _busiest(folder, expert_plan(ARGS, ACTORS, None, measured))
    with capsys.disabled():
        print(
            f"\n{hot:.0%} of rows for two of eight experts; the busiest of {ACTORS} actors does"
            f" {without:.2f} times the mean if all are taken for alike, {moved:.2f} by measured"
            f" load, {spread:.2f} with automatic replicas"
        )
    assert spread <= LIMIT < without
    assert tokens == also == same
