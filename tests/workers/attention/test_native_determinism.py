"""The kernels in C give a token the same bits, alone or in a prompt, however that is divided, and
wherever its keys are.
"""

import pytest
import torch
from native_attention import (
    FEW_GEOMETRIES,
    GEOMETRIES,
    TOLERANCE,
    decode,
    inputs,
    prefill_in_chunks,
    threads,
)
from tiny_models import tiny_args, tiny_plan
from torch import Tensor

from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.workers.attention.backend import AttentionKernels, CachedAttention
from tramontane.workers.attention.metadata import build_attention_metadata
from tramontane.workers.attention.native_backend import native_kernels
from tramontane.workers.attention.rolling_cache import RollingCache, StageSequences

pytestmark = pytest.mark.usefixtures("compiler")
WINDOWS = [None, 1, 3, 20, 64]
MANY_HEADS = ((200, 1), 8)  # more than a unit of work has queries
# a page's size changes only where the rows of the cache are, whatever the heads
SMALL_PAGES = ((6, 2), 34)
NUM_TOKENS = 290


def _sizes(num_queries: int) -> list[int]:
    """Return sizes of chunks of 290 tokens, some at the borders of a unit of work: the queries of
    128 / num_queries tokens.
    """
    unit = max(128 // num_queries, 1)
    sizes = [2, unit, unit + 1, 7]
    return [*sizes, NUM_TOKENS - sum(sizes)]


def _outputs(
    prompt: tuple[Tensor, Tensor, Tensor], window: int | None, page_size: int = 16
) -> dict[str, Tensor]:
    """Outputs of a prompt in all ways; ``page_size`` is that of other pages."""
    sizes = _sizes(prompt[0].shape[1] // prompt[1].shape[1])
    outs = {
        "in chunks": prefill_in_chunks(prompt, sizes, window),
        "in other chunks": prefill_in_chunks(prompt, sizes[::-1], window),
        "with other chunks in the call": prefill_in_chunks(
            prompt, sizes, window, [(7, 3), (100, 40), (0, 70)]
        ),
        "token by token": decode(prompt, window),
        "on other pages": decode(prompt, window, page_size, seed=1),
    }
    with threads(3):
        outs["by three threads"] = prefill_in_chunks(prompt, [NUM_TOKENS], window)
        outs["token by token, by three threads"] = decode(prompt, window)
    return outs


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("heads", "head_dim"), [*GEOMETRIES, MANY_HEADS])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_token_has_the_same_bits_in_every_way(
    window: int | None, heads: tuple[int, int], head_dim: int, dtype: str
) -> None:
    prompt = inputs(NUM_TOKENS, NUM_TOKENS, heads, head_dim, dtype)
    whole = prefill_in_chunks(prompt, [NUM_TOKENS], window)
    outs = _outputs(prompt, window, 4 if (heads, head_dim) == SMALL_PAGES else 16)
    assert [way for way, out in outs.items() if not torch.equal(out, whole)] == []


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("heads", "head_dim"), FEW_GEOMETRIES)
def test_so_it_has_with_vectors_of_other_processors(
    other_processor: str, window: int | None, heads: tuple[int, int], head_dim: int
) -> None:
    prompt = inputs(NUM_TOKENS, NUM_TOKENS, heads, head_dim, other_processor)
    whole = prefill_in_chunks(prompt, [NUM_TOKENS], window)
    assert [
        way for way, out in _outputs(prompt, window).items() if not torch.equal(out, whole)
    ] == []


def _through_cache(
    kernels: AttentionKernels,
    prompt: tuple[Tensor, Tensor, Tensor],
    window: int | None,
    sizes: list[int],
    reads_pages: bool,
) -> Tensor:
    """Outputs of a prompt that a stage computes in steps of these sizes, with a cache of its
    own.
    """
    plan = tiny_plan(tiny_args(n_layers=1, window=window), 1).stages[0]
    cpu = torch.device("cpu")
    cache, table = RollingCache(plan, torch.float32, cpu), StageSequences(plan.cache, 1, cpu)
    outs, start = [], 0
    for step, size in enumerate(sizes):
        new = (
            ((tuple(reversed(range(plan.cache.classes[0].ring_pages))),), SamplingParams())
            if start == 0
            else (((),), None)
        )
        batch = MicroBatch(0, step, (Chunk(0, start, (0,) * size, *new, False),))
        table.update(batch)
        attend = CachedAttention(
            cache, build_attention_metadata(batch, table, cpu, reads_pages), kernels
        )
        outs.append(attend(0, *(each[start : start + size] for each in prompt)))
        start += size
    return torch.cat(outs)


@pytest.mark.parametrize("window", WINDOWS)
def test_steps_through_the_cache_give_the_same_bits(window: int | None) -> None:
    """Whether cached keys are read in place, or put together with the chunk's own."""
    kernels = native_kernels(tiny_plan(tiny_args(n_layers=1, window=window), 1).stages[0])
    prompt = inputs(NUM_TOKENS, NUM_TOKENS, (4, 2), 8, "float32")
    whole = _through_cache(kernels, prompt, window, [NUM_TOKENS], True)
    assert torch.equal(whole, prefill_in_chunks(prompt, [NUM_TOKENS], window))
    for reads_pages in (False, True):
        assert torch.equal(
            _through_cache(kernels, prompt, window, [1, 30, 1, 1, 2, 150, 1, 70, 34], reads_pages),
            whole,
        )
