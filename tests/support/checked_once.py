"""The check of batch invariance, which a stage makes whenever it loads, once for each kind of
stage.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tramontane.proto.plan import StagePlan
from tramontane.workers.stage import stage_worker


@contextmanager
def checked_once() -> Iterator[None]:
    """Keep what the check finds for a model and its dtype while the same tests load it again and
    again, cut in other ways.

    It takes longer than most such tests otherwise; ``test_batch_invariance_check.py`` tests the
    check itself, at every load.
    """
    check, found = stage_worker.check_batch_invariance, dict[object, bool]()

    def once(plan: StagePlan, *rest: Any) -> bool:
        kind = (plan.args, plan.dtype, plan.quantize, plan.batch_invariant, plan.experts_inside)
        if kind not in found:
            found[kind] = check(plan, *rest)
        return found[kind]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_worker, "check_batch_invariance", once)
        yield
