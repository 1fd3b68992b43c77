"""What a pipeline is made of: everything that its supervisor needs to know, and what its actors are called.

What the last stage needs of the tokenizer: the text that every token stands for, read where it works, and when it must.
"""

from dataclasses import dataclass
from pathlib import Path

from tramontane.cluster.actors.expert_plan_store import load_plan
from tramontane.cluster.config.logging import LogSettings
from tramontane.proto.model_folder import WeightSource
from tramontane.proto.plan import ExpertPlan, Link, PipelinePlan
from tramontane.router.tokenization.loader import load_tokenizer
from tramontane.workers.weights.fingerprint import Fingerprint


@dataclass(frozen=True, slots=True)
class TokenPieceLoader:
    """Of a checkpoint's tokenizer; of a folder without one, nothing."""

    folder: Path
    vocab_size: int

    def __call__(self) -> tuple[bytes, ...]:
        """Raises CheckpointError for what ``load_tokenizer`` raises it for."""
        tokenizer = load_tokenizer(self.folder, self.vocab_size)
        return tokenizer.vocabulary() if tokenizer else ()


SUPERVISOR_SUFFIX, STAGE_SUFFIX, EXPERTS_SUFFIX = (
    "-supervisor",
    "-stage-",
    "-experts-",
)  # after the pipeline's name; a number follows the last two
UNITS = 10_000  # that Ray divides a GPU into
NODE_LABEL = "ray.io/node-id"  # which Ray puts on every node


@dataclass(frozen=True, slots=True)
class OwnerApplication:
    """The Ray Serve application that a pipeline belongs to.

    ``launched``: a process keeps it alive; when that has gone, the application goes.
    ``owns_serve``: then Ray Serve goes as well, unless it has other applications.
    """

    name: str
    launched: bool = False
    owns_serve: bool = False


@dataclass(frozen=True, slots=True)
class ExpertActorRefs:
    """The actors that hold a pipeline's experts: their names, in the order of the plan, and how a stage reaches them.

    ``plan`` is the one that the pipeline was made with (see ``expert_record``). ``max_open``: micro-batches that the stage
    keeps open, so that it has something to do while one waits for experts.
    """

    pipeline: str
    plan: ExpertPlan
    names: tuple[str, ...]
    link: Link
    max_open: int

    def current_plan(self) -> ExpertPlan:
        return load_plan(self.pipeline, self.plan)


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """A named pipeline: what to run and what each stage gets."""

    name: str
    plan: PipelinePlan
    weights: WeightSource
    threads_per_stage: int
    use_gpus: bool
    nodes: tuple[tuple[str, ...], ...] = ()  # of each bundle, where the plan wants it (see ``places``); () is anywhere
    fingerprint: Fingerprint = ()  # of the checkpoint where the plan was made; () is not checked
    application: OwnerApplication | None = None
    link: Link = "object-store"
    ping_pong: int = 1  # micro-batches that a stage keeps open, where experts are on actors of their own
    pieces: TokenPieceLoader | None = None  # of the model's tokenizer
    placement_timeout_s: float = 60.0  # for which it waits until the cluster has room
    logs: LogSettings | None = None  # as every process of it writes its log; None leaves that to Python
    stages_per_gpu: int = 1  # that share a bundle of the placement group, and so a GPU

    @property
    def num_workers(self) -> int:
        """Stages and expert actors."""
        return len(self.plan.stages) + (len(self.plan.experts.actors) if self.plan.experts else 0)

    def bundle_of_stage(self, stage_id: int) -> int:
        """5 stages, 2 together: bundles 0, 0, 1, 1 and 2."""
        return stage_id // self.stages_per_gpu

    def bundle_of_experts(self, actor_id: int) -> int:
        return self.bundle_of_stage(len(self.plan.stages) - 1) + 1 + actor_id

    @property
    def gpu_share(self) -> float:
        """Of a stage, in Ray's units of 1/10,000, rounded down so that all find room: 6 together get 0.1666 each."""
        return UNITS // self.stages_per_gpu / UNITS

    def describe_workers(self, num_pipelines: int = 1) -> str:
        """``2 stages``, or ``2 stages and 4 expert actors``."""
        stages, experts = num_pipelines * len(self.plan.stages), self.plan.experts
        text = f"{stages} stage{'s' * (stages != 1)}" + (f", {self.stages_per_gpu} to a GPU" if self.stages_per_gpu > 1 else "")
        return text + (f" and {num_pipelines * len(experts.actors)} expert actors" if experts else "")

    @property
    def bundles(self) -> list[dict[str, float]]:
        """One per GPU of stages, or per stage, then one per expert actor. What shares a bundle stays on one node and GPU."""
        stages, together = len(self.plan.stages), self.stages_per_gpu
        sizes = [min(together, stages - first) for first in range(0, stages, together)] + [1] * (self.num_workers - stages)
        gpu: dict[str, float] = {"GPU": 1} if self.use_gpus else {}
        return [{"CPU": self.threads_per_stage * size} | gpu for size in sizes]

    @property
    def node_selectors(self) -> list[dict[str, str]]:
        """Which nodes each bundle may go to, in Ray's words."""
        return [{NODE_LABEL: f"in({','.join(nodes)})"} if nodes else {} for nodes in self.nodes or [()] * len(self.bundles)]

    @property
    def supervisor_name(self) -> str:
        return f"{self.name}{SUPERVISOR_SUFFIX}"

    def stage_name(self, stage_id: int) -> str:
        return f"{self.name}{STAGE_SUFFIX}{stage_id}"

    def expert_name(self, actor_id: int) -> str:
        return f"{self.name}{EXPERTS_SUFFIX}{actor_id}"

    @property
    def expert_actors(self) -> ExpertActorRefs | None:
        """As every stage has to know them."""
        experts = self.plan.experts
        if experts is None:
            return None
        return ExpertActorRefs(
            self.name, experts, tuple(self.expert_name(a.actor_id) for a in experts.actors), self.link, self.ping_pong
        )
