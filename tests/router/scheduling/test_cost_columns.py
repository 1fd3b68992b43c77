"""What the cost model learns of a pipeline, and what it says of a micro-batch as a whole."""

import numpy as np

from tramontane.proto.step import StageTiming
from tramontane.router.scheduling.cost_model import CostColumns


def test_without_expert_actors_only_stages_count() -> None:
    times = CostColumns(2, has_expert_actors=False)
    assert times.columns([StageTiming(0, 0.0, 2.0, 1), StageTiming(1, 2.0, 3.0, 1)]) == [2.0, 3.0]
    slowest, through = times.bottleneck_and_latency(np.array([[2.0, 3.0], [4.0, 1.0]]))
    assert (slowest.tolist(), through.tolist()) == ([3.0, 4.0], [5.0, 5.0])


def test_the_experts_of_all_stages_may_be_what_takes_longest() -> None:
    """The example of the docstring; and one whose first stage is slower than all experts."""
    times = CostColumns(2, has_expert_actors=True)
    timings = [
        StageTiming(0, 0.0, 2.0, 1, 5.0, 3.0, 1.5),
        StageTiming(1, 5.0, 3.0, 1, 6.0, 3.0, 2.5),
    ]
    assert times.num_columns == 5
    assert times.columns(timings) == [2.0, 3.0, 4.0, 3.0, 3.0]
    slowest, through = times.bottleneck_and_latency(
        np.array([[2.0, 3.0, 4.0, 3.0, 3.0], [9.0, 3.0, 4.0, 3.0, 3.0]])
    )
    assert (slowest.tolist(), through.tolist()) == ([4.0, 9.0], [11.0, 18.0])
