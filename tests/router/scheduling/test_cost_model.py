"""How work is counted, and that times of stages are learned from what they were."""

import random

import numpy as np
import pytest

from tramontane.proto.step import Chunk, DecodeColumns, MicroBatch
from tramontane.router.scheduling.cost_model import MIN_OBSERVATIONS, CostModel
from tramontane.router.scheduling.policy import BatchWork, WorkEstimator


def _work(rng: random.Random) -> BatchWork:
    tokens, decodes = rng.choice((0, 0, rng.randint(1, 512))), rng.randint(0, 64)
    return BatchWork(tokens, tokens * rng.randint(1, 2000), decodes, decodes * rng.randint(1, 4000))


def _seconds(work: BatchWork, factor: float = 1.0) -> float:
    return factor * (
        2e-3
        + 2e-5 * work.prefill_tokens
        + 1e-9 * work.prefill_keys
        + 1e-5 * work.decodes
        + 2e-9 * work.decode_keys
    )


def test_learns_what_each_stage_takes() -> None:
    model, rng = CostModel(3), random.Random(1)
    factors = (1.0, 0.5, 2.0)
    for _ in range(200):
        work = _work(rng)
        model.observe(work, [_seconds(work, f) * (1 + rng.gauss(0, 0.05)) for f in factors])
    works = [_work(rng) for _ in range(50)]
    expected = np.array([[_seconds(work, f) for f in factors] for work in works])
    assert np.abs(model.predict(works) / expected - 1).max() < 0.1


def test_follows_when_the_stages_become_slower() -> None:
    model, rng = CostModel(1), random.Random(2)
    for factor in (1.0, 3.0):
        for _ in range(600):
            work = _work(rng)
            model.observe(work, [_seconds(work, factor)])
    work = BatchWork(100, 5000, 32, 32_000)
    assert model.predict([work])[0, 0] == pytest.approx(_seconds(work, 3.0), rel=0.05)


def test_one_step_that_something_held_up_changes_little() -> None:
    model, rng = CostModel(1), random.Random(3)
    for _ in range(200):
        work = _work(rng)
        model.observe(work, [_seconds(work)])
    work = BatchWork(decodes=32, decode_keys=32_000)
    before = model.predict([work])[0, 0]
    for _ in range(8):
        model.observe(work, [_seconds(work) if _ else 5.0])
    assert model.predict([work])[0, 0] == pytest.approx(before, rel=0.1)


def test_a_constant_load_leaves_the_model_sound() -> None:
    """Where nothing varies the parts cannot be separated: their sum must stay right, and nothing
    may grow without bound.
    """
    model = CostModel(2)
    work = BatchWork(decodes=16, decode_keys=8000)
    for _ in range(5000):
        model.observe(work, [_seconds(work), 0.0])
    assert model.predict([work])[0] == pytest.approx([_seconds(work), 0.0], rel=1e-3)
    assert (model.predict([BatchWork(512, 10**6, 64, 10**6)]) < 1).all()


def test_no_work_makes_a_stage_faster() -> None:
    model, rng = CostModel(1), random.Random(4)
    for _ in range(300):
        work = _work(rng)
        model.observe(work, [max(1e-3 * (1 + rng.gauss(0, 0.5)), 1e-4)])
    ladder = model.predict([BatchWork(n, n * n, n, n * 100) for n in range(0, 512, 16)])[:, 0]
    assert (np.diff(ladder) >= 0).all()


def test_is_not_believed_before_it_has_seen_enough() -> None:
    model = CostModel(1)
    for seen in range(MIN_OBSERVATIONS):
        assert not model.is_ready, seen
        model.observe(BatchWork(decodes=1, decode_keys=1), [1e-3])
    assert model.is_ready


@pytest.mark.parametrize(
    ("chunks", "starts", "work"),
    [
        ([], (0, 3), BatchWork(decodes=2, decode_keys=1 + 4)),
        ([], (4,), BatchWork(decodes=1, decode_keys=4)),
        ([], (2, 7, 11), BatchWork(decodes=3, decode_keys=3 + 6 + 7)),
        ([(0, 1), (4, 1)], (), BatchWork(decodes=2, decode_keys=1 + 4)),
        ([(0, 3)], (), BatchWork(3, 1 + 2 + 3)),
        ([(8, 3), (7, 1)], (11,), BatchWork(3, 3 * 6 + 1 + 2 + 3, 2, 6 + 7)),
    ],
)
def test_the_work_of_a_micro_batch_counts_what_each_token_sees(
    chunks: list[tuple[int, int]], starts: tuple[int, ...], work: BatchWork
) -> None:
    """With windows of 4 and 10. ``chunks``: their starts and lengths."""
    ids = tuple(range(len(starts)))
    batch = MicroBatch(
        epoch=0,
        step_id=0,
        chunks=tuple(
            Chunk(9, start, (1,) * length, (), None, needs_sample=False) for start, length in chunks
        ),
        decodes=DecodeColumns(ids, starts, ids),
    )
    assert WorkEstimator((4, 10)).work_of(batch) == work


def test_keys_that_are_gained_are_those_seen_more_than_before() -> None:
    estimator = WorkEstimator((4, 10))
    for positions in ([], [1, 2], [4, 4], *([1, n] for n in range(1, 14)), [5, 8, 10, 11, 12]):
        gained = [estimator.visible_keys(n) - estimator.visible_keys(n - 1) for n in positions]
        assert estimator.visible_keys_gained(positions) == sum(gained)
