"""No test starts a Ray cluster by accident: the ones that need it use a fixture."""

import logging
import os
import random
import ssl
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

os.environ["RAY_AUTH_MODE"] = "disabled"  # before ray is imported: it reads this once
# Ray's 15 would let a second run of tests starve the workers
os.environ.setdefault("RAY_worker_niceness", "0")
# threads that wait for each other burn the cores that other lanes need
os.environ.setdefault("OMP_NUM_THREADS", "1")
# nor do those of tests of several threads wait by computing
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import examples
import pytest
import reference
import torch
from hypothesis import HealthCheck, settings
from lane_marks import NEEDED_MARKS, names_mark
from pairwise import left_out
from process_exit import exit_process

try:
    import ray
# machines that lend a GPU may not have it; tests that need it cannot be collected there
except ImportError:
    ray = None  # type: ignore[assignment]

# a new client of httpx reads the certificates of all authorities, which takes 30 ms of a core
ssl.create_default_context = cache(ssl.create_default_context)
torch.set_num_threads(1)  # also where a user's environment says otherwise


@pytest.fixture(autouse=True)
def _no_stray_ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside tests marked ``ray``, ray.init raises."""
    if ray is not None and request.node.get_closest_marker("ray") is None:

        def refuse(*_args: object, **_kwargs: object) -> None:
            raise AssertionError(
                "this test is not marked with @pytest.mark.ray and must not start a cluster"
            )

        monkeypatch.setattr(ray, "init", refuse)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """A test that draws from Python's or torch's own generator draws the same at every run,
    whatever ran before it.
    """
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Give torch its one thread back after a test: ``generate --local`` takes all cores for its
    process, for all later tests.
    """
    yield
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture(autouse=True)
def policy_failures() -> Iterator[list[logging.LogRecord]]:
    """Fail a test in which the scheduling policy failed: no request fails with it, so nothing else
    would show it.

    A test that makes a policy fail takes the records out of this list. Routers of other processes:
    see ``router_stats``.
    """
    handler, guard = _Records(), logging.getLogger("tramontane.router.scheduling.policy")
    guard.addHandler(handler)
    yield handler.records
    guard.removeHandler(handler)
    assert not handler.records, logging.Formatter().format(handler.records[0])


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Give our loggers and those of Ray Serve the handlers back that they had: a command sets them
    for its process.
    """
    loggers = [logging.getLogger(name) for name in ("tramontane", "ray.serve")]
    before = [(each.handlers[:], each.level, each.propagate) for each in loggers]
    yield
    for each, (handlers, level, propagates) in zip(loggers, before, strict=True):
        each.handlers[:], each.level, each.propagate = handlers, level, propagates


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without the mark that a lane wants: to import them all would take it longer
    than some of its tests.
    """
    mark = NEEDED_MARKS.get(config.option.markexpr)
    return (
        True
        if mark and collection_path.suffix == ".py" and not names_mark(collection_path, mark)
        else None
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse a mark that a file gets without naming it, also in lanes without the mark: no other
    lane would run that test.

    Then leave out the combinations of parameters whose pairs of values other combinations have.
    """
    for mark in set(NEEDED_MARKS.values()):
        unnamed = {
            str(path)
            for path in {item.path for item in items if item.get_closest_marker(mark)}
            if not names_mark(path, mark)
        }
        if unnamed:
            raise pytest.UsageError(
                f"tests have the mark pytest.mark.{mark} without these words in their files:"
                f" {sorted(unnamed)}"
            )
    if not config.getoption("--full-products") and (without := left_out(items)):
        config.hook.pytest_deselected(items=[item for item in items if item in without])
        items[:] = [item for item in items if item not in without]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main() -> Generator[None, int, int]:
    """End the run with pytest's own status, whatever threads Ray has left: see ``exit_process``.

    As the outermost wrapper this runs after everything is torn down, reported and closed, also by
    plugins, and the status is final. Usage errors propagate as exceptions. A test must not call
    pytest.main, which would end the whole run.
    """
    status = yield
    exit_process(int(status))
    return status


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-products",
        action="store_true",
        help="all combinations of parameters of tests marked pairwise, and all examples",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--full-products"):
        os.environ[examples.ALL] = "1"
    settings.register_profile(
        "without a clock",
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
        max_examples=examples.examples(100),
    )
    settings.load_profile("without a clock")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Rounding may decide between two nearly equal logits; such cases are listed, not hidden."""
    terminalreporter.write_line(
        f"close calls between the two best logits: {len(reference.close_calls)}"
    )
    for call in reference.close_calls:
        terminalreporter.write_line(f"  {call}")
