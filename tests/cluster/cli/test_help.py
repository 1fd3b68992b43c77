"""``--help``: options in titled groups, and examples that the real parser understands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.core import TyperOption
from typer.testing import CliRunner

from tramontane.cluster.cli import main as cli
from tramontane.cluster.cli.main import EXAMPLES, MAX_WIDTH
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.console.options import given_keys
from tramontane.cluster.console.terminal import PlainCommand

MAX_UNTITLED = 6  # options without a title of their own, in a command with many
MANY = 8
GROUPS = {
    "generate": {"Sampling", "Pipeline", "Expert actors", "Batching", "Run"},
    "serve": {
        "Pipeline",
        "Expert actors",
        "Batching",
        "Serving",
        "Autoscaling",
        "Batch jobs",
        "Logging and tracing",
    },
    "chat": {"Sampling", "Pipeline", "Expert actors", "Run"},
    "plan": {"Pipeline", "Expert actors", "Batching"},
    "bench": {"Measurement", "Running server", "Pipeline", "Expert actors", "Batching", "Run"},
    "simulate": {"Requests", "Modelled stages", "Pipeline", "Batching", "Run"},
    "k8s": {"Overlay", "Pipeline", "Expert actors", "Batching", "Autoscaling"},
    "cluster-yaml": {"Machines", "Pipeline", "Expert actors", "Batching", "Autoscaling"},
    "experts": {"Running server"},
}


def _commands() -> Iterator[tuple[str, Any]]:
    """Every command that has options, by the words after ``tramontane``."""
    for name, command in cli.LazyCommands().items():
        yield name, command
        yield from (
            (f"{name} {part}", each) for part, each in getattr(command, "commands", {}).items()
        )


COMMANDS = dict(_commands())
SHOWN = [(name, example) for name, examples in EXAMPLES.items() for example in examples]


def _help(name: str) -> str:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, [*name.split(), "--help"])
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_with_many_options_has_them_in_titled_groups(name: str) -> None:
    options = [
        each for each in COMMANDS[name].params if each.opts[0].startswith("-") and not each.hidden
    ]
    titles = {each.rich_help_panel for each in options} - {None}
    assert titles >= GROUPS.get(name, set())
    assert all(f"─ {title} ─" in _help(name) for title in titles)
    if len(options) >= MANY:
        assert titles
        assert len([each for each in options if each.rich_help_panel is None]) <= MAX_UNTITLED


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_names_and_values_of_options_are_whole_in_80_columns(name: str) -> None:
    shown = _help(name)
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    command = COMMANDS[name] if name else typer.main.get_command(cli.app)
    options = [each for each in command.params if isinstance(each, TyperOption) and not each.hidden]
    names = {each for option in options for each in (*option.opts, *option.secondary_opts)}
    values = {word for option in options for word in (option.metavar or "").split()}
    assert (names | values | {"--help"}) <= set(shown.split())


def test_a_range_follows_the_type_of_its_number() -> None:
    shown = _help("simulate")
    assert "--stages <int> [1<=x<=64] " in shown
    assert "--request-rate <float> [x>=1e-06] " in shown
    assert "--url <str> " in _help("batch submit")


def test_a_range_without_a_lower_bound() -> None:
    app = typer.Typer()

    @app.command(cls=PlainCommand)
    def run(share: Annotated[int, typer.Option(max=3)] = 1) -> None: ...

    assert "--share <int> [x<=3] " in CliRunner().invoke(app, ["--help"]).stdout


def test_every_command_of_the_program_has_an_example() -> None:
    assert set(cli.COMMANDS) <= set(EXAMPLES) <= set(COMMANDS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_end_the_help_each_on_a_line_of_its_own(name: str) -> None:
    assert all(len(example) <= MAX_WIDTH for example in EXAMPLES[name])
    lines = [line.strip() for line in _help(name).strip().splitlines()]
    assert lines[-len(EXAMPLES[name]) - 1 :] == ["Examples:", *EXAMPLES[name]]


@pytest.mark.parametrize(("name", "example"), SHOWN)
def test_an_example_is_understood_by_the_parser(
    name: str, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With files where it reads some, and with what may be combined."""
    monkeypatch.chdir(tmp_path)
    for file in re.findall(r"[\w-]+\.(?:jsonl|yaml|txt|json)", example):
        Path(file).write_text("stages: 4\n" if file.endswith(".yaml") else "")
    program, *words = shlex.split(re.sub(r" [<>] \S+", "", example), comments=True)
    assert program == "tramontane"
    assert words[: len(name.split())] == name.split() or name == "batch"
    command = cli.LazyCommands()[words[0]]
    arguments = words[1:]
    if parts := getattr(command, "commands", None):
        command, arguments = parts[arguments[0]], arguments[1:]
    with command.make_context(example, list(arguments)) as context:
        EngineConfig.build(
            None, given_keys(context) if name in ("generate", "serve", "chat", "config") else {}
        )
