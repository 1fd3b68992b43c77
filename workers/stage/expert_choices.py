"""Which experts tokens have chosen, kept for the sequences that ask for it."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from tramontane.proto.request import ExpertChoices
from tramontane.proto.step import MicroBatch
from tramontane.workers.attention.rolling_cache import SequenceTable


class TokenSpan(NamedTuple):
    """Consecutive rows of a micro-batch that are consecutive tokens of one sequence, the first at position ``start``."""

    seq_id: int
    start: int
    first_row: int
    num_rows: int


class ExpertChoiceRecorder:
    """Of one step of one stage: ``runs`` has those that ask for a layer, by the layer. Other layers are not kept."""

    def __init__(self, runs: Mapping[int, list[TokenSpan]]) -> None:
        self._runs = runs
        self._kept: dict[int, Tensor] = {}

    def record(self, layer: int, expert_ids_Tk: Tensor) -> None:
        """What a layer's gate has chosen. Nothing is read before the step ends: on a GPU that would wait for it."""
        if layer in self._runs:
            self._kept[layer] = expert_ids_Tk

    def collect(self) -> tuple[ExpertChoices, ...]:
        """In the order of layers, each in that of the row."""
        return tuple(choices for layer, ids_Tk in self._kept.items() for choices in self._of_layer(layer, ids_Tk.cpu()))

    def _of_layer(self, layer: int, ids_Tk: Tensor) -> list[ExpertChoices]:
        return [
            ExpertChoices(run.seq_id, layer, run.start, tuple(map(tuple, ids_Tk[run.first_row :][: run.num_rows].tolist())))
            for run in self._runs[layer]
        ]


NO_RECORDER = ExpertChoiceRecorder({})


def expert_choice_recorder(batch: MicroBatch, table: SequenceTable, layers: range) -> ExpertChoiceRecorder:
    """Where to keep what a stage with these layers is asked for by the sequences of a micro-batch."""
    if not table.expert_layers:  # nearly always
        return NO_RECORDER
    runs = [run for run in _runs(batch) if run.seq_id in table.expert_layers]
    by_layer = {layer: [run for run in runs if layer in table.expert_layers[run.seq_id]] for layer in layers}
    return ExpertChoiceRecorder({layer: asking for layer, asking in by_layer.items() if asking})


def _runs(batch: MicroBatch) -> list[TokenSpan]:
    """Chunks of 3 and 2 tokens and two decodes: rows 0 to 2, 3 and 4, 5, 6."""
    runs, row = [], 0
    for chunk in batch.chunks:
        runs.append(TokenSpan(chunk.seq_id, chunk.start, row, chunk.num_tokens))
        row += chunk.num_tokens
    decodes = zip(batch.decodes.seq_ids, batch.decodes.starts, strict=True)
    return runs + [TokenSpan(seq_id, start, row + place, 1) for place, (seq_id, start) in enumerate(decodes)]
