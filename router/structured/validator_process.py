"""Program that compiles grammars for ``validator``, within limits on its CPU time and memory.

    python -I -S validator_process.py LIBRARY  < ["start: whole", "start: part", ...]  > [0,
    "error"]

The whole grammar comes first; the parts are compiled only to locate its error. Each grammar with
an error has a line, and the whole always; without any line it exceeded a limit.
"""

import json
import resource
import signal
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import Any

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
        for index, part in enumerate(parts, start=1):
            _report(llguidance, index, part)


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
