"""Triton's attention by the interpreter and on a GPU, and what its masks read of the host."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from attention_checks import CHECKS
from interpreted_checks import run_interpreted
from kernel_launches import Launches, unspecialized
from native_attention import prefill_index

from tramontane.proto.plan import WindowClass
from tramontane.workers.attention import triton_attention
from tramontane.workers.attention.metadata import build_decode_metadata
from tramontane.workers.attention.rolling_cache import LayerCache, PageRings
from tramontane.workers.attention.triton_attention import NO_WINDOW, TileMask, TritonDecode, TritonPrefill, _rows_of_tile

KERNEL = triton_attention._kernel
READS_OF_THE_HOST = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return run_interpreted("attention_checks")


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(failures: dict[str, str], name: str) -> None:
    assert not failures[name], failures[name]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(name: str) -> None:
    CHECKS[name]("cuda")


class _NoReads(TorchDispatchMode):
    def __torch_dispatch__(
        self, operation: object, _types: object, args: tuple[object, ...] = (), kwargs: object = None
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
    assert mask.tiles_I4.dtype == mask.pages_IW.dtype == torch.int32
    first = 16 if window is None else 17  # at position 25 the oldest key is 0 or 6, on page 0 or 1 of the sequence
    assert mask.pages_IW.tolist()[0][0] == first
    assert mask.pages_IW.shape == (2, 8)


def test_tiles_of_chunks() -> None:
    """Chunks of 40 and 3 tokens with 10 and 0 keys before them: 16 tokens of a group of 4 are a tile."""
    mask = TritonPrefill(4).build_mask(prefill_index([(10, 40), (0, 3)], None))
    assert mask.tiles_I4.tolist() == [[0, 16, 10, 0], [16, 16, 26, 0], [32, 8, 42, 0], [40, 3, 0, 50]]


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
    launches, q_THd, k_SGd = Launches(), torch.zeros(44, 4, 33, dtype=dtype)[1:], torch.zeros(54, 2, 33, dtype=dtype)[1:]
    monkeypatch.setattr(triton_attention, "_kernel", launches)
    for chunks in ([(10, 40), (0, 3)], [(0, 1)]):
        TritonPrefill(2).attend(q_THd, k_SGd, k_SGd, TritonPrefill(2).build_mask(prefill_index(chunks, None)))
    for num_tokens in (1, 3, 40):
        tiles_B4, pages_BW = (torch.zeros(num_tokens, width, dtype=torch.int32) for width in (4, 7))
        mask = TileMask(NO_WINDOW, 8, tiles_B4, pages_BW)
        TritonDecode().attend(q_THd[:num_tokens], LayerCache(k_SGd, k_SGd), mask)
    assert len({numbers[2:] for numbers in launches.numbers}) == 1, "besides the size of pages and the width of their table"
    assert launches.options == [launches.options[0]] * 5
    assert {"page_size", "table_width"} <= unspecialized(KERNEL)
