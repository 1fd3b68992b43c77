"""Which hidden states count as inline: by Ray's own rule, which test_several_nodes compares with
Ray.
"""

import numpy as np
import pytest

from tramontane.cluster.actors.stage_actor import SERIALIZED_OVERHEAD, HiddenStateTransfers

LIMIT = 2**20
HEADER = bytes(300)


@pytest.mark.parametrize(
    ("size", "way"), [(LIMIT - 1, "inline"), (LIMIT, "plasma"), (LIMIT + 1, "plasma")]
)
def test_a_result_is_inline_below_the_limit(size: int, way: str) -> None:
    """With what Ray adds, a result of 1,048,575 bytes is inline and one of 1,048,576 is not."""
    num_bytes = size - len(HEADER) - SERIALIZED_OVERHEAD
    sent = HiddenStateTransfers(LIMIT)
    sent.add_result((HEADER, np.zeros(num_bytes, dtype=np.uint8)))
    assert sent.totals() == {way: (1, num_bytes)}


def test_hops_and_bytes_are_summed_by_way() -> None:
    sent = HiddenStateTransfers(LIMIT)
    for num_bytes in (10, 20, LIMIT):
        sent.add_result((HEADER, np.zeros(num_bytes, dtype=np.uint8)))
    sent.add_direct(7)
    assert sent.totals() == {"inline": (2, 30), "plasma": (1, LIMIT), "direct": (1, 7)}
