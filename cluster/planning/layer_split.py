"""Which stage gets which layers: the slowest stage as fast as can be, and no stage over its memory. Pure arithmetic."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import lcm

Fits = Callable[[int, range], bool]  # whether a stage has room for these layers
Split = tuple[int, int, tuple[int, ...]]  # slowest stage, sum of squared times, where the stages end


def split_layers(costs: Sequence[int], speeds: Sequence[int], fits: Fits = lambda _stage, _span: True) -> list[range] | None:
    """Consecutive, non-empty groups of layers, one per stage; None if there is no way to fit them.

    A stage takes the cost of its layers divided by its speed, which counts only relative to the
    others'. Among the splits whose slowest stage is fastest, the most even one is taken.

    costs [2, 1, 1, 1, 3], speeds [1, 1]: [2, 1, 1] and [1, 3], both 4. Speeds [3, 1]: [2, 1, 1, 1] and [3], 5/3 and 3.
    """
    unit = lcm(*speeds)
    times = [unit // speed for speed in speeds]  # of a layer of cost 1, in whole numbers: speeds [3, 1] give [1, 3]
    fastest = _split(costs, times, fits, floor=0)
    if fastest is None:
        return None
    most_even = _split(costs, times, fits, floor=fastest[0])
    assert most_even is not None
    ends = most_even[2]
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]


def can_be_split(num_layers: int, num_stages: int, fits: Fits) -> bool:
    """Whether there is any way to fit them, without looking for the best.

    Every stage takes as many layers as fit, leaving one for each that follows: what is left to the others is then
    part of what any other split would leave them.
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


def _split(costs: Sequence[int], times: Sequence[int], fits: Fits, floor: int) -> Split | None:
    """The split with the least (slowest stage, sum of squared times), where any slowest stage up to ``floor`` counts alike."""
    until = [0, *accumulate(costs)]
    best: dict[int, Split] = {0: (floor, 0, ())}  # by number of layers split so far
    for stage, time in enumerate(times):
        longer: dict[int, Split] = {}
        for end in range(stage + 1, len(costs) + 1):
            starts = [start for start in best if start < end and fits(stage, range(start, end))]
            if starts:
                longer[end] = min(_extend(best[start], (until[end] - until[start]) * time, end) for start in starts)
        best = longer
    return best.get(len(costs))


def _extend(before: Split, time: int, end: int) -> Split:
    slowest, squares, ends = before
    return max(slowest, time), squares + time**2, (*ends, end)
