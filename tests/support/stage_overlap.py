"""How much of the time several stages worked at once."""

from collections.abc import Iterable

from tramontane.proto.step import StageTiming


def overlap_share(timings: Iterable[StageTiming]) -> float:
    """Return the time in which at least two stages worked, over the time in which at least one did.

    Stage 0 busy 0..2, stage 1 busy 1..3: two at once during 1..2, one at least during 0..3: 1/3.
    """
    changes = sorted(change for t in timings for change in ((t.started_at, 1), (t.ended_at, -1)))
    busy = overlapped = 0.0
    working, since = 0, 0.0
    for at, change in changes:
        busy += (at - since) if working >= 1 else 0.0
        overlapped += (at - since) if working >= 2 else 0.0
        working, since = working + change, at
    return overlapped / busy if busy else 0.0
