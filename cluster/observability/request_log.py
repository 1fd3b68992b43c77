"""What a router says of each request: that it was accepted, and how it ended. Once each, and nothing of its tokens."""

import logging
from collections.abc import Sequence
from dataclasses import asdict

from tramontane.proto.log_fields import about
from tramontane.proto.request import SequenceSpec
from tramontane.router.engine.active_request import LiveRequest

logger = logging.getLogger(__name__)


def log_accepted(request: LiveRequest, specs: Sequence[SequenceSpec]) -> None:
    if not logger.isEnabledFor(logging.INFO):
        return
    own_id, num_tokens = request.request_id, max(len(spec.prompt_ids) + len(spec.output_ids) for spec in specs)
    goes_on = any(spec.was_accepted or spec.output_ids for spec in specs)
    words = "request %s is accepted: %d sequence%s, the longest of %d tokens" + ", begun elsewhere" * goes_on
    extra = about(own_id, sequences=len(specs), longest=num_tokens)
    logger.info(words, own_id or "-", len(specs), "s" * (len(specs) != 1), num_tokens, extra=extra)


def log_ended(request: LiveRequest, *, is_complete: bool) -> None:
    """Not complete is one that failed, or whose client has left, or whose door is gone."""
    if not logger.isEnabledFor(logging.INFO):
        return
    own_id, what = request.request_id, "has ended" if is_complete else "is aborted"
    times = {name: round(seconds, 6) for name, seconds in asdict(request.times).items()}
    words = ", ".join(f"{name.removesuffix('_s')} {seconds:.3f} s" for name, seconds in times.items())
    logger.info("request %s %s: %s", own_id or "-", what, words, extra=about(own_id, is_complete=is_complete, **times))
