"""Owners, which are API keys, share a queue: one that floods it delays the others by no more than
its share.
"""

from dataclasses import replace

import pytest
from fake_pipeline import FakePipeline, new_cache, new_sequence
from hypothesis import given
from hypothesis import strategies as st
from running_router import new_scheduler
from scripted_chain import ScriptedChain

from tramontane.proto.errors import OverloadedError, QueueFullError
from tramontane.proto.request import NUM_PRIORITIES, Request, SamplingParams
from tramontane.router.engine.router import Router
from tramontane.router.scheduling.fair_shares import FairShares
from tramontane.router.scheduling.policy import FixedInFlightPolicy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.sequence import Sequence
from tramontane.router.scheduling.waiting_queue import FairQueue, SchedulerLimits, WaitingQueue

FLOOD, FEW = 1, 2
costs = st.integers(1, 50)


def _of(owner: int, seq_id: int, cost: int = 10) -> Sequence:
    return Sequence(seq_id, (1,) * cost, SamplingParams(), cost + 5, owner=owner)


class Turns:
    """Waiting sequences get slots in turn, and are computed at once."""

    def __init__(self) -> None:
        self.shares = FairShares()
        self.queue = FairQueue(self.shares)

    def push(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.queue.push(sequence)

    def begin(self) -> Sequence:
        sequence = self.queue.first
        self.shares.begin(sequence.account, sequence.num_known)
        self.queue.remove(sequence)
        self.shares.compute(sequence.account, sequence.num_known)
        self.shares.end(sequence.account, 0)
        self.queue.check_integrity()
        self.shares.check_integrity()
        return sequence


def test_a_newcomer_waits_for_one_of_a_flood() -> None:
    turns = Turns()
    turns.push(*(_of(FLOOD, seq_id) for seq_id in range(100)))
    assert [turns.begin().seq_id for _ in range(30)] == list(range(30))
    turns.push(_of(FEW, 100), _of(FEW, 101))
    assert [turns.begin().seq_id for _ in range(5)] == [30, 100, 31, 101, 32]


def test_requests_that_come_and_go_are_not_compared_with_all_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without keys each has an account: comparing all of them again takes seconds for thousands of
    requests.
    """
    turns, num_compared, turn = Turns(), 0, FairShares.turn
    monkeypatch.setattr(FairQueue, "check_integrity", lambda _: None)  # which compares all

    def count(shares: FairShares, number: int) -> int:
        nonlocal num_compared
        num_compared += 1
        return turn(shares, number)

    monkeypatch.setattr(FairShares, "turn", count)
    for seq_id in range(500):
        turns.push(_of(0, seq_id))
        assert turns.queue.first.seq_id == 0
    assert num_compared <= 3 * 500
    for seq_id in range(500):
        assert turns.begin().seq_id == seq_id
    assert num_compared <= 6 * 500


def test_requests_that_are_cancelled_while_they_wait_leave_nothing() -> None:
    turns = Turns()
    waiting = [_of(0, seq_id) for seq_id in range(100)]
    turns.push(*waiting)
    for sequence in waiting[:0:-1]:
        turns.queue.remove(sequence)
        turns.queue.check_integrity()
    for _ in range(100):  # the same key again and again
        turns.push(comes_again := _of(FEW, 200))
        turns.queue.remove(comes_again)
        turns.queue.check_integrity()
    assert turns.begin().seq_id == 0


def test_a_key_whose_prompt_is_cancelled_goes_before_those_that_have_had_more() -> None:
    turns = Turns()
    turns.push(_of(FLOOD, 0, 100), _of(FEW, 1, 10))
    for seq_id in (0, 1):  # both have slots
        first = turns.queue.first
        assert first.seq_id == seq_id
        turns.push(_of(first.owner, 2 + seq_id))
        turns.shares.begin(first.owner, first.num_known)
        turns.queue.remove(first)
    assert turns.queue.first.owner == FEW
    turns.shares.end(FLOOD, 100)
    assert turns.queue.first.owner == FLOOD
    turns.queue.check_integrity()


def test_a_key_that_comes_begins_where_the_answers_of_the_others_have_brought_them() -> None:
    shares = FairShares()
    shares.wait(FLOOD)
    shares.charge_decodes(FLOOD, 1000)
    shares.wait(FEW)
    assert shares.turn(FEW) == shares.turn(FLOOD)
    shares.wait(~3)
    assert shares.turn(~3) == shares.turn(FLOOD)
    shares.check_integrity()


def test_the_oldest_sequence_is_the_same_for_any_owner() -> None:
    """It is the one that ages while more urgent ones are scheduled."""
    waiting = WaitingQueue([FairShares() for _ in range(NUM_PRIORITIES)])
    for seq_id, owner, priority in (
        (3, FEW, 0),
        (4, FEW, 2),
        (5, FLOOD, 1),
        (6, FEW, 2),
        (7, FLOOD, 2),
    ):
        waiting.push(Sequence(seq_id, (1,), SamplingParams(), 10, priority, owner))
    oldest = [waiting.oldest_lower_priority(level) for level in range(3)]
    assert [each and each.seq_id for each in oldest] == [4, 4, None]


def test_quiet_time_earns_no_turns() -> None:
    """It had a turn at first; while it had nothing waiting, the other had thirty."""
    turns = Turns()
    turns.push(*(_of(FLOOD, seq_id) for seq_id in range(100)), _of(FEW, 100))
    assert [turns.begin().seq_id for _ in range(31)] == [0, 100, *range(1, 30)]
    turns.push(*(_of(FEW, seq_id) for seq_id in range(101, 115)))
    assert [turns.begin().owner for _ in range(28)] == [FLOOD, FEW] * 14


def test_a_queue_that_was_empty_begins_anew() -> None:
    """Nothing is charged for a time in which no sequence waited."""
    turns = Turns()
    turns.push(*(_of(FLOOD, seq_id) for seq_id in range(9)))
    assert [turns.begin().seq_id for _ in range(9)] == list(range(9))
    turns.push(_of(FLOOD, 10), _of(FEW, 11))
    assert [turns.begin().owner for _ in range(2)] == [FLOOD, FEW]


@given(
    st.lists(costs, min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(0, 40), st.integers(2, 5), costs), max_size=40),
)
def test_no_owner_waits_for_more_than_a_share(
    flood: list[int], others: list[tuple[int, int, int]]
) -> None:
    """Between two owners that both wait, what they are given differs by one sequence of each at
    most.
    """
    turns = Turns()
    turns.push(*(_of(FLOOD, seq_id, cost) for seq_id, cost in enumerate(flood)))
    arrivals = sorted(others)
    most = max([*flood, *(cost for _, _, cost in others)])
    given: dict[tuple[int, int], dict[int, int]] = {}  # to each of two since both have been waiting
    step = 0
    while turns.queue or arrivals:
        while arrivals and (arrivals[0][0] <= step or not turns.queue):
            _, owner, cost = arrivals.pop(0)
            turns.push(_of(owner, 1000 + step * 100 + len(arrivals), cost))
        waiting = {sequence.owner for sequence in turns.queue}
        pairs = {(a, b) for a in waiting for b in waiting if a < b}
        given = {pair: given.get(pair, dict.fromkeys(pair, 0)) for pair in pairs}
        going = turns.begin()
        for pair in pairs:
            if going.owner in pair:
                given[pair][going.owner] += going.num_known
            assert abs(given[pair][pair[0]] - given[pair][pair[1]]) <= 2 * most
        step += 1


@given(st.lists(costs, min_size=1, max_size=30), st.sampled_from([0, FEW]))
def test_one_owner_and_clients_without_keys_go_in_the_order_of_arrival(
    lengths: list[int], owner: int
) -> None:
    turns = Turns()
    turns.push(*(_of(owner, seq_id, cost) for seq_id, cost in enumerate(lengths)))
    assert [turns.begin().seq_id for _ in lengths] == list(range(len(lengths)))


def test_without_keys_the_choices_of_a_request_take_turns_with_other_requests() -> None:
    turns = Turns()
    choices = [_of(0, seq_id) for seq_id in range(4)]
    for choice in choices:
        choice.request_number = 0
    turns.push(*choices, _of(0, 4), _of(0, 5))
    assert [turns.begin().seq_id for _ in range(6)] == [0, 4, 5, 1, 2, 3]


def test_who_leaves_does_not_pay() -> None:
    turns = Turns()
    turns.push(_of(FLOOD, 0))
    left = [_of(FEW, seq_id) for seq_id in range(1, 20)]
    turns.push(*left)
    for sequence in left[:-1]:
        turns.queue.remove(sequence)
    turns.push(_of(FLOOD, 30))
    assert [turns.begin().seq_id for _ in range(3)] == [0, 19, 30]


def test_slots_that_are_free_together_are_shared_before_anything_is_computed() -> None:
    shares = FairShares()
    queue = FairQueue(shares)
    for seq_id in range(8):
        queue.push(_of(FLOOD if seq_id < 5 else FEW, seq_id))
    order = []
    while queue:
        sequence = queue.first
        order.append(sequence.seq_id)
        shares.begin(sequence.account, sequence.num_known)
        queue.remove(sequence)
    assert order == [0, 5, 1, 6, 2, 7, 3, 4]


def test_who_gave_a_place_back_is_the_next_and_does_not_pay_twice() -> None:
    line = WaitingQueue([FairShares() for _ in range(NUM_PRIORITIES)])
    again, other = _of(FLOOD, 0), _of(FEW, 1)
    line.push(again)
    line.pop_admitted(again)
    line.push(other)
    line.push(again)
    assert line.first is again
    line.pop_admitted(again)
    line.push(_of(FLOOD, 2))
    assert line.first is other
    line.check_integrity()


def test_owners_are_admitted_in_turns_and_end_all() -> None:
    limits = SchedulerLimits(1, 64, 256, 1000)
    pipe = FakePipeline(Scheduler(new_cache(16, 2, 64), limits, FixedInFlightPolicy(1, 64)))
    for seq_id, owner in enumerate([FLOOD] * 6 + [FEW] * 2):
        sequence = new_sequence(seq_id, 5, 1)
        sequence.owner = owner
        pipe.scheduler.add(sequence)
    pipe.drain()
    assert [event.seq_id for event in pipe.events] == [0, 6, 1, 7, 2, 3, 4, 5], "0 is charged"


async def _never(_batch: object) -> None:
    raise AssertionError("nothing runs here")


def _router(max_queued: int) -> Router:
    return Router(_one_seq_scheduler(max_queued), ScriptedChain(_never))


def _one_seq_scheduler(max_queued: int) -> Scheduler:
    return new_scheduler(new_cache(16, 2, 64), num_seqs=1, in_flight=1, max_queued_seqs=max_queued)


ONE = Request.of((1,), SamplingParams(max_tokens=4))


def _choices(number: int) -> Request:
    return replace(ONE, sequences=ONE.sequences * number)


def test_a_flood_leaves_half_of_the_queue_to_others() -> None:
    router = _router(8)

    def submit_one(owner: int) -> None:
        router.submit(replace(ONE, owner=owner), lambda _: None)

    for _ in range(1 + 4):
        submit_one(FLOOD)
    with pytest.raises(
        QueueFullError, match="4 sequences with this key are waiting and at most 4 may"
    ):
        submit_one(FLOOD)
    for _ in range(2):
        router.check_capacity(1, FEW)
        submit_one(FEW)
    with pytest.raises(QueueFullError):
        router.check_capacity(1, FEW)
    assert router.num_requests == 1 + 4 + 2


@pytest.mark.parametrize(
    ("bound", "taken"),
    [
        (1, {FLOOD: 1, FEW: 0}),
        (2, {FLOOD: 1, FEW: 1}),
        (3, {FLOOD: 2, FEW: 1}),
        (7, {FLOOD: 4, FEW: 2}),
    ],
)
def test_half_of_an_odd_number_is_rounded_up(bound: int, taken: dict[int, int]) -> None:
    """Of 7 places 4, and then of 3 places 2: with one place an owner can wait at all."""
    router = _router(bound)
    # begins
    router.submit(replace(ONE, owner=FLOOD), lambda _: None)
    for owner, expected in taken.items():
        request = replace(ONE, owner=owner)
        for _ in range(expected):
            router.check_capacity(1, owner)
            router.submit(request, lambda _: None)
        with pytest.raises(QueueFullError):
            router.check_capacity(1, owner)
        with pytest.raises(QueueFullError):
            router.submit(request, lambda _: None)


@pytest.mark.parametrize(
    "earlier",
    [
        replace(ONE, already_admitted=True),
        replace(ONE, sequences=(replace(ONE.sequences[0], output_ids=(5, 6)),)),
    ],
)
def test_what_another_router_had_accepted_is_taken_though_the_queue_is_full(
    earlier: Request,
) -> None:
    router = _router(1)
    for _ in range(2):
        router.submit(ONE, lambda _: None)
    with pytest.raises(QueueFullError):
        router.submit(ONE, lambda _: None)
    router.submit(earlier, lambda _: None)
    assert router.num_requests == 3


def test_without_owners_the_queue_is_for_all_and_a_refused_request_does_not_make_it_full() -> None:
    router = _router(8)
    router.submit(_choices(8), lambda _: None)  # one begins
    with pytest.raises(OverloadedError) as refused:
        router.submit(_choices(2), lambda _: None)
    assert not isinstance(refused.value, QueueFullError)
    router.submit(ONE, lambda _: None)
    with pytest.raises(QueueFullError):
        router.submit(ONE, lambda _: None)


def test_the_choices_of_a_request_without_a_key_have_one_account() -> None:
    router = _router(8)
    for num_choices in (1, 3, 2):
        router.submit(_choices(num_choices), lambda _: None)
    router.submit(replace(_choices(2), owner=FEW), lambda _: None)
    assert [sequence.account for sequence in router.scheduler._waiting] == [
        ~1,
        ~1,
        ~1,
        ~4,
        ~4,
        FEW,
        FEW,
    ]


def test_when_to_come_back_counts_what_still_waits() -> None:
    now = [0.0]
    router = Router(_one_seq_scheduler(1), ScriptedChain(_never), clock=lambda: now[0])
    for _ in range(2):
        router.submit(ONE, lambda _: None)
    now[0] = 6.5
    with pytest.raises(QueueFullError) as refused:
        router.submit(ONE, lambda _: None)
    assert refused.value.retry_after_s == 7
