"""``tramontane simulate``: what it prints, and that its model of real stages is about right."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tramontane.cluster.bench.calibration import hop_seconds
from tramontane.cluster.bench.comparison import all_policies, summarize
from tramontane.cluster.bench.simulator import SimRequest, SimTrace
from tramontane.cluster.cli.main import app
from tramontane.cluster.cli.simulate import default_cost_model
from tramontane.proto.errors import ConfigError
from tramontane.proto.step import StageTiming
from tramontane.router.scheduling.policy import BatchWork

SMALL = [
    "simulate",
    "--stages",
    "3",
    "--num-requests",
    "20",
    "--input-len",
    "60",
    "--output-len",
    "10",
]
POLICIES = [
    "tramontane",
    "full budget (vLLM)",
    "uniform budget (Sarathi-Serve)",
    "token throttling (gLLM)",
]


def _simulated(*flags: str) -> Any:
    outcome = CliRunner().invoke(app, [*SMALL, *flags, "--json"])
    assert outcome.exit_code == 0, outcome.output
    return json.loads(outcome.stdout)


def test_every_policy_has_a_row_and_the_same_seed_says_the_same() -> None:
    once, again, other = _simulated(), _simulated(), _simulated("--seed", "1")
    assert [row["name"] for row in once["policies"]] == POLICIES
    assert once == again
    assert once != other
    assert all(0 <= row["bubble"] < 1 and row["tokens_per_s"] > 0 for row in once["policies"])
    assert "calibration" not in once


def test_a_file_gives_what_no_flag_does(tmp_path: Path) -> None:
    (file := tmp_path / "tramontane.yaml").write_text(
        "stages: 9\nmax_num_seqs: 4\ndtype: float32\n"
    )
    assert _simulated("--config", str(file)) == _simulated("--max-num-seqs", "4") != _simulated()


def test_people_get_a_table_that_says_where_its_costs_are_from() -> None:
    outcome = CliRunner().invoke(app, SMALL, env={"COLUMNS": "200"})
    assert outcome.exit_code == 0
    assert all(name in outcome.stdout for name in POLICIES)
    assert "costs: assumed" in outcome.stdout


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture_is_written(tmp_path: Path, suffix: str) -> None:
    picture = tmp_path / f"bubbles{suffix}"
    _simulated("--plot", str(picture))
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--plot", "bubbles.what"], "--plot bubbles.what must end in one of"),
        (["--model", "somewhere"], "--model is for --calibrate"),
    ],
)
def test_what_cannot_be_done_is_said(flags: list[str], message: str) -> None:
    outcome = CliRunner().invoke(app, [*SMALL, *flags])
    assert isinstance(outcome.exception, ConfigError)
    assert message in str(outcome.exception)


def test_the_assumed_costs_are_as_documented() -> None:
    assert default_cost_model(2)(BatchWork(0, 0, 256, 256_000)) == pytest.approx(
        [0.4e-3 + 1.024e-3 + 1.536e-3] * 2
    )


def test_the_published_policies_have_their_published_budgets() -> None:
    assert [candidate.max_tokens for candidate in all_policies(1024)] == [1024, 2048, 512, 8192]


def test_a_summary_leaves_out_the_time_after_the_backlog() -> None:
    """One stage: busy from 0 to 8 of the first ten seconds, then hardly; requests waited until
    10.
    """
    timings = tuple(
        (StageTiming(0, start, busy, 1),) for start, busy in ((0.0, 1.0), (1.0, 7.0), (19.0, 1.0))
    )
    trace = SimTrace(
        (SimRequest(0.0, 5, 2), SimRequest(1.0, 4, 1)),
        ((4.0, 20.0), (3.0,)),
        timings,
        backlog_until=10.0,
    )
    reported = summarize("x", trace)
    assert reported.bubble == pytest.approx(1 - 7 / 9)
    assert reported.tokens_per_s == 12 / 20
    assert (reported.ttft_s[0], reported.itl_s, reported.e2e_s[2]) == (
        3.0,
        (16.0,) * 3,
        pytest.approx(20 - 0.01 * 18),
    )


def test_hops_are_counted_where_the_next_stage_was_waiting() -> None:
    steps = [
        (BatchWork(), (StageTiming(0, 0.0, 1.0, 1), StageTiming(1, 1.25, 3.0, 1))),  # waited: 0.25
        # was busy until 4.25
        (BatchWork(), (StageTiming(0, 1.0, 1.0, 1), StageTiming(1, 4.25, 1.0, 1))),
        (BatchWork(), (StageTiming(0, 9.0, 1.0, 1), StageTiming(1, 10.5, 1.0, 1))),  # waited: 0.5
    ]
    assert hop_seconds(steps) == 0.375


@pytest.mark.nightly
@pytest.mark.ray
def test_two_real_stages_are_measured_and_the_error_is_reported() -> None:
    reported = _simulated("--calibrate")["calibration"]
    assert reported["stages"] == 2
    assert 0 < reported["hop_s"] < 0.1
    assert set(reported["errors"]) == {"tokens_per_s", "busy_share", "median_ttft", "median_itl"}
