"""A stage's ways to expert actors over Ray: calls through the object store, or only the introduction to a direct link."""

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
from tramontane.cluster.common.ray_errors import ray_error_message
from tramontane.proto.errors import ExpertRelocatedError, ExpertUnavailableError, PipelineError, TramontaneError
from tramontane.workers.device.pinned_memory import to_device, to_host
from tramontane.workers.experts.expert_link import RETRY_S, DirectExpertClient, ExpertMessageLayout
from tramontane.workers.experts.expert_worker import ExpertCall, ExpertReply
from tramontane.workers.experts.remote_experts import Connect, ExpertConnection
from tramontane.workers.links.channel import Address
from tramontane.workers.links.factory import channel_factory_for

logger = logging.getLogger(__name__)


def expert_connector(experts: ExpertActorRefs, device: torch.device) -> Connect:
    """For ``RemoteExperts`` of a stage on this device."""
    row_format = ExpertMessageLayout.of(experts.plan, device)
    host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]

    def connect_to(actor_id: int, notify: Callable[[], None]) -> ExpertConnection:
        label = experts.plan.actors[actor_id].label
        actor = ray.get_actor(experts.names[actor_id], NAMESPACE)
        if experts.link == "direct":
            return DirectExpertClient(
                lambda calls: _exchange_addresses(actor, calls), notify, row_format, host, channel_factory_for(device), label
            )
        return ObjectStoreExpertClient(actor, notify, row_format, label)

    return connect_to


def _exchange_addresses(actor: ActorHandle[Any], calls: Address) -> Address:
    """See ``DirectExpertClient``."""
    try:
        asked: ray.ObjectRef[Address] = actor.open_link.options(concurrency_group="control").remote(calls)
        return ray.get(asked)
    except RayError as error:
        raise _lost_or_failed(error) from None


def _lost_or_failed(error: RayError) -> PipelineError:
    """Final is only what the actor itself says of its loading; anything else may pass."""
    is_final = isinstance(error, TramontaneError) and not isinstance(error, ExpertUnavailableError)
    return PipelineError(ray_error_message(error)) if is_final else ExpertUnavailableError(ray_error_message(error))


class ObjectStoreExpertClient:
    """``ExpertConnection`` by Ray calls, whose rows travel through the object store; small ones ride inline."""

    def __init__(self, actor: ActorHandle[Any], notify: Callable[[], None], row_format: ExpertMessageLayout, label: str) -> None:
        self._actor, self._notify, self._format, self._label = actor, notify, row_format, label
        self._lock = threading.Lock()
        self._is_sought = self._is_closed = self.is_up = False
        self.failure: PipelineError | None = None
        self._reconnect()

    def call(self, call: ExpertCall, rows_CD: Tensor) -> "Future[ExpertReply]":
        future: Future[ExpertReply] = Future()
        if not self.is_up:
            future.set_exception(ExpertUnavailableError(f"{self._label} is not there"))
            return future
        rows = to_host(rows_CD).view(torch.uint8).reshape(-1).numpy()
        answer: ray.ObjectRef[tuple[float, Any]] = self._actor.run.remote(tuple(call), rows)
        answer.future().add_done_callback(lambda done: self._on_reply(future, call, done))
        return future

    def close(self) -> None:
        self._is_closed = True

    def _on_reply(self, future: "Future[ExpertReply]", call: ExpertCall, done: "Future[tuple[float, Any]]") -> None:
        """In a thread of Ray's, which swallows what is raised: whatever happens, who waits must hear of it."""
        error = done.exception()
        if error is None:
            try:
                future.set_result(self._unpacked(call, *done.result()))
            except Exception as failure:
                future.set_exception(PipelineError(f"{self._label} answered with what cannot be used: {failure!r}"))
        elif isinstance(error, ExpertRelocatedError):
            future.set_exception(ExpertRelocatedError(f"{self._label} does not hold them any more"))
        elif isinstance(error, RayTaskError) and not isinstance(error, RayActorError):
            future.set_exception(PipelineError(f"{self._label} failed: {ray_error_message(error)}"))
        else:  # the actor has gone, or its node with the answer
            self._reconnect()
            future.set_exception(ExpertUnavailableError(f"{self._label} is gone: {ray_error_message(error)}"))

    def _unpacked(self, call: ExpertCall, busy_s: float, rows: Any) -> ExpertReply:  # noqa: ANN401 - a numpy array
        rows_CD = torch.from_numpy(rows).view(self._format.dtype).view(call.num_rows, -1)
        return ExpertReply(to_device(rows_CD, self._format.device), busy_s)

    def _reconnect(self) -> None:
        """Until it is found the actor is not up."""
        with self._lock:
            if self._is_sought or self._is_closed:
                return
            self._is_sought, self.is_up = True, False
        logger.warning("%s: looked for", self._label)
        threading.Thread(target=self._reconnect_loop, name=self._label, daemon=True).start()

    def _reconnect_loop(self) -> None:
        """Until the actor answers, or says why it never will."""
        while not self._is_closed:
            try:
                ray.get(self._actor.ready.remote())
            except RayError as error:
                final = _lost_or_failed(error)
                if not isinstance(final, ExpertUnavailableError):
                    self.failure = final
                    break
                time.sleep(RETRY_S)
            else:
                break
        with self._lock:
            self._is_sought, self.is_up = False, self.failure is None
        self._notify()
