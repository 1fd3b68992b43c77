"""How many drafts were right, from the router to an ingress: each draft in one output, whatever is
merged, split or lost.
"""

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest
from event_loops import in_event_loop
from guessing_drafter import guess
from running_router import new_scheduler, running
from scripted_chain import PAGE_SIZE, Gate, ScriptedChain, no_gate

from tramontane.proto import wire
from tramontane.proto.errors import PipelineError, TramontaneError
from tramontane.proto.plan import CachePlan, SpeculativeConfig, WindowClass
from tramontane.proto.request import (
    FinishReason,
    Logprobs,
    Request,
    RequestOutput,
    RequestTimings,
    SamplingParams,
    SequenceDrafts,
    SequenceRequest,
    TokenEvent,
)
from tramontane.router.engine.active_request import ActiveRequest
from tramontane.router.engine.request_output import OutputQueue, ResumableRequest, split_output
from tramontane.router.engine.router import Router
from tramontane.router.scheduling.sequence import Sequence as LiveSequence

TIMES = RequestTimings(0.5, 0.25, 0.125)
CACHE = CachePlan(PAGE_SIZE, (WindowClass(None, 16, 64),), 19)
FOUR = SpeculativeConfig(4, 1, 3)


def _output(
    *seq_ids: int, drafts: tuple[SequenceDrafts, ...] = (), finish: FinishReason | None = None
) -> RequestOutput:
    return RequestOutput(
        tuple(TokenEvent(seq_id, 7, finish) for seq_id in seq_ids), TIMES, drafts=drafts
    )


class Delivered:
    """A request whose sequences are numbered from 10 on, and the drafts that each of its outputs
    has.
    """

    def __init__(self, num_sequences: int, *, counts_drafts: bool) -> None:
        self.drafts: list[tuple[SequenceDrafts, ...]] = []
        self.live = [
            LiveSequence(10 + index, (5, 6), SamplingParams(), 99) for index in range(num_sequences)
        ]
        self.request = ActiveRequest(self.live, self._sink, 0.0, counts_drafts=counts_drafts)

    def _sink(self, output: RequestOutput | TramontaneError) -> None:
        assert isinstance(output, RequestOutput)
        self.drafts.append(output.drafts)

    def deliver(self, *seq_ids: int, num_drafts: int = 0, num_right: int = 0) -> None:
        """Deliver an event of each after so many drafts of each."""
        for sequence in self.live:
            sequence.num_draft_tokens += num_drafts * (sequence.seq_id in seq_ids)
            sequence.num_accepted_draft_tokens += num_right * (sequence.seq_id in seq_ids)
        self.request.deliver([TokenEvent(seq_id, 7) for seq_id in seq_ids], 2.0)


def test_the_first_output_of_a_sequence_has_drafts_and_later_ones_what_is_new() -> None:
    made = Delivered(2, counts_drafts=True)
    made.deliver(10)
    made.deliver(10, num_drafts=4)
    made.deliver(10)
    made.deliver(10, 10, 11, num_drafts=3, num_right=1)
    made.deliver(11)
    made.deliver(11, 10, num_drafts=1, num_right=1)
    assert made.drafts == [
        ((0, 0, 0),),
        ((0, 4, 0),),
        (),
        ((0, 3, 1), (1, 3, 1)),
        (),
        ((1, 1, 1), (0, 1, 1)),
    ]


def test_without_speculation_no_output_has_any() -> None:
    made = Delivered(1, counts_drafts=False)
    made.deliver(10)
    made.deliver(10)
    assert made.drafts == [(), ()]


@in_event_loop
async def test_outputs_that_are_merged_have_the_sums() -> None:
    queue = OutputQueue()
    for output in (
        _output(0, drafts=((0, 4, 2),)),
        _output(1),
        _output(0, 1, drafts=((1, 3, 0), (0, 4, 4))),
    ):
        queue.put(output)
    assert (await queue.get()).drafts == ((0, 8, 6), (1, 3, 0))
    queue.put(_output(0))
    assert (await queue.get()).drafts == (), "what was read is not read again"


def test_an_output_in_parts_has_its_drafts_once() -> None:
    logprobs = Logprobs(0, 1, (-1.0,) * 40, ((),) * 40)
    whole = _output(0, drafts=((0, 4, 2),))._replace(logprobs=(logprobs,))

    async def scenario() -> RequestOutput:
        queue, parts = OutputQueue(), list(split_output(whole, 8))
        assert len(parts) == 5
        for _, part in wire.decode_outputs(wire.encode_outputs([(0, part) for part in parts])):
            queue.put(part)
        return await queue.get()

    assert asyncio.run(scenario()).drafts == ((0, 4, 2),)


@pytest.mark.parametrize("drafts", [(), ((0, 0, 0),), ((0, 2**20, 2),), ((0, 1, 0), (1, 4, 4))])
def test_outputs_keep_them_over_the_wire(drafts: tuple[SequenceDrafts, ...]) -> None:
    """Also those of one token, whose short form has none."""
    output = _output(0, drafts=drafts)
    encoded = wire.encode_outputs([(5, output), (6, output)])
    assert wire.decode_outputs(encoded) == [(5, output), (6, output)]
    assert (len(encoded) <= 1 + 2 * (4 + 27)) == (not drafts), "four small numbers and three times"


def test_a_request_that_continues_elsewhere_keeps_them() -> None:
    progress = ResumableRequest(Request((SequenceRequest((5, 6), SamplingParams()),) * 3))
    assert progress.record(_output(1, drafts=((1, 4, 2),), finish=FinishReason.STOP)).drafts == (
        (1, 4, 2),
    )
    assert len(progress.remaining().sequences) == 2
    continued = progress.record(_output(1, drafts=((1, 3, 0), (0, 1, 1))))
    assert continued.drafts == ((2, 3, 0), (0, 1, 1))


def _running(
    gate: Gate, speculative: SpeculativeConfig | None = FOUR
) -> AbstractAsyncContextManager[Router]:
    scheduler = new_scheduler(CACHE, in_flight=2, speculative=speculative)
    return running(Router(scheduler, ScriptedChain(gate)))


async def _drafts(router: Router, *sequences: SequenceRequest) -> list[SequenceDrafts]:
    batches = router.generate(Request(sequences))
    return [drafts async for batch in batches for drafts in batch.drafts]


def _spec(max_tokens: int, output: tuple[int, ...] = ()) -> SequenceRequest:
    return SequenceRequest((5, 6), SamplingParams(max_tokens=max_tokens), output_ids=output)


@in_event_loop
async def test_a_router_reports_the_drafts_of_each_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guess(monkeypatch, lambda _: 7, 0.6)

    async with _running(no_gate) as router:
        found = await _drafts(router, _spec(60), _spec(1), _spec(60))
        counts = router.scheduler.draft_counts
        assert {index for index, *_ in found} == {0, 1, 2}
        assert (1, 0, 0) in found, "a sequence of one token"
        for index in (0, 2):
            own = [each for each in found if each[0] == index]
            assert sum(num for _, num, _ in own) - 3 > sum(right for *_, right in own) > 3
        assert sum(num for _, num, _ in found) == counts.num_draft_tokens
        assert sum(right for *_, right in found) == counts.num_accepted_tokens
        again = await _drafts(router, _spec(9, output=(7,) * 7))
        assert (
            sum(num for _, num, _ in again) + sum(num for _, num, _ in found)
            == counts.num_draft_tokens
        )
    async with _running(no_gate, speculative=None) as router:
        assert await _drafts(router, _spec(60)) == []


@in_event_loop
async def test_a_failure_neither_loses_drafts_nor_counts_them_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guess(monkeypatch, lambda _: 7, 0.6)
    num_steps = 0

    async def fail_once(_batch: object) -> None:
        nonlocal num_steps
        num_steps += 1
        await asyncio.sleep(0)
        if num_steps == 9:
            raise PipelineError("stage 1 died")

    async with _running(fail_once) as router:
        found = await _drafts(router, _spec(60))
        assert router.health.num_recoveries == 1
        counts = router.scheduler.draft_counts
        assert sum(num for _, num, _ in found) == counts.num_draft_tokens
        assert sum(right for *_, right in found) == counts.num_accepted_tokens
