"""What the last stage needs of the tokenizer: the text that every token stands for, read where it works, and when it must."""

from dataclasses import dataclass
from pathlib import Path

from tramontane.router.tokenization.loader import open_tokenizer


@dataclass(frozen=True, slots=True)
class PiecesOf:
    """Of a checkpoint's tokenizer; of a folder without one, nothing."""

    folder: Path
    vocab_size: int

    def __call__(self) -> tuple[bytes, ...]:
        """Raises CheckpointError for what ``open_tokenizer`` raises it for."""
        tokenizer = open_tokenizer(self.folder, self.vocab_size)
        return tokenizer.vocabulary() if tokenizer else ()
