"""Which experts the tokens of a request have chosen, from the stages to whoever asked for them."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from tramontane.proto.request import ExpertChoices


class ExpertHistory:
    """Keeps what was chosen until a token of the same sequence goes out. No position goes out twice: what a sequence that gave
    its pages back computes again is the same, up to float rounding.
    """

    def __init__(self) -> None:
        self._num_known: Counter[tuple[int, int]] = Counter()  # positions, by sequence and layer
        self._held: defaultdict[int, list[ExpertChoices]] = defaultdict(list)  # by sequence

    def begin_at(self, seq_id: int, layers: Iterable[int], position: int) -> None:
        """All before it has been told, by another router."""
        self._num_known.update(dict.fromkeys(((seq_id, layer) for layer in layers), position))

    def add(self, choices: ExpertChoices) -> None:
        """Positions follow each other, or begin anew. Of 0..4 and 3..6 the second adds 5 and 6."""
        key = choices.seq_id, choices.layer
        num_known = self._num_known[key]
        assert choices.start <= num_known, "positions are missing"
        if new := choices.expert_ids[num_known - choices.start :]:
            self._held[choices.seq_id].append(choices._replace(start=num_known, expert_ids=new))
            self._num_known[key] += len(new)

    def take(self, seq_id: int) -> list[ExpertChoices]:
        return self._held.pop(seq_id, [])


def by_layer(choices: Iterable[ExpertChoices], first: int, end: int) -> dict[str, list[tuple[int, ...]]]:
    """Of the positions first..end-1 of one sequence, token by token; a layer of which none is there is left out.

    Positions 2..4 of layer 7, asked for 3..9: {"7": [those of 3, those of 4]}.
    """
    told: defaultdict[str, list[tuple[int, ...]]] = defaultdict(list)
    for _, layer, start, expert_ids in choices:
        if part := expert_ids[max(first - start, 0) : max(end - start, 0)]:
            told[str(layer)] += part
    return dict(told)
