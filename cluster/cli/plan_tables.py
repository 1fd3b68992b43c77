"""The tables and sentences of ``tramontane plan``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tramontane.cluster.planning.capacity import (
    LENGTHS,
    max_length_in_slots,
    num_seqs_in_pages,
    pipeline_capacity,
    stage_capacity,
)
from tramontane.cluster.planning.expert_planner import ExpertPlanReport
from tramontane.cluster.planning.planner import StageBudget
from tramontane.cluster.planning.runtime_memory import RuntimeMemory
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.plan import PipelinePlan, StagePlan
from tramontane.proto.units import GIB, format_bytes


def show_plan(
    console: Console,
    model: str,
    args: ModelArgs,
    plan: PipelinePlan,
    budgets: tuple[StageBudget, ...],
    times: Sequence[float],
) -> None:
    """Show a stage per row, then the planner's choices and the capacity. ``times``: of the stages,
    relative to their mean.
    """
    has_windows = any(args.windows)
    capacities = [
        stage_capacity(stage, budget) for stage, budget in zip(plan.stages, budgets, strict=True)
    ]
    lengths = [f"{each.length // 1024}k" for each in capacities[0]]
    table = Table("stage", "layers", "GiB", "weights", "cache", *lengths)
    for stage, budget, row in zip(plan.stages, budgets, capacities, strict=True):
        counts = (
            f"{c.num_seqs} ({c.num_seqs_without_windows})" if has_windows else str(c.num_seqs)
            for c in row
        )
        sizes = map(_size, (budget.memory, stage.packed_bytes, stage.cache_bytes))
        table.add_row(
            f"{stage.stage_id + 1}/{len(budgets)}",
            f"{stage.first_layer}-{stage.last_layer - 1}",
            *sizes,
            *counts,
        )
    of_all = pipeline_capacity(plan)
    totals = map(sum, zip(*((s.packed_bytes, s.cache_bytes) for s in plan.stages), strict=True))
    memory = sum(budget.memory for budget in budgets)
    counts = (str(of_all.get(each.length, "")) for each in capacities[0])
    table.add_row("all", f"0-{args.n_layers - 1}", _size(memory), *map(_size, totals), *counts)
    console.print(table)
    if lengths:
        brackets = " (in brackets: if every layer kept all positions)" if has_windows else ""
        explained = (
            f"columns {', '.join(lengths)}: how many sequences of so many tokens fit next to a "
            f"stage's weights{brackets}"
        )
        console.print(f"{explained}; row all: into the planned pages", soft_wrap=True)
    if (runtime := budgets[0].runtime) is not None:
        _show_runtime(console, runtime, budgets)
    for choice in plan.chosen:
        console.print(choice.describe(), soft_wrap=True)
    formats = plan.stages[0].weight_format
    matrices = formats.quantize or formats.matrix_dtype
    weights = (
        formats.dtype if matrices == formats.dtype else f"{formats.dtype}, matrices in {matrices}"
    )
    console.print(f"{model}: {_parameters(args)}", soft_wrap=True, markup=False)
    if plan.stages[0].kv_cache_dtype != "auto":
        weights += f", keys and values in {plan.stages[0].kv_cache_dtype}"
    console.print(
        f"in {weights}, contexts of {plan.max_model_len} tokens; {_pages(plan)}",
        soft_wrap=True,
        markup=False,
    )
    each = ", ".join(f"{time:.2f}" for time in times)
    console.print(
        f"time of a micro-batch, relative to the mean of the stages: {each}", soft_wrap=True
    )
    console.print(_at_once(plan), soft_wrap=True)


def _show_runtime(console: Console, runtime: RuntimeMemory, budgets: Sequence[StageBudget]) -> None:
    """Show the memory of a stage's process besides weights and cache, and the memory left where a
    tenth of the total is more.
    """
    table = Table("besides weights and cache", "each stage")
    for name, num_bytes in runtime.as_data().items():
        table.add_row("all" if name == "total" else name, _size(num_bytes))
    spare = [budget.memory - budget.usable - runtime.total for budget in budgets]
    each = sorted(
        {_size(least) for least in (min(spare), max(spare))},
        key=lambda size: size != _size(min(spare)),
    )
    table.add_row("kept free", " to ".join(each))
    console.print(table)


def _parameters(args: ModelArgs) -> str:
    """Describe the number of parameters: ``46.7 billion parameters, of which 12.9 billion compute a
    token``.
    """
    total, active = (number / 1e9 for number in (args.num_parameters, args.num_active_parameters))
    digits = 1 if total > 1 else 3
    of_experts = f", of which {active:.{digits}f} billion compute a token" if args.moe else ""
    return f"{total:.{digits}f} billion parameters{of_experts}"


def _pages(plan: PipelinePlan) -> str:
    """Describe the cache: ``16448 pages of 16 tokens in layers with a sliding window of 4096``."""
    if len(plan.cache.classes) == 1 and plan.cache.classes[0].window is None:
        return (
            f"a cache of {plan.cache.classes[0].num_pages} pages of {plan.cache.page_size} tokens"
        )
    layers = [
        f"{c.num_pages} pages of {plan.cache.page_size} tokens in layers "
        + (f"with a sliding window of {c.window}" if c.window else "without a sliding window")
        for c in plan.cache.classes
    ]
    return f"a cache of {' and '.join(layers)}"


def _at_once(plan: PipelinePlan) -> str:
    """Describe how many sequences fit at once: one per slot, or as many long ones as pages hold."""
    num_slots, length = plan.max_num_seqs, max_length_in_slots(plan)
    sequences = "1 sequence" if num_slots == 1 else f"{num_slots} sequences"
    in_slots = f"at once: {sequences} of up to {length} tokens, one per slot (--max-num-seqs)"
    if length == plan.max_model_len:
        return f"{in_slots}; there are pages for all of them"
    longer = sorted(
        {*(each for each in LENGTHS if length < each < plan.max_model_len), plan.max_model_len}
    )
    return f"{in_slots}; of longer ones as many as the pages hold: " + ", ".join(
        f"{num_seqs_in_pages(plan, each)} of {each} tokens" for each in longer
    )


def show_experts(console: Console, experts: ExpertPlanReport) -> None:
    """Show an expert actor per row, and how even their load is."""
    table = Table("expert actor", "GiB", "may use", "weights", "experts", "load")
    actors = experts.plan.actors
    for actor, budget, share in zip(actors, experts.budgets, experts.shares, strict=True):
        sizes = map(_size, (budget.memory, budget.usable, actor.weight_bytes))
        table.add_row(
            f"{actor.actor_id + 1}/{actor.num_actors}",
            *sizes,
            str(len(actor.experts)),
            f"{share:.2f} x",
        )
    totals = [
        sum(budget.memory for budget in experts.budgets),
        sum(budget.usable for budget in experts.budgets),
    ]
    totals.append(sum(actor.weight_bytes for actor in actors))
    table.add_row("all", *map(_size, totals), str(sum(len(actor.experts) for actor in actors)), "")
    console.print(table)
    kind = (
        "all experts assumed to be alike"
        if experts.busiest_if_even is None
        else "by the measured load"
    )
    console.print(
        "experts: pairs of a layer and one of its experts; load: relative to the actors' mean, "
        f"{kind}"
    )
    busiest = f"the busiest expert actor does {experts.busiest:.2f} times the mean"
    if experts.busiest_if_even is not None:
        busiest += (
            "; distributed as if all experts were alike it would be "
            f"{experts.busiest_if_even:.2f} times"
        )
    console.print(busiest, soft_wrap=True)
    console.print(_replicas_line(experts), soft_wrap=True)


def _replicas_line(experts: ExpertPlanReport) -> str:
    copies = [number for number in experts.num_copies.values() if number > 1]
    if not copies:
        return f"none of {len(experts.num_copies)} experts has replicas"
    number = str(copies[0]) if min(copies) == max(copies) else f"{min(copies)} to {max(copies)}"
    of_all = f"{len(copies)} of {len(experts.num_copies)} experts"
    return f"{of_all} are on {number} actors each, the others on one"


def _size(num_bytes: float) -> str:
    """Return the number of GiB, or a smaller size with its unit."""
    return f"{num_bytes / GIB:.2f}" if num_bytes >= GIB else format_bytes(num_bytes)


@dataclass(frozen=True, slots=True)
class DraftModelReport:
    """The plan of a draft model. ``shares_gpu``: with the last stage."""

    folder: str
    stage: StagePlan
    shares_gpu: bool

    def as_data(self) -> dict[str, Any]:
        """Return it as JSON has it; sizes in bytes."""
        return {
            "shares_gpu": self.shares_gpu,
            "weights": self.stage.packed_bytes,
            "cache": self.stage.cache_bytes,
            "max_num_seqs": self.stage.max_num_seqs,
        }


def show_draft_model(console: Console, drafting: DraftModelReport) -> None:
    """Show the location of a draft model, and its number of concurrent sequences."""
    stage = drafting.stage
    where = ", on the last stage's GPU," if drafting.shares_gpu else ""
    console.print(
        f"{drafting.folder}{where} drafts for {stage.max_num_seqs} sequences at a time:"
        f" {format_bytes(stage.packed_bytes)} of weights, {format_bytes(stage.cache_bytes)} of"
        " cache",
        soft_wrap=True,
        markup=False,
    )
