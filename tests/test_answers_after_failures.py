"""Answers of real stages that fail again and again: those of stages that do not, bit for bit."""

import shutil
from functools import partial
from pathlib import Path

import pytest
from examples import examples
from harness import fixed_scheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from request_kinds import Answer, FailingChain, answers_of, with_scarce_pages
from tiny_models import ATTENTION_KINDS, random_model, tiny_plan, write_checkpoint

from tramontane.proto.plan import SpeculativeConfig

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None, reason="without kernels in C other rows have other roundings"
)

Models = dict[str, tuple[Path, list[Answer]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Folders of models, and the answers of stages that do not fail, without any of what is tried
    below.
    """
    found = {}
    for kind, args in ATTENTION_KINDS.items():
        folder, plan = (
            write_checkpoint(tmp_path_factory.mktemp("models") / "m", args, random_model(args)),
            tiny_plan(args),
        )
        found[kind] = (
            folder,
            answers_of(folder, plan, fixed_scheduler(plan, 512, 1, enable_prefix_caching=False)),
        )
    return found


@settings(max_examples=examples(4, least=2), deadline=None, derandomize=True)
@given(
    fails_at=st.sets(st.integers(0, 40), min_size=2, max_size=8),
    stages=st.sampled_from([1, 2, 3]),
    mode=st.sampled_from(["plain", "speculative", "ahead"]),
    page_size=st.sampled_from([1, 4, 16]),
    budget=st.integers(24, 200),
    max_num_seqs=st.integers(2, 9),
    is_scarce=st.booleans(),
)
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_the_same_answers_however_often_stages_fail(
    models: Models,
    kind: str,
    fails_at: set[int],
    stages: int,
    mode: str,
    page_size: int,
    budget: int,
    max_num_seqs: int,
    is_scarce: bool,
) -> None:
    """Greedy, seeded, penalized, with grammars, log-probabilities and experts, packed together;
    some are preempted.
    """
    folder, expected = models[kind]
    config = SpeculativeConfig(3, 1, 2) if mode == "speculative" else None
    is_async, num_drafts = mode == "ahead", config.max_drafts() if config else 0
    plan = tiny_plan(
        ATTENTION_KINDS[kind],
        1 if is_async else stages,
        page_size,
        max_num_seqs,
        num_drafts=num_drafts,
    )
    plan = with_scarce_pages(plan) if is_scarce else plan
    scheduler = fixed_scheduler(plan, budget, 3, speculative=config, async_scheduling=is_async)
    assert (
        answers_of(folder, plan, scheduler, make_chain=partial(FailingChain, fails_at=fails_at))
        == expected
    )
