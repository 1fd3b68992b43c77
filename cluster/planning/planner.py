"""From a model and a number of stages to a plan: layers by cost, caches by memory. Pure arithmetic.

Which stage gets which layers: the slowest stage as fast as can be, and no stage over its memory. Pure arithmetic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import lcm

from tramontane.proto.byte_size import format_bytes, format_bytes_flag
from tramontane.proto.errors import ConfigError, PlanError
from tramontane.proto.model_args import ModelArgs, Quantization
from tramontane.proto.plan import CachePlan, PipelinePlan, StagePlan, WindowClass, kv_bytes_per_position, ring_pages
from tramontane.workers.weights.tensor_specs import TensorSpec, embedding_tensor, head_tensors, layer_tensors

FitsPredicate = Callable[[int, range], bool]  # whether a stage has room for these layers
Split = tuple[int, int, tuple[int, ...]]  # slowest stage, sum of squared times, where the stages end


def split_layers(
    costs: Sequence[int], speeds: Sequence[int], fits: FitsPredicate = lambda _stage, _span: True
) -> list[range] | None:
    """Consecutive, non-empty groups of layers, one per stage; None if there is no way to fit them.

    A stage takes the cost of its layers divided by its speed, which counts only relative to the
    others'. Among the splits whose slowest stage is fastest, the most even one is taken.

    costs [2, 1, 1, 1, 3], speeds [1, 1]: [2, 1, 1] and [1, 3], both 4. Speeds [3, 1]: [2, 1, 1, 1] and [3], 5/3 and 3.
    """
    unit = lcm(*speeds)
    times = [unit // speed for speed in speeds]  # of a layer of cost 1, in whole numbers: speeds [3, 1] give [1, 3]
    fastest = _split(costs, times, fits, floor=0)
    if fastest is None:
        return None
    most_even = _split(costs, times, fits, floor=fastest[0])
    assert most_even is not None
    ends = most_even[2]
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]


def is_splittable(num_layers: int, num_stages: int, fits: FitsPredicate) -> bool:
    """Whether there is any way to fit them, without looking for the best.

    Every stage takes as many layers as fit, leaving one for each that follows: what is left to the others is then
    part of what any other split would leave them.
    """
    start = 0
    for stage in range(num_stages):
        last = num_layers - (num_stages - 1 - stage)
        end = start
        while end < last and fits(stage, range(start, end + 1)):
            end += 1
        if end == start:
            return False
        start = end
    return start == num_layers


def _split(costs: Sequence[int], times: Sequence[int], fits: FitsPredicate, floor: int) -> Split | None:
    """The split with the least (slowest stage, sum of squared times), where any slowest stage up to ``floor`` counts alike."""
    until = [0, *accumulate(costs)]
    best: dict[int, Split] = {0: (floor, 0, ())}  # by number of layers split so far
    for stage, time in enumerate(times):
        longer: dict[int, Split] = {}
        for end in range(stage + 1, len(costs) + 1):
            starts = [start for start in best if start < end and fits(stage, range(start, end))]
            if starts:
                longer[end] = min(_extend(best[start], (until[end] - until[start]) * time, end) for start in starts)
        best = longer
    return best.get(len(costs))


def _extend(before: Split, time: int, end: int) -> Split:
    slowest, squares, ends = before
    return max(slowest, time), squares + time**2, (*ends, end)


MEMORY_SHARE = 0.9  # of what a stage has; the rest is for activations and the runtime


class TooLittleMemoryError(PlanError):
    """No split fits; what to do about it depends on who asked."""


@dataclass(frozen=True, slots=True)
class StageBudget:
    """What one stage runs on: bytes that it may use, and its speed relative to the other stages'."""

    memory: int
    speed: int = 1

    @property
    def usable(self) -> int:
        return int(self.memory * MEMORY_SHARE)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What to plan for: a pipeline of so many stages, in this order."""

    budgets: tuple[StageBudget, ...]
    dtype: str
    max_model_len: int
    max_num_seqs: int
    page_size: int
    kv_cache_memory: int | None = None
    quantize: Quantization | None = None
    experts_inside: bool = True  # of the stages, where the model has experts

    @property
    def num_stages(self) -> int:
        return len(self.budgets)


def is_feasible(args: ModelArgs, request: PlanRequest) -> bool:
    """Whether ``make_plan`` would make a plan. Far less work, unless ``kv_cache_memory`` is given, which depends on the split."""
    if request.num_stages > args.n_layers or request.max_model_len > args.max_seq_len:
        return False
    if not is_splittable(args.n_layers, request.num_stages, _fits(request, _StageFootprint(args, request))):
        return False
    if request.kv_cache_memory is None:
        return True
    try:
        make_plan(args, request)
    except PlanError:
        return False
    return True


def make_plan(args: ModelArgs, request: PlanRequest) -> PipelinePlan:
    """Raises PlanError (TooLittleMemoryError, with the numbers, if the model does not fit) or ConfigError."""
    if request.num_stages > args.n_layers:
        raise PlanError(f"--stages is {request.num_stages}, but the model has only {args.n_layers} layers; no stage may be empty")
    if request.max_model_len > args.max_seq_len:
        raise ConfigError(f"--max-model-len is {request.max_model_len}; the checkpoint's context is {args.max_seq_len} positions")
    need = _StageFootprint(args, request)
    spans = _layer_spans(args, request, need)
    weights = [need.weights(span) for span in spans]
    cache = _plan_cache(args, spans, need, request)
    stages = tuple(
        StagePlan(
            args=args,
            stage_id=stage_id,
            num_stages=request.num_stages,
            first_layer=span.start,
            last_layer=span.stop,
            dtype=request.dtype,
            quantize=request.quantize,
            cache=cache,
            # every sequence holds a page of each class, and has a row in the stages' page tables
            max_num_seqs=min(request.max_num_seqs, *(c.num_pages for c in cache.classes)),
            weight_bytes=weights[stage_id],
            experts_inside=request.experts_inside,
        )
        for stage_id, span in enumerate(spans)
    )
    return PipelinePlan(stages, request.max_model_len, max_concurrent_stages=len(stages))


def layer_costs(args: ModelArgs, experts_inside: bool = True) -> list[int]:
    """Parameters that one token uses, per layer; the head weighs on the last one. Of the embedding a token uses one row."""
    costs = [_active_parameters(args, layer, experts_inside) for layer in range(args.n_layers)]
    costs[-1] += args.vocab_size * args.dim
    return costs


def _active_parameters(args: ModelArgs, layer: int, experts_inside: bool) -> int:
    total = sum(spec.num_elements for spec in layer_tensors(args, layer, with_experts=experts_inside))
    if args.moe is None or not experts_inside:
        return total
    expert = 3 * args.dim * args.hidden_dim
    return total - (args.moe.num_experts - args.moe.num_experts_per_tok) * expert


class _StageFootprint:
    """Bytes that a group of layers needs on its stage."""

    def __init__(self, args: ModelArgs, request: PlanRequest) -> None:
        self._args, self._request = args, request
        self.rings = {w: ring_pages(w, request.page_size, request.max_model_len) for w in args.window_classes}
        page_bytes = kv_bytes_per_position(args, request.dtype) * request.page_size
        layers = range(args.n_layers)
        self._weights = [
            0,
            *accumulate(self._num_bytes(*layer_tensors(args, layer, with_experts=request.experts_inside)) for layer in layers),
        ]
        self._one_sequence = [0, *accumulate(self.rings[args.windows[layer]] * page_bytes for layer in layers)]
        self._embedding = self._num_bytes(embedding_tensor(args))
        self._head = self._num_bytes(*head_tensors(args))

    def weights(self, span: range) -> int:
        own = self._weights[span.stop] - self._weights[span.start]
        first, last = span.start == 0, span.stop == self._args.n_layers
        return own + first * self._embedding + last * self._head

    def sequence_bytes(self, span: range) -> int:
        """The cache of one sequence of full length."""
        return self._one_sequence[span.stop] - self._one_sequence[span.start]

    def minimum_bytes(self, span: range) -> int:
        """Without which the stage is of no use."""
        return self.weights(span) + max(self.sequence_bytes(span), self._request.kv_cache_memory or 0)

    def _num_bytes(self, *specs: TensorSpec) -> int:
        return sum(spec.num_bytes(self._request.dtype, self._request.quantize) for spec in specs)


def _layer_spans(args: ModelArgs, request: PlanRequest, need: _StageFootprint) -> list[range]:
    costs, speeds = layer_costs(args, request.experts_inside), [room.speed for room in request.budgets]
    spans = split_layers(costs, speeds, _fits(request, need))
    if spans is None:
        raise TooLittleMemoryError(_memory_error(split_layers(costs, speeds) or [], request, need))
    return spans


def _fits(request: PlanRequest, need: _StageFootprint) -> FitsPredicate:
    return lambda stage, span: need.minimum_bytes(span) <= request.budgets[stage].usable


def _memory_error(spans: list[range], request: PlanRequest, need: _StageFootprint) -> str:
    """Of the split that would be fastest, the first stage that has no room."""
    rooms = zip(spans, request.budgets, strict=True)
    stage_id, span, room = next((i, span, room) for i, (span, room) in enumerate(rooms) if need.minimum_bytes(span) > room.usable)
    one = need.sequence_bytes(span)
    return (
        f"too little memory for {_label(stage_id, spans)}: it needs "
        f"{format_bytes(need.weights(span))} for weights and {format_bytes(max(one, request.kv_cache_memory or 0))} of cache "
        f"(one sequence of {request.max_model_len} positions takes {format_bytes(one)}) and may use "
        f"{format_bytes(room.usable)}"
    )


def _plan_cache(args: ModelArgs, spans: list[range], need: _StageFootprint, request: PlanRequest) -> CachePlan:
    """Pages for ``max_num_seqs`` sequences of full length, or for as many as the poorest stage can hold."""
    sequence_bytes = [need.sequence_bytes(span) for span in spans]
    given = request.kv_cache_memory
    if given is not None:
        _check_kv_cache_memory(given, sequence_bytes, spans, request.max_model_len)
    rooms = [
        room.usable - need.weights(span) if given is None else given for room, span in zip(request.budgets, spans, strict=True)
    ]
    # exact: no page that fits is lost
    num_seqs = min(Fraction(request.max_num_seqs), *map(Fraction, rooms, sequence_bytes))
    return CachePlan(
        request.page_size,
        tuple(WindowClass(window, ring, int(ring * num_seqs)) for window, ring in need.rings.items()),
    )


def _check_kv_cache_memory(given: int, sequence_bytes: list[int], spans: list[range], max_model_len: int) -> None:
    """The minimum is named for all stages at once: raising it to the first stage's would only meet the next."""
    minimum = max(sequence_bytes)
    if given < minimum:
        least = format_bytes_flag(minimum)
        raise PlanError(
            f"--kv-cache-memory is {format_bytes_flag(given)}, but one sequence of {max_model_len} positions takes {least} on "
            f"{_label(sequence_bytes.index(minimum), spans)}; give --kv-cache-memory {least} or more, "
            "or lower --max-model-len"
        )


def _label(stage_id: int, spans: list[range]) -> str:
    return f"stage {stage_id + 1}/{len(spans)} (layers {spans[stage_id].start}-{spans[stage_id].stop - 1})"
