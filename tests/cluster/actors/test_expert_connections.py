"""What becomes of a call through the object store whose actor, node or experts fail, with an actor that the test answers for."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from local_expert_actors import expert_plan
from ray.exceptions import ActorUnavailableError, RayTaskError
from tiny_models import tiny_args

from tramontane.cluster.actors import expert_connections
from tramontane.cluster.actors.expert_connections import ObjectStoreExpertClient
from tramontane.proto.errors import ExpertRelocatedError, ExpertUnavailableError, PipelineError
from tramontane.workers.experts.expert_link import ExpertMessageLayout
from tramontane.workers.experts.expert_worker import ExpertCall

ARGS = tiny_args(n_layers=2)


class Actor:
    """An actor that is ready at once; ``replies`` are those of its calls, in order."""

    def __init__(self) -> None:
        self.replies: list[Future[Any]] = []
        self.num_asked = 0
        self.ready = SimpleNamespace(remote=self._count)
        self.run = SimpleNamespace(remote=self._call)

    def _count(self) -> None:
        self.num_asked += 1

    def _call(self, _call: tuple[Any, ...], _rows: object) -> Any:  # noqa: ANN401
        self.replies.append(Future())
        return SimpleNamespace(future=lambda reply=self.replies[-1]: reply)


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> tuple[ObjectStoreExpertClient, Actor, Callable[[], None]]:
    """A connection that is up, its actor, and what waits until it is up again."""
    monkeypatch.setattr(expert_connections, "ray", SimpleNamespace(get=lambda value: value))
    notified = threading.Semaphore(0)
    actor: Any = Actor()
    layout = ExpertMessageLayout.of(expert_plan(ARGS, 1), torch.device("cpu"))
    client = ObjectStoreExpertClient(actor, notified.release, layout, "Expert actor 1/1")
    notified.acquire()
    return client, actor, lambda: bool(notified.acquire())


def _call(client: ObjectStoreExpertClient) -> "Future[Any]":
    return client.call(ExpertCall(0, (1,), (2,)), torch.zeros(2, ARGS.dim))


@pytest.mark.parametrize(
    ("error", "kind", "reconnects"),
    [
        (ActorUnavailableError("its process died", None), ExpertUnavailableError, True),
        (OSError("its node is gone"), ExpertUnavailableError, True),
        (ExpertRelocatedError("moved"), ExpertRelocatedError, False),
        (RayTaskError("run", "a traceback", ValueError("no kernel")), PipelineError, False),
    ],
)
def test_an_error_says_whether_another_attempt_can_help(
    connection: tuple[ObjectStoreExpertClient, Actor, Callable[[], None]],
    error: Exception,
    kind: type[Exception],
    reconnects: bool,
) -> None:
    client, actor, wait_until_up = connection
    reply = _call(client)
    actor.replies[0].set_exception(error)
    assert type(reply.exception()) is kind
    if reconnects:
        wait_until_up()
    assert client.is_up
    assert actor.num_asked == 1 + reconnects


def test_rows_come_back_as_they_were_sent(connection: tuple[ObjectStoreExpertClient, Actor, Callable[[], None]]) -> None:
    client, actor, _ = connection
    reply = _call(client)
    rows = torch.arange(2.0 * ARGS.dim).view(2, -1)
    actor.replies[0].set_result((0.5, rows.view(torch.uint8).reshape(-1).numpy()))
    assert torch.equal(reply.result().rows_CD, rows)
    assert reply.result().busy_s == 0.5


def test_a_reply_that_cannot_be_decoded_fails_its_call(
    connection: tuple[ObjectStoreExpertClient, Actor, Callable[[], None]],
) -> None:
    client, actor, _ = connection
    reply = _call(client)
    actor.replies[0].set_result((0.5, "no array"))
    with pytest.raises(PipelineError, match="Expert actor 1/1 sent a reply that cannot be decoded"):
        reply.result()
