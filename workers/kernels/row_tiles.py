"""Tiles of products in which a row has the same bits in any batch, and the choice of a tile by the
numbers of rows and outputs.

A tile changes only the speed. It adds the products of a row in the order of the inputs, as many at
a time as a tensor core instruction takes, to one float32 sum, and no sum is split among programs.
That holds as long as the instructions are of one kind: all these tiles have 64 rows or more for
each four warps, which are ``wgmma`` on Hopper, where smaller ones would be ``mma.sync``. Whether
the bits are the same is tried on each GPU, see ``row_invariance.py``.
"""

from collections.abc import Sequence

from tramontane.workers.kernels.triton_linear import Tile

# For Hopper, whose instructions read their operands from shared memory. Elsewhere operands are in
# registers, and there are too few.
WIDE_TILE, WIDE_CAPABILITY = Tile(128, 256, 64, 8, 3), 9
# By the bytes of an element; for each number of rows, tiles with the most outputs come first. Up to
# 64 rows the matrix is read once, and the tiles are the measured ones (``product_selection.py``).
# In float32 there are no tensor cores.
TILES = {
    2: (
        Tile(64, 128, 64, 4, 4),
        Tile(64, 64, 128, 4, 3),
        Tile(64, 32, 256, 4, 3),
        WIDE_TILE,
        Tile(128, 128, 64, 8, 3),
        Tile(128, 64, 64, 4, 4),
    ),
    4: (Tile(64, 64, 32, 4, 4),),
}
FEW_ROWS, MANY_ROWS = 64, 128  # of a tile
# of a product: fewer leave more than a quarter of an H100's 132 multiprocessors idle
MIN_PROGRAMS = 96
MAX_ROW_TILES = 8  # more row tiles count as this number


def tiles_for(element_size: int, capability: int) -> tuple[Tile, ...]:
    """Return the tiles for elements of this size in bytes, on GPUs of this major compute
    capability.
    """
    return tuple(
        tile for tile in TILES[element_size] if tile != WIDE_TILE or capability >= WIDE_CAPABILITY
    )


def choose_tile(
    tiles: Sequence[Tile], num_rows: int, num_outputs: int, num_groups: int = 1
) -> Tile:
    """Return the tile with the most outputs that still makes enough programs, among the tiles for
    the number of rows per group.

    4096 outputs: 32 programs with 128 outputs each and 64 with 64 are too few for 64 rows, so 32
    outputs. For 600 rows there are 5 tiles of 128 rows, which count as 4: with 256 outputs 64
    programs, so 128 outputs. For 1024 rows 256 outputs.
    """
    rows_of_group = max(-(-num_rows // num_groups), 1)
    is_for_few = rows_of_group <= FEW_ROWS
    own = [tile for tile in tiles if (tile.rows == FEW_ROWS) is is_for_few] or list(tiles)
    row_tiles = min(-(-rows_of_group // own[0].rows), MAX_ROW_TILES)
    row_tiles = min(num_rows, num_groups) << (row_tiles.bit_length() - 1)
    enough = (tile for tile in own if row_tiles * -(-num_outputs // tile.outputs) >= MIN_PROGRAMS)
    return next(enough, own[-1])


def edges(tiles: Sequence[Tile], num_outputs: int, num_groups: int = 1) -> tuple[int, ...]:
    """Return numbers of rows on both sides of every change of the tile, in rising order.

    4096 outputs: 64 rows and 65, 384 and 385, 896 and 897.
    """
    ends = (
        num_groups * each
        for each in (FEW_ROWS, *range(MANY_ROWS, MANY_ROWS * MAX_ROW_TILES, MANY_ROWS))
    )

    def chosen(num_rows: int) -> Tile:
        return choose_tile(tiles, num_rows, num_outputs, num_groups)

    return tuple(rows for end in ends if chosen(end) != chosen(end + 1) for rows in (end, end + 1))
