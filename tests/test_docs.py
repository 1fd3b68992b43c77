"""Checks of the documentation: sizes, links, paths, commands and words, each with a planted fault
that it must find.
"""

import ast
import re
import shlex
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest
from typer.main import get_command
from unwanted_words import PARTS, WORDS, find_unwanted

from tramontane.cluster.cli.main import app
from tramontane.cluster.config.engine_config import OTHER_NAMES
from tramontane.cluster.console.terminal import as_flag

ROOT = Path(__file__).parents[1]
MAX_LINES, MAX_BYTES, MAX_WIDTH = 250, 16 * 2**10, 120
ABSENT = {"proto/__init__.py"}  # is named because it must not be there
FOLDERS = ("cluster", "workers", "router", "proto", "tests", "k8s", "docs")
SHELLS = {"", "sh", "bash", "shell", "console"}

FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)")
HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(.*?)(?:[ \t]+#+)?[ \t]*$")
CODE = re.compile(r"(`+)(.+?)\1(?!`)")
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:[ \t]*<?([^\s>]+)>?", re.MULTILINE)
ONLY_LINKS = re.compile(rf"^\s*(?:[*+-]|\d+\.)?\s*(?:!?{LINK.pattern}[\s,;.|&·]*)+$")
ABSOLUTE = re.compile(r"^(?:[a-z][a-z0-9+.-]*:|//)", re.IGNORECASE)
PLACEHOLDER = re.compile(r"NNNN|[<>$]|\.\.\.")
OF_OTHER_PROGRAMS = {  # docker build, docker run, ray start
    *("--build-arg", "--target"),
    *(
        "--cpus",
        "--gpus",
        "--memory",
        "--read-only",
        "--restart",
        "--shm-size",
        "--tmpfs",
        "--user",
    ),
    "--num-cpus",
}
SEPARATORS = {"|", "||", "&&", ";", "&"}
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
MEASURED = re.compile(
    rf"{DATE.pattern}|\bcommits? [0-9a-f]{{7}}\b|(?<![*\w])recorded 20", re.IGNORECASE
)
# also the abbreviated name of a commit, and a date
NUMBER = re.compile(r"20\d\d-\d\d-\d\d|\b[0-9a-f]{7,8}\b|\d(?:[\d,.]*\d)?")
UNKNOWN = "instructions not recorded"  # the words for it, and no others
INSTRUCTIONS = re.compile(
    rf"\b(?:AVX2|AVX-512|avx512_\w+|NEON|SVE|NVIDIA [A-Z]+\d+|modelled)\b|\b{UNKNOWN}\b",
    re.IGNORECASE,
)


class Line(NamedTuple):
    """One line of a page: ``language`` is that of the code fence around it, None outside of
    fences.
    """

    number: int
    text: str
    language: str | None


def lines_of(text: str) -> Iterator[Line]:
    """Every line but those that open or close a code fence."""
    fence, language = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
                fence = ""
            else:
                yield Line(number, line, language)
        elif mark:
            fence, language = mark[1], mark[2].lower()
        else:
            yield Line(number, line, None)


def prose_of(text: str) -> Iterator[Line]:
    return (line for line in lines_of(text) if line.language is None)


def code_spans(text: str) -> Iterator[tuple[int, str]]:
    return (
        (line.number, span[2].strip())
        for line in prose_of(text)
        for span in CODE.finditer(line.text)
    )


def _shown(text: str) -> str:
    """Prose with its line breaks; in the place of code there is nothing."""
    return "\n".join("" if line is None else CODE.sub("``", line) for line in _by_number(text))


def _by_number(text: str) -> list[str | None]:
    """Every line of the page, None for those in code fences and at their ends."""
    prose = {line.number: line.text for line in prose_of(text)}
    return [prose.get(number) for number in range(1, len(text.splitlines()) + 1)]


def _line_at(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


# Sizes


def size_problems(text: str, max_bytes: int | None = None) -> list[str]:
    num_lines, num_bytes = len(text.splitlines()), len(text.encode())
    problems = [f"{num_lines} lines; at most {MAX_LINES}"] if num_lines > MAX_LINES else []
    return problems + (
        [f"{num_bytes} bytes; at most {max_bytes}"]
        if max_bytes is not None and num_bytes > max_bytes
        else []
    )


def wide_lines(text: str) -> list[str]:
    """Prose only: tables, code fences, and lines that hold nothing but links may be wider."""
    return [
        f"line {line.number}: {len(line.text)} characters; at most {MAX_WIDTH}"
        for line in prose_of(text)
        if len(line.text) > MAX_WIDTH
        and not line.text.lstrip().startswith("|")
        and not _is_only_links(line.text)
    ]


def _is_only_links(line: str) -> bool:
    return bool(ONLY_LINKS.match(line) or REFERENCE.match(line))


# Links


def slugs_of(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings: ``## What's new?`` twice is ``whats-new``
    and ``whats-new-1``.
    """
    slugs: dict[str, int] = {}
    for line in prose_of(text):
        if heading := HEADING.match(line.text):
            slug = _slug(heading[1])
            times = slugs.get(slug, 0)
            slugs[slug] = times + 1
            if times:
                slugs[f"{slug}-{times}"] = 1
    return set(slugs)


def _slug(heading: str) -> str:
    """Of its text, without the marks of code, links and emphasis."""
    text = LINK.sub(lambda link: link[0][link[0].index("[") + 1 : link[0].rindex("](")], heading)
    text = re.sub(r"(?<!\w)[*_]{1,3}(\S(?:.*?\S)?)[*_]{1,3}(?!\w)", r"\1", text.replace("`", ""))
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def links_of(text: str) -> Iterator[tuple[int, str]]:
    """Also those whose text goes over two lines."""
    shown = _shown(text)
    for reference in REFERENCE.finditer(shown):
        yield _line_at(shown, reference.start()), reference[1]
    for link in LINK.finditer(shown):
        yield _line_at(shown, link.start()), link[1]
        # a picture that is itself a link
        for inner in LINK.finditer(link[0][1 : link[0].rindex("](")]):
            yield _line_at(shown, link.start()), inner[1]


def broken_links(page: Path, text: str, root: Path) -> list[str]:
    return [
        f"line {number}: {why}"
        for number, link in links_of(text)
        if (why := _why_broken(page, text, link, root))
    ]


def _why_broken(page: Path, text: str, link: str, root: Path) -> str | None:
    if ABSOLUTE.match(link):
        return None
    path, _, anchor = unquote(link).partition("#")
    target = (page.parent / path).resolve() if path else page
    if path and not (target.is_relative_to(root.resolve()) and target.exists()):
        return f"{link} leads to no file of the repository"
    if not anchor or (path and target.suffix != ".md"):
        return None
    return (
        None
        if anchor in slugs_of(_read(target) if path else text)
        else f"{link} leads to no heading"
    )


def unlinked(pages: Collection[Path], indexes: Mapping[Path, str]) -> list[Path]:
    """Pages that none of the indexes links to."""
    linked = {
        (index.parent / link.partition("#")[0]).resolve()
        for index, text in indexes.items()
        for _, link in links_of(text)
        if not ABSOLUTE.match(link)
    }
    return sorted(page for page in pages if page.resolve() not in linked and page not in indexes)


# Paths, targets and commands


def missing_paths(text: str, root: Path) -> list[str]:
    """Paths in backticks that begin with a folder of the repository; ``*`` and ``{a,b}`` stand for
    several.
    """
    found = []
    for number, span in code_spans(text):
        path = span.split()[0].rstrip(",;:") if span.split() else ""
        is_ours = (
            path.partition("/")[0] in FOLDERS
            and "/" in path
            and path not in ABSENT
            and not PLACEHOLDER.search(path)
        )
        if is_ours:
            found += [
                f"line {number}: {each} does not exist"
                for each in _alternatives(path)
                if not _exists(root, each)
            ]
    return found


def _alternatives(path: str) -> list[str]:
    """``a/{b,c}.py``: ``a/b.py`` and ``a/c.py``."""
    if not (braces := re.search(r"\{([^{}]*,[^{}]*)\}", path)):
        return [path]
    each = [
        path[: braces.start()] + part.strip() + path[braces.end() :]
        for part in braces[1].split(",")
    ]
    return [alternative for one in each for alternative in _alternatives(one)]


def _exists(root: Path, path: str) -> bool:
    plain = re.sub(r":\d+(-\d+)?$", "", path).partition("#")[0]
    return any(root.glob(plain)) if "*" in plain else (root / plain).exists()


def unknown_targets(text: str, targets: Collection[str]) -> list[str]:
    """Of every ``make TARGET`` in backticks or in a code fence of a shell."""
    commands = [
        *code_spans(text),
        *((line.number, line.text) for line in lines_of(text) if line.language in SHELLS),
    ]
    return [
        f"line {number}: make {word}: no such target"
        for number, command in commands
        for run in re.findall(r"(?:^|[;&|$]|sudo )\s*make((?: +[\w=./-]+)+)", command)
        for word in run.split()
        if "=" not in word
        and not word.startswith("-")
        and not word.isupper()
        and word not in targets
    ]


def targets_of(makefile: str) -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))


# click's, of which typer has its own
def wrong_commands(text: str, root_command: Any) -> list[str]:
    """``tramontane COMMAND --flag`` in code fences of shells: commands and flags that the program
    does not have.
    """
    found = []
    for line in _shell_lines(text):
        try:
            words = _words(line.text)
        except ValueError as error:
            if line.language:  # else it may be a drawing
                found.append(f"line {line.number}: {error}")
        else:
            found += [
                f"line {line.number}: {why}"
                for run in _runs(words)
                for why in _why_wrong(run, root_command)
            ]
    return found


def _shell_lines(text: str) -> Iterator[Line]:
    """That name the program; a line that ends in a backslash goes with the next. Of a console what
    follows ``$``.
    """
    begun = ""
    for line in lines_of(text):
        if line.language not in SHELLS:
            continue
        whole, begun = begun + line.text, ""
        if whole.endswith("\\"):
            begun = whole[:-1]
        elif "tramontane" in whole and (
            line.language != "console" or whole.lstrip().startswith("$ ")
        ):
            yield Line(line.number, whole.lstrip().removeprefix("$ "), line.language)


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>()")
    lexer.whitespace_split = True
    return list(lexer)


def _runs(words: Sequence[str]) -> Iterator[list[str]]:
    """The arguments of each run of the program: a command of the line itself, one behind ``--``, or
    one within quotes.
    """
    begins, run = True, None
    for word in words:
        if run is None and " " in word and "tramontane " in word:
            yield from _runs(_words(word))
        if word in SEPARATORS or set(word) <= set("<>()"):
            if run is not None:
                yield run
            begins, run = word in SEPARATORS or word == "(", None
        elif run is not None:
            run.append(word)
        elif begins and (word == "tramontane" or word.endswith("/bin/tramontane")):
            run = []
        else:
            begins = word == "--" or re.fullmatch(r"[A-Z_]+=.*", word) is not None
    if run is not None:
        yield run


def _why_wrong(arguments: Sequence[str], command: Any) -> Iterator[str]:
    name = "tramontane"
    for argument in arguments:
        word = argument.partition("=")[0]
        if argument == "--":
            return
        if word.startswith("-") and not re.fullmatch(r"-\d*", word):
            flags = {
                flag
                for parameter in command.params
                for flag in (*parameter.opts, *parameter.secondary_opts)
            }
            if word not in flags | {"--help"}:
                yield f"{name} has no {word}"
        elif (
            (commands := getattr(command, "commands", None))
            and not argument.isupper()
            and argument != "..."
        ):
            if argument not in commands:
                yield f"{name} has no command {argument}"
                return
            name, command = f"{name} {argument}", commands[argument]


def flags_of(command: Any) -> set[str]:
    """All flags of a program and its commands, and vLLM's names of them."""
    own = {
        flag
        for parameter in command.params
        for flag in (*parameter.opts, *parameter.secondary_opts)
    } | set(map(as_flag, OTHER_NAMES))
    return own.union({"--help"}, *map(flags_of, getattr(command, "commands", {}).values()))


def unknown_flags(text: str, root_command: Any, others: Collection[str] = ()) -> list[str]:
    """Flags in backticks that neither the program nor, as ``others``, a benchmark has; with a
    command, that it does not have.

    ``ray start --head`` and other programs with arguments are not judged.
    """
    flags, found = flags_of(root_command).union(others), []
    for number, span in code_spans(text):
        words = span.split()
        if words[:1] == ["tramontane"]:
            with suppress(ValueError):  # a quote within a quote
                found += [
                    f"line {number}: {why}"
                    for run in _runs(_words(span))
                    for why in _why_wrong(run, root_command)
                ]
        elif span.startswith("--"):
            names = re.findall(
                r"(?<![\w-])--[a-z][\w-]*", "" if PLACEHOLDER.search(words[0]) else span
            )
            found += [f"line {number}: there is no {name}" for name in names if name not in flags]
    return found


def flags_of_scripts(root: Path) -> set[str]:
    """The flags of our benchmarks, and those of other programs that the pages name alone."""
    scripts = [
        *root.glob("tests/*.py"),
        *root.glob("tests/bench/*.py"),
        *root.glob("tests/support/*.py"),
    ]
    declared = {
        flag
        for path in scripts
        for declared_here in (r"add_argument\(\s*\"(--[\w-]+)\"", r"[\s{]\"(--[\w-]+)\":")
        for flag in re.findall(declared_here, _read(path))
    }
    return declared | OF_OTHER_PROGRAMS


def missing_files(docstring: str, root: Path) -> list[str]:
    """Paths of our modules in a docstring that do not exist."""
    paths = re.findall(rf"(?<![\w/])(?:{'|'.join(FOLDERS)})/[\w/]+\.\w+", docstring)
    return [path for path in paths if not (root / path).exists()]


def wrong_imports(text: str) -> list[str]:
    """Names that Python code in fences, or an import in backticks, takes from the project and that
    are not there.
    """
    fences: dict[int, list[str]] = {}
    first = previous = 0
    for line in lines_of(text):
        if line.language in ("python", "py"):
            first = first if line.number == previous + 1 else line.number
            fences.setdefault(first, []).append(line.text)
            previous = line.number
    sources = [(number, "\n".join(lines)) for number, lines in fences.items()]
    sources += [
        (number, span)
        for number, span in code_spans(text)
        if span.startswith(("from tramontane", "import tramontane"))
    ]
    return [
        f"line {number}: {name} cannot be imported"
        for number, source in sources
        for name in _not_importable(source)
    ]


def _not_importable(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tramontane":
            wanted = [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            wanted = [
                (alias.name, "") for alias in node.names if alias.name.split(".")[0] == "tramontane"
            ]
        else:
            continue
        yield from (
            f"{module}.{name}".rstrip(".")
            for module, name in wanted
            if not _can_import(module, name)
        )


def _can_import(module: str, name: str) -> bool:
    try:
        owner = import_module(module)
    except ImportError:
        return False
    return not name or hasattr(owner, name) or find_spec(f"{module}.{name}") is not None


# Figures


def figures_without_instructions(text: str) -> list[str]:
    """Paragraphs and tables with figures that name neither a date nor what the processor can, or a
    GPU.

    A paragraph with a date or a commit names both. A table has them in a paragraph of its section,
    above it, or both in each of its rows.
    """
    found, is_known = [], False
    for number, block in _blocks(text):
        has_instructions = INSTRUCTIONS.search(block) is not None
        if block.startswith("## "):
            is_known = False
        elif block.startswith("|"):
            if not is_known and not _rows_have_instructions(text, number):
                found.append(
                    f"line {number}: a table without the processor's instructions above it"
                )
        elif MEASURED.search(block) and not (has_instructions and DATE.search(block)):
            found.append(
                f"line {number}: figures without"
                f" {'the date' if has_instructions else 'instructions'}"
            )
        is_known |= has_instructions or "Nothing in this table has been measured" in block
    return found


def _rows_have_instructions(text: str, number: int) -> bool:
    """Whether all rows of the table that begins at this line name date and instructions."""
    rows = list(takewhile(lambda line: line.startswith("|"), text.splitlines()[number + 1 :]))
    return all(INSTRUCTIONS.search(row) and DATE.search(row) for row in rows)


def other_figures(page: Path, text: str) -> list[str]:
    """Rows of tables that lead to no section of a report, or have numbers that it has not."""
    found = []
    for number, row in _rows(text):
        links = [link for _, link in links_of(row) if link.startswith("reports/")]
        path, _, anchor = (links or ["#"])[0].partition("#")
        if not links or not (section := _section(_read(page.parent / path), anchor)):
            found.append(f"line {number}: no section of a report")
            continue
        # also a link's path has numbers
        shown = LINK.sub(lambda link: link[0][: link[0].rindex("](")], row)
        if missing := [each for each in NUMBER.findall(shown) if each not in _numbers(section)]:
            found.append(f"line {number}: {' '.join(missing)} of {links[0]}")
    return found


def _rows(text: str) -> Iterator[tuple[int, str]]:
    """Yield the rows of all tables without their heads."""
    lines = dict(enumerate(text.splitlines(), 1))
    for number, line in lines.items():
        is_head = lines.get(number + 1, "").startswith("|--")
        if line.startswith("| ") and not is_head:
            yield number, line


def _section(text: str, anchor: str) -> str:
    """Return the text below the heading with this anchor, with the headings below it."""
    lines, level = text.splitlines(), 0
    section: list[str] = []
    for line in lines:
        heading = HEADING.match(line)
        depth = len(line) - len(line.lstrip("#"))
        if heading and level and depth <= level:
            break
        if level:
            section.append(line)
        elif heading and _slug(heading[1]) == anchor:
            level = depth
    return "\n".join(section)


def _numbers(text: str) -> set[str]:
    return set(NUMBER.findall(text))


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, items of lists, tables and headings, each in one line, with the number of its
    first.
    """
    block: list[str] = []
    for number, line in enumerate([*_by_number(text), None], 1):
        begins = (
            not line
            or line.startswith(("#", "* "))
            or (line.startswith("|") and not (block and block[0].startswith("|")))
        )
        if begins and block:
            yield number - len(block), " ".join(" ".join(block).split())
            block = []
        block += [line] if line else []


# Words


def banned_words(text: str) -> list[str]:
    """Words that the project does not use; what is in backticks may be a value of a field."""
    return [f"line {number}: {word}" for number, word in find_unwanted(_shown(text))]


# The pages


def _read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _names(*paths: Path) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


DOCS = sorted((ROOT / "docs").rglob("*.md"))
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
TEXTS = _names(
    *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY")), *DOCS
)
PAGES = [
    *TEXTS,
    *_names(
        *(path for path in (ROOT / "CHANGELOG.md", ROOT / "k8s" / "README.md") if path.exists())
    ),
]


@cache
def _program() -> Any:
    return get_command(app)


def test_the_readme_is_short() -> None:
    assert size_problems(_read(ROOT / "README.md"), MAX_BYTES) == []


def test_the_architecture_is_short() -> None:
    assert size_problems(_read(ROOT / "ARCHITECTURE.md")) == []


@pytest.mark.parametrize("page", TEXTS)
def test_lines_of_prose_are_narrow(page: str) -> None:
    assert wide_lines(_read(ROOT / page)) == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert broken_links(ROOT / page, _read(ROOT / page), ROOT) == []


def test_every_page_is_in_an_index() -> None:
    folders = (ROOT / "docs" / "decisions", ROOT / "docs" / "reports")
    indexes = [ROOT / "docs" / "index.md", *(folder / "README.md" for folder in folders)]
    assert DOCS
    assert (
        _names(*unlinked(DOCS, {index: _read(index) for index in indexes if index.exists()})) == []
    )


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
class TestPage:
    def test_paths_exist(self, page: str) -> None:
        assert missing_paths(_read(ROOT / page), ROOT) == []

    def test_make_has_the_targets(self, page: str) -> None:
        assert unknown_targets(_read(ROOT / page), targets_of(_read(ROOT / "Makefile"))) == []

    def test_the_program_has_the_commands_and_flags(self, page: str) -> None:
        assert wrong_commands(_read(ROOT / page), _program()) == []

    def test_flags_in_backticks_exist(self, page: str) -> None:
        assert unknown_flags(_read(ROOT / page), _program(), flags_of_scripts(ROOT)) == []

    def test_imports_work(self, page: str) -> None:
        assert wrong_imports(_read(ROOT / page)) == []

    def test_words_are_the_fields(self, page: str) -> None:
        assert banned_words(_read(ROOT / page)) == []


@pytest.mark.parametrize(
    "page", _names(BENCHMARKS, *BENCHMARKS.parent.glob("reports/benchmarks-*"))
)
def test_every_figure_has_the_instructions_of_its_processor(page: str) -> None:
    assert figures_without_instructions(_read(ROOT / page)) == []


def test_the_benchmarks_are_short_and_have_the_figures_of_the_reports() -> None:
    text = _read(BENCHMARKS)
    assert size_problems(text) == []
    assert other_figures(BENCHMARKS, text) == []


@pytest.mark.parametrize("room", ["proto", "workers", "router", "cluster"])
def test_docstrings_name_files_that_exist(room: str) -> None:
    found = {
        str(path.relative_to(ROOT)): missing_files(_docstrings(path), ROOT)
        for path in sorted((ROOT / room).rglob("*.py"))
    }
    assert found
    assert not {name: missing for name, missing in found.items() if missing}


def _docstrings(path: Path) -> str:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(_read(path))) if isinstance(node, kinds))
    return "\n".join(filter(None, map(ast.get_docstring, nodes)))


# Planted faults


@pytest.mark.nightly
def test_a_planted_long_page_is_found() -> None:
    assert size_problems("x\n" * MAX_LINES) == []
    assert size_problems("x\n" * (MAX_LINES + 1)) == [f"251 lines; at most {MAX_LINES}"]
    assert size_problems("é" * 10, max_bytes=19) == ["20 bytes; at most 19"]


LONG = "word " * 25


@pytest.mark.nightly
@pytest.mark.parametrize(
    "line",
    [LONG, f"* {LONG}", f"    {LONG}", f"{LONG}[page](docs/index.md)", f"[page](x.md) {LONG}"],
)
def test_a_planted_wide_line_is_found(line: str) -> None:
    assert wide_lines(f"# Title\n\n{line}\n") == [
        f"line 3: {len(line)} characters; at most {MAX_WIDTH}"
    ]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "text",
    [
        "x" * MAX_WIDTH,
        f"| {LONG} |",
        f"```sh\n{LONG}\n```",
        f"~~~\n```\n{LONG}\n~~~",
        f"* [a page](https://example.com/{'x' * 120})",
        f"[page]: https://example.com/{'x' * 120}",
        f"![picture](pictures/{'x' * 120}.png)",
    ],
)
def test_what_may_be_wide_is_no_fault(text: str) -> None:
    assert wide_lines(text) == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("heading", "slug"),
    [
        ("## Install", "install"),
        (
            "### Half the memory: `--quantize int8` or `fp8`",
            "half-the-memory---quantize-int8-or-fp8",
        ),
        ("# What's new, in 0.1? ", "whats-new-in-01"),
        ("## Links (TCP & IPC)", "links-tcp--ipc"),
        ("## `max_num_seqs` and *more*", "max_num_seqs-and-more"),
        ("## A [link](x.md) in it", "a-link-in-it"),
        ("## Überlast", "überlast"),
    ],
)
def test_slugs_are_githubs(heading: str, slug: str) -> None:
    assert slugs_of(heading) == {slug}


@pytest.mark.nightly
def test_a_second_heading_of_the_same_text_has_a_number_and_a_comment_in_code_is_none() -> None:
    assert slugs_of("# Limits\n## Limits\n```sh\n# no heading\n```\n### Limits\n") == {
        "limits",
        "limits-1",
        "limits-2",
    }


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "other page.md").write_text("# Other page\n\n## Limits\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "docs" / "picture.png").touch()
    return tmp_path / "docs" / "index.md"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "text",
    [
        "[page](missing.md)",
        "[page](other%20page.md#nothing)",
        "# Title\n\n[above](#titel)",
        "![picture](missing.png)",
        "[![picture](missing.png)](https://example.com)",
        "[page][1]\n\n[1]: missing.md",
        "| a | [page](../missing/) |",
        "[out](../../README.md)",
        '[page](missing.md "a title")',
        "[a page whose name\nis long](missing.md)",
    ],
)
def test_a_planted_broken_link_is_found(text: str, page: Path) -> None:
    assert broken_links(page, text, page.parents[1])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "text",
    [
        "[page](other%20page.md) and [its limits](other%20page.md#limits)",
        "[folder](../folder/) ![picture](picture.png)",
        "# A title\n\n[above](#a-title)",
        "[elsewhere](https://example.com/missing#nothing) <mailto:me@example.com>",
        "`[code](missing.md)`\n\n```\n[code](missing.md)\n```",
    ],
)
def test_a_good_link_is_no_fault(text: str, page: Path) -> None:
    assert broken_links(page, text, page.parents[1]) == []


@pytest.mark.nightly
def test_a_planted_page_that_no_index_has_is_found(page: Path) -> None:
    other, third = page.parent / "other page.md", page.parent / "third.md"
    assert unlinked([page, other, third], {page: "[other](other%20page.md)"}) == [other, third]
    assert unlinked([page, third], {page: "[third](third.md#limits)"}) == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("see `router/missing.py`", ["router/missing.py"]),
        ("| `tests/{bench,missing}/` |", ["tests/missing/"]),
        ("`docs/*.rst`", ["docs/*.rst"]),
        ("`tests/missing.py --places 4`", ["tests/missing.py"]),
        ("`tests/test_docs.py:1` and `k8s/missing.yaml:20`", ["k8s/missing.yaml:20"]),
    ],
)
def test_a_planted_path_that_is_not_there_is_found(text: str, missing: list[str]) -> None:
    assert missing_paths(text, ROOT) == [f"line 1: {path} does not exist" for path in missing]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "text",
    [
        "`tests/test_docs.py`, `tests/bench/`, `proto/*.proto` and `tests/test_{docs,walls}.py`",
        "router/missing.py is no code, and `logs/serve/x.log` is not ours",
        "`docs/decisions/NNNN-title.md`, `tests/<name>.py`, `tests/...`",
        "```sh\ncat router/missing.py\n```",
    ],
)
def test_a_path_that_is_there_or_elsewhere_is_no_fault(text: str) -> None:
    assert missing_paths(text, ROOT) == []


MAKEFILE = (
    "VENV := .venv\n.PHONY: demo test\n$(STAMP): x\n\ttouch $@\ndemo: $(STAMP)  ##"
    " text\nbench-gpu:\n\tpython\n"
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "text",
    [
        "`make tset`",
        "```sh\nmake tset  # all\n```",
        "`make demo tset`",
        "```\n$ make -j2 tset\n```",
        "`cd x && make tset`",
    ],
)
def test_a_planted_target_that_is_not_there_is_found(text: str) -> None:
    assert [
        problem.partition(": ")[2] for problem in unknown_targets(text, targets_of(MAKEFILE))
    ] == ["make tset: no such target"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "text",
    [
        "`make demo`",
        "`make bench-gpu ROOM=router`",
        "to make certain",
        "`make TARGET`",
        "```python\nmake = 1\n```",
    ],
)
def test_a_target_that_is_there_is_no_fault(text: str) -> None:
    assert unknown_targets(text, targets_of(MAKEFILE)) == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("block", "wrong"),
    [
        ("tramontane srve", "tramontane has no command srve"),
        ("tramontane serve --stage 2", "tramontane serve has no --stage"),
        ("tramontane serve \\\n  --modle=x", "tramontane serve has no --modle"),
        ("tramontane batch sumbit x.jsonl", "tramontane batch has no command sumbit"),
        (
            "tramontane batch submit x.jsonl --endpiont y",
            "tramontane batch submit has no --endpiont",
        ),
        ("tramontane --verson", "tramontane has no --verson"),
        ("cat x | tramontane generate --jsn > y", "tramontane generate has no --jsn"),
        ("HOME=/x .venv/bin/tramontane chat --jsn", "tramontane chat has no --jsn"),
        ("ray exec c.yaml 'tramontane serve --confg x'", "tramontane serve has no --confg"),
        (
            "kubectl exec $HEAD -- tramontane drain --adress auto",
            "tramontane drain has no --adress",
        ),
        ("$ tramontane top --onec  # a comment", "tramontane top has no --onec"),
    ],
)
def test_a_planted_command_that_is_not_there_is_found(block: str, wrong: str) -> None:
    for language in ("sh", "bash"):
        problems = wrong_commands(f"```{language}\n{block}\n```", _program())
        assert [problem.partition(": ")[2] for problem in problems] == [wrong]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("With `--no-such` it", ["there is no --no-such"]),
        ("`--stages 2 --no-such=4`", ["there is no --no-such"]),
        ("`tramontane serve --jsn`", ["tramontane serve has no --jsn"]),
        ("`tramontane srve`", ["tramontane has no command srve"]),
        (
            (
                "`--stages`, `--planted 4`, `tramontane serve --config x`, `ray start --head`,"
                " `--no-...`"
            ),
            [],
        ),
    ],
)
def test_a_planted_flag_in_backticks_is_found(text: str, wrong: list[str]) -> None:
    found = unknown_flags(text, _program(), {"--planted"})
    assert [problem.partition(": ")[2] for problem in found] == wrong


@pytest.mark.nightly
def test_a_planted_file_in_a_docstring_is_found() -> None:
    planted = "See ``router/engine/in_fligth.py`` and ``router/engine/in_flight.py``."
    assert missing_files(planted, ROOT) == ["router/engine/in_fligth.py"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (
            "# Title\n\n```python\nfrom tramontane.llm import LLM, LMM\n```",
            ["line 4: tramontane.llm.LMM cannot be imported"],
        ),
        (
            "```python\nimport tramontane.clients\n```",
            ["line 2: tramontane.clients cannot be imported"],
        ),
        (
            "| `from tramontane.proto import eror` |",
            ["line 1: tramontane.proto.eror cannot be imported"],
        ),
        ("```py\nfrom tramontane.proto import errors\nimport json, no_such\n```", []),
        ("```sh\nfrom tramontane.llm import LMM\n```", []),
    ],
)
def test_a_planted_import_that_does_not_work_is_found(text: str, wrong: list[str]) -> None:
    assert wrong_imports(text) == wrong


@pytest.mark.nightly
def test_of_a_console_only_what_is_typed_is_read() -> None:
    assert (
        wrong_commands(
            "```console\n$ tramontane top --once\ntramontane nothing --at-all\n```", _program()
        )
        == []
    )
    assert len(wrong_commands("```console\n$ tramontane nothing\n```", _program())) == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    "block",
    [
        'tramontane generate --local --stages 2 "ROMEO: --nothing"',
        "tramontane batch results ID -o x.jsonl && tramontane --version",
        "tramontane COMMAND --help",
        "tramontane generate -- --nothing",
        "pip install tramontane --nothing",
        "kubectl delete rayservice tramontane && kubectl get pods -l app=tramontane --nothing",
        "# tramontane nothing\ncurl -d '{\n  \"model\": 1}' --nothing",
    ],
)
def test_a_command_that_is_there_is_no_fault(block: str) -> None:
    assert wrong_commands(f"```sh\n{block}\n```", _program()) == []


RECORDED = (
    "# Speed\n\n`make x`. Recorded 2026-11-22, commit 1cca1e2. 2 cores{}. Demo\nmodel.\n\n| a"
    " |\n|---|\n| 5 ms |\n"
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "named",
    [
        "of an EPYC (avx2)",
        "with AVX-512",
        "of Zen 4, avx512_bf16",
        "an NVIDIA H100",
        UNKNOWN,
        "modelled",
    ],
)
def test_a_figure_with_its_instructions_is_no_fault(named: str) -> None:
    assert figures_without_instructions(RECORDED.format(f", {named}")) == []
    assert (
        figures_without_instructions(RECORDED.format(f", {named.replace(' ', chr(10))}")) == []
    ), "over two lines"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "named", ["", " of an AMD EPYC", ", CPU model not recorded", ", machine not recorded"]
)
def test_a_planted_figure_without_instructions_is_found(named: str) -> None:
    paragraph, table = (
        "line 3: figures without instructions",
        "line 6: a table without the processor's instructions above it",
    )
    assert figures_without_instructions(RECORDED.format(named)) == [paragraph, table]
    before = "## Other\n\nRecorded 2026-11-21, avx2.\n\n"
    assert (
        len(figures_without_instructions(before + RECORDED.replace("# ", "## ").format(named))) == 2
    ), "of another section"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("* one (avx2, 2026-11-21)\n* two (2026-11-22)", ["line 2: figures without instructions"]),
        ("Before (commit 1cca1e2) it took 5 ms.", ["line 1: figures without instructions"]),
        ("Before (commit 1cca1e2, AVX2) it took 5 ms.", ["line 1: figures without the date"]),
        (
            (
                "Without commits or figures.\n\n**Nothing in this table has been measured.**\n\n| a"
                " |\n|---|\n"
            ),
            [],
        ),
    ],
)
def test_every_paragraph_with_figures_is_checked(text: str, wrong: list[str]) -> None:
    assert figures_without_instructions(text) == wrong


@pytest.mark.nightly
def test_a_planted_row_with_another_figure_is_found() -> None:
    text = _read(BENCHMARKS)
    (number, row), *_ = _rows(text)
    for there, planted, why in [
        ("| 264;", "| 265;", "265 of reports/benchmarks-demo.md#demo-run"),
        ("5abc307", "5abc308", "5abc308 of reports/benchmarks-demo.md#demo-run"),
        ("2026-11-24", "2026-11-25", "2026-11-25 of reports/benchmarks-demo.md#demo-run"),
        ("#demo-run", "#no-run", "no section of a report"),
    ]:
        assert there in row
        changed = text.replace(row, row.replace(there, planted))
        assert other_figures(BENCHMARKS, changed) == [f"line {number}: {why}"]


@pytest.mark.nightly
def test_a_planted_row_without_instructions_is_found() -> None:
    text = "## A\n\n| a | recorded |\n|---|---|\n| 1 | avx2, 2026-11-22 |\n| 2 | {} |\n"
    assert figures_without_instructions(text.format("modelled, 2026-11-22")) == []
    for planted in ("2026-11-22", "avx2"):
        assert len(figures_without_instructions(text.format(planted))) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("word", [*WORDS, *PARTS, "Whoever", "goes\non"])
def test_a_planted_word_is_found(word: str) -> None:
    assert banned_words(f"# Title\n\n`x` | {word} |\n") == [f"line 3: {' '.join(word.split())}"]


@pytest.mark.nightly
def test_other_words_and_code_are_no_fault() -> None:
    assert (
        banned_words("indoor, outdoors, untold, lesson; the `door` of a log\n\n```\nnobody\n```\n")
        == []
    )
