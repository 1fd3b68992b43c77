"""How much a router has been given that has not ended: what pipelines are scaled by."""

from collections.abc import Collection
from dataclasses import dataclass

from tramontane.router.scheduling.page_allocator import PageLedger
from tramontane.router.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Demand:
    """``share``: of the pipeline's places or of its cache's pages, whichever is more; above 1 where something has to wait.

    ``tokens``: in flight, which are the prompts and the answers so far, of what runs and of what waits.
    """

    share: float
    tokens: int


def demand_of(sequences: Collection[Sequence], ledger: PageLedger, num_places: int) -> Demand:
    """Of all that run or wait.

    Three sequences that need 4 pages each, of 4 places and 8 pages: three quarters of the places, 1.5 times the pages.
    """
    of_pages = [
        sum(needs) / window_class.num_pages
        for window_class, needs in zip(ledger.cache.classes, zip(*map(ledger.needs, sequences), strict=True), strict=False)
    ]
    return Demand(max([len(sequences) / num_places, *of_pages]), sum(s.num_known for s in sequences))
