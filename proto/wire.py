"""The wire form of steps: msgpack arrays, field by field, no pickled classes."""

from typing import Any

import msgpack

from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch, SampledToken, StageTiming, StepResult


def encode_batch(batch: MicroBatch) -> bytes:
    chunks = [
        (c.seq_id, c.start, c.token_ids, c.new_pages, c.sampling and _sampling_fields(c.sampling), c.wants_token)
        for c in batch.chunks
    ]
    return _pack((batch.epoch, batch.step_id, chunks, batch.released))


def decode_batch(data: bytes) -> MicroBatch:
    epoch, step_id, chunks, released = _unpack(data)
    return MicroBatch(
        epoch,
        step_id,
        tuple(
            Chunk(seq_id, start, token_ids, new_pages, sampling and SamplingParams(*sampling), wants_token)
            for seq_id, start, token_ids, new_pages, sampling, wants_token in chunks
        ),
        released,
    )


def encode_result(result: StepResult) -> bytes:
    tokens = [(t.seq_id, t.token_id) for t in result.tokens]
    return _pack((result.epoch, result.step_id, tokens, [_timing_fields(t) for t in result.timings]))


def decode_result(data: bytes) -> StepResult:
    epoch, step_id, tokens, timings = _unpack(data)
    return StepResult(
        epoch,
        step_id,
        tuple(SampledToken(*fields) for fields in tokens),
        tuple(StageTiming(*fields) for fields in timings),
    )


def encode_header(dtype: str, shape: tuple[int, ...], timings: tuple[StageTiming, ...]) -> bytes:
    """What travels beside the raw bytes of hidden states."""
    return _pack((dtype, shape, [_timing_fields(t) for t in timings]))


def decode_header(data: bytes) -> tuple[str, tuple[int, ...], tuple[StageTiming, ...]]:
    dtype, shape, timings = _unpack(data)
    return dtype, shape, tuple(StageTiming(*fields) for fields in timings)


def _sampling_fields(s: SamplingParams) -> tuple[Any, ...]:
    return (s.max_tokens, s.temperature, s.top_p, s.top_k, s.seed, s.choice, s.ignore_eos)


def _timing_fields(t: StageTiming) -> tuple[Any, ...]:
    return (t.stage_id, t.started_at, t.busy_s, t.num_tokens)


def _pack(value: Any) -> bytes:  # noqa: ANN401 - msgpack takes any nesting of plain values
    data: bytes = msgpack.packb(value)
    return data


def _unpack(data: bytes) -> Any:  # noqa: ANN401
    return msgpack.unpackb(data, use_list=False)
