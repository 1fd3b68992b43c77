"""What goes over the wire comes back equal, and is plain msgpack."""

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st

from tramontane.proto import wire
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, Decodes, ExpertTiming, MicroBatch, StageTiming, StepResult

ids = st.integers(0, 2**40)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 10_000),
    temperature=st.floats(0, 5),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 1000),
    seed=st.integers(-(2**63), 2**63 - 1),
    choice=st.integers(0, 100),
    ignore_eos=st.booleans(),
)
pages = st.lists(ids, max_size=4).map(tuple)
chunks = st.builds(
    Chunk,
    seq_id=ids,
    start=ids,
    token_ids=st.lists(ids, min_size=1, max_size=9).map(tuple),
    new_pages=st.lists(pages, max_size=3).map(tuple),
    sampling=st.none() | sampling,
    wants_token=st.booleans(),
)
columns = st.lists(st.tuples(ids, ids, ids), max_size=5).map(lambda rows: tuple(zip(*rows, strict=True)) or ((), (), ()))
gained = st.lists(st.tuples(ids, st.lists(pages, max_size=3).map(tuple)), max_size=2).map(tuple)
decodes = st.builds(lambda columns, gained: Decodes(*columns, gained), columns, gained)
some_chunks = st.lists(chunks, max_size=5).map(tuple)
batches = st.builds(MicroBatch, epoch=ids, step_id=ids, chunks=some_chunks, released=pages, decodes=decodes)
times = st.floats(0, 2e9)
experts = st.lists(st.builds(ExpertTiming, ids, times, ids), max_size=3).map(tuple)
timings = st.lists(st.builds(StageTiming, ids, times, times, ids, times, times, times, experts), max_size=4).map(tuple)
results = st.builds(StepResult, ids, ids, token_ids=pages, timings=timings)


@settings(derandomize=True, deadline=None)
@given(batches)
def test_batches(batch: MicroBatch) -> None:
    assert wire.decode_batch(wire.encode_batch(batch)) == batch


@settings(derandomize=True, deadline=None)
@given(results)
def test_results(result: StepResult) -> None:
    assert wire.decode_result(wire.encode_result(result)) == result


@settings(derandomize=True, deadline=None)
@given(timings)
def test_headers(timings: tuple[StageTiming, ...]) -> None:
    assert wire.decode_header(wire.encode_header("bfloat16", (3, 4096), timings)) == ("bfloat16", (3, 4096), timings)


def test_a_decode_token_is_small() -> None:
    """Deltas, not state: 64 running decodes that gain no page take nine bytes each."""
    decodes = Decodes(tuple(range(1000, 1064)), tuple(range(3000, 3064)), (31_999,) * 64)
    data = wire.encode_batch(MicroBatch(0, 1, (), (), decodes))
    assert len(data) < 64 * 9 + 24
    assert isinstance(msgpack.unpackb(data), list)
