"""Validation of grammars in a separate process.

No bound on a schema's contents bounds the cost of compiling it: an ``allOf`` of 28 patterns (2 KB)
takes minutes and all memory. So a process with limits on CPU time and memory compiles it
(``validator_process``). That costs 30 ms; results are cached.
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

from tramontane.router.structured import validator_process

logger = logging.getLogger(__name__)

T = TypeVar("T")

CACHE_SIZE = 256  # grammars of up to 128 KiB
# Bounds the number of processes. Further requests wait, without delaying requests that need no
# grammar.
GRAMMAR_POOL = ThreadPoolExecutor(4, thread_name_prefix="grammars")


class GrammarError(NamedTuple):
    """Reason why the whole grammar (``part`` 0) or one part (from 1) is invalid."""

    part: int
    reason: str


async def run_in_grammar_pool(call: Callable[[], T]) -> T:
    """Run a call that validates a grammar in a thread."""
    return await asyncio.get_running_loop().run_in_executor(GRAMMAR_POOL, call)


@lru_cache(CACHE_SIZE)
def validate_grammar(whole: str, parts: tuple[str, ...]) -> tuple[GrammarError, ...]:
    """Return the error of a grammar, and then those of its parts; nothing if it is valid. Takes at
    most a second.

    Stages would find the same errors, except for problems of their vocabulary. ``parts`` locate the
    error of the whole.
    """
    command = [sys.executable, "-I", "-S", validator_process.__file__, _lib.__file__]
    grammars = json.dumps([whole, *parts]).encode()
    child = subprocess.run(command, input=grammars, capture_output=True, check=False)
    lines = child.stdout.splitlines()
    if not lines:
        if child.returncode > 0:  # not ended by a signal, that is, by a limit
            logger.warning(
                "The process that validates grammars failed: %s",
                child.stderr.decode(errors="replace")[-500:],
            )
        return (GrammarError(0, "it is too complicated"),)
    found = [json.loads(line) for line in lines]
    return tuple(GrammarError(part, _shorten(reason)) for part, reason in found if reason)


def _shorten(message: str) -> str:
    r"""Return an error without the grammar around the schema, which the client did not write.

    "at 1(8): failed to compile JSON schema: Unimplemented keys: [...]\n   1 | start: ..." becomes
    "Unimplemented keys: [...]".
    """
    before, _, _ = message.partition("\n   1 | ")
    _, _, reason = before.rpartition("JSON schema: ")
    return f"{' '.join((reason or before).split()):.300}"
