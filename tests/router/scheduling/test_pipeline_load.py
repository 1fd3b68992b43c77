"""What a router says of how much it has: places, pages and tokens, queue included."""

import pytest
from fake_pipeline import new_cache, new_pipeline, new_sequence

from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.proto.request import NUM_PRIORITIES, SamplingParams
from tramontane.router.scheduling.policy import BatchWork, WorkEstimator
from tramontane.router.scheduling.running_set import MIN_DECODES, PipelineLoad, expected_decodes
from tramontane.router.scheduling.sequence import Sequence

NOTHING = PipelineLoad(0.0, 0, (BatchWork(),) * NUM_PRIORITIES)


def test_nothing_is_no_demand() -> None:
    pipe = new_pipeline(new_cache(16, 8, 64))
    assert pipe.scheduler.measure_load() == NOTHING


def test_waiting_sequences_count_like_running_ones() -> None:
    pipe = new_pipeline(new_cache(16, 8, 64))
    places = pipe.scheduler.limits.max_num_seqs
    for seq_id in range(2 * places):
        pipe.scheduler.add(new_sequence(seq_id, 3, 5))
    assert pipe.scheduler.num_waiting == places, "the others run"
    assert pipe.scheduler.measure_load().share == pytest.approx(2.0)
    assert pipe.scheduler.measure_load().tokens == 2 * places * 3


def test_tokens_in_flight_are_prompts_and_answers_so_far() -> None:
    pipe = new_pipeline(new_cache(16, 8, 64), budget=64)
    pipe.scheduler.add(new_sequence(0, 7, 5))
    assert pipe.scheduler.measure_load().tokens == 7
    pipe.submit()
    pipe.answer()
    assert pipe.scheduler.measure_load().tokens == 8
    while pipe.submit() is not None:
        pipe.answer()
    assert pipe.scheduler.measure_load() == NOTHING, "what has ended does not count"


def test_of_places_and_pages_the_scarcer_ones_decide() -> None:
    """One sequence of 90 tokens and one to come needs 6 of 8 pages of 16; with a window of 32 it
    needs the ring's 3 of 12.
    """
    full, windowed = WindowClass(None, 8, 8), WindowClass(32, 3, 12)
    for classes, share in ((full,), 0.75), ((windowed,), 0.25), ((windowed, full), 0.75):
        pipe = new_pipeline(CachePlan(16, classes))
        pipe.scheduler.add(new_sequence(0, 90, 30))
        assert pipe.scheduler.measure_load().share == pytest.approx(share)


def test_what_is_left_counts_for_a_priority_if_it_is_as_urgent() -> None:
    """Prompts of 20, 30 and 40 tokens, with 4 to come each, of which the first one has been
    submitted.
    """
    pipe = new_pipeline(new_cache(16, 8, 64), budget=20)
    for seq_id, priority in enumerate((0, 2, 7)):
        pipe.scheduler.add(new_sequence(seq_id, 20 + 10 * seq_id, 4, priority))
    pipe.submit()
    left = pipe.scheduler.measure_load().left
    assert [(work.prefill_tokens, work.decodes) for work in left] == [(0, 4)] * 2 + [
        (30, 8)
    ] * 5 + [(70, 12)] * 3
    assert left[2].prefill_keys == 30 * 31 // 2
    assert left[0].decode_keys == 4 * 20
    pipe.drain()
    assert pipe.scheduler.measure_load() == NOTHING


def test_tokens_that_were_cached_are_not_left() -> None:
    pipe = new_pipeline(new_cache(16, 8, None), budget=64)
    pipe.scheduler.add(new_sequence(0, 90, 4))
    pipe.drain()
    pipe.scheduler.add(new_sequence(0, 90, 4))
    assert pipe.scheduler.measure_load().left[0].prefill_tokens == 90, (
        "it is looked for when the sequence begins"
    )
    pipe.submit()
    assert pipe.num_reused == 80
    assert pipe.scheduler.measure_load().left[0] == BatchWork(0, 0, 4, 4 * 90)


def test_the_work_left_of_a_sequence() -> None:
    without = WorkEstimator([256])
    assert without.work_left([(3, 8, 2)]) == BatchWork(5, 3 * 5 + 15, 2, 16)
    assert without.work_left([(3, 8, 2), (0, 4, 0), (9, 9, 1)]) == BatchWork(9, 30 + 10, 3, 16 + 9)
    assert WorkEstimator([4]).work_left([(6, 8, 3)]) == BatchWork(2, 2 * 4 + 3, 3, 12), (
        "no token sees more than the window"
    )
    assert without.work_left([]) == BatchWork()


@pytest.mark.parametrize(
    ("num_output", "max_tokens", "expected"),
    [
        (0, 1000, MIN_DECODES),
        (10, 1000, MIN_DECODES),
        (100, 1000, 100),
        (300, 1000, 300),
        (100, 130, 30),
        (0, 5, 5),
        (5, 5, 0),
    ],
)
def test_as_many_tokens_are_expected_as_there_are(
    num_output: int, max_tokens: int, expected: int
) -> None:
    sampling = SamplingParams(max_tokens=max_tokens)
    assert (
        expected_decodes(
            Sequence(0, (1, 2, 3), sampling, 3 + max_tokens, output_ids=[7] * num_output)
        )
        == expected
    )
