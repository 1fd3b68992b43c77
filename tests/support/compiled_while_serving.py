"""Compiles a kernel before and after ``report_compilations``, for a GPU that is not there. Prints
the log.
"""

import logging
import os
import sys

os.environ |= {"TRITON_INTERPRET": "0"}

import inductor_kernels
import torch
from triton.runtime import driver

from tramontane.workers.device.compile_watch import report_compilations
from tramontane.workers.kernels.triton_norm import _kernel


class Driver(inductor_kernels._Driver):
    def get_current_stream(self, _device: int) -> int:
        return 0


driver.set_active(Driver())


def compile_for(width: int) -> None:
    tensors = (torch.bfloat16,) * 5
    _kernel.warmup(*tensors, width, 1e-5, d_block=width, has_more=True, grid=(1,))


logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(levelname)s %(message)s")
compile_for(32)
report_compilations("Stage 1/2")
compile_for(32)
compile_for(64)
