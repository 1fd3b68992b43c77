"""What becomes of a call through the object store whose actor, node or experts fail, with an actor
that the test answers for.
"""

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
from tramontane.cluster.actors.expert_connections import ObjectStoreExpertClient, expert_connector
from tramontane.cluster.actors.pipeline_spec import ExpertActorRefs
from tramontane.cluster.actors.worker_actor import NAMESPACE
from tramontane.proto.errors import ExpertRelocatedError, ExpertUnavailableError, PipelineError
from tramontane.proto.plan import Link
from tramontane.workers.experts.expert_link import DirectExpertClient, ExpertMessageLayout
from tramontane.workers.experts.expert_worker import ExpertCall
from tramontane.workers.experts.remote_experts import ExpertConnection

ARGS = tiny_args(n_layers=2)
LAYOUT = ExpertMessageLayout.of(expert_plan(ARGS, 1), torch.device("cpu"))
LIMIT_S = 30.0  # after which a test fails that would wait forever


class Actor:
    """An actor that is ready at once; ``replies`` are those of its calls, in order."""

    def __init__(self) -> None:
        self.replies: list[Future[Any]] = []
        self.num_asked = 0
        self.ready = SimpleNamespace(remote=self._count)
        self.run = SimpleNamespace(remote=self._call)

    def _count(self) -> None:
        self.num_asked += 1

    def _call(self, _call: tuple[Any, ...], _rows: object) -> Any:
        self.replies.append(Future())
        return SimpleNamespace(future=lambda reply=self.replies[-1]: reply)


@pytest.fixture
def connection(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[ObjectStoreExpertClient, Actor, Callable[[], bool]]:
    """A connection that is up, its actor, and what waits until it is up again."""
    monkeypatch.setattr(expert_connections, "ray", SimpleNamespace(get=lambda value: value))
    notified = threading.Semaphore(0)
    actor: Any = Actor()
    client = ObjectStoreExpertClient(actor, notified.release, LAYOUT, "Expert actor 1/1")
    assert notified.acquire(timeout=LIMIT_S)
    return client, actor, lambda: bool(notified.acquire(timeout=LIMIT_S))


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
    connection: tuple[ObjectStoreExpertClient, Actor, Callable[[], bool]],
    error: Exception,
    kind: type[Exception],
    reconnects: bool,
) -> None:
    client, actor, wait_until_up = connection
    reply = _call(client)
    actor.replies[0].set_exception(error)
    assert type(reply.exception(LIMIT_S)) is kind
    if reconnects:
        assert wait_until_up()
    assert client.is_up
    assert actor.num_asked == 1 + reconnects


def test_an_actor_that_cannot_load_is_never_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is away, or loads, it is asked again."""
    sleeps: list[float] = []
    monkeypatch.setattr(expert_connections, "time", SimpleNamespace(sleep=sleeps.append))
    errors = [
        ActorUnavailableError("it restarts", None),
        _raised_by_the_actor(PipelineError("the disk is gone")),
    ]
    notified = threading.Event()

    def ready(_: object) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(expert_connections, "ray", SimpleNamespace(get=ready))
    actor: Any = Actor()
    client = ObjectStoreExpertClient(actor, notified.set, LAYOUT, "Expert actor 1/1")
    assert notified.wait(LIMIT_S)
    assert (actor.num_asked, client.is_up) == (2, False)
    assert sleeps == [expert_connections.RETRY_S]
    assert "the disk is gone" in str(client.failure)
    with pytest.raises(ExpertUnavailableError, match="Expert actor 1/1 is not connected"):
        _call(client).result(LIMIT_S)


def _raised_by_the_actor(error: Exception) -> RayTaskError:
    return RayTaskError("ready", f"PipelineError: {error}", error).as_instanceof_cause()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ActorUnavailableError("it restarts", None), ExpertUnavailableError),
        (_raised_by_the_actor(ExpertUnavailableError("loading")), ExpertUnavailableError),
        (_raised_by_the_actor(PipelineError("the disk is gone")), PipelineError),
    ],
)
def test_a_direct_link_is_tried_again_unless_the_actor_says_why_it_never_will_be(
    error: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(expert_connections, "ray", SimpleNamespace(get=fail))
    opened = SimpleNamespace(remote=lambda _: None)
    actor: Any = SimpleNamespace(open_link=SimpleNamespace(options=lambda **_: opened))
    with pytest.raises(PipelineError) as raised:
        expert_connections._exchange_addresses(actor, ("host", 1, "token"))
    assert type(raised.value) is kind


@pytest.mark.parametrize(
    ("link", "kind"), [("direct", DirectExpertClient), ("object-store", ObjectStoreExpertClient)]
)
def test_a_stage_connects_to_an_actor_over_the_link_of_its_pipeline(
    link: Link, kind: type[ExpertConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor whose number it gives, which says here that it cannot load."""

    def fail(_: object) -> None:
        raise _raised_by_the_actor(PipelineError("the disk is gone"))

    call = SimpleNamespace(remote=lambda *_: None)
    actor = SimpleNamespace(ready=call, open_link=SimpleNamespace(options=lambda **_: call))
    util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    found = {("second", NAMESPACE): actor}
    fake = SimpleNamespace(
        get=fail, util=util, get_actor=lambda name, namespace: found[name, namespace]
    )
    monkeypatch.setattr(expert_connections, "ray", fake)
    plan, notified = expert_plan(ARGS, 2), threading.Event()
    connect = expert_connector(
        ExpertActorRefs("app-0", plan, ("first", "second"), link, max_open=1), torch.device("cpu")
    )
    client = connect(1, notified.set)
    assert notified.wait(LIMIT_S)
    assert type(client) is kind
    assert client.failure is not None
    assert "the disk is gone" in str(client.failure)
    with pytest.raises(ExpertUnavailableError, match=f"{plan.actors[1].label} is not connected"):
        client.call(ExpertCall(0, (1,), (2,)), torch.zeros(2, ARGS.dim)).result(LIMIT_S)


def test_one_thread_at_a_time_waits_for_a_lost_actor_and_none_after_the_client_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting: list[Callable[[], None]] = []

    def thread(target: Callable[[], None], **_: object) -> SimpleNamespace:
        return SimpleNamespace(start=lambda: waiting.append(target))

    monkeypatch.setattr(
        expert_connections, "threading", SimpleNamespace(Lock=threading.Lock, Thread=thread)
    )
    monkeypatch.setattr(expert_connections, "ray", SimpleNamespace(get=lambda value: value))
    actor: Any = Actor()
    client = ObjectStoreExpertClient(actor, lambda: None, LAYOUT, "Expert actor 1/1")
    for num_asked in (1, 2, 3):
        assert len(waiting) == 1
        assert not client.is_up
        waiting.pop()()
        assert client.is_up
        assert actor.num_asked == num_asked
        lost = [_call(client), _call(client)]
        for reply in actor.replies[-2:]:
            reply.set_exception(ActorUnavailableError("its process died", None))
        assert [type(call.exception(LIMIT_S)) for call in lost] == [ExpertUnavailableError] * 2
    client.close()
    waiting.pop()()
    assert actor.num_asked == 3
    client._reconnect()
    assert not waiting


def test_rows_come_back_as_they_were_sent(
    connection: tuple[ObjectStoreExpertClient, Actor, Callable[[], bool]],
) -> None:
    client, actor, _ = connection
    reply = _call(client)
    rows = torch.arange(2.0 * ARGS.dim).view(2, -1)
    actor.replies[0].set_result((0.5, rows.view(torch.uint8).reshape(-1).numpy()))
    assert torch.equal(reply.result(LIMIT_S).rows_CD, rows)
    assert reply.result(LIMIT_S).busy_s == 0.5


def test_a_reply_that_cannot_be_decoded_fails_its_call(
    connection: tuple[ObjectStoreExpertClient, Actor, Callable[[], bool]],
) -> None:
    client, actor, _ = connection
    reply = _call(client)
    actor.replies[0].set_result((0.5, "no array"))
    with pytest.raises(PipelineError, match="Expert actor 1/1 sent a reply that cannot be decoded"):
        reply.result(LIMIT_S)
