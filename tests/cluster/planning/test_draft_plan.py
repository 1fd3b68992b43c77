"""Where a draft model is placed, and what it is planned for."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import GIB, random_model, tiny_args, tiny_plan, write_checkpoint, write_tokenizer

from tramontane.cluster.actors.pipeline_spec import DraftModelSpec, PipelineSpec
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.pipeline import draft_model
from tramontane.cluster.pipeline.draft_model import plan_draft_model, validate_draft_model
from tramontane.cluster.pipeline.engine import pipeline_spec
from tramontane.cluster.planning.gpu_placement import draft_shares_gpu
from tramontane.cluster.planning.hardware import Gpu, Hardware
from tramontane.cluster.planning.plan_search import plan_pipeline, search_plan
from tramontane.cluster.planning.planner import PlanRequest, make_plan
from tramontane.proto.errors import CheckpointError, ConfigError, PlanError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.plan import PipelinePlan, SpeculativeConfig
from tramontane.proto.presets import PRESETS

ARGS = replace(tiny_args(n_layers=4, windows=(None, 8, None, 8)), vocab_size=300)
SMALL = replace(tiny_args(n_layers=2, windows=(8, None)), vocab_size=300)


def _model(folder: Path, args: object = SMALL) -> Path:
    return write_tokenizer(write_checkpoint(folder, args, random_model(args)))  # type: ignore[arg-type]


def _config(model: Path, draft: Path | str, **keys: object) -> EngineConfig:
    drafts = SpeculativeConfig(4, 0, 0, "draft_model", str(draft))
    return EngineConfig.build(None, {"model": model, "speculative_config": drafts} | keys)


def _gpus(*sizes: int) -> Hardware:
    gpus = tuple(Gpu("gpu", size * GIB, node=str(node)) for node, size in enumerate(sizes))
    return Hardware((8,) * len(sizes), (80 * GIB,) * len(sizes), gpus)


def test_a_pipeline_has_an_actor_and_a_bundle_more(tmp_path: Path) -> None:
    config = _config(
        _model(tmp_path / "large", ARGS),
        _model(tmp_path / "small"),
        stages=2,
        max_num_seqs=5,
        threads_per_stage=1,
    )
    spec = pipeline_spec(config, ARGS, Hardware(node_cpus=(8,), node_memory=(8 * GIB,)))
    assert spec.draft_model is not None
    assert (spec.num_workers, spec.bundle_of_draft_model, len(spec.bundles)) == (3, 2, 3)
    assert len(spec.node_selectors) == 3
    assert spec.describe_workers() == "2 stages and a draft model"
    plan = spec.draft_model.plan
    assert (plan.num_stages, plan.layers, plan.max_num_seqs, plan.args.vocab_size) == (
        1,
        range(2),
        5,
        300,
    )
    assert plan.cache.num_drafts == 9 + 5, "those in flight over two stages, and the next ones"
    assert all(c.num_pages >= 5 * c.ring_pages for c in plan.cache.classes)
    assert spec.draft_model.weights == tmp_path / "small"
    assert spec.draft_model.checkpoint_digest != spec.checkpoint_digest


def test_without_one_nothing_is_more() -> None:
    spec = PipelineSpec("p", tiny_plan(ARGS, 2), Path("x"), threads_per_stage=1, use_gpus=False)
    assert (spec.num_workers, len(spec.bundles), spec.describe_workers()) == (2, 2, "2 stages")
    drafting = replace(
        spec,
        draft_model=DraftModelSpec(tiny_plan(SMALL).stages[0], Path("y")),
        nodes=(("a",), ("b",)),
    )
    assert drafting.node_selectors == [{"ray.io/node-id": "in(a)"}, {"ray.io/node-id": "in(b)"}, {}]


def test_one_that_an_older_version_has_pickled_has_a_gpu_of_its_own() -> None:
    spec = DraftModelSpec(tiny_plan(SMALL).stages[0], Path("y"), (), shares_gpu=True)
    assert pickle.loads(pickle.dumps(spec)) == spec
    older = object.__new__(DraftModelSpec)
    older.__setstate__([spec.plan, spec.weights, ()])
    assert older == replace(spec, shares_gpu=False)


def test_it_has_as_many_sequences_as_it_has_memory_for(tmp_path: Path) -> None:
    config = _config(tmp_path, tmp_path)
    target = plan_pipeline(EngineConfig(max_num_seqs=64), PRESETS["mistral-7b-v0.1"], _gpus(80, 80))
    wide, narrow = (
        plan_draft_model(config, PRESETS["mistral-7b-v0.1"], target, _gpus(size, size))
        for size in (80, 24)
    )
    assert wide.max_num_seqs == 64
    assert 1 <= narrow.max_num_seqs < 64
    assert all(c.num_pages >= narrow.max_num_seqs * c.ring_pages for c in narrow.cache.classes)
    with pytest.raises(PlanError, match="the draft model of --speculative-config: "):
        plan_draft_model(config, PRESETS["mistral-7b-v0.1"], target, _gpus(8, 8))


def test_the_smallest_gpu_is_its_own(tmp_path: Path) -> None:
    config = _config(tmp_path, tmp_path)
    args = PRESETS["mistral-7b-v0.1"]
    with_drafts, without = (
        plan_pipeline(each, args, _gpus(24, 80, 24)) for each in (config, EngineConfig())
    )
    assert (len(with_drafts.stages), len(without.stages)) == (2, 3)
    assert plan_draft_model(config, args, with_drafts, _gpus(24, 80, 24)).max_num_seqs > 1
    assert [draft_shares_gpu(config, _gpus(*[24] * number)) for number in (2, 1)] == [False, True]


@pytest.mark.parametrize(
    ("keys", "sizes", "of_stages", "of_draft"),
    [
        ({}, (80,), (60,), 20),
        ({"stages_per_gpu": 2}, (80,), (30, 30), 20),
        ({"stages": 2}, (80, 40), (80, 30), 10),
        ({"stages": 3, "stages_per_gpu": 2}, (80, 80), (40, 40, 30), 20),
        ({"replicas": 2}, (80, 80, 80), (60,), 20),
        ({"gpu_memory": (40 * GIB,)}, (80,), (30,), 10),
        ({"stages": 1}, (80, 40), (80,), 40),
    ],
)
def test_it_shares_the_gpu_of_the_last_stage_where_none_is_left(
    requests: list[PlanRequest],
    keys: dict[str, object],
    sizes: tuple[int, ...],
    of_stages: tuple[int, ...],
    of_draft: int,
) -> None:
    config, hardware = _config(Path("x"), "y").model_copy(update=keys), _gpus(*sizes)
    plan, slots = search_plan(config, ARGS, hardware)
    assert [slot.budget.memory / GIB for slot in slots] == list(of_stages)
    drafting = plan_draft_model(config, SMALL, plan, hardware)
    assert [budget.memory / GIB for budget in requests[0].budgets] == [of_draft]
    assert drafting.max_num_batched_tokens == 512 < plan.stages[0].max_num_batched_tokens


def test_without_gpus_a_list_of_memories_is_for_the_stages() -> None:
    config = _config(Path("x"), "y").model_copy(update={"gpu_memory": (GIB, GIB)})
    plan, _ = search_plan(config, ARGS, Hardware((8,), (8 * GIB,)))
    assert len(plan.stages) == 2


def test_stages_and_the_draft_model_next_to_them_have_one_bundle_and_equal_shares() -> None:
    spec = PipelineSpec(
        "p", tiny_plan(ARGS, 3), Path("x"), threads_per_stage=2, use_gpus=True, stages_per_gpu=2
    )
    own, shared = (
        replace(spec, draft_model=DraftModelSpec(tiny_plan(SMALL).stages[0], Path("y"), (), shares))
        for shares in (False, True)
    )
    assert own.bundles == [{"CPU": 4, "GPU": 1}, {"CPU": 2, "GPU": 1}, {"CPU": 2, "GPU": 1}]
    assert (own.bundle_of_draft_model, own.gpu_share) == (2, 0.5)
    assert shared.bundles == [{"CPU": 4, "GPU": 1}, {"CPU": 4, "GPU": 1}]
    assert (shared.bundle_of_draft_model, shared.gpu_share) == (1, 0.3333)
    assert len(shared.node_selectors) == 2
    assert shared.describe_workers() == (
        "3 stages, 2 to a GPU and a draft model, on the last stage's GPU"
    )


def test_threads_and_memory_are_shared_with_it(tmp_path: Path) -> None:
    """Of 12 cores two stages get 6 each, and with a draft model 4."""
    hardware = Hardware(node_cpus=(12,), node_memory=(12 * GIB,))
    large, small = _model(tmp_path / "large", ARGS), _model(tmp_path / "small")
    specs = [
        pipeline_spec(each, ARGS, hardware)
        for each in (
            _config(large, small, stages=2),
            EngineConfig.build(None, {"model": large, "stages": 2}),
        )
    ]
    assert [spec.threads_per_stage for spec in specs] == [4, 6]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[PlanRequest]:
    """The requests of plans of draft models."""
    recorded: list[PlanRequest] = []

    def record(args: ModelArgs, request: PlanRequest) -> PipelinePlan:
        recorded.append(request)
        return make_plan(args, request)

    monkeypatch.setattr(draft_model, "make_plan", record)
    return recorded


@pytest.mark.parametrize(
    ("keys", "hardware", "memory"),
    [
        ({}, Hardware((12,), (12 * GIB,)), 4 * GIB),
        ({"expert_actors": 3}, Hardware((12,), (12 * GIB,)), 2 * GIB),
        ({"replicas": 2}, Hardware((12,), (12 * GIB,)), 2 * GIB),
        ({"replicas": 2}, Hardware((12, 12), (12 * GIB, 12 * GIB)), 4 * GIB),
        ({}, _gpus(24, 80, 12), 12 * GIB),
    ],
    ids=[
        "one node",
        "expert actors",
        "two pipelines",
        "two pipelines on two nodes",
        "the smallest GPU",
    ],
)
def test_its_memory_is_a_share_of_the_node_or_the_smallest_gpu(
    requests: list[PlanRequest], keys: dict[str, object], hardware: Hardware, memory: int
) -> None:
    plan_draft_model(_config(Path("x"), "y", **keys), SMALL, tiny_plan(ARGS, 2), hardware)
    assert [budget.memory for budget in requests[0].budgets] == [memory]


@pytest.mark.parametrize("of_target", [32, 4096])
def test_it_reads_no_further_than_the_large_model_or_its_own_context(
    requests: list[PlanRequest], of_target: int
) -> None:
    target = replace(tiny_plan(ARGS, 2), max_model_len=of_target)
    plan_draft_model(_config(Path("x"), "y"), SMALL, target, Hardware((8,), (8 * GIB,)))
    assert requests[0].max_model_len == min(of_target, SMALL.max_seq_len)


@pytest.mark.parametrize(("dtype", "expected"), [("auto", "bfloat16"), ("float32", "float32")])
def test_its_dtype_is_its_own_or_the_configured_one(
    requests: list[PlanRequest], dtype: str, expected: str
) -> None:
    args = replace(SMALL, dtype="bfloat16")
    plan_draft_model(
        _config(Path("x"), "y", dtype=dtype), args, tiny_plan(ARGS, 2), Hardware((8,), (8 * GIB,))
    )
    assert requests[0].dtype == expected


def test_the_class_with_the_fewest_pages_decides_about_its_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = tiny_plan(SMALL)
    first, second = planned.stages[0].cache.classes
    classes = (
        replace(first, num_pages=first.ring_pages * 7),
        replace(second, num_pages=second.ring_pages * 3 + 1),
    )
    short = replace(planned.stages[0], cache=replace(planned.stages[0].cache, classes=classes))
    monkeypatch.setattr(draft_model, "make_plan", lambda *_: replace(planned, stages=(short,)))
    for of_target, expected in ((5, 3), (2, 2)):
        target = tiny_plan(ARGS, 2, max_num_seqs=of_target)
        stage = plan_draft_model(_config(Path("x"), "y"), SMALL, target, Hardware((8,), (8 * GIB,)))
        assert stage.max_num_seqs == expected


def test_other_tokens_are_refused(tmp_path: Path) -> None:
    large, small = _model(tmp_path / "large", ARGS), _model(tmp_path / "small")
    assert validate_draft_model(_config(large, small), ARGS).n_layers == 2
    more = write_checkpoint(
        tmp_path / "more", wide := replace(SMALL, vocab_size=320), random_model(wide)
    )
    with pytest.raises(
        ConfigError, match=r"the draft model .*more has other tokens than .*large \(320 and 300\)"
    ):
        validate_draft_model(_config(large, more), ARGS)
    tokenizer = next(file for file in small.iterdir() if "token" in file.name)
    other = _model(tmp_path / "other")
    (other / tokenizer.name).write_bytes(b"")
    with pytest.raises((ConfigError, CheckpointError)):
        validate_draft_model(_config(large, other), ARGS)
    with pytest.raises(ConfigError, match="a published geometry without weights; give a folder"):
        validate_draft_model(_config(large, "ministral-3-3b"), ARGS)
    (tmp_path / "empty").mkdir()
    for name, reason in (
        ("none", "none does not exist"),
        ("empty", "neither config.json"),
        ("n" * 5000, "cannot be read"),
    ):
        with pytest.raises(
            ConfigError,
            match=rf"--speculative-config: .*{reason}.*; model has to be a downloaded checkpoint's",
        ) as raised:
            validate_draft_model(_config(large, tmp_path / name), ARGS)
        assert "--model " not in str(raised.value)
