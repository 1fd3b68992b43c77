"""Selection of the number of tokens of a micro-batch and of concurrent sequences on GPUs, if the
user leaves it open.

Larger micro-batches of prompts are closer to a GPU's matrix rate, and make the sequences that
decode next to them wait longer. More sequences share each reading of the weights, and have fewer
pages each. Pure arithmetic.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.engine_keys import (
    BATCHED_TOKENS_ON_CPUS,
    MAX_SEQS_ON_GPUS,
    SEQS_ON_CPUS,
)
from tramontane.cluster.planning.capacity import max_length_in_slots
from tramontane.cluster.planning.planner import (
    MEMORY_SHARE,
    PlanRequest,
    TooLittleMemoryError,
    layer_costs,
    make_plan,
)
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.plan import LimitChoice, PipelinePlan

TOKENS_ON_GPUS = (8192, 4096, 2048)
SEQS_ON_GPUS = tuple(range(MAX_SEQS_ON_GPUS, SEQS_ON_CPUS - 1, -32))
# more sequences are chosen only if each has pages for this number of tokens
ROOM = 1024
# largest share of a stage's memory that the runtime may take by larger limits
MAX_RUNTIME_SHARE = 0.15
# longest time of a micro-batch of prompts: a sequence that decodes next to them waits for this time
MAX_STEP_S = 0.15

# Dense products in bfloat16, in TFLOP/s, from NVIDIA's data sheets. The first entry whose text is a
# word of the GPU's name counts.
MATRIX_TFLOPS = (
    *(
        ("B300", 2250),
        ("B200", 2250),
        ("GB200", 2500),
        ("H100 PCIe", 756),
        ("H100 NVL", 835),
        ("H100", 989),
        ("H200", 989),
    ),
    *(
        ("GH200", 989),
        ("H800", 989),
        ("A100", 312),
        ("A800", 312),
        ("A40", 150),
        ("A30", 165),
        ("A10", 125),
        ("A10G", 70),
    ),
    *(
        ("L40S", 362),
        ("L40", 181),
        ("L4", 121),
        ("RTX 6000 Ada", 364),
        ("RTX 4090", 165),
        ("RTX 3090", 71),
    ),
)
# Share of the data sheet's rate that prompts have reached: 38,751 tokens/s of Mistral 7B on an H100
# are 562 of 989 TFLOP/s.
REACHED_SHARE = 0.57


class Limits(NamedTuple):
    """Values of ``max_num_seqs`` and ``max_num_batched_tokens``."""

    num_seqs: int
    num_tokens: int


def least_limits(config: EngineConfig) -> Limits:
    """Return the limits without a GPU, which are the least on GPUs: as given, else 64 sequences and
    512 tokens.
    """
    return Limits(
        config.max_num_seqs or SEQS_ON_CPUS, config.max_num_batched_tokens or BATCHED_TOKENS_ON_CPUS
    )


def matrix_tflops(gpu_names: Iterable[str]) -> int | None:
    """Return the TFLOP/s of the slowest of these GPUs; None without GPUs, or if the rate of a GPU
    is not known.
    """
    rates = [
        next((rate for part, rate in MATRIX_TFLOPS if re.search(rf"\b{part}\b", name)), None)
        for name in gpu_names
    ]
    known = [rate for rate in rates if rate is not None]
    return min(known) if known and len(known) == len(rates) else None


def with_chosen_limits(
    config: EngineConfig,
    args: ModelArgs,
    plan: PipelinePlan,
    request_for: Callable[[Limits], PlanRequest],
    tflops: int | None,
) -> PipelinePlan:
    """Return the plan for GPUs again, with limits chosen where ``config`` has none.

    ``plan`` has ``least_limits``; ``request_for`` returns the request with other limits.
    ``tflops``: the GPUs' matrix rate, None if it is not known, so that memory alone decides. With
    Mistral 7B in bfloat16 and 80 GiB of an H100 a micro-batch of 8192 tokens would take 0.21 s and
    one of 4096 tokens 0.10 s; 256 sequences have room for 1800 tokens each.
    """
    least = least_limits(config)
    if config.max_num_seqs and config.max_num_batched_tokens:
        return plan
    seconds = _seconds_per_token(config, args, plan, tflops)
    sizes = [n for n in TOKENS_ON_GPUS[:-1] if seconds is None or n * seconds <= MAX_STEP_S] + [
        TOKENS_ON_GPUS[-1]
    ]
    sizes = [config.max_num_batched_tokens] if config.max_num_batched_tokens else sizes
    numbers = [config.max_num_seqs] if config.max_num_seqs else list(SEQS_ON_GPUS)
    # First the number of sequences, with the smallest micro-batches; then the size of
    # micro-batches, with that number of sequences.
    found = next(
        filter(None, (_roomy_plan(args, request_for(Limits(n, sizes[-1]))) for n in numbers)), None
    )
    if found is None:
        found = _costless_plan(args, request_for(Limits(least.num_seqs, sizes[-1]))) or plan
    else:
        larger = (
            _roomy_plan(args, request_for(Limits(found.max_num_seqs, size))) for size in sizes[:-1]
        )
        found = next(filter(None, larger), found)
    return _with_reasons(config, found, seconds)


def _roomy_plan(args: ModelArgs, request: PlanRequest) -> PipelinePlan | None:
    """Return the plan if every sequence has pages for ``ROOM`` tokens, and the runtime takes at
    most ``MAX_RUNTIME_SHARE`` of the memory.
    """
    if not _takes_at_most(MAX_RUNTIME_SHARE, request):
        return None
    try:
        plan = make_plan(args, request)
    except TooLittleMemoryError:
        return None
    has_room = max_length_in_slots(plan) >= min(ROOM, plan.max_model_len)
    return plan if has_room and plan.max_num_seqs == request.max_num_seqs else None


def _costless_plan(args: ModelArgs, request: PlanRequest) -> PipelinePlan | None:
    """Return the plan if the runtime fits into the tenth of the memory that caches never get, so
    that it costs no pages.
    """
    return make_plan(args, request) if _takes_at_most(1 - MEMORY_SHARE, request) else None


def _takes_at_most(share: float, request: PlanRequest) -> bool:
    return all(
        budget.runtime is None or budget.runtime.total <= share * budget.memory
        for budget in request.budgets
    )


def _seconds_per_token(
    config: EngineConfig, args: ModelArgs, plan: PipelinePlan, tflops: int | None
) -> float | None:
    """Return the seconds of a prompt's token in all stages of a GPU: two operations for each
    parameter that the token uses.
    """
    if tflops is None:
        return None
    costs = layer_costs(
        args, experts_inside=not config.expert_actors, stage_times=config.stage_times
    )
    slowest = max(sum(costs[layer] for layer in stage.layers) for stage in plan.stages)
    return (
        2 * slowest * min(config.stages_per_gpu, len(plan.stages)) / (REACHED_SHARE * tflops * 1e12)
    )


def _with_reasons(config: EngineConfig, plan: PipelinePlan, seconds: float | None) -> PipelinePlan:
    """Return the plan with a reason for each limit that was chosen."""
    chosen = []
    if not config.max_num_batched_tokens:
        chosen.append(
            LimitChoice(
                "max_num_batched_tokens", plan.max_num_batched_tokens, _why_tokens(plan, seconds)
            )
        )
    if not config.max_num_seqs:
        has = (
            f"each of {plan.max_num_seqs} sequences has room for {max_length_in_slots(plan)} tokens"
        )
        is_most = plan.max_num_seqs >= MAX_SEQS_ON_GPUS
        why = (
            f"{has}, and more are never chosen"
            if is_most
            else f"{has}, and for more there is too little memory"
        )
        chosen.append(LimitChoice("max_num_seqs", plan.max_num_seqs, why))
    return replace(plan, chosen=tuple(chosen))


def _why_tokens(plan: PipelinePlan, seconds: float | None) -> str:
    """Return the reason for not choosing larger micro-batches."""
    tokens, speed = (
        plan.max_num_batched_tokens,
        "" if seconds is not None else "; the speed of the GPU is not known",
    )
    if tokens >= TOKENS_ON_GPUS[0]:
        return f"larger micro-batches are never chosen{speed}"
    if seconds is not None and tokens >= TOKENS_ON_GPUS[-1] and 2 * tokens * seconds > MAX_STEP_S:
        return (
            f"{2 * tokens} tokens would take {2 * tokens * seconds:.2g} s, and sequences that"
            " decode next to them wait as long"
        )
    return f"larger micro-batches would leave too little memory for the cache{speed}"
