"""Programs that people run, from npm and PyPI, each against an API server of this project: coding
agents and clients' libraries.

    python tests/bench/agents.py [--real] [--only "Claude Code,Codex CLI"] [--format v13]
    [--record] [--verbose]

The programs are installed in ``.agents`` at first use, which takes minutes and some GiB. Each runs
with an empty home folder, without proxies, and with nothing but the server's URL. All of this is
done with a tekken tokenizer of versions 13, 3 and 11. Exits with 1 if a program fails.

In every program the model calls a tool of the program, the program sends the result back, and gets
an answer. The server runs without a router in this process; its tokens are scripted (see
``tests/support/agent_server.py``). ``--record`` writes the requests to
``tests/support/agent_bodies.json``, without the texts of the programs.

With ``--real`` the server is ``tramontane serve --stages 2`` with a small random model (see
``tests/support/agent_real_server.py``). The model writes gibberish and calls any tool, so what
matters is not what a program makes of it: every request for an answer must get one that is whole.
A program that still runs after ``REAL_LIMIT_S`` is ended, which is no failure, and one of which no
tool was called runs again, ``REAL_ROUNDS`` times at most. All programs run with version 13, and one
of each API with versions 3 and 11. Agents run the commands that the model writes: use a container,
or a machine on which nothing is missed.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from agent_bodies import PATH, AgentBody, written
from agent_programs import (
    PROGRAMS,
    MissingError,
    Place,
    Program,
    install,
    install_node,
)
from agent_real_server import problem_of, running_real_server, unanswered
from agent_server import (
    ANSWER,
    FORMATS,
    GENERATES,
    AgentServer,
    Exchange,
    results_of,
    running_agent_server,
)
from rich.console import Console
from rich.table import Table
from rich.text import Text
from targets import conclude, none_of

CACHE = Path(__file__).parents[2] / ".agents"
LIMIT_S, REAL_LIMIT_S = 180, 90
REAL_ROUNDS = 3
NEWEST = FORMATS[-1]
REAL_IN_OLDER = ("Claude Code", "Codex CLI", "Mistral Vibe")  # one of each API
SECRET = "The wind has turned to the north, says the harbour master."
console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Result:
    """What a program did. ``problem``: "" if it did all it has to. ``version``: of the format.
    ``faults``: requests for answers that were refused, or whose answer has no end.
    """

    version: str
    program: Program
    problem: str
    seconds: float
    output: str
    exchanges: Sequence[Exchange]
    faults: Sequence[str] = ()

    @property
    def has_run_a_tool(self) -> bool:
        """Whether the program has sent a tool's result."""
        return any(results_of(each.path, each.body) for each in self.exchanges)

    @property
    def others(self) -> list[str]:
        """Paths that the server does not have."""
        missing = {
            f"{each.method} {each.path}"
            for each in self.exchanges
            if each.status >= 400 and each.path not in GENERATES
        }
        return sorted(missing)


def run_rounds(version: str, program: Program, server: AgentServer, node: Path) -> Result:
    """Run a program, with random tokens again until it has run a tool; return what it did last."""
    result = run_program(version, program, server, node)
    for _ in range(0 if server.source else REAL_ROUNDS - 1):
        if not result.problem and not result.has_run_a_tool:
            result = run_program(version, program, server, node)
    return result


def run_program(version: str, program: Program, server: AgentServer, node: Path) -> Result:
    """Install and run a program, and check what it has printed and sent."""
    try:
        packages = install(program, CACHE)
    except MissingError as error:
        return Result(version, program, f"not installed: {error}", 0.0, "", ())
    source, limit_s = server.source, LIMIT_S if server.source else REAL_LIMIT_S
    exchanges: list[Exchange] = []
    server.recorder.exchanges = exchanges
    # what a program has started may write until it is killed
    with tempfile.TemporaryDirectory(prefix="agents-", ignore_cleanup_errors=True) as folder:
        home, work = Path(folder, "home"), Path(folder, "work")
        home.mkdir()
        work.mkdir()
        place = Place(server.url, home, work, packages)
        place.notes.write_text(SECRET + "\n", encoding="utf-8")
        if source:
            source.wanted, source.last = program.calls(place), program.last
        began = time.monotonic()
        status, output = _run(program, place, node, limit_s)
        seconds = time.monotonic() - began
    faults = _faults(exchanges)
    problem = _problem(program, status, output, exchanges) if source else unanswered(exchanges)
    return Result(
        version, program, problem, seconds, output, without_paths(exchanges, folder), faults
    )


def _faults(exchanges: Sequence[Exchange]) -> list[str]:
    """Return what is wrong with answers, each with the beginning of its request."""
    return [
        f"{fault}\n    {each.raw.decode(errors='replace'):.2000}"
        for each in exchanges
        if each.path in GENERATES and (fault := problem_of(each))
    ]


def without_paths(exchanges: Sequence[Exchange], folder: str) -> Sequence[Exchange]:
    """Replace the folder of a run in requests by one that is the same on every machine."""
    for each in exchanges:
        each.raw = each.raw.replace(folder.encode(), b"/agents")
    return exchanges


def _run(program: Program, place: Place, node: Path, limit_s: float) -> tuple[int | None, str]:
    """Return the exit status, None if the time was over, and the output."""
    start = program.start(place)
    variables = {
        "PATH": f"{node}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(place.home),
        **{
            f"XDG_{kind}_HOME": str(place.home / folder)
            for kind, folder in (
                ("CONFIG", ".config"),
                ("DATA", ".local/share"),
                ("CACHE", ".cache"),
                ("STATE", ".local/state"),
            )
        },
        "TMPDIR": str(place.home),
        "LANG": "C.UTF-8",
        "NO_COLOR": "1",
        "DO_NOT_TRACK": "1",
        "NO_UPDATE_NOTIFIER": "1",
        **start.variables,
    }
    log = place.home.parent / "output.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(map(str, start.command)),
            cwd=place.work,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it has left running
        process.wait()
    return status, log.read_text(encoding="utf-8", errors="replace")


def _problem(
    program: Program, status: int | None, output: str, exchanges: Sequence[Exchange]
) -> str:
    """Return what is wrong with a run, "" if nothing is."""
    answered = [each for each in exchanges if each.path in GENERATES]
    refused = [each for each in answered if each.status >= 400]
    if refused:
        return f"refused: {refused[0].answer.decode(errors='replace'):.200}"
    if not answered:
        return f"it has asked for nothing (exit status {status})"
    results = [text for each in answered for text in results_of(each.path, each.body)]
    if not results:
        return "it has not run the tool"
    if not any(SECRET in text for text in results):
        return f"the tool's result is not the file: {results[0]:.200}"
    if (num_printed := output.count(ANSWER)) < program.answers:
        return f"it has printed the answer {num_printed} times, not {program.answers}"
    if status is None:
        return f"it has not ended after {LIMIT_S} s"
    return f"exit status {status}" if status else ""


def _table(results: Sequence[Result]) -> Table:
    table = Table(
        "program", "version", "API", "format", "requests", "seconds", "result", "not here"
    )
    for each in results:
        table.add_row(
            each.program.name,
            each.program.version,
            each.program.api,
            each.version,
            str(len(each.exchanges)),
            f"{each.seconds:.1f}",
            each.problem or "ok",
            ", ".join(each.others),
        )
    return table


def _bodies(results: Sequence[Result]) -> Iterator[AgentBody]:
    for result in results:
        if result.version != NEWEST:
            continue
        client = f"{result.program.name} {result.program.version}"
        for each in result.exchanges:
            if each.path in GENERATES:
                agent = each.user_agent.partition(" ")[0]
                yield AgentBody(client, agent, each.path, each.body, each.warning)


def chosen_programs(options: argparse.Namespace) -> Mapping[str, Sequence[Program]]:
    """Return the programs to run in each format, the newest one first."""
    names = [name.strip() for name in options.only.split(",") if name]
    chosen = [each for each in PROGRAMS if not names or each.name in names]
    if options.format:
        return {options.format: chosen}
    older = [each for each in chosen if not options.real or each.name in REAL_IN_OLDER]
    return {NEWEST: chosen} | {version: older for version in FORMATS[:-1] if older}


def run_programs(options: argparse.Namespace) -> Iterator[Result]:
    """Run the programs, one after the other; yield what each did."""
    node = install_node(CACHE)
    running = running_real_server if options.real else running_agent_server
    for version, programs in chosen_programs(options).items():
        with tempfile.TemporaryDirectory() as folder, running(version, Path(folder)) as server:
            for program in programs:
                result = run_rounds(version, program, server, node)
                console.print(f"{program.name}, {version}: {result.problem or 'ok'}", markup=False)
                if options.verbose and result.problem:
                    console.print(result.output[-4000:], markup=False)
                yield result


def main() -> None:
    """Run the programs, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", action="store_true", help="a random model behind a router")
    parser.add_argument("--only", default="", help="names of programs, with commas")
    parser.add_argument("--format", choices=FORMATS, help="of the chat, only this one")
    parser.add_argument("--record", action="store_true", help="write the requests to a file")
    parser.add_argument("--verbose", action="store_true", help="show what failed programs print")
    options = parser.parse_args()
    if options.record and (options.real or options.format not in (None, NEWEST)):
        parser.error(f"--record is for scripted tokens, with version {NEWEST}")
    results = list(run_programs(options))
    if options.record:
        PATH.write_text(written(_bodies(results)), encoding="utf-8")
    faults = [
        Text(f"{each.program.name}, {each.version}: {fault}")
        for each in results
        for fault in each.faults
    ]
    failed = [each for each in results if each.problem]
    conclude([none_of("programs that failed", failed)], _table(results), *faults)


if __name__ == "__main__":
    main()
