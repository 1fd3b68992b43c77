"""Which prompt is computed first: keys, or requests without keys, are finished no later than in
equal shares of the tokens.
"""

import random
from collections import deque

import pytest
from examples import examples
from fake_pipeline import FakePipeline, new_cache, new_pipeline, new_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from tramontane.proto.request import SamplingParams
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.router.scheduling.fair_shares import FairShares
from tramontane.router.scheduling.policy import FixedInFlightPolicy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.sequence import Sequence
from tramontane.router.scheduling.waiting_queue import SchedulerLimits

A, B, C = 1, 2, 3


def _pipe(budget: int = 10, in_flight: int = 1, seqs: int = 64) -> FakePipeline:
    return new_pipeline(new_cache(16, seqs, 64), seqs=seqs, budget=budget, in_flight=in_flight)


def _add(pipe: FakePipeline, seq_id: int, prompt: int, owner: int = 0, new: int = 1) -> Sequence:
    sequence = new_sequence(seq_id, prompt, new)
    sequence.owner = owner
    pipe.scheduler.add(sequence)
    return sequence


def _prompts(batch: MicroBatch | None) -> list[tuple[int, int]]:
    return [(chunk.seq_id, chunk.num_tokens) for chunk in batch.chunks] if batch else []


def _run(pipe: FakePipeline) -> list[int]:
    """Return whose prompts were computed, in order; several chunks in a row count once."""
    order: list[int] = []
    while pipe.scheduler.num_waiting or pipe.scheduler.num_running:
        for seq_id, _ in _prompts(pipe.submit()):
            order += [] if order[-1:] == [seq_id] else [seq_id]
        pipe.answer()
    return order


def test_virtual_time_advances_by_fewer_tokens_than_there_are_accounts() -> None:
    """Ten accounts, and steps of 4 tokens of one of them: 50 tokens are 5 for each. Who comes
    begins there.
    """
    shares = FairShares()
    for number in range(1, 11):
        shares.begin(number, 100)
    for _ in range(12):
        shares.compute(1, 4)
    shares.compute(1, 2)
    shares.check_integrity()
    shares.begin(11, 10)
    assert shares.tag(11) == 5


def test_a_prompt_is_charged_once_and_then_each_token_of_its_answer() -> None:
    pipe = _pipe(budget=16)
    sequence = _add(pipe, 0, 40, A, new=30)
    _add(pipe, 1, 200, B)  # whose prompt is not finished yet when C's comes
    for _ in range(8):
        pipe.submit()
        pipe.answer()
    assert sequence.is_decoding
    num_dispatched = sequence.num_dispatched
    assert num_dispatched > 40
    _add(pipe, 2, 10, C)  # for whose turn answers are charged
    pipe.submit()
    assert pipe.scheduler._shares[0].tag(A) == num_dispatched


@pytest.mark.parametrize("owners", [(A, B), (0, 0), (A, A)])
def test_a_short_prompt_waits_for_no_long_one(owners: tuple[int, int]) -> None:
    pipe = _pipe()
    for seq_id in range(5):
        _add(pipe, seq_id, 200, owners[0])
    assert _prompts(pipe.submit()) == [(0, 10)]
    _add(pipe, 9, 4, owners[1])
    pipe.answer()
    assert _prompts(pipe.submit()) == [(9, 4), (0, 6)]
    pipe.answer()
    assert _run(pipe) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("owners", [(A, B, C), (0, 0, 0), (A, A, A)])
def test_equal_prompts_do_not_take_turns(owners: tuple[int, ...]) -> None:
    """The first one is finished as soon as possible, and the last one no later."""
    pipe = _pipe(budget=16)
    for seq_id, owner in enumerate(owners):
        _add(pipe, seq_id, 120, owner)
    assert _run(pipe) == [0, 1, 2]


def test_keys_share_tokens_and_not_prompts() -> None:
    """A has 200 tokens in ten prompts, B in one: in equal shares B is finished last, at 400, and
    A's prompts are on the way.
    """
    pipe = _pipe(budget=10)
    for seq_id in range(1, 12):
        _add(pipe, seq_id, 20, A)
    _add(pipe, 20, 200, B)
    assert _run(pipe) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 11]


def test_a_long_prompt_is_passed_over_by_later_ones_of_its_key_for_its_own_length_at_most() -> None:
    pipe = _pipe(budget=10)
    _add(pipe, 0, 100, A)
    firsts = []
    while firsts[-1:] != [0]:
        _add(pipe, 1 + len(firsts), 10, A)
        firsts.append(_prompts(pipe.submit())[0][0])
        pipe.answer()
    assert firsts == [*range(1, 10), 0]
    assert _run(pipe)[0] == 0


def test_next_to_short_requests_without_keys_a_long_one_takes_no_longer_than_side_by_side() -> None:
    """Half of the tokens are theirs; the long one is finished once the other half suffices."""
    pipe = _pipe(budget=10)
    long = _add(pipe, 0, 100)
    for seq_id in range(1, 21):
        _add(pipe, seq_id, 5)
        assert seq_id in dict(_prompts(pipe.submit())), "at once"
        pipe.answer()
    assert long.num_dispatched == 100


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    budget=st.sampled_from([5, 16, 64]),
    in_flight=st.integers(1, 4),
    num_keys=st.integers(0, 5),
    max_prompt=st.sampled_from([20, 200]),
    max_new=st.integers(1, 12),
)
def test_the_delay_of_a_prompt_is_its_length_for_each_other_key(
    seed: int, budget: int, in_flight: int, num_keys: int, max_prompt: int, max_new: int
) -> None:
    """A prompt of n tokens of a key, or request, that has nothing else waits for n prompt tokens of
    each other one at most.

    Counted are prompt tokens in micro-batches between its arrival and the one with its last chunk,
    for which it does not wait.
    """
    rng = random.Random(seed)
    limits = SchedulerLimits(60, budget, 256, 1000)
    scheduler = Scheduler(new_cache(16, 60, 64), limits, FixedInFlightPolicy(in_flight, budget))
    batches: deque[MicroBatch] = deque()
    accounts: dict[int, int] = {}
    newcomers: dict[int, int] = {}  # prompt tokens of others since each of them came
    lengths: dict[int, int] = {}
    for seq_id in range(30):
        is_new = rng.random() < 0.3
        owner = 100 + seq_id if is_new and num_keys else rng.randint(1, num_keys) if num_keys else 0
        lengths[seq_id] = rng.randint(1, 30 if is_new else max_prompt)
        sequence = new_sequence(seq_id, lengths[seq_id], rng.randint(1, max_new))
        sequence.owner = owner
        scheduler.add(sequence)
        accounts[seq_id] = sequence.account
        if is_new:
            newcomers[seq_id] = 0
        for _ in range(rng.randint(0, 3) if seq_id < 29 else 10_000):
            if (batch := scheduler.schedule()) is None:
                if not batches:
                    break
                done = batches.popleft()
                scheduler.complete(
                    done, StepResult(0, done.step_id, (50,) * len(done.sampled_seq_ids), ())
                )
                continue
            batches.append(batch)
            ended = {chunk.seq_id for chunk in batch.chunks if chunk.needs_sample}
            for each in list(newcomers):
                if each in ended:
                    num_others = len(set(accounts.values())) - 1
                    assert newcomers.pop(each) <= num_others * lengths[each]
                else:
                    others = (
                        chunk for chunk in batch.chunks if accounts[chunk.seq_id] != accounts[each]
                    )
                    newcomers[each] += sum(chunk.num_tokens for chunk in others)
        scheduler.check_integrity()
    assert not newcomers
    assert scheduler.is_idle


def test_cached_tokens_are_free() -> None:
    """Both prompts have 100 tokens; of A's 96 are cached, so that it is finished first although it
    came last.
    """
    pipe = _pipe(budget=128)
    text = new_sequence(0, 100, 1).prompt_ids
    pipe.scheduler.add(Sequence(0, text, SamplingParams(max_tokens=1), 101))
    pipe.drain()
    _add(pipe, 1, 100, B)
    pipe.scheduler.add(Sequence(2, text, SamplingParams(max_tokens=1), 101, owner=A))
    _add(pipe, 3, 8, A)
    assert _prompts(pipe.submit()) == [(2, 4), (3, 8), (1, 100)]


def test_what_the_first_of_several_computes_counts_for_the_next() -> None:
    """Three prompts of A begin alike. Once the first is computed, the second is short, and finished
    before that of B.
    """
    pipe = _pipe(budget=100)
    text = new_sequence(0, 96, 1).prompt_ids
    for seq_id in range(3):
        pipe.scheduler.add(
            Sequence(seq_id, (*text, seq_id, 5, 6, 7), SamplingParams(max_tokens=1), 101, owner=A)
        )
    _add(pipe, 9, 150, B)
    assert _run(pipe) == [0, 1, 9, 2, 9], "the rest of the second micro-batch is filled up"


def test_answers_are_charged_to_their_key() -> None:
    """C's long prompt keeps the accounts open. A's answers have more tokens than B's prompt has
    more than A's.
    """
    pipe = _pipe(budget=10)
    for seq_id in range(10, 18):
        _add(pipe, seq_id, 1, A, new=100)
    _add(pipe, 1, 250, C)
    for _ in range(11):
        pipe.submit()
        pipe.answer()
    _add(pipe, 2, 30, A)
    _add(pipe, 3, 40, B)
    assert _run(pipe)[0] == 3


def test_answers_below_the_share_cost_nothing() -> None:
    """A's answers have fewer tokens than were computed of C's prompt, so A begins where C is."""
    pipe = _pipe(budget=40)
    _add(pipe, 0, 1, A, new=5)
    _add(pipe, 1, 250, C)
    for _ in range(4):
        pipe.submit()
        pipe.answer()
    _add(pipe, 2, 30, A)
    _add(pipe, 3, 31, B)
    assert _run(pipe)[:2] == [2, 3]


def test_a_promoted_prompt_comes_before_its_equals() -> None:
    pipe = _pipe(budget=10)
    late = new_sequence(5, 100, 1, priority=1)
    pipe.scheduler.add(late)
    for seq_id in range(6, 100):
        _add(pipe, seq_id, 10)
        pipe.submit()
        pipe.answer()
        if late.is_promoted:
            break
    _add(pipe, 200, 2)
    assert _run(pipe)[0] == 5


def test_answers_count_from_the_end_of_the_prompt_that_was_begun() -> None:
    """C's prompt would be finished at 20, A's at 50, B's at 60. While the first is computed, A's
    answers get 80 tokens.
    """
    pipe = _pipe(budget=10)
    for seq_id in range(10, 18):
        _add(pipe, seq_id, 1, A, new=100)
    pipe.submit()
    pipe.answer()
    for seq_id, owner, prompt in ((1, C, 20), (2, A, 50), (3, B, 60)):
        _add(pipe, seq_id, prompt, owner)
    assert _run(pipe)[:2] == [1, 3]


def test_a_long_prompt_is_computed_though_newcomers_without_keys_never_cease() -> None:
    pipe = _pipe(budget=10)
    long = _add(pipe, 0, 20)
    for seq_id in range(1, 40):
        _add(pipe, seq_id, 10)
        pipe.submit()
        pipe.answer()
    assert long.num_dispatched == 20


def test_the_virtual_time() -> None:
    """The examples of ``FairShares``: where a newcomer with 4 tokens would be finished."""
    shares = FairShares()
    for account in (A, B):
        shares.begin(account, 500)
    shares.compute(A, 100)
    assert shares.begin(C, 4) == 54
    shares = FairShares()
    for account in (A, B, C):
        shares.begin(account, 500 if account < C else 15)
    shares.compute(C, 15)
    shares.end(C, 0)
    shares.compute(A, 45)
    assert shares.begin(9, 4) == 5 + 10 + 7 + 4
    shares.check_integrity()


def test_answers_count_for_the_next_slot() -> None:
    """Four slots: three answers of A, and one of B that ends. A's next sequence came first, but A
    has had more since.
    """
    pipe = _pipe(seqs=4)
    for seq_id, owner, new in ((0, A, 100), (1, A, 100), (2, A, 100), (3, B, 12)):
        _add(pipe, seq_id, 1, owner, new)
    _add(pipe, 4, 5, A)
    _add(pipe, 5, 5, B)
    assert _run(pipe) == [0, 3, 1, 2, 5, 4]
