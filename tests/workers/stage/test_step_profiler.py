"""Profiles of served steps: which steps are recorded, and what is left in files."""

import json
import logging
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_args, tiny_plan

from tramontane.proto.errors import ConfigError
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import NO_DECODES, Chunk, DecodeColumns, MicroBatch, StepResult
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.stage.step_profile import VARIABLE
from tramontane.workers.stage.step_profiler import StepProfiler

PLAN = tiny_plan(tiny_args(n_layers=2), 1, max_num_seqs=2).stages[0]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


def _tokens(num_steps: int, recorded: list[int] | None = None) -> list[int]:
    """A new worker computes a prompt of three tokens, and decodes that follow it. ``recorded`` gets
    the steps that were.
    """
    worker = StageWorker.load(PLAN, RandomWeights())
    worker.fence(0)
    pages = tuple((0, 1) for _ in PLAN.cache.classes)
    chunk = Chunk(0, 0, (5, 6, 7), pages, GREEDY, needs_sample=True, num_prompt=3)
    tokens: list[int] = []
    for step in range(num_steps):
        decodes = DecodeColumns((0,), (2 + step,), (tokens[-1],)) if step else NO_DECODES
        result = worker.step(MicroBatch(0, step, () if step else (chunk,), decodes=decodes), None)
        assert isinstance(result, StepResult)
        tokens += result.token_ids
        if recorded is not None and worker.profiler is not None and worker.profiler.is_recording:
            recorded.append(step)
    return tokens


def _num_recorded(folder: Path) -> int:
    """Count the steps in the trace: each embeds its tokens once."""
    events = json.loads((folder / "stage-0.json").read_text())["traceEvents"]
    return sum(event.get("name") == "aten::embedding" for event in events)


@pytest.mark.parametrize(("first", "num_steps"), [(0, 1), (1, 3), (3, 2)])
def test_as_many_steps_are_recorded(
    first: int, num_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _tokens(7)
    monkeypatch.setenv(VARIABLE, f"{tmp_path / 'new' / 'a:b'}:{first}:{num_steps}")
    assert _tokens(7, steps := []) == expected, "the profile changes no token"
    assert steps == [*range(first, first + num_steps)]
    folder = tmp_path / "new" / "a:b"
    assert sorted(file.name for file in folder.iterdir()) == ["stage-0.json", "stage-0.txt"]
    assert _num_recorded(folder) == num_steps
    assert "aten::embedding" in (folder / "stage-0.txt").read_text()


def test_nothing_is_written_before_the_last_step_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{tmp_path}:2:5")
    _tokens(7)
    assert not [*tmp_path.iterdir()]


def test_a_stage_serves_on_where_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (file := tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, f"{file}:1:1")
    with caplog.at_level(logging.WARNING):
        assert len(_tokens(5)) == 5
    assert "cannot write its profile to" in caplog.text


@pytest.mark.parametrize(
    "text", ["/tmp/x", "/tmp/x:1", ":1:2", "/tmp/x:-1:2", "/tmp/x:1:0", "/tmp/x:a:2", "/tmp/x:1:2:"]
)
def test_a_malformed_variable_is_one_line(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(
        ConfigError, match=r"it must be FOLDER:FIRST:STEPS, such as /tmp/profile:200:20"
    ):
        StepProfiler.from_environment(PLAN, torch.device("cpu"))


def test_a_stage_that_could_not_record_it_reads_no_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, "/tmp/x:1")
    with pytest.raises(ConfigError, match=VARIABLE):
        StageWorker.load(PLAN, tmp_path / "nothing")


def test_without_the_variable_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert StepProfiler.from_environment(PLAN, torch.device("cpu")) is None
