"""Record which experts tokens have chosen, for the sequences whose requests want it."""

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
    """The choices of one step of one stage. ``spans`` has the tokens to record, by layer; other layers are not recorded."""

    def __init__(self, spans: Mapping[int, list[TokenSpan]]) -> None:
        self._spans = spans
        self._chosen: dict[int, Tensor] = {}

    def record(self, layer: int, expert_ids_Tk: Tensor) -> None:
        """Keep what a layer's gate has chosen. It is read when the step has ended: on a GPU reading waits for the device."""
        if layer in self._spans:
            self._chosen[layer] = expert_ids_Tk

    def collect(self) -> tuple[ExpertChoices, ...]:
        """Return the choices in the order of layers, and within a layer in the order of rows. Waits for the device."""
        return tuple(choices for layer, ids_Tk in self._chosen.items() for choices in self._of_layer(layer, ids_Tk.cpu()))

    def _of_layer(self, layer: int, ids_Tk: Tensor) -> list[ExpertChoices]:
        return [
            ExpertChoices(span.seq_id, layer, span.start, tuple(map(tuple, ids_Tk[span.first_row :][: span.num_rows].tolist())))
            for span in self._spans[layer]
        ]


NO_RECORDER = ExpertChoiceRecorder({})


def expert_choice_recorder(batch: MicroBatch, table: SequenceTable, layers: range) -> ExpertChoiceRecorder:
    """Make the recorder of a micro-batch in a stage with these layers."""
    if not table.expert_layers:  # the usual case
        return NO_RECORDER
    spans = [span for span in _token_spans(batch) if span.seq_id in table.expert_layers]
    by_layer = {layer: [span for span in spans if layer in table.expert_layers[span.seq_id]] for layer in layers}
    return ExpertChoiceRecorder({layer: wanted for layer, wanted in by_layer.items() if wanted})


def _token_spans(batch: MicroBatch) -> list[TokenSpan]:
    """Return the rows of each sequence. Chunks of 3 and 2 tokens and two decodes: rows 0 to 2, 3 and 4, 5, 6."""
    spans, row = [], 0
    for chunk in batch.chunks:
        spans.append(TokenSpan(chunk.seq_id, chunk.start, row, chunk.num_tokens))
        row += chunk.num_tokens
    decodes = zip(batch.decodes.seq_ids, batch.decodes.starts, strict=True)
    return spans + [TokenSpan(seq_id, start, row + i, 1) for i, (seq_id, start) in enumerate(decodes)]
