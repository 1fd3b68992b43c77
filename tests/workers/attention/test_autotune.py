"""Kernels are tried before they are used: the fastest of those that are right, and PyTorch's where
there is none.
"""

import dataclasses
import functools
import itertools
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import latent_args, tiny_args, tiny_plan
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tramontane.workers.attention import autotune
from tramontane.workers.attention.autotune import (
    NUM_CORRECTNESS_TOKENS,
    TIMED_TOKENS,
    _choose_decode,
    _choose_prefill,
    _gpu_candidates,
)
from tramontane.workers.attention.backend import AttentionKernels
from tramontane.workers.attention.kernel_cases import correctness_cases, timing_cases
from tramontane.workers.attention.metadata import DecodeMetadata, PrefillMetadata
from tramontane.workers.attention.rolling_cache import LayerCache, PageRings
from tramontane.workers.attention.sdpa_backend import (
    BatchSizeDispatch,
    GatheredDecode,
    GatheredKeys,
    MaskBlock,
    PagedDecode,
    SdpaPrefill,
)
from tramontane.workers.device.kernel_choices import KernelChoices
from tramontane.workers.device.kernel_selection import Compute, KernelSelector
from tramontane.workers.kernels.fused_ops import EAGER

CPU = torch.device("cpu")
RIGHT = torch.arange(1.0, 5.0)


AT_ONCE = KernelSelector(lambda _compute: 1.0)


def _chosen(
    computed: dict[str, Tensor | Exception],
    seconds: dict[str, float],
    caplog: pytest.LogCaptureFixture,
) -> str | None:
    last: list[str] = []

    def prepare(name: str) -> Compute:
        def compute() -> Tensor:
            last[:] = [name]
            outcome = computed[name]
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return compute

    def clock(compute: Compute) -> float:
        compute()
        return seconds[last[0]]

    with caplog.at_level(logging.INFO, logger="tramontane.workers.device.kernel_selection"):
        return KernelSelector(clock).fastest(
            "decode", "", {name: name for name in computed}, prepare, lambda: prepare, RIGHT
        )


def test_the_fastest_of_the_right_ones(caplog: pytest.LogCaptureFixture) -> None:
    computed: dict[str, Tensor | Exception] = {
        "slow": RIGHT,
        "fast": RIGHT * 1.001,
        "wrong": RIGHT + torch.tensor([0.0, 0.0, 0.5, 0.0]),
        "none": RIGHT * float("nan"),
        "absent": NotImplementedError("not built for this GPU\na long story\nwhich ends"),
    }
    seconds = {"slow": 3e-5, "fast": 2e-5, "wrong": 1e-6, "none": 1e-6}
    assert _chosen(computed, seconds, caplog) == "fast"
    (record,) = caplog.records
    assert (
        record.getMessage()
        == "decode by fast (slow 30 us; fast 20 us; wrong differs by 0.091; none differs by nan; "
        "absent not built for this GPU ... which ends)"
    )


def test_where_none_can_be_used_one_line_says_why(caplog: pytest.LogCaptureFixture) -> None:
    assert _chosen({"absent": NotImplementedError("not built for this GPU")}, {}, caplog) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "decode by PyTorch (absent not built for this GPU)"


class _WiderWindow(SdpaPrefill):
    """By one."""

    def build_mask(self, index: PrefillMetadata) -> list[MaskBlock]:
        return super().build_mask(
            dataclasses.replace(index, window=index.window and index.window + 1)
        )


class _NoWindow(SdpaPrefill):
    def build_mask(self, index: PrefillMetadata) -> list[MaskBlock]:
        return super().build_mask(dataclasses.replace(index, window=None))


class _ForgetsTheOldest(PagedDecode):
    """A key of each token is not seen."""

    def build_mask(self, index: DecodeMetadata) -> GatheredKeys:
        keys = super().build_mask(index)
        return GatheredKeys(keys.rows_BL, keys.mask & (keys.mask.cumsum(-1) > 1))


class _FromTheFirstRow(PagedDecode):
    """Where in the first page the window begins is not looked at."""

    def build_mask(self, index: DecodeMetadata) -> GatheredKeys:
        keys = super().build_mask(index)
        return GatheredKeys(keys.rows_BL, keys.mask.flip(-1).cummax(-1).values.flip(-1))


@pytest.mark.parametrize(
    "windows", [(None,), (24,), (1024,), (5000,), (None, 4096), (64, 4096, None)], ids=str
)
def test_a_trial_distinguishes_a_wrong_mask_from_a_right_one(
    windows: tuple[int | None, ...],
) -> None:
    """Of every window class, however wide."""
    plan = tiny_plan(tiny_args(n_layers=len(windows), windows=windows, max_seq_len=8192), 1).stages[
        0
    ]
    has_window = any(windows)
    wrong = {"wider": _WiderWindow(), "none": _NoWindow()} if has_window else {}
    trials, right = correctness_cases(plan, CPU, NUM_CORRECTNESS_TOKENS), SdpaPrefill()
    given = AT_ONCE, plan, trials, lambda: trials
    assert _choose_prefill(*given, {**wrong, "right": right}) is right
    assert _choose_prefill(*given, wrong) not in wrong.values()
    wrong_decodes = {"oldest": _ForgetsTheOldest()} | (
        {"first": _FromTheFirstRow()} if has_window else {}
    )
    gathered = GatheredDecode()
    assert (
        _choose_decode(*given, {**wrong_decodes, "right": gathered, "also": PagedDecode()})
        is gathered
    )
    assert type(_choose_decode(*given, wrong_decodes)) is PagedDecode


@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("num_tokens", TIMED_TOKENS)
def test_what_is_timed_are_tables_that_are_partly_filled(
    num_tokens: int, page_size: int, window: int | None
) -> None:
    """As most are while a sequence grows, with the stage's own window."""
    plan = tiny_plan(
        tiny_args(n_layers=1, windows=(window,), max_seq_len=8192), 1, page_size=page_size
    ).stages[0]
    trials, timed = correctness_cases(plan, CPU, num_tokens), timing_cases(plan, CPU, num_tokens)
    seen: list[Tensor] = []

    def clock(compute: Compute) -> float:
        seen.append(compute())
        return 1.0

    _choose_decode(
        KernelSelector(clock),
        plan,
        trials,
        lambda: timed,
        {"right": PagedDecode(), "also": GatheredDecode()},
    )
    torch.testing.assert_close(seen[0], timed[0].expected[1].flatten())
    index = timed[0].decode_index
    assert index.ring.window == window
    filled = [(start // page_size + 1) / index.num_pages for start in index.positions.tolist()]
    assert min(filled) > 2 / 3
    assert max(filled) < 0.85


def test_the_kernels_of_a_gpu_are_the_same_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For prompts, and for each number of single tokens; the cases for timing are not even made."""
    plan, choices = tiny_plan(tiny_args(n_layers=1), 1).stages[0], KernelChoices("a GPU", tmp_path)
    candidates = (
        {"padded": SdpaPrefill(), "other": SdpaPrefill()},
        {"paged": PagedDecode(), "gathered": GatheredDecode()},
    )
    monkeypatch.setattr(
        autotune, "_gpu_candidates", lambda *_: (candidates[0], lambda _num_tokens: candidates[1])
    )
    for cases in ("correctness_cases", "timing_cases"):
        on_cpu = functools.partial(vars(autotune)[cases], plan, CPU)
        monkeypatch.setattr(
            autotune, cases, lambda _plan, _device, num_tokens, on_cpu=on_cpu: on_cpu(num_tokens)
        )
    times = itertools.count(9, -1)  # each is faster than the one before
    gpu = torch.device("cuda")
    first = autotune.select_kernels(
        plan, gpu, KernelSelector(lambda _compute: float(next(times)), choices)
    )
    assert first.prefill is candidates[0]["other"]
    assert isinstance(first.decode, BatchSizeDispatch)
    assert first.decode.kernels == (candidates[1]["gathered"],) * len(TIMED_TOKENS)
    monkeypatch.setattr(autotune, "timing_cases", lambda *_: pytest.fail("nothing is timed"))
    again = autotune.select_kernels(
        plan, gpu, KernelSelector(lambda _compute: pytest.fail("nothing is timed"), choices)
    )
    assert (again.prefill, again.decode.kernels) == (first.prefill, first.decode.kernels)  # type: ignore[attr-defined]


def test_cases_for_cpus_are_small_and_have_several_tiles() -> None:
    plan = tiny_plan(tiny_args(windows=(24, None), n_layers=2), 1).stages[0]
    for make, keys in ((correctness_cases, 128), (timing_cases, 1280)):
        for case in make(plan, CPU, 2):
            cached = keys if case.prefill_index.window is None else 23
            assert case.prefill_index.query_lens == (32, 32)
            assert case.prefill_index.key_lens == (cached + 32,) * 2
            assert case.decode_index.starts == [keys - 1, keys - 9]


def test_numbers_of_tokens_have_kernels_of_their_own() -> None:
    plan = tiny_plan(tiny_args(n_layers=1), 1).stages[0]
    gathered, paged = GatheredDecode(), PagedDecode()
    kernel = BatchSizeDispatch((gathered, paged, gathered), (2, 8))
    for num_tokens in (1, 2, 3, 8, 9, 32):
        (trial,) = correctness_cases(plan, CPU, num_tokens)
        assert isinstance(kernel.build_mask(trial.decode_index), list) == (
            num_tokens <= 2 or num_tokens > 8
        )
        torch.testing.assert_close(trial.decode(kernel)(), trial.expected[1])


class _FindsPages(PagedDecode):
    finds_pages = True


@pytest.mark.parametrize(
    ("kernels", "needs_tables"),
    [
        ((_FindsPages(),) * 3, False),
        ((_FindsPages(), PagedDecode(), _FindsPages()), True),
        ((PagedDecode(),) * 3, True),
    ],
)
def test_one_kernel_with_a_page_table_is_enough_to_need_tables(
    kernels: tuple[PagedDecode, ...], needs_tables: bool
) -> None:
    assert (
        AttentionKernels(SdpaPrefill(), BatchSizeDispatch(kernels, (2, 8))).needs_page_tables
        == needs_tables
    )
    assert AttentionKernels(SdpaPrefill(), kernels[1]).needs_page_tables == needs_tables


def _refusals(operator: Any, mask: Any, num_tokens: int, num_keys: int) -> list[str]:
    """What xformers says against an operator on a GPU of capability 9; tensors of a fake one have
    shapes only.
    """
    from xformers.ops.fmha import common

    with FakeTensorMode():
        q, k = (
            torch.empty(1, n, 2, 4, 128, dtype=torch.bfloat16, device="cuda")
            for n in (num_tokens, num_keys)
        )
    return list(operator.not_supported_reasons(common.Inputs(q, k, k, mask)))


def test_kernels_that_need_nothing_of_xformers_extension_are_not_refused_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The extension of its wheel does not load with a torch for CUDA 13, nor with one for CPUs."""
    kernels = pytest.importorskip(
        "tramontane.workers.attention.xformers_backend",
        reason="xformers is published for Linux on x86-64 only",
    )
    from xformers.ops.fmha import common

    monkeypatch.setattr(common, "_built_with_cuda", False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    prefill, packed = (
        kernels.prefill_kernels(),
        kernels.PackedPrefill(None).build_mask(_packed_index()),
    )

    def refusals() -> dict[str, list[str]]:
        return {
            "cutlass": _refusals(prefill["cutlass"].operator, packed, 7, 13),
            "flash 2": _refusals(prefill["flash 2"].operator, packed, 7, 13),
        }

    kernels.patch_built_with_cuda()
    assert all(refusals().values()), "a torch without CUDA has none of them"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    kernels.patch_built_with_cuda()
    said = refusals()
    assert said["cutlass"] == []
    has_flash = prefill["flash 2"].operator.is_available()  # a torch for CPUs has not
    assert (
        said["flash 2"] == []
        if has_flash
        else all("operator wasn't built" in why for why in said["flash 2"])
    )
    assert _refusals(prefill["cutlass"].operator, "a mask of no kind", 7, 13), (
        "what it cannot do it still refuses"
    )
    monkeypatch.delattr(common, "_built_with_cuda")
    kernels.patch_built_with_cuda()
    assert not hasattr(common, "_built_with_cuda")


def _packed_index() -> PrefillMetadata:
    """Two chunks of 3 and 4 tokens, seeing 5 and 8 keys."""
    none = torch.empty(0, dtype=torch.int64)
    return PrefillMetadata(None, (3, 4), (5, 8), (2, 4), none, none, none, none)


@pytest.mark.parametrize("absent", ["varlen_backend", "xformers_backend", "triton_decode"])
def test_what_cannot_be_imported_takes_no_other_kernel_away(
    absent: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package, plan = "tramontane.workers.attention", tiny_plan(tiny_args(n_layers=1), 1).stages[0]
    modules = {
        "varlen_backend": SimpleNamespace(VarlenPrefill=SdpaPrefill),
        "xformers_backend": SimpleNamespace(prefill_kernels=lambda: {"flash 2": SdpaPrefill()}),
        "triton_decode": SimpleNamespace(
            split_k_kernels=lambda tokens, heads: {f"{tokens}, {heads}": PagedDecode()}
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"{package}.{name}", None if name == absent else module)
    prefills, decodes = _gpu_candidates(plan, CPU)
    kernels = {"varlen_backend": "torch's varlen", "xformers_backend": "flash 2"}
    assert [*prefills] == [kernel for name, kernel in kernels.items() if name != absent]
    assert [*decodes(4)] == ([] if absent == "triton_decode" else [f"4, {plan.args.n_kv_heads}"])
    (record,) = caplog.records
    assert absent in record.getMessage()


@pytest.mark.parametrize(("factor", "is_used"), [(1.0, True), (1.1, False)])
def test_one_kernel_rotates_and_writes_where_it_is_right(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, factor: float, is_used: bool
) -> None:
    """Or layers rotate by themselves, and the log says so."""
    triton_cache = pytest.importorskip(
        "tramontane.workers.attention.triton_cache", reason="Triton is not on every platform"
    )

    def rotate_and_write(
        cached: LayerCache, rows_B: Tensor, qkv_BHd: Tensor, cos_Bd: Tensor, sin_Bd: Tensor
    ) -> Tensor:
        num_keys = cached.k_NGd.shape[1]
        rotated_BHd = EAGER.apply_rotary(qkv_BHd[:, :-num_keys], cos_Bd, sin_Bd)
        cached.write(rows_B, factor * rotated_BHd[:, -num_keys:], qkv_BHd[:, -num_keys:])
        return rotated_BHd[:, :-num_keys]

    for name, kernel in (
        ("write_rows", LayerCache.write),
        ("cache_rows", PageRings.rows),
        ("rotate_and_write", rotate_and_write),
    ):
        monkeypatch.setattr(triton_cache, name, kernel)
    plan, own = (
        tiny_plan(tiny_args(n_layers=1), 1).stages[0],
        AttentionKernels(SdpaPrefill(), PagedDecode()),
    )
    kernels = autotune._with_triton_writes(own, plan, CPU)
    assert kernels.rotate_and_write is (rotate_and_write if is_used else None)
    assert ("rotated by a kernel of its own: differs by" in caplog.text) is not is_used
    latent = tiny_plan(latent_args(n_layers=1), 1).stages[0]
    assert autotune._with_triton_writes(own, latent, CPU).rotate_and_write is None
