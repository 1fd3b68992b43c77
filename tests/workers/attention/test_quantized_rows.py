"""A cache in FP8: what is kept of a key, and that every kernel reads the same of it, in pages and
in pieces.
"""

from dataclasses import replace

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from native_attention import FEW_GEOMETRIES, GEOMETRIES, inputs, prefill_index
from tiny_models import latent_args, sparse_args, tiny_args, tiny_plan
from torch import Tensor

from tramontane.cluster.planning.planner import PlanRequest, StageBudget, is_feasible, make_plan
from tramontane.proto.errors import ConfigError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import kv_bytes_per_position
from tramontane.proto.presets import preset
from tramontane.proto.units import GIB
from tramontane.workers.attention.autotune import _shapes
from tramontane.workers.attention.kernel_cases import correctness_cases
from tramontane.workers.attention.native_backend import NativeDecode, NativeMask, NativePrefill
from tramontane.workers.attention.quantized_rows import FP8, SMALLEST_SCALE, dequantize, quantize
from tramontane.workers.attention.rolling_cache import LayerCache, RollingCache
from tramontane.workers.attention.sdpa_backend import GatheredDecode, PagedDecode, SdpaPrefill
from tramontane.workers.stage.stage_worker import StageWorker

CPU = torch.device("cpu")
NUMBERS = torch.arange(256, dtype=torch.uint8).view(FP8)  # every one that there is
TINY = tiny_args(n_layers=2, windows=(24, None), max_seq_len=96)


# ---- what is kept


def _nearest(x: float, scale: float) -> set[float]:
    """Return the numbers of FP8 that are nearest to x / scale, by trying all of them."""
    exact = torch.tensor(x, dtype=torch.float64) / scale
    distances = (NUMBERS.double() - exact).abs().nan_to_num(torch.inf)
    return set(NUMBERS.float()[distances <= distances.min() * (1 + 1e-6)].tolist())


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=8))
def test_a_vector_is_rounded_to_the_nearest_numbers_of_its_scale(vector: list[float]) -> None:
    x = torch.tensor(vector)
    numbers, scale = quantize(x)
    assert numbers.dtype == FP8
    torch.testing.assert_close(
        scale, (x.abs().max() / 448).clamp(min=SMALLEST_SCALE), rtol=2**-23, atol=0
    )
    for each, number in zip(vector, numbers.float().tolist(), strict=True):
        assert number in _nearest(each, float(scale))


def test_the_largest_element_of_a_vector_is_nearly_exact_and_the_others_have_four_bits() -> None:
    x = (
        torch.randn(1000, 128, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-30, 30, 1000)[:, None]
    )
    read = dequantize(*quantize(x), torch.float32)
    error = ((read - x).abs() / x.abs().amax(dim=1, keepdim=True)).amax()
    assert 2**-6 < error < 2**-4, "half of the last of four bits at most"
    largest = x.abs().argmax(dim=1, keepdim=True)
    torch.testing.assert_close(read.gather(1, largest), x.gather(1, largest), rtol=1e-6, atol=0)


def test_zeros_stay_zeros_and_subnormal_vectors_are_finite() -> None:
    for x in (torch.zeros(4), torch.full((4,), 1e-45), torch.tensor([0.0, -1e-40, 1e-39, 0.0])):
        numbers, scale = quantize(x)
        assert scale == SMALLEST_SCALE
        read = dequantize(numbers, scale, torch.float32)
        assert (read - x).abs().max() <= SMALLEST_SCALE * 2**-10, (
            "half of the smallest number of FP8"
        )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_vector_that_is_not_finite_is_nan_throughout_and_no_other_is(
    bad: float, dtype: torch.dtype
) -> None:
    x = torch.ones(3, 2, 4, dtype=dtype)
    x[1, 0, 2] = bad
    read = dequantize(*quantize(x), dtype)
    assert read[1, 0].isnan().all()
    assert (torch.cat((read[0], read[1, 1:], read[2])) == 1).all()


def test_a_row_that_is_written_again_is_that_of_its_last_token() -> None:
    cached = LayerCache.zeros((6, 2, 8), torch.bfloat16, CPU, is_fp8=True)
    k_TGd, v_TGd = torch.randn(2, 4, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    cached.write(torch.tensor([5, 2]), 1000 * k_TGd[:2], v_TGd[:2])
    cached.write(torch.tensor([2, 0]), k_TGd, v_TGd, torch.tensor([3, 1]))
    found, firsts = cached.read(torch.tensor([[5, 2], [0, 1]])), (1000 * k_TGd, v_TGd)
    for read, token, first in zip(found, (k_TGd, v_TGd), firsts, strict=True):
        assert read.dtype == torch.bfloat16
        expected = torch.stack((first[0], token[3], token[1], torch.zeros_like(token[0]))).view(
            2, 2, 2, 8
        )
        torch.testing.assert_close(read, expected, rtol=2**-4, atol=1e-2)
        assert not torch.equal(read, expected)


# ---- kernels


def _cut(window: int | None, page_size: int, pages: Tensor, starts: Tensor) -> Tensor:
    """Return the page table of single tokens at these positions of a sequence."""
    first = (starts - (window or 2**30) + 1).clamp(min=0) // page_size
    return pages[(first[:, None] + torch.arange(len(pages))).clamp(max=len(pages) - 1)].int()


def _kernels(
    heads: tuple[int, int], head_dim: int, dtype: str
) -> tuple[NativePrefill, NativeDecode]:
    geometry = (head_dim, heads[0] // heads[1], 16, dtype, True)
    return NativePrefill(*geometry), NativeDecode(*geometry)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "head_dim"), GEOMETRIES)
@pytest.mark.parametrize("window", [None, 20])
def test_kernels_in_c_read_pages_as_pytorch_does_bit_for_bit(
    window: int | None, heads: tuple[int, int], head_dim: int, dtype: str
) -> None:
    """As a whole prompt in one piece, as its second half after pages, and as single tokens; one key
    has every number of FP8.
    """
    length, half = 90, 41
    q_LHd, k_LGd, v_LGd = inputs(length, length, heads, head_dim, dtype)
    k_LGd = k_LGd * torch.logspace(-3, 2, length)[:, None, None].to(k_LGd.dtype)
    pages = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(length)
    cached = LayerCache.zeros((7 * 16, heads[1], head_dim), q_LHd.dtype, CPU, is_fp8=True)
    assert cached.scales is not None
    for scale in (cached.scales.k_NG, cached.scales.v_NG):
        scale.fill_(torch.nan)  # of rows that no token sees
    cached.write(pages[positions // 16] * 16 + positions % 16, k_LGd, v_LGd)
    read = cached.read_back(k_LGd, v_LGd)
    prefill, decode = _kernels(heads, head_dim, dtype)
    whole_LHd = prefill.attend(
        q_LHd, *read, prefill.build_mask(prefill_index([(0, length)], window))
    )
    one_by_one = decode.attend(
        q_LHd, cached, NativeMask(window or 2**62, positions, _cut(window, 16, pages, positions))
    )
    assert torch.equal(one_by_one, whole_LHd)
    index = prefill_index([(half, length - half)], window)
    index = replace(index, pages_CN=_cut(window, 16, pages, positions[half - 1 : half] + 1))
    later = prefill.attend_pages(
        q_LHd[half:], *(x[half:] for x in read), cached, prefill.build_mask(index)
    )
    assert torch.equal(later, whole_LHd[half:])


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_number_is_read_as_pytorch_reads_it(dtype: str) -> None:
    """One key that a token sees: the output is its value, and of the two that are no number NaN."""
    scales = torch.tensor([1.0, 3.3e-7, 1e30, 3e-20])
    values = NUMBERS.view(torch.uint8).repeat(4, 1).view(4, 4, 64).view(16, 1, 64).view(FP8)
    cached = LayerCache.zeros((16, 1, 64), getattr(torch, dtype), CPU, is_fp8=True)
    assert cached.scales is not None
    cached = LayerCache(
        cached.k_NGd, values, replace(cached.scales, v_NG=scales.repeat_interleave(4)[:, None])
    )
    _, decode = _kernels((4, 1), 64, dtype)
    table = torch.zeros(16, 1, dtype=torch.int32)
    out_BHd = decode.attend(
        torch.zeros(16, 4, 64, dtype=getattr(torch, dtype)),
        cached,
        NativeMask(1, torch.arange(16), table),
    )
    expected = cached.dequantized()[1].expand(16, 4, 64)
    assert expected.isnan().sum() == 4 * 4 * 2
    torch.testing.assert_close(out_BHd, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_no_other_sequence(bad: float) -> None:
    heads, head_dim = FEW_GEOMETRIES[0]
    q_BHd, k_TGd, v_TGd = inputs(2, 32, heads, head_dim, "float32")
    k_TGd[3, 1, 0] = v_TGd[3, 1, 0] = bad
    cached = LayerCache.zeros((32, heads[1], head_dim), torch.float32, CPU, is_fp8=True)
    cached.write(torch.arange(32), k_TGd, v_TGd)
    _, decode = _kernels(heads, head_dim, "float32")
    mask = NativeMask(2**62, torch.tensor([15, 15]), torch.tensor([[0], [1]], dtype=torch.int32))
    out_BHd = decode.attend(q_BHd, cached, mask)
    assert out_BHd[0, 1].isnan().all()
    assert out_BHd[0, [0, 2, 3]].isfinite().all()
    assert out_BHd[1].isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_of_pytorch_read_the_cache_that_a_stage_compares_kernels_with(dtype: str) -> None:
    plan = tiny_plan(TINY, dtype=dtype, kv_cache_dtype="fp8").stages[0]
    for case in correctness_cases(plan, CPU, 3):
        assert case.cached.scales is not None
        for decode in (PagedDecode(), GatheredDecode()):
            torch.testing.assert_close(
                case.decode(decode)().float(), case.expected[1], rtol=2e-2, atol=2e-2
            )
        torch.testing.assert_close(
            case.prefill(SdpaPrefill())().float(), case.expected[0], rtol=2e-2, atol=2e-2
        )


# ---- stages and plans


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stage_is_batch_invariant_however_a_prompt_is_divided(dtype: str) -> None:
    plan = tiny_plan(TINY, dtype=dtype, kv_cache_dtype="fp8", batch_invariant=True).stages[0]
    worker = StageWorker.load(plan, RandomWeights())
    assert worker.is_batch_invariant
    assert dict(worker.numerics.parts)["keys and values"] == "fp8"


def test_a_cache_takes_what_was_planned() -> None:
    for kind in ("auto", "fp8"):
        plan = tiny_plan(TINY, dtype="bfloat16", kv_cache_dtype=kind).stages[0]
        cache = RollingCache(plan, torch.bfloat16, CPU)
        assert sum(layer.num_bytes for layer in cache.layers.values()) == plan.cache_bytes


def test_choices_of_kernels_are_kept_apart() -> None:
    plain, fp8 = (tiny_plan(TINY, kv_cache_dtype=kind).stages[0] for kind in ("auto", "fp8"))
    assert _shapes(plain) == "4 and 2 heads of 8 in float32, pages of 16, windows 24, None"
    assert _shapes(fp8) == _shapes(plain) + ", keys and values in fp8"


def test_about_twice_as_many_pages_fit() -> None:
    args = preset("mistral-7b-v0.1")
    assert kv_bytes_per_position(args, "bfloat16") == 4096
    assert kv_bytes_per_position(args, "bfloat16", 0, "fp8") == 2 * 8 * (128 + 4)
    request = PlanRequest((StageBudget(24 * GIB),), "bfloat16", args.max_seq_len, 64, 16)
    plain, fp8 = make_plan(args, request), make_plan(args, replace(request, kv_cache_dtype="fp8"))
    pages = [plan.cache.classes[0].num_pages for plan in (plain, fp8)]
    assert pages[1] / pages[0] == pytest.approx(4096 / 2112, rel=1e-3)
    assert fp8.stages[0].cache_bytes == pytest.approx(plain.stages[0].cache_bytes, rel=1e-3)
    longest = replace(request, budgets=(StageBudget(16 * GIB),), max_model_len=32768)
    assert not is_feasible(preset("mistral-7b-v0.3"), longest)
    assert is_feasible(
        preset("mistral-7b-v0.3"),
        replace(longest, kv_cache_dtype="fp8", budgets=(StageBudget(18 * GIB),)),
    )


@pytest.mark.parametrize(
    ("args", "dtype", "why"),
    [
        (latent_args(), "bfloat16", "latent attention"),
        (sparse_args(), "bfloat16", "latent attention"),
        (TINY, "float16", "float16"),
    ],
)
def test_what_cannot_have_it_is_refused_in_one_sentence(
    args: ModelArgs, dtype: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype fp8 is not for .*{why}") as refusal:
        tiny_plan(args, dtype=dtype, kv_cache_dtype="fp8")
    assert "\n" not in str(refusal.value)
    tiny_plan(args, dtype=dtype)
