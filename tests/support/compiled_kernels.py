"""Triton kernels compiled ahead of time for a GPU that is not there, and what the code needs."""

import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SM_90 = 90


def run_compiled(program: str) -> None:
    """Run a program that compiles kernels, in a process that does not interpret them."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Of a thread: registers, and bytes of them that are spilled to memory. ``shared_bytes`` are a
    program's.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    has_wide_loads: bool  # of 16 bytes
    additions: int  # of float32 numbers by a thread, outside of products
    products: tuple[str, ...]  # the tensor cores' instructions, as "mma m16n8k32 e4m3 e4m3"
    # no product of float32 is fused into a sum, and no quotient or exponential is approximate
    rounds_as_pytorch: bool


def resource_usage(
    module: str,
    kernel: str,
    types: Iterable[str],
    constants: Iterable[object],
    aligned: Iterable[int],
    warps: int,
    stages: int,
    capability: int = SM_90,
) -> ResourceUsage:
    """Compile a kernel whose last arguments are these constants; the ``aligned`` arguments are
    multiples of 16.

    A process of its own compiles all kernels, because the interpreter may be chosen in this one.
    """
    request = [
        module,
        kernel,
        list(types),
        list(constants),
        list(aligned),
        warps,
        stages,
        capability,
    ]
    compiler = _compiler()
    assert compiler.stdin is not None
    assert compiler.stdout is not None
    print(json.dumps(request), file=compiler.stdin, flush=True)
    answer = compiler.stdout.readline()
    if not answer:
        _compiler.cache_clear()
        raise AssertionError(f"the compiler has ended with status {compiler.wait()}")
    usage, error = json.loads(answer)
    assert not error, error
    return ResourceUsage(**usage | {"products": tuple(usage["products"])})


@cache
def _compiler() -> "subprocess.Popen[str]":
    """Start the process, which ends with this one: its standard input ends then."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, __file__]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _compile(request: str) -> dict[str, Any]:
    import importlib
    import tempfile

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, kernel, types, constants, aligned, warps, stages, capability = json.loads(request)
    function = getattr(importlib.import_module(module), kernel)
    signature = dict(
        zip(function.arg_names, (*types, *("constexpr",) * len(constants)), strict=True)
    )
    values = {(i,): each for i, each in enumerate(constants, len(types))}
    source = ASTSource(
        function, signature, values, {(i,): [["tt.divisibility", 16]] for i in aligned}
    )
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(source, GPUTarget("cuda", capability, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tools / "cuobjdump", "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    ptx = made.asm["ptx"]
    wide = bool(
        re.search(
            r"ld\.global[.\w]*\.v4\.b32|cp\.async\.c[ga]\.shared\.global \[[^]]*\], \[[^]]*\],"
            r" 0x10",
            ptx,
        )
    )
    products = re.findall(
        r"\b(w?g?mma)(?:_async|\.mma_async)?\.sync\.aligned\.(m\w+)[.\w]*?\.([a-z]+\d+\w*)\.([a-z]+\d+\w*)(?:\.f32)?\s",
        ptx,
    )
    return {
        "additions": len(re.findall(r"\badd(?:\.rn)?\.f32\b", ptx)),
        "products": sorted({" ".join(each) for each in products}),
        "registers": found["REG"],
        "spilled_bytes": found["STACK"] + found["LOCAL"],
        "shared_bytes": made.metadata.shared,
        "has_wide_loads": wide,
        "rounds_as_pytorch": not re.search(
            r"fma\.rn\.f32|div\.(full|approx)|ex2\.approx|\.ftz", ptx
        ),
    }


def main() -> None:
    """Answer each line with what the kernel uses, or with the traceback of why it cannot be
    compiled.
    """
    for request in sys.stdin:
        answer: tuple[dict[str, Any], str] = {}, ""
        try:
            with redirect_stdout(sys.stderr):
                answer = _compile(request), ""
        except Exception:
            answer = {}, traceback.format_exc()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
