"""The code and its tests say things in the field's words: a list of others that must not return."""

import re
from pathlib import Path

import pytest
from unwanted_words import find_unwanted

ROOT = Path(__file__).parents[1]
FOLDERS = ("proto", "workers", "router", "cluster", "k8s", "tests")
SUFFIXES = {".py", ".js", ".css", ".html", ".yaml", ".json", ".proto", ".j2", ".md"}
BETWEEN_WORDS = re.compile(r"_|(?<=[a-z0-9])(?=[A-Z])")  # of a name: num_told, VanishingDoors
KEPT = {
    # columns of existing databases of batch jobs
    "router/batch/database.py": {"told"},
    "tests/router/batch/test_job_migration.py": {"told"},
    # words of which prompts are made
    "cluster/bench/results.py": {"house"},
    "tests/cluster/serving/test_serve_app.py": {"neighbour"},
    "tests/support/chaos_load.py": {"neighbour"},
    "tests/support/postgres.py": {"nobody"},  # a user of the system
}
# which name the words themselves
OF_THE_LIST = {"tests/support/unwanted_words.py", "tests/test_words.py", "tests/test_docs.py"}


def unwanted_words(text: str, kept: set[str]) -> list[str]:
    """Return the unwanted words of a file, one line each; names are read as the words that they
    consist of.
    """
    found = find_unwanted(BETWEEN_WORDS.sub(" ", text))
    return [f"line {number}: {word}" for number, word in found if word.lower() not in kept]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_code_uses_the_words_of_the_field(folder: str) -> None:
    files = [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    names = {
        path: name for path in files if (name := str(path.relative_to(ROOT))) not in OF_THE_LIST
    }
    assert names
    found = {
        name: unwanted_words(path.read_text(encoding="utf-8"), KEPT.get(name, set()))
        for path, name in names.items()
    }
    assert not {name: words for name, words in found.items() if words}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "text",
    [
        *(
            "# Nobody waits",
            "the door\n",
            '"told"',
            "It goes on",
            "beside it",
            "for ever and a day",
            "let colours",
        ),
        *(
            "Nobody_waits",
            "num_told = 0",
            "class VanishingDoors:",
            "test_what_goes_on",
            "_in_house(1)",
        ),
        *("it goes\non", "# the step goes\n    # on alone", "/* for\n * ever */"),
    ],
)
def test_a_planted_word_is_found(text: str) -> None:
    assert unwanted_words(text, set())


@pytest.mark.nightly
def test_the_line_of_a_planted_word_is_named() -> None:
    assert unwanted_words("x = 1\n# it goes\n# on here\n# Told", set()) == [
        "line 2: goes on",
        "line 4: Told",
    ]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "text", ["indoors", "besides", "forever", "x.untold", "household", "toldo"]
)
def test_other_words_are_no_fault(text: str) -> None:
    assert unwanted_words(text, set()) == []
