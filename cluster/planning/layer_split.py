"""Division of layers into consecutive spans, one per stage, so that the slowest stage is as fast as
possible. Pure arithmetic.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import lcm

FitsPredicate = Callable[[int, range], bool]  # whether a stage has enough memory for these layers
# time of the slowest stage, sum of squared times, end of each stage
Split = tuple[int, int, tuple[int, ...]]


def split_layers(
    costs: Sequence[int], speeds: Sequence[int], fits: FitsPredicate = lambda _stage, _span: True
) -> list[range] | None:
    """Divide layers into consecutive, non-empty spans, one per stage; return None if none fits.

    A stage takes the cost of its layers divided by its speed, which counts only relative to the
    others'. Among the splits whose slowest stage is fastest, the most even one is returned.

    costs [2, 1, 1, 1, 3], speeds [1, 1]: [2, 1, 1] and [1, 3], both 4. Speeds [3, 1]: [2, 1, 1, 1]
    and [3], 5/3 and 3.
    """
    unit = lcm(*speeds)
    # of a layer of cost 1, in whole numbers: speeds [3, 1] give [1, 3]
    times = [unit // speed for speed in speeds]
    fastest = _split(costs, times, fits, floor=0)
    if fastest is None:
        return None
    most_even = _split(costs, times, fits, floor=fastest[0])
    assert most_even is not None
    ends = most_even[2]
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]


def is_splittable(num_layers: int, num_stages: int, fits: FitsPredicate) -> bool:
    """Return True if any split fits, without a search for the best.

    Every stage takes as many layers as fit, leaving one for each stage that follows: the remaining
    layers are then a subset of those that any other split would leave.
    """
    start = 0
    for stage in range(num_stages):
        last = num_layers - (num_stages - 1 - stage)
        end = start
        while end < last and fits(stage, range(start, end + 1)):
            end += 1
        if end == start:
            return False
        start = end
    return start == num_layers


def _split(
    costs: Sequence[int], times: Sequence[int], fits: FitsPredicate, floor: int
) -> Split | None:
    """Return the split with the least (slowest stage, sum of squared times); a slowest stage below
    ``floor`` counts as that.
    """
    cost_until = [0, *accumulate(costs)]
    best: dict[int, Split] = {0: (floor, 0, ())}  # by number of layers split so far
    for stage, time in enumerate(times):
        longer: dict[int, Split] = {}
        for end in range(stage + 1, len(costs) + 1):
            starts = [start for start in best if start < end and fits(stage, range(start, end))]
            if starts:
                longer[end] = min(
                    _extend(best[start], (cost_until[end] - cost_until[start]) * time, end)
                    for start in starts
                )
        best = longer
    return best.get(len(costs))


def _extend(split: Split, time: int, end: int) -> Split:
    slowest, squares, ends = split
    return max(slowest, time), squares + time**2, (*ends, end)
