"""The wire form of steps and requests: msgpack arrays, field by field, no pickled classes."""

import zlib
from collections.abc import Sequence
from dataclasses import fields, replace
from inspect import signature
from operator import attrgetter
from typing import Any

import msgpack

from tramontane.proto.errors import (
    ModelMismatchError,
    OverloadedError,
    PipelineError,
    PipelineSupersededError,
    PipelineUnavailableError,
    PoisonRequestError,
    QueueFullError,
    RequestError,
    StreamNotOpenError,
    TramontaneError,
)
from tramontane.proto.plan import ExpertActorPlan, ExpertId
from tramontane.proto.request import (
    ExpertChoices,
    FinishReason,
    Logprobs,
    RequestOutput,
    RequestTimings,
    SamplingParams,
    SequenceRequest,
    TokenEvent,
)
from tramontane.proto.step import Chunk, DecodeColumns, ExpertTiming, MicroBatch, StageTiming, StepResult

_BETWEEN_DOORS_AND_ROUTERS = (SequenceRequest, SamplingParams, RequestOutput, RequestTimings, TokenEvent, Logprobs, ExpertChoices)
# Another text as soon as one of these has another field: doors and routers of two versions meet while one follows the other.
PROTOCOL_HASH = f"{zlib.crc32(repr([str(signature(each)) for each in _BETWEEN_DOORS_AND_ROUTERS]).encode()):08x}"
_sampling_fields = attrgetter(*(field.name for field in fields(SamplingParams)))

ERROR_KINDS: dict[str, type[TramontaneError]] = {
    "poison": PoisonRequestError,
    "request": RequestError,
    "full": QueueFullError,
    "overloaded": OverloadedError,
    "no stream": StreamNotOpenError,
    "handed over": PipelineSupersededError,
    "other model": ModelMismatchError,
    "not running": PipelineUnavailableError,
    "failure": PipelineError,
}


def encode_batch(batch: MicroBatch) -> bytes:
    chunks = [(*c[:4], c.sampling and _sampling_fields(c.sampling), *c[5:]) for c in batch.chunks]
    return _pack((batch.epoch, batch.step_id, chunks, batch.freed_seq_ids, batch.decodes))


def decode_batch(data: bytes) -> MicroBatch:
    epoch, step_id, chunks, released, decodes = _unpack(data)
    return MicroBatch(
        epoch,
        step_id,
        tuple(
            Chunk(seq_id, start, token_ids, new_pages, sampling and SamplingParams(*sampling), *others)
            for seq_id, start, token_ids, new_pages, sampling, *others in chunks
        ),
        released,
        DecodeColumns(*decodes),
    )


def encode_result(result: StepResult) -> bytes:
    return _pack(
        (result.epoch, result.step_id, result.token_ids, result.timings, result.expert_choices, result.logprobs, result.finished)
    )


def decode_result(data: bytes) -> StepResult:
    epoch, step_id, token_ids, timings, choices, logprobs, ended = _unpack(data)
    ended = tuple((seq_id, FinishReason(reason)) for seq_id, reason in ended)
    return StepResult(epoch, step_id, token_ids, tuple(map(_timing, timings)), _choices(choices), _logprobs(logprobs), ended)


def encode_header(
    dtype: str, shape: tuple[int, ...], timings: tuple[StageTiming, ...], choices: tuple[ExpertChoices, ...]
) -> bytes:
    """What travels beside the raw bytes of hidden states."""
    return _pack((dtype, shape, timings, choices))


def decode_header(data: bytes) -> tuple[str, tuple[int, ...], tuple[StageTiming, ...], tuple[ExpertChoices, ...]]:
    dtype, shape, timings, choices = _unpack(data)
    return dtype, shape, tuple(map(_timing, timings)), _choices(choices)


def encode_specs(specs: Sequence[SequenceRequest]) -> bytes:
    """A prompt with several choices travels once, and is one object again on the other side."""
    prompts = list({id(spec.prompt_ids): spec.prompt_ids for spec in specs}.values())
    number_of = {id(prompt): number for number, prompt in enumerate(prompts)}
    others = attrgetter("priority", "output_ids", "owner", "already_admitted", "request_id")
    fields = [(number_of[id(spec.prompt_ids)], _sampling_fields(spec.sampling), *others(spec)) for spec in specs]
    return _pack((prompts, fields))


def decode_specs(data: bytes) -> tuple[SequenceRequest, ...]:
    prompts, sequences = _unpack(data)
    return tuple(SequenceRequest(prompts[number], SamplingParams(*sampling), *others) for number, sampling, *others in sequences)


def encode_expert_actors(actors: Sequence[ExpertActorPlan]) -> bytes:
    return _pack([tuple(getattr(actor, field.name) for field in fields(ExpertActorPlan)) for actor in actors])


def decode_expert_actors(data: bytes) -> tuple[ExpertActorPlan, ...]:
    plans = (ExpertActorPlan(*each) for each in _unpack(data))
    return tuple(replace(plan, experts=tuple(ExpertId(*each) for each in plan.experts)) for plan in plans)


def encode_outputs(deliveries: Sequence[tuple[int, RequestOutput | TramontaneError]]) -> bytes:
    """Tokens, or the reason of a failure, of several requests by their numbers: one message for all that was ready."""
    return _pack([(number, _delivery_fields(what)) for number, what in deliveries])


def decode_outputs(data: bytes) -> list[tuple[int, RequestOutput | TramontaneError]]:
    return [(number, _delivery(*what)) for number, what in _unpack(data)]


def encode_error(error: TramontaneError, replica: str) -> bytes:
    """Why a request was not accepted, or why it failed, and by which router's replica."""
    return _pack((_error_kind(error), str(error), error.retry_after_s if isinstance(error, OverloadedError) else 0, replica))


def decode_error(data: bytes) -> tuple[TramontaneError, str]:
    kind, message, retry_after_s, replica = _unpack(data)
    cls = ERROR_KINDS[kind]
    return cls(message, retry_after_s) if issubclass(cls, OverloadedError) else cls(message), replica


def _error_kind(error: TramontaneError) -> str:
    return next(name for name, cls in ERROR_KINDS.items() if isinstance(error, cls))


def _delivery_fields(what: RequestOutput | TramontaneError) -> Any:  # noqa: ANN401
    if isinstance(what, TramontaneError):
        return _error_kind(what), str(what)
    events = [(e.seq_id, e.token_id, e.finish and e.finish.value) for e in what.events]
    return events, (what.times.queue_s, what.times.prefill_s, what.times.decode_s), what.experts, what.logprobs


def _delivery(*fields: Any) -> RequestOutput | TramontaneError:  # noqa: ANN401
    if isinstance(fields[0], str):
        kind, message = fields
        return ERROR_KINDS[kind](message)
    events, times, experts, logprobs = fields
    return RequestOutput(
        tuple(TokenEvent(index, token_id, finish and FinishReason(finish)) for index, token_id, finish in events),
        RequestTimings(*times),
        _choices(experts),
        _logprobs(logprobs),
    )


def _timing(fields: Any) -> StageTiming:  # noqa: ANN401
    return StageTiming._make((*fields[:-1], tuple(map(ExpertTiming._make, fields[-1]))))


def _choices(fields: Any) -> tuple[ExpertChoices, ...]:  # noqa: ANN401
    return tuple(map(ExpertChoices._make, fields))


def _logprobs(fields: Any) -> tuple[Logprobs, ...]:  # noqa: ANN401
    return tuple(map(Logprobs._make, fields))


def _pack(value: Any) -> bytes:  # noqa: ANN401 - msgpack takes any nesting of plain values
    data: bytes = msgpack.packb(value)
    return data


def _unpack(data: bytes) -> Any:  # noqa: ANN401
    return msgpack.unpackb(data, use_list=False)
