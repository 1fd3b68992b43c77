"""What a stage's actor says of itself: for how long it has been computing, by which hung ones are found."""

import threading
from types import SimpleNamespace

import pytest

from tramontane.cluster.actors import worker_actor
from tramontane.cluster.actors.stage_actor import StageActor


@pytest.mark.parametrize(("busy_s", "expected"), [(7.5, 7.5), (0.0, 0.0), (None, 0.0)])
def test_a_stage_says_for_how_long_it_computes(monkeypatch: pytest.MonkeyPatch, busy_s: float | None, expected: float) -> None:
    """Before it is fenced there is nothing that computes."""
    stage = StageActor.__new__(StageActor)
    executor = None if busy_s is None else SimpleNamespace(busy_for_s=busy_s)
    state = {"label": "Stage 1/2", "_executor": executor, "_worker": None, "_loading": threading.Thread(), "_activity": ""}
    stage.__dict__ |= state | {"_bytes_read": 0, "_bytes_loaded": 0, "_weight_bytes": 0}
    monkeypatch.setattr(worker_actor.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    assert stage._health()["busy_for_s"] == expected
