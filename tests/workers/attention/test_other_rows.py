"""No kernel lets what other sequences have left in the cache, or hold in the row, change a bit of a
token's attention.
"""

import pytest
import torch
from kernel_tests import checks_as_tests
from native_attention import inputs
from other_rows_checks import CASES, CHECKS, FILLS, IN_PROCESS, check_other_rows
from tiny_models import sparse_args

from tramontane.workers.attention.backend import ChosenKeys, SparseKernels
from tramontane.workers.attention.native_backend import NativeSparse
from tramontane.workers.attention.rolling_cache import LayerCache
from tramontane.workers.attention.sparse_attention import TorchSparseKernels

NUM_ROWS, NUM_CHOSEN = 64, 8
COUNTS = (1, 3, NUM_CHOSEN)


failures, test_interpreted, test_on_a_gpu = checks_as_tests("other_rows_checks", CHECKS)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernels", IN_PROCESS)
@pytest.mark.usefixtures("compiler")
def test_on_a_cpu(kernels: str, case: str) -> None:
    check_other_rows(IN_PROCESS[kernels], *CASES[case], "cpu")


def _chosen() -> ChosenKeys:
    """Lists of 1, 3 and all keys; what is past a token's keys is row 0, which is none of them."""
    rows_TK = torch.zeros(len(COUNTS), NUM_CHOSEN, dtype=torch.int32)
    for token, count in enumerate(COUNTS):
        rows_TK[token, :count] = torch.arange(20 * token + 1, 20 * token + 1 + count)
    return ChosenKeys(rows_TK, torch.tensor(COUNTS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kernels", ["PyTorch", "C"])
@pytest.mark.usefixtures("compiler")
def test_chosen_keys(kernels: str, dtype: str) -> None:
    args, chosen, kind = sparse_args(), _chosen(), getattr(torch, dtype)
    sparse: SparseKernels = (
        TorchSparseKernels() if kernels == "PyTorch" else NativeSparse(args, dtype)
    )
    q_THd, k_NGd, _ = inputs(
        len(COUNTS), NUM_ROWS, (args.n_heads, args.n_kv_heads), args.head_dim, dtype
    )
    assert args.sparse is not None
    q_TIi, keys_Ni = (
        torch.randn(3, *shape, generator=torch.Generator().manual_seed(1)).to(kind)
        for shape in (
            (args.sparse.index_n_heads, args.sparse.index_head_dim),
            (NUM_ROWS, args.sparse.index_head_dim),
        )
    )
    keys_Ni = keys_Ni[0]
    own_S = torch.arange(1, 4)
    is_own_N = torch.zeros(NUM_ROWS, dtype=torch.bool)
    is_own_N[
        torch.cat([rows[:count] for rows, count in zip(chosen.rows_TK, COUNTS, strict=True)]).long()
    ] = True

    def compute(fill: float) -> tuple[torch.Tensor, torch.Tensor]:
        rows_NGd = k_NGd.masked_fill(~is_own_N[:, None, None], fill)
        out_THd = sparse.attend(q_THd, LayerCache(rows_NGd, rows_NGd), chosen)
        is_scored_N = torch.isin(torch.arange(NUM_ROWS), own_S)
        filled_Ni = keys_Ni.masked_fill(~is_scored_N[:, None], fill)
        return out_THd, sparse.score(q_TIi, torch.ones(3, q_TIi.shape[1]), filled_Ni, own_S)

    expected = compute(0.0)
    assert all(each.isfinite().all() and each.any() for each in expected)
    for fill in FILLS:
        for out, zeros in zip(compute(fill), expected, strict=True):
            assert torch.equal(out, zeros), fill
