"""Selects a stage's attention kernels from those that run on its device and agree with PyTorch's
attention: on a CPU the C kernels, on a GPU the fastest.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from tramontane.proto.plan import StagePlan
from tramontane.workers.attention.backend import AttentionKernels, DecodeKernel, PrefillKernel
from tramontane.workers.attention.kernel_cases import (
    KernelCase,
    check_rotation,
    check_writes,
    correctness_cases,
    timing_cases,
)
from tramontane.workers.attention.native_backend import native_kernels
from tramontane.workers.attention.sdpa_backend import (
    BatchSizeDispatch,
    PagedDecode,
    SdpaPrefill,
    cpu_kernels,
)
from tramontane.workers.device.kernel_selection import MAX_DIFFERENCE, Compute, KernelSelector
from tramontane.workers.device.kernel_table import Row
from tramontane.workers.device.native_library import CompilerError
from tramontane.workers.device.self_test import assert_close_norm, one_line, try_or_reason

logger = logging.getLogger(__name__)

K = TypeVar("K")
MakeCases = Callable[[], list[KernelCase]]

NUM_CORRECTNESS_TOKENS = 4
CPU_TOKENS = 2  # single tokens of a case on CPUs, whose kernels compute tokens serially
# On GPUs: batch sizes of single tokens at which kernels are timed, and the largest batch size for
# which each one's fastest kernel is used.
TIMED_TOKENS, TOKEN_LIMITS = (1, 4, 16, 64), (2, 8, 32)


@torch.inference_mode()
def _check_attention(
    plan: StagePlan, device: torch.device, kernels: AttentionKernels, num_tokens: int
) -> None:
    """Raise ArithmeticError if the kernels do not agree with PyTorch's attention; errors of the
    kernels propagate. ``num_tokens``: single tokens of a case.
    """
    for case in correctness_cases(plan, device, num_tokens):
        outs = case.prefill(kernels.prefill)(), case.decode(kernels.decode)()
        for out, expected in zip(outs, case.expected, strict=True):
            assert_close_norm(out, expected, MAX_DIFFERENCE)


def select_working_kernels(
    plan: StagePlan, device: torch.device, kernels: AttentionKernels
) -> AttentionKernels:
    """Return these kernels. Raises ArithmeticError if they do not agree with PyTorch's; errors of
    the kernels propagate.
    """
    _check_attention(plan, device, kernels, NUM_CORRECTNESS_TOKENS)
    check_writes(plan, device, kernels)
    if kernels.rotate_and_write is not None:
        check_rotation(plan, device, kernels.rotate_and_write)
    return kernels


def select_kernels(
    plan: StagePlan, device: torch.device, selector: KernelSelector
) -> AttentionKernels:
    """Select the kernels of a stage on a GPU by their speed, or PyTorch's if no other is usable."""
    prefills, decodes = _gpu_candidates(plan, device)
    with torch.inference_mode():
        correctness, timing = (
            partial(cases, plan, device) for cases in (correctness_cases, timing_cases)
        )
        prefill = _choose_prefill(selector, plan, correctness(1), partial(timing, 1), prefills)
        kernels = tuple(
            _choose_decode(
                selector,
                plan,
                correctness(num_tokens),
                partial(timing, num_tokens),
                decodes(num_tokens),
            )
            for num_tokens in TIMED_TOKENS
        )
    return _with_triton_writes(
        AttentionKernels(prefill, BatchSizeDispatch(kernels, TOKEN_LIMITS)), plan, device
    )


def _gpu_candidates(
    plan: StagePlan, device: torch.device
) -> tuple[dict[str, PrefillKernel], Callable[[int], dict[str, DecodeKernel]]]:
    """Return the prefill kernels, and a function that returns the decode kernels for a number of
    single tokens.
    """
    prefills: dict[str, PrefillKernel] = {}
    try:
        # needs torch's flash attention
        from tramontane.workers.attention.varlen_backend import VarlenPrefill

        prefills["torch's varlen"] = VarlenPrefill()
    except (ImportError, OSError) as error:
        logger.warning(
            "torch's attention for prompts of several lengths cannot be imported (%s)", error
        )
    try:
        # xformers is not on every platform
        from tramontane.workers.attention.xformers_backend import prefill_kernels

        prefills |= prefill_kernels()
    except (ImportError, OSError) as error:
        logger.warning("xformers' kernels for attention of prompts cannot be imported (%s)", error)
    try:
        # for these keys the other kernel takes minutes to compile, and more registers than there
        # are
        if plan.args.latent:
            from tramontane.workers.attention.triton_latent import (  # not Triton either
                latent_decode_kernels,
                latent_prefill_kernels,
            )

            prefills |= latent_prefill_kernels(plan, device)
            return prefills, lambda num_tokens: dict(
                latent_decode_kernels(num_tokens, plan, device)
            )
        from tramontane.workers.attention.triton_decode import split_k_kernels
    except (ImportError, OSError) as error:
        logger.warning(
            "Triton's kernels for attention of single tokens cannot be imported (%s)", error
        )
        return prefills, lambda _num_tokens: {}
    return prefills, lambda num_tokens: dict(split_k_kernels(num_tokens, plan.args.n_kv_heads))


def _with_triton_writes(
    kernels: AttentionKernels, plan: StagePlan, device: torch.device
) -> AttentionKernels:
    """Return the kernels with Triton's writes to the cache, or unchanged if these are not correct;
    logs why.
    """
    try:
        from tramontane.workers.attention.triton_cache import (  # Triton is not on every platform
            cache_rows,
            read_back,
            read_rows,
            rotate_and_write,
            write_rows,
        )
    except ImportError:
        return kernels
    ours = replace(
        kernels, write=write_rows, read=read_rows, read_back=read_back, cache_rows=cache_rows
    )
    if reason := try_or_reason(lambda: check_writes(plan, device, ours)):
        logger.warning(
            "keys and values are written by PyTorch, with several kernels each: %s", reason
        )
        return kernels
    kernels = ours
    if plan.args.latent:  # its keys are not heads of a product
        return kernels
    if reason := try_or_reason(lambda: check_rotation(plan, device, rotate_and_write)):
        logger.warning(
            "queries and keys of single tokens are rotated by a kernel of its own: %s", reason
        )
        return kernels
    return replace(kernels, rotate_and_write=rotate_and_write)


@cache  # for tests, which start many equal stages in one process
def kernels_for_cpu(plan: StagePlan) -> AttentionKernels:
    """Return the C kernels, or PyTorch's attention, which needs keys in one piece, if they cannot
    be compiled or are not correct; logs why.
    """
    try:
        native = native_kernels(plan)  # they write to caches like PyTorch's
        _check_attention(plan, torch.device("cpu"), native, CPU_TOKENS)
        return native
    except Exception as error:  # compilers and kernels raise errors of any kind
        level = logging.INFO if isinstance(error, CompilerError) else logging.WARNING
        logger.log(
            level,
            "attention is computed by PyTorch, two to four times as slow as the kernels in C: %s",
            one_line(error),
        )
        return cpu_kernels()


def _choose_prefill(
    selector: KernelSelector,
    plan: StagePlan,
    correctness: list[KernelCase],
    timing: MakeCases,
    kernels: Mapping[str, PrefillKernel],
) -> PrefillKernel:
    """Return the fastest kernel over all window classes, or PyTorch's if no kernel is usable."""
    expected = _concat([case.expected[0] for case in correctness])
    prepare, prepare_timed = (
        _on_all(correctness, KernelCase.prefill),
        lambda: _on_all(timing(), KernelCase.prefill),
    )
    given = "prefill", _shapes(plan), kernels, prepare, prepare_timed, expected
    return selector.fastest(*given, row=_row("prefill", plan)) or SdpaPrefill()


def _choose_decode(
    selector: KernelSelector,
    plan: StagePlan,
    correctness: list[KernelCase],
    timing: MakeCases,
    kernels: Mapping[str, DecodeKernel],
) -> DecodeKernel:
    """Return the fastest kernel over all window classes, or PyTorch's if no kernel is usable."""
    job, expected = (
        f"decode of {len(correctness[0].q_BHd)}",
        _concat([case.expected[1] for case in correctness]),
    )
    prepare, prepare_timed = (
        _on_all(correctness, KernelCase.decode),
        lambda: _on_all(timing(), KernelCase.decode),
    )
    given = job, _shapes(plan), kernels, prepare, prepare_timed, expected
    return selector.fastest(*given, row=_row(job, plan)) or PagedDecode()


def _row(job: str, plan: StagePlan) -> Row | None:
    """Return the table row for a kernel: only for keys and values in bfloat16 that are heads of a
    product.
    """
    args = plan.args
    if args.latent or (plan.dtype, plan.kv_cache_dtype) != ("bfloat16", "auto"):
        return None
    return job, f"{args.n_kv_heads} heads of {args.head_dim}"


def _shapes(plan: StagePlan) -> str:
    """Return the parameters of a plan that the cases depend on.

    ``32 and 8 heads of 128 in bfloat16, pages of 16, windows 4096``.
    """
    args, windows = (
        plan.args,
        ", ".join(str(window_class.window) for window_class in plan.cache.classes),
    )
    heads = f"{args.n_heads} and {args.n_kv_heads} heads of {args.head_dim} in {plan.dtype}"
    if args.latent:
        heads += f" with values of {args.latent.kv_lora_rank}"
    cached = "" if plan.kv_cache_dtype == "auto" else f", keys and values in {plan.kv_cache_dtype}"
    return f"{heads}, pages of {plan.cache.page_size}, windows {windows}{cached}"


def _on_all(
    cases: list[KernelCase], prepare: Callable[[KernelCase, K], Compute]
) -> Callable[[K], Compute]:
    """Return a function that prepares a kernel for all cases."""

    def prepare_all(kernel: K) -> Compute:
        computes = [prepare(case, kernel) for case in cases]
        return lambda: _concat([compute() for compute in computes])

    return prepare_all


def _concat(outs: list[Tensor]) -> Tensor:
    return torch.cat([out.flatten() for out in outs])
