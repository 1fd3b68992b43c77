"""Which files a lane of ``make test`` need not import: those without the mark that all its tests
have.
"""

from pathlib import Path

NEEDED_MARKS = {  # by the expression of ``-m``
    "ray and not nightly": "ray",
    "ray and not serve and not nightly": "ray",
    "serve and not nightly": "serve",
    "ray and (nightly or pairwise or hypothesis or interpreted)": "ray",
}


def names_mark(file: Path, mark: str) -> bool:
    """Return whether the file has the words that give a test this mark."""
    return f"pytest.mark.{mark}" in file.read_text(encoding="utf-8")
