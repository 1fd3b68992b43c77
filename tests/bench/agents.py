"""Programs that people run, from npm and PyPI, each against an API server of this project: coding
agents and clients' libraries.

    python tests/bench/agents.py [--only "Claude Code,Codex CLI"] [--format v13] [--record] [--json]

In every program the model calls a tool of the program, the program sends the result back, and gets
an answer. The server runs without a router in this process; its tokens are scripted (see
``tests/support/agent_server.py``). The programs are installed in ``.agents`` at first use, which
takes minutes and some GiB. Each runs with an empty home folder, without proxies, and with nothing
but the server's URL. ``--record`` writes the requests to ``tests/support/agent_bodies.json``,
without the texts of the programs. Exits with 1 if a program fails.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
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

CACHE = Path(__file__).parents[2] / ".agents"
LIMIT_S = 180
SECRET = "The wind has turned to the north, says the harbour master."
console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Result:
    """What a program did. ``problem``: "" if it did all it has to."""

    program: Program
    problem: str
    seconds: float
    output: str
    exchanges: Sequence[Exchange]

    @property
    def refusals(self) -> list[str]:
        """The requests for answers that the server refused."""
        return [
            f"{each.status} {each.answer.decode(errors='replace'):.300}"
            for each in self.exchanges
            if each.status >= 400 and each.path in GENERATES
        ]

    @property
    def others(self) -> list[str]:
        """Paths that the server does not have."""
        missing = {
            f"{each.method} {each.path}"
            for each in self.exchanges
            if each.status >= 400 and each.path not in GENERATES
        }
        return sorted(missing)


def run_program(program: Program, server: AgentServer, node: Path) -> Result:
    """Install and run a program, and check what it has printed and sent."""
    try:
        packages = install(program, CACHE)
    except MissingError as error:
        return Result(program, f"not installed: {error}", 0.0, "", ())
    recorder, source = server.recorder, server.source
    recorder.exchanges = exchanges = []
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:
        home, work = Path(folder, "home"), Path(folder, "work")
        home.mkdir()
        work.mkdir()
        place = Place(server.url, home, work, packages)
        place.notes.write_text(SECRET + "\n", encoding="utf-8")
        source.wanted, source.last = program.calls(place), program.last
        began = time.monotonic()
        status, output = _run(program, place, node)
        seconds = time.monotonic() - began
    return Result(
        program,
        _problem(program, status, output, exchanges),
        seconds,
        output,
        without_paths(exchanges, folder),
    )


def without_paths(exchanges: Sequence[Exchange], folder: str) -> Sequence[Exchange]:
    """Replace the folder of a run in requests by one that is the same on every machine."""
    for each in exchanges:
        each.raw = each.raw.replace(folder.encode(), b"/agents")
    return exchanges


def _run(program: Program, place: Place, node: Path) -> tuple[int | None, str]:
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
            status: int | None = process.wait(LIMIT_S)
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
    table = Table("program", "version", "API", "requests", "seconds", "result", "not here")
    for each in results:
        table.add_row(
            each.program.name,
            each.program.version,
            each.program.api,
            str(len(each.exchanges)),
            f"{each.seconds:.1f}",
            each.problem or "ok",
            ", ".join(each.others),
        )
    return table


def _bodies(results: Sequence[Result]) -> Iterator[AgentBody]:
    for result in results:
        client = f"{result.program.name} {result.program.version}"
        for each in result.exchanges:
            if each.path in GENERATES:
                agent = each.user_agent.partition(" ")[0]
                yield AgentBody(client, agent, each.path, each.body, each.warning)


def main() -> None:
    """Run the programs, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names of programs, with commas")
    parser.add_argument("--format", default="v13", choices=FORMATS, help="of the chat")
    parser.add_argument("--record", action="store_true", help="write the requests to a file")
    parser.add_argument("--verbose", action="store_true", help="show what failed programs print")
    options = parser.parse_args()
    names = [name.strip() for name in options.only.split(",") if name]
    chosen = [each for each in PROGRAMS if not names or each.name in names]
    results: list[Result] = []
    node = install_node(CACHE)
    with (
        tempfile.TemporaryDirectory() as folder,
        running_agent_server(options.format, Path(folder)) as server,
    ):
        for program in chosen:
            result = run_program(program, server, node)
            results.append(result)
            console.print(f"{program.name}: {result.problem or 'ok'}", markup=False)
            if options.verbose and result.problem:
                console.print(result.output[-4000:], markup=False)
    Console().print(_table(results))
    for each in results:
        for refusal in each.refusals:
            print(f"{each.program.name}: {refusal}")
    if options.record:
        PATH.write_text(written(_bodies(results)), encoding="utf-8")
    sys.exit(any(each.problem for each in results))


if __name__ == "__main__":
    main()
