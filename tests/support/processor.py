"""The processor that figures of benchmarks were measured on: its name, number of cores and
instructions for products.
"""

import os
import platform
from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# What decides how fast matrices are multiplied: names of Linux for x86, then for Arm.
OF_PRODUCTS = (
    *(
        "avx",
        "avx2",
        "fma",
        "f16c",
        "avx_vnni",
        "avx512f",
        "avx512_vnni",
        "avx512_bf16",
        "avx512_fp16",
        "amx_bf16",
        "amx_int8",
    ),
    *("asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "sve2"),
)


@cache
def describe_processor(cpuinfo: Path = CPUINFO) -> str:
    """Return for example ``2 cores of an AMD EPYC (avx, avx2, fma, f16c)``."""
    try:
        lines = [line.partition(":") for line in cpuinfo.read_text().splitlines()]
    except OSError:
        lines = []
    found = {name.strip(): value.strip() for name, _, value in lines}
    flags = found.get("flags", found.get("Features", "")).split()
    instructions = (
        ", ".join(name for name in OF_PRODUCTS if name in flags) or "instructions not known"
    )
    name = found.get("model name", platform.processor() or platform.machine())
    return f"{os.cpu_count()} cores of {name} ({instructions})"
