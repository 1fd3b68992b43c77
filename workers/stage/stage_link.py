"""The direct link: hidden states go from stage to stage over edges of two, made anew for every epoch."""

import torch
from torch import Tensor

from tramontane.proto.errors import LinkError
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.workers.links.channel import Address, Channel, ChannelFactory, Listener
from tramontane.workers.links.factory import channel_factory_for
from tramontane.workers.links.process_group_channel import first_line
from tramontane.workers.stage.activation import Activation
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.stage.step_executor import StepExecutor


class StageLink:
    """The edges of one stage in one epoch. What breaks one closes both, so that no stage beyond is left waiting.

    One thread calls ``listen``, ``connect`` and ``step``, or as many as ``steps`` is for; ``close`` may come from any other.
    ``host`` is the only address at which anything listens.
    """

    def __init__(self, worker: StageWorker, steps: StepExecutor, host: str, edges: ChannelFactory | None = None) -> None:
        self._worker, self._steps = worker, steps
        self._host = host
        self._edges = edges or channel_factory_for(worker.device)
        self._listener: Listener | None = None
        self._inlet: Channel | None = None
        self._outlet: Channel | None = None
        self._is_closed = False

    def listen(self) -> Address | None:
        """Where the next stage finds us; None if there is none."""
        if self._worker.plan.is_last:
            return None
        self._listener = self._edges.listen(self._host)
        return self._listener.address

    def connect(self, inlet: Address | None) -> None:
        """Make the edges, in the order of the stages: first from the one before, which listens at ``inlet``, then to the next."""
        try:
            if inlet is not None:
                self._inlet = self._edges.connect(inlet, self._host)
            if self._listener is not None:
                self._outlet = self._listener.accept()
        except (OSError, RuntimeError) as error:
            self.close()
            stage = self._worker.plan.label
            raise LinkError(
                f"{stage} at {self._host} could not be linked to a neighbour: {first_line(error)}"
            ) from error.with_traceback(None)
        if self._is_closed:
            self.close()

    def step(self, batch: MicroBatch) -> StepResult:
        """As ``StageWorker.step``, with hidden states from the stage before and to the next; returns this stage's own part.

        Raises StaleEpochError, which changes nothing, LinkError, and whatever the computation raises.
        """
        self._worker.check_epoch(batch)
        try:
            return self._linked_step(batch)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._is_closed = True
        for end in (self._listener, self._inlet, self._outlet):
            if end is not None:
                end.close()

    def _linked_step(self, batch: MicroBatch) -> StepResult:
        plan = self._worker.plan
        if self._is_closed:
            raise LinkError(f"the link of {plan.label} to its neighbours is closed")
        if (self._inlet is None) != plan.is_first or (self._outlet is None) != plan.is_last:
            raise LinkError(f"{plan.label} is not linked to its neighbours")
        outcome = self._steps.step(batch, lambda: self._receive(batch.num_tokens), self._send)
        if isinstance(outcome, StepResult):
            return outcome
        return StepResult(batch.epoch, batch.step_id, (), outcome.timings, outcome.choices)

    def _receive(self, num_tokens: int) -> Activation | None:
        if self._inlet is None:
            return None
        hidden_TD = torch.empty(num_tokens, self._worker.plan.args.dim, dtype=self._worker.dtype, device=self._worker.device)
        self._inlet.receive(hidden_TD)
        return Activation(hidden_TD, ())

    def _send(self, hidden_TD: Tensor | None) -> None:
        if hidden_TD is not None:
            assert self._outlet is not None
            self._outlet.send(hidden_TD)
