"""The code of the rooms says things in the field's words: a list of others that must not return."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("proto", "workers", "router", "cluster", "k8s")
SUFFIXES = {".py", ".js", ".css", ".html", ".yaml", ".json", ".proto", ".j2", ".md"}
UNWANTED = re.compile(r"\b(whoever|nobody|told|goes on|meanwhile|beside|lest|for ever|doors?)\b", re.IGNORECASE)
KEPT = {  # a column of existing databases of batch jobs, and what SQLAlchemy makes of its name
    "router/batch/database.py": {"told"},
    "router/batch/store.py": {"told"},
    "router/batch/submissions.py": {"told"},
}


def unwanted_words(text: str, kept: set[str]) -> list[str]:
    """Return the unwanted words of a file, one line each."""
    numbered = enumerate(text.splitlines(), start=1)
    return [f"line {n}: {m[0]}" for n, line in numbered for m in UNWANTED.finditer(line) if m[0].lower() not in kept]


@pytest.mark.parametrize("room", ROOMS)
def test_the_rooms_use_the_words_of_the_field(room: str) -> None:
    files = [path for path in sorted((ROOT / room).rglob("*")) if path.suffix in SUFFIXES]
    assert files
    names = {path: str(path.relative_to(ROOT)) for path in files}
    found = {names[path]: unwanted_words(path.read_text(encoding="utf-8"), KEPT.get(names[path], set())) for path in files}
    assert not {name: words for name, words in found.items() if words}


@pytest.mark.parametrize("text", ["# Nobody waits", "the door\n", '"told"', "It goes on", "beside it", "for ever and a day"])
def test_a_planted_word_is_found(text: str) -> None:
    assert unwanted_words(text, set())


@pytest.mark.parametrize("text", ["indoors", "besides", "forever", "x.untold", "Nobody_waits"])
def test_other_words_are_no_fault(text: str) -> None:
    assert unwanted_words(text, set()) == []
