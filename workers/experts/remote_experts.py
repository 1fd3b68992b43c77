"""Experts on actors of their own, as a stage sees them: who is asked for which group of rows, and what if nobody answers.

Shape letters: C choices (a token once for each of its experts), D model width.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tramontane.proto.errors import ExpertRelocatedError, ExpertUnavailableError, PipelineError
from tramontane.proto.plan import ExpertId, ExpertPlan
from tramontane.proto.ports import ExpertGroups
from tramontane.proto.step import ExpertTiming, ExpertUsage
from tramontane.workers.experts.expert_worker import ExpertCall, ExpertReply

MOVE_RETRY_S = 0.02


class ExpertConnection(Protocol):
    """The way to one expert actor, which may die and come back. One thread calls; answers come on others."""

    @property
    def is_up(self) -> bool: ...

    @property
    def failure(self) -> PipelineError | None:
        """Why the actor will never be up again, if that is known."""
        ...

    def call(self, call: ExpertCall, rows_CD: Tensor) -> "Future[ExpertReply]":
        """Fails with ExpertUnavailableError if the actor dies before it has answered, or is not up; other errors are the
        call's own."""
        ...

    def close(self) -> None:
        """Calls that have not been answered fail."""


Connect = Callable[[int, Callable[[], None]], ExpertConnection]  # to an actor by its number; whose ups and downs are told


class RemoteExperts:
    """The ``ExpertBackend`` of a stage whose experts are elsewhere. Its methods are for the thread that computes.

    One message per actor and layer of a micro-batch. All rows of an expert go to one of its replicas, so that they are
    multiplied as one matrix wherever that is, and come out the same: to the one that has fewest rows to do, as far as this
    stage knows, and of those to the one that has had fewest.

    ``news`` is notified whenever ``advance`` of something that was asked may have something to do.
    """

    def __init__(self, plan: ExpertPlan, connect: Connect, current_plan: Callable[[], ExpertPlan] | None = None) -> None:
        self.condition = threading.Condition()
        self._current_plan = current_plan or (lambda: plan)  # asked when an actor does not hold what the plan says
        self._holders = plan.placement
        self._queued = [0] * len(plan.actors)  # rows that each was sent and has not answered
        self._sent = [0] * len(plan.actors)  # rows in all
        self._connections = [connect(actor.actor_id, self._notify) for actor in plan.actors]

    def set_plan(self, plan: ExpertPlan) -> None:
        """From the next call on, ask whoever this plan says; answers that are due may still come."""
        self._holders = plan.placement

    def refresh_plan(self) -> None:
        """Experts have moved, or are about to: then the plan is still the old one, and it is not asked for at full speed."""
        before = self._holders
        self.set_plan(self._current_plan())
        if self._holders == before:
            time.sleep(MOVE_RETRY_S)

    def close(self) -> None:
        """Calls that have not been answered fail."""
        for connection in self._connections:
            connection.close()

    @property
    def is_graph_safe(self) -> bool:
        """See ``ExpertBackend``: who is sent how much is decided on the host."""
        return False

    def dispatch(self, layer: int, rows_CD: Tensor, groups: ExpertGroups) -> "PendingExpertCall":
        """See ``ExpertBackend``; rows are [C, D]."""
        return PendingExpertCall(self, layer, rows_CD, groups.sizes)

    def select_replicas(self, layer: int, sizes: dict[int, int]) -> tuple[dict[int, tuple[int, ...]], tuple[int, ...]]:
        """Which living actor is to run which of these experts, and the experts that no living actor holds.

        The largest group first. Sizes {0: 5, 1: 4, 2: 3}, both actors hold all and are idle: 0 to the first, 1 to the second
        and 2 as well, which then has 7.
        """
        given: dict[int, list[int]] = {}
        nobody = []
        queued = list(self._queued)
        for expert in sorted(sizes, key=lambda expert: (-sizes[expert], expert)):
            able = [actor for actor in self.holders(layer, expert) if self._connections[actor].is_up]
            if not able:
                nobody.append(expert)
                continue
            actor = min(able, key=lambda actor: (queued[actor], self._sent[actor], actor))
            given.setdefault(actor, []).append(expert)
            queued[actor] += sizes[expert]
            self._sent[actor] += sizes[expert]
        return {actor: tuple(sorted(experts)) for actor, experts in given.items()}, tuple(nobody)

    def holders(self, layer: int, expert: int) -> tuple[int, ...]:
        """Numbers of the actors that have this expert."""
        return self._holders[ExpertId(layer, expert)]

    def is_any_up(self, actors: Sequence[int]) -> bool:
        return any(self._connections[actor].is_up for actor in actors)

    def failure(self, actors: Sequence[int]) -> PipelineError | None:
        """Why none of them will ever be up, if that is known of all."""
        failures = [self._connections[actor].failure for actor in actors]
        return failures[0] if all(failures) else None

    def check(self) -> None:
        """Raises PipelineError if there is an expert that no actor will ever run again."""
        failures = (self.failure(actors) for actors in set(self._holders.values()))
        if (failure := next(filter(None, failures), None)) is not None:
            raise PipelineError(str(failure))

    def call(self, actor: int, call: ExpertCall, rows_CD: Tensor) -> "Future[ExpertReply]":
        """Send it, and count its rows as queued until it is answered."""
        with self.condition:
            self._queued[actor] += call.num_rows
        future = self._connections[actor].call(call, rows_CD)
        future.add_done_callback(lambda _: self._answered(actor, call.num_rows))
        return future

    def _answered(self, actor: int, num_rows: int) -> None:
        with self.condition:
            self._queued[actor] -= num_rows

    def _notify(self) -> None:
        """An actor has come or gone. What each was sent counts from now on: who was away has nothing to make up for."""
        with self.condition:
            self._sent = [0] * len(self._sent)
            self.condition.notify_all()


class _Part(NamedTuple):
    """What one actor has been asked for."""

    actor_id: int
    experts: tuple[int, ...]
    future: "Future[ExpertReply]"


class PendingExpertCall:
    """``PendingExperts`` of one layer of one micro-batch. Rows go to their place whenever they come: timing decides nothing."""

    def __init__(self, experts: RemoteExperts, layer: int, rows_CD: Tensor, sizes: Sequence[int]) -> None:
        self.layer = layer
        self._experts, self._rows_CD = experts, rows_CD
        self._sizes = {expert: size for expert, size in enumerate(sizes) if size}
        ends = torch.tensor(sizes).cumsum(0).tolist()
        self._place = {expert: slice(ends[expert] - size, ends[expert]) for expert, size in self._sizes.items()}
        self._done_CD = torch.empty_like(rows_CD)
        self._parts: list[_Part] = []
        self._nobody: tuple[int, ...] = ()  # experts that no living actor holds
        self._asked_at = self._answered_at = time.perf_counter()
        self._actors: list[ExpertTiming] = []
        self._ask(self._sizes)

    @property
    def is_ready(self) -> bool:
        """Of answers the last one is news, of what is lost the first, and that somebody is back."""
        futures = [part.future for part in self._parts]
        is_over = [future.done() for future in futures]
        if any(over and future.exception() is not None for over, future in zip(is_over, futures, strict=True)):
            return True
        if self._nobody:
            return self._may_ask_again() or self._failure() is not None
        return all(is_over)

    def wait(self) -> None:
        with self._experts.condition:
            self._experts.condition.wait_for(lambda: self.is_ready)

    def poll(self) -> bool:
        again = {}
        if (failure := self._failure()) is not None:
            raise PipelineError(str(failure))  # its own: every raise grows an exception's traceback
        if self._nobody and self._may_ask_again():
            again = dict.fromkeys(self._nobody)
            self._nobody = ()
        for part in [part for part in self._parts if part.future.done()]:
            self._parts.remove(part)
            try:
                self._take(part, part.future.result())
            except ExpertUnavailableError as error:
                if isinstance(error, ExpertRelocatedError):
                    self._experts.refresh_plan()
                again |= dict.fromkeys(part.experts)
        if again:
            self._ask({expert: self._sizes[expert] for expert in again})
        return not self._parts and not self._nobody

    @property
    def usage(self) -> ExpertUsage:
        return ExpertUsage(self._answered_at - self._asked_at, tuple(self._actors))

    def result(self) -> Tensor:
        return self._done_CD

    def _ask(self, sizes: dict[int, int]) -> None:
        given, nobody = self._experts.select_replicas(self.layer, sizes)
        self._nobody += nobody
        for actor, experts in given.items():
            call = ExpertCall(self.layer, experts, tuple(sizes[expert] for expert in experts))
            future = self._experts.call(actor, call, self._rows_of(experts))
            self._parts.append(_Part(actor, experts, future))
            future.add_done_callback(self._on_reply)

    def _rows_of(self, experts: Sequence[int]) -> Tensor:
        groups = [self._rows_CD[self._place[expert]] for expert in experts]
        return groups[0] if len(groups) == 1 else torch.cat(groups)

    def _take(self, part: _Part, reply: ExpertReply) -> None:
        sizes = [self._sizes[expert] for expert in part.experts]
        for expert, rows_CD in zip(part.experts, torch.split(reply.rows_CD, sizes), strict=True):
            self._done_CD[self._place[expert]] = rows_CD
        self._actors.append(ExpertTiming(part.actor_id, reply.busy_s, sum(sizes)))

    def _may_ask_again(self) -> bool:
        return any(self._experts.is_any_up(self._experts.holders(self.layer, expert)) for expert in self._nobody)

    def _failure(self) -> PipelineError | None:
        failures = (self._experts.failure(self._experts.holders(self.layer, expert)) for expert in self._nobody)
        return next((failure for failure in failures if failure is not None), None)

    def _on_reply(self, _: "Future[ExpertReply]") -> None:
        """On another thread; also where the answer was there at once."""
        self._answered_at = time.perf_counter()
        with self._experts.condition:
            if self.is_ready:
                self._experts.condition.notify_all()
