"""Checks that no kernel of Triton's is compiled while a stage serves: the interpreter shows for
which arguments it would be.

Triton compiles a kernel again for every set of constants and options, types of its arguments, for
integers that are 1 or multiples of 16, and for tensors whose address is a multiple of 16 or not,
unless an argument is marked as one that does not count.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from interpreted_checks import Check
from stage_checks import LATENT_ARGS, load
from tiny_models import tiny_args, tiny_plan
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import StagePlan
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, DecodeColumns, MicroBatch
from tramontane.workers.attention.backend import AttentionKernels
from tramontane.workers.attention.sdpa_backend import SdpaPrefill
from tramontane.workers.attention.triton_cache import (
    cache_rows,
    read_back,
    read_rows,
    rotate_and_write,
    write_rows,
)
from tramontane.workers.attention.triton_decode import split_k_kernels
from tramontane.workers.attention.triton_latent import latent_decode_kernels, latent_prefill_kernels
from tramontane.workers.kernels.fused_ops import EAGER, _with_triton_norms
from tramontane.workers.sampling.triton_sampler import choose_tokens
from tramontane.workers.stage import stage_worker
from tramontane.workers.stage.device_backend import DeviceBackend
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights import loader

Variant = tuple[str, tuple[object, ...]]
ARGS = tiny_args(n_layers=1, windows=(24,), max_seq_len=48)
LENGTHS = (2, 3, 16, 17, 33)  # of prompts


def variant(kernel: Any, given: tuple[object, ...], options: dict[str, object]) -> Variant:
    """Return what Triton would compile for a launch."""
    signature = inspect.signature(kernel.fn)
    free = set(kernel.kwargs.get("do_not_specialize") or ())
    unaligned = set(kernel.kwargs.get("do_not_specialize_on_alignment") or ())
    bound = signature.bind_partial(
        *given, **{k: v for k, v in options.items() if k in signature.parameters}
    )
    # such as num_warps
    key: list[object] = sorted((k, v) for k, v in options.items() if k not in signature.parameters)
    for name, value in bound.arguments.items():
        is_constant = "constexpr" in str(signature.parameters[name].annotation)
        if isinstance(value, Tensor):
            is_aligned = name in free | unaligned or value.data_ptr() % 16 == 0
            key.append((name, str(value.dtype), is_aligned))
        elif is_constant or isinstance(value, bool | float | None):
            key.append((name, value if is_constant else type(value).__name__))
        else:
            assert isinstance(value, int)
            width = 32 if abs(value) < 2**31 else 64
            key.append(
                (name, width)
                if name in free
                else (name, width, value == 1, value % 16 == 0 and name not in unaligned)
            )
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}", tuple(key)


@contextmanager
def recorded(into: set[Variant]) -> Iterator[None]:
    """Record what would be compiled in the block."""
    launch = InterpretedFunction.run

    def run(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        into.add(variant(self, given, options))
        launch(self, *given, grid=grid, warmup=warmup, **options)

    with patch.object(InterpretedFunction, "run", run):
        yield


def fastest_backend(plan: StagePlan, device: torch.device) -> DeviceBackend:
    """Return the kernels that a GPU would have if these were the fastest."""
    if plan.args.latent:
        (prefill,), decodes = (
            latent_prefill_kernels(plan, device).values(),
            latent_decode_kernels(4, plan, device),
        )
        kernels = AttentionKernels(
            prefill, next(iter(decodes.values())), write=write_rows, cache_rows=cache_rows
        )
    else:
        decode = next(iter(split_k_kernels(4, plan.args.n_kv_heads).values()))
        kernels = AttentionKernels(
            SdpaPrefill(), decode, write=write_rows, read_back=read_back, cache_rows=cache_rows
        )
        kernels = replace(kernels, read=read_rows, rotate_and_write=rotate_and_write)
    return DeviceBackend(kernels, _with_triton_norms(EAGER), choose_tokens=choose_tokens)


def load_fastest(plan: StagePlan, device: str) -> StageWorker:
    with (
        patch.object(loader, "pack_linears", lambda *_: {}),
        patch.object(stage_worker, "select_backend", fastest_backend),
    ):
        return StageWorker.load(plan, RandomWeights(), device)


def check_variants(plan: StagePlan, is_row_wise: bool, device: str) -> None:
    """Load a stage, warm it up, and serve prompts of other lengths than these: nothing new would be
    compiled.
    """
    before, serving = set[Variant](), set[Variant]()
    with recorded(before):
        worker = load(plan, device) if is_row_wise else load_fastest(plan, device)
        worker.warm_up()
    names = {name for name, _ in before}
    assert len(names) >= 4, names
    assert f"{choose_tokens.__module__}._kernel" in names
    worker.fence(0)
    with recorded(serving):
        _serve(worker)
    new = sorted(serving - before)
    assert not new, "\n".join(f"{name} {key}" for name, key in new)


def _serve(worker: StageWorker) -> None:
    """Each prompt alone and in two chunks, then next to decodes of the sequences before it, as many
    as there are.
    """
    cache, step, last = worker.plan.cache, 0, dict[int, int]()
    samplings = [
        SamplingParams(temperature=0.7, **cut)
        for cut in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1})
    ]  # type: ignore[arg-type]

    def chunk(seq_id: int, start: int, end: int) -> Chunk:
        pages = tuple(
            tuple(
                seq_id * each.ring_pages + page % each.ring_pages
                for page in each.new_pages(start, end, cache.page_size)
            )
            for each in cache.classes
        )
        sampling = None if start else samplings[seq_id % len(samplings)]
        return Chunk(seq_id, start, (1,) * (end - start), pages, sampling, needs_sample=True)

    for seq_id, length in enumerate(LENGTHS):
        for start, end in ((0, length), (length, length + 5)):
            columns = DecodeColumns()
            if last and seq_id % 2:
                columns = DecodeColumns(tuple(last), tuple(last.values()), (1,) * len(last))
                last = {each: position + 1 for each, position in last.items()}
            worker.step(MicroBatch(0, step, (chunk(seq_id, start, end),), decodes=columns), None)
            step += 1
        last[seq_id] = length + 5
        # others need a page
        last = {each: position for each, position in last.items() if position % cache.page_size}


PLAN = tiny_plan(ARGS, dtype="bfloat16", max_num_seqs=len(LENGTHS)).stages[0]
LATENT_PLAN = tiny_plan(
    replace(LATENT_ARGS, max_seq_len=48), dtype="bfloat16", max_num_seqs=len(LENGTHS)
).stages[0]
CHECKS: dict[str, Check] = {
    "the fastest": partial(check_variants, PLAN, False),
    "the fastest, keys and values in fp8": partial(
        check_variants,
        tiny_plan(ARGS, dtype="bfloat16", max_num_seqs=len(LENGTHS), kv_cache_dtype="fp8").stages[
            0
        ],
        False,
    ),
    "batch-invariant, int8": partial(
        check_variants,
        tiny_plan(
            ARGS, dtype="bfloat16", quantize="int8", max_num_seqs=len(LENGTHS), batch_invariant=True
        ).stages[0],
        True,
    ),
    "the fastest, latent attention": partial(check_variants, LATENT_PLAN, False),
}
