"""A tokenizer with pieces that a test chooses; ``ids`` are the ids of all pieces in order, from
0.
"""

from collections.abc import Sequence

from tramontane.router.tokenization.tokenizer import REPLACE, Tokenizer


class PieceTokenizer(Tokenizer):
    def __init__(self, pieces: Sequence[bytes], errors: str = REPLACE) -> None:
        super().__init__(tuple(pieces), bos_ids=frozenset(), strips_space=False, errors=errors)
        self.ids = tuple(range(len(pieces)))

    def _encode(self, text: str) -> tuple[int, ...]:
        raise NotImplementedError

    def control_id(self, name: str) -> int | None:
        return None
