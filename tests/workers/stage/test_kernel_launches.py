"""How many kernels a step launches on a GPU: with few tokens each takes about as long as its
launch.

Stages are recorded on torch's meta device, as CUDA graphs are, with the kernels of this project
that a GPU would be given. An operation of PyTorch counts as one kernel, one that makes a view or
memory as none, and each of ``FusedOps`` and each Triton kernel as one.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from meta_device import META, OtherMemory
from sampling_by_hand import SAMPLINGS
from tiny_models import tiny_args, tiny_plan
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="Triton's kernels are counted, and Triton is for Linux only")

from triton.runtime.jit import JITFunction

from tramontane.proto.model_args import ModelArgs
from tramontane.proto.plan import StagePlan
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch
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
from tramontane.workers.device import cuda
from tramontane.workers.kernels import fused_ops, row_invariance
from tramontane.workers.kernels.fused_ops import EAGER, FusedOps
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.kernels.row_tiles import TILES
from tramontane.workers.kernels.triton_linear import BLOCKS, gemv
from tramontane.workers.model import moe
from tramontane.workers.model.expert_kernels import StackedExperts
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.sampling.integer_sampler import ChooseTokens
from tramontane.workers.sampling.sampler import sample
from tramontane.workers.sampling.triton_sampler import choose_tokens
from tramontane.workers.stage import device_backend, piecewise_graphs
from tramontane.workers.stage.cuda_graphs import Compute, Cut
from tramontane.workers.stage.device_backend import DeviceBackend, row_wise_backend
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights.loader import allocate_contiguous
from tramontane.workers.weights.tensor_specs import stage_tensors

LAYERS = 2
# Of a layer: four products, two norms, the rotation with the write to the cache, attention and
# silu_and_mul. With experts three products are followed by their choice, gate_up (with
# silu_and_mul) and down.
MAX_LAYER_LAUNCHES = {"dense": 9, "experts": 10}
# With kernels that give a token the same bits whatever else is in the batch, choices of experts are
# sorted, see ``moe.py``. Of few tokens the blocks of attention are added by one more kernel.
MAX_ROW_WISE_LAUNCHES = {"dense": 10, "experts": 26}
# Of a step with chunks and single tokens: four products, two norms, the rotation, attention of
# both, their outputs together, the write to the cache and silu_and_mul.
MAX_MIXED_LAYER_LAUNCHES = 12
# The same with graphs of pieces: a piece, attention of both, the write, and both outputs copied to
# where the next piece begins.
MAX_PIECEWISE_LAYER_LAUNCHES = 6
# Tokens and positions to where the first piece begins, and the last piece; what comes out of it.
MAX_PIECEWISE_BEGIN_LAUNCHES, MAX_PIECEWISE_END_LAUNCHES = 2, 2
# In the graphs, of a layer: four products, two norms, the rotation, silu_and_mul, and copies of
# queries, keys and values.
MAX_PIECE_KERNELS = 11
# Three to fill in sampled tokens, their cache rows, a copy of their page rings, embedding, cos_sin,
# counters of parts, padding, the last sum, norm, product and conversion to float32.
MAX_OTHER_LAUNCHES = 13
# PyTorch computes cosines and describes the tokens, some kernels each
MAX_OTHER_ROW_WISE_LAUNCHES = 25
MAKE_MEMORY = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "lift_fresh",
}


class LaunchCounter(TorchDispatchMode):
    """Counts kernels by name."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.graphs: list[Counter[str]] = []
        self.pieces: list[Counter[str]] = []  # of each size, all together
        self._is_fused = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        with self:  # which sees what the operation is made of, unless it is a kernel itself
            out = func.decompose(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        out = func(*args, **(kwargs or {}))
        is_view = any(
            each.alias_info and not each.alias_info.is_write for each in func._schema.returns
        )
        is_on_device = any(
            isinstance(each, Tensor) and each.is_meta for each in tree_leaves((args, kwargs, out))
        )
        name = func._schema.name.removeprefix("aten::")
        if is_on_device and not (self._is_fused or is_view or name in MAKE_MEMORY):
            self.launches[name] += 1
        return out

    def count_once(self, name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that computes the same and counts as one kernel."""

        def counted(*given: object) -> Any:
            self.launches[name] += 1
            self._is_fused = True
            try:
                return compute(*given)
            finally:
                self._is_fused = False

        return counted

    # Triton is untyped
    def count_triton(self, kernel: Any, *_given: object, **_options: object) -> None:
        """Take the place of ``JITFunction.run``."""
        self.launches[f"{kernel.fn.__module__.split('.')[-1]}.{kernel.fn.__name__}"] += 1

    def capture(self, compute: Compute) -> Compute:
        """Take the place of ``CudaGraphCapture``."""
        self.launches = Counter()
        with self:
            compute()
        self.graphs.append(self.launches)
        return compute

    def in_pieces(self, compute: Callable[[Cut], Tensor]) -> list[Compute]:
        """Take the place of ``CudaGraphCapture.in_pieces``. A piece that is replayed counts as one
        kernel, "graph".
        """
        cuts: list[None] = []
        self.launches = Counter()
        with self:
            out = compute(lambda: cuts.append(None))
        self.pieces.append(self.launches)
        self.launches = Counter()
        return [self.count_once("graph", lambda: out)] * (len(cuts) + 1)


def _with_small_batch_kernels(
    stacks: Mapping[int, StackedExperts], *_: object
) -> dict[int, StackedExperts]:
    """Take the place of ``select_gpu_kernels``, which tries and times them."""
    return {layer: stack._replace(has_small_batch_kernel=True) for layer, stack in stacks.items()}


MakeBackend = Callable[[StagePlan, LaunchCounter], DeviceBackend]


class OnePrefill(SdpaPrefill):
    """Attention of chunks as one kernel, as on GPUs."""

    def __init__(self, counter: LaunchCounter) -> None:
        self._attend = counter.count_once("prefill", super().attend)

    def attend(self, q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, mask: Any) -> Tensor:
        out: Tensor = self._attend(q_THd, k_SGd, v_SGd, mask)
        return out


def _fastest(plan: StagePlan, counter: LaunchCounter) -> DeviceBackend:
    compiled = FusedOps(
        *(counter.count_once(each.name, getattr(EAGER, each.name)) for each in fields(FusedOps))
    )
    decode = next(iter(split_k_kernels(1, plan.args.n_kv_heads).values()))
    kernels = AttentionKernels(
        OnePrefill(counter), decode, write=write_rows, read=read_rows, read_back=read_back
    )
    kernels = replace(kernels, cache_rows=cache_rows, rotate_and_write=rotate_and_write)
    ops = fused_ops._with_triton_norms(compiled)
    return DeviceBackend(kernels, ops, counter.capture, piecewise_capture=counter.in_pieces)


def _row_wise(plan: StagePlan, counter: LaunchCounter) -> DeviceBackend:
    with (
        patch.object(
            device_backend, "select_working_kernels", lambda _plan, _device, kernels: kernels
        ),
        patch.object(device_backend, "try_ops", lambda *_: None),
        patch.object(device_backend, "_sampler", lambda *_: None),
        patch.object(
            row_invariance,
            "equal_tiles",
            lambda _device, dtype, _weight_dtype: TILES[dtype.itemsize],
        ),
    ):
        return row_wise_backend(plan, META, counter.capture)


def _worker(
    args: ModelArgs,
    counter: LaunchCounter,
    monkeypatch: pytest.MonkeyPatch,
    kv_cache_dtype: str = "auto",
    make_backend: MakeBackend = _fastest,
) -> StageWorker:
    """Return the only stage of a model, with what a GPU would be given."""
    monkeypatch.setattr(cuda, "PinnedTransfer", OtherMemory)
    monkeypatch.setattr(
        JITFunction,
        "run",
        lambda kernel, *given, **options: counter.count_triton(kernel, *given, **options),
    )
    monkeypatch.setattr(moe, "select_gpu_kernels", _with_small_batch_kernels)
    # there are no numbers
    monkeypatch.setattr(piecewise_graphs, "assert_close_norm", lambda *_: None)
    plan = tiny_plan(args, 1, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype).stages[0]
    with META:
        model = StageModel(args, plan.layers).eval().bfloat16()
    places = (
        allocate_contiguous(stage_tensors(args, plan.layers), plan.weight_format, META)
        if args.moe
        else {}
    )
    model.load_state_dict(model.state_dict() | places, assign=True)
    for layer in model.modules():
        if isinstance(layer, Linear):
            layer.small_batch_products = ((1, "gemv", partial(gemv, block=BLOCKS[0])),)
    return StageWorker(plan, model, "meta", backend=make_backend(plan, counter))


def _mixed_launches(
    args: ModelArgs,
    monkeypatch: pytest.MonkeyPatch,
    kv_cache_dtype: str = "auto",
    counter: LaunchCounter | None = None,
) -> Counter[str]:
    """Return the kernels of a step with a chunk of 20 tokens and two single ones, of which none is
    sampled.

    With a counter the pieces are recorded before, and what they are made of is counted there.
    """
    is_piecewise, counter = counter is not None, counter or LaunchCounter()
    worker = _worker(args, counter, monkeypatch, kv_cache_dtype)
    if is_piecewise:
        worker.prepare()
        counter.launches = Counter()
    worker.fence(0)
    sizes, first_pages, chunks = (20, 1, 1), iter((0, 2, 3)), []
    for seq_id, size in enumerate(sizes):
        page = next(first_pages)
        pages = tuple(range(page, page + -(-size // worker.plan.cache.page_size)))
        chunks.append(Chunk(seq_id, 0, (0,) * size, (pages,), SamplingParams(), needs_sample=False))
    with counter:
        worker.launch(MicroBatch(0, 0, tuple(chunks)), None)
    return counter.launches


def _launches(
    args: ModelArgs,
    num_decodes: int,
    monkeypatch: pytest.MonkeyPatch,
    kv_cache_dtype: str = "auto",
    make_backend: MakeBackend = _fastest,
) -> Counter[str]:
    """Return the kernels in the graph of so many decodes, of a model that is one stage."""
    counter = LaunchCounter()
    worker = _worker(args, counter, monkeypatch, kv_cache_dtype, make_backend)
    worker.prepare()
    assert worker.graphs is not None
    by_rows = {
        rows: launches
        for (rows, _), launches in zip(worker.graphs.sizes, counter.graphs, strict=True)
    }
    return by_rows[num_decodes]


@pytest.mark.parametrize("num_decodes", [1, 4])
@pytest.mark.parametrize("kind", MAX_LAYER_LAUNCHES)
def test_a_step_launches_few_kernels(
    kind: str, num_decodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an improvement the limits above are to be lowered."""
    _check(_fastest, kind, num_decodes, MAX_LAYER_LAUNCHES[kind], MAX_OTHER_LAUNCHES, monkeypatch)


@pytest.mark.parametrize("num_decodes", [1, 4])
@pytest.mark.parametrize("kind", MAX_ROW_WISE_LAUNCHES)
def test_a_batch_invariant_step_launches_few_kernels(
    kind: str, num_decodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above."""
    _check(
        _row_wise,
        kind,
        num_decodes,
        MAX_ROW_WISE_LAUNCHES[kind],
        MAX_OTHER_ROW_WISE_LAUNCHES,
        monkeypatch,
    )


def _check(
    make_backend: MakeBackend,
    kind: str,
    num_decodes: int,
    max_of_layer: int,
    max_others: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fewer, more = (
        _launches(
            tiny_args(n_layers=n, moe=kind == "experts", window=None),
            num_decodes,
            monkeypatch,
            make_backend=make_backend,
        )
        for n in (LAYERS, LAYERS + 1)
    )
    layer = more - fewer
    others = fewer - Counter({name: LAYERS * number for name, number in layer.items()})
    assert layer.total() <= max_of_layer, layer
    assert others.total() <= max_others, others
    assert fewer.total() == LAYERS * layer.total() + others.total()


def _sampling_launches(
    params: list[SamplingParams], choose: ChooseTokens | None, monkeypatch: pytest.MonkeyPatch
) -> Counter[str]:
    counter = LaunchCounter()
    monkeypatch.setattr(cuda, "PinnedTransfer", OtherMemory)
    monkeypatch.setattr(
        JITFunction,
        "run",
        lambda kernel, *given, **options: counter.count_triton(kernel, *given, **options),
    )
    with counter:
        tokens_S = sample(
            torch.empty(len(params), 32_000, device=META), params, range(len(params)), choose
        )
    assert (tokens_S.shape, tokens_S.dtype) == ((len(params),), torch.int64)
    return counter.launches


@pytest.mark.parametrize("num_rows", [1, 64])
def test_tokens_are_sampled_by_one_kernel(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the rows want, greedy ones among them. Without Triton it takes some eighty."""
    params = [*([SamplingParams(temperature=0.0)] if num_rows > 1 else []), *SAMPLINGS * 6][
        :num_rows
    ]
    assert _sampling_launches(params, choose_tokens, monkeypatch) == {"triton_sampler._kernel": 1}
    assert _sampling_launches(params, None, monkeypatch).total() > 20


def test_greedy_tokens_are_chosen_by_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parameters are zeros, which the device makes itself. Without Triton it takes eight."""
    params = [SamplingParams(temperature=0.0)] * 4
    assert _sampling_launches(params, choose_tokens, monkeypatch) == {
        "triton_sampler._kernel": 1,
        "zeros": 1,
    }
    assert _sampling_launches(params, None, monkeypatch).total() > 2


def test_a_step_with_prompts_and_decodes_launches_few_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernel by kernel, so that the host has to launch all of them in the time that the device
    takes.
    """
    fewer, more = (
        _mixed_launches(tiny_args(n_layers=n, moe=False, window=None), monkeypatch)
        for n in (LAYERS, LAYERS + 1)
    )
    layer = more - fewer
    assert layer.total() <= MAX_MIXED_LAYER_LAUNCHES, layer
    assert (layer["prefill"], layer["cat"], layer["triton_cache._write"]) == (1, 1, 1)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_a_step_with_prompts_and_decodes_launches_half_as_many_with_pieces(
    kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention and what it reads and writes are launched as before, all else is one graph of each
    layer and one more.
    """
    few, many = (tiny_args(n_layers=n, moe=False, window=None) for n in (LAYERS, LAYERS + 1))
    kernels = [LaunchCounter(), LaunchCounter()]
    fewer, more = (
        _mixed_launches(args, monkeypatch, kv_cache_dtype, counter)
        for args, counter in zip((few, many), kernels, strict=True)
    )
    layer, is_fp8 = more - fewer, kv_cache_dtype == "fp8"
    assert layer.total() <= MAX_PIECEWISE_LAYER_LAUNCHES + is_fp8, layer
    assert (layer["graph"], layer["prefill"], layer["copy_"]) == (1, 1, 2)
    assert fewer["graph"] == LAYERS + 1
    eager, eager_more = (_mixed_launches(args, monkeypatch, kv_cache_dtype) for args in (few, many))
    eager_layer = eager_more - eager
    outside = fewer.total() - LAYERS * layer.total()
    begin_and_end = MAX_PIECEWISE_BEGIN_LAUNCHES + MAX_PIECEWISE_END_LAUNCHES
    assert outside <= eager.total() - LAYERS * eager_layer.total() + begin_and_end, (
        "index tensors are made as before"
    )
    assert 2 * layer.total() <= eager_layer.total() + is_fp8
    of_pieces = kernels[1].pieces[0] - kernels[0].pieces[0]
    assert of_pieces.total() <= MAX_PIECE_KERNELS, of_pieces


def test_keys_and_values_in_fp8_take_one_kernel_more_in_a_step_with_prompts_and_none_in_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Single tokens are quantized by the kernels that write them, and chunks attend to what one
    more kernel has rounded.
    """
    args = tiny_args(n_layers=LAYERS, moe=False, window=None)
    assert _launches(args, 4, monkeypatch, "fp8") == _launches(args, 4, monkeypatch)
    plain, fp8 = _mixed_launches(args, monkeypatch), _mixed_launches(args, monkeypatch, "fp8")
    assert fp8 - plain == {
        "triton_cache._read_back": LAYERS,
        "triton_cache._write_quantized": LAYERS,
    }
    assert plain - fp8 == {"triton_cache._write": LAYERS}
