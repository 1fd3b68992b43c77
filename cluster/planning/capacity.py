"""The number of sequences that a plan can hold, and the changes that would make an infeasible plan
feasible.

Computed from the configuration alone, without weights and machines.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tramontane.cluster.planning.expert_planner import ExpertPlanReport
from tramontane.cluster.planning.planner import MEMORY_SHARE, PlanRequest, StageBudget, is_feasible
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.plan import PipelinePlan, StagePlan, kv_bytes_per_position, ring_pages
from tramontane.proto.units import GIB, format_bytes
from tramontane.proto.weight_format import Quantization

LENGTHS = (1024, 8192, 32768)  # tokens


@dataclass(frozen=True, slots=True)
class CapacityRow:
    """Number of sequences of ``length`` tokens that fit next to a stage's weights, with the model's
    windows and without any.
    """

    length: int
    num_seqs: int
    num_seqs_without_windows: int


def stage_capacity(stage: StagePlan, budget: StageBudget) -> list[CapacityRow]:
    """Return one row per length of LENGTHS, up to the model's context."""
    args, free, page_size = stage.args, budget.usable - stage.packed_bytes, stage.cache.page_size
    kinds = stage.dtype, stage.kv_cache_dtype
    page_bytes = {
        layer: kv_bytes_per_position(args, kinds[0], layer, kinds[1]) * page_size
        for layer in stage.layers
    }

    def count(length: int, windows: Sequence[int | None]) -> int:
        rings = {
            window: ring_pages(window, page_size, length, stage.cache.num_drafts)
            for window in set(windows)
        }
        return free // sum(rings[windows[layer]] * size for layer, size in page_bytes.items())

    no_windows = (None,) * args.n_layers
    lengths = [length for length in LENGTHS if length <= args.max_seq_len]
    return [
        CapacityRow(length, count(length, args.windows), count(length, no_windows))
        for length in lengths
    ]


def pipeline_capacity(plan: PipelinePlan) -> dict[int, int]:
    """Return how many sequences of each length of LENGTHS the planned pages hold.

    They are fewer than any stage alone could hold: pages are divided between the windows for
    sequences of full length.
    """
    return {
        length: num_seqs_in_pages(plan, length)
        for length in LENGTHS
        if length <= plan.max_model_len
    }


def num_seqs_in_pages(plan: PipelinePlan, length: int) -> int:
    """Return how many sequences of this length the planned pages hold; the scarcest kind of page
    decides.
    """
    return min(c.num_pages // c.pages_for(length, plan.cache.page_size) for c in plan.cache.classes)


def max_length_in_slots(plan: PipelinePlan) -> int:
    """Return the maximum length for which there are pages for a sequence in every slot.

    7414 pages of 16 positions, no window, 64 slots: 115 pages each, 1840 positions. A whole ring
    suffices for any length.
    """
    shares = [(c.num_pages // plan.max_num_seqs, c.ring_pages) for c in plan.cache.classes]
    bounds = [share * plan.cache.page_size for share, ring_pages in shares if share < ring_pages]
    return min([plan.max_model_len, *bounds])


def suggest_fixes(args: ModelArgs, request: PlanRequest, per_gpu: int | None = 1) -> str:
    """Describe changes to an infeasible request; each change alone would make it feasible.

    ``per_gpu``: stages that share a GPU; None if the memory is a machine's, which more stages would
    only divide further.
    """
    more = _more_memory(args, request) if per_gpu is None else _other_gpus(args, request, per_gpu)
    fixes = more + _smaller_needs(args, request)
    return (
        f"possible: {', or '.join(fixes)}"
        if fixes
        else "nothing of this kind is possible with so little memory"
    )


def _other_gpus(args: ModelArgs, request: PlanRequest, per_gpu: int) -> list[str]:
    """Describe more GPUs, or larger ones: 3 stages, 2 per GPU, are on 2 GPUs; with one more there
    would be 6.
    """
    fixes = []
    num_gpus = -(-request.num_stages // per_gpu)
    smallest = min(request.budgets, key=lambda budget: budget.memory)
    counts = range((num_gpus + 1) * per_gpu, len(args.layer_groups) + 1, per_gpu)
    num_stages = next(
        (n for n in counts if is_feasible(args, replace(request, budgets=(smallest,) * n))), None
    )
    if num_stages is not None:
        fixes.append(f"{num_stages // per_gpu} GPUs of {format_bytes(smallest.memory * per_gpu)}")

    memory = _smallest_memory(args, request, per_gpu)
    if memory is not None:
        fixes.append(f"{num_gpus} GPU{'s' * (num_gpus > 1)} of {memory} GiB")
    return fixes


def _more_memory(args: ModelArgs, request: PlanRequest) -> list[str]:
    """Describe how much free memory a machine without a GPU should have."""
    memory, num_stages = _smallest_memory(args, request, 1), request.num_stages
    stages = f"each of {num_stages} stages" if num_stages > 1 else "the stage"
    return [] if memory is None else [f"{memory} GiB of free memory for {stages}"]


def _smallest_memory(args: ModelArgs, request: PlanRequest, per_gpu: int) -> int | None:
    """Return the minimum memory of all GPUs in GiB; None if no size is enough."""

    def is_enough(gib: int) -> bool:
        budget = replace(request.budgets[0], memory=gib * GIB // per_gpu)
        return is_feasible(args, replace(request, budgets=(budget,) * request.num_stages))

    return _smallest_satisfying(is_enough, 2**14)


def _smaller_needs(args: ModelArgs, request: PlanRequest) -> list[str]:
    """Describe a shorter ``--max-model-len``, or quantized weights."""
    fixes = []

    def is_too_long(num_pages: int) -> bool:
        return not is_feasible(args, replace(request, max_model_len=num_pages * request.page_size))

    pages = _smallest_satisfying(is_too_long, request.max_model_len // request.page_size)
    if pages is not None and pages > 1:
        fixes.append(f"--max-model-len {(pages - 1) * request.page_size}")
    if (
        request.quantize is None
        and not args.quantization
        and is_feasible(args, replace(request, quantize=Quantization.INT8))
    ):
        fixes.append("--quantize int8")
    return fixes


def _smallest_satisfying(holds: Callable[[int], bool], maximum: int) -> int | None:
    """Return the least number from 1 to ``maximum`` for which a monotone condition holds; None if
    it does not exist.
    """
    if maximum < 1 or not holds(maximum):
        return None
    low, high = 0, maximum  # the condition holds for high, and not for low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def relative_times(
    costs: Sequence[int], plan: PipelinePlan, budgets: Sequence[StageBudget]
) -> list[float]:
    """Return each stage's time for a micro-batch, relative to the mean of all stages.

    Costs 2, 2 and 5: the first two on one stage take 4, the last on one of twice the speed 2.5,
    which is 1.23 and 0.77.
    """
    pairs = zip(plan.stages, budgets, strict=True)
    times = [sum(costs[layer] for layer in stage.layers) / budget.speed for stage, budget in pairs]
    return [time * len(times) / sum(times) for time in times]


def plan_as_data(
    plan: PipelinePlan,
    budgets: tuple[StageBudget, ...],
    times: Sequence[float],
    experts: ExpertPlanReport | None = None,
    index_bytes: int = 0,
) -> dict[str, object]:
    """Return the values of the tables of ``tramontane plan``, for JSON; sizes in bytes."""
    return {
        "dtype": plan.stages[0].dtype,
        "matrix_dtype": plan.stages[0].weight_format.matrix_dtype,
        "quantize": plan.stages[0].weight_format.quantize,
        "kv_cache_dtype": plan.stages[0].kv_cache_dtype,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "chosen": [choice._asdict() for choice in plan.chosen],
        "page_size": plan.cache.page_size,
        "memory_share": MEMORY_SHARE,
        "runtime": None if budgets[0].runtime is None else budgets[0].runtime.as_data(),
        "ngram_index_bytes": index_bytes,
        "sequences": [
            {"tokens": length, "num_seqs": number}
            for length, number in pipeline_capacity(plan).items()
        ],
        "pages": [
            {"window": c.window, "ring_pages": c.ring_pages, "num_pages": c.num_pages}
            for c in plan.cache.classes
        ],
        "stages": [
            {
                "first_layer": stage.first_layer,
                "last_layer": stage.last_layer - 1,
                "relative_time": time,
                "memory": budget.memory,
                "usable": budget.usable,
                "weight_bytes": stage.packed_bytes,
                "cache_bytes": stage.cache_bytes,
                "sequences": [
                    {
                        "tokens": row.length,
                        "num_seqs": row.num_seqs,
                        "num_seqs_without_windows": row.num_seqs_without_windows,
                    }
                    for row in stage_capacity(stage, budget)
                ],
            }
            for stage, budget, time in zip(plan.stages, budgets, times, strict=True)
        ],
        "experts": None if experts is None else experts.as_data(),
    }
