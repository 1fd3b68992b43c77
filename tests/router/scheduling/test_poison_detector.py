"""Which failures count against a sequence, and that a suspect which leaves holds up no other."""

import pytest
from fake_pipeline import FakePipeline, new_cache, new_pipeline, new_sequence

from tramontane.proto.step import Chunk, DecodeColumns, MicroBatch
from tramontane.router.scheduling.poison_detector import FailedBatch, PoisonDetector, position_spans
from tramontane.router.scheduling.sequence import Sequence, SequenceStatus

Span = tuple[int, int]  # the first position, and the one after the last


def _fail(detector: PoisonDetector, sequence: Sequence, span: Span, *, alone: bool = False) -> bool:
    """Record a failed micro-batch; return whether the sequence is its certain cause."""
    return detector.record_failure(FailedBatch({sequence: span}, alone)) is sequence


@pytest.mark.parametrize(
    ("spans", "num_failures", "failed_at", "is_suspect"),
    [
        ([(0, 64)], 1, (0, 64), False),
        ([(0, 64), (32, 96)], 2, (32, 64), True),
        ([(0, 64), (32, 96), (64, 128)], 1, (64, 128), True),
        ([(0, 64), (64, 128)], 1, (64, 128), False),
        ([(0, 64), (63, 128)], 2, (63, 64), True),
        ([(32, 96), (0, 64), (40, 41)], 3, (40, 41), True),
        ([(5, 6), (5, 6)], 2, (5, 6), True),
        ([(0, 64), (64, 128), (0, 64)], 1, (0, 64), False),
    ],
)
def test_failures_count_together_if_they_have_a_position_in_common(
    spans: list[Span], num_failures: int, failed_at: Span, is_suspect: bool
) -> None:
    detector, sequence = PoisonDetector(), new_sequence(0, 128, 4)
    for span in spans:
        _fail(detector, sequence, span)
    assert (sequence.num_failures, sequence.failed_at) == (num_failures, failed_at)
    assert bool(detector) is is_suspect


def test_a_sequence_with_drafts_has_the_positions_of_all_of_them() -> None:
    chunks = (Chunk(1, 10, (5, 6, 7), (), None, False),)
    batch = MicroBatch(
        0, 0, chunks, (), DecodeColumns((2, 3, 3, 3, 4), (8, 4, 5, 6, 9), (1, 1, 1, 1, 1))
    )
    assert position_spans(batch) == {1: (10, 13), 2: (8, 9), 3: (4, 7), 4: (9, 10)}


def test_a_token_in_between_makes_a_failure_the_first_again() -> None:
    detector, sequence = PoisonDetector(), new_sequence(0, 4, 9)
    assert not _fail(detector, sequence, (3, 4), alone=True)
    sequence.accept(50)
    assert not _fail(detector, sequence, (3, 5), alone=True)
    assert not detector
    assert not _fail(detector, sequence, (4, 5), alone=True)
    assert detector.first is sequence
    assert _fail(detector, sequence, (4, 5), alone=True), (
        "the third one at position 4, and no token since the first"
    )


def test_only_a_sequence_that_was_alone_is_the_cause() -> None:
    detector, sequence = PoisonDetector(), new_sequence(0, 64, 4)
    assert not _fail(detector, sequence, (0, 64), alone=True)
    assert not _fail(detector, sequence, (0, 64))
    assert detector.first is sequence
    assert not _fail(detector, sequence, (0, 64)), "the third one, but not alone"
    assert not _fail(detector, sequence, (64, 65), alone=True), (
        "at another position it is the first failure, alone or not"
    )
    assert not _fail(detector, sequence, (64, 65), alone=True)
    assert _fail(detector, sequence, (64, 65), alone=True)


def test_a_sequence_that_has_ended_is_not_blamed() -> None:
    """It has ended while the stages were fenced, after which failures are counted."""
    detector, sequence = PoisonDetector(), new_sequence(0, 64, 4)
    for _ in range(2):
        _fail(detector, sequence, (0, 64), alone=True)
    detector.discard(sequence)
    sequence.status = SequenceStatus.FINISHED
    assert not _fail(detector, sequence, (0, 64), alone=True)
    assert not detector


def test_a_suspect_is_suspected_once() -> None:
    detector, suspect, other = PoisonDetector(), new_sequence(0, 4, 4), new_sequence(1, 4, 4)
    for _ in range(4):
        detector.record_failure(FailedBatch({suspect: (0, 4), other: (0, 4)}, is_alone=False))
    detector.discard(suspect)
    assert detector.first is other
    detector.discard(other)
    assert not detector
    detector.discard(other)


@pytest.mark.parametrize(
    ("status", "others", "makes_way"),
    [
        (SequenceStatus.RUNNING, 0, False),
        (SequenceStatus.RUNNING, 1, True),
        (SequenceStatus.FINISHED, 1, False),
        (SequenceStatus.PREEMPTED, 1, False),
    ],
)
def test_a_cleared_suspect_makes_way_for_the_next_one_only(
    status: SequenceStatus, others: int, makes_way: bool
) -> None:
    detector, sequences = (
        PoisonDetector(),
        [new_sequence(seq_id, 4, 4) for seq_id in range(1 + others)],
    )
    for _ in range(2):
        detector.record_failure(FailedBatch(dict.fromkeys(sequences, (0, 4)), is_alone=False))
    sequences[0].status = status
    assert detector.clear(sequences[0]) is makes_way
    assert not detector.clear(sequences[0]), "it is no suspect any more"
    assert bool(detector) is bool(others)


def _fail_all(pipe: FakePipeline, num_failures: int) -> None:
    """Fail that many micro-batches, each of which has all sequences, and restart after each."""
    for epoch in range(1, num_failures + 1):
        batch = pipe.submit()
        assert batch is not None
        assert pipe.scheduler.record_failure(pipe.scheduler.failed_batch(batch)) is None
        pipe.scheduler.restart(epoch)
        pipe.fence()


@pytest.mark.parametrize("leaving", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (2, 1), (0, 1, 2)])
def test_suspects_that_wait_and_leave_keep_no_other_waiting(leaving: tuple[int, ...]) -> None:
    """Three are suspected and none has a slot; the fourth comes when some of them have left."""
    pipe = new_pipeline(new_cache(16, 8, 64))
    for seq_id in range(3):
        pipe.scheduler.add(new_sequence(seq_id, 5, 3))
    _fail_all(pipe, 2)
    assert (pipe.scheduler.num_running, pipe.scheduler.num_waiting) == (0, 3)
    for seq_id in leaving:
        pipe.scheduler.abort(seq_id)
    pipe.scheduler.add(new_sequence(3, 5, 3))
    pipe.drain()
    assert [len(pipe.tokens_of(seq_id)) for seq_id in range(4)] == [
        0 if seq_id in leaving else 3 for seq_id in range(4)
    ]
    assert pipe.scheduler.is_idle


def test_suspects_run_one_at_a_time_until_each_has_a_token() -> None:
    pipe = new_pipeline(new_cache(16, 8, 64))
    for seq_id in range(3):
        pipe.scheduler.add(new_sequence(seq_id, 5, 3))
    _fail_all(pipe, 2)
    for seq_id in range(3):
        batch = pipe.submit()
        assert batch is not None
        assert [chunk.seq_id for chunk in batch.chunks] == [seq_id]
        assert pipe.submit() is None, "it runs alone"
        pipe.answer()
    batch = pipe.submit()
    assert batch is not None
    pipe.drain()
    assert [len(pipe.tokens_of(seq_id)) for seq_id in range(3)] == [3, 3, 3]
