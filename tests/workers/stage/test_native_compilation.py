"""A stage on a CPU compiles all its kernels in C at the same time, before it needs the first of
them.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import sparse_args, tiny_args, tiny_plan

from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.weight_format import Quantization
from tramontane.workers.attention import autotune
from tramontane.workers.device import native_library
from tramontane.workers.kernels import packed_linear
from tramontane.workers.stage import stage_worker
from tramontane.workers.stage.device_backend import compile_native_kernels
from tramontane.workers.stage.stage_worker import StageWorker

Record = Callable[..., set[str]]
ARGS = tiny_args(n_layers=2)


@pytest.fixture
def libraries_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """The libraries that a function asks for on a machine that has none of them, and has a compiler
    or none.
    """
    caches = (native_library.compile_library, packed_linear.packed_matmul, autotune.kernels_for_cpu)

    compile_really = native_library._compile

    def record(ask: Callable[[], object], *, has_compiler: bool = False) -> set[str]:
        asked: set[str] = set()

        def compile_one(command: list[str], library: Path) -> None:
            asked.add(library.name)
            if not has_compiler:
                raise native_library.CompilerError("there is no compiler in this test")
            compile_really(command, library)

        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(native_library, "_compile", compile_one)
        for each in caches:
            each.cache_clear()
        try:
            ask()
        finally:
            for each in caches:
                each.cache_clear()
        return asked

    return record


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", [None, *Quantization])
def test_what_is_compiled_first_is_all_that_a_stage_asks_for(
    dtype: str, quantize: Quantization | None, libraries_of: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tiny_plan(ARGS, dtype=dtype, quantize=quantize).stages[0]
    first = libraries_of(lambda: compile_native_kernels(plan))
    monkeypatch.setattr(stage_worker, "compile_native_kernels", lambda _: None)
    assert first == libraries_of(lambda: StageWorker.load(plan, RandomWeights()))
    assert len(first) >= 3


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_stage_with_sparse_attention_then_compiles_nothing(libraries_of: Record) -> None:
    """Its gates are in float32, its attention has a kernel more, and one of the others for pages of
    one row.
    """
    plan = tiny_plan(sparse_args(max_seq_len=256), dtype="bfloat16").stages[0]
    assert len(libraries_of(lambda: compile_native_kernels(plan), has_compiler=True)) == 6
    assert libraries_of(lambda: StageWorker.load(plan, RandomWeights()), has_compiler=True) == set()
