"""Attention of single tokens on CPUs by ``kernels/paged_attention.c``, which reads the cache's pages in place.

It is compiled when a stage starts, by the machine's C compiler, for the stage's geometry and processor: half a second. The result
for a token does not depend on the other tokens of the micro-batch.

Shape letters: B single tokens, H query heads, d head_dim.
"""

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from tramontane.proto.plan import StagePlan
from tramontane.workers.attention.metadata import DecodeMetadata
from tramontane.workers.attention.rolling_cache import LayerCache, PageTable, page_table
from tramontane.workers.device.self_test import one_line

SOURCE = Path(__file__).parents[1] / "kernels" / "paged_attention.c"
ELEMENTS = {"float32": 0, "bfloat16": 1, "float16": 2}  # ELEMENT in the source
# What -ffast-math has for sums in any order, without its code that changes the arithmetic of the whole process.
ORDER = ("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno", "-ffp-contract=fast")
FLAGS = ("-O3", "-march=native", *ORDER, "-shared", "-fPIC")
THREADS = "-fopenmp"  # with the library of PyTorch's own threads, which is loaded already and has the same name
COMPILE_TIMEOUT_S = 60.0


class CompilerError(Exception):
    """There is no C compiler, or it cannot compile the kernel."""


class NativeDecode:
    """Decode kernel of one geometry."""

    def __init__(self, attend: Callable[..., None]) -> None:
        self._attend = attend

    def build_mask(self, index: DecodeMetadata) -> PageTable:
        """Build the page tables."""
        return page_table(index.ring, index.slots, index.positions, index.num_pages)

    def attend(self, q_BHd: Tensor, cached: LayerCache, mask: PageTable) -> Tensor:
        """Compute the output [B, H, d]."""
        q_BHd = q_BHd.contiguous()
        out_BHd = torch.empty_like(q_BHd)
        tensors = (q_BHd, cached.k_NGd, cached.v_NGd, mask.pages_BN, mask.first_B, mask.end_B, out_BHd)
        sizes = (len(q_BHd), cached.k_NGd.shape[1], mask.pages_BN.shape[1])
        self._attend(*(tensor.data_ptr() for tensor in tensors), *sizes, torch.get_num_threads())
        return out_BHd


def native_decode(plan: StagePlan) -> NativeDecode:
    """Compile the kernel for a stage, once per process and geometry. Raises CompilerError."""
    args = plan.args
    return _compile(args.head_dim, args.n_heads // args.n_kv_heads, plan.cache.page_size, plan.dtype)


@cache
def _compile(head_dim: int, group: int, page_size: int, dtype: str) -> NativeDecode:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        raise CompilerError(f"there is no C compiler {compiler[0]}; Debian's package gcc has one")
    defines = (f"-DHEAD_DIM={head_dim}", f"-DGROUP={group}", f"-DPAGE={page_size}", f"-DELEMENT={ELEMENTS[dtype]}")
    with tempfile.TemporaryDirectory(prefix="tramontane-") as folder:
        library = Path(folder) / "paged_attention.so"
        command = [*compiler, *FLAGS, *defines, str(SOURCE), "-o", str(library), "-lm"]
        try:
            _run([*command, THREADS])
        except CompilerError:  # some compilers have no OpenMP
            _run(command)
        attend = ctypes.CDLL(str(library)).attend  # stays loaded when the file is gone
    attend.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int64] * 3 + [ctypes.c_int]
    attend.restype = None
    return NativeDecode(attend)


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise CompilerError(f"{command[0]} cannot compile it: {one_line(Exception(error.stderr))}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"{command[0]} cannot compile it: {one_line(error)}") from None
