"""A stage's view of experts on actors: the assignment of rows to actors, and the handling of actors
that do not answer.

Shape letters: C choices (a token once for each of its experts), D model width.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from tramontane.proto.errors import ExpertRelocatedError, ExpertUnavailableError, PipelineError
from tramontane.proto.plan import ExpertId, ExpertPlan
from tramontane.proto.step import ExpertTiming, ExpertUsage
from tramontane.workers.experts.expert_worker import ExpertCall, ExpertReply
from tramontane.workers.model.grouped_query_attention import AttentionFn
from tramontane.workers.model.moe import ExpertPermutation
from tramontane.workers.model.rotary import RotaryTables
from tramontane.workers.model.transformer import OnChoices, StageModel

MOVE_RETRY_S = 0.02


class ExpertConnection(Protocol):
    """The connection to one expert actor, which may die and come back. One thread calls; replies
    arrive on others.
    """

    @property
    def is_up(self) -> bool:
        """Whether the actor can be called now."""

    @property
    def failure(self) -> PipelineError | None:
        """Why the actor will never be up again, or None."""

    def call(self, call: ExpertCall, rows_CD: Tensor) -> "Future[ExpertReply]":
        """Send a call.

        It fails with ExpertUnavailableError if the actor is not up or dies before it has answered,
        and with other errors if the call itself fails.
        """

    def close(self) -> None:
        """Close the connection; calls without an answer fail."""


# (actor id, called whenever the actor goes up or down)
Connect = Callable[[int, Callable[[], None]], ExpertConnection]


class RemoteExperts:
    """The experts of a stage whose experts are on actors. Only the thread that computes calls its
    methods.

    A stage sends one message per actor and layer of a micro-batch. All rows of an expert go to one
    of its replicas, so that they are multiplied as one matrix and the results do not depend on the
    replica. This is the replica with the fewest queued rows, as far as this stage knows, and among
    equals the replica that has been sent the fewest rows.

    ``condition`` is notified whenever ``PendingExpertCall.poll`` may make progress.
    """

    def __init__(
        self,
        plan: ExpertPlan,
        connect: Connect,
        current_plan: Callable[[], ExpertPlan] | None = None,
    ) -> None:
        self.condition = threading.Condition()
        # called when an actor's experts differ from the plan
        self._current_plan = current_plan or (lambda: plan)
        self._placement = plan.placement
        self._queued = Counter[int]()  # rows sent to each actor and not answered
        self._sent = Counter[int]()  # all rows sent to each actor
        self._connections = [connect(actor.actor_id, self._notify) for actor in plan.actors]

    def set_plan(self, plan: ExpertPlan) -> None:
        """Call the actors of this plan from now on; pending replies of other actors are still
        accepted.
        """
        self._placement = plan.placement

    def refresh_plan(self) -> None:
        """Read the current plan after an expert has moved. Sleeps if it has not changed yet, to
        limit the rate of retries.
        """
        previous = self._placement
        self.set_plan(self._current_plan())
        if self._placement == previous:
            time.sleep(MOVE_RETRY_S)

    def close(self) -> None:
        """Close all connections; calls without an answer fail."""
        for connection in self._connections:
            connection.close()

    def dispatch(
        self, layer: int, rows_CD: Tensor, groups: ExpertPermutation
    ) -> "PendingExpertCall":
        """Send each expert's group of rows [C, D] to an actor. On a GPU this waits for the sizes of
        the groups.
        """
        return PendingExpertCall(self, layer, rows_CD, groups.sizes)

    def select_replicas(
        self, layer: int, sizes: dict[int, int]
    ) -> tuple[dict[int, tuple[int, ...]], tuple[int, ...]]:
        """Choose an actor that is up for each expert; returns each actor's experts, and the experts
        without such an actor.

        The largest group comes first. Sizes {0: 5, 1: 4, 2: 3}, both actors hold all and are idle:
        0 is sent to the first, 1 and 2 to the second, which then has 7.
        """
        assigned: dict[int, list[int]] = {}
        unavailable = []
        queued = self._queued.copy()
        for expert in sorted(sizes, key=lambda expert: (-sizes[expert], expert)):
            candidates = [
                actor for actor in self.holders(layer, expert) if self._connections[actor].is_up
            ]
            if not candidates:
                unavailable.append(expert)
                continue
            actor = min(candidates, key=lambda actor: (queued[actor], self._sent[actor], actor))
            assigned.setdefault(actor, []).append(expert)
            queued[actor] += sizes[expert]
            self._sent[actor] += sizes[expert]
        return {actor: tuple(sorted(experts)) for actor, experts in assigned.items()}, tuple(
            unavailable
        )

    def holders(self, layer: int, expert: int) -> tuple[int, ...]:
        """Return the ids of the actors that hold this expert."""
        return self._placement[ExpertId(layer, expert)]

    def is_any_up(self, actors: Sequence[int]) -> bool:
        """Whether any of the actors can be called now."""
        return any(self._connections[actor].is_up for actor in actors)

    def failure(self, actors: Sequence[int]) -> PipelineError | None:
        """Return the reason if none of the actors will ever be up again, else None."""
        failures = [self._connections[actor].failure for actor in actors]
        return failures[0] if all(failures) else None

    def check(self) -> None:
        """Raise PipelineError if an expert is permanently unavailable."""
        failures = (self.failure(actors) for actors in set(self._placement.values()))
        if (failure := next(filter(None, failures), None)) is not None:
            raise PipelineError(str(failure))

    def call(self, actor: int, call: ExpertCall, rows_CD: Tensor) -> "Future[ExpertReply]":
        """Send a call, and count its rows as queued until it is answered."""
        with self.condition:
            self._queued[actor] += call.num_rows
        future = self._connections[actor].call(call, rows_CD)
        future.add_done_callback(lambda _: self._on_done(actor, call.num_rows))
        return future

    def _on_done(self, actor: int, num_rows: int) -> None:
        with self.condition:
            self._queued[actor] -= num_rows

    def _notify(self) -> None:
        """Handle an actor's change between up and down.

        The counts of sent rows restart: otherwise an actor that was down would receive all rows
        until it has caught up.
        """
        with self.condition:
            self._sent.clear()
            self.condition.notify_all()


class _Part(NamedTuple):
    """The call to one actor."""

    actor_id: int
    experts: tuple[int, ...]
    future: "Future[ExpertReply]"


class PendingExpertCall:
    """The pending call of the experts of one layer of one micro-batch. The result does not depend
    on the order of the replies.
    """

    def __init__(
        self, experts: RemoteExperts, layer: int, rows_CD: Tensor, sizes: Sequence[int]
    ) -> None:
        self.layer = layer
        self._experts, self._rows_CD = experts, rows_CD
        self._sizes = {expert: size for expert, size in enumerate(sizes) if size}
        ends = torch.tensor(sizes).cumsum(0).tolist()
        self._slices = {
            expert: slice(ends[expert] - size, ends[expert]) for expert, size in self._sizes.items()
        }
        self._done_CD = torch.empty_like(rows_CD)
        self._parts: list[_Part] = []
        self._unavailable: tuple[int, ...] = ()  # experts that no living actor holds
        self._asked_at = self._answered_at = time.perf_counter()
        self._actors: list[ExpertTiming] = []
        self._send(self._sizes)

    @property
    def is_ready(self) -> bool:
        """Whether ``poll`` can make progress: all replies or one error have arrived, or an actor is
        up again.
        """
        futures = [part.future for part in self._parts]
        is_done = [future.done() for future in futures]
        if any(
            done and future.exception() is not None
            for done, future in zip(is_done, futures, strict=True)
        ):
            return True
        if self._unavailable:
            return self._can_retry() or self._failure() is not None
        return all(is_done)

    def poll(self) -> bool:
        """Process the replies that have arrived and retry failed parts; returns whether all rows
        are done.

        Raises PipelineError if an expert is permanently unavailable.
        """
        retried = {}
        if (failure := self._failure()) is not None:
            # a new error: every raise grows an exception's traceback
            raise PipelineError(str(failure))
        if self._can_retry():
            retried = dict.fromkeys(self._unavailable)
            self._unavailable = ()
        for part in [part for part in self._parts if part.future.done()]:
            self._parts.remove(part)
            try:
                self._scatter(part, part.future.result())
            except ExpertUnavailableError as error:
                if isinstance(error, ExpertRelocatedError):
                    self._experts.refresh_plan()
                retried |= dict.fromkeys(part.experts)
        if retried:
            self._send({expert: self._sizes[expert] for expert in retried})
        return not self._parts and not self._unavailable

    @property
    def usage(self) -> ExpertUsage:
        """The times of the actors, once all rows are done."""
        return ExpertUsage(self._answered_at - self._asked_at, tuple(self._actors))

    def result(self) -> Tensor:
        """Return the experts' results in the order of the given rows, [C, D], once all rows are
        done.
        """
        return self._done_CD

    def _send(self, sizes: dict[int, int]) -> None:
        assigned, unavailable = self._experts.select_replicas(self.layer, sizes)
        self._unavailable += unavailable
        for actor, experts in assigned.items():
            call = ExpertCall(self.layer, experts, tuple(sizes[expert] for expert in experts))
            future = self._experts.call(actor, call, self._rows_of(experts))
            self._parts.append(_Part(actor, experts, future))
            future.add_done_callback(self._on_reply)

    def _rows_of(self, experts: Sequence[int]) -> Tensor:
        groups = [self._rows_CD[self._slices[expert]] for expert in experts]
        return groups[0] if len(groups) == 1 else torch.cat(groups)

    def _scatter(self, part: _Part, reply: ExpertReply) -> None:
        sizes = [self._sizes[expert] for expert in part.experts]
        for expert, rows_CD in zip(part.experts, torch.split(reply.rows_CD, sizes), strict=True):
            self._done_CD[self._slices[expert]] = rows_CD
        self._actors.append(ExpertTiming(part.actor_id, reply.busy_s, sum(sizes)))

    def _can_retry(self) -> bool:
        return any(
            self._experts.is_any_up(self._experts.holders(self.layer, expert))
            for expert in self._unavailable
        )

    def _failure(self) -> PipelineError | None:
        failures = (
            self._experts.failure(self._experts.holders(self.layer, expert))
            for expert in self._unavailable
        )
        return next((failure for failure in failures if failure is not None), None)

    def _on_reply(self, _: "Future[ExpertReply]") -> None:
        """Notify the computing thread. Called on another thread, or on this one if the reply
        arrived immediately.
        """
        self._answered_at = time.perf_counter()
        with self._experts.condition:
            if self.is_ready:
                self._experts.condition.notify_all()


# The forward pass of a stage whose experts are on actors: a coroutine that yields while they work.
#
# It runs the layers of ``StageModel`` and differs from ``StageModel.forward`` only in the
# computation of experts.

T = TypeVar("T")
# computes a T, and yields every call that has no answer yet
StepCoroutine = Generator[PendingExpertCall, None, T]
OnUsage = Callable[[PendingExpertCall], None]  # called when all experts of a layer have answered


def forward_with_remote_experts(
    model: StageModel,
    experts: RemoteExperts,
    hidden_TD: Tensor,
    rotary: RotaryTables,
    attend: AttentionFn,
    on_choices: OnChoices,
    on_usage: OnUsage,
) -> StepCoroutine[Tensor]:
    """Run all layers, [T, D] to [T, D]; yield in every layer once its experts have been called.

    It may be resumed at any time, and yields the same call again until all answers are there.
    Raises PipelineError if an expert is permanently unavailable.
    """
    added_TD: Tensor | None = None
    for layer in model.global_layers:
        hidden_TD, x_TD = model.block(layer)(hidden_TD, added_TD, rotary, attend)
        if model.block(layer).gate is None:
            added_TD = model.feed_forward(layer, x_TD)
            continue
        groups, weights_Tk = model.choose_experts(layer, x_TD, on_choices)
        call = experts.dispatch(layer, groups.permute(x_TD), groups)
        shared_TD = model.run_shared_experts(layer, x_TD)  # while the actors compute
        yield call
        while not call.poll():
            yield call
        on_usage(call)
        added_TD = groups.combine(call.result(), weights_Tk)
        if shared_TD is not None:
            added_TD = added_TD + shared_TD
    assert added_TD is not None
    return hidden_TD + added_TD
