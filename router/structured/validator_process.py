"""A process of its own that compiles grammars, for ``grammar_check``: what takes too much ends with it, and costs nobody else.

    python -I -S grammar_child.py LIBRARY  < ["start: whole", "start: part", ...]  > [0, "complaint"]

Whole first; the parts only to find out whose complaint that is. The last line that it writes counts; none, and it was too much.
"""

import json
import resource
import signal
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import Any

MAX_CPU_S = 0.5  # for one request; the stages, where all sequences wait for it, take as long again
MAX_BYTES = 256 * 2**20  # of addresses, of which Python and llguidance have 30 MiB
MAX_GRAMMAR_SIZE = 200_000  # the stages have the same, and more limits


def main(library: str) -> None:
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, MAX_BYTES)
    _limit(resource.RLIMIT_CPU, 2)  # counts whole seconds, and nothing withstands it
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # whose signal ends a process that does not care for it
    llguidance = _load_llguidance(library)
    whole, *parts = json.load(sys.stdin)
    if _report(llguidance, 0, whole):
        any(_report(llguidance, index, part) for index, part in enumerate(parts, start=1))


def _report(llguidance: Any, index: int, grammar: str) -> bool:  # noqa: ANN401
    limits = llguidance.LLParserLimits(max_grammar_size=MAX_GRAMMAR_SIZE, verbose_errors=False)
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    if is_error or not index:
        print(json.dumps([index, messages[0] if is_error else ""]), flush=True)
    return bool(is_error)


def _limit(what: int, most: int) -> None:
    _, allowed = resource.getrlimit(what)
    most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
    resource.setrlimit(what, (most, most))


def _load_llguidance(library: str) -> Any:  # noqa: ANN401
    """The library without its package, which takes 60 ms to import."""
    loader = ExtensionFileLoader("_lib", library)
    spec = spec_from_loader("_lib", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(sys.argv[1])
