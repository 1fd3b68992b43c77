"""What Inductor makes of the fused operations for a Hopper GPU that is not there.

A separate program, because it replaces what torch and Triton know of GPUs for the whole process.
Operations are traced and lowered with fake tensors on a CUDA device, and Triton compiles the code
for sm_90. Nothing is launched. Prints JSON: for each operation and number of tokens a
``KernelFacts``.

As ``torch.compile`` does, the first number of tokens is compiled as a constant, and the second
makes it a variable, with the second number as the hint by which Inductor chooses the sizes of
blocks.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

CAPABILITY = (9, 0)
# Two launches may be of one kernel, which the code has once.
LAUNCH = re.compile(
    r"^ +triton_\w+\.run\(|\bextern_kernels\.\w+\(|\btorch\.ops\.\w+\.[\w.]+\(", re.MULTILINE
)
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)
# Of tensors. Constants of the code, as tables for the cosine, are read by ld.global.nc.
# as ld.global.L1::evict_last.v4.b32
ACCESS = re.compile(r"\b(ld|st)\.global(?!\.nc)[.:\w]*?(?:\.v(\d))?\.[busf](\d+)\b")
SPILL = re.compile(r"(\d+) bytes spill")


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """Of one operation. Kernels are compiled in all their configurations, of which the fastest
    would be chosen.
    """

    operation: str
    is_dynamic: bool  # the number of tokens
    num_launches: int
    spilled: int  # bytes, in all configurations
    load_bytes: list[list[int]]  # of each load from a tensor, by configuration
    store_bytes: list[list[int]]


def inductor_kernels() -> list[KernelFacts]:
    """Compile in a process of its own. Raises AssertionError with what it wrote if it fails."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": f"{cache}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        }
        done = subprocess.run(
            [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    return [KernelFacts(**each) for each in json.loads(done.stdout.splitlines()[-1])]


class _Properties:
    """Of an H200, as far as Inductor asks."""

    name = "NVIDIA H200"
    major, minor = CAPABILITY
    multi_processor_count = 132
    total_memory = 150 * 2**30
    regs_per_multiprocessor = 65536
    max_threads_per_multi_processor = 2048
    max_threads_per_block = 1024
    warp_size = 32
    shared_memory_per_block = 48 * 2**10
    shared_memory_per_block_optin = 227 * 2**10
    shared_memory_per_multiprocessor = 228 * 2**10
    L2_cache_size = 60 * 2**20
    gcnArchName = uuid = ""
    is_integrated = 0


class _Driver:
    """Triton's, without a GPU."""

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> object:
        import torch

        return torch.device("cuda", 0)


def _pretend_a_gpu() -> None:
    import torch
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses import fake_tensor
    from triton.runtime import driver

    def replace(owner: object, **values: object) -> None:
        for name, value in values.items():
            setattr(owner, name, value if isinstance(owner, type(torch)) else staticmethod(value))

    def properties(*_args: object, **_kwargs: object) -> type[_Properties]:
        return _Properties

    def nothing(*_args: object, **_kwargs: object) -> None:
        return None

    replace(
        torch.cuda,
        get_device_properties=properties,
        get_device_capability=lambda *_: CAPABILITY,
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        synchronize=nothing,
        _lazy_init=nothing,
    )
    replace(
        CudaInterface,
        is_available=lambda: True,
        get_device_properties=properties,
        get_compute_capability=lambda *_: 10 * CAPABILITY[0] + CAPABILITY[1],
        device_count=lambda: 1,
        synchronize=nothing,
    )
    replace(CudaInterface.Worker, get_device_properties=properties, current_device=lambda: 0)
    replace(fake_tensor, init_gpu_context=nothing)
    replace(triton_helpers, set_driver_to_gpu=nothing)
    driver.set_active(_Driver())


def _inputs(num_tokens: Any, device: str) -> dict[str, tuple[object, ...]]:  # a number or a symbol
    """Return those of Mistral 7B for each operation: queries and keys are a view of heads that lie
    next to values.
    """
    import torch

    def empty(*shape: Any, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    heads_THd = torch.empty_strided(
        (num_tokens, 40, 128), (48 * 128, 128, 1), dtype=torch.bfloat16, device=device
    )
    positions_T, frequencies = empty(num_tokens, dtype=torch.int64), empty(64, dtype=torch.float32)
    return {
        "apply_rotary": (heads_THd, empty(num_tokens, 128), empty(num_tokens, 128)),
        "silu_and_mul": (empty(num_tokens, 2 * 14336),),
        "cos_sin": (positions_T, frequencies),
    }


def _code(name: str, num_tokens: int, is_dynamic: bool) -> str:
    """Return Inductor's code for an operation."""
    import torch
    from torch._dynamo.source import ConstantSource
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    from tramontane.workers.kernels.fused_ops import EAGER

    shapes, source = ShapeEnv(), ConstantSource("num_tokens")
    mode, size = FakeTensorMode(shape_env=shapes), num_tokens
    if is_dynamic:
        symbol = shapes.create_symbol(num_tokens, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        size = shapes.create_symintnode(symbol, hint=num_tokens, source=source)
    operation = getattr(EAGER, name)
    function = (
        (lambda *given: operation(*given, 1.0, torch.bfloat16)) if name == "cos_sin" else operation
    )
    with mode:
        # Python's indexing asks for the device's driver, and operations of a traced graph do not.
        traced = make_fx(function, tracing_mode="symbolic")(*_inputs(size, "cpu")[name])
        given = _inputs(size, "cuda")[name]
        graph = make_fx(traced, decomposition_table=select_decomp_table(), tracing_mode="symbolic")(
            *given
        )
    with mode, V.set_fake_mode(mode), DebugContext():
        lowering = GraphLowering(graph, example_inputs=given, shape_env=shapes)
        with V.set_graph_handler(lowering), V.set_debug_handler(DebugContext()):
            lowering.run(*given)
            code = lowering.codegen()[0]
    return str(getattr(code, "value", code))


def _compiled(code: str) -> Iterator[Any]:
    """Compile the kernels in Inductor's code, in each of the configurations of which it would
    choose the fastest.
    """
    import triton
    from torch._inductor.codecache import PyCodeCache
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for name, source in KERNEL.findall(code):
        kernel = getattr(PyCodeCache.load(source), name)
        for config in kernel.configs:
            meta = kernel.triton_meta
            constants = {**meta.get("constants", {}), **config.kwargs}
            types = {
                each: "constexpr" if each in constants else meta["signature"][each]
                for each in kernel.fn.arg_names
            }
            given = ASTSource(kernel.fn, types, constants, meta["configs"][0])
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            yield triton.compile(
                given, GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32), options
            )


def _spilled(ptx: str) -> int:
    """Return bytes of registers that a thread stores and loads for want of others. A stack that the
    code asks for is none.
    """
    import triton

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
        architecture = re.search(r"\.target (\w+)", ptx)
        assert architecture is not None
        command = [ptxas, "-v", f"--gpu-name={architecture[1]}", "-o", os.devnull, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = SPILL.findall(done.stderr)
    assert len(found) >= 2, done.stderr
    return sum(map(int, found))


def _access_bytes(ptx: str, kind: str) -> list[int]:
    return [
        int(count or 1) * int(bits) // 8
        for each, count, bits in ACCESS.findall(ptx)
        if each == kind
    ]


def _facts(name: str, num_tokens: int, is_dynamic: bool) -> KernelFacts:
    code = _code(name, num_tokens, is_dynamic)
    made = [each.asm["ptx"] for each in _compiled(code)]
    loads, stores = ([_access_bytes(ptx, kind) for ptx in made] for kind in ("ld", "st"))
    return KernelFacts(
        name, is_dynamic, len(LAUNCH.findall(code)), sum(map(_spilled, made)), loads, stores
    )


def main() -> None:
    _pretend_a_gpu()
    from tramontane.workers.kernels.fused_ops import (
        EAGER,
        GPU_TEST_NUM_TOKENS,
        FusedOps,
        _with_triton_norms,
    )

    replaced = _with_triton_norms(EAGER)
    names = [
        each.name
        for each in fields(FusedOps)
        if getattr(replaced, each.name) is getattr(EAGER, each.name)
    ]
    facts = [
        _facts(name, num_tokens, is_dynamic)
        for name in names
        for num_tokens, is_dynamic in zip(GPU_TEST_NUM_TOKENS[:2], (False, True), strict=True)
    ]
    print(json.dumps([asdict(each) for each in facts]))


if __name__ == "__main__":
    main()
