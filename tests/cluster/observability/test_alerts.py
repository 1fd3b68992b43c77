"""What the alerts say of series that a test makes up. Prometheus's own tool judges them."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from dashboard_queries import ALERTS, alerts

PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(
    PROMTOOL is None, reason="there is no promtool here; apt-get install prometheus"
)

NO_PIPELINE, FAILS, REFUSES = "TramontaneNoPipeline", "TramontaneFails", "TramontaneRefuses"
RUNS = {"ray_tramontane_pipeline_running{pipeline='p'}": "1x30"}
# Two a minute. A counter that has counted nothing is not exported, so what never happened has no
# series.
FAILED = {
    "ray_tramontane_request_success_total{kind='interactive',finished_reason='error'}": "0+2x30"
}
ANSWERED = {
    "ray_tramontane_request_success_total{kind='interactive',finished_reason='stop'}": "0+2x30"
}
REFUSED = {"ray_tramontane_requests_refused_total{kind='interactive',reason='full'}": "0+2x30"}


def test_the_rules_are_rules() -> None:
    assert f"{len(alerts())} rules found" in _promtool("check", str(ALERTS))


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        (RUNS | ANSWERED, set()),
        (RUNS, set()),
        ({}, {NO_PIPELINE}),  # the router died with its host, or never got a pipeline
        ({"ray_tramontane_pipeline_running{pipeline='p'}": "0x30"}, {NO_PIPELINE}),
        (RUNS | FAILED, {FAILS}),
        (RUNS | ANSWERED | FAILED, {FAILS}),
        (RUNS | REFUSED, {REFUSES}),
        (RUNS | ANSWERED | REFUSED, {REFUSES}),
    ],
)
def test_an_outage_without_series_is_an_outage(
    series: dict[str, str], expected: set[str], tmp_path: Path
) -> None:
    """Worked example: 2 of 4 requests a minute fail, so 1 - 2/4 = 50 % are errors; where all fail,
    1 - 0/2 = 100 %.
    """
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)',
                    "eval_time": "20m",
                    "exp_samples": [{"value": int(name in expected)}],
                }
                for name in (NO_PIPELINE, FAILS, REFUSES)
            ],
        }
    ]
    (tmp_path / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": tests})
    )
    _promtool("test", str(tmp_path / "tests.yaml"))


def _promtool(verb: str, file: str) -> str:
    assert PROMTOOL
    done = subprocess.run(
        [PROMTOOL, verb, "rules", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
