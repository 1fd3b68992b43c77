"""From a model and a number of stages to a plan: layers by cost, caches by memory. Pure arithmetic."""

from dataclasses import dataclass
from fractions import Fraction

from tramontane.proto.errors import ConfigError, PlanError
from tramontane.proto.model_args import DTYPE_BYTES, ModelArgs
from tramontane.proto.plan import CachePlan, ClusterPlan, StagePlan, WindowClass, kv_bytes_per_position, ring_pages
from tramontane.workers.tensor_names import layer_tensors, stage_tensors

MEMORY_SHARE = 0.9  # of what a stage has; the rest is for activations and the runtime
GIB = 2**30
SIZE_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What to plan for. ``stage_memory`` is what one stage may use, in bytes."""

    num_stages: int
    stage_memory: int
    dtype: str
    max_model_len: int
    max_num_seqs: int
    page_size: int
    kv_cache_memory: int | None = None


def make_plan(args: ModelArgs, request: PlanRequest) -> ClusterPlan:
    """Raises PlanError, with the numbers, if the model does not fit."""
    if request.num_stages > args.n_layers:
        raise PlanError(f"--stages is {request.num_stages}, but the model has only {args.n_layers} layers; no stage may be empty")
    if request.max_model_len > args.max_seq_len:
        raise ConfigError(f"--max-model-len is {request.max_model_len}; the checkpoint's context is {args.max_seq_len} positions")
    spans = split_layers(layer_costs(args), request.num_stages)
    weights = [_weight_bytes(args, span, request.dtype) for span in spans]
    cache = _plan_cache(args, spans, weights, request)
    stages = tuple(
        StagePlan(
            args=args,
            stage_id=stage_id,
            num_stages=request.num_stages,
            first_layer=span.start,
            last_layer=span.stop,
            dtype=request.dtype,
            cache=cache,
            # every sequence holds a page of each class, and has a row in the stages' page tables
            max_num_seqs=min(request.max_num_seqs, *(c.num_pages for c in cache.classes)),
            weight_bytes=weights[stage_id],
        )
        for stage_id, span in enumerate(spans)
    )
    return ClusterPlan(stages, request.max_model_len)


def layer_costs(args: ModelArgs) -> list[int]:
    """Parameters that one token uses, per layer; the embedding weighs on the first layer, the head on the last."""
    embedding = args.vocab_size * args.dim
    costs = [_active_parameters(args, layer) for layer in range(args.n_layers)]
    costs[0] += embedding
    costs[-1] += embedding
    return costs


def split_layers(costs: list[int], num_stages: int) -> list[range]:
    """Consecutive, non-empty groups whose most expensive one is as cheap as can be, and among those the most even.

    costs [2, 1, 1, 1, 3] in 2 groups: [2, 1, 1] and [1, 3], both 4.
    """
    worst = max(sum(costs[layer] for layer in span) for span in _split(costs, num_stages, floor=0))
    return _split(costs, num_stages, floor=worst)


def _split(costs: list[int], num_stages: int, floor: int) -> list[range]:
    """The split with the least (worst group, sum of squared groups), where any worst group up to ``floor`` counts alike."""
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (floor, 0, ())}  # by number of layers split so far
    for _ in range(num_stages):
        best = {
            end: min(_extend(best[start], sum(costs[start:end]), end) for start in best if start < end)
            for end in range(min(best) + 1, len(costs) + 1)
        }
    ends = best[len(costs)][2]
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]


def _extend(before: tuple[int, int, tuple[int, ...]], cost: int, end: int) -> tuple[int, int, tuple[int, ...]]:
    worst, squares, ends = before
    return max(worst, cost), squares + cost**2, (*ends, end)


def _active_parameters(args: ModelArgs, layer: int) -> int:
    total = sum(spec.num_elements for spec in layer_tensors(args, layer))
    if args.moe is None:
        return total
    expert = 3 * args.dim * args.hidden_dim
    return total - (args.moe.num_experts - args.moe.num_experts_per_tok) * expert


def _weight_bytes(args: ModelArgs, span: range, dtype: str) -> int:
    return sum(spec.num_elements for spec in stage_tensors(args, span)) * DTYPE_BYTES[dtype]


def _plan_cache(args: ModelArgs, spans: list[range], weights: list[int], request: PlanRequest) -> CachePlan:
    """Pages for ``max_num_seqs`` sequences of full length, or for as many as the poorest stage can hold."""
    rings = {w: ring_pages(w, request.page_size, request.max_model_len) for w in args.window_classes}
    page_bytes = kv_bytes_per_position(args, request.dtype) * request.page_size
    sequence_bytes = [sum(rings[args.windows[layer]] for layer in span) * page_bytes for span in spans]
    usable = int(request.stage_memory * MEMORY_SHARE)
    for stage_id, (weight, one) in enumerate(zip(weights, sequence_bytes, strict=True)):
        cache_bytes = max(one, request.kv_cache_memory or 0)
        if weight + cache_bytes > usable:
            raise PlanError(
                f"too little memory for {_label(stage_id, spans)}: it needs "
                f"{weight / GIB:.3g} GiB for weights and {cache_bytes / GIB:.3g} GiB of cache "
                f"(one sequence of {request.max_model_len} positions takes {one / GIB:.3g} GiB) and may use "
                f"{usable / GIB:.3g} GiB; use more --stages, or lower --max-model-len or --kv-cache-memory"
            )
    if request.kv_cache_memory is not None:
        _check_kv_cache_memory(request.kv_cache_memory, sequence_bytes, spans, request.max_model_len)
    rooms = [usable - weight if request.kv_cache_memory is None else request.kv_cache_memory for weight in weights]
    # exact: no page that fits is lost
    num_seqs = min(Fraction(request.max_num_seqs), *map(Fraction, rooms, sequence_bytes))
    return CachePlan(
        request.page_size,
        tuple(WindowClass(window, ring, int(ring * num_seqs)) for window, ring in rings.items()),
    )


def _check_kv_cache_memory(given: int, sequence_bytes: list[int], spans: list[range], max_model_len: int) -> None:
    """The minimum is named for all stages at once: raising it to the first stage's would only meet the next."""
    minimum = max(sequence_bytes)
    if given < minimum:
        raise PlanError(
            f"--kv-cache-memory is {_size(given)}, but one sequence of {max_model_len} positions takes {_size(minimum)} on "
            f"{_label(sequence_bytes.index(minimum), spans)}; give --kv-cache-memory {_size(minimum)} or more, "
            "or lower --max-model-len"
        )


def _label(stage_id: int, spans: list[range]) -> str:
    return f"stage {stage_id + 1}/{len(spans)} (layers {spans[stage_id].start}-{spans[stage_id].stop - 1})"


def _size(num_bytes: int) -> str:
    """As --kv-cache-memory takes it, rounded up, so that it can be given back: 100 is 100B, 20481 is 21KiB."""
    unit, name = next((unit, name) for unit, name in SIZE_UNITS if num_bytes >= 10 * unit or unit == 1)
    return f"{-(-num_bytes // unit)}{name}"
