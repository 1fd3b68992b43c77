"""Calls of an ingress to routers, one or all: readiness, activity, expert load, digests of
prefixes, and the order to move experts.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from operator import attrgetter
from typing import Any

from ray.serve.handle import DeploymentHandle

from tramontane.cluster.common.ray_api import read_wait
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.measurements import ExpertLoad, MeasuredLoad
from tramontane.cluster.observability.logging import request_context
from tramontane.cluster.ray_internals.accessors import broadcast_results, configure_handle
from tramontane.cluster.serving.least_loaded_router import ONLY, exclude
from tramontane.proto.errors import ConfigError
from tramontane.proto.timing import ROUTER_READY_TIMEOUT_S
from tramontane.router.engine.activity_log import PipelineActivity
from tramontane.router.engine.health import PipelineHealth
from tramontane.router.engine.prefix_aware_routing import PrefixAwareRouting
from tramontane.router.scheduling.prefix_cache import cache_salt

HEALTH_TTL_S = 1.0  # for which the answer of the routers stands
STATUSES = ("ready", "degraded", "unavailable")
DIGEST_TIMEOUT_S = 2.0  # the other digests wait for a router that hangs
# The longest interval, with two timeouts, is less than ``prefix_aware_routing.MAX_AGE_S``; it is
# that for one pipeline, too.
DIGEST_INTERVAL_S, MAX_DIGEST_INTERVAL_S = 1.0, 5.0
# of an ingress: with 64 pipelines it queries every 3.2 s, which is 20 calls a second
S_PER_DIGEST = 0.05
RETIREMENT_POLL_INTERVAL_S = 2.0  # for routers that have requests and are to stop


def prefix_aware_routing(config: EngineConfig, model: str) -> PrefixAwareRouting | None:
    """Return the choice of a pipeline by prefixes, if they cache any; there may be several now or
    later. ``model``: its mark.
    """
    if not config.enable_prefix_caching:
        return None
    return PrefixAwareRouting(
        lambda salt: cache_salt(model, salt, share_prefixes=config.share_prefixes), _now
    )


class RouterQueries:
    """Calls to the routers behind a Ray Serve handle."""

    def __init__(self, handle: "DeploymentHandle[Any]", application: str = "") -> None:
        self._handle, self._application = handle, application
        self._health: asyncio.Task[PipelineHealth] | None = None  # the last query
        self._health_asked_at = -math.inf

    async def health(self) -> PipelineHealth:
        """Return the best health of any pipeline, as soon as one answers that it is ready.

        Routers are queried at most once a second, however many clients query this ingress: any
        client may, without a key.
        """
        now = asyncio.get_running_loop().time()
        if self._health is None or (
            self._health.done() and now >= self._health_asked_at + HEALTH_TTL_S
        ):
            self._health_asked_at = now
            # Not a part of the request of the client that happens to ask first, which may leave.
            self._health = asyncio.create_task(self._query_health(), context=request_context(""))
        return await asyncio.shield(self._health)

    def close(self) -> None:
        """Cancel a query of the health."""
        if self._health is not None:
            self._health.cancel()

    async def _query_health(self) -> PipelineHealth:
        answers: list[PipelineHealth] = await self._broadcast(
            "health", is_sufficient=lambda answer: answer.status == "ready"
        )
        best = min(answers, key=lambda each: STATUSES.index(each.status), default=None)
        if best is not None and best.is_serving:
            return best
        awaited = await read_wait(self._application)
        reason = awaited or (best.reason if best else "no router has answered")
        return PipelineHealth("unavailable", reason)

    async def expert_load(self) -> MeasuredLoad:
        """Return the summed load of all pipelines that answer in time."""
        return MeasuredLoad.summed(await self._broadcast("expert_load"))

    async def activity(self, after: Mapping[str, int]) -> list[PipelineActivity]:
        """Return the activity of all pipelines that report it in time, by name; see
        ``RouterReplica.activity``.
        """
        return sorted(await self._broadcast("activity", after), key=attrgetter("name"))

    async def follow_digests(self, routing: PrefixAwareRouting) -> None:
        """Query the digests of all pipelines at intervals, until cancelled. The clock of
        ``routing`` is the event loop's.
        """
        while True:
            asked_at = _now()
            digests = await self._broadcast(
                "prefix_digest", dict(routing.known), timeout_s=DIGEST_TIMEOUT_S
            )
            routing.update(digests, asked_at)
            wished_s = (
                max(DIGEST_INTERVAL_S, len(digests) * S_PER_DIGEST)
                if len(digests) > 1
                else math.inf
            )
            await asyncio.sleep(min(wished_s, MAX_DIGEST_INTERVAL_S))

    async def _broadcast(
        self,
        method: str,
        *arguments: object,
        is_sufficient: Callable[[Any], bool] = lambda _: False,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call all routers at once, and return the answers that arrive in time.

        A router that hangs or is lost does not affect the others. Returns early once an answer is
        sufficient.
        """
        answers: list[Any] = []
        calls = await self._broadcast_calls(method, *arguments)
        pending = {
            asyncio.create_task(_wait_for_answer(call, timeout_s or ROUTER_READY_TIMEOUT_S))
            for call in calls
        }
        try:
            while pending and not any(map(is_sufficient, answers)):
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                answers += [answer for task in done if (answer := task.result()) is not None]
        finally:
            for task in pending:
                task.cancel()
        return answers

    async def _broadcast_calls(self, method: str, *arguments: object) -> list[Any]:
        """Start the calls to all routers known to Ray Serve."""
        with suppress(Exception):  # no router is running
            async with asyncio.timeout(ROUTER_READY_TIMEOUT_S):
                calls: Any = configure_handle(self._handle, by_reference=False).broadcast(
                    method, *arguments
                )
                return await broadcast_results(calls)
        return []

    async def move_experts(self, load: ExpertLoad) -> tuple[int, int]:
        """Let every pipeline in turn rebalance its experts for this load; return how many experts
        were loaded, by how many pipelines.

        Raises ConfigError if a pipeline refuses and PipelineError if one fails; earlier pipelines
        have moved their experts by then.
        """
        num_moved = num_pipelines = 0
        async with aclosing(self._one_by_one("move_experts", load)) as answers:
            async for moved, refusal in answers:
                if refusal:
                    raise ConfigError(refusal)
                num_moved, num_pipelines = num_moved + moved, num_pipelines + 1
        return num_moved, num_pipelines

    async def wait_until_retiring(self, replica: str, grace_s: float) -> None:
        """Return once Ray Serve has not routed to this router for ``grace_s``, because it is to
        stop and another one runs.
        """
        retired_at = math.inf
        while asyncio.get_running_loop().time() < retired_at + grace_s:
            await asyncio.sleep(RETIREMENT_POLL_INTERVAL_S)
            if not await self._is_retired(replica):
                retired_at = math.inf
            elif retired_at == math.inf:
                retired_at = asyncio.get_running_loop().time()

    async def _is_retired(self, replica: str) -> bool:
        """Return whether another router gets a call addressed to this one."""
        with suppress(Exception):  # routers may fail to answer for any reason
            async with asyncio.timeout(ROUTER_READY_TIMEOUT_S):
                _, responder = await cancellable(self.method("health", ONLY + replica).remote())
                return bool(responder != replica)
        return False

    async def _one_by_one(self, method: str, *arguments: object) -> AsyncGenerator[Any, None]:
        """Call one router after the other, and yield their answers. Each answer includes the
        router's name.
        """
        called: set[str] = set()
        while True:
            answer, replica = await cancellable(
                self.method(method, exclude(called)).remote(*arguments)
            )
            if replica in called:  # there is no further router
                return
            called.add(replica)
            yield answer

    def method(
        self, name: str, constraint: str, *, stream: bool = False, by_reference: bool = False
    ) -> "DeploymentHandle[Any]":
        """Return the handle of a method; see ``least_loaded_router`` for ``constraint``.

        Calls use gRPC between replicas, a third less work for an ingress than Ray objects, unless
        ``by_reference``.
        """
        return configure_handle(
            self._handle,
            by_reference=by_reference,
            method_name=name,
            session_id=constraint,
            stream=stream,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _wait_for_answer(call: Any, timeout_s: float) -> Any:  # of Ray Serve, to one router
    """Return a call's answer without the router's name; None if there is no answer in time."""
    try:
        async with asyncio.timeout(timeout_s):
            answer, _ = await call.get_async()
            return answer
    except Exception:  # a router may fail to answer for any reason
        call.cancel()
        return None
    except asyncio.CancelledError:
        call.cancel()
        raise


async def cancellable(response: Any) -> Any:  # DeploymentResponse, whose types lack cancel
    """Wait for a response, and cancel its call if the waiting task is cancelled, which Ray Serve
    does not do by itself.
    """
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
