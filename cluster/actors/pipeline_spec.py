"""The specification of a pipeline, from which its supervisor creates it, and the names of its
actors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from tramontane.cluster.config.engine_keys import ExpertKeys, PipelineKeys
from tramontane.cluster.config.logging import LogSettings
from tramontane.cluster.ray_internals.accessors import kv_delete, kv_get, kv_put
from tramontane.proto.model_folder import WeightSource
from tramontane.proto.plan import ExpertPlan, Link, PipelinePlan, StagePlan
from tramontane.proto.wire import decode_expert_actors, encode_expert_actors
from tramontane.router.tokenization.loader import load_tokenizer
from tramontane.workers.weights.checkpoint import CheckpointDigest

# Suffixes of the names of a pipeline's actors; after the last three there is a number.
SUPERVISOR_SUFFIX, STAGE_SUFFIX, EXPERTS_SUFFIX, DRAFTS_SUFFIX = (
    "-supervisor",
    "-stage-",
    "-experts-",
    "-drafts-",
)
GPU_UNITS = 10_000  # units into which Ray divides a GPU
NODE_LABEL = "ray.io/node-id"  # Ray sets it on every node


@dataclass(frozen=True, slots=True)
class TokenPieceLoader:
    """Reader of the tokens' bytes. The last stage calls it where it runs, and only if it needs
    them.
    """

    folder: Path
    vocab_size: int

    def __call__(self) -> tuple[bytes, ...]:
        """Return the tokenizer's vocabulary; () if the folder has no tokenizer. Raises
        CheckpointError as ``load_tokenizer``.
        """
        tokenizer = load_tokenizer(self.folder, self.vocab_size)
        return tokenizer.vocabulary() if tokenizer else ()


@dataclass(frozen=True, slots=True)
class OwnerApplication:
    """The Ray Serve application that a pipeline belongs to.

    ``launched``: a process keeps it alive; when that process dies, the application is deleted.
    ``owns_serve``: Ray Serve is then shut down as well, unless it has other applications.
    """

    name: str
    launched: bool = False
    owns_serve: bool = False


@dataclass(frozen=True, slots=True)
class ExpertActorRefs:
    """A pipeline's expert actors: their names, in the order of the plan, and their link to stages.

    ``plan``: the plan with which the pipeline was created. A later plan is in the cluster's
    key-value store, where restarted actors find it. ``max_open``: micro-batches that a stage keeps
    open, so that it computes others while one waits for experts.
    """

    pipeline: str
    plan: ExpertPlan
    names: tuple[str, ...]
    link: Link
    max_open: int

    def current_plan(self) -> ExpertPlan:
        """Return the plan that the pipeline uses now."""
        value = kv_get(_plan_key(self.pipeline))
        return replace(self.plan, actors=decode_expert_actors(value)) if value else self.plan

    def store_plan(self, plan: ExpertPlan) -> None:
        """Make ``plan`` the current plan of the pipeline."""
        kv_put(_plan_key(self.pipeline), encode_expert_actors(plan.actors))


def delete_expert_plan(pipeline: str) -> None:
    """Delete the stored expert plan of a pipeline, if there is one."""
    kv_delete(_plan_key(pipeline))


def _plan_key(pipeline: str) -> str:
    return f"tramontane-expert-plan-{pipeline}"


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings of every stage actor and expert actor of a pipeline."""

    weights: WeightSource
    device: str
    threads: int
    pipeline: str = ""
    checkpoint_digest: CheckpointDigest = ()  # of the planning machine; () is not checked
    logs: LogSettings | None = None  # None leaves logging to Python


@dataclass(frozen=True, slots=True)
class DraftModelSpec:
    """A draft model: the plan of its only stage, and the location of its weights.

    ``shares_gpu``: it is in the bundle of the last stage, and so on its GPU.
    """

    plan: StagePlan
    weights: WeightSource
    checkpoint_digest: CheckpointDigest = ()
    shares_gpu: bool = False

    def __setstate__(self, state: Sequence[object]) -> None:
        """Restore a state pickled by a process of an older version, which may have fewer fields."""
        given = dict(zip((each.name for each in fields(self)), state, strict=False))
        for each in fields(self):
            object.__setattr__(self, each.name, given.get(each.name, each.default))


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """A named pipeline: its plan, and the settings of its stages."""

    name: str
    plan: PipelinePlan
    weights: WeightSource
    threads_per_stage: int
    use_gpus: bool
    # of each bundle (see ``gpu_placement``); () allows any node
    nodes: tuple[tuple[str, ...], ...] = ()
    checkpoint_digest: CheckpointDigest = ()  # of the planning machine; () is not checked
    application: OwnerApplication | None = None
    link: Link = "object-store"
    # micro-batches that a stage keeps open, if experts are on actors of their own
    expert_micro_batches: int = ExpertKeys().expert_micro_batches
    pieces: TokenPieceLoader | None = None  # of the model's tokenizer
    # to wait for free resources in the cluster
    placement_timeout_s: float = PipelineKeys().placement_timeout
    logs: LogSettings | None = None  # of each of its processes; None leaves logging to Python
    stages_per_gpu: int = 1  # they share a bundle of the placement group, and so a GPU
    draft_model: DraftModelSpec | None = None

    @property
    def num_workers(self) -> int:
        """The number of stages, expert actors and draft models."""
        num_experts = len(self.plan.experts.actors) if self.plan.experts else 0
        return len(self.plan.stages) + num_experts + (self.draft_model is not None)

    def bundle_of_stage(self, stage_id: int) -> int:
        """Return the bundle of a stage: of 5 stages, 2 per GPU, bundles 0, 0, 1, 1 and 2."""
        return stage_id // self.stages_per_gpu

    def bundle_of_experts(self, actor_id: int) -> int:
        """Return the bundle of an expert actor; these bundles follow the stages' bundles."""
        return self.bundle_of_stage(len(self.plan.stages) - 1) + 1 + actor_id

    @property
    def bundle_of_draft_model(self) -> int:
        """The bundle of the draft model: the last bundle, or the last stage's."""
        if self._draft_shares_gpu:
            return self.bundle_of_stage(len(self.plan.stages) - 1)
        return len(self.bundles) - 1

    @property
    def _draft_shares_gpu(self) -> bool:
        return self.draft_model is not None and self.draft_model.shares_gpu

    @property
    def gpu_share(self) -> float:
        """The share of a GPU for a stage, and for a draft model next to it, rounded down to Ray's
        units of 1/10,000, so that all fit: 6 per GPU get 0.1666 each.
        """
        return GPU_UNITS // (self.stages_per_gpu + self._draft_shares_gpu) / GPU_UNITS

    def describe_workers(self, num_pipelines: int = 1) -> str:
        """Return ``2 stages``, or ``2 stages and 4 expert actors``, for messages."""
        stages, experts = num_pipelines * len(self.plan.stages), self.plan.experts
        text = f"{stages} stage{'s' * (stages != 1)}" + (
            f", {self.stages_per_gpu} to a GPU" if self.stages_per_gpu > 1 else ""
        )
        text += f" and {num_pipelines * len(experts.actors)} expert actors" if experts else ""
        if self.draft_model is None:
            return text
        text += " and a draft model" + (" each" if num_pipelines > 1 else "")
        return text + (", on the last stage's GPU" if self._draft_shares_gpu else "")

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Resources of the bundles: one per GPU of stages, or per stage, then one per expert actor,
        and one for the draft model.

        Stages that share a bundle are on one node and GPU, and so is a draft model that shares it.
        """
        stages, per_gpu, shares = (
            len(self.plan.stages),
            self.stages_per_gpu,
            self._draft_shares_gpu,
        )
        sizes = [min(per_gpu, stages - first) for first in range(0, stages, per_gpu)]
        sizes[-1] += shares
        sizes += [1] * (self.num_workers - stages - shares)
        gpu: dict[str, float] = {"GPU": 1} if self.use_gpus else {}
        return [{"CPU": self.threads_per_stage * size} | gpu for size in sizes]

    @property
    def node_selectors(self) -> list[dict[str, str]]:
        """The label selector of each bundle: the nodes that it may be placed on."""
        missing = [()] * (len(self.bundles) - len(self.nodes))  # a draft model may be on any node
        return [
            {NODE_LABEL: f"in({','.join(nodes)})"} if nodes else {}
            for nodes in [*self.nodes, *missing]
        ]

    @property
    def worker_settings(self) -> WorkerSettings:
        """The settings of each stage actor and expert actor."""
        device = "cuda" if self.use_gpus else "cpu"
        return WorkerSettings(
            self.weights,
            device,
            self.threads_per_stage,
            self.name,
            self.checkpoint_digest,
            self.logs,
        )

    @property
    def draft_name(self) -> str:
        """The name of the draft model's actor."""
        return f"{self.name}{DRAFTS_SUFFIX}0"

    @property
    def supervisor_name(self) -> str:
        """The name of the supervisor's actor."""
        return f"{self.name}{SUPERVISOR_SUFFIX}"

    def stage_name(self, stage_id: int) -> str:
        """Return the name of a stage's actor."""
        return f"{self.name}{STAGE_SUFFIX}{stage_id}"

    def expert_name(self, actor_id: int) -> str:
        """Return the name of an expert actor."""
        return f"{self.name}{EXPERTS_SUFFIX}{actor_id}"

    @property
    def expert_actors(self) -> ExpertActorRefs | None:
        """The expert actors as passed to stages and expert actors; None if experts are inside the
        stages.
        """
        experts = self.plan.experts
        if experts is None:
            return None
        return ExpertActorRefs(
            self.name,
            experts,
            tuple(self.expert_name(a.actor_id) for a in experts.actors),
            self.link,
            self.expert_micro_batches,
        )
