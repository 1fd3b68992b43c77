"""Experts elsewhere: the tokens are the same, whoever runs which expert, and whoever dies meanwhile."""

import asyncio
from functools import cache
from pathlib import Path

import pytest
from expert_actors import ExpertActors, expert_plan, open_chain
from harness import PROMPTS, run_in_process, run_prompts, scheduler_for
from tiny import random_model, split_model, tiny_args, tiny_plan, write_checkpoint

from tramontane.router.policy import EvenPolicy

ARGS = tiny_args(n_layers=4)
SHORT = [prompt for prompt in PROMPTS if len(prompt) <= 130]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), ARGS, random_model(ARGS))


@cache
def _inside() -> list[list[int]]:
    plan = tiny_plan(ARGS)
    return run_in_process(plan, split_model(random_model(ARGS), plan), SHORT)


@pytest.mark.parametrize(
    ("num_stages", "num_actors", "replicas", "max_open"),
    [(1, 1, 1, 1), (1, 2, 1, 2), (2, 4, 1, 2), (4, 8, 1, 3), (1, 2, 2, 2), (2, 3, 2, 4), (4, 8, 4, 2)],
)
def test_same_tokens(folder: Path, num_stages: int, num_actors: int, replicas: int, max_open: int) -> None:
    plan = tiny_plan(ARGS, num_stages)
    actors = ExpertActors(expert_plan(ARGS, num_actors, replicas), folder)
    with open_chain(plan, folder, actors, max_open) as chain:
        scheduler = scheduler_for(plan, 64, EvenPolicy(4 * num_stages, 64))
        assert asyncio.run(run_prompts(chain, scheduler, SHORT)) == _inside()
