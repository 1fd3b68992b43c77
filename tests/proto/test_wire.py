"""What goes over the wire comes back equal, and is plain msgpack."""

from typing import Any

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st

from tramontane.proto import wire
from tramontane.proto.errors import PipelineError, PoisonRequestError, TramontaneError
from tramontane.proto.plan import ExpertActorPlan, ExpertId
from tramontane.proto.request import (
    ExpertChoices,
    FinishReason,
    Logprobs,
    Request,
    RequestOutput,
    RequestTimings,
    SamplingParams,
    SequenceRequest,
    TokenEvent,
)
from tramontane.proto.step import (
    Chunk,
    DecodeColumns,
    ExpertTiming,
    MicroBatch,
    StageTiming,
    StepResult,
)

ids = st.integers(0, 2**40)
numbers_of_top = st.none() | st.integers(0, 20)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(50, 10_000),
    temperature=st.floats(0, 5),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 1000),
    seed=st.integers(-(2**63), 2**63 - 1),
    choice=st.integers(0, 100),
    ignore_eos=st.booleans(),
    return_experts=st.lists(st.integers(0, 1000), max_size=3).map(tuple),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    logit_bias=st.lists(st.tuples(ids, st.floats(-100, 100)), max_size=3).map(tuple),
    min_tokens=st.integers(0, 50),
    logprobs=numbers_of_top,
    prompt_logprobs=numbers_of_top,
    grammar=st.text(max_size=9),
    stop_token_ids=st.lists(ids, max_size=3).map(tuple),
)
pages = st.lists(ids, max_size=4).map(tuple)
chunks = st.builds(
    Chunk,
    seq_id=ids,
    start=ids,
    token_ids=st.lists(ids, min_size=1, max_size=9).map(tuple),
    new_pages=st.lists(pages, max_size=3).map(tuple),
    sampling=st.none() | sampling,
    needs_sample=st.booleans(),
    num_prompt=ids,
    request_id=st.text(max_size=9),
    skipped_ids=st.lists(ids, max_size=4).map(tuple),
)
columns = st.lists(st.tuples(ids, ids, ids), max_size=5).map(
    lambda rows: tuple(zip(*rows, strict=True)) or ((), (), ())
)
gained = st.lists(st.tuples(ids, st.lists(pages, max_size=3).map(tuple)), max_size=2).map(tuple)
decodes = st.builds(lambda columns, gained: DecodeColumns(*columns, gained), columns, gained)
some_chunks = st.lists(chunks, max_size=5).map(tuple)
batches = st.builds(
    MicroBatch, epoch=ids, step_id=ids, chunks=some_chunks, freed_seq_ids=pages, decodes=decodes
)
times = st.floats(0, 2e9)
experts = st.lists(st.builds(ExpertTiming, ids, times, ids), max_size=3).map(tuple)
timings = st.lists(
    st.builds(StageTiming, ids, times, times, ids, times, times, times, experts), max_size=4
).map(tuple)
expert_ids = st.lists(st.tuples(st.integers(0, 1023), st.integers(0, 1023)), max_size=3).map(tuple)
choices = st.lists(
    st.builds(ExpertChoices, ids, st.integers(0, 1023), ids, expert_ids), max_size=3
).map(tuple)
least = st.floats(-9999, 0)
top = st.lists(st.tuples(ids, least), max_size=3).map(tuple)
scored = st.lists(st.tuples(least, top), max_size=3).map(
    lambda rows: tuple(zip(*rows, strict=True)) or ((), ())
)
logprobs = st.lists(
    st.builds(lambda seq_id, start, scored: Logprobs(seq_id, start, *scored), ids, ids, scored),
    max_size=3,
).map(tuple)
ended = st.lists(st.tuples(ids, st.sampled_from(FinishReason)), max_size=2).map(tuple)
results = st.builds(
    StepResult,
    ids,
    ids,
    token_ids=pages,
    timings=timings,
    expert_choices=choices,
    logprobs=logprobs,
    finished=ended,
)
events = st.lists(
    st.builds(TokenEvent, ids, ids, st.none() | st.sampled_from(FinishReason)), max_size=3
).map(tuple)
drafts = st.lists(st.tuples(ids, ids, ids), max_size=3).map(tuple)
tokens = st.builds(
    RequestOutput,
    events,
    st.builds(RequestTimings, times, times, times),
    choices,
    logprobs,
    st.text(max_size=9),
    ids,
    drafts,
)


@settings(derandomize=True, deadline=None)
@given(batches)
def test_batches(batch: MicroBatch) -> None:
    assert wire.decode_batch(wire.encode_batch(batch)) == batch


@settings(derandomize=True, deadline=None)
@given(results)
def test_results(result: StepResult) -> None:
    assert wire.decode_result(wire.encode_result(result)) == result


@settings(derandomize=True, deadline=None)
@given(timings, choices)
def test_headers(timings: tuple[StageTiming, ...], choices: tuple[ExpertChoices, ...]) -> None:
    header = ("bfloat16", (3, 4096), timings, choices)
    assert wire.decode_header(wire.encode_header(*header)) == header


@settings(derandomize=True, deadline=None)
@given(
    st.lists(
        st.tuples(
            ids,
            tokens | st.builds(PipelineError, st.text()) | st.builds(PoisonRequestError, st.text()),
        ),
        max_size=3,
    )
)
def test_deliveries(deliveries: list[tuple[int, RequestOutput | TramontaneError]]) -> None:
    decoded = wire.decode_outputs(wire.encode_outputs(deliveries))
    assert list(map(_comparable, decoded)) == list(map(_comparable, deliveries))


def _comparable(delivery: tuple[int, RequestOutput | TramontaneError]) -> tuple[int, Any]:
    number, what = delivery
    return number, what if isinstance(what, RequestOutput) else (type(what), str(what))


@settings(derandomize=True, deadline=None)
@given(pages, sampling, st.integers(0, 9))
def test_requests(prompt_ids: tuple[int, ...], sampling: SamplingParams, priority: int) -> None:
    sequences = (
        SequenceRequest(prompt_ids, sampling),
        SequenceRequest(prompt_ids, sampling, output_ids=(5, 6)),
    )
    plain, full = Request(sequences[:1]), Request(sequences, priority, 7, True, "mine", "theirs")
    for request in (plain, full):
        assert wire.decode_request(wire.encode_request(request)) == request
    first, second = wire.decode_request(wire.encode_request(full)).sequences
    assert first.prompt_ids is second.prompt_ids, "choices share their prompt"


def test_expert_actors() -> None:
    actors = tuple(
        ExpertActorPlan(n, 3, tuple(ExpertId(layer, n) for layer in range(n)), 7 * n, 1000)
        for n in range(3)
    )
    decoded = wire.decode_expert_actors(wire.encode_expert_actors(actors))
    assert decoded == actors
    assert decoded[1].experts[0].layer == 0, (
        "an expert's id again, and not only a tuple that is equal"
    )


def test_a_decode_token_is_small() -> None:
    """Deltas, not state: 64 running decodes that gain no page take nine bytes each."""
    decodes = DecodeColumns(tuple(range(1000, 1064)), tuple(range(3000, 3064)), (31_999,) * 64)
    data = wire.encode_batch(MicroBatch(0, 1, (), (), decodes))
    assert len(data) < 64 * 9 + 24
    assert isinstance(msgpack.unpackb(data), list)
