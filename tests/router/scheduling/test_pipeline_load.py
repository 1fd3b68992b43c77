"""What a router says of how much it has: places, pages and tokens, queue included."""

import pytest
from fake_pipeline import new_cache, new_pipeline, new_sequence

from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.router.scheduling.running_set import PipelineLoad


def test_nothing_is_no_demand() -> None:
    pipe = new_pipeline(new_cache(16, 8, 64))
    assert pipe.scheduler.measure_load() == PipelineLoad(0.0, 0)


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
    assert pipe.scheduler.measure_load() == PipelineLoad(0.0, 0), "what has ended does not count"


def test_of_places_and_pages_the_scarcer_ones_decide() -> None:
    """One sequence of 90 tokens and one to come needs 6 of 8 pages of 16; with a window of 32 it needs the ring's 3 of 12."""
    full, windowed = WindowClass(None, 8, 8), WindowClass(32, 3, 12)
    for classes, share in ((full,), 0.75), ((windowed,), 0.25), ((windowed, full), 0.75):
        pipe = new_pipeline(CachePlan(16, classes))
        pipe.scheduler.add(new_sequence(0, 90, 30))
        assert pipe.scheduler.measure_load().share == pytest.approx(share)
