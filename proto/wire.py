"""Wire format of steps and requests: msgpack arrays, field by field. No pickled classes."""

import zlib
from collections.abc import Sequence
from dataclasses import fields, replace
from inspect import signature
from operator import attrgetter
from typing import Any

import msgpack

from tramontane.proto import errors
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

# Ingress replicas and routers of two versions communicate during an upgrade. The hash changes with
# every field of these classes.
_OUTPUT_LAYOUT = 3  # of ``encode_outputs``, which may change without a field
_INGRESS_ROUTER_TYPES = (
    Request,
    SequenceRequest,
    SamplingParams,
    RequestOutput,
    RequestTimings,
    TokenEvent,
    Logprobs,
    ExpertChoices,
)
_SIGNATURES = repr([_OUTPUT_LAYOUT, *(str(signature(cls)) for cls in _INGRESS_ROUTER_TYPES)])
PROTOCOL_HASH = f"{zlib.crc32(_SIGNATURES.encode()):08x}"
ONE_TOKEN_FIELDS = 6  # of the short form of an output
_new: Any = tuple.__new__
_sampling_fields = attrgetter(*(field.name for field in fields(SamplingParams)))
_fields_in_common = attrgetter(*(field.name for field in fields(Request)[1:]))


# ---- steps


def encode_batch(batch: MicroBatch) -> bytes:
    """Encode a micro-batch."""
    chunks = [(*c[:4], c.sampling and _sampling_fields(c.sampling), *c[5:]) for c in batch.chunks]
    return _pack((batch.epoch, batch.step_id, chunks, batch.freed_seq_ids, batch.decodes))


def decode_batch(data: bytes) -> MicroBatch:
    """Decode a micro-batch."""
    epoch, step_id, chunks, freed_seq_ids, decodes = _unpack(data)
    return MicroBatch(
        epoch,
        step_id,
        tuple(
            Chunk(
                seq_id, start, token_ids, new_pages, sampling and SamplingParams(*sampling), *others
            )
            for seq_id, start, token_ids, new_pages, sampling, *others in chunks
        ),
        freed_seq_ids,
        DecodeColumns(*decodes),
    )


def encode_result(result: StepResult) -> bytes:
    """Encode the result of a step."""
    return _pack(
        (
            result.epoch,
            result.step_id,
            result.token_ids,
            result.timings,
            result.expert_choices,
            result.logprobs,
            result.finished,
        )
    )


def decode_result(data: bytes) -> StepResult:
    """Decode the result of a step."""
    epoch, step_id, token_ids, timings, choices, logprobs, finished = _unpack(data)
    finished = tuple((seq_id, FinishReason(reason)) for seq_id, reason in finished)
    return StepResult(
        epoch,
        step_id,
        token_ids,
        tuple(map(_timing, timings)),
        _choices(choices),
        _logprobs(logprobs),
        finished,
    )


def encode_header(
    dtype: str,
    shape: tuple[int, ...],
    timings: tuple[StageTiming, ...],
    choices: tuple[ExpertChoices, ...],
) -> bytes:
    """Encode the header that accompanies the raw bytes of hidden states."""
    return _pack((dtype, shape, timings, choices))


def decode_header(
    data: bytes,
) -> tuple[str, tuple[int, ...], tuple[StageTiming, ...], tuple[ExpertChoices, ...]]:
    """Decode the header of hidden states: dtype, shape, timings and expert choices."""
    dtype, shape, timings, choices = _unpack(data)
    return dtype, shape, tuple(map(_timing, timings)), _choices(choices)


def encode_expert_actors(actors: Sequence[ExpertActorPlan]) -> bytes:
    """Encode the plans of expert actors."""
    return _pack(
        [tuple(getattr(actor, field.name) for field in fields(ExpertActorPlan)) for actor in actors]
    )


def decode_expert_actors(data: bytes) -> tuple[ExpertActorPlan, ...]:
    """Decode the plans of expert actors."""
    plans = (ExpertActorPlan(*each) for each in _unpack(data))
    return tuple(
        replace(plan, experts=tuple(ExpertId(*each) for each in plan.experts)) for plan in plans
    )


# ---- requests


def encode_request(request: Request) -> bytes:
    """Encode a request. The prompt of several choices is sent once, and decoded to one object."""
    prompts = list({id(each.prompt_ids): each.prompt_ids for each in request.sequences}.values())
    number_of = {id(prompt): number for number, prompt in enumerate(prompts)}
    sequences = [
        (number_of[id(each.prompt_ids)], _sampling_fields(each.sampling), each.output_ids)
        for each in request.sequences
    ]
    return _pack((prompts, sequences, *_fields_in_common(request)))


def decode_request(data: bytes) -> Request:
    """Decode a request."""
    prompts, sequences, *in_common = _unpack(data)
    return Request(
        tuple(
            SequenceRequest(prompts[number], SamplingParams(*sampling), output_ids)
            for number, sampling, output_ids in sequences
        ),
        *in_common,
    )


def encode_outputs(outputs: Sequence[tuple[int, RequestOutput | errors.TramontaneError]]) -> bytes:
    """Encode the outputs, or errors, of several requests by their numbers: one message for all
    ready outputs.

    Nearly all outputs are one token of one sequence, which has a short form: number, sequence,
    token and three times.
    """
    return _pack(
        [
            _one_token(number, output) or (number, _output_fields(output))
            for number, output in outputs
        ]
    )


def decode_outputs(data: bytes) -> list[tuple[int, RequestOutput | errors.TramontaneError]]:
    """Decode the outputs, or errors, of several requests."""
    return [
        (
            fields[0],
            _output_of_one(*fields[1:]) if len(fields) == ONE_TOKEN_FIELDS else _output(*fields[1]),
        )
        for fields in _unpack(data)
    ]


def encode_error(error: errors.TramontaneError, replica: str) -> bytes:
    """Encode the reason why a request was refused or failed, and the name of the router replica."""
    retry_after_s = error.retry_after_s if isinstance(error, errors.OverloadedError) else 0
    return _pack((error.wire_name, str(error), retry_after_s, replica))


def decode_error(data: bytes) -> tuple[errors.TramontaneError, str]:
    """Decode an error and the name of the router replica."""
    name, message, retry_after_s, replica = _unpack(data)
    return errors.find_error("wire_name", name).restore(message, retry_after_s), replica


# ---- fields


def _one_token(
    number: int, output: RequestOutput | errors.TramontaneError
) -> tuple[Any, ...] | None:
    """Return the short form of an output, or None if it has more than one token, the end of a
    sequence or an error.
    """
    if isinstance(output, errors.TramontaneError):
        return None
    events, times, experts, logprobs, fingerprint, num_cached, drafts = output
    if (
        len(events) != 1
        or events[0][2] is not None
        or experts
        or logprobs
        or fingerprint
        or num_cached
        or drafts
    ):
        return None
    return (number, *events[0][:2], *times)


def _output_of_one(seq_id: int, token_id: int, *times: float) -> RequestOutput:
    """Return the output of a short form; ``tuple.__new__`` takes half the time of calling the
    classes.
    """
    event = _new(TokenEvent, (seq_id, token_id, None))
    output: RequestOutput = _new(
        RequestOutput, ((event,), _new(RequestTimings, times), (), (), "", 0, ())
    )
    return output


def _output_fields(output: RequestOutput | errors.TramontaneError) -> Any:
    if isinstance(output, errors.TramontaneError):
        return output.wire_name, str(output)
    events = [(e.seq_id, e.token_id, e.finish and e.finish.value) for e in output.events]
    times = (output.times.queue_s, output.times.prefill_s, output.times.decode_s)
    return (
        events,
        times,
        output.experts,
        output.logprobs,
        output.fingerprint,
        output.num_cached,
        output.drafts,
    )


def _output(*fields: Any) -> RequestOutput | errors.TramontaneError:
    if isinstance(fields[0], str):
        name, message = fields
        return errors.find_error("wire_name", name).restore(message)
    events, times, experts, logprobs, fingerprint, num_cached, drafts = fields
    return RequestOutput(
        tuple(
            TokenEvent(index, token_id, finish and FinishReason(finish))
            for index, token_id, finish in events
        ),
        RequestTimings(*times),
        _choices(experts),
        _logprobs(logprobs),
        fingerprint,
        num_cached,
        drafts,
    )


def _timing(fields: Any) -> StageTiming:
    return StageTiming._make((*fields[:-1], tuple(map(ExpertTiming._make, fields[-1]))))


def _choices(fields: Any) -> tuple[ExpertChoices, ...]:
    return tuple(map(ExpertChoices._make, fields))


def _logprobs(fields: Any) -> tuple[Logprobs, ...]:
    return tuple(map(Logprobs._make, fields))


def _pack(value: Any) -> bytes:  # msgpack takes any nesting of plain values
    data: bytes = msgpack.packb(value)
    return data


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, use_list=False)
