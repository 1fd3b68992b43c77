"""Requests to the demo: the API keys, streams over HTTP and gRPC."""

from typing import Any

from kube_application import Application, compare
from kube_report import Report


def test_a_completion_needs_the_key(demo: Application, report: Report) -> None:
    without, refusal = demo.complete(key=None)
    wrong, _ = demo.complete(key="another-key")
    right, answer = demo.complete()
    report.add("API key", f"{without} without, {wrong} with another, {right} with it")
    assert (without, wrong, right) == (401, 401, 200), (refusal, answer)
    assert '"text"' in answer


def test_streams_over_http_repeat(
    demo: Application, undisturbed: list[dict[str, Any]], report: Report
) -> None:
    outcome = compare(demo.streams("--tokens", "900"), undisturbed)
    report.add("streams over HTTP, twice", str(outcome))
    assert outcome.held, outcome.errors
    assert all(each["num_pieces"] > 100 for each in outcome.streams), "not streamed"


def test_streams_over_grpc_have_the_same_text(
    demo: Application, undisturbed: list[dict[str, Any]], report: Report
) -> None:
    outcome = compare(demo.streams("--grpc", "--tokens", "900"), undisturbed)
    report.add("streams over gRPC, against HTTP", str(outcome))
    assert outcome.held, outcome.errors
