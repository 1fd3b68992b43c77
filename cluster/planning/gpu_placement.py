"""Which GPUs the stages of a pipeline get, where they are not all alike. Pure arithmetic.

Nodes with the same GPUs are of one *kind*, and a stage is tied to a kind rather than to a GPU. Which node of
the kind it gets is Ray's to say, which packs stage after stage; and so is which GPU of the node, so on a node
of unlike GPUs each counts as the smallest and slowest of them. Stages that share a GPU are neighbours, and have equal
shares of its memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.parsers import for_each_expert_actor
from tramontane.cluster.planning.hardware import Gpu, Hardware, TooFewNodesError, by_node
from tramontane.cluster.planning.planner import StageBudget
from tramontane.proto.byte_size import GIB
from tramontane.proto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GpuSlot:
    """What one stage can count on, and the nodes (Ray's ids) where it finds that; none: any node will do."""

    budget: StageBudget
    nodes: tuple[str, ...] = ()


def placement_candidates(
    config: EngineConfig, n_layers: int, hardware: Hardware, cluster: Hardware | None = None
) -> list[tuple[GpuSlot, ...]]:
    """What the stages may get, a place for each in order; ``config.max_pipelines`` pipelines share the hardware.

    ``cluster``: all that there is, where that is more.
    """
    hardware.check_threads(config.threads_per_stage)
    together = hardware.stages_per_slot(config.stages_per_gpu)
    num_stages = _num_stages(config, n_layers, hardware)
    num_places = -(-num_stages // together)
    num_all = num_places * config.max_pipelines
    if not hardware.gpus or config.local:
        share = hardware.stage_memory(num_all + config.expert_actors * config.max_pipelines)
        choices: list[tuple[GpuSlot, ...]] = [(GpuSlot(StageBudget(share)),) * num_places]
    elif num_all > len(hardware.gpus):
        raise TooFewNodesError(_too_few_gpus(config, num_stages, num_all, len(hardware.gpus)))
    else:
        choices = gpu_choices(hardware.gpus, num_places, config.max_pipelines, (cluster or hardware).gpus)
    return [_shared(_apply_overrides(places, config.gpu_memory, config.gpu_speed), num_stages, together) for places in choices]


def _too_few_gpus(config: EngineConfig, num_stages: int, num_needed: int, num_there: int) -> str:
    flag = "--max-replicas" if config.max_replicas else "--replicas"
    needed = f"{num_needed} stages need a GPU each"
    if config.stages_per_gpu > 1:
        needed = f"{num_stages * config.max_pipelines} stages, {config.stages_per_gpu} to a GPU, need {num_needed} GPUs"
    return f"{needed}, and there are {num_there}; use fewer --stages or {flag}"


def _shared(places: tuple[GpuSlot, ...], num_stages: int, together: int) -> tuple[GpuSlot, ...]:
    """Of each stage. 3 stages, 2 together, on places of 80 and 24 GiB: 40, 40 and 12 GiB."""
    return tuple(_with(place, memory=place.budget.memory // together) for place in places for _ in range(together))[:num_stages]


def partition_gpus(config: EngineConfig, hardware: Hardware) -> tuple[Hardware, Hardware]:
    """What the stages are placed on, and what the expert actors are.

    Of GPUs the experts, which are most of a model, get the roomiest. GPUs of 24, 80, 24 and 80 GiB, two expert actors: those
    of 80 are theirs. Processors and their memory both use.
    """
    num_experts = config.expert_actors * config.max_pipelines
    if not hardware.gpus or not num_experts:
        return hardware, hardware
    if len(hardware.gpus) < num_experts + config.max_pipelines:
        raise TooFewNodesError(
            f"{num_experts} expert actors and at least {config.max_pipelines} stages need a GPU each, and there are "
            f"{len(hardware.gpus)}; use fewer --expert-actors"
        )
    least = {
        here[0].node: min(gpu.memory for gpu in here) for here in by_node(hardware.gpus)
    }  # which GPU of a node is Ray's to say
    roomiest = sorted(hardware.gpus, key=lambda gpu: (-least[gpu.node], gpu.node, gpu.index))
    return replace(hardware, gpus=tuple(roomiest[num_experts:])), replace(hardware, gpus=tuple(roomiest[:num_experts]))


def expert_slots(config: EngineConfig, num_stages: int, hardware: Hardware, cluster: Hardware) -> tuple[GpuSlot, ...]:
    """Of one pipeline's expert actors, on their own share of the cluster's hardware."""
    num_actors = config.expert_actors
    if hardware.gpus:
        places = gpu_choices(hardware.gpus, num_actors, config.max_pipelines, cluster.gpus)[0]
    else:
        places = (GpuSlot(StageBudget(hardware.stage_memory((num_stages + num_actors) * config.max_pipelines))),) * num_actors
    memory = None if config.expert_memory is None else for_each_expert_actor(config.expert_memory, num_actors)
    return _apply_overrides(places, memory, None)


def gpu_choices(
    gpus: Sequence[Gpu], num_stages: int, num_pipelines: int, cluster: Sequence[Gpu] | None = None
) -> list[tuple[GpuSlot, ...]]:
    """Every way to take GPUs of the kinds; stages in order over the roomiest kind first, of equally roomy ones the fastest.

    Every pipeline gets the same number of each kind: of 3 GPUs of 80 GiB and 3 of 24 GiB two pipelines of two
    stages get [80, 24] each. Where that is too few (three stages each), or all are of one kind, each counts as
    the poorest, and stages go where there is room. One stage and both kinds: [80] or [24].

    ``cluster``: all GPUs, where these are a share. Stages that get the 24 GiB of a cluster whose 80 GiB are for experts
    are tied to those, although all of theirs are alike.
    """
    kinds = sorted(_kinds(gpus, cluster or gpus), key=lambda kind: (-kind[0].budget.memory, -kind[0].budget.speed))
    shares = [(place, count // num_pipelines) for place, count in kinds]
    if len(kinds) > 1 and sum(share for _, share in shares) >= num_stages:
        return list(_combinations(shares, num_stages))
    homes = {node for place, _ in kinds for node in place.nodes}
    is_all = homes >= {gpu.node for gpu in cluster or gpus}
    poorest = GpuSlot(StageBudget(min(place.budget.memory for place, _ in kinds)), () if is_all else tuple(sorted(homes)))
    return [(poorest,) * num_stages]


def _combinations(shares: Sequence[tuple[GpuSlot, int]], num_stages: int) -> Iterator[tuple[GpuSlot, ...]]:
    """Most of the first kind first: shares a: 2, b: 1 and two stages give (a, a), (a, b)."""
    if not num_stages:
        yield ()
        return
    if not shares:
        return
    (place, share), *others = shares
    for number in range(min(share, num_stages), -1, -1):
        for rest in _combinations(others, num_stages - number):
            yield (place,) * number + rest


def _kinds(gpus: Sequence[Gpu], cluster: Iterable[Gpu]) -> list[tuple[GpuSlot, int]]:
    """What a GPU of each of their kinds can be counted on for, where the cluster has it, and how many of them there are."""
    alike: dict[object, list[Gpu]] = {}
    for here in by_node(cluster):  # whole GiB: drivers of different versions keep different megabytes for themselves
        kind = (frozenset(gpu.name for gpu in here), round(min(gpu.memory for gpu in here) / GIB))
        alike.setdefault(kind, []).extend(here)
    counted = ((_place(kind), len(set(kind) & set(gpus))) for kind in alike.values())
    return [(place, count) for place, count in counted if count]


def _place(kind: Sequence[Gpu]) -> GpuSlot:
    room = StageBudget(min(gpu.memory for gpu in kind), min(gpu.speed for gpu in kind))
    return GpuSlot(room, tuple(sorted({gpu.node for gpu in kind})))


def _num_stages(config: EngineConfig, n_layers: int, hardware: Hardware) -> int:
    """As many as the places take, unless told. What is given for GPUs says how many of them there are."""
    together = hardware.stages_per_slot(config.stages_per_gpu)
    lists = {"gpu-memory": config.gpu_memory, "gpu-speed": config.gpu_speed}
    counts = {f"--{name}": len(given) for name, given in lists.items() if given and len(given) > 1}
    if config.stages:
        counts = {"--stages": -(-config.stages // together)} | counts
    if len(set(counts.values())) > 1:
        what = "stages" if together == 1 else "GPUs"
        said = " and ".join(f"{name} is for {count} {what}" for name, count in counts.items())
        raise ConfigError(f"{said}; give one value for all {what}, or one for each")
    if config.stages or not counts:
        return config.stages or min(hardware.default_stage_count(config.max_pipelines) * together, n_layers)
    return next(iter(counts.values())) * together


def _apply_overrides(
    places: tuple[GpuSlot, ...], memory: tuple[int, ...] | None, speed: tuple[int, ...] | None
) -> tuple[GpuSlot, ...]:
    """With what the user says of the GPUs. The largest memory gets the roomiest place, and none more than there is."""
    order = range(len(places))
    if memory is not None:
        memories = memory if len(memory) > 1 else memory * len(places)
        given_to = dict(zip(sorted(order, key=lambda place: -memories[place]), places, strict=True))
        places = tuple(_with(given_to[i], memory=min(memories[i], given_to[i].budget.memory)) for i in order)
    if speed is not None:
        speeds = speed if len(speed) > 1 else speed * len(places)
        places = tuple(_with(place, speed=given) for place, given in zip(places, speeds, strict=True))
    return places


def _with(place: GpuSlot, **changes: int) -> GpuSlot:
    return replace(place, budget=replace(place.budget, **changes))
