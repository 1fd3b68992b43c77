"""Placement of a pipeline's stages on GPUs of different kinds. Pure arithmetic.

Nodes with the same GPUs are of one *kind*, and a stage is tied to a kind rather than to a GPU. Ray
chooses the node of that kind, packing stage after stage, and the GPU of the node; so on a node of
unlike GPUs each GPU counts as the smallest and slowest one. Stages that share a GPU are neighbors,
and have equal shares of the GPU's memory. A draft model has a GPU to itself, or a part of the last
stage's GPU where no other GPU is left.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.key import for_each_expert_actor
from tramontane.cluster.planning.hardware import Gpu, Hardware, TooFewNodesError, by_node
from tramontane.cluster.planning.planner import StageBudget
from tramontane.proto.errors import ConfigError
from tramontane.proto.units import GIB

DRAFT_PART = 4  # a draft model that shares a GPU gets 1 / DRAFT_PART of its memory


@dataclass(frozen=True, slots=True)
class GpuSlot:
    """The budget of one stage, and the nodes (Ray's ids) that offer it; no nodes mean any node."""

    budget: StageBudget
    nodes: tuple[str, ...] = ()


def placement_candidates(
    config: EngineConfig, max_stages: int, hardware: Hardware, cluster: Hardware | None = None
) -> list[tuple[GpuSlot, ...]]:
    """Return the candidates for the slots of a pipeline's stages, in order.

    ``config.max_pipelines`` pipelines share the hardware. ``cluster``: the whole cluster, if
    ``hardware`` is a part of it. Raises TooFewNodesError if there are too few GPUs, PlanError or
    ConfigError.
    """
    hardware.check_threads(config.threads_per_stage)
    shares = draft_shares_gpu(config, cluster or hardware)
    config = _without_draft_values(config, cluster or hardware)
    per_slot = hardware.stages_per_slot(config.stages_per_gpu)
    num_stages = _num_stages(config, max_stages, hardware)
    num_slots = -(-num_stages // per_slot)
    num_all = num_slots * config.max_pipelines
    if not hardware.gpus or config.local:
        num_others = config.expert_actors + config.num_draft_models
        share = hardware.stage_memory(num_all + num_others * config.max_pipelines)
        candidates: list[tuple[GpuSlot, ...]] = [(GpuSlot(StageBudget(share)),) * num_slots]
    elif num_all > len(hardware.gpus):
        raise TooFewNodesError(_too_few_gpus(config, num_stages, num_all, len(hardware.gpus)))
    else:
        candidates = gpu_choices(
            hardware.gpus, num_slots, config.max_pipelines, (cluster or hardware).gpus
        )
    candidates = [
        _apply_overrides(slots, config.gpu_memory, config.gpu_speed) for slots in candidates
    ]
    if shares:
        candidates = [_without_draft_part(slots) for slots in candidates]
    return [_divide_slots(slots, num_stages, per_slot) for slots in candidates]


def _too_few_gpus(
    config: EngineConfig, num_stages: int, num_needed: int, num_available: int
) -> str:
    flag = "--max-replicas" if config.max_replicas else "--replicas"
    needed = f"{num_needed} stages need a GPU each"
    if config.stages_per_gpu > 1:
        needed = (
            f"{num_stages * config.max_pipelines} stages, {config.stages_per_gpu} to a GPU, need"
            f" {num_needed} GPUs"
        )
    return f"{needed}, and there are {num_available}; use fewer --stages or {flag}"


def _divide_slots(
    slots: tuple[GpuSlot, ...], num_stages: int, per_slot: int
) -> tuple[GpuSlot, ...]:
    """Return a slot per stage: 3 stages, 2 per GPU, on GPUs of 80 and 24 GiB get 40, 40 and 12
    GiB.
    """
    shares = (
        _with_budget(slot, memory=slot.budget.memory // per_slot)
        for slot in slots
        for _ in range(per_slot)
    )
    return tuple(shares)[:num_stages]


def partition_gpus(config: EngineConfig, hardware: Hardware) -> tuple[Hardware, Hardware]:
    """Divide the hardware between stages and expert actors, and return both parts.

    Experts, which are most of a model, get the largest GPUs: of GPUs of 24, 80, 24 and 80 GiB two
    expert actors get the GPUs of 80 GiB. CPUs and their memory are in both parts. Raises
    TooFewNodesError.
    """
    num_experts = config.expert_actors * config.max_pipelines
    if not hardware.gpus or not num_experts:
        return hardware, hardware
    if len(hardware.gpus) < num_experts + config.max_pipelines:
        raise TooFewNodesError(
            f"{num_experts} expert actors and at least {config.max_pipelines} stages need a GPU"
            f" each, and there are {len(hardware.gpus)}; use fewer --expert-actors"
        )
    # Ray chooses the GPU of a node, so that each GPU counts as the smallest GPU of its node.
    smallest = {here[0].node: min(gpu.memory for gpu in here) for here in by_node(hardware.gpus)}
    ordered = sorted(hardware.gpus, key=lambda gpu: (-smallest[gpu.node], gpu.node, gpu.index))
    return replace(hardware, gpus=tuple(ordered[num_experts:])), replace(
        hardware, gpus=tuple(ordered[:num_experts])
    )


def draft_shares_gpu(config: EngineConfig, hardware: Hardware) -> bool:
    """Return whether each pipeline's draft model shares the GPU of the pipeline's last stage,
    because there are too few GPUs: one GPU, or two GPUs and ``--stages 2``.
    """
    if not hardware.gpus or not config.num_draft_models or config.local:
        return False
    lists = (each for each in (config.gpu_memory, config.gpu_speed) if each and len(each) > 1)
    if config.stages:
        num_slots = -(-config.stages // hardware.stages_per_slot(config.stages_per_gpu))
    else:  # a list has a value for the draft model's GPU too
        num_slots = max(map(len, lists), default=2) - 1
    num_own = num_slots + config.expert_actors + config.num_draft_models
    return num_own * config.max_pipelines > len(hardware.gpus)


def _without_draft_values(config: EngineConfig, hardware: Hardware) -> EngineConfig:
    """Return the settings with lists of values for the stages' GPUs only.

    A draft model with a GPU of its own has the least memory of a list that has one value more, and
    the speed in the same place: memories of 24, 80 and 24 GiB are 24 and 80 for the stages.
    """
    has_own = config.num_draft_models and hardware.gpus and not config.local
    if not has_own or draft_shares_gpu(config, hardware):
        return config
    values = {"gpu_memory": config.gpu_memory, "gpu_speed": config.gpu_speed}
    lists = {name: given for name, given in values.items() if given is not None and len(given) > 1}
    if config.stages:
        num_slots = -(-config.stages // hardware.stages_per_slot(config.stages_per_gpu))
        lists = {name: given for name, given in lists.items() if len(given) == num_slots + 1}
    if not lists:
        return config
    memories = lists.get("gpu_memory") or tuple(gpu.memory for gpu in hardware.gpus)
    num_values = min(map(len, (memories, *lists.values())))
    dropped = min(range(num_values), key=lambda gpu: (memories[gpu], -gpu))
    return config.model_copy(
        update={name: given[:dropped] + given[dropped + 1 :] for name, given in lists.items()}
    )


def without_draft_gpus(config: EngineConfig, hardware: Hardware) -> Hardware:
    """Return the hardware without the smallest GPUs, which are reserved for draft models."""
    num_drafting = config.num_draft_models * config.max_pipelines
    if not num_drafting or not hardware.gpus or config.local:
        return hardware
    if draft_shares_gpu(config, hardware):
        return hardware
    ordered = sorted(hardware.gpus, key=lambda gpu: (-gpu.memory, gpu.node, gpu.index))
    return replace(hardware, gpus=tuple(ordered[: len(ordered) - num_drafting]))


def _without_draft_part(slots: tuple[GpuSlot, ...]) -> tuple[GpuSlot, ...]:
    """Return the slots without a draft model's part of the last slot: of 80 and 24 GiB, 80 and 18
    GiB.
    """
    *others, last = slots
    return (*others, _with_budget(last, memory=last.budget.memory * (DRAFT_PART - 1) // DRAFT_PART))


def draft_memory(config: EngineConfig, hardware: Hardware) -> int:
    """Return the bytes of memory of a draft model on any GPU that it may get."""
    smallest = min((*(gpu.memory for gpu in hardware.gpus), *(config.gpu_memory or ())))
    return smallest // (DRAFT_PART if draft_shares_gpu(config, hardware) else 1)


def expert_slots(
    config: EngineConfig, num_stages: int, hardware: Hardware, cluster: Hardware
) -> tuple[GpuSlot, ...]:
    """Return the slots of one pipeline's expert actors, on their part of the cluster's hardware."""
    num_actors = config.expert_actors
    if hardware.gpus:
        slots = gpu_choices(hardware.gpus, num_actors, config.max_pipelines, cluster.gpus)[0]
    else:
        slots = (
            GpuSlot(
                StageBudget(
                    hardware.stage_memory(
                        (num_stages + num_actors + config.num_draft_models) * config.max_pipelines
                    )
                )
            ),
        ) * num_actors
    memory = (
        None
        if config.expert_memory is None
        else for_each_expert_actor(config.expert_memory, num_actors)
    )
    return _apply_overrides(slots, memory, None)


def gpu_choices(
    gpus: Sequence[Gpu], num_stages: int, num_pipelines: int, cluster: Sequence[Gpu] | None = None
) -> list[tuple[GpuSlot, ...]]:
    """Return every combination of GPU kinds; the first stages get the largest kind, and of equally
    large kinds the fastest.

    Every pipeline gets the same number of GPUs of each kind: of 3 GPUs of 80 GiB and 3 of 24 GiB
    two pipelines of two stages get [80, 24] each. If these are too few (three stages each), or all
    GPUs are of one kind, each GPU counts as the smallest one, and Ray places stages on any GPU. One
    stage and both kinds: [80] or [24].

    ``cluster``: all GPUs, if ``gpus`` are a part of them. Stages on the GPUs of 24 GiB of a cluster
    whose GPUs of 80 GiB are for experts are tied to the nodes of 24 GiB, although all GPUs of these
    nodes are alike.
    """
    kinds = sorted(
        _kinds(gpus, cluster or gpus),
        key=lambda kind: (-kind[0].budget.memory, -kind[0].budget.speed),
    )
    shares = [(slot, count // num_pipelines) for slot, count in kinds]
    if len(kinds) > 1 and sum(share for _, share in shares) >= num_stages:
        return list(_combinations(shares, num_stages))
    own_nodes = {node for slot, _ in kinds for node in slot.nodes}
    is_all = own_nodes >= {gpu.node for gpu in cluster or gpus}
    smallest = GpuSlot(
        StageBudget(min(slot.budget.memory for slot, _ in kinds)),
        () if is_all else tuple(sorted(own_nodes)),
    )
    return [(smallest,) * num_stages]


def _combinations(
    shares: Sequence[tuple[GpuSlot, int]], num_stages: int
) -> Iterator[tuple[GpuSlot, ...]]:
    """Yield combinations, first the ones with most GPUs of the first kind: shares a: 2, b: 1 and
    two stages give (a, a), (a, b).
    """
    if not num_stages:
        yield ()
        return
    if not shares:
        return
    (slot, share), *others = shares
    for number in range(min(share, num_stages), -1, -1):
        for rest in _combinations(others, num_stages - number):
            yield (slot,) * number + rest


def _kinds(gpus: Sequence[Gpu], cluster: Iterable[Gpu]) -> list[tuple[GpuSlot, int]]:
    """Return the slot of each kind of GPU, with the nodes of the cluster that offer this kind, and
    the number of ``gpus`` of this kind.
    """
    alike: dict[object, list[Gpu]] = {}
    # whole GiB: drivers of different versions reserve different numbers of megabytes
    for here in by_node(cluster):
        kind = (frozenset(gpu.name for gpu in here), round(min(gpu.memory for gpu in here) / GIB))
        alike.setdefault(kind, []).extend(here)
    counted = ((_slot_of_kind(kind), len(set(kind) & set(gpus))) for kind in alike.values())
    return [(slot, count) for slot, count in counted if count]


def _slot_of_kind(kind: Sequence[Gpu]) -> GpuSlot:
    budget = StageBudget(min(gpu.memory for gpu in kind), min(gpu.speed or 1 for gpu in kind))
    return GpuSlot(budget, tuple(sorted({gpu.node for gpu in kind})))


def _num_stages(config: EngineConfig, max_stages: int, hardware: Hardware) -> int:
    """Return ``--stages``, else the number of stages by the lists of values for GPUs, else the
    number that fills all GPUs.
    """
    per_slot = hardware.stages_per_slot(config.stages_per_gpu)
    lists = {"gpu-memory": config.gpu_memory, "gpu-speed": config.gpu_speed}
    counts = {f"--{name}": len(given) for name, given in lists.items() if given and len(given) > 1}
    if config.stages:
        counts = {"--stages": -(-config.stages // per_slot)} | counts
    if len(set(counts.values())) > 1:
        what = "stages" if per_slot == 1 else "GPUs"
        conflict = " and ".join(f"{name} is for {count} {what}" for name, count in counts.items())
        raise ConfigError(f"{conflict}; give one value for all {what}, or one for each")
    if config.stages or not counts:
        return config.stages or min(
            hardware.default_stage_count(config.max_pipelines) * per_slot, max_stages
        )
    return next(iter(counts.values())) * per_slot


def _apply_overrides(
    slots: tuple[GpuSlot, ...], memory: tuple[int, ...] | None, speed: tuple[int, ...] | None
) -> tuple[GpuSlot, ...]:
    """Apply the user's memory and speeds: the largest memory goes to the first slot, and no slot
    gets more memory than it has.
    """
    order = range(len(slots))
    if memory is not None:
        memories = memory if len(memory) > 1 else memory * len(slots)
        by_index = dict(zip(sorted(order, key=lambda slot: -memories[slot]), slots, strict=True))
        slots = tuple(
            _with_budget(by_index[i], memory=min(memories[i], by_index[i].budget.memory))
            for i in order
        )
    if speed is not None:
        speeds = speed if len(speed) > 1 else speed * len(slots)
        slots = tuple(
            _with_budget(slot, speed=given) for slot, given in zip(slots, speeds, strict=True)
        )
    return slots


def stage_speeds(
    config: EngineConfig, hardware: Hardware, devices: Sequence[str]
) -> tuple[int | None, ...]:
    """Return the relative speeds of stages on devices of these names: as configured, else as
    measured, else None.

    Three stages, 2 per GPU, with ``--gpu-speed 1,3``: 1, 1, 3.
    """
    if (given := _without_draft_values(config, hardware).gpu_speed) is not None:
        per_slot = hardware.stages_per_slot(config.stages_per_gpu)
        return tuple(
            given[stage // per_slot if len(given) > 1 else 0] for stage in range(len(devices))
        )
    measured = {gpu.name: gpu.speed for gpu in hardware.gpus}
    return tuple(measured.get(device) for device in devices)


def _with_budget(slot: GpuSlot, memory: int | None = None, speed: int | None = None) -> GpuSlot:
    budget = slot.budget
    changed = replace(
        budget,
        memory=budget.memory if memory is None else memory,
        speed=budget.speed if speed is None else speed,
    )
    return replace(slot, budget=changed)
