"""Inputs of the attention kernels in C, what they compute from them, and compilers for other
processors.

Shape letters: T tokens of a row, L tokens of a prompt, S keys of a packed row, H query heads, G
key/value heads, d head_dim.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tramontane.workers.attention.metadata import PrefillMetadata, num_cached_keys
from tramontane.workers.attention.native_backend import (
    NO_WINDOW,
    NativeDecode,
    NativeMask,
    NativePrefill,
)
from tramontane.workers.attention.rolling_cache import LayerCache

# Relative, by norms: the rounding of the result, and of the weights too on a processor with
# products of bfloat16.
TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 5e-4}
# (query heads, key/value heads) and elements of a head. The sources are compiled for each of them,
# in about two seconds, so tests share them. By elements: less than a panel of 4 to 32 columns,
# whole panels, and a last one that is not full. By query heads per key/value head: 1, 2, 3, of
# which no number of tokens fills the 128 queries of a unit of work, 4 and 8.
GEOMETRIES = [((4, 4), 8), ((16, 4), 64), ((6, 2), 34), ((8, 1), 128), ((4, 2), 2)]
FEW_GEOMETRIES = GEOMETRIES[:3]  # for other processors
# Vectors of 4 numbers, of 8 with and without the instructions of AVX2, and what is written for
# AVX-512, with those in plain C.
AVX512 = f"-I{shlex.quote(str(Path(__file__).with_name('avx512')))} -D__AVX512F__"
_OPTIONS = {
    "SSE": "-mno-avx",
    "AVX": "-mavx -mno-avx2",
    "AVX2": "-mavx2 -mfma -mf16c -mno-avx512f",
    "AVX-512": AVX512,
}
# By name: compiler options and dtype.
OTHER_PROCESSORS = {
    f"{name} {dtype}": (options, dtype) for name, options in _OPTIONS.items() for dtype in TOLERANCE
}
OTHER_PROCESSORS["AVX-512 with products of bfloat16"] = (f"{AVX512} -D__AVX512BF16__", "bfloat16")


def inputs(
    num_tokens: int, num_keys: int, heads: tuple[int, int], head_dim: int, dtype: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random queries [T, H, d], keys and values [S, G, d]."""
    generator, kind = torch.Generator().manual_seed(num_tokens + num_keys), getattr(torch, dtype)
    shapes = [
        (number, count, head_dim)
        for number, count in ((num_tokens, heads[0]), (num_keys, heads[1]), (num_keys, heads[1]))
    ]
    q_THd, k_SGd, v_SGd = (torch.randn(shape, generator=generator).to(kind) for shape in shapes)
    return q_THd, k_SGd, v_SGd


def prefill_index(chunks: Sequence[tuple[int, int]], window: int | None) -> PrefillMetadata:
    """Return the index of chunks (start, tokens), of which each sees the keys of its sequence
    before it.
    """
    lens = tuple(tokens for _, tokens in chunks)
    key_lens = tuple(num_cached_keys(start, window) + tokens for start, tokens in chunks)
    none = torch.empty(0, dtype=torch.int64)
    return PrefillMetadata(
        window, lens, key_lens, tuple(start for start, _ in chunks), none, none, none, none
    )


def prefill(q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, index: PrefillMetadata) -> Tensor:
    """Return the output of the kernel in C, [T, H, d]."""
    kernel = NativePrefill(
        q_THd.shape[2],
        q_THd.shape[1] // k_SGd.shape[1],
        16,
        str(q_THd.dtype).removeprefix("torch."),
    )
    return kernel.attend(q_THd, k_SGd, v_SGd, kernel.build_mask(index))


def prefill_in_chunks(
    prompt: tuple[Tensor, Tensor, Tensor],
    sizes: Sequence[int],
    window: int | None,
    others: Sequence[tuple[int, int]] = (),
    attend: Callable[[Tensor, Tensor, Tensor, PrefillMetadata], Tensor] = prefill,
) -> Tensor:
    """Compute a prompt [L, H, d] in chunks of these sizes, each between ``others`` (start, tokens)
    of other sequences.
    """
    q_LHd, k_LGd, v_LGd = prompt
    half = len(others) // 2
    outs, start = [], 0
    for size in sizes:
        first = start - num_cached_keys(start, window)
        index = prefill_index([*others[:half], (start, size), *others[half:]], window)
        before, after = (
            (sum(index.query_lens[part]), sum(index.key_lens[part]))
            for part in (slice(half), slice(half + 1, None))
        )
        num_tokens, num_keys = (count + more for count, more in zip(before, after, strict=True))
        other = inputs(
            num_tokens,
            num_keys,
            (q_LHd.shape[1], k_LGd.shape[1]),
            q_LHd.shape[2],
            str(q_LHd.dtype).removeprefix("torch."),
        )
        q_THd = torch.cat(
            (other[0][: before[0]], q_LHd[start : start + size], other[0][before[0] :])
        )
        keys = [
            torch.cat((x[: before[1]], own[first : start + size], x[before[1] :]))
            for x, own in zip(other[1:], (k_LGd, v_LGd), strict=True)
        ]
        outs.append(attend(q_THd, keys[0], keys[1], index)[before[0] : before[0] + size])
        start += size
    return torch.cat(outs)


def decode(
    prompt: tuple[Tensor, Tensor, Tensor], window: int | None, page_size: int = 16, seed: int = 0
) -> Tensor:
    """Compute every token of a prompt as a single token, all from one cache whose pages are in no
    order; [L, H, d].
    """
    q_LHd, k_LGd, v_LGd = prompt
    num_pages, dtype = len(k_LGd) // page_size + 1, str(q_LHd.dtype).removeprefix("torch.")
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(len(k_LGd))
    rows = pages[positions // page_size] * page_size + positions % page_size
    cache = LayerCache(
        *(x.new_full((num_pages * page_size, *x.shape[1:]), torch.nan) for x in (k_LGd, v_LGd))
    )
    cache.write(rows, k_LGd, v_LGd)
    oldest_page = (positions - (window or NO_WINDOW) + 1).clamp(min=0) // page_size
    table = pages[(oldest_page[:, None] + torch.arange(num_pages)).clamp(max=num_pages - 1)].int()
    kernel = NativeDecode(q_LHd.shape[2], q_LHd.shape[1] // k_LGd.shape[1], page_size, dtype)
    return kernel.attend(q_LHd, cache, NativeMask(window or NO_WINDOW, positions, table))


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Let kernels use so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
