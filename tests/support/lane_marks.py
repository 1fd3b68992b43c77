"""Which files a lane of ``make test`` need not import: those without the mark that all its tests have."""

from pathlib import Path

NEEDED_MARKS = {"ray": "ray", "ray and not serve": "ray", "serve": "serve"}  # by the expression of ``-m``


def names_mark(file: Path, mark: str) -> bool:
    """Return whether the file has the words that give a test this mark."""
    return f"pytest.mark.{mark}" in file.read_text(encoding="utf-8")
