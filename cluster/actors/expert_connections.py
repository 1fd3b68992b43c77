"""A stage's connections to expert actors: calls through Ray's object store, or direct channels that
Ray only sets up.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from torch import Tensor

from tramontane.cluster.actors.pipeline_spec import ExpertActorRefs
from tramontane.cluster.actors.worker_actor import NAMESPACE
from tramontane.cluster.common.ray_api import ray_error_message
from tramontane.proto.errors import (
    ExpertRelocatedError,
    ExpertUnavailableError,
    PipelineError,
    TramontaneError,
)
from tramontane.workers.device.cuda import to_device, to_host
from tramontane.workers.experts.expert_link import RETRY_S, DirectExpertClient, ExpertMessageLayout
from tramontane.workers.experts.expert_worker import ExpertCall, ExpertReply
from tramontane.workers.experts.remote_experts import Connect, ExpertConnection
from tramontane.workers.links.channel import Address
from tramontane.workers.links.gpu_channel import channel_factory_for

logger = logging.getLogger(__name__)


def expert_connector(experts: ExpertActorRefs, device: torch.device) -> Connect:
    """Return the function that connects the ``RemoteExperts`` of a stage on this device to an
    actor.
    """
    layout = ExpertMessageLayout.of(experts.plan, device)
    host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]

    def connect_to(actor_id: int, notify: Callable[[], None]) -> ExpertConnection:
        label = experts.plan.actors[actor_id].label
        actor = ray.get_actor(experts.names[actor_id], NAMESPACE)
        if experts.link == "direct":
            return DirectExpertClient(
                lambda calls: _exchange_addresses(actor, calls),
                notify,
                layout,
                host,
                channel_factory_for(device),
                label,
            )
        return ObjectStoreExpertClient(actor, notify, layout, label)

    return connect_to


def _exchange_addresses(actor: ActorHandle[Any], calls: Address) -> Address:
    """Send an actor the address of the calls, and return the address of its replies; see
    ``DirectExpertClient``.
    """
    try:
        ref: ray.ObjectRef[Address] = actor.open_link.options(concurrency_group="control").remote(
            calls
        )
        return ray.get(ref)
    except RayError as error:
        raise _to_pipeline_error(error) from None


def _to_pipeline_error(error: RayError) -> PipelineError:
    """Return ExpertUnavailableError, which is retried, unless the actor itself reports why it
    cannot load.
    """
    is_final = isinstance(error, TramontaneError) and not isinstance(error, ExpertUnavailableError)
    return (
        PipelineError(ray_error_message(error))
        if is_final
        else ExpertUnavailableError(ray_error_message(error))
    )


class ObjectStoreExpertClient:
    """``ExpertConnection`` by Ray calls: rows travel through the object store; small ones are
    inline.
    """

    def __init__(
        self,
        actor: ActorHandle[Any],
        notify: Callable[[], None],
        layout: ExpertMessageLayout,
        label: str,
    ) -> None:
        self._actor, self._notify, self._layout, self._label = actor, notify, layout, label
        self._lock = threading.Lock()
        self._is_reconnecting = self._is_closed = self.is_up = False
        self.failure: PipelineError | None = None
        self._reconnect()

    def call(self, call: ExpertCall, rows_CD: Tensor) -> "Future[ExpertReply]":
        """Start a call; errors of the actor or of Ray are set on the future."""
        future: Future[ExpertReply] = Future()
        if not self.is_up:
            future.set_exception(ExpertUnavailableError(f"{self._label} is not connected"))
            return future
        rows = to_host(rows_CD).view(torch.uint8).reshape(-1).numpy()
        ref: ray.ObjectRef[tuple[float, Any]] = self._actor.run.remote(tuple(call), rows)
        ref.future().add_done_callback(lambda done: self._on_reply(future, call, done))
        return future

    def close(self) -> None:
        """Stop reconnecting."""
        self._is_closed = True

    def _on_reply(
        self, future: "Future[ExpertReply]", call: ExpertCall, done: "Future[tuple[float, Any]]"
    ) -> None:
        """Resolve the future of a call. Runs in a thread of Ray, which swallows exceptions, so all
        are set on the future.
        """
        error = done.exception()
        if error is None:
            try:
                future.set_result(self._decode(call, *done.result()))
            except Exception as failure:
                future.set_exception(
                    PipelineError(f"{self._label} sent a reply that cannot be decoded: {failure!r}")
                )
        elif isinstance(error, ExpertRelocatedError):
            future.set_exception(
                ExpertRelocatedError(f"{self._label} no longer holds the experts that were called")
            )
        elif isinstance(error, RayTaskError) and not isinstance(error, RayActorError):
            future.set_exception(PipelineError(f"{self._label} failed: {ray_error_message(error)}"))
        else:  # the actor is dead, or its node with the reply
            self._reconnect()
            future.set_exception(
                ExpertUnavailableError(f"{self._label} is lost: {ray_error_message(error)}")
            )

    def _decode(self, call: ExpertCall, busy_s: float, rows: Any) -> ExpertReply:  # a numpy array
        rows_CD = torch.from_numpy(rows).view(self._layout.dtype).view(call.num_rows, -1)
        return ExpertReply(to_device(rows_CD, self._layout.device), busy_s)

    def _reconnect(self) -> None:
        """Start a thread that waits for the actor, unless one runs; ``is_up`` is False until it
        succeeds.
        """
        with self._lock:
            if self._is_reconnecting or self._is_closed:
                return
            self._is_reconnecting, self.is_up = True, False
        logger.warning("waiting for %s, with an attempt every %g s", self._label, RETRY_S)
        threading.Thread(target=self._reconnect_loop, name=self._label, daemon=True).start()

    def _reconnect_loop(self) -> None:
        """Wait until the actor is ready, or reports why it cannot load."""
        while not self._is_closed:
            try:
                ray.get(self._actor.ready.remote())
            except RayError as error:
                failure = _to_pipeline_error(error)
                if not isinstance(failure, ExpertUnavailableError):
                    self.failure = failure
                    break
                time.sleep(RETRY_S)
            else:
                break
        with self._lock:
            self._is_reconnecting, self.is_up = False, self.failure is None
        self._notify()
