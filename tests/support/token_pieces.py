"""A tokenizer whose pieces a test chooses: its first id is 0, and its text is all of them in order."""

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
