"""What the table decides is tried and not timed: jobs of the sizes that were measured."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from tiny_models import latent_args, tiny_args, tiny_plan
from torch import Tensor

from tramontane.proto.plan import StagePlan
from tramontane.workers.attention import autotune
from tramontane.workers.attention.autotune import TIMED_TOKENS
from tramontane.workers.attention.kernel_cases import correctness_cases
from tramontane.workers.attention.sdpa_backend import GatheredDecode, PagedDecode, SdpaPrefill
from tramontane.workers.device.kernel_choices import KernelChoices
from tramontane.workers.device.kernel_selection import Compute, KernelSelector, cuda_seconds
from tramontane.workers.device.kernel_table import EXPERTS, HEADS, MATRIX, TABLE, Row
from tramontane.workers.kernels import product_selection
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.kernels.product_selection import select_products
from tramontane.workers.model import expert_kernels
from tramontane.workers.model.expert_kernels import (
    ROW_CLASSES,
    ProductBySize,
    select_product,
    torch_grouped_linear,
)

RIGHT = torch.arange(1.0, 5.0)
ROW: Row = ("decode of 4", "some heads")
HOPPER = (9, 0)
MISTRAL_7B = tiny_args(n_layers=1, windows=(4096,), n_heads=32, n_kv_heads=8, head_dim=128)


def _not_timed(_compute: Compute) -> float:
    pytest.fail("nothing is timed")


def _fastest(
    outs: Mapping[str, Tensor],
    row: Row | None,
    clock: Callable[[Compute], float],
    choices: KernelChoices | None = None,
) -> str | None:
    def prepare(name: str) -> Compute:
        return lambda: outs[name]

    selector = KernelSelector(clock, choices, {ROW: "b"})
    names = {name: name for name in outs}
    return selector.fastest("a job", "", names, prepare, lambda: prepare, RIGHT, row=row)


def test_the_kernel_of_the_table_is_tried_and_neither_timed_nor_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    choices = KernelChoices("a GPU", tmp_path)
    with caplog.at_level(logging.INFO):
        assert _fastest({"a": RIGHT, "b": RIGHT}, ROW, _not_timed, choices) == "b"
    assert caplog.messages == ["a job by b, as measured on such GPUs"]
    assert [*tmp_path.iterdir()] == []


def test_where_it_is_wrong_all_are_tried(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([3.0, 1.0])
    outs = {"a": RIGHT, "b": RIGHT * 1.1, "c": RIGHT}
    assert _fastest(outs, ROW, lambda _compute: next(times)) == "c"
    assert caplog.messages == [
        "a job: b was measured on such GPUs and is not used, all are tried again: differs by 0.1"
    ]


@pytest.mark.parametrize("row", [None, ("decode of 4", "other heads"), ("prefill", ROW[1])])
def test_what_has_no_row_is_timed(row: Row | None) -> None:
    times = iter([1.0, 2.0])
    assert _fastest({"a": RIGHT, "b": RIGHT}, row, lambda _compute: next(times)) == "a"


def test_a_kernel_that_is_no_candidate_is_not_asked_for() -> None:
    times = iter([1.0, 2.0])
    assert _fastest({"a": RIGHT, "c": RIGHT}, ROW, lambda _compute: next(times)) == "a"


@pytest.mark.parametrize(("capability", "has_table"), [(HOPPER, True), ((8, 0), False)])
def test_a_gpu_has_the_table_of_its_capability(
    capability: tuple[int, int], has_table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(KernelChoices, "of_device", lambda _device: None)
    table = TABLE[HOPPER] if has_table else {}
    assert KernelSelector.of_device(torch.device("cuda")) == KernelSelector(
        cuda_seconds, None, table
    )


def test_every_kernel_of_the_table_is_a_candidate() -> None:
    """And every job is one that a stage has."""
    triton_decode = pytest.importorskip("tramontane.workers.attention.triton_decode")
    rows = {("prefill", HEADS): {"torch's varlen"}} | {
        (f"decode of {num}", HEADS): {*triton_decode.split_k_kernels(num, 8)}
        for num in TIMED_TOKENS
    }
    for num in product_selection.CLASSES:
        candidates = product_selection._candidates(num)
        rows[(f"product of {num}", MATRIX)] = {"the library", *candidates}
    for num in ROW_CLASSES.values():
        rows[(f"experts of {num} rows", EXPERTS)] = {*expert_kernels.candidates()}
    for table in TABLE.values():
        assert table.keys() <= rows.keys()
        assert not {row: name for row, name in table.items() if name not in rows[row]}


def _plan(**changes: object) -> StagePlan:
    plan = tiny_plan(MISTRAL_7B, 1, dtype="bfloat16").stages[0]
    return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]


def test_keys_and_values_that_were_measured_have_a_row() -> None:
    assert autotune._row("prefill", _plan()) == ("prefill", HEADS)
    fewer = dataclasses.replace(MISTRAL_7B, n_kv_heads=4)
    assert autotune._row("prefill", _plan(args=fewer)) == ("prefill", "4 heads of 128")
    latent = tiny_plan(latent_args(), 1, dtype="bfloat16").stages[0]
    for other in (_plan(dtype="float16"), _plan(kv_cache_dtype="fp8"), latent):
        assert autotune._row("prefill", other) is None


def test_attention_is_that_of_the_table() -> None:
    """Of a kernel for prompts and one for each number of single tokens."""
    plan = tiny_plan(tiny_args(n_layers=1), 1, dtype="bfloat16").stages[0]
    size = f"{plan.args.n_kv_heads} heads of {plan.args.head_dim}"
    table = {("prefill", size): "second", ("decode of 4", size): "second"}
    given = KernelSelector(_not_timed, None, table), plan
    cases = correctness_cases(plan, torch.device("cpu"), 4)
    prefills, decodes = (
        {"first": SdpaPrefill(), "second": SdpaPrefill()},
        {"first": PagedDecode(), "second": GatheredDecode()},
    )
    made = autotune._choose_prefill(*given, cases, lambda: cases, prefills)
    assert made is prefills["second"]
    assert autotune._choose_decode(*given, cases, lambda: cases, decodes) is decodes["second"]


@pytest.mark.parametrize(
    ("dtype", "inputs", "is_decided"),
    [(torch.bfloat16, 8, True), (torch.bfloat16, 7, False), (torch.float16, 8, False)],
)
def test_large_products_are_those_of_the_table(
    dtype: torch.dtype, inputs: int, is_decided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices of 128 numbers are large here; by the clock the library is never the fastest."""
    monkeypatch.setattr(product_selection, "LARGE", 128)
    monkeypatch.setattr(
        product_selection, "_candidates", lambda num: {f"own {num}": torch.nn.functional.linear}
    )
    layer, times = Linear(inputs, 16).to(dtype), iter([2.0, 1.0] * 4)
    table = {(f"product of {num}", MATRIX): "the library" for num in (1, 2, 16)}
    select_products([layer], KernelSelector(lambda _compute: next(times), None, table))
    names = [name for _, name, _ in layer.small_batch_products]
    expected = ["the library"] * 3 if is_decided else ["own 1", "own 2", "own 16"]
    assert names == [*expected, "own 64"]


@pytest.mark.parametrize(
    ("shape", "dtype", "is_decided"),
    [
        ((8, 16, 8), torch.bfloat16, True),
        ((4, 16, 8), torch.bfloat16, False),
        ((8, 15, 8), torch.bfloat16, False),
        ((8, 16, 8), torch.float16, False),
    ],
)
def test_products_of_experts_are_those_of_the_table(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    is_decided: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Matrices of 128 numbers are large here; by the clock torch is never the fastest."""
    monkeypatch.setattr(expert_kernels, "LARGE", 128)
    monkeypatch.setattr(
        expert_kernels,
        "candidates",
        lambda *_: {"torch": torch_grouped_linear, "own": torch_grouped_linear},
    )
    monkeypatch.setattr(
        expert_kernels.F, "grouped_mm", lambda rows_CK, weight_EKN, offs: rows_CK @ weight_EKN[0]
    )
    times = iter([2.0, 1.0] * len(ROW_CLASSES))
    table = {(f"experts of {num} rows", EXPERTS): "torch" for num in ROW_CLASSES.values()}
    selector = KernelSelector(lambda _compute: next(times), None, table)
    product = select_product("w2", torch.randn(shape).to(dtype), dtype, None, selector)
    assert isinstance(product, ProductBySize)
    assert {name for _, name, _ in product.small} == {"torch" if is_decided else "own"}
