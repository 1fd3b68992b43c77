"""Where weights come from, and what a person sees while they come, and of workers that are lost;
without Ray.
"""

import asyncio
import json
import logging
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from rich.console import Console
from tiny_models import tiny_args, tiny_plan, write_checkpoint, write_tokenizer

from tramontane.cluster.actors.stage_actor import StageHealth
from tramontane.cluster.actors.worker_actor import WorkerHealth
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.console.display import Display
from tramontane.cluster.pipeline import load_progress as loading
from tramontane.cluster.pipeline.engine import (
    model_checkpoint_digest,
    open_engine,
    pipeline_spec,
    validate_model,
)
from tramontane.cluster.pipeline.lifecycle import pipeline_prefix
from tramontane.cluster.pipeline.load_progress import LoadProgress, LossReporter, load_progress
from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.cluster.planning.hardware import Hardware
from tramontane.cluster.serving.app import application
from tramontane.cluster.serving.served_model import load_served_model
from tramontane.proto.errors import CheckpointError, ConfigError
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.presets import PRESETS
from tramontane.workers.device.numerics import Numerics
from tramontane.workers.weights.config_writer import to_hf_config

ARGS = tiny_args(n_layers=4)
PLAN = tiny_plan(ARGS, 2)
GIB = 2**30


def _config(model: Path | str, load_format: str = "dummy", **more: object) -> EngineConfig:
    return EngineConfig.build(None, {"model": model, "load_format": load_format} | more)


@pytest.fixture
def without_weights(tmp_path: Path) -> Path:
    folder = write_tokenizer(write_checkpoint(tmp_path / "model", ARGS))
    (folder / "model.safetensors").unlink()
    return folder


def test_a_profile_that_no_stage_could_record_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAMONTANE_PROFILE", "/tmp/profile:20")
    with pytest.raises(ConfigError, match="it must be FOLDER:FIRST:STEPS"):
        validate_model(_config(tmp_path / "nothing"))


# ---- random weights


def test_of_a_folder_only_what_is_next_to_the_weights_is_read(without_weights: Path) -> None:
    config = _config(without_weights)
    assert validate_model(config) == ARGS
    assert [name for name, _digest in model_checkpoint_digest(config)] == [
        "config.json",
        "tokenizer.model",
    ]
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        validate_model(_config(without_weights, "auto"))
    shutil.rmtree(without_weights)
    with pytest.raises(CheckpointError, match="does not exist"):
        model_checkpoint_digest(config)


@pytest.mark.parametrize(
    ("dtype", "found"), [("float32", "float32"), ("auto", "bfloat16"), ("bfloat16", "bfloat16")]
)
def test_in_float32_the_tensors_say_what_their_dtype_is(
    dtype: str, found: str, tmp_path: Path
) -> None:
    """The configuration says bfloat16, and they are in float32."""
    folder = write_tokenizer(write_checkpoint(tmp_path / "model", ARGS))
    (folder / "config.json").write_text(json.dumps(to_hf_config(replace(ARGS, dtype="bfloat16"))))
    config = EngineConfig.build(None, {"model": folder, "dtype": dtype})
    assert validate_model(config) == replace(ARGS, dtype=found)


def test_of_a_published_geometry_nothing_is_read() -> None:
    config = _config("ministral-8b")
    assert validate_model(config) == PRESETS["ministral-8b"]
    assert model_checkpoint_digest(config) == ()
    spec = pipeline_spec(config, validate_model(config), Hardware((8,), (200 * GIB,)), "name", ())
    assert spec.weights == RandomWeights()
    assert sum(stage.weight_bytes for stage in spec.plan.stages) > 16e9, (
        "two bytes for each of eight billion"
    )


def test_a_published_geometry_is_served_without_a_tokenizer() -> None:
    """Its name stays what it is, also for replicas in other directories."""
    config = _config("ministral-8b", replicas=2)
    model = load_served_model(config.with_absolute_paths())
    assert (model.name, model.tokenizer, model.max_model_len) == ("ministral-8b", None, 131_072)
    application(config)  # as ``serve build`` would


def test_a_published_geometry_has_no_weights_to_read() -> None:
    with pytest.raises(
        ConfigError, match="--model is ministral-8b, a published geometry without weights"
    ):
        _config("ministral-8b", "auto")


def test_a_folder_comes_before_a_geometry_of_its_name(
    without_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_weights.rename(tmp_path / "ministral-8b")
    monkeypatch.chdir(tmp_path)
    config = _config("ministral-8b")
    assert validate_model(config) == ARGS
    config = config.with_absolute_paths()
    monkeypatch.chdir("/")
    assert validate_model(config) == ARGS


def test_a_pipeline_with_random_weights_is_another_one(without_weights: Path) -> None:
    prefixes = {
        pipeline_prefix("app", _config(without_weights, load_format), ())
        for load_format in ("auto", "dummy")
    }
    assert len(prefixes) == 2


# ---- how far they are


def test_stages_that_have_not_answered_have_loaded_nothing() -> None:
    first, second = PLAN.stages
    assert load_progress(PLAN, {}) == [
        LoadProgress(stage.label, 0, stage.weight_bytes) for stage in PLAN.stages
    ]
    assert load_progress(PLAN, {"a-0-stage-1": 7}) == [
        LoadProgress("Stage 1/2 layers 0-1", 0, first.weight_bytes),
        LoadProgress("Stage 2/2 layers 2-3", 7, second.weight_bytes),
    ]


def test_stages_of_several_pipelines_are_distinguished() -> None:
    loaded = {"a-1-stage-0": 5, "a-0-stage-1": 7, "a-1-stage-1": 6}
    assert [
        (stage.label, stage.num_bytes) for stage in load_progress(PLAN, loaded, num_pipelines=3)
    ] == [
        ("pipeline 1: Stage 1/2 layers 0-1", 0),
        ("pipeline 1: Stage 2/2 layers 2-3", 7),
        ("pipeline 2: Stage 1/2 layers 0-1", 5),
        ("pipeline 2: Stage 2/2 layers 2-3", 6),
        ("pipeline 3: Stage 1/2 layers 0-1", 0),
        ("pipeline 3: Stage 2/2 layers 2-3", 0),
    ]
    assert len(load_progress(PLAN, loaded, num_pipelines=1)) == 2, (
        "one of an earlier command that is being removed is not shown"
    )


def test_stages_in_this_process_report_every_tensor() -> None:
    shown: list[list[LoadProgress]] = []
    LocalStageChain.load(
        PLAN, RandomWeights(), ["cpu"], lambda stages: shown.append([*stages])
    ).close()
    sums = [sum(stage.num_bytes for stage in stages) for stages in shown]
    assert sums == sorted(sums)
    assert len(set(sums)) > 20
    assert [stage.num_bytes for stage in shown[-1]] == [stage.weight_bytes for stage in PLAN.stages]
    assert list(dict.fromkeys(stages[0].activity for stages in shown)) == [
        "",
        "choosing kernels",
        "ready",
    ]
    assert [stage.activity for stage in shown[-1]] == ["ready", "ready"]


def _stages(*num_gib: float) -> list[LoadProgress]:
    return [
        LoadProgress(f"Stage {number}", int(n * GIB), 2 * GIB)
        for number, n in enumerate(num_gib, start=1)
    ]


def test_without_a_terminal_there_is_a_line_for_each_quarter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = Display(live=False)
    long = f"loading 2 stages, {'x' * 100}"
    display.report(long)
    for num_gib in ((0, 0), (0.5, 0), (0.6, 0.4), (0.9, 0.5), (2, 1.1), (2, 1.2), (2, 2), (2, 2)):
        display.loading(_stages(*num_gib))
    display.stop()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"{long} ...", "loaded 25% of 4 GiB ...", "loaded 75% of 4 GiB ..."]


def _then(*activities: str) -> list[LoadProgress]:
    return [
        replace(stage, activity=each) for stage, each in zip(_stages(2, 2), activities, strict=True)
    ]


def test_without_a_terminal_there_is_a_line_for_what_follows_the_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Once, and not before all stages are so far."""
    display, kernels, caches = Display(live=False), "choosing kernels", "allocating caches"
    for stages in (
        _stages(2, 1.5),
        _then(kernels, ""),
        _then(kernels, kernels),
        _then(kernels, kernels),
    ):
        display.loading(stages)
    for stages in (_then(caches, kernels), _then("ready", kernels), _then("ready", "ready")):
        display.loading(stages)
    assert capsys.readouterr().err.splitlines() == [
        "loaded 75% of 4 GiB ...",
        "loaded 4 GiB: choosing kernels ...",
        "loaded 4 GiB: allocating caches, choosing kernels ...",
        "loaded 4 GiB: choosing kernels ...",
    ]


@pytest.fixture
def display() -> Display:
    display = Display(live=False)
    display.stderr = Console(
        stderr=True, force_terminal=True, width=100, height=20, highlight=False
    )
    return display


FOREIGN = "waiting: actor [/x] has [bold]1 CPU\x1b[2J\nerror: none"  # names that others gave


def test_names_of_others_are_shown_as_they_are_but_for_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Display(live=False).report(FOREIGN)
    assert (
        capsys.readouterr().err == "waiting: actor [/x] has [bold]1 CPU\ufffd[2J error: none ...\n"
    )


def test_so_they_are_in_a_terminal(display: Display, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        display.report(FOREIGN)
    display.stop()
    assert "waiting: actor [/x] has [bold]1 CPU\ufffd[2J error: none" in capsys.readouterr().err


def test_in_a_terminal_there_is_a_bar_for_each_stage(
    display: Display, capsys: pytest.CaptureFixture[str]
) -> None:
    display.report("loading 2 stages")
    display.loading(_stages(0, 0))
    display.loading(_stages(1.5, 0.5))
    assert display._bars is not None
    display._bars.refresh()
    display.report("removing the stages")
    display.stop()
    err = capsys.readouterr().err
    for part in ("Stage 1", "1.5/2.0 GiB", "Stage 2", "0.5/2.0 GiB"):
        assert part in err
    assert err.index("removing the stages") > err.index("1.5/2.0 GiB")


def test_in_a_terminal_a_bar_says_what_follows_its_weights(
    display: Display, capsys: pytest.CaptureFixture[str]
) -> None:
    display.loading(_then("choosing kernels", ""))
    assert display._bars is not None
    display._bars.refresh()
    display.stop()
    lines = capsys.readouterr().err.splitlines()
    assert any("Stage 1" in line and "choosing kernels" in line for line in lines)
    assert not any("Stage 2" in line and "choosing" in line for line in lines)


def test_workers_that_are_not_placed_are_not_shown(
    fake_ray: "_FakeRay", monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a pipeline waits for resources, what it waits for stays on the screen."""
    polls, shown = list[Callable[[], None]](), list[list[LoadProgress]]()
    monkeypatch.setattr(
        loading, "run_periodically", lambda _interval_s, work: nullcontext(polls.append(work))
    )
    with loading.show_progress("a-0", PLAN, lambda stages: shown.append([*stages])):
        (poll,) = polls
        poll()
        assert shown == []
        fake_ray.start("a-0-stage-1")
        poll()
        fake_ray.answers[0] = replace(_stage(1, 12), bytes_loaded=7, activity="choosing kernels")
        poll()
    assert [(stages[1].num_bytes, stages[1].activity) for stages in shown] == [
        (0, ""),
        (7, "choosing kernels"),
    ]


def test_loading_in_this_process_can_be_interrupted(tmp_path: Path) -> None:
    """Between two tensors, in a thread, so that the event loop can handle Ctrl-C."""
    write_checkpoint(tmp_path / "model", ARGS)
    config = _config(tmp_path / "model", "dummy", local=True)
    seen: list[int] = []

    async def run() -> None:
        task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        assert task is not None

        def interrupt(_loading: object) -> None:
            seen.append(1)
            asyncio.run_coroutine_threadsafe(_cancel(task), loop).result()

        async with open_engine(config, show_loading=interrupt):
            raise AssertionError("it was loaded all the same")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert len(seen) == 1


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait({task})


# ---- losses


class _Observed:
    """A ``LossReporter`` of made-up answers, by a made-up clock."""

    def __init__(self) -> None:
        self.now, self.reports = 0.0, list[str]()
        self._reporter = LossReporter(self.reports.append, lambda: self.now)

    def after(self, seconds: float, *names: str, **answers: WorkerHealth | RayError) -> list[str]:
        """Return what is reported ``seconds`` later, given these workers of the pipeline a-0, and
        answers of some.
        """
        self.now += seconds
        self.reports.clear()
        by_name = {f"a-0-{key.replace('_', '-')}": answer for key, answer in answers.items()}
        self._reporter.observe([f"a-0-{name}" for name in names], by_name)
        return list(self.reports)


BOTH = ("stage-0", "stage-1")


def _stage(
    number: int, pid: int, epoch: int = 7, sampled_epoch: int = 7, is_loaded: bool = True
) -> StageHealth:
    return StageHealth(
        *(f"stage {number + 1}/2", pid, "0123abcd456789", 0, 10, 10, 0.0, epoch, "router", {}, {}),
        sampled_epoch=sampled_epoch,
        numerics=Numerics() if is_loaded else None,
    )


def _new(number: int, pid: int, is_loaded: bool = True) -> StageHealth:
    """A stage that has its weights and is not fenced yet, in a new process."""
    return _stage(number, pid, epoch=-1, sampled_epoch=-1, is_loaded=is_loaded)


RESTARTING = ActorUnavailableError(
    "The actor is temporarily unavailable: IOError: The actor is restarting.", b"a" * 16
)
DEAD = ActorDiedError()
DEAD.error_msg = (
    "The actor died.\n\tip: 10.0.0.1\nThe actor is dead because its worker process has died:"
    " (1) ..."
)
UNREACHABLE = ActorUnavailableError(
    "The actor is temporarily unavailable: RpcError: RPC error: Socket closed", b"a" * 16
)


@pytest.mark.parametrize(
    ("error", "cause"),
    [(RESTARTING, "has ended"), (DEAD, "has ended"), (UNREACHABLE, "cannot be reached")],
)
def test_the_cause_of_a_loss_is_a_short_sentence_and_rays_text_is_for_debugging(
    error: RayError, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    observed = _Observed()
    observed.after(0, *BOTH, stage_1=_stage(1, 12))
    with caplog.at_level(logging.DEBUG):
        assert observed.after(1, *BOTH, stage_1=error) == [
            "pipeline a-0 has lost stage 2/2, which gets a new process: process 12 on node"
            f" 0123abcd {cause}"
        ]
    [(_, level, text)] = caplog.record_tuples
    assert (level, text) == (logging.DEBUG, f"a-0-stage-1 was lost: {error}")


def test_a_lost_stage_is_reported_once_and_again_with_the_first_token() -> None:
    """Not when it has a process with all of its weights, which chooses kernels and records graphs
    then.
    """
    observed, death = _Observed(), RESTARTING
    assert observed.after(0, *BOTH, stage_0=_stage(0, 11), stage_1=_stage(1, 12)) == []
    assert observed.after(1, *BOTH, stage_0=_stage(0, 11), stage_1=death) == [
        "pipeline a-0 has lost stage 2/2, which gets a new process: process 12 on node 0123abcd has"
        " ended"
    ]
    assert observed.after(1, *BOTH, stage_1=death) == []
    assert (
        observed.after(1, *BOTH, stage_0=_stage(0, 11), stage_1=_new(1, 13, is_loaded=False)) == []
    ), "it loads"
    assert observed.after(1.25, *BOTH, stage_1=_new(1, 13)) == [
        "pipeline a-0 has new processes for all that it lost, 3.2 s after the loss"
    ]
    assert observed.after(1, *BOTH, stage_0=_stage(0, 11), stage_1=_new(1, 13)) == []
    assert observed.after(1, *BOTH, stage_0=_stage(0, 11, 8), stage_1=_stage(1, 13, 8, -1)) == [], (
        "it is fenced"
    )
    assert observed.after(9.5, *BOTH, stage_1=_stage(1, 13, 8, 8)) == [
        "pipeline a-0 runs again: replaced after 3.2 s, first token after 14.8 s"
    ]
    assert observed.after(1, *BOTH, stage_0=_stage(0, 11, 8), stage_1=_stage(1, 13, 8, 8)) == []


def test_what_is_back_between_two_polls_is_reported_in_one_line() -> None:
    observed = _Observed()
    observed.after(0, *BOTH, stage_0=_stage(0, 11), stage_1=_stage(1, 12))
    lost, again = observed.after(1, *BOTH, stage_0=_stage(0, 11, 8), stage_1=_stage(1, 13, 8, 8))
    assert lost.startswith("pipeline a-0 has lost stage 2/2")
    assert again == "pipeline a-0 runs again: replaced after 0.0 s, first token after 0.0 s"
    both = observed.after(1, *BOTH, stage_1=_stage(1, 14, 9, 9), stage_0=_stage(0, 15, 9))
    assert both[2:] == ["pipeline a-0 runs again: replaced after 0.0 s, first token after 0.0 s"]


def test_tokens_that_a_stage_had_sampled_before_the_loss_do_not_count() -> None:
    """Here of the last stage, whose process stays: the epoch tells."""
    observed, last = _Observed(), _stage(1, 12)
    observed.after(0, *BOTH, stage_0=_stage(0, 11), stage_1=last)
    assert len(observed.after(1, *BOTH, stage_0=DEAD, stage_1=last)) == 1
    assert observed.after(1, *BOTH, stage_0=_new(0, 14), stage_1=last) == [
        "pipeline a-0 has new processes for all that it lost, 1.0 s after the loss"
    ]
    assert observed.after(1, *BOTH, stage_0=_stage(0, 14, 8, -1), stage_1=_stage(1, 12, 8)) == [], (
        "fenced, no token yet"
    )
    assert observed.after(1, *BOTH, stage_1=_stage(1, 12, 8, 8)) == [
        "pipeline a-0 runs again: replaced after 1.0 s, first token after 3.0 s"
    ]


def test_a_second_loss_before_all_are_replaced_belongs_to_the_first() -> None:
    """One that comes later is another one, however long ago the last token was: the pipeline may
    have been idle.
    """
    observed = _Observed()
    observed.after(0, *BOTH, stage_0=_stage(0, 11), stage_1=_stage(1, 12))
    observed.after(1, *BOTH, stage_0=DEAD)
    (lost,) = observed.after(1, *BOTH, stage_1=DEAD)
    assert "process 12" in lost
    assert observed.after(1, *BOTH, stage_0=_new(0, 14)) == []
    assert observed.after(1, *BOTH, stage_1=_new(1, 15)) == [
        "pipeline a-0 has new processes for all that it lost, 3.0 s after the loss"
    ]
    (lost,) = observed.after(500, *BOTH, stage_0=_new(0, 16, is_loaded=False))
    assert "process 14" in lost
    observed.after(1, *BOTH, stage_0=_new(0, 16))
    assert observed.after(1, *BOTH, stage_1=_stage(1, 15, 8, 8)) == [
        "pipeline a-0 runs again: replaced after 1.0 s, first token after 2.0 s"
    ]


def test_processes_that_could_not_be_reached_for_a_while_are_not_new() -> None:
    """They go on in the same epoch."""
    observed = _Observed()
    observed.after(0, *BOTH, stage_0=_stage(0, 11), stage_1=_stage(1, 12))
    assert len(observed.after(1, *BOTH, stage_1=UNREACHABLE)) == 1
    assert observed.after(2, *BOTH, stage_1=_stage(1, 12)) == [
        "all processes of pipeline a-0 can be reached again, 2.0 s after the loss"
    ]
    assert observed.after(1, *BOTH, stage_0=_stage(0, 11), stage_1=_stage(1, 12)) == []


def test_a_new_process_is_a_loss_too_and_a_pipeline_runs_again_with_its_last_stage() -> None:
    observed = _Observed()
    assert observed.after(0, *BOTH, stage_0=_stage(0, 11), stage_1=_stage(1, 12)) == []
    assert observed.after(
        1, *BOTH, stage_0=RayError("gone"), stage_1=_new(1, 13, is_loaded=False)
    ) == [
        (
            "pipeline a-0 has lost stage 1/2, which gets a new process: process 11 on node 0123abcd"
            " cannot be reached"
        ),
        (
            "pipeline a-0 has lost stage 2/2, which gets a new process: process 12 on node 0123abcd"
            " has ended"
        ),
    ]
    assert observed.after(1, *BOTH, stage_1=_new(1, 13)) == []
    assert observed.after(1, *BOTH, stage_0=_new(0, 14)) == [
        "pipeline a-0 has new processes for all that it lost, 2.0 s after the loss"
    ]
    assert observed.after(1, *BOTH, stage_1=_stage(1, 13, 0, 0)) == [
        "pipeline a-0 runs again: replaced after 2.0 s, first token after 3.0 s"
    ], "the first epoch of another router"


def test_an_expert_actor_is_replaced_once_it_is_loaded() -> None:
    observed, names = _Observed(), (*BOTH, "experts-0")
    expert = WorkerHealth("expert actor 1/1", 15, "node", 0, 10, 10, 0.0, numerics=Numerics())
    last = _stage(1, 12)
    assert observed.after(0, *names, stage_1=last, experts_0=expert) == []
    assert len(observed.after(1, *names, stage_1=last, experts_0=RayError("gone"))) == 1
    assert observed.after(1, *names, experts_0=replace(expert, pid=16, numerics=None)) == []
    assert observed.after(1, *names, stage_1=last, experts_0=replace(expert, pid=16)) == [
        "pipeline a-0 has new processes for all that it lost, 2.0 s after the loss"
    ]
    assert observed.after(1, *names, stage_1=_stage(1, 12, 8, 8)) == [
        "pipeline a-0 runs again: replaced after 2.0 s, first token after 3.0 s"
    ]


def test_workers_that_are_removed_with_their_pipeline_are_not_reported() -> None:
    """As autoscaling does it. An error of one that never answered is that of a pipeline which is
    starting.
    """
    observed = _Observed()
    assert observed.after(0, *BOTH, stage_0=RayError("it is starting")) == []
    assert observed.after(0, *BOTH, stage_0=_stage(0, 11), stage_1=_stage(1, 12)) == []
    assert observed.after(1, *BOTH, stage_1=RayError("gone")) != []
    assert observed.after(1) == []
    assert observed.after(1, *BOTH, stage_0=_stage(0, 21), stage_1=_stage(1, 22)) == [], (
        "the next one of this name is new"
    )


def test_losses_of_a_removed_pipeline_are_forgotten_though_another_name_begins_like_its_own() -> (
    None
):
    """The pipeline a-1 is removed while a-10 stays, and a later a-1 is a new one."""
    reports = list[str]()
    reporter, other = LossReporter(reports.append, lambda: 0.0), {"a-10-stage-0": _stage(0, 99)}
    reporter.observe(["a-1-stage-0", *other], {"a-1-stage-0": _stage(0, 11), **other})
    reporter.observe(["a-1-stage-0", *other], {"a-1-stage-0": RayError("gone")})
    assert len(reports) == 1
    reporter.observe([*other], {})
    reporter.observe(["a-1-stage-0", *other], {"a-1-stage-0": _stage(0, 21)})
    assert len(reports) == 1


class _FakeRay:
    """Named actors, and calls of theirs that are answered when a test says so. A call's reference
    is its number.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[int, WorkerHealth | RayError] = {}
        self.names = list[str]()
        self.calls = list[tuple[str, str]]()  # name of the actor and life of the handle
        self.lives = dict[str, str]()
        self.waits = list[tuple[list[int], float]]()
        self.look_up_error: Exception | None = None
        monkeypatch.setattr(loading, "ray", self)
        monkeypatch.setattr(loading, "actor_names", lambda _pattern: list(self.names))

    def start(self, *names: str, life: str = "first") -> None:
        self.names = [*dict.fromkeys([*self.names, *names])]
        self.lives.update(dict.fromkeys(names, life))

    def get_actor(self, name: str, _namespace: str) -> object:
        if self.look_up_error is not None:
            raise self.look_up_error
        life = self.lives[name]

        def call() -> int:
            self.calls.append((name, life))
            return len(self.calls) - 1

        return SimpleNamespace(
            health=SimpleNamespace(options=lambda **_: SimpleNamespace(remote=call))
        )

    def wait(
        self, refs: list[int], num_returns: int, timeout: float
    ) -> tuple[list[int], list[int]]:
        assert num_returns == max(len(refs), 1)
        self.waits.append((refs, timeout))
        return [ref for ref in refs if ref in self.answers], [
            ref for ref in refs if ref not in self.answers
        ]

    def get(self, ref: int) -> WorkerHealth:
        answer = self.answers[ref]
        if isinstance(answer, RayError):
            raise answer
        return answer


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> _FakeRay:
    return _FakeRay(monkeypatch)


def test_all_workers_are_waited_for_together_and_none_is_called_again_before_it_has_answered(
    fake_ray: _FakeRay,
) -> None:
    poller = loading._WorkerPoller(".*")
    assert poller.poll() == ([], {})
    fake_ray.start("a-0-stage-0", "a-0-stage-1")
    fake_ray.answers[1] = _stage(1, 12)
    assert poller.poll(5.0) == (fake_ray.names, {"a-0-stage-1": _stage(1, 12)})
    assert fake_ray.waits[1:] == [([0, 1], 5.0)]
    assert poller.poll() == (fake_ray.names, {})
    assert [name for name, _ in fake_ray.calls] == ["a-0-stage-0", "a-0-stage-1", "a-0-stage-1"]


def test_a_worker_that_gets_the_name_of_a_dead_one_is_polled(fake_ray: _FakeRay) -> None:
    fake_ray.start("a-0-stage-0")
    poller, death = loading._WorkerPoller(".*"), RayError("gone")
    fake_ray.answers |= {0: death, 1: _stage(0, 21), 2: _stage(0, 21)}
    assert poller.poll()[1] == {"a-0-stage-0": death}
    fake_ray.start("a-0-stage-0", life="second")
    assert poller.poll()[1] == {"a-0-stage-0": _stage(0, 21)}
    poller.poll()
    assert [life for _, life in fake_ray.calls] == ["first", "second", "second"]


@pytest.mark.parametrize(
    "error", [ValueError("Failed to look up actor"), RayError("the head node is away")]
)
def test_failed_polls_are_survived_and_losses_after_them_are_reported(
    fake_ray: _FakeRay, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The first one fails in the command itself, the others would end the thread."""
    polls, reports = list[Callable[[], None]](), list[str]()
    monkeypatch.setattr(
        loading, "run_periodically", lambda _interval_s, work: nullcontext(polls.append(work))
    )
    fake_ray.start("a-0-stage-0")
    fake_ray.look_up_error = error
    with loading.report_losses("a-0", reports.append):
        (poll,) = polls
        poll()
        fake_ray.look_up_error = None
        fake_ray.answers |= {0: _stage(0, 11), 1: RayError("gone")}
        poll()
        assert reports == []
        poll()
        assert reports == [
            "pipeline a-0 has lost stage 1/2, which gets a new process: process 11 on node 0123abcd"
            " cannot be reached"
        ]
