"""Validation of grammars in a separate process.

No bound on a schema's contents bounds the cost of compiling it: an ``allOf`` of 28 patterns (2 KB)
takes minutes and all memory. So a process with limits on CPU time and memory compiles it
(``validator_process``). That costs 30 ms; results are cached.
"""

import asyncio
import json
import logging
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import Any, NamedTuple, TypeVar

from llguidance import _lib

# Program that compiles grammars for ``validator``, within limits on its CPU time and memory.
#
#     python -I -S validator_process.py LIBRARY  < ["start: whole", "start: part", ...]  > [0,
#     "error"]
#
# The whole grammar comes first; the parts are compiled only to locate its error. The last line of
# output counts; without any the grammar exceeded a limit.

MAX_CPU_S = 0.5  # of one request; the stages, where all sequences wait, need the same time again
MAX_BYTES = 256 * 2**20  # of address space; Python and llguidance use 30 MiB
MAX_GRAMMAR_SIZE = 200_000  # the stages have this limit and others


def main(library: str) -> None:
    """Compile the grammars on stdin with llguidance's ``library``."""
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, MAX_BYTES)
    _limit(resource.RLIMIT_CPU, 2)  # whole seconds; cannot be ignored
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # its signal ends the process
    llguidance = _load_llguidance(library)
    whole, *parts = json.load(sys.stdin)
    if _report(llguidance, 0, whole):
        any(_report(llguidance, index, part) for index, part in enumerate(parts, start=1))


def _report(llguidance: Any, index: int, grammar: str) -> bool:
    limits = llguidance.LLParserLimits(max_grammar_size=MAX_GRAMMAR_SIZE, verbose_errors=False)
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    if is_error or not index:
        print(json.dumps([index, messages[0] if is_error else ""]), flush=True)
    return bool(is_error)


def _limit(kind: int, limit: int) -> None:
    _, allowed = resource.getrlimit(kind)
    limit = limit if allowed == resource.RLIM_INFINITY else min(limit, allowed)
    resource.setrlimit(kind, (limit, limit))


def _load_llguidance(library: str) -> Any:
    """Load the library without its package, which takes 60 ms to import."""
    loader = ExtensionFileLoader("_lib", library)
    spec = spec_from_loader("_lib", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(sys.argv[1])


logger = logging.getLogger(__name__)

T = TypeVar("T")

CACHE_SIZE = 256  # grammars of up to 64 KiB
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
def validate_grammar(whole: str, parts: tuple[str, ...]) -> GrammarError | None:
    """Return what is wrong with a grammar, None if nothing is. Takes at most a second.

    Stages would find the same, except for problems of their vocabulary. ``parts`` locate the error
    of the whole.
    """
    command = [sys.executable, "-I", "-S", __file__, _lib.__file__]
    grammars = json.dumps([whole, *parts]).encode()
    child = subprocess.run(command, input=grammars, capture_output=True, check=False)
    lines = child.stdout.splitlines()
    if not lines:
        if child.returncode > 0:  # not ended by a signal, that is, by a limit
            logger.warning(
                "The process that validates grammars failed: %s",
                child.stderr.decode(errors="replace")[-500:],
            )
        return GrammarError(0, "it is too complicated")
    part, reason = json.loads(lines[-1])
    return GrammarError(part, _shorten(reason)) if reason else None


def _shorten(message: str) -> str:
    r"""Return an error without the grammar around the schema, which the client did not write.

    "at 1(8): failed to compile JSON schema: Unimplemented keys: [...]\n   1 | start: ..." becomes
    "Unimplemented keys: [...]".
    """
    before, _, _ = message.partition("\n   1 | ")
    _, _, reason = before.rpartition("JSON schema: ")
    return f"{' '.join((reason or before).split()):.300}"
