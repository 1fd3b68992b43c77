"""Prompts that ask for the text between a prompt and a suffix (FIM, fill in the middle), with
mistral-common's token ids.
"""

from tramontane.proto.errors import RequestError
from tramontane.router.tokenization.tokenizer import Tokenizer

NO_FIM = (
    "this model's tokenizer has no tokens for a suffix, as Codestral's has ([SUFFIX] and [PREFIX])"
)
# Encoded before a suffix and dropped, so that SentencePiece puts no space there. mistral-common
# does so with every tokenizer.
AHEAD, NUM_AHEAD = "\u263a", 2  # the character, and how many tokens are dropped


def encode_fim(tokenizer: Tokenizer, prompt: str, suffix: str) -> tuple[int, ...]:
    """Return the token ids after which the model writes what is between prompt and suffix.

    Raises RequestError if the tokenizer lacks a control token of such prompts, and for invalid
    Unicode.
    """
    suffix_id, prefix_id = tokenizer.control_id("[SUFFIX]"), tokenizer.control_id("[PREFIX]")
    if suffix_id is None or prefix_id is None:
        raise RequestError(NO_FIM)
    beginning = tokenizer.encode("")
    num_ahead = len(beginning) + NUM_AHEAD
    suffix_ids = tokenizer.encode(AHEAD + suffix)[num_ahead:] if suffix else ()
    return (
        *beginning,
        suffix_id,
        *suffix_ids,
        prefix_id,
        *tokenizer.encode(prompt)[len(beginning) :],
    )
