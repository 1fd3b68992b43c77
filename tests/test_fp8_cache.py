"""Answers of real stages whose keys and values are in FP8: the same however they are computed, and
others than without it.
"""

import shutil
from functools import partial
from pathlib import Path

import pytest
from harness import fixed_scheduler
from request_kinds import Answer, FailingChain, answers_of, with_scarce_pages
from tiny_models import ATTENTION_KINDS, random_model, tiny_plan, write_checkpoint

from tramontane.proto.plan import SpeculativeConfig

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None, reason="without kernels in C other rows have other roundings"
)
KINDS = ("interleaved", "dense")
DRAFTS = SpeculativeConfig(3, 1, 2)
Models = dict[str, tuple[Path, list[Answer]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Folders of models, and answers of one stage that computes whole prompts and finds nothing in
    its cache.
    """
    found = {}
    for kind in KINDS:
        args = ATTENTION_KINDS[kind]
        folder = write_checkpoint(tmp_path_factory.mktemp("models") / "m", args, random_model(args))
        plan = tiny_plan(args, kv_cache_dtype="fp8")
        found[kind] = (
            folder,
            answers_of(folder, plan, fixed_scheduler(plan, 512, 1, enable_prefix_caching=False)),
        )
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("stages", "page_size", "budget", "mode", "is_scarce", "fails_at"),
    [
        (1, 16, 512, "plain", False, ()),  # with cached prefixes, none of which is long
        (2, 16, 512, "plain", False, ()),
        # prompts in pieces, sequences that are preempted and computed again
        (2, 4, 37, "plain", True, ()),
        (3, 16, 60, "speculative", False, ()),
        (1, 16, 100, "ahead", False, ()),
        (2, 16, 100, "plain", False, (3, 8, 20)),  # stages that lose their caches
        (2, 1, 64, "speculative", True, (5, 12)),
    ],
)
def test_the_same_answers_however_they_are_computed(
    models: Models,
    kind: str,
    stages: int,
    page_size: int,
    budget: int,
    mode: str,
    is_scarce: bool,
    fails_at: tuple[int, ...],
) -> None:
    folder, expected = models[kind]
    config = DRAFTS if mode == "speculative" else None
    changes = {"num_drafts": config.max_drafts() if config else 0, "kv_cache_dtype": "fp8"}
    plan = tiny_plan(ATTENTION_KINDS[kind], stages, page_size, 9, **changes)
    plan = with_scarce_pages(plan) if is_scarce else plan
    scheduler = fixed_scheduler(
        plan, budget, 3, speculative=config, async_scheduling=mode == "ahead"
    )
    if fails_at:
        found = answers_of(
            folder, plan, scheduler, make_chain=partial(FailingChain, fails_at=fails_at)
        )
    else:
        found = answers_of(folder, plan, scheduler)
    assert found == expected


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_not_those_of_a_cache_in_the_dtype_of_the_activations(
    models: Models, kind: str
) -> None:
    folder, fp8 = models[kind]
    plan = tiny_plan(ATTENTION_KINDS[kind])
    assert (
        answers_of(folder, plan, fixed_scheduler(plan, 512, 1, enable_prefix_caching=False)) != fp8
    )
