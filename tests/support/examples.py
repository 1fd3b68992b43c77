"""How many examples Hypothesis tries: a fifth of them in ``make test``, all in ``make nightly``.

Examples are derived from the test's code (``derandomize``), so more of them find more in a changed
test or product, and nothing in the next run of the same one.
"""

import os

ALL = "TRAMONTANE_TEST_ALL_EXAMPLES"  # set by conftest.py: decorators need it before any fixture


def examples(number: int, least: int = 10) -> int:
    """Return how many of ``number`` examples this run tries: no fewer than ``least``, if that many
    are asked for. A test whose every example takes a second gives a smaller one.
    """
    return number if runs_all() else max(number // 5, min(number, least))


def runs_all() -> bool:
    """Return whether this run is the nightly one, or another with ``--full-products``."""
    return bool(os.environ.get(ALL))
