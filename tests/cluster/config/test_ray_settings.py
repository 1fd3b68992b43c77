"""The settings of Ray that pages tell the user to type are those that the commands set."""

import json
import re
from pathlib import Path

import pytest

from tramontane.cluster.config.ray_settings import RAY_SETTINGS

DOCS = Path(__file__).parents[3] / "docs"
TYPED = re.compile(r"--system-config='([^']*)'")


@pytest.mark.parametrize("page", ["deploy/by-hand.md", "operations.md"])
def test_the_head_node_of_a_page_has_the_settings_of_ours(page: str) -> None:
    (typed,) = TYPED.findall((DOCS / page).read_text(encoding="utf-8"))
    assert json.loads(typed) == RAY_SETTINGS


def test_no_other_page_has_settings() -> None:
    pages = {
        str(path.relative_to(DOCS))
        for path in DOCS.rglob("*.md")
        if TYPED.search(path.read_text(encoding="utf-8"))
    }
    assert pages == {"deploy/by-hand.md", "operations.md"}
