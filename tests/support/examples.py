"""How many examples Hypothesis tries: a third of them in ``make test``, all in ``make nightly``.

Examples are derived from the test's code (``derandomize``), so more of them find more in a changed
test or product, and nothing in the next run of the same one.
"""

import os

ALL = "TRAMONTANE_TEST_ALL_EXAMPLES"  # set by conftest.py: decorators need it before any fixture


def examples(number: int) -> int:
    """Return how many of ``number`` examples this run tries, at least 20."""
    return number if os.environ.get(ALL) else max(number // 3, min(number, 20))
