"""Kernels of experts are used where they are right, and by their speed; few choices are computed
without sorting them.
"""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_models import experts_together, random_model, tiny_args
from torch import Tensor

from tramontane.proto.model_args import GateScores, MoeArgs
from tramontane.workers.device.kernel_choices import KernelChoices
from tramontane.workers.device.kernel_selection import WITHOUT_MEMORY, Compute, KernelSelector
from tramontane.workers.kernels.quantized_linear import quantize_rows_fp8
from tramontane.workers.model import expert_kernels
from tramontane.workers.model.expert_kernels import (
    MAX_SMALL_BATCH_ROWS,
    ProductBySize,
    StackedExperts,
    select_gpu_kernels,
    select_product,
    small_batch_kernel_works,
    torch_grouped_linear,
    torch_scaled_grouped_linear,
    uneven_ends,
)
from tramontane.workers.model.moe import ExpertPermutation, LocalExperts
from tramontane.workers.model.transformer import StageModel

SCORES = {
    "logits": MoeArgs(4, 2),
    "softmax": MoeArgs(4, 2, scores=GateScores.SOFTMAX),
    "sigmoid": MoeArgs(4, 2, scores=GateScores.SIGMOID),
}


def _stack() -> StackedExperts:
    return StackedExperts(torch.randn(4, 48, 16), torch.randn(4, 16, 24))


def _choose(
    logits_TE: Tensor,
    top_k: int,
    dtype: torch.dtype,
    is_padding_T: Tensor | None,
    total_ends_E: Tensor,
) -> tuple[Tensor, Tensor]:
    """Stand for the kernel, with PyTorch."""
    logits_Tk, ids_Tk = logits_TE.topk(top_k, dim=-1)
    if is_padding_T is not None:
        ids_Tk = ids_Tk.masked_fill(is_padding_T[:, None], logits_TE.shape[1])
    total_ends_E.add_(ExpertPermutation.of(ids_Tk, logits_TE.shape[1]).offsets_E)
    return ids_Tk, logits_Tk.softmax(-1, dtype=torch.float32).to(dtype)


def _mix(stack: StackedExperts, x_TD: Tensor, ids_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
    """Stand for the kernels, with PyTorch."""
    groups = ExpertPermutation.of(ids_Tk, len(stack.w2_EDF))
    mixed_TD = groups.combine(stack.run(groups.permute(x_TD), groups.offsets_E), weights_Tk)
    return torch.where((ids_Tk < len(stack.w2_EDF)).any(-1, keepdim=True), mixed_TD, 0)


def _as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_moe = pytest.importorskip("tramontane.workers.kernels.triton_moe")
    monkeypatch.setattr(triton_moe, "choose_experts", _choose)
    monkeypatch.setattr(StackedExperts, "mix_small", _mix)
    monkeypatch.setattr(expert_kernels, "_is_on_gpu", lambda _stack: True)
    monkeypatch.setattr(expert_kernels, "select_product", lambda *_: torch_grouped_linear)


def test_nothing_is_tried_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("small_batch_kernel_works", "select_product"):
        monkeypatch.setattr(expert_kernels, name, lambda *_: pytest.fail("tried"))
    stacks = {3: _stack()}
    assert select_gpu_kernels(stacks, torch.float32, WITHOUT_MEMORY) == stacks
    assert select_gpu_kernels({}, torch.float32, WITHOUT_MEMORY) == {}


@pytest.mark.parametrize(
    ("factor", "error", "why"),
    [
        (1.0, None, ""),
        (1.1, None, "differs by 0.1"),
        (torch.nan, None, "differs by nan"),
        (1.0, "No module named 'triton'", "triton"),
    ],
)
def test_what_does_not_work_is_said_and_not_used(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    factor: float,
    error: str | None,
    why: str,
) -> None:
    def few_rows(*given: object) -> Tensor:
        if error:
            raise ImportError(error)
        return factor * _mix(*given)  # type: ignore[arg-type]

    _as_if_on_a_gpu(monkeypatch)
    monkeypatch.setattr(StackedExperts, "mix_small", few_rows)
    with caplog.at_level(logging.WARNING):
        stacks = select_gpu_kernels({0: _stack(), 1: _stack()}, torch.float32, WITHOUT_MEMORY)
    assert [stack.has_small_batch_kernel for stack in stacks.values()] == [not why] * 2
    assert len(caplog.records) == bool(why)
    assert why in caplog.text


def test_a_kernel_that_counts_wrongly_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _as_if_on_a_gpu(monkeypatch)
    triton_moe = pytest.importorskip("tramontane.workers.kernels.triton_moe")
    monkeypatch.setattr(
        triton_moe, "choose_experts", lambda *given: (given[-1].add_(1), _choose(*given))[1]
    )
    assert not small_batch_kernel_works(_stack(), torch.float32)
    assert "other experts are chosen or counted" in caplog.text


@pytest.fixture(params=SCORES)
def models(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[StageModel, StageModel]:
    """Return a model that computes few choices as on a GPU, and the same as on a CPU."""
    model = random_model(replace(tiny_args(n_layers=2), moe=SCORES[request.param]))
    plain = experts_together(model)
    _as_if_on_a_gpu(monkeypatch)
    return experts_together(model), plain


def test_few_choices_are_those_of_the_gate_and_counted(
    models: tuple[StageModel, StageModel],
) -> None:
    """Also those of padding, which are of no expert, and of which nothing comes."""
    few, plain = models
    assert isinstance(few.experts, LocalExperts)
    assert few.experts.kernel_name == "grouped, few rows apart"
    for num_tokens in (1, 5, MAX_SMALL_BATCH_ROWS // 2):
        for is_padding_T in (None, torch.arange(num_tokens) % 4 == 3):
            x_TD = torch.randn(
                num_tokens, few.args.dim, generator=torch.Generator().manual_seed(num_tokens)
            )
            chosen: list[list[tuple[int, list[list[int]]]]] = [[], []]
            with torch.inference_mode():
                outs = [
                    model.feed_forward(
                        1,
                        x_TD,
                        lambda layer, ids, seen=seen: seen.append((layer, ids.tolist())),
                        is_padding_T,
                    )  # type: ignore[misc]
                    for model, seen in zip(models, chosen, strict=True)
                ]
            torch.testing.assert_close(*outs)
            assert chosen[0] == chosen[1]
            assert [layer for layer, _ in chosen[0]] == [1]
            assert few.expert_load == plain.expert_load
    assert sum(few.expert_load[1]) > 0


def test_more_choices_are_sorted(
    models: tuple[StageModel, StageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, plain = models
    computed: list[int] = []
    monkeypatch.setattr(
        StackedExperts,
        "mix_small",
        lambda *given: (computed.append(given[2].numel()), _mix(*given))[1],
    )
    for num_tokens in (1, MAX_SMALL_BATCH_ROWS // 2, MAX_SMALL_BATCH_ROWS // 2 + 1, 100):
        x_TD = torch.randn(num_tokens, few.args.dim)
        with torch.inference_mode():
            torch.testing.assert_close(few.feed_forward(0, x_TD), plain.feed_forward(0, x_TD))
    assert computed == [2, MAX_SMALL_BATCH_ROWS]


def test_the_fastest_product_of_each_class_of_rows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that are wrong are not used, and nor is one that is hardly faster than torch's."""
    last: list[str] = []

    def product(name: str, factor: float, *given: Tensor) -> Tensor:
        last[:] = [name]
        return factor * torch_grouped_linear(*given)

    factors = {"torch": 1.0, "low": 1.001, "high": 0.999, "wrong": 1.1}
    monkeypatch.setattr(
        expert_kernels,
        "candidates",
        lambda *_: {n: partial(product, n, f) for n, f in factors.items()},
    )
    seconds = {
        64: {"torch": 3e-6, "low": 1e-6, "high": 2e-6},
        128: {"torch": 3e-6, "low": 2e-6, "high": 1e-6},
        256: {"torch": 3e-6, "low": 2.9e-6, "high": 2.95e-6},
    }
    with caplog.at_level(logging.INFO):
        selector = KernelSelector(lambda compute: seconds[len(compute())][last[0]])
        chosen = select_product("w2", torch.randn(4, 24, 16), torch.float32, None, selector)
    assert isinstance(chosen, ProductBySize)
    assert chosen.name == "low to 64 rows, high to 128 rows, torch to 512 rows"
    assert caplog.messages == [
        "w2 of experts for 64 rows by low (torch 3 us; low 1 us; high 2 us; wrong differs by 0.1)",
        (
            "w2 of experts for 128 rows by high (torch 3 us; low 2 us; high 1 us; wrong differs by"
            " 0.1)"
        ),
        (
            "w2 of experts for 256 rows by torch (torch 3 us; low 3 us; high 3 us; wrong differs by"
            " 0.1)"
        ),
    ]
    for num_rows, name in (
        (1, "low"),
        (64, "low"),
        (65, "high"),
        (128, "high"),
        (129, "torch"),
        (512, "torch"),
        (513, ""),
    ):
        last[:] = [""]
        ends_E = uneven_ends(num_rows, 4)
        assert int(ends_E[-1]) == num_rows
        chosen(torch.randn(num_rows, 16), torch.randn(4, 24, 16), ends_E)
        assert last == [name]


def test_the_products_are_the_same_after_a_restart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever the clock says then; experts of other sizes and data types are asked for by
    themselves.
    """
    products = {name: partial(torch_grouped_linear) for name in ("torch", "low", "high")}
    monkeypatch.setattr(expert_kernels, "candidates", lambda *_: products)
    choices, timed = KernelChoices("a GPU", tmp_path), list[int]()

    def chosen(fastest: int, job: str, weight_ENK: Tensor, dtype: torch.dtype) -> tuple[str, int]:
        timed.clear()

        def clock(compute: Compute) -> float:
            timed.append(len(compute()))
            return 1e-6 if len(timed) % 3 == fastest else 2e-6

        product = select_product(job, weight_ENK, dtype, None, KernelSelector(clock, choices))
        assert isinstance(product, ProductBySize)
        return product.name, len(timed)

    weight_ENK = torch.randn(4, 24, 16)
    low, high = (
        f"{name} to 64 rows, {name} to 128 rows, {name} to 512 rows" for name in ("low", "high")
    )
    assert chosen(2, "w2", weight_ENK, torch.float32) == (low, 9)
    assert chosen(0, "w2", weight_ENK, torch.float32) == (low, 0)
    others = (
        ("w13", weight_ENK, torch.float32),
        ("w2", weight_ENK[:, :8], torch.float32),
        ("w2", weight_ENK[:2], torch.float32),
    )
    for other in (*others, ("w2", weight_ENK.bfloat16(), torch.bfloat16)):
        assert chosen(0, *other) == (high, 9)


def test_quantized_products_for_rows_of_another_data_type_are_asked_for_by_themselves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    product = expert_kernels.dequantized_grouped_linear
    monkeypatch.setattr(expert_kernels, "candidates", lambda *_: {"one": product, "other": product})
    choices, timed = KernelChoices("a GPU", tmp_path), list[torch.dtype]()
    selector = KernelSelector(lambda compute: timed.append(compute().dtype) or 1.0, choices)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        select_product(
            "w2", torch.randint(-9, 9, (4, 24, 16)).char(), dtype, torch.rand(4, 24), selector
        )
    num_timed = 2 * (len(expert_kernels.ROW_CLASSES) + 1)
    assert timed == [torch.float32] * num_timed + [torch.bfloat16] * num_timed


def test_without_triton_torch_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(expert_kernels, "candidates", fails)
    w2_EDF, selector = torch.randn(4, 24, 16), WITHOUT_MEMORY
    assert select_product("w2", w2_EDF, torch.float32, None, selector) is torch_grouped_linear
    assert "No module named 'triton'" in caplog.text
    assert select_product("w2", w2_EDF.char(), torch.float32, torch.rand(4, 24), selector) is None


QUANTIZED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def _quantized_stack(dtype: torch.dtype) -> StackedExperts:
    w13_E2FD, w2_EDF = (
        torch.randn(shape).mul(40).clamp(-127, 127).to(dtype)
        for shape in ((4, 48, 16), (4, 16, 24))
    )
    return StackedExperts(
        w13_E2FD, w2_EDF, w13_scale_E2F=torch.rand(4, 48) / 40, w2_scale_ED=torch.rand(4, 16) / 40
    )


def _dequantized(
    rows_CK: Tensor, weight_ENK: Tensor, ends_E: Tensor, scale_EN: Tensor | None
) -> Tensor:
    """Stand for a kernel, with PyTorch."""
    assert scale_EN is not None
    return torch_grouped_linear(rows_CK, weight_ENK.float() * scale_EN[..., None], ends_E)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_quantized_experts_have_products_for_any_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The fastest of those that are right, for more rows than torch's product would be used for,
    too.
    """
    monkeypatch.setattr(expert_kernels, "_is_on_gpu", lambda _stack: True)
    monkeypatch.setattr(expert_kernels, "small_batch_kernel_works", lambda *_: False)
    last: list[str] = []

    def product(name: str, factor: float, *given: Tensor) -> Tensor:
        last[:] = [name]
        return factor * _dequantized(*given)

    products = {
        name: partial(product, name, factor)
        for name, factor in {"wrong": 1.1, "few": 1.0, "many": 1.0}.items()
    }
    seconds = {
        "wrong": lambda _rows: 1e-9,
        "few": lambda rows: rows * 1e-6,
        "many": lambda rows: 3e-4 + rows * 1e-8,
    }

    def clock(compute: Compute) -> float:
        return seconds[last[0]](len(compute()))

    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        expert_kernels, "candidates", lambda *given: (asked.append(given), products)[1]
    )
    stack = select_gpu_kernels(
        {7: _quantized_stack(QUANTIZED[dtype])}, torch.float32, KernelSelector(clock)
    )[7]
    assert asked == [(QUANTIZED[dtype], torch.float32, (0, 0))] * 2
    assert isinstance(stack.w2_product, ProductBySize)
    assert (
        stack.w2_product.name == "few to 64 rows, few to 128 rows, few to 512 rows, many for more"
    )
    assert stack.w2_product.large is products["many"]
    rows_CD, ends_E = torch.randn(600, 16), uneven_ends(600, 4)
    expected = StackedExperts(
        stack.w13_E2FD.float() * stack.w13_scale_E2F[..., None],  # type: ignore[index]
        stack.w2_EDF.float() * stack.w2_scale_ED[..., None],  # type: ignore[index]
    )
    torch.testing.assert_close(stack.run(rows_CD, ends_E), expected.run(rows_CD, ends_E))
    del products["few"], products["many"]
    stacks = {7: _quantized_stack(QUANTIZED[dtype])}
    assert select_gpu_kernels(stacks, torch.float32, KernelSelector(clock)) == {}, (
        "they run one by one"
    )


def test_quantized_experts_run_one_by_one_where_there_is_no_gpu() -> None:
    assert (
        select_gpu_kernels({3: _quantized_stack(torch.int8)}, torch.float32, WITHOUT_MEMORY) == {}
    )


CONVERTING = [
    "16x128x128x4x4",
    "16x64x256x4x3",
    "16x128x64x4x6",
    "32x128x128x4x3",
    "64x128x64x4x4",
    "128x128x64x8x3",
]


@pytest.mark.parametrize(
    ("weights", "rows", "capability", "in_fp8"),
    [
        (torch.float8_e4m3fn, torch.bfloat16, (9, 0), ["fp8 triton", "fp8 torch"]),
        (torch.float8_e4m3fn, torch.float16, (8, 9), ["fp8 triton"]),
        (torch.float8_e4m3fn, torch.bfloat16, (10, 3), ["fp8 triton"]),
        (torch.float8_e4m3fn, torch.float32, (9, 0), []),
        (torch.float8_e4m3fn, torch.bfloat16, (8, 6), []),
        (torch.int8, torch.bfloat16, (9, 0), []),
    ],
)
def test_rows_are_quantized_where_the_gpu_multiplies_fp8(
    weights: torch.dtype, rows: torch.dtype, capability: tuple[int, int], in_fp8: list[str]
) -> None:
    """For matrices in fp8 and rows in 16 bits; products that keep the rows come first."""
    tiles = pytest.importorskip("tramontane.workers.kernels.triton_fp8_linear").FP8_TILES
    names = [f"fp8 {'x'.join(map(str, tile))}" for tile in tiles] if in_fp8 else []
    assert (
        list(expert_kernels.candidates(weights, rows, capability))
        == CONVERTING + names + in_fp8[1:]
    )


def _quantizing(
    rows_CK: Tensor, weight_ENK: Tensor, ends_E: Tensor, scale_EN: Tensor | None
) -> Tensor:
    """Stand for a product in fp8, with PyTorch."""
    numbers_CK, scale_C1 = quantize_rows_fp8(rows_CK)
    return _dequantized(numbers_CK.float() * scale_C1, weight_ENK, ends_E, scale_EN).to(
        rows_CK.dtype
    )


def _losing_scales(
    rows_CK: Tensor, weight_ENK: Tensor, ends_E: Tensor, scale_EN: Tensor | None
) -> Tensor:
    return _dequantized(quantize_rows_fp8(rows_CK)[0].float(), weight_ENK, ends_E, scale_EN).to(
        rows_CK.dtype
    )


def _only_casting(
    rows_CK: Tensor, weight_ENK: Tensor, ends_E: Tensor, scale_EN: Tensor | None
) -> Tensor:
    return _dequantized(rows_CK.to(torch.float8_e4m3fn).float(), weight_ENK, ends_E, scale_EN).to(
        rows_CK.dtype
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_that_quantize_rows_are_held_to_the_same_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dtype: torch.dtype
) -> None:
    """With rows that quantization does not change; one that loses their scales is not used."""
    products = {"rows": _quantizing, "no scales": _losing_scales, "cast": _only_casting}
    monkeypatch.setattr(expert_kernels, "candidates", lambda *_: products)
    stack = _quantized_stack(torch.float8_e4m3fn)
    with caplog.at_level(logging.INFO):
        product = select_product(
            "w2", stack.w2_EDF, dtype, stack.w2_scale_ED, KernelSelector(lambda _: 1e-6)
        )
    assert isinstance(product, ProductBySize)
    assert {name for _, name, _ in product.small} == {product.large_name} == {"rows"}
    for message in caplog.messages:
        assert message.count("differs by") == 2


def test_few_choices_are_not_compared_with_products_that_quantize_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose error is larger than the limit: 3 % here, of rows that have something to round."""
    _as_if_on_a_gpu(monkeypatch)
    stack = _quantized_stack(torch.float8_e4m3fn)
    exact = stack._replace(w13_product=_dequantized, w2_product=_dequantized)
    monkeypatch.setattr(StackedExperts, "mix_small", lambda _stack, *given: _mix(exact, *given))
    assert small_batch_kernel_works(
        stack._replace(w13_product=_quantizing, w2_product=_quantizing), torch.float32
    )


def test_torchs_fp8_product_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own rules for shapes, strides and data types, without a GPU."""
    triton_linear = pytest.importorskip("tramontane.workers.kernels.triton_linear")
    monkeypatch.setattr(
        triton_linear, "quantize_rows_fp8", lambda x_TK, _largest: quantize_rows_fp8(x_TK)
    )
    rows_CK, ends_E = (
        torch.empty(37, 64, device="meta", dtype=torch.bfloat16),
        torch.empty(4, device="meta", dtype=torch.int32),
    )
    weight_ENK = torch.empty(4, 48, 64, device="meta", dtype=torch.float8_e4m3fn)
    out_CN = torch_scaled_grouped_linear(
        rows_CK, weight_ENK, ends_E, torch.empty(4, 48, device="meta")
    )
    assert (out_CN.shape, out_CN.dtype) == ((37, 48), torch.bfloat16)
