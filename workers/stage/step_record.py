"""One step of a stage from its begin to its result, and its records: times, usage of expert actors,
and expert choices.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from torch import Tensor

from tramontane.proto.request import ExpertChoices
from tramontane.proto.step import ExpertTiming, MicroBatch, StageTiming, StepResult
from tramontane.proto.timing import steady_time
from tramontane.workers.attention.rolling_cache import StageSequences
from tramontane.workers.device.cuda import DeviceEvent, RecordEvent
from tramontane.workers.experts.remote_experts import PendingExpertCall, StepCoroutine
from tramontane.workers.stage.hidden_states import HiddenStates, StageOutput
from tramontane.workers.stage.last_stage import StepTokens

T = TypeVar("T")


class StepTimer:
    """The clock of one step, which is made when the step begins. Written by the thread that
    computes the step.

    ``make_event``: for a device that computes asynchronously. The device's time from ``start`` to
    ``stop`` is measured then, not the host's.
    """

    def __init__(self, make_event: RecordEvent | None = None) -> None:
        self._make_event = make_event
        self._first: DeviceEvent | None = None
        self._last: DeviceEvent | None = None
        self._started_at = steady_time()
        self._began = self._resumed = time.perf_counter()
        self._busy_s = self._expert_wait_s = self._experts_busy_s = 0.0
        self._actors_busy_s: Counter[int] = Counter()
        self._actors_rows: Counter[int] = Counter()

    def start(self) -> None:
        """Mark the start of the device's work: the inputs are on their way, and host preparation
        before does not count.
        """
        self._first = self._make_event() if self._make_event else None

    def exclude_waits(self, layers: StepCoroutine[T]) -> StepCoroutine[T]:
        """Run a coroutine, and leave the time between yield and resumption out of the busy time."""
        try:
            while True:
                call = next(layers)
                self._busy_s += time.perf_counter() - self._resumed
                yield call
                self._resumed = time.perf_counter()
        except StopIteration as end:
            value: T = end.value
            return value

    def record_usage(self, call: PendingExpertCall) -> None:
        """Add the usage of expert actors in one layer."""
        usage = call.usage
        self._expert_wait_s += usage.wait_s
        self._experts_busy_s += max((each.busy_s for each in usage.actors), default=0.0)
        for actor_id, busy_s, num_rows in usage.actors:
            self._actors_busy_s[actor_id] += busy_s  # type: ignore[assignment]
            self._actors_rows[actor_id] += num_rows

    def stop(self) -> None:
        """Mark the end of the step: all its work has been launched."""
        self._last = self._make_event() if self._make_event else None
        self._busy_s += time.perf_counter() - self._resumed

    def timing(self, stage_id: int, num_tokens: int) -> StageTiming:
        """Return the times of the step. Waits for the device, and raises its errors."""
        open_s = time.perf_counter() - self._began
        if self._first is not None and self._last is not None:
            self._last.wait()
            self._busy_s = open_s = self._last.seconds_since(self._first)
            self._started_at = steady_time() - open_s
        return StageTiming(
            stage_id,
            self._started_at,
            self._busy_s,
            num_tokens,
            open_s,
            self._expert_wait_s,
            self._experts_busy_s,
            tuple(
                ExpertTiming(actor, busy_s, self._actors_rows[actor])
                for actor, busy_s in self._actors_busy_s.items()
            ),
        )


class TokenSpan(NamedTuple):
    """Consecutive rows of a micro-batch that are consecutive tokens of one sequence, the first at
    position ``start``.
    """

    seq_id: int
    start: int
    first_row: int
    num_rows: int


class ExpertChoiceRecorder:
    """The experts that tokens have chosen, for the sequences whose requests want them.

    ``spans`` has the tokens to record, by layer; other layers are not recorded.
    """

    def __init__(self, spans: Mapping[int, list[TokenSpan]]) -> None:
        self._spans = spans
        self._chosen: dict[int, Tensor] = {}

    def record(self, layer: int, expert_ids_Tk: Tensor) -> None:
        """Keep the choices of a layer's gate. They are read when the step has ended: on a GPU
        reading waits for the device.
        """
        if layer in self._spans:
            self._chosen[layer] = expert_ids_Tk

    def collect(self) -> tuple[ExpertChoices, ...]:
        """Return the choices in the order of layers, and within a layer in the order of rows. Waits
        for the device.
        """
        return tuple(
            choices
            for layer, ids_Tk in self._chosen.items()
            for choices in self._of_layer(layer, ids_Tk.cpu())
        )

    def _of_layer(self, layer: int, ids_Tk: Tensor) -> list[ExpertChoices]:
        return [
            ExpertChoices(
                span.seq_id,
                layer,
                span.start,
                tuple(map(tuple, ids_Tk[span.first_row :][: span.num_rows].tolist())),
            )
            for span in self._spans[layer]
        ]


NO_RECORDER = ExpertChoiceRecorder({})


def expert_choice_recorder(
    batch: MicroBatch, table: StageSequences, layers: range
) -> ExpertChoiceRecorder:
    """Make the recorder of a micro-batch in a stage with these layers."""
    if not table.expert_layers:  # the usual case
        return NO_RECORDER
    spans = [span for span in _token_spans(batch) if span.seq_id in table.expert_layers]
    by_layer = {
        layer: [span for span in spans if layer in table.expert_layers[span.seq_id]]
        for layer in layers
    }
    return ExpertChoiceRecorder({layer: wanted for layer, wanted in by_layer.items() if wanted})


def _token_spans(batch: MicroBatch) -> list[TokenSpan]:
    """Return the rows of each sequence. Chunks of 3 and 2 tokens and two decodes: rows 0 to 2, 3
    and 4, 5, 6.
    """
    spans, row = [], 0
    for chunk in batch.chunks:
        spans.append(TokenSpan(chunk.seq_id, chunk.start, row, chunk.num_tokens))
        row += chunk.num_tokens
    decodes = zip(batch.decodes.seq_ids, batch.decodes.starts, strict=True)
    return spans + [
        TokenSpan(seq_id, start, row + i, 1) for i, (seq_id, start) in enumerate(decodes)
    ]


class BegunStep(NamedTuple):
    """A step that has begun: its input, on the stage's device, and its records."""

    batch: MicroBatch
    incoming: HiddenStates | None
    timer: StepTimer
    choices: ExpertChoiceRecorder


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step whose work has been launched on the device and not awaited.

    ``hidden_TD``: the output of a stage that is not the last one, to be sent in the order of the
    device's work. ``read_tokens``: waits for the tokens that the last stage has sampled.
    ``is_stateful``: reading changes the input of the next step, so the step has to be read before
    the next one begins.
    """

    begun: BegunStep
    stage_id: int
    hidden_TD: Tensor | None
    read_tokens: Callable[[], StepTokens] | None
    is_stateful: bool

    def read(self) -> StageOutput:
        """Wait for the device and return the outcome. Call it once."""
        batch, incoming, timer, recorder = self.begun
        timings = (
            *(incoming.timings if incoming else ()),
            timer.timing(self.stage_id, batch.num_tokens),
        )
        choices = (*(incoming.choices if incoming else ()), *recorder.collect())
        if self.read_tokens is None:
            assert self.hidden_TD is not None
            return HiddenStates(self.hidden_TD, timings, choices)
        token_ids, logprobs, finished = self.read_tokens()
        return StepResult(
            batch.epoch, batch.step_id, token_ids, timings, choices, logprobs, finished
        )
