"""Times of our own kernels on a GPU for many block sizes, to choose the few that are tried when a
stage loads.

    python tests/bench/gpu_sweeps.py decode|gemv [--device cuda] [--small] [--json FILE]

Rows are as in ``gpu_kernels.py``. On a CPU nothing is timed.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from bench_parts import gpu_parser
from gpu_kernels import OUT_OF_CACHE, Rows
from targets import exit_status
from torch.nn import functional as F

# single tokens, and keys of each
CASES = ((1, 1100), (4, 1100), (16, 1100), (64, 1100), (8, 4096), (1, 32000))
VARIANTS = ((64, 4, 2), (64, 4, 3), (64, 8, 3), (128, 4, 2), (128, 8, 2), (32, 2, 3))
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))


def decode(rows: Rows) -> None:
    """Time the split-K decode kernel of Mistral 7B's heads by page size, block, warps, stages and
    parts.
    """
    from tramontane.proto.plan import WindowClass
    from tramontane.workers.attention.metadata import build_decode_metadata
    from tramontane.workers.attention.rolling_cache import LayerCache, PageRings
    from tramontane.workers.attention.triton_decode import PARTS, SplitKDecode

    for batch, keys in CASES:
        for page_size in (16, 64):
            entries, device = -(-keys // page_size), torch.device(rows.device)
            ring = PageRings(WindowClass(None, entries, entries * batch), page_size, batch, device)
            pages_SR = torch.randperm(entries * batch, device=device).view(batch, entries)
            ring.pages_SR[:batch] = pages_SR
            shape = (entries * batch * page_size, 8, 128)
            copies = max(min(OUT_OF_CACHE // (shape[0] * 4096), 32), 2)  # as layers have
            caches = [LayerCache(rows.random(*shape), rows.random(*shape)) for _ in range(copies)]
            q_BHd = rows.random(batch, 32, 128)
            positions = torch.full((batch,), keys - 1, device=device)
            index = build_decode_metadata(
                ring, torch.arange(batch, device=device), positions, 0, []
            )
            for block, warps, stages in VARIANTS:
                for parts in (each for each in PARTS if 16 <= batch * each <= 256):
                    kernel = SplitKDecode(8, block, parts, warps, stages)
                    took = rows.us(
                        [
                            partial(kernel.attend, q_BHd, cached, kernel.build_mask(index))
                            for cached in caches
                        ]
                    )
                    sizes = {
                        "page": page_size,
                        "block": block,
                        "warps": warps,
                        "stages": stages,
                        "parts": parts,
                    }
                    rows.add(
                        what="split-K",
                        batch=batch,
                        keys=keys,
                        **sizes,
                        us=took,
                        tb_per_s=batch * keys * 4096 / took / 1e6,
                    )


def gemv(rows: Rows) -> None:
    """Time the products of Mistral 7B's layers with up to four tokens by block, and torch's."""
    from tramontane.workers.kernels.triton_linear import BLOCKS
    from tramontane.workers.kernels.triton_linear import gemv as product

    for n, k in SHAPES:
        weights = [rows.random(n, k) * k**-0.5 for _ in range(max(OUT_OF_CACHE // (2 * n * k), 3))]
        for m in (1, 2, 4):
            x = rows.random(m, k)
            took = rows.us([partial(F.linear, x, weight) for weight in weights])
            rows.add(what="F.linear", m=m, n=n, k=k, us=took)
            for block in BLOCKS:
                took = rows.us([partial(product, x, weight, block) for weight in weights])
                rows.add(what="gemv", m=m, n=n, k=k, block=tuple(block), us=took)


JOBS = {"decode": decode, "gemv": gemv}


def main() -> int:
    parser = gpu_parser(__doc__)
    parser.add_argument("job", choices=JOBS)
    options = parser.parse_args()
    if options.device == "cuda":
        with torch.inference_mode():
            JOBS[options.job](Rows(options.device, options.small, options.json))
    return exit_status([])


if __name__ == "__main__":
    sys.exit(main())
