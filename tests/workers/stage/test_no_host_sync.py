"""Steps on a GPU wait for nothing: on torch's meta device, which has shapes and no numbers, no
result can be read.

In addition, no operation may mix tensors of the host and the device, and every copy goes through
pinned memory: otherwise it would wait for all work of the GPU, and could not be recorded in a CUDA
graph.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import random_ids
from meta_device import META, Once, OtherMemory
from tiny_models import tiny_args, tiny_plan
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tramontane.proto.model_args import ModelArgs
from tramontane.proto.plan import StagePlan
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import PLACEHOLDER_TOKEN, Chunk, DecodeColumns, MicroBatch
from tramontane.workers.attention.backend import AttentionKernels
from tramontane.workers.attention.metadata import DecodeMetadata
from tramontane.workers.attention.sdpa_backend import PagedDecode, SdpaPrefill
from tramontane.workers.device import cuda as pinned
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.stage import piecewise_graphs
from tramontane.workers.stage.cuda_graphs import Compute, Cut, PiecewiseCapture
from tramontane.workers.stage.device_backend import DeviceBackend
from tramontane.workers.stage.hidden_states import HiddenStates
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights.loader import allocate_contiguous
from tramontane.workers.weights.tensor_specs import stage_tensors

SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=3),
    SamplingParams(temperature=0.7, top_k=4, top_p=0.9, min_p=0.1),
    SamplingParams(presence_penalty=0.5, repetition_penalty=1.1, logit_bias=((3, 1.0),)),
]


class OnePlace(TorchDispatchMode):
    """Refuses operations on tensors of two devices. Single numbers travel with the launch."""

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        devices = {
            each.device.type
            for each in tree_leaves((args, kwargs))
            if isinstance(each, Tensor) and each.dim()
        }
        if devices and kwargs.get("device"):
            devices.add(torch.device(kwargs["device"]).type)
        assert len(devices) < 2, f"{func} moves, or mixes, what is on {devices}"
        return func(*args, **kwargs)


class InPlace(PagedDecode):
    """Also makes the mask that Triton's kernel would be given."""

    def build_mask(self, index: DecodeMetadata) -> Any:
        triton_decode = pytest.importorskip(
            "tramontane.workers.attention.triton_decode", reason="Triton is for Linux only"
        )
        triton_decode.SplitKDecode(kv_heads=2, block=64, parts=4, warps=4, stages=2).build_mask(
            index
        )
        return super().build_mask(index)


def _worker(stage: StagePlan, args: ModelArgs, *, is_piecewise: bool = False) -> StageWorker:
    """Its experts together, as grouped products want them."""
    with META:
        model = StageModel(args, stage.layers).eval().bfloat16()
    places = (
        allocate_contiguous(stage_tensors(args, stage.layers), stage.weight_format, META)
        if args.moe
        else {}
    )
    model.load_state_dict(model.state_dict() | places, assign=True)
    kernels = AttentionKernels(SdpaPrefill(), InPlace())
    backend = DeviceBackend(
        kernels, graph_capture=Once(), piecewise_capture=Once().in_pieces if is_piecewise else None
    )
    return StageWorker(stage, model, "meta", backend=backend)


def _batches(sampling: SamplingParams, latest: int) -> Iterator[MicroBatch]:
    """A prompt; another's first half with a decode; its second half with another; decodes alone,
    twice.

    ``latest``: what stands for a token that has been sampled and not been read.
    """

    def chunk(seq_id: int, start: int, num_tokens: int, wants_token: bool) -> Chunk:
        pages = () if start else (seq_id,)
        token_ids, first = tuple(random_ids(num_tokens, seq_id)), None if start else sampling
        return Chunk(seq_id, start, token_ids, (pages, pages), first, wants_token)

    yield MicroBatch(0, 0, (chunk(0, 0, 9, True),))
    yield MicroBatch(0, 1, (chunk(1, 0, 5, False),), decodes=DecodeColumns((0,), (9,), (latest,)))
    yield MicroBatch(0, 2, (chunk(1, 5, 4, True),), decodes=DecodeColumns((0,), (10,), (latest,)))
    yield MicroBatch(0, 3, (), decodes=DecodeColumns((0, 1), (11, 9), (latest, 5)))
    yield MicroBatch(0, 4, (), decodes=DecodeColumns((0, 1), (12, 10), (4, 5)))


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(
    "sampling", SAMPLINGS, ids=["greedy", "seeded", "of few", "changed logits"]
)
def test_steps_read_nothing_and_move_nothing_but_through_pinned_memory(
    sampling: SamplingParams, num_stages: int, moe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "PinnedTransfer", OtherMemory)
    args = tiny_args(n_layers=2, moe=moe, windows=(8, None))
    for stage in tiny_plan(args, num_stages, dtype="bfloat16").stages:
        worker = _worker(stage, args)
        worker.fence(0)
        assert worker.graphs is not None
        for batch in _batches(sampling, latest=PLACEHOLDER_TOKEN if num_stages == 1 else 4):
            hidden_TD = torch.empty(batch.num_tokens, args.dim, dtype=torch.bfloat16, device=META)
            with OnePlace():
                unread = worker.launch(
                    batch, None if stage.is_first else HiddenStates(hidden_TD, ())
                )
            assert (unread.hidden_TD is None) == stage.is_last
        assert len(worker.graphs.sizes) == 1


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_steps_with_prompts_by_pieces_wait_for_nothing_either(
    num_stages: int, moe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recorded may move nothing at all; what is tried at load begins with random numbers of
    the host.
    """
    monkeypatch.setattr(pinned, "PinnedTransfer", OtherMemory)
    # there are no numbers
    monkeypatch.setattr(piecewise_graphs, "assert_close_norm", lambda *_: None)
    args = tiny_args(n_layers=2, moe=moe, windows=(8, None))
    for stage in tiny_plan(args, num_stages, dtype="bfloat16", max_num_batched_tokens=128).stages:
        worker = _worker(stage, args, is_piecewise=True)
        assert worker.pieces is not None
        record = worker.pieces._capture

        def watched(
            compute: Callable[[Cut], Tensor], record: PiecewiseCapture = record
        ) -> list[Compute]:
            with OnePlace():
                return record(compute)

        worker.pieces._capture = watched
        worker.prepare()
        assert worker.pieces.sizes == [64, 128]
        worker.fence(0)
        monkeypatch.setattr(worker.model, "forward", None)  # every step is pieces, or a graph
        for batch in list(
            _batches(SAMPLINGS[0], latest=PLACEHOLDER_TOKEN if num_stages == 1 else 4)
        )[:3]:
            hidden_TD = torch.empty(batch.num_tokens, args.dim, dtype=torch.bfloat16, device=META)
            with OnePlace():
                worker.launch(batch, None if stage.is_first else HiddenStates(hidden_TD, ()))
