"""Triton kernels compiled ahead of time for a GPU that is not there, and what the code needs."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SM_90 = 90


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Of a thread: registers, and bytes of them that are spilled to memory. ``shared_bytes`` are a program's."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    has_wide_loads: bool  # of 16 bytes


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
    """Compile a kernel whose last arguments are these constants; the ``aligned`` arguments are multiples of 16.

    A process of its own compiles it, because the interpreter may be chosen in this one.
    """
    request = [module, kernel, list(types), list(constants), list(aligned), warps, stages, capability]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, __file__, json.dumps(request)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ResourceUsage(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    import importlib
    import tempfile

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, kernel, types, constants, aligned, warps, stages, capability = json.loads(sys.argv[1])
    function = getattr(importlib.import_module(module), kernel)
    signature = dict(zip(function.arg_names, (*types, *("constexpr",) * len(constants)), strict=True))
    values = {(i,): each for i, each in enumerate(constants, len(types))}
    source = ASTSource(function, signature, values, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(source, GPUTarget("cuda", capability, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tools / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    ptx = made.asm["ptx"]
    wide = bool(re.search(r"ld\.global[.\w]*\.v4\.b32|cp\.async\.c[ga]\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", ptx))
    print(
        json.dumps(
            {
                "registers": found["REG"],
                "spilled_bytes": found["STACK"] + found["LOCAL"],
                "shared_bytes": made.metadata.shared,
                "has_wide_loads": wide,
            }
        )
    )


if __name__ == "__main__":
    main()
