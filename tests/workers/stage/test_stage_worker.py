"""One stage without Ray: epochs, the order of steps, and what a fence forgets."""

from dataclasses import replace

import pytest
from tiny_models import random_model, split_model, tiny_args, tiny_plan

from tramontane.proto.errors import StaleEpochError
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch, StepResult
from tramontane.workers.stage.stage_worker import StageWorker

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def worker() -> StageWorker:
    args = tiny_args(n_layers=1)
    plan = tiny_plan(args, 1, max_num_seqs=2)
    return split_model(random_model(args), plan)[0]


def _batch(epoch: int, step_id: int, seq_id: int = 0, released: tuple[int, ...] = ()) -> MicroBatch:
    return MicroBatch(
        epoch, step_id, (Chunk(seq_id, 0, (1, 2), ((seq_id,),), GREEDY, True),), released
    )


def test_refuses_every_step_before_it_is_fenced(worker: StageWorker) -> None:
    for epoch in (-1, 0, 1):
        with pytest.raises(StaleEpochError, match="is at epoch"):
            worker.step(_batch(epoch, 0), None)


def test_obeys_its_epoch_only(worker: StageWorker) -> None:
    worker.fence(3)
    for epoch in (2, 4):
        with pytest.raises(StaleEpochError, match="is at epoch 3"):
            worker.step(_batch(epoch, 0), None)
    assert isinstance(worker.step(_batch(3, 0), None), StepResult)


@pytest.mark.parametrize("epoch", [2, 3])
def test_epochs_only_grow(worker: StageWorker, epoch: int) -> None:
    worker.fence(3)
    with pytest.raises(StaleEpochError, match="cannot go back"):
        worker.fence(epoch)
    assert worker.epoch == 3


def test_a_fence_forgets_sequences_and_frees_their_slots(worker: StageWorker) -> None:
    for epoch in range(4):  # two slots: without forgetting, the second epoch would find none
        worker.fence(epoch)
        assert worker.table.slots == {}
        worker.step(_batch(epoch, 0, seq_id=0), None)
        worker.step(_batch(epoch, 1, seq_id=1), None)


def test_a_released_sequence_makes_room_in_the_same_step(worker: StageWorker) -> None:
    worker.fence(0)
    worker.step(_batch(0, 0, seq_id=0), None)
    worker.step(_batch(0, 1, seq_id=1), None)
    worker.step(_batch(0, 2, seq_id=2, released=(0,)), None)
    assert set(worker.table.slots) == {1, 2}


def test_what_a_sequence_requested_is_forgotten_with_it(worker: StageWorker) -> None:
    worker.fence(0)
    with_experts = Chunk(7, 0, (1, 2), ((0,),), replace(GREEDY, return_experts=(0,)), True)
    result = worker.step(MicroBatch(0, 0, (with_experts,)), None)
    assert isinstance(result, StepResult)
    assert [
        (choices.seq_id, choices.layer, len(choices.expert_ids))
        for choices in result.expert_choices
    ] == [(7, 0, 2)]
    result = worker.step(_batch(0, 1, seq_id=1, released=(7,)), None)
    assert isinstance(result, StepResult)
    assert result.expert_choices == ()
    assert worker.table.expert_layers == {}


@pytest.mark.parametrize("step_id", [0, 2])
def test_a_step_out_of_order_is_a_defect(worker: StageWorker, step_id: int) -> None:
    worker.fence(0)
    worker.step(_batch(0, 0, seq_id=0), None)
    with pytest.raises(AssertionError, match="1 was due"):
        worker.step(_batch(0, step_id, seq_id=1), None)
