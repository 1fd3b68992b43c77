"""Triton's attention by the interpreter and on a GPU, and what its masks read of the host."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from attention_checks import CHECKS
from compiled_kernels import resource_usage
from kernel_launches import Launches, unspecialized
from kernel_tests import checks_as_tests
from native_attention import prefill_index

from tramontane.proto.plan import WindowClass
from tramontane.workers.attention import triton_attention
from tramontane.workers.attention.metadata import build_decode_metadata
from tramontane.workers.attention.rolling_cache import LayerCache, PageRings
from tramontane.workers.attention.triton_attention import (
    COMBINE_WARPS,
    NO_WINDOW,
    STAGES,
    WARPS,
    TileMask,
    TritonDecode,
    TritonPrefill,
    _rows_of_tile,
    max_blocks,
    num_programs,
)

KERNEL, COMBINE = triton_attention._kernel, triton_attention._combine
READS_OF_THE_HOST = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


failures, test_interpreted, test_on_a_gpu = checks_as_tests("attention_checks", CHECKS)


class _NoReads(TorchDispatchMode):
    def __torch_dispatch__(
        self,
        operation: object,
        _types: object,
        args: tuple[object, ...] = (),
        kwargs: object = None,
    ) -> object:
        assert operation not in READS_OF_THE_HOST, "a CUDA graph cannot contain it"
        return operation(*args, **(kwargs or {}))  # type: ignore[operator]


@pytest.mark.parametrize("window", [None, 20])
def test_the_mask_of_single_tokens_is_computed_on_the_device(window: int | None) -> None:
    ring = PageRings(WindowClass(window, 8, 24), 4, 3, torch.device("cpu"))
    for slot in range(3):
        ring.put_pages(slot, 0, tuple(range(8 * slot, 8 * slot + 8)))
    ring.flush()
    slots_B, positions_B = torch.tensor([2, 0]), torch.tensor([25, 3])
    with _NoReads():
        mask = TritonDecode().build_mask(build_decode_metadata(ring, slots_B, positions_B, 8, []))
    assert mask.tiles_I4.tolist() == [[0, 1, 25, 0], [1, 1, 3, 0]]
    assert mask.tiles_I4.dtype == torch.int32
    assert mask.pages_IR.tolist() == [list(range(16, 24)), list(range(8))]
    assert TritonDecode.finds_pages, "no graph is recorded for more keys"


def test_tiles_of_chunks() -> None:
    """Chunks of 40 and 3 tokens with 10 and 0 keys before them: 16 tokens of a group of 4 are a
    tile. Pages follow each other.
    """
    mask = TritonPrefill(4, 16).build_mask(prefill_index([(10, 40), (0, 3)], None))
    assert mask.tiles_I4.tolist() == [
        [0, 16, 10, 0],
        [16, 16, 26, 0],
        [32, 8, 42, 0],
        [40, 3, 0, 50],
    ]
    assert mask.pages_IR.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "programs"),
    [
        (1, 17, 16),
        (1, 5, 4),
        (8, 17, 2),
        (9, 17, 1),
        (64, 17, 1),
        (0, 17, 16),
        (2, 2000, 8),
        (3, 2000, 1),
    ],
)
def test_few_tokens_have_several_programs(num_tokens: int, num_blocks: int, programs: int) -> None:
    """Of 32 heads of 128, 8 of them with keys. Three tokens and 2000 blocks would take more memory
    than is allowed.
    """
    assert num_programs(num_tokens, 32, 128, 8, num_blocks) == programs


def test_a_ring_may_have_one_block_more_than_its_pages_fill() -> None:
    mask = TileMask(
        NO_WINDOW, 16, torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, 8, dtype=torch.int64)
    )
    assert max_blocks(mask, 64) == 3


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_attention_compiles_without_spills(capability: int, page_size: int) -> None:
    """With heads of 128, four for each of 8 key/value heads, in bfloat16; in the shared memory of a
    small GPU.
    """
    types = (*("*bf16",) * 3, "*i32", "*i64", "*bf16", *("*fp32",) * 2, *("i32",) * 4, "fp32")
    module, constants = (
        "tramontane.workers.attention.triton_attention",
        (None, None, 4, 8, 128, 128, 64, 64, page_size),
    )
    usage = resource_usage(module, "_kernel", types, constants, range(8), WARPS, STAGES, capability)
    assert usage.spilled_bytes == 0
    assert usage.shared_bytes <= 99 * 1024
    assert usage.has_wide_loads


def test_the_kernel_that_adds_blocks_compiles_for_hopper_without_spills() -> None:
    types = ("*i32", "*fp32", "*fp32", "*bf16", "i32", "i32")
    module, constants = "tramontane.workers.attention.triton_attention", (4, 8, 128, 128, 4, 64)
    usage = resource_usage(module, "_combine", types, constants, range(4), COMBINE_WARPS, 3)
    assert usage.spilled_bytes == 0
    assert usage.has_wide_loads


@pytest.mark.parametrize(("group", "rows"), [(1, 64), (4, 64), (64, 64), (71, 128)])
def test_a_tile_holds_the_queries_of_a_token(group: int, rows: int) -> None:
    assert _rows_of_tile(group) == rows


def test_heads_that_are_not_aligned_are_copied() -> None:
    """Triton would compile another kernel for them."""
    from tramontane.workers.device.alignment import aligned

    x: Tensor = torch.zeros(4, 33, dtype=torch.bfloat16)
    assert aligned(x) is x
    assert aligned(x[1:]).data_ptr() % 16 == 0
    assert aligned(x[:, :32]).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_prompts_and_any_number_of_single_tokens_launch_the_same_kernel(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, q_THd, k_SGd = (
        Launches(),
        torch.zeros(44, 4, 33, dtype=dtype)[1:],
        torch.zeros(54, 2, 33, dtype=dtype)[1:],
    )
    combined = Launches()
    monkeypatch.setattr(triton_attention, "_kernel", launches)
    monkeypatch.setattr(triton_attention, "_combine", combined)
    for chunks in ([(10, 40), (0, 3)], [(0, 1)]):
        TritonPrefill(2, 8).attend(
            q_THd, k_SGd, k_SGd, TritonPrefill(2, 8).build_mask(prefill_index(chunks, None))
        )
    for num_tokens in (1, 3, 40, 64):
        tiles_B4, pages_BR = (
            torch.zeros(num_tokens, 4, dtype=torch.int32),
            torch.zeros(num_tokens, 70, dtype=torch.int64),
        )
        mask = TileMask(NO_WINDOW, 8, tiles_B4, pages_BR)
        TritonDecode().attend(
            torch.zeros(num_tokens, 4, 33, dtype=dtype), LayerCache(k_SGd, k_SGd), mask
        )
    assert len({numbers[2:3] + numbers[4:] for numbers in launches.numbers}) == 1, (
        "besides pages and blocks"
    )
    assert launches.options == [launches.options[0]] * 6
    assert len(combined.numbers) == 2, "of one and three tokens"
    assert len(set(combined.numbers)) == 1
    assert {"table_stride", "ring_pages", "num_blocks", "window"} <= unspecialized(KERNEL)
    assert {"num_blocks", "window"} <= unspecialized(COMBINE)
