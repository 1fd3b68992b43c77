"""Run Python as on a processor with AVX2 and no AVX-512, whatever this machine's has.

    .venv/bin/python tests/support/older_processor.py -m pytest tests/workers/kernels

Each library has a variable of its own for it. Whether these had an effect is asked of the libraries
themselves, in a process with the same environment: the answers are printed, and if one is not the
expected one the status is 1 and nothing is run.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

VARIABLES = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
    # which does not say what it uses; on processors of AMD it makes no difference
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "CC": "cc -march=haswell",
    # What Inductor compiles for these is kept apart: with all instructions it crashes, and is found
    # by the same name.
    "TORCHINDUCTOR_CACHE_DIR": str(
        Path(tempfile.gettempdir(), f"torchinductor-older-processor-{os.getuid()}")
    ),
}
# What each library says with these variables.
EXPECTED = {
    "ATen": "AVX2",
    "oneDNN": "Intel AVX2",
    "NumPy": "AVX2",
    "OpenBLAS": "Haswell",
    "kernels in C": "avx2",
}
# names of NumPy's features: of each kind, and of all together since NumPy 2.4
NEWER = re.compile("AVX512|X86_V4")
ASKS_LIBRARIES = "--instructions"  # of this program


def main() -> int:
    """Run Python with the arguments of this program."""
    if sys.argv[1:] == [ASKS_LIBRARIES]:
        print(json.dumps(ask_libraries()))
        return 0
    if platform.machine() != "x86_64":
        print(
            f"no older processor is tried on {platform.machine()}: the variables are those of"
            " x86-64"
        )
        return 0
    environment = {
        **os.environ,
        **VARIABLES,
        "NPY_DISABLE_CPU_FEATURES": " ".join(newer_features()),
    }
    reported = instructions(environment)
    print(
        "instructions: " + ", ".join(f"{library} {name}" for library, name in reported.items()),
        flush=True,
    )
    if reported != EXPECTED:
        print(
            f"these are not those of a processor with AVX2, which would be: {EXPECTED}",
            file=sys.stderr,
        )
        return 1
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment)


def newer_features() -> list[str]:
    """Return the features of this processor that NumPy uses and one with AVX2 does not have."""
    import numpy as np

    return [
        name
        for name in np.show_config(mode="dicts")["SIMD Extensions"]["found"]
        if NEWER.search(name)
    ]


def instructions(environment: Mapping[str, str]) -> dict[str, str]:
    """Return which instructions each library uses in a process with this environment."""
    command = [sys.executable, __file__, ASKS_LIBRARIES]
    # it says so where it computes for the first time
    asked = {**environment, "ONEDNN_VERBOSE": "1"}
    lines = subprocess.run(
        command, env=asked, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()
    (of_onednn,) = (line.partition("cpu,isa:")[2] for line in lines if "cpu,isa:" in line)
    reported = {**json.loads(lines[-1]), "oneDNN": of_onednn}
    return {library: reported[library] for library in EXPECTED}


def ask_libraries() -> dict[str, str]:
    """Return what the libraries of this process say; oneDNN prints a line of its own."""
    import numpy as np
    import torch
    from threadpoolctl import threadpool_info

    from tramontane.workers.device.native_library import vector_instructions

    torch.ones(1).to_mkldnn().relu()
    chosen = [
        kinds["current"]
        for each in np.lib.introspect.opt_func_info().values()
        for kinds in each.values()
    ]
    names = {name for each in chosen for name in re.findall(r"AVX\w*|X86_V\d", each)}
    blas = [
        each["architecture"] for each in threadpool_info() if each["internal_api"] == "openblas"
    ]
    return {
        "ATen": torch.backends.cpu.get_cpu_capability(),
        "NumPy": " ".join(sorted(names)).replace("X86_V3", "AVX2"),
        "OpenBLAS": " ".join(blas),
        "kernels in C": vector_instructions(),
    }


if __name__ == "__main__":
    sys.exit(main())
