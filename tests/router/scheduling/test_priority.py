"""Batch work is preempted for interactive work, never starves, and loses no token."""

from dataclasses import replace

import pytest
from fake_pipeline import FakePipeline, new_cache, new_pipeline, new_sequence
from scripted_chain import all_chunks

from tramontane.proto.errors import RequestError
from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.proto.request import Request, SamplingParams
from tramontane.proto.step import MicroBatch
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.policy import FixedInFlightPolicy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.waiting_queue import MAX_PASSES, SchedulerLimits

INTERACTIVE, BATCH = 0, 1


def _of(batch: MicroBatch | None) -> list[tuple[int, int, int]]:
    """Who goes, from which position, with how many tokens."""
    assert batch is not None
    return [(c.seq_id, c.start, c.num_tokens) for c in all_chunks(batch)]


def _add(pipe: FakePipeline, priority: int, prompts: dict[int, int], new: int = 20) -> None:
    for seq_id, prompt in prompts.items():
        pipe.scheduler.add(new_sequence(seq_id, prompt, new, priority))


def _step(pipe: FakePipeline) -> MicroBatch | None:
    batch = pipe.submit()
    pipe.answer()
    return batch


def test_admission_is_by_priority_then_by_arrival() -> None:
    pipe = new_pipeline(new_cache(16, 8, 64), seqs=1)
    _add(pipe, INTERACTIVE, {0: 5}, new=1)
    _add(pipe, BATCH, {1: 5, 2: 5}, new=1)
    _add(pipe, 9, {3: 5}, new=1)
    _add(pipe, INTERACTIVE, {4: 5}, new=1)
    pipe.drain()
    assert [event.seq_id for event in pipe.events] == [0, 4, 1, 2, 3]


def test_the_least_urgent_with_least_to_compute_again_gives_its_place_back_at_once() -> None:
    pipe = new_pipeline(new_cache(16, 8, 64), seqs=3, in_flight=1)
    _add(pipe, BATCH, {0: 10, 1: 6, 2: 8})
    _step(pipe)
    _add(pipe, INTERACTIVE, {3: 7})
    batch = _step(pipe)
    assert batch is not None
    assert batch.freed_seq_ids == (1,)
    assert _of(batch) == [(3, 0, 7), (2, 8, 1), (0, 10, 1)], "the shorter prompt was finished first"
    pipe.drain()
    assert pipe.scheduler.num_preempted == 1
    assert [len(pipe.tokens_of(seq_id)) for seq_id in range(4)] == [20] * 4, (
        "the token that it had got counts"
    )


def test_no_sequence_is_preempted_for_an_equal_or_in_vain() -> None:
    """Two rings of pages: with one of them in interactive hands, the other does not suffice for a
    sequence that needs both.
    """
    pipe = new_pipeline(CachePlan(16, (WindowClass(None, 16, 12),)), seqs=3)
    _add(pipe, BATCH, {0: 20}, new=5)
    _add(pipe, INTERACTIVE, {1: 120}, new=5)
    _step(pipe)
    _add(pipe, INTERACTIVE, {2: 100}, new=5)
    pipe.drain()
    assert pipe.scheduler.num_preempted == 0
    pipe = new_pipeline(new_cache(16, 8, 64), seqs=2)
    for priority in (INTERACTIVE, BATCH):
        _add(pipe, priority, {10 * priority + n: 9 for n in range(6)})
        pipe.drain()
    assert pipe.scheduler.num_preempted == 0


def test_as_many_give_way_as_are_needed() -> None:
    """One place is enough, but the pages of three are not too many."""
    pipe = new_pipeline(
        CachePlan(16, (WindowClass(None, 16, 12),)), seqs=4, in_flight=1, budget=200
    )
    _add(pipe, BATCH, dict.fromkeys(range(4), 30))
    _step(pipe)
    _add(pipe, INTERACTIVE, {4: 100})
    batch = _step(pipe)
    assert batch is not None
    assert batch.freed_seq_ids == (3, 2, 1)
    pipe.drain()
    assert [len(pipe.tokens_of(seq_id)) for seq_id in range(5)] == [20] * 5


def test_while_all_less_urgent_are_in_flight_their_prompts_wait_until_one_is_back() -> None:
    """One place, and a prompt in twelve pieces: without that the next piece would always be in
    flight.
    """
    pipe = new_pipeline(new_cache(16, 8, 64), seqs=1, budget=10)
    _add(pipe, BATCH, {0: 120})
    assert [_of(pipe.submit()) for _ in range(3)] == [[(0, 0, 10)], [(0, 10, 10)], [(0, 20, 10)]]
    _add(pipe, INTERACTIVE, {1: 5})
    for _ in range(3):
        assert pipe.submit() is None
        pipe.answer()
    assert _of(pipe.submit()) == [(1, 0, 5)]
    pipe.drain()
    assert [len(pipe.tokens_of(seq_id)) for seq_id in range(2)] == [20, 20]


@pytest.mark.parametrize("budget", [16, 64])
@pytest.mark.parametrize("policy", ["even", "balanced"])
def test_an_urgent_prompt_goes_whole_and_alone_and_decodes_leave_it_room(
    policy: str, budget: int
) -> None:
    """Of 16 tokens twelve decodes would leave 4, which the batch prompt that came before would
    take; of 64 it would take 40.
    """
    chosen = (
        FixedInFlightPolicy(1, budget)
        if policy == "even"
        else BalancedPolicy(1, budget, stages_at_once=1)
    )
    pipe = new_pipeline(new_cache(16, 16, 64), seqs=16, policy=chosen)
    pipe.num_stages = 1
    _add(pipe, BATCH, dict.fromkeys(range(12), 1), new=200)
    for _ in range(40):
        _step(pipe)
    _add(pipe, BATCH, {12: 100})
    _add(pipe, INTERACTIVE, {13: 12})
    batch = pipe.submit()
    assert batch is not None
    assert [(c.seq_id, c.num_tokens) for c in batch.chunks] == [(13, 12)]
    assert len(batch.decodes.seq_ids) <= budget - 12
    pipe.answer()
    assert {c.seq_id for c in _step(pipe).chunks} == {12}, "and then the other"  # type: ignore[union-attr]


def test_however_much_is_urgent_decodes_continue() -> None:
    pipe = new_pipeline(new_cache(16, 16, 64), seqs=16, budget=16, in_flight=1)
    _add(pipe, BATCH, dict.fromkeys(range(8), 1), new=200)
    _step(pipe)
    _add(pipe, INTERACTIVE, dict.fromkeys(range(10, 18), 200), new=1)
    for _ in range(40):
        batch = _step(pipe)
        assert batch is not None
        assert sum(c.num_tokens for c in batch.chunks) == 14
    assert all(len(pipe.tokens_of(seq_id)) >= 10 for seq_id in range(8)), "in turn"


def test_where_pages_run_out_the_least_urgent_is_computed_again_though_it_came_first() -> None:
    pipe = new_pipeline(CachePlan(16, (WindowClass(None, 16, 12),)), budget=200)
    _add(pipe, BATCH, {0: 20}, new=60)
    _add(pipe, INTERACTIVE, {1: 20, 2: 20}, new=60)
    again = set()
    while batch := pipe.submit():
        again |= {c.seq_id for c in batch.chunks if c.sampling and pipe.tokens_of(c.seq_id)}
        pipe.answer()
    assert again == {0}
    assert [len(pipe.tokens_of(seq_id)) for seq_id in range(3)] == [60] * 3


@pytest.mark.parametrize("window", [64, None])
@pytest.mark.parametrize("seqs", [1, 4])
@pytest.mark.parametrize("is_running", [False, True])
def test_no_sequence_starves(window: int | None, seqs: int, is_running: bool) -> None:
    """Interactive requests never stop coming: there are always two per slot that have not ended.

    An interactive sequence of 30 tokens and 4 new ones takes about 2 micro-batches for its prompt
    and 4 for the rest. The oldest sequence passed over waits for MAX_PASSES of those with prompts,
    which are not fewer than a quarter of all.
    """
    num_batch = 3
    pipe = new_pipeline(new_cache(16, 4, window), seqs=seqs, budget=16, in_flight=2)
    if is_running:
        _add(pipe, BATCH, dict.fromkeys(range(num_batch), 40), new=4)
        _step(pipe)
    came = 10
    ends: dict[int, int] = {}
    for step in range(num_batch * (4 * MAX_PASSES + 40)):
        unfinished = (
            came
            - 10
            - sum(event.finish is not None and event.seq_id >= 10 for event in pipe.events)
        )
        _add(pipe, INTERACTIVE, dict.fromkeys(range(came, came + 2 * seqs - unfinished), 30), new=4)
        came += 2 * seqs - unfinished
        if step == 0 and not is_running:
            _add(pipe, BATCH, dict.fromkeys(range(num_batch), 40), new=4)
        while pipe.submit():
            pass
        pipe.answer()
        ends |= {
            e.seq_id: step
            for e in pipe.events
            if e.finish and e.seq_id < 10 and e.seq_id not in ends
        }
    assert sorted(ends) == list(range(num_batch))
    assert min(ends.values()) > MAX_PASSES or is_running, "and the others went first"
    pipe.drain()
    assert [len(pipe.tokens_of(seq_id)) for seq_id in range(num_batch)] == [4] * num_batch


def test_a_running_prompt_does_not_starve_either() -> None:
    """Every micro-batch takes one of three interactive prompts, and there is a place for all."""
    pipe = new_pipeline(new_cache(16, 8, 64), seqs=8, budget=16, in_flight=1)
    _add(pipe, INTERACTIVE, {100: 16, 101: 16}, new=1)
    _add(pipe, BATCH, {0: 40}, new=1)
    for step in range(MAX_PASSES + 3):
        assert not pipe.tokens_of(0)
        _add(pipe, INTERACTIVE, {102 + step: 16}, new=1)
        _step(pipe)
    assert [len(pipe.tokens_of(0)), pipe.scheduler.num_preempted] == [1, 0]


def test_waiting_for_equals_promotes_no_sequence() -> None:
    pipe = new_pipeline(new_cache(16, 8, 64), seqs=1)
    _add(pipe, BATCH, dict.fromkeys(range(2 * MAX_PASSES), 2), new=2)
    last = pipe.scheduler._waiting.of_priority(BATCH)[-1]
    pipe.drain()
    assert (last.effective_priority, last.num_passes) == (BATCH, 0)


def test_one_sequence_that_waits_is_not_several() -> None:
    limits = SchedulerLimits(2, 64, 256, 1000, max_queued_seqs=1, max_queued_tokens=100)
    pipe = FakePipeline(Scheduler(new_cache(16, 2, 64), limits, FixedInFlightPolicy(2, 64)))
    _add(pipe, BATCH, dict.fromkeys(range(3), 30))
    assert (
        pipe.scheduler.overload_reason([new_sequence(9, 5, 1, BATCH)])
        == "1 sequence is waiting and at most 1 may"
    )


def test_the_queue_of_one_priority_does_not_fill_that_of_another() -> None:
    limits = SchedulerLimits(2, 64, 256, 1000, max_queued_seqs=3, max_queued_tokens=100)
    pipe = FakePipeline(Scheduler(new_cache(16, 2, 64), limits, FixedInFlightPolicy(2, 64)))
    _add(pipe, BATCH, dict.fromkeys(range(5), 30))
    overload = pipe.scheduler.overload_reason
    assert "3 sequences are waiting" in (overload([new_sequence(9, 5, 1, BATCH)]) or "")
    assert overload([new_sequence(n, 30, 1, INTERACTIVE) for n in range(10, 15)]) is None, (
        "two would begin, three wait"
    )
    assert "at most 3" in (
        overload([new_sequence(n, 3, 1, INTERACTIVE) for n in range(10, 16)]) or ""
    )
    assert "120 prompt tokens" in (
        overload([new_sequence(n, 40, 1, INTERACTIVE) for n in range(10, 15)]) or ""
    )
    _add(pipe, INTERACTIVE, dict.fromkeys(range(10, 15), 30))
    assert "3 sequences are waiting" in (overload([new_sequence(15, 5, 1, INTERACTIVE)]) or "")
    pipe.drain()
    assert len({event.seq_id for event in pipe.events}) == 10


def test_an_aborted_batch_sequence_leaves_the_line() -> None:
    pipe = new_pipeline(new_cache(16, 8, 64), seqs=1, in_flight=1)
    _add(pipe, BATCH, {0: 5, 1: 5})
    _step(pipe)
    _add(pipe, INTERACTIVE, {2: 5})
    pipe.scheduler.abort(0)
    pipe.drain()
    assert [len(pipe.tokens_of(seq_id)) for seq_id in range(3)] == [1, 20, 20]


@pytest.mark.parametrize("priority", [-1, 10])
def test_priorities_are_bounded(priority: int) -> None:
    with pytest.raises(RequestError, match=f"priority is {priority}; it must be 0 "):
        replace(Request.of((1,), SamplingParams()), priority=priority)
