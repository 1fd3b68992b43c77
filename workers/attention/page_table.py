"""Tables of pages that say where the keys of single tokens are: input of kernels that read pages in place.

Shape letters: B single tokens, N pages of a table, P rows of a page, L = N * P.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tramontane.workers.attention.rolling_cache import PageRings

MIN_KEYS = 1024  # per table: narrower ones would not be faster, and each width has kernels of its own


@dataclass(frozen=True, slots=True)
class PageTable:
    """Pages of each token's sequence, in position order, from the page of the oldest key that the token sees.

    Of the rows of these pages, counted consecutively, the token sees ``first_B`` up to and without ``end_B``. All tensors
    are int32 on the device.

    P = 4, W = 6, hence R = 3, ring [7, 2, 5]. A token at position 9 sees positions 4 to 9 on pages 1 and 2 of the
    sequence: the table of 3 pages is [2, 5, 7], first 0, end 6. At position 8 it sees 3 to 8: [7, 2, 5], 3, 9.
    """

    pages_BN: Tensor
    first_B: Tensor
    end_B: Tensor


def page_table(ring: PageRings, slots_B: Tensor, positions_B: Tensor, num_pages: int) -> PageTable:
    """Build the table on the device. Its shape depends on ``num_pages`` alone; entries past a token's own page are arbitrary."""
    oldest_B = torch.zeros_like(positions_B) if ring.window is None else (positions_B - ring.window + 1).clamp(min=0)
    first_page_B = oldest_B // ring.page_size
    entries_BN = (first_page_B[:, None] + torch.arange(num_pages, device=positions_B.device)) % ring.ring_pages
    start_B = first_page_B * ring.page_size
    return PageTable(
        ring.pages_SR[slots_B[:, None], entries_BN].int(), (oldest_B - start_B).int(), (positions_B - start_B + 1).int()
    )


def padded_width(starts: list[int], ring: PageRings) -> int:
    """Return the width in pages of a table for tokens at these positions.

    It is a power of two, the middle between two, or the whole ring. So there are few widths, and little of a table lies
    past its keys: split-K divides the table evenly, and a part without keys would be wasted.

    P = 16, no window, positions 100 and 2000: 126 pages are needed, 128 returned. Position 1024: 65, 96, where three of
    four parts have keys (with 128 two of four, and one key). Position 70000 of 81920: 4376, 5120.
    """
    needed = max(start // ring.page_size - ring.first_visible(start) // ring.page_size + 1 for start in starts)
    return min(ring.ring_pages, max(_next_bucket(needed), -(-MIN_KEYS // ring.page_size)))


def _next_bucket(number: int) -> int:
    """Round up to a power of two or to the middle between two: 2, 3, 4, 6, 8, ..., 64, 96, 128. 64 -> 64, 65 -> 96, 97 -> 128."""
    power = next_power_of_two(number)
    middle = 3 * power // 4
    return middle if number <= middle else power


def next_power_of_two(number: int) -> int:
    """Round up to a power of two: 1 -> 1, 5 -> 8, 8 -> 8."""
    return 1 << (number - 1).bit_length()
