"""Whether a grammar can be followed, found out where it can do no harm.

No bound on what a schema says bounds what compiling it takes: an ``allOf`` of 28 patterns, 2 KB, takes minutes and all memory
there is, and others are found every day. So a process of its own compiles it (``grammar_child``), which ends at a bound on its
computing and its memory. That costs 30 ms; what is asked for again is known.
"""

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple, TypeVar

from llguidance import _lib

from tramontane.router.structured import validator_process as grammar_child

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_KNOWN = 256  # grammars of up to 64 KiB
# So many processes at once; whoever comes then waits, without holding up those who need no grammar.
CHECKERS = ThreadPoolExecutor(4, thread_name_prefix="grammars")


class GrammarError(NamedTuple):
    """What is wrong with the whole grammar (``part`` 0) or with one part (from 1)."""

    part: int
    reason: str


async def run_in_grammar_pool(call: Callable[[], T]) -> T:
    """A call that checks a grammar, in a thread."""
    return await asyncio.get_running_loop().run_in_executor(CHECKERS, call)


@lru_cache(MAX_KNOWN)
def validate_grammar(whole: str, parts: tuple[str, ...]) -> GrammarError | None:
    """What a stage would find, but for what its vocabulary has to do with; None where all is well. Takes a second at the most."""
    command = [sys.executable, "-I", "-S", grammar_child.__file__, _lib.__file__]
    asked = json.dumps([whole, *parts]).encode()
    child = subprocess.run(command, input=asked, capture_output=True, check=False)
    lines = child.stdout.splitlines()
    if not lines:
        if child.returncode > 0:  # no signal ended it
            logger.warning("a grammar could not be checked: %s", child.stderr.decode(errors="replace")[-500:])
        return GrammarError(0, "it is too complicated")
    part, reason = json.loads(lines[-1])
    return GrammarError(part, _in_short(reason)) if reason else None


def _in_short(message: str) -> str:
    """Without the grammar that surrounds the schema, which nobody but us has written.

    "at 1(8): failed to compile JSON schema: Unimplemented keys: [...]\\n   1 | start: ..." says "Unimplemented keys: [...]".
    """
    before, _, _ = message.partition("\n   1 | ")
    _, _, reason = before.rpartition("JSON schema: ")
    return f"{' '.join((reason or before).split()):.300}"
