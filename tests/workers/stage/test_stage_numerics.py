"""The numerics of a stage name what computes each part of it: kernels in C by their sources and the
platform.
"""

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import tiny_args, tiny_plan
from torch import nn

from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.weight_format import Quantization
from tramontane.workers.attention import native_backend
from tramontane.workers.attention.sdpa_backend import BatchSizeDispatch, SdpaPrefill, cpu_kernels
from tramontane.workers.device import native_library, numerics
from tramontane.workers.device.numerics import device_numerics
from tramontane.workers.kernels import fused_ops, packed_linear
from tramontane.workers.kernels.fused_ops import EAGER
from tramontane.workers.kernels.kernel_names import describe_kernel, name_kernels
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.kernels.quantized_linear import (
    QuantizedKernels,
    QuantizedLinear,
    fp8_linear,
)
from tramontane.workers.kernels.row_invariance import RowProducts, TiledProducts, set_row_products
from tramontane.workers.model.moe import LocalExperts
from tramontane.workers.stage.device_backend import DeviceBackend
from tramontane.workers.stage.stage_numerics import stage_numerics
from tramontane.workers.stage.stage_worker import StageWorker

ARGS = tiny_args(n_layers=2)
CPU = torch.device("cpu")
KERNELS = {
    "attention": (native_backend, "attention"),
    "norms": (fused_ops, "norms"),
    "products": (packed_linear, "products of float32"),
}
needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None, reason="needs kernels in C, and they a C compiler"
)


@pytest.fixture(scope="module")
def worker() -> StageWorker:
    return StageWorker.load(tiny_plan(ARGS).stages[0], RandomWeights())


def _parts(worker: StageWorker) -> dict[str, str]:
    """Find them out again, as a stage would that starts now."""
    return dict(
        stage_numerics(
            worker.model, worker.backend, CPU, worker.dtype, is_batch_invariant=True
        ).parts
    )


def _changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    assert before.keys() == after.keys()
    return {part for part in before if before[part] != after[part]}


@needs_compiler
def test_what_a_worker_found_out_when_it_was_loaded(worker: StageWorker) -> None:
    assert worker.is_batch_invariant
    assert dict(worker.numerics.parts) == _parts(worker)
    assert _parts(worker).keys() == {"attention", "device", "norms", "products of float32"}


@needs_compiler
@pytest.mark.parametrize("kind", KERNELS)
def test_the_source_of_a_kernel_counts(
    kind: str, worker: StageWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, (module, part) = _parts(worker), KERNELS[kind]
    source: Path = vars(module)["SOURCE"]
    copy = tmp_path / source.name
    copy.write_bytes(source.read_bytes())
    monkeypatch.setattr(module, "SOURCE", copy)
    assert _parts(worker) == before, "wherever it is"
    copy.write_bytes(source.read_bytes() + b"// another\n")
    assert _changed(before, _parts(worker)) == {part}


@needs_compiler
def test_the_platform_counts_for_all_kernels_in_c(
    worker: StageWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, in_c = _parts(worker), {part for _, part in KERNELS.values()}
    with monkeypatch.context() as patch:
        patch.setattr(native_library, "processor", lambda: "another")
        assert _changed(before, _parts(worker)) == in_c | {"device"}
    with monkeypatch.context() as patch:
        patch.setattr(native_library, "FLAGS", (*native_library.FLAGS, "-O2"))
        assert _changed(before, _parts(worker)) == in_c
    for number, command in enumerate(("exec cc", "exec  cc")):
        compiler = tmp_path / f"cc{number}"
        compiler.write_text(f'#!/bin/sh\n{command} "$@"\n', encoding="utf-8")
        compiler.chmod(0o700)
        with monkeypatch.context() as patch:
            patch.setenv("CC", str(compiler))
            assert _changed(before, _parts(worker)) == in_c
            patch.setenv("CC", f"{compiler} -m32")
            assert _changed(before, _parts(worker)) == in_c


def test_pytorch_and_numpy_count(worker: StageWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _parts(worker)
    for library in (torch, np):
        with monkeypatch.context() as patch:
            patch.setattr(library, "__version__", "0.1")
            assert _changed(before, _parts(worker)) == {"device"}
    without = DeviceBackend(cpu_kernels())
    parts = dict(
        stage_numerics(worker.model, without, CPU, worker.dtype, is_batch_invariant=False).parts
    )
    assert parts["attention"] == "SdpaPrefill, GatheredDecode"
    assert parts["norms"] == "PyTorch"


@needs_compiler
def test_each_kind_of_matrix_has_a_part() -> None:
    """Whatever stage it is in: the head is not quantized."""
    kinds = {}
    for quantize in (Quantization.INT8, Quantization.W8A8, Quantization.FP8):
        workers = [
            StageWorker.load(plan, RandomWeights())
            for plan in tiny_plan(ARGS, 2, quantize=quantize).stages
        ]
        kinds[quantize] = {
            part.removeprefix("products of ")
            for worker in workers
            for part, _ in worker.numerics.parts
        }
        kinds[quantize] -= {"attention", "device", "norms"}
    assert list(kinds.values()) == [
        {"int8", "float32"},
        {"int8 and int8", "float32"},
        {"float8_e4m3fn", "float32"},
    ]


# ---- on GPUs


@dataclass
class _Operator:
    """As a kernel that has one of xformers' classes as its operator."""

    operator: type


@dataclass(frozen=True)
class _Paged:
    block: int
    page_size: int = field(repr=False)


@dataclass
class _SplitK:
    """As Triton's kernel, which has its sizes as fields."""

    block: int
    parts: int


def test_kernels_of_gpus_are_named_with_their_parameters() -> None:
    few, many = _SplitK(64, 8), _Operator(type("FwOp", (), {"NAME": "fa2F"}))
    assert describe_kernel(BatchSizeDispatch((few, many), (4,))) == (  # type: ignore[arg-type]
        "BatchSizeDispatch((_SplitK(64, 8), _Operator(FwOp(NAME fa2F))), (4))"
    )
    assert describe_kernel(_SplitK(64, 16)) != describe_kernel(few)
    assert describe_kernel(SdpaPrefill()) == "SdpaPrefill"
    assert describe_kernel(_Paged(64, 16)) == "_Paged(64)", "sizes of pages change no bits"
    assert (
        describe_kernel(QuantizedKernels(None, fp8_linear)) == "QuantizedKernels(None, fp8_linear)"
    )


@pytest.mark.parametrize("quantize", [None, Quantization.INT8])
def test_products_of_rows_apart_are_named(quantize: Quantization | None) -> None:
    """As with batch invariance on GPUs, whatever tiles run there: these change no bits."""
    model = nn.Sequential(
        Linear(16, 16), QuantizedLinear(16, 16, torch.int8) if quantize else Linear(16, 32)
    )
    meta, names = torch.device("meta"), []
    for tiles in ({}, {(torch.bfloat16, torch.int8): ()}):
        products = TiledProducts(tiles)  # type: ignore[arg-type]
        set_row_products(model, RowProducts(products.linear, products.grouped))
        names.append(name_kernels(model, EAGER, meta, torch.float32))
    kinds = {"products of float32", "products of int8"} if quantize else {"products of float32"}
    assert names[0] == names[1] == {"norms": "PyTorch", **dict.fromkeys(kinds, "TiledProducts()")}
    set_row_products(model, None)
    assert name_kernels(model, EAGER, meta, torch.float32)["products of float32"] == "PyTorch"


def test_what_is_between_products_on_gpus_is_named() -> None:
    model, gpu = nn.Module(), torch.device("cuda")
    compiled, row_wise = (
        replace(EAGER, cos_sin=lambda *_: None),
        replace(EAGER, rms_norm=lambda *_: None),
    )  # type: ignore[arg-type,return-value]
    names = [
        name_kernels(model, ops, gpu, torch.bfloat16)["norms"]
        for ops in (EAGER, compiled, row_wise)
    ]
    assert names == ["PyTorch", "torch.compile and Triton", "Triton and PyTorch"]


def test_a_gpu_is_named_with_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    names, first = [], {"gpu": "H100", "cuda": "12.9", "xformers": "1", "triton": "3.6"}
    for other in ("", *first):
        found = first | ({other: "another"} if other else {})
        monkeypatch.setattr(numerics, "device_name", lambda _, found=found: found["gpu"])
        monkeypatch.setattr(torch.version, "cuda", found["cuda"])
        monkeypatch.setattr(numerics, "version", found.__getitem__)
        names.append(device_numerics("cuda:0"))
    assert len(set(names)) == len(names)
    assert names[0] == f"torch {torch.__version__}, CUDA 12.9, xformers 1, Triton 3.6, H100"


def test_how_experts_are_grouped_counts_on_gpus(
    worker: StageWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's grouped product and one product after the other may round otherwise."""
    found, backend = [], DeviceBackend(cpu_kernels())
    monkeypatch.setattr(numerics, "device_name", lambda _: "a GPU")
    for name in ("one by one", "grouped"):
        monkeypatch.setattr(LocalExperts, "kernel_name", name)
        for device in (torch.device("cuda"), CPU):
            parts = stage_numerics(
                worker.model, backend, device, worker.dtype, is_batch_invariant=False
            ).parts
            found.append(dict(parts).get("experts"))
    assert found == ["one by one", None, "grouped", None]
