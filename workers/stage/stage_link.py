"""The direct link: hidden states are sent from stage to stage over channels, which are reconnected
for every epoch.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from tramontane.proto.errors import LinkError, StaleEpochError
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.workers.links.channel import Address, Channel, ChannelFactory, Listener
from tramontane.workers.links.gpu_channel import channel_factory_for
from tramontane.workers.links.process_group_channel import first_line
from tramontane.workers.stage.hidden_states import HiddenStates, StageInput
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.stage.step_executor import StepExecutor


class StageLink:
    """The channels of one stage in one epoch. An error in one closes both, so that no other stage
    waits forever.

    One thread calls ``listen``, ``connect`` and ``step``, or as many as ``executor`` allows;
    ``close`` may be called from any other. ``host`` is the only address that is listened on.
    """

    def __init__(
        self,
        worker: StageWorker,
        executor: StepExecutor,
        host: str,
        channels: ChannelFactory | None = None,
    ) -> None:
        self._worker, self._executor = worker, executor
        self._host = host
        self._channels = channels or channel_factory_for(worker.device)
        self._listener: Listener | None = None
        self._inlet: Channel | None = None
        self._outlet: Channel | None = None
        self._is_closed = False

    def listen(self) -> Address | None:
        """Start to listen for the next stage; returns the address, or None if there is no next
        stage.
        """
        if self._worker.plan.is_last:
            return None
        self._listener = self._channels.listen(self._host)
        return self._listener.address

    def connect(self, inlet: Address | None) -> None:
        """Make the channels concurrently: from the previous stage, which listens at ``inlet``, and
        to the next. Raises LinkError.

        One after the other, each stage would wait for the one before it, and the last stage for all
        edges in turn.
        """
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="accept") as thread:
                accepting = thread.submit(self._accept_outlet)
                self._connect_inlet(inlet)
            accepting.result()
        except (OSError, RuntimeError) as error:
            self.close()
            stage = self._worker.plan.label
            raise LinkError(
                f"{stage} at {self._host} could not be linked to a neighbor: {first_line(error)}"
            ) from error.with_traceback(None)
        if self._is_closed:
            self.close()

    def step(self, batch: MicroBatch, last: StepResult | None = None) -> StepResult:
        """Run a step with hidden states from the previous stage and send its output to the next;
        return this stage's own part of the result. ``last``: the result of the previous step, see
        ``StageInput``.

        Raises LinkError, the errors of the computation, and StaleEpochError, which changes nothing.
        """
        # before the link is used: it may be the link of a later epoch, and not connected yet
        self._worker.check_epoch(batch)
        try:
            return self._linked_step(batch, last)
        except StaleEpochError:  # nothing was received for it, or an interruption closes the link
            raise
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the channels; steps that wait for a neighbor fail with LinkError. From any
        thread.
        """
        self._is_closed = True
        for end in (self._listener, self._inlet, self._outlet):
            if end is not None:
                end.close()

    def _accept_outlet(self) -> None:
        if self._listener is not None:
            self._outlet = self._listener.accept()

    def _connect_inlet(self, inlet: Address | None) -> None:
        try:
            if inlet is not None:
                self._inlet = self._channels.connect(inlet, self._host)
        except BaseException:
            if self._listener is not None:
                self._listener.close()  # this ends the wait for the next stage
            raise

    def _linked_step(self, batch: MicroBatch, last: StepResult | None) -> StepResult:
        plan = self._worker.plan
        if self._is_closed:
            raise LinkError(f"the link of {plan.label} to its neighbors is closed")
        if (self._inlet is None) != plan.is_first or (self._outlet is None) != plan.is_last:
            raise LinkError(f"{plan.label} is not linked to its neighbors")
        outcome = self._executor.step(
            batch, lambda: last if plan.is_first else self._receive(batch.num_tokens), self._send
        )
        if isinstance(outcome, StepResult):
            return outcome
        return StepResult(batch.epoch, batch.step_id, (), outcome.timings, outcome.choices)

    def _receive(self, num_tokens: int) -> StageInput:
        assert self._inlet is not None
        hidden_TD = torch.empty(
            num_tokens,
            self._worker.plan.args.dim,
            dtype=self._worker.dtype,
            device=self._worker.device,
        )
        self._inlet.receive(hidden_TD)
        return HiddenStates(hidden_TD, ())

    def _send(self, hidden_TD: Tensor | None) -> None:
        if hidden_TD is not None:
            assert self._outlet is not None
            self._outlet.send(hidden_TD)
