"""The figures of ``tramontane simulate`` in docs/reports are the ones that it prints: it uses no
clock.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tramontane.cluster.cli.main import app

PAGE = Path(__file__).parents[3] / "docs" / "reports" / "benchmarks-scheduling.md"
TITLES = {"tramontane": "Tramontane"}  # the others have the same names there


def _section() -> str:
    found = re.search(
        r"^## Scheduling policies\n(.*?)^#", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert found is not None
    return found[1]


def _policies(*flags: str) -> list[dict[str, Any]]:
    outcome = CliRunner().invoke(app, ["simulate", "--json", *flags])
    assert outcome.exit_code == 0, outcome.output
    policies: list[dict[str, Any]] = json.loads(outcome.stdout)["policies"]
    return policies


def _row(policy: dict[str, Any]) -> str:
    """Return the policy's row of the table, in Markdown."""
    first_token, itl_50, itl_99 = policy["ttft_s"][0], policy["itl_s"][0], policy["itl_s"][2]
    cells = (
        TITLES.get(policy["name"], policy["name"]),
        f"{policy['bubble']:.1%}".replace("%", " %"),
        f"{policy['tokens_per_s']:,.0f}",
        f"{first_token:.2f} s",
        f"{1000 * itl_50:.1f} and {1000 * itl_99:.0f} ms",
    )
    return f"| {' | '.join(cells)} |"


@pytest.mark.nightly
def test_the_table_of_policies_is_as_computed() -> None:
    """300 requests, all at once, eight stages: the defaults."""
    header, line, *rows = [line for line in _section().splitlines() if line.startswith("|")]
    assert header == "| policy | bubble | tokens/s | TTFT, median | ITL, 50 % and 99 % |"
    assert set(line) <= set("|-")
    assert rows == [_row(policy) for policy in _policies()]


@pytest.mark.nightly
def test_the_figures_at_forty_requests_per_second_are_as_computed() -> None:
    ours, *others = _policies("--request-rate", "40")
    *_, gllm = others
    assert gllm["name"] == "token throttling (gLLM)"
    ttft, *theirs = [f"{1000 * policy['ttft_s'][0]:.0f}" for policy in (ours, *others)]
    text = " ".join(_section().split())
    assert (
        f"the median TTFT is {ttft} ms for Tramontane and {theirs[0]}, {theirs[1]} and {theirs[2]}"
        " ms for the others" in text
    )
    assert (
        f"ends the median request sooner ({gllm['e2e_s'][0]:.2f} s against"
        f" {ours['e2e_s'][0]:.2f} s)" in text
    )


@pytest.mark.parametrize(
    "change",
    [{"bubble": 0.018}, {"tokens_per_s": 28663.0}, {"name": "x"}, {"itl_s": [0.0084, 0.0, 0.018]}],
)
def test_a_row_with_another_figure_is_another_row(change: dict[str, Any]) -> None:
    policy = {
        "name": "tramontane",
        "bubble": 0.017,
        "tokens_per_s": 28662.0,
        "ttft_s": [1.02],
        "itl_s": [0.0083, 0.0, 0.018],
    }
    assert _row(policy) == "| Tramontane | 1.7 % | 28,662 | 1.02 s | 8.3 and 18 ms |"
    assert _row(policy | change) != _row(policy)
