"""Mutation run: small faults in the code, one at a time, and whether the tests meant for it notice.

    python tests/mutation.py [--areas scheduling batch] [--sample 40] [--seed 0] [--workers 2]
    [--target 90] [--json] python tests/mutation.py --at router/scheduling/scheduler.py:274

The faults are those of ``mutants``: changed comparisons, conditions, arithmetic and constants, and
deleted statements. A sample of each area is drawn by seed; ``--at`` takes all faults of a file or
line instead. Each fault is put into a temporary copy of the tree, and the tests meant for its
module run there, without those that start Ray: the files of the folder that mirrors its package,
and those of the same room that import it, or a module of its package that does. Without a fault
they must pass. A fault is caught if a test fails or if the tests take much longer than without it.
Those that survive are shown with the changed lines; some of them cannot be noticed by any test. The
exit status is 1 if less than ``--target`` percent of an area are caught.
"""

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).parent / "support"))

from mutants import Mutant, find_mutants
from rich.console import Console
from rich.table import Table
from targets import Target, at_least, conclude

ROOT = Path(__file__).parents[1]
ROOMS = ("proto", "workers", "router", "cluster")
ALIASES = {"client": "router/client", "llm": "cluster/llm"}  # under the names that users import
NOT_COPIED = shutil.ignore_patterns(
    ".*_cache", ".bench", ".git", ".hypothesis", ".typing", ".venv", "__pycache__", "*.egg-info"
)
AREAS = {
    "scheduling": ("router/scheduling/*.py",),
    "remote routers": tuple(
        f"cluster/serving/{name}.py"
        for name in ("pipeline_client", "router_streams", "retry_policy", "token_stream")
    ),
    "batch": ("router/batch/*.py",),
    "experts": ("workers/experts/*.py", "cluster/actors/expert_*.py"),
}
CAUGHT, SURVIVED, ENDLESS = "caught", "survived", "endless"
SLOWER, MORE_S = 3.0, 60.0  # than without a fault, until tests are taken for endless
console = Console(stderr=True, highlight=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    mutant: Mutant
    verdict: str
    diff: str

    @property
    def is_caught(self) -> bool:
        return self.verdict != SURVIVED


def mutants_of(paths: Iterable[Path], root: Path) -> list[Mutant]:
    return [
        mutant
        for path in sorted(paths)
        for mutant in find_mutants(str(path.relative_to(root)), path.read_text())
    ]


def sample_of(mutants: Sequence[Mutant], count: int, seed: str) -> list[Mutant]:
    """Draw mutants; the same ones for the same seed and code."""
    drawn = random.Random(seed).sample(range(len(mutants)), min(count, len(mutants)))
    return [mutants[number] for number in sorted(drawn)]


def tests_of(module: str, root: Path) -> list[str]:
    """Return the test files meant for a module, those with its name first, then the others of the
    mirroring folder.
    """
    users, name = _users(module, root), Path(module).stem
    mirror = set((root / "tests" / module).parent.glob("test_*.py"))
    of_room = (root / "tests" / Path(module).parts[0]).rglob("test_*.py")
    chosen = mirror | {path for path in of_room if _imports(path) & users}

    def order(path: Path) -> tuple[bool, bool, str]:
        return name not in path.stem, path not in mirror, str(path)

    return [str(path.relative_to(root)) for path in sorted(chosen, key=order)]


def _users(module: str, root: Path) -> set[str]:
    """Return the names of a module and of those modules of its package that import it, also by way
    of each other.
    """
    siblings = {
        _dotted(path.relative_to(root)): _imports(path)
        for path in (root / module).parent.glob("*.py")
    }
    users = {_dotted(Path(module))}
    while more := {name for name, imports in siblings.items() if imports & users} - users:
        users |= more
    return users


def _dotted(path: Path) -> str:
    return ".".join(("tramontane", *path.with_suffix("").parts))


@cache
def _imports(path: Path) -> frozenset[str]:
    """Return the modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(found)


class Copy:
    """A copy of the tree in which one module after the other has a fault."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder / "tree"
        shutil.copytree(root, self.root, ignore=NOT_COPIED, symlinks=True)
        names = self.root / ".typing" / "tramontane"
        names.mkdir(parents=True)
        for name, target in [*((room, room) for room in ROOMS), *ALIASES.items()]:
            if (self.root / target).is_dir():
                (names / name).symlink_to(self.root / target)

    def run(self, tests: Sequence[str], timeout_s: float | None = None) -> int | None:
        """Run tests until the first failure and return pytest's status, or None if they take too
        long.
        """
        flags = ["-q", "-x", "-m", "not ray", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *flags, *tests]
        environment = os.environ | {"PYTHONPATH": str(self.root / ".typing")}
        # compiled code of a file with another fault, of the same second and length
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(
            command, cwd=self.root, env=environment, start_new_session=True, **quiet
        ) as process:
            try:
                return process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)

    def try_mutant(self, mutant: Mutant, tests: Sequence[str], timeout_s: float) -> Outcome:
        path = self.root / mutant.path
        source = path.read_text()
        try:
            self.write(path, mutant.apply(source))
            status = self.run(tests, timeout_s)
        finally:
            self.write(path, source)
        verdict = ENDLESS if status is None else SURVIVED if status == 0 else CAUGHT
        return Outcome(mutant, verdict, mutant.diff(source))

    def write(self, path: Path, source: str) -> None:
        """Write a module; compiled code of the same size and second would be taken for that of the
        new source.
        """
        path.write_text(source)
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


def baseline_s(copy: Copy, tests: Sequence[str]) -> float:
    """Return the seconds that the tests take without a fault."""
    began = time.monotonic()
    if (status := copy.run(tests)) != 0:
        sys.exit(f"without a fault pytest ends with status {status} for {' '.join(tests)}")
    return time.monotonic() - began


def run(
    mutants: Sequence[Mutant], root: Path, num_workers: int, report: Callable[[Outcome], None]
) -> list[Outcome]:
    """Try all mutants, several at a time, and return the outcomes in their order."""
    tests = {module: tests_of(module, root) for module in {mutant.path for mutant in mutants}}
    copies: SimpleQueue[Copy] = SimpleQueue()
    with ExitStack() as stack:
        for _ in range(num_workers):
            copies.put(
                Copy(
                    root, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-")))
                )
            )

        def with_copy(work: Callable[[Copy], float | Outcome]) -> float | Outcome:
            copy = copies.get()
            try:
                return work(copy)
            finally:
                copies.put(copy)

        threads = stack.enter_context(ThreadPoolExecutor(num_workers))
        # in another order the same files take as long
        sets = {frozenset(files): files for files in tests.values()}
        seconds = threads.map(
            lambda files: with_copy(lambda copy: baseline_s(copy, files)), sets.values()
        )
        times = dict(zip(sets, seconds, strict=True))

        def try_one(mutant: Mutant) -> Outcome:
            files = tests[mutant.path]
            outcome = with_copy(
                lambda copy: copy.try_mutant(
                    mutant, files, SLOWER * times[frozenset(files)] + MORE_S
                )
            )
            report(outcome)
            return outcome

        return list(threads.map(try_one, mutants))


def show(outcome: Outcome) -> None:
    mutant = outcome.mutant
    console.print(
        f"{outcome.verdict}: {mutant.path}:{mutant.line} {mutant.kind}",
        markup=False,
        soft_wrap=True,
    )
    if not outcome.is_caught:
        console.print(outcome.diff, markup=False, soft_wrap=True)


def targets(outcomes: Mapping[str, Sequence[Outcome]], share: float) -> list[Target]:
    caught = {
        area: sum(each.is_caught for each in found) / len(found) for area, found in outcomes.items()
    }
    return [
        at_least(f"faults that are caught, {area}", each, share, "%")
        for area, each in caught.items()
    ]


def table_of(outcomes: Mapping[str, Sequence[Outcome]]) -> Table:
    table = Table("area", "faults", CAUGHT, "of these endless", SURVIVED)
    for area, found in outcomes.items():
        numbers = [
            sum(each.verdict == verdict for each in found) for verdict in (ENDLESS, SURVIVED)
        ]
        table.add_row(area, str(len(found)), str(len(found) - numbers[1]), *map(str, numbers))
    return table


def as_data(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, object]:
    keys = ("path", "line", "kind")
    return {
        area: [
            {key: asdict(each.mutant)[key] for key in keys}
            | {"verdict": each.verdict, "diff": each.diff}
            for each in found
        ]
        for area, found in outcomes.items()
    }


def chosen(options: argparse.Namespace, root: Path) -> dict[str, list[Mutant]]:
    """Return the mutants to try, by area."""
    if options.at:
        path, _, line = options.at.partition(":")
        of_file = mutants_of([root / path], root)
        return {options.at: [mutant for mutant in of_file if not line or mutant.line == int(line)]}
    found = {}
    for area in options.areas:
        paths = [path for pattern in AREAS[area] for path in root.glob(pattern)]
        found[area] = sample_of(mutants_of(paths, root), options.sample, f"{options.seed}, {area}")
    return found


def main(root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=list(AREAS))
    parser.add_argument("--sample", type=int, default=40, help="faults of each area")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--at", metavar="PATH[:LINE]", help="all faults of this file or line, instead of a sample"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--target", type=float, default=90.0, help="percent of each area that are to be caught"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    by_area = chosen(options, root)
    if not all(by_area.values()):
        sys.exit(
            "there is no fault to try in"
            f" {', '.join(area for area, found in by_area.items() if not found)}"
        )
    area_of = {mutant: area for area, found in by_area.items() for mutant in found}
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in run(list(area_of), root, options.workers, show):
        outcomes[area_of[outcome.mutant]].append(outcome)
    data = {"seed": options.seed, "areas": as_data(outcomes)}
    conclude(
        targets(outcomes, options.target / 100), table_of(outcomes), data=data, as_json=options.json
    )


if __name__ == "__main__":
    main()
