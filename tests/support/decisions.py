"""The index of decisions, by subject and status: made of the heads of their pages.

``python tests/support/decisions.py`` writes it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "decisions"
INDEX = FOLDER / "README.md"
COMMAND = "python tests/support/decisions.py"
HEAD = """# Decisions

One page per decision: context, decision, consequences, and a head with date, subject and status.
Figures in these pages were measured for the decision; all others are in
[reports](../reports/README.md). A decision that changes gets a new page that names the old one, and
the status of the old one names the new one. `python tests/support/decisions.py` writes this index.
"""
PAGE = re.compile(
    r"# (?P<number>\d{4})\. (?P<title>.+)\n\n"
    r"\* Date: (?P<date>20\d\d-\d\d-\d\d).*\n(?:  .*\n)*"
    r"\* Subject: (?P<subject>[A-Za-z ]+)\n"
    r"\* Status: (?P<status>.*\n(?:  .*\n)*)\n"
)
LATER = re.compile(r"\b(superseded in part|superseded|extended) by \[\d{4}\]\((?P<file>[^)]+)\)")


@dataclass(frozen=True)
class Decision:
    """The head of a decision's page. ``later``: its file and what it did to this decision."""

    file: str
    title: str
    date: str
    subject: str
    later: tuple[tuple[str, str], ...]

    @classmethod
    def read(cls, file: str, text: str) -> "Decision":
        """Read the head of a page. Raises ValueError if it has not the form of a head."""
        head = PAGE.match(text)
        if head is None or not file.startswith(f"{head['number']}-"):
            raise ValueError(f"{file}: no head with number, title, date, subject and status")
        status = " ".join(head["status"].split())
        later = tuple((each["file"], each[0]) for each in LATER.finditer(status))
        if not status.startswith("accepted") and not later:
            raise ValueError(f"{file}: neither accepted nor superseded")
        return cls(file, head["title"], head["date"], head["subject"], later)

    @property
    def row(self) -> str:
        """The row of the index."""
        status = "; ".join(what for _, what in self.later) or "accepted"
        return f"| [{self.file[:4]}]({self.file}) | {self.title} | {status} | {self.date} |"


def decisions(folder: Path = FOLDER) -> list[Decision]:
    """Return all decisions by number. Raises ValueError."""
    pages = sorted(folder.glob("[0-9]*.md"))
    return [Decision.read(page.name, page.read_text(encoding="utf-8")) for page in pages]


def index_of(found: Sequence[Decision]) -> str:
    """Return the page with all decisions, by subject."""
    parts = [HEAD]
    for subject in sorted({each.subject for each in found}, key=str.lower):
        parts += [
            f"## {subject[0].upper()}{subject[1:]}\n",
            "| number | decision | status | date |",
            "|---|---|---|---|",
            *(each.row for each in found if each.subject == subject),
            "",
        ]
    return "\n".join(parts)


if __name__ == "__main__":
    INDEX.write_text(index_of(decisions()), encoding="utf-8")
