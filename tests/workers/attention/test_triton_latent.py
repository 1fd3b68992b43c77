"""Triton's kernel for latent attention: by the interpreter, compiled for GPUs that are not there,
and on a GPU.
"""

import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from compiled_kernels import ResourceUsage, resource_usage
from kernel_launches import Launches, unspecialized
from kernel_tests import checks_as_tests
from latent_checks import CHECKS, LENGTH, plan_of
from native_attention import prefill_index
from other_rows_checks import outputs
from other_rows_checks import plan_of as plan_of_parts

from tramontane.proto.plan import StagePlan, WindowClass
from tramontane.proto.presets import PRESETS
from tramontane.workers.attention import triton_latent
from tramontane.workers.attention.autotune import TIMED_TOKENS, TOKEN_LIMITS, _gpu_candidates
from tramontane.workers.attention.backend import AttentionKernels
from tramontane.workers.attention.metadata import build_decode_metadata
from tramontane.workers.attention.rolling_cache import LayerCache, PageRings
from tramontane.workers.attention.sdpa_backend import (
    BatchSizeDispatch,
    GatheredKeys,
    PagedDecode,
    SdpaPrefill,
)
from tramontane.workers.attention.triton_decode import PARTS_AT_A_TIME
from tramontane.workers.attention.triton_latent import (
    LatentDecode,
    LatentKernel,
    LatentPrefill,
    Tile,
    invariant_kernels,
    latent_decode_kernels,
    latent_prefill_kernels,
    tiles_for,
)

MODULE = "tramontane.workers.attention.triton_latent"
CPU, GPU = torch.device("cpu"), torch.device("cuda")
# of a program, by compute capability
SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
# numbers of a value, and rotated; query heads
SMALL_4, LARGE_4, LARGE_3 = ((256, 64), 32), ((512, 64), 64), ((512, 64), 128)
KERNELS = triton_latent._attend, triton_latent._combine


failures, test_interpreted, test_on_a_gpu = checks_as_tests("latent_checks", CHECKS)


@pytest.mark.parametrize(
    ("preset", "geometry"),
    [
        ("mistral-small-4-119b", SMALL_4),
        ("mistral-large-4-1t", LARGE_4),
        ("mistral-large-3-675b", LARGE_3),
    ],
)
def test_these_are_the_widths_of_models(preset: str, geometry: tuple[tuple[int, int], int]) -> None:
    args = PRESETS[preset]
    assert args.latent is not None
    assert (
        (args.latent.kv_lora_rank, args.head_dim - args.latent.kv_lora_rank),
        args.n_heads,
    ) == geometry


def _tiles(plan: StagePlan, capability: int, monkeypatch: pytest.MonkeyPatch) -> list[Tile]:
    """Return the tiles of a stage on a GPU of this capability."""
    properties = SimpleNamespace(shared_memory_per_block_optin=SHARED_BYTES[capability])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return tiles_for(plan, GPU)


def _usage(plan: StagePlan, tile: Tile, is_split: bool, capability: int) -> ResourceUsage:
    assert plan.args.latent is not None
    dtype = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[plan.dtype]
    parts = ("*fp32" if is_split else f"*{dtype}",) * 3
    types = (f"*{dtype}", f"*{dtype}", *("*i64",) * 3, *parts, f"*{dtype}", *("i32",) * 6, "fp32")
    (values, heads), rotated = (
        (plan.args.latent.kv_lora_rank, plan.args.n_heads),
        plan.args.latent.qk_rope_head_dim,
    )
    constants = (
        plan.cache.page_size,
        heads,
        values,
        rotated,
        min(tile.heads, heads),
        tile.keys,
        values,
        rotated,
        is_split,
    )
    return resource_usage(
        MODULE, "_attend", types, constants, (0, 1, 5, 6, 7, 8), tile.warps, tile.stages, capability
    )


# Of Large 3, which has 128 heads in blocks of those of Large 4, one kind of program on one GPU is
# enough.
@pytest.mark.parametrize(
    ("geometry", "dtype", "capability", "is_split"),
    [
        *product((SMALL_4, LARGE_4), ["bfloat16"], SHARED_BYTES, [True, False]),
        *(
            (LARGE_3, "bfloat16", 90, False),
            (LARGE_4, "float16", 90, True),
            (LARGE_4, "float32", 90, True),
        ),
        (SMALL_4, "float32", 89, True),
    ],
)
def test_every_candidate_compiles_without_spills_and_fits_into_shared_memory(
    geometry: tuple[tuple[int, int], int],
    dtype: str,
    capability: int,
    is_split: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of these compiles in about a second.

    In ``float32``, and for 8.9 with Triton 3.6, the compiler spills a few bytes where there are
    registers left.
    """
    plan = plan_of(*geometry, dtype)
    tiles = _tiles(plan, capability, monkeypatch)
    assert tiles
    for tile in tiles:
        usage = _usage(plan, tile, is_split, capability)
        assert usage.spilled_bytes <= (24 if dtype == "float32" else 8 if capability == 89 else 0)
        bound = tile.shared_bytes(sum(geometry[0]), getattr(torch, dtype).itemsize)
        assert usage.shared_bytes <= bound <= SHARED_BYTES[capability]
        assert bound < usage.shared_bytes * 1.4, "tiles would be left out that fit"
        assert usage.has_wide_loads


def test_the_combination_of_parts_compiles_without_spills() -> None:
    types, constants = (*("*fp32",) * 3, "*bf16", "i32"), (512, 512, PARTS_AT_A_TIME)
    usage = resource_usage(MODULE, "_combine", types, constants, range(3), 4, 3)
    assert usage.spilled_bytes == 0
    assert usage.has_wide_loads


@pytest.mark.parametrize(
    ("widths", "capability"), [((1024, 64), 90), ((512, 128), 90), ((513, 64), 90)]
)
def test_keys_that_are_wider_than_what_has_been_tried_have_no_candidates(
    widths: tuple[int, int], capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled to find that out."""
    plan = plan_of(widths)
    assert _tiles(plan, capability, monkeypatch) == []
    assert latent_decode_kernels(4, plan, GPU) == {}
    assert latent_prefill_kernels(plan, GPU) == {}
    with pytest.raises(ValueError, match=f"latent attention of {sum(widths)} numbers"):
        invariant_kernels(plan, GPU)


def test_tiles_that_do_not_fit_into_a_gpu_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(*LARGE_4)
    assert [(tile.heads, tile.stages) for tile in _tiles(plan, 90, monkeypatch)] == [
        (64, 5),
        (32, 5),
    ]
    assert [(tile.heads, tile.stages) for tile in _tiles(plan, 80, monkeypatch)] == [
        (32, 5),
        (32, 3),
    ]
    assert [(tile.heads, tile.stages) for tile in _tiles(plan, 89, monkeypatch)] == [(32, 3)]


@pytest.mark.parametrize(
    "geometry", [SMALL_4, LARGE_4, LARGE_3], ids=["Small 4", "Large 4", "Large 3"]
)
def test_candidates_have_programs_for_a_gpu_and_are_few(
    geometry: tuple[tuple[int, int], int],
) -> None:
    plan = plan_of(*geometry)
    for num_tokens in TIMED_TOKENS:
        kernels = [
            decode.kernel for decode in latent_decode_kernels(num_tokens, plan, CPU).values()
        ]
        assert 2 <= len(kernels) <= 6
        programs = [
            num_tokens * -(-plan.args.n_heads // kernel.tile.heads) * kernel.parts
            for kernel in kernels
        ]
        assert all(64 <= each <= 256 for each in programs)
    (kernel,) = {decode.kernel.parts for decode in latent_decode_kernels(300, plan, CPU).values()}
    assert kernel == 1


def _launches(monkeypatch: pytest.MonkeyPatch) -> tuple[Launches, Launches]:
    attend, combine = Launches(2, 3, 4), Launches(3)  # pages, positions, shifts; output
    monkeypatch.setattr(triton_latent, "_attend", attend)
    monkeypatch.setattr(triton_latent, "_combine", combine)
    return attend, combine


def _decode_of_zeros(decode: LatentDecode, plan: StagePlan, num_tokens: int) -> None:
    ring = PageRings(WindowClass(None, 4, 4 * num_tokens), plan.cache.page_size, num_tokens, CPU)
    slots_B = torch.arange(num_tokens)
    mask = decode.build_mask(
        build_decode_metadata(ring, slots_B, torch.full_like(slots_B, 3), 0, [])
    )
    k_NGd = torch.zeros(64, 1, plan.args.head_dim, dtype=torch.bfloat16)
    decode.attend(
        torch.zeros(num_tokens, plan.args.n_heads, plan.args.head_dim).bfloat16(),
        LayerCache(k_NGd, k_NGd),
        mask,
    )


@pytest.mark.parametrize(
    "geometry", [SMALL_4, LARGE_4, LARGE_3], ids=["Small 4", "Large 4", "Large 3"]
)
def test_a_stage_compiles_five_kernels_of_latent_attention(
    geometry: tuple[tuple[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All candidates for prompts and for every number of single tokens: two tiles, with one part or
    several, and their end.
    """
    attend, combine = _launches(monkeypatch)
    plan = plan_of(*geometry)
    for num_tokens in TIMED_TOKENS:
        for decode in latent_decode_kernels(num_tokens, plan, CPU).values():
            _decode_of_zeros(decode, plan, num_tokens)
    (prefill,) = latent_prefill_kernels(plan, CPU).values()
    _prefill_of_zeros(prefill, plan)
    # A kernel is compiled for its constants and options; the first numbers of a launch are not
    # specialized.
    compiled = {
        (numbers[7:], *options.items())
        for numbers, options in zip(attend.numbers, attend.options, strict=True)
    }
    assert 3 <= len(compiled) <= 4
    assert len({numbers[1:] for numbers in combine.numbers}) == 1


def _prefill_of_zeros(prefill: LatentPrefill, plan: StagePlan) -> None:
    index = prefill_index([(10, 4), (0, 3)], None)
    q_THd, k_SGd = (
        torch.zeros(n, heads, plan.args.head_dim).bfloat16()
        for n, heads in ((7, plan.args.n_heads), (17, 1))
    )
    prefill.attend(q_THd, k_SGd, k_SGd, prefill.build_mask(index))


def test_prompts_and_any_number_of_single_tokens_launch_the_same_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a stage has to be batch-invariant: with the same number of parts, and of keys in
    each.
    """
    attend, combine = _launches(monkeypatch)
    plan = plan_of((34, 6), 3)
    kernels = invariant_kernels(plan, CPU)
    assert isinstance(kernels.prefill, LatentPrefill)
    assert isinstance(kernels.decode, LatentDecode)
    _prefill_of_zeros(kernels.prefill, plan)
    for num_tokens in (1, 3, 40):
        _decode_of_zeros(kernels.decode, plan, num_tokens)
    # Besides the first token of a launch, and the stride and number of pages of a ring.
    assert len({numbers[3:] for numbers in attend.numbers}) == 1
    assert len(set(combine.numbers)) == 1
    assert attend.options == [attend.options[0]] * 4
    assert {"first_token", "pages_stride", "ring_pages"} <= unspecialized(KERNELS[0])
    free = [
        {each.name for each in kernel.params if each.do_not_specialize_on_alignment}
        for kernel in KERNELS
    ]
    assert free == [{"pages_TR", "positions_T", "shifts_T"}, {"out_THc"}]


def test_where_the_keys_of_prompts_are() -> None:
    """Chunks of 4 and 3 tokens with 10 and 0 keys before them: the second one's key of position 0
    is in row 14.
    """
    plan = plan_of()
    (prefill,) = latent_prefill_kernels(plan, CPU).values()
    mask = prefill.build_mask(prefill_index([(10, 4), (0, 3)], None))
    assert mask.positions_T.tolist() == [10, 11, 12, 13, 0, 1, 2]
    assert mask.shifts_T.tolist() == [0, 0, 0, 0, 14, 14, 14]
    assert mask.pages_TR.tolist() == [[0]]
    mask = prefill.build_mask(prefill_index([(60, 5)], 20))
    assert mask.shifts_T.tolist() == [-41] * 5, "the first key is that of position 41"
    assert mask.pages_TR.tolist() == [[0, 1, 2, 3, 4]]
    assert mask.window == 20


def test_a_token_has_parts_by_its_own_position_alone() -> None:
    """With batch invariance. 1,000 keys: four parts of up to 256; 8,192: sixteen of 512."""
    kernel = invariant_kernels(plan_of(*SMALL_4), CPU).decode.kernel  # type: ignore[attr-defined]
    assert kernel.parts == 16
    assert kernel.least_blocks * kernel.tile.keys == 256


def test_latent_models_have_candidates_of_their_own_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those for other models would be compiled for minutes, and find no registers; with these no
    graph needs a page table.
    """
    prefills, decodes = _gpu_candidates(plan_of(*SMALL_4), CPU)
    kernels = [decodes(num_tokens) for num_tokens in TIMED_TOKENS]
    assert all(
        isinstance(each, LatentDecode) for candidates in kernels for each in candidates.values()
    )
    assert sum(isinstance(each, LatentPrefill) for each in prefills.values()) == 1
    dispatch = BatchSizeDispatch(
        tuple(next(iter(candidates.values())) for candidates in kernels), TOKEN_LIMITS
    )
    assert not AttentionKernels(SdpaPrefill(), dispatch).needs_page_tables
    assert not invariant_kernels(plan_of(*SMALL_4), CPU).needs_page_tables
    monkeypatch.setitem(sys.modules, MODULE, None)
    prefills, decodes = _gpu_candidates(plan_of(*SMALL_4), CPU)
    assert decodes(4) == {}
    assert not any("latent" in name for name in prefills)


def test_parts_of_a_batch_invariant_stage_have_256_keys_at_least() -> None:
    kernel = invariant_kernels(plan_of(*SMALL_4), CPU).decode.kernel  # type: ignore[attr-defined]
    assert (kernel.parts, kernel.least_blocks * kernel.tile.keys) == (16, 256)


@pytest.mark.parametrize(
    ("parts", "launches"), [(16, [(0, 3), (3, 3), (6, 3), (9, 1)]), (1, [(0, 10)])]
)
def test_parts_have_a_bounded_memory(
    parts: int, launches: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 3 tokens here, with 32 heads, 16 parts and 256 numbers of a value."""
    found = list[tuple[int, int]]()
    monkeypatch.setattr(triton_latent, "MAX_PART_NUMBERS", 3 * 32 * 16 * 256 + 1)
    monkeypatch.setattr(LatentKernel, "_launch", lambda _self, *given: found.append(given[-2:]))
    kernel = LatentKernel(256, 64, triton_latent.TILES[2, 256][0], parts)
    kernel.attend(torch.zeros(10, 32, 320), torch.zeros(16, 1, 320), None)  # type: ignore[arg-type]
    assert found == launches


class _ValuesAlone(PagedDecode):
    """Leaves out the last numbers of each head."""

    def attend(self, q_BHd: Tensor, cached: LayerCache, mask: GatheredKeys) -> Tensor:
        return super().attend(q_BHd, cached, mask)[..., :10]


def test_a_step_may_have_a_prefill_kernel_that_computes_more_numbers_than_its_decode_kernel() -> (
    None
):
    plan = plan_of_parts("float32", None)
    expected = outputs(lambda _: AttentionKernels(SdpaPrefill(), PagedDecode()), plan, 0.0, "cpu")
    found = outputs(lambda _: AttentionKernels(SdpaPrefill(), _ValuesAlone()), plan, 0.0, "cpu")
    for out_THd, whole_THd in zip(found, expected, strict=True):
        assert torch.equal(out_THd, whole_THd[..., :10])


def test_a_prompt_of_the_checks_is_longer_than_a_block_of_every_tile() -> None:
    assert all(tile.keys < 2 * LENGTH for tiles in triton_latent.TILES.values() for tile in tiles)
