"""The plan of a pipeline: layers are divided by cost, caches by memory. Pure arithmetic.

Layers are divided so that the slowest stage is as fast as possible and no stage exceeds its memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from math import lcm

from tramontane.cluster.config.engine_keys import BATCHED_TOKENS_ON_CPUS
from tramontane.cluster.config.measurements import StageTime
from tramontane.cluster.planning.runtime_memory import RuntimeMemory
from tramontane.proto.errors import ConfigError, PlanError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.plan import (
    CachePlan,
    KvCacheDtype,
    PipelinePlan,
    StagePlan,
    WindowClass,
    check_kv_cache_dtype,
    kv_bytes_per_position,
    ring_pages,
)
from tramontane.proto.units import format_bytes, format_bytes_flag
from tramontane.proto.weight_format import Quantization, WeightFormat
from tramontane.workers.weights.tensor_specs import (
    TensorSpec,
    common_tensors,
    embedding_tensor,
    head_tensors,
    layer_tensors,
)

# Division of layers into consecutive spans, one per stage, so that the slowest stage is as fast as
# possible. Pure arithmetic.

FitsPredicate = Callable[[int, range], bool]  # whether a stage has enough memory for these layers
# time of the slowest stage, sum of squared times, end of each stage
Split = tuple[int, int, tuple[int, ...]]


def split_layers(
    costs: Sequence[int], speeds: Sequence[int], fits: FitsPredicate = lambda _stage, _span: True
) -> list[range] | None:
    """Divide layers into consecutive, non-empty spans, one per stage; return None if no split fits.

    A stage's time is the cost of its layers divided by its speed. Speeds are relative to each
    other. Among the splits whose slowest stage is fastest, the most even split is returned.

    Costs [2, 1, 1, 1, 3], speeds [1, 1]: [2, 1, 1] and [1, 3], both take 4. Speeds [3, 1]: [2, 1,
    1, 1] and [3], which take 5/3 and 3.
    """
    unit = lcm(*speeds)
    # each stage's time for a layer of cost 1, in whole numbers: speeds [3, 1] give [1, 3]
    times = [unit // speed for speed in speeds]
    fastest = _split(costs, times, fits, floor=0)
    if fastest is None:
        return None
    most_even = _split(costs, times, fits, floor=fastest[0])
    assert most_even is not None
    ends = most_even[2]
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]


def is_splittable(num_layers: int, num_stages: int, fits: FitsPredicate) -> bool:
    """Return True if any split fits, without a search for the best.

    Every stage takes as many layers as fit, leaving one for each stage that follows: the remaining
    layers are then a subset of the layers that any other split would leave.
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


def _split(
    costs: Sequence[int], times: Sequence[int], fits: FitsPredicate, floor: int
) -> Split | None:
    """Return the split with the least (slowest stage, sum of squared times); a slowest stage below
    ``floor`` counts as ``floor``.
    """
    cost_until = [0, *accumulate(costs)]
    best: dict[int, Split] = {0: (floor, 0, ())}  # by number of layers split so far
    for stage, time in enumerate(times):
        longer: dict[int, Split] = {}
        for end in range(stage + 1, len(costs) + 1):
            starts = [start for start in best if start < end and fits(stage, range(start, end))]
            if starts:
                longer[end] = min(
                    _extend(best[start], (cost_until[end] - cost_until[start]) * time, end)
                    for start in starts
                )
        best = longer
    return best.get(len(costs))


def _extend(split: Split, time: int, end: int) -> Split:
    slowest, squares, ends = split
    return max(slowest, time), squares + time**2, (*ends, end)


# share of the tokens that a new token is sampled from: answers are half as long as prompts
SAMPLED_SHARE = Fraction(1, 3)
# largest share of a stage's memory for weights and caches; the rest is for activations and the
# runtime
MEMORY_SHARE = 0.9


class TooLittleMemoryError(PlanError):
    """Error of a model that does not fit; the caller adds advice."""


@dataclass(frozen=True, slots=True)
class StageBudget:
    """The device of one stage: bytes of memory, and a speed relative to the other stages'.

    ``runtime``: the GPU memory of its process besides weights and caches.
    """

    memory: int
    speed: int = 1
    runtime: RuntimeMemory | None = None

    @property
    def usable(self) -> int:
        """Bytes for weights and caches: nine tenths of the memory, or the memory without the
        runtime if that is less.

        With a runtime of 3 GiB: 72 of 80 GiB, and 17 of 20 GiB, not 18.
        """
        runtime = self.runtime.total if self.runtime else 0
        return min(int(self.memory * MEMORY_SHARE), max(self.memory - runtime, 0))

    def describe_usable(self) -> str:
        """Return ``72 GiB``, or ``0 B, as CUDA, activations and logits take ...`` where these take
        more than a tenth.
        """
        usable = format_bytes(self.usable)
        if self.runtime is None or self.usable == int(self.memory * MEMORY_SHARE):
            return usable
        return (
            f"{usable}, as CUDA, activations and logits take {format_bytes(self.runtime.total)} of"
            f" {format_bytes(self.memory)}"
        )


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The pipeline to plan; it has one stage per budget, in this order."""

    budgets: tuple[StageBudget, ...]
    dtype: str
    max_model_len: int
    max_num_seqs: int
    page_size: int
    kv_cache_memory: int | None = None
    quantize: Quantization | None = None
    experts_inside: bool = True  # the stages have the model's experts, if it has any
    # stage times of an earlier run of a pipeline, which give the cost of the head
    stage_times: tuple[StageTime, ...] | None = None
    batch_invariant: bool | None = None  # see StagePlan
    num_drafts: int = 0  # maximum drafts of a sequence in flight, added to page rings
    max_num_batched_tokens: int = BATCHED_TOKENS_ON_CPUS
    # rows per panel of packed matrices, whose last panel is filled up on CPUs; 1: not packed
    panel_rows: int = 1
    kv_cache_dtype: KvCacheDtype = "auto"

    @property
    def num_stages(self) -> int:
        """One stage per budget."""
        return len(self.budgets)


def is_feasible(args: ModelArgs, request: PlanRequest) -> bool:
    """Return True if ``make_plan`` would succeed.

    It does far less work, unless ``kv_cache_memory`` is given, whose check depends on the split.
    """
    groups = args.layer_groups
    if request.num_stages > len(groups) or request.max_model_len > args.max_seq_len:
        return False
    if not is_splittable(
        len(groups), request.num_stages, _fits(request, _StageFootprint(args, request), groups)
    ):
        return False
    if request.kv_cache_memory is None:
        return True
    try:
        make_plan(args, request)
    except PlanError:
        return False
    return True


def make_plan(args: ModelArgs, request: PlanRequest) -> PipelinePlan:
    """Plan a pipeline.

    Raises PlanError (TooLittleMemoryError, with the numbers, if the model does not fit), or
    ConfigError if ``max_model_len`` exceeds the model's context, or the model does not support this
    cache dtype.
    """
    check_kv_cache_dtype(args, request.dtype, request.kv_cache_dtype)
    args.check_num_stages(request.num_stages, f"--stages is {request.num_stages}")
    if request.max_model_len > args.max_seq_len:
        raise ConfigError(
            f"--max-model-len is {request.max_model_len}; the checkpoint's context is"
            f" {args.max_seq_len} positions"
        )
    footprint = _StageFootprint(args, request)
    spans = _layer_spans(args, request, footprint)
    cache = _plan_cache(spans, footprint, request)
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
            max_num_batched_tokens=request.max_num_batched_tokens,
            weight_bytes=footprint.weight_bytes(span) - footprint.padding_bytes(span),
            padding_bytes=footprint.padding_bytes(span),
            experts_inside=request.experts_inside,
            batch_invariant=request.batch_invariant,
            kv_cache_dtype=request.kv_cache_dtype,
        )
        for stage_id, span in enumerate(spans)
    )
    return PipelinePlan(stages, request.max_model_len, max_concurrent_stages=len(stages))


def layer_costs(
    args: ModelArgs, experts_inside: bool = True, stage_times: Sequence[StageTime] | None = None
) -> list[int]:
    """Return the parameters that one token uses, per layer.

    The last layer includes the head. Only tokens that a new token is sampled from use the head:
    ``SAMPLED_SHARE`` of all tokens, or the share that the busy times of a pipeline show. The
    embedding is left out: a token uses one row of it. Raises ConfigError if the busy times are of
    another model.

    Layers of 10 parameters; stages with 3 and 2 layers were busy for 60 % and 50 % of the time. A
    layer takes 20 %, so the head takes 10 %, which is 5 parameters.
    """
    costs = [_active_parameters(args, layer, experts_inside) for layer in range(args.n_layers)]
    if stage_times is None:
        head = int(args.vocab_size * args.dim * SAMPLED_SHARE)
    else:
        if stage_times[-1].last != args.n_layers - 1:
            raise ConfigError(
                f"--stage-times is of {stage_times[-1].last + 1} layers, and the model has"
                f" {args.n_layers}"
            )
        *others, last = (sum(costs[stage.first : stage.last + 1]) for stage in stage_times)
        head = (
            round(
                stage_times[-1].busy * sum(others) / sum(stage.busy for stage in stage_times[:-1])
            )
            - last
        )
    costs[-1] += max(head, 0)
    return costs


def _active_parameters(args: ModelArgs, layer: int, experts_inside: bool) -> int:
    total = sum(
        spec.num_elements for spec in layer_tensors(args, layer, with_experts=experts_inside)
    )
    if args.moe is None or layer not in args.moe_layers or not experts_inside:
        return total
    expert = 3 * args.dim * args.expert_dim
    return total - (args.moe.num_experts - args.moe.num_experts_per_tok) * expert


class _StageFootprint:
    """Bytes that a span of layers needs on its stage."""

    def __init__(self, args: ModelArgs, request: PlanRequest) -> None:
        self._args, self._request = args, request
        lengths = request.page_size, request.max_model_len, request.num_drafts
        self.rings = {w: ring_pages(w, *lengths) for w in args.window_classes}
        layers = _layer_bytes(args, self._format, request.panel_rows, request.experts_inside)
        head = tuple(head_tensors(args))
        self._weights = [0, *accumulate(num_bytes for num_bytes, _ in layers)]
        self._padding = [0, *accumulate(num_padding for _, num_padding in layers)]
        kinds = request.dtype, request.kv_cache_dtype
        page_bytes = (
            kv_bytes_per_position(args, kinds[0], n, kinds[1]) * request.page_size
            for n in range(args.n_layers)
        )
        pages = (self.rings[window] for window in args.windows)
        self._one_sequence: list[int] = [
            0,
            *accumulate(n * size for n, size in zip(pages, page_bytes, strict=True)),
        ]
        self._embedding, self._common = (
            self._num_bytes(embedding_tensor(args)),
            self._num_bytes(*common_tensors(args)),
        )
        self._head, self._head_padding = self._num_bytes(*head), self._num_padding_bytes(*head)

    def weight_bytes(self, span: range) -> int:
        """Return the bytes in memory of the layers' weights, with the embedding before the first
        layer and the head after the last one.
        """
        num_bytes = (
            self._common
            + self._weights[span.stop]
            - self._weights[span.start]
            + self.padding_bytes(span)
        )
        return (
            num_bytes
            + (span.start == 0) * self._embedding
            + (span.stop == self._args.n_layers) * self._head
        )

    def padding_bytes(self, span: range) -> int:
        """Return the bytes that fill up the last panels of packed matrices; the embedding has no
        panels.
        """
        num_bytes = self._padding[span.stop] - self._padding[span.start]
        return num_bytes + (span.stop == self._args.n_layers) * self._head_padding

    def sequence_bytes(self, span: range) -> int:
        """Return the cache of one sequence of full length."""
        return self._one_sequence[span.stop] - self._one_sequence[span.start]

    def minimum_bytes(self, span: range) -> int:
        """Return the bytes of the weights and of the smallest cache that a stage can work with."""
        return self.weight_bytes(span) + max(
            self.sequence_bytes(span), self._request.kv_cache_memory or 0
        )

    @property
    def _format(self) -> WeightFormat:
        return WeightFormat.of(self._args, self._request.dtype, self._request.quantize)

    def _num_bytes(self, *specs: TensorSpec) -> int:
        return sum(spec.num_bytes(self._format) for spec in specs)

    def _num_padding_bytes(self, *specs: TensorSpec) -> int:
        return sum(spec.padding_bytes(self._format, self._request.panel_rows) for spec in specs)


@lru_cache(maxsize=8)  # the search for a feasible plan repeats requests for the same model
def _layer_bytes(
    args: ModelArgs, layout: WeightFormat, panel_rows: int, has_experts: bool
) -> tuple[tuple[int, int], ...]:
    """Return the bytes of each layer's weights, and of the padding of their last panels."""
    sizes = []
    for layer in range(args.n_layers):
        specs = tuple(layer_tensors(args, layer, with_experts=has_experts))
        num_padding = sum(spec.padding_bytes(layout, panel_rows) for spec in specs)
        sizes.append((sum(spec.num_bytes(layout) for spec in specs), num_padding))
    return tuple(sizes)


def _layer_spans(args: ModelArgs, request: PlanRequest, footprint: _StageFootprint) -> list[range]:
    """Divide the layers, in groups that stay together, by their costs and the stages' speeds."""
    by_layer, groups = (
        layer_costs(args, request.experts_inside, request.stage_times),
        args.layer_groups,
    )
    costs = [sum(by_layer[layer] for layer in group) for group in groups]
    speeds = [budget.speed for budget in request.budgets]
    spans = split_layers(costs, speeds, _fits(request, footprint, groups))
    if spans is None:
        fastest = [_layers_of(span, groups) for span in split_layers(costs, speeds) or []]
        raise TooLittleMemoryError(_memory_error(fastest, request, footprint))
    return [_layers_of(span, groups) for span in spans]


def _layers_of(span: range, groups: Sequence[range]) -> range:
    """Return the layers of consecutive groups. Groups 1 and 2 of 0, 1-2, 3-4: 1-4."""
    return range(groups[span.start].start, groups[span.stop - 1].stop)


def _fits(
    request: PlanRequest, footprint: _StageFootprint, groups: Sequence[range]
) -> FitsPredicate:
    return lambda stage, span: (
        footprint.minimum_bytes(_layers_of(span, groups)) <= request.budgets[stage].usable
    )


def _memory_error(spans: list[range], request: PlanRequest, footprint: _StageFootprint) -> str:
    """Describe the first stage that exceeds its memory in the split that would be fastest."""
    numbered = enumerate(zip(spans, request.budgets, strict=True))
    stage_id, span, budget = next(
        (i, span, budget)
        for i, (span, budget) in numbered
        if footprint.minimum_bytes(span) > budget.usable
    )
    weights, per_sequence = footprint.weight_bytes(span), footprint.sequence_bytes(span)
    cache = max(per_sequence, request.kv_cache_memory or 0)
    return (
        f"too little memory for {_label(stage_id, spans)}: it needs {format_bytes(weights)} for"
        f" weights and {format_bytes(cache)} of cache (one sequence of {request.max_model_len}"
        f" positions takes {format_bytes(per_sequence)}) and may use {budget.describe_usable()}"
    )


def _plan_cache(spans: list[range], footprint: _StageFootprint, request: PlanRequest) -> CachePlan:
    """Plan pages for ``max_num_seqs`` sequences of full length, or for as many as the stage with
    the least memory can hold.
    """
    sequence_bytes = [footprint.sequence_bytes(span) for span in spans]
    given = request.kv_cache_memory
    if given is not None:
        _check_kv_cache_memory(given, sequence_bytes, spans, request.max_model_len)
    cache_bytes = [
        budget.usable - footprint.weight_bytes(span) if given is None else given
        for budget, span in zip(request.budgets, spans, strict=True)
    ]
    # exact fractions, so that no page that fits is lost by rounding
    num_seqs = min(Fraction(request.max_num_seqs), *map(Fraction, cache_bytes, sequence_bytes))
    return CachePlan(
        request.page_size,
        tuple(
            WindowClass(window, ring, int(ring * num_seqs))
            for window, ring in footprint.rings.items()
        ),
        request.num_drafts,
    )


def _check_kv_cache_memory(
    given: int, sequence_bytes: list[int], spans: list[range], max_model_len: int
) -> None:
    """Raise PlanError with the minimum that suffices for all stages, not only for the first stage
    with too little.
    """
    minimum = max(sequence_bytes)
    if given < minimum:
        needed = format_bytes_flag(minimum)
        raise PlanError(
            f"--kv-cache-memory is {format_bytes_flag(given)}, but one sequence of {max_model_len}"
            f" positions takes {needed} on {_label(sequence_bytes.index(minimum), spans)}; give"
            f" --kv-cache-memory {needed} or more, or lower --max-model-len"
        )


def _label(stage_id: int, spans: list[range]) -> str:
    return (
        f"stage {stage_id + 1}/{len(spans)} (layers"
        f" {spans[stage_id].start}-{spans[stage_id].stop - 1})"
    )
