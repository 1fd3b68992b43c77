"""The index of decisions has every decision with its subject and status, and a status that names a
later decision is named by it.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
from decisions import COMMAND, FOLDER, INDEX, Decision, decisions, index_of


def not_named(found: Sequence[Decision], folder: Path) -> list[str]:
    """Return the decisions that supersede or extend another one, and have no link to it."""
    return [
        f"{later} does not name {each.file}"
        for each in found
        for later, _ in each.later
        if f"]({each.file})" not in (folder / later).read_text(encoding="utf-8")
    ]


def test_the_index_has_what_the_pages_say() -> None:
    assert INDEX.read_text(encoding="utf-8") == index_of(decisions()), f"run .venv/bin/{COMMAND}"


def test_numbers_are_given_once() -> None:
    numbers = [each.file[:4] for each in decisions()]
    assert len(numbers) == len(set(numbers)) > 0


def test_later_decisions_name_the_earlier_ones() -> None:
    found = decisions()
    assert any(each.later for each in found)
    assert not_named(found, FOLDER) == []


# Planted faults

OLD = (
    "# 0001. Old\n\n* Date: 2026-11-21\n* Subject: kernels\n"
    "* Status: superseded in part by [0002](0002-new.md): its\n  limits\n\n## Context\n"
)
NEW = (
    "# 0002. New\n\n* Date: 2026-11-22, extended 2026-11-23\n* Subject: attention\n"
    "* Status: accepted; changes [0001](0001-old.md)\n\n## Context\n"
)


def _folder(path: Path, old: str = OLD, new: str = NEW) -> Path:
    (path / "0001-old.md").write_text(old)
    (path / "0002-new.md").write_text(new)
    return path


def test_subjects_and_statuses_are_those_of_the_heads(tmp_path: Path) -> None:
    found = decisions(_folder(tmp_path))
    head = "| number | decision | status | date |\n|---|---|---|---|\n"
    assert index_of(found).partition("\n## ")[2] == (
        f"Attention\n\n{head}| [0002](0002-new.md) | New | accepted | 2026-11-22 |\n"
        f"\n## Kernels\n\n{head}| [0001](0001-old.md) | Old | superseded in part by"
        " [0002](0002-new.md) | 2026-11-21 |\n"
    )
    assert not_named(found, tmp_path) == []


def test_a_planted_decision_that_does_not_name_the_earlier_one_is_found(tmp_path: Path) -> None:
    folder = _folder(tmp_path, new=NEW.replace("; changes [0001](0001-old.md)", ""))
    assert not_named(decisions(folder), folder) == ["0002-new.md does not name 0001-old.md"]


@pytest.mark.parametrize(
    ("there", "planted", "why"),
    [
        ("* Subject: kernels\n", "", "no head"),
        ("# 0001", "# 0003", "no head"),
        ("2026-11-21", "yesterday", "no head"),
        ("superseded in part by", "replaced by", "neither accepted nor superseded"),
    ],
)
def test_a_planted_head_of_another_form_is_found(
    tmp_path: Path, there: str, planted: str, why: str
) -> None:
    assert there in OLD
    with pytest.raises(ValueError, match=why):
        decisions(_folder(tmp_path, OLD.replace(there, planted)))
