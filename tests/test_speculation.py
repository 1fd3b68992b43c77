"""Speculation on real stages: the answers that sequences get without it, bit for bit."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from examples import examples
from guessing_drafter import WRONG, count_ahead, guess
from harness import fixed_scheduler
from hypothesis import given, settings
from hypothesis import strategies as st
from request_kinds import PROMPTS, Answer, answers_of, with_scarce_pages
from tiny_models import ATTENTION_KINDS, tiny_plan, write_each_kind

from tramontane.proto.plan import PipelinePlan, SpeculativeConfig
from tramontane.router.scheduling.scheduler import Scheduler

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None, reason="without kernels in C other rows have other roundings"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_each_kind(tmp_path_factory.mktemp("models"))


def _scheduler(plan: PipelinePlan, budget: int, config: SpeculativeConfig | None) -> Scheduler:
    return fixed_scheduler(plan, budget, 4, speculative=config)


def _guess_from(patch: pytest.MonkeyPatch, answers: Sequence[Answer], share: float) -> None:
    """Draft from these answers, each token rightly with this probability."""
    texts = [
        (*prompt, *token_ids) for prompt, ((token_ids, _), *_) in zip(PROMPTS, answers, strict=True)
    ]

    def next_token(text: Sequence[int]) -> int:
        known = tuple(text)
        return next(
            (
                each[len(known)]
                for each in texts
                if each[: len(known)] == known and len(each) > len(known)
            ),
            WRONG,
        )

    guess(patch, next_token, share)


@settings(max_examples=examples(4, least=2), deadline=None, derandomize=True)
@given(
    share=st.sampled_from([0.0, 0.6, 0.9, 1.0]),
    num_drafts=st.integers(1, 6),
    stages=st.sampled_from([1, 2, 4]),
    page_size=st.sampled_from([1, 4, 16]),
    budget=st.integers(5, 300),
    is_scarce=st.booleans(),
)
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_the_same_answers_with_and_without(
    folders: dict[str, Path],
    kind: str,
    share: float,
    num_drafts: int,
    stages: int,
    page_size: int,
    budget: int,
    is_scarce: bool,
) -> None:
    """Greedy, seeded, penalized, with grammars and log-probabilities, packed together; with scarce
    pages some are preempted.
    """
    args, config = ATTENTION_KINDS[kind], SpeculativeConfig(num_drafts, 1, 2)
    plan = tiny_plan(
        args,
        min(stages, 3) if args.sparse else stages,
        page_size,
        16,
        num_drafts=config.max_drafts(),
    )
    plan = with_scarce_pages(plan) if is_scarce else plan
    expected = answers_of(folders[kind], plan, _scheduler(plan, budget, None))
    scheduler = _scheduler(plan, budget, config)
    with pytest.MonkeyPatch.context() as patch:
        _guess_from(patch, expected, share)
        assert answers_of(folders[kind], plan, scheduler) == expected
    counts = scheduler.draft_counts
    assert counts.num_draft_tokens > 0
    if share == 1.0:
        assert counts.num_accepted_tokens > counts.num_draft_tokens / 2, (
            "the last ones may follow the end of an answer"
        )
    if share == 0.0:
        assert counts.num_accepted_tokens < counts.num_draft_tokens / 10, (
            "a wrong one may be sampled all the same"
        )


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_the_same_answer_of_a_stream_whose_drafts_go_ahead(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    config = SpeculativeConfig(3, 1, 2)
    plan = tiny_plan(ATTENTION_KINDS["window"], 2, 4, 16, num_drafts=config.max_drafts())
    expected = answers_of(folders["window"], plan, _scheduler(plan, 64, None))
    _guess_from(monkeypatch, expected, share)
    ahead = count_ahead(monkeypatch)
    for number in (0, 1):  # greedy and seeded
        assert answers_of(folders["window"], plan, _scheduler(plan, 64, config), (number,)) == [
            expected[number]
        ]
    assert ahead
