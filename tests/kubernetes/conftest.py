"""A cluster for the tests in this folder, with the demo served in it or with nothing."""

import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_application import DEMO, Application
from kube_report import Report

PROGRAM = Path(__file__).with_name("kube_cluster.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add what a person needs who runs one test again and again."""
    parser.addoption("--keep-demo", action="store_true", help="do not delete the demo at the end")


class ServedDemo:
    """The demo, applied when a test needs it and deleted when one needs an empty namespace."""

    def __init__(self, report: Report) -> None:
        self.application = Application()
        self.documents = self.application.render(*DEMO)
        self._report = report
        found = self.application.get("rayservices")["items"]
        # by an earlier run
        self._is_applied = self.application.name in {each["metadata"]["name"] for each in found}

    def ensure(self) -> Application:
        """Apply the demo unless it is applied."""
        if not self._is_applied:
            self._is_applied = True
            self.application.create_key()
            self.application.apply(self.documents)
            ready_s = self.application.wait_until_ready()
            answer_s = self.application.wait_for_answer()
            result = f"Ready after {ready_s:.0f} s, first answer {answer_s:.1f} s later"
            self._report.add("demo applied", result, ready_s=ready_s, answer_s=answer_s)
        return self.application

    def remove(self) -> Application:
        """Delete the demo if it is applied."""
        if self._is_applied:
            self._is_applied = False
            deleted_s = self.application.delete(self.documents)
            result = f"no pod left after {deleted_s:.0f} s"
            self._report.add("demo deleted", result, deleted_s=deleted_s)
        return self.application


HAS_PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep whether a test has passed for the fixture that notes it."""
    outcome = yield
    if call.when == "call":
        item.stash[HAS_PASSED] = outcome.passed
    return outcome


@pytest.fixture(scope="session")
def report() -> Report:
    """The report that the tests write."""
    return Report()


@pytest.fixture(autouse=True)
def _verdict(request: pytest.FixtureRequest, report: Report) -> Iterator[None]:
    """Note in the report whether the test has passed."""
    yield
    report.end_test(has_passed=request.node.stash.get(HAS_PASSED, False))


@pytest.fixture(scope="session")
def cluster() -> None:
    """A cluster that runs: the one of `make kubernetes`, or one that is started now."""
    subprocess.run([sys.executable, PROGRAM, "up"], check=True)


@pytest.fixture(scope="session")
def served_demo(cluster: None, report: Report, pytestconfig: pytest.Config) -> Iterator[ServedDemo]:
    """What applies and deletes the demo."""
    served = ServedDemo(report)
    yield served
    if not pytestconfig.getoption("--keep-demo"):
        served.remove()


@pytest.fixture
def demo(served_demo: ServedDemo) -> Application:
    """The demo, which is Ready."""
    return served_demo.ensure()


@pytest.fixture
def empty(served_demo: ServedDemo) -> Application:
    """The demo's namespace without the demo."""
    return served_demo.remove()


@pytest.fixture(scope="session")
def undisturbed(served_demo: ServedDemo) -> list[dict[str, Any]]:
    """The streams of the demo without a disturbance: what they must be with one."""
    return served_demo.ensure().streams("--tokens", "900")
