"""Recorded steps of decodes, on the CPU: the operations that ran once are run again, on the same
memory and with nothing else.
"""

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from graph_tape import Replays
from harness import PROMPTS, run_in_process
from tiny_models import experts_together, random_model, split_model, tiny_args, tiny_plan
from torch import Tensor

from tramontane.proto.model_args import ModelArgs, YarnScaling
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import MicroBatch
from tramontane.proto.weight_format import Quantization
from tramontane.workers.attention.backend import AttentionKernels
from tramontane.workers.attention.metadata import DecodeMetadata
from tramontane.workers.attention.rolling_cache import LayerCache
from tramontane.workers.attention.sdpa_backend import GatheredKeys, PagedDecode, SdpaPrefill
from tramontane.workers.kernels.fused_ops import EAGER
from tramontane.workers.stage import stage_worker
from tramontane.workers.stage.cuda_graphs import Compute, CudaGraphCapture, Cut, padded_rows
from tramontane.workers.stage.device_backend import DeviceBackend
from tramontane.workers.stage.hidden_states import HiddenStates
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.stage.step_record import PendingStep
from tramontane.workers.weights import loader

WINDOWS = [
    pytest.param((24,) * 3, id="windowed"),
    pytest.param((None,) * 3, id="full"),
    pytest.param((24, None, 40), id="interleaved"),
]


def _recording(plan: PipelinePlan, args: ModelArgs, recorder: Replays) -> list[StageWorker]:
    backend = DeviceBackend(AttentionKernels(SdpaPrefill(), PagedDecode()), graph_capture=recorder)
    workers = split_model(random_model(args), plan)
    return [
        StageWorker(worker.plan, experts_together(worker.model), backend=backend)
        for worker in workers
    ]


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(temperature=0.0, max_tokens=24), SamplingParams(seed=5, max_tokens=24)],
)
def test_the_same_tokens_as_step_by_step(
    windows: tuple[int | None, ...], sampling: SamplingParams, moe: bool
) -> None:
    """In one stage or two: either number occurs with every choice of the others."""
    num_stages = 1 if moe == (sampling.temperature == 0) else 2
    args = tiny_args(n_layers=3, windows=windows, moe=moe)
    plan = tiny_plan(args, num_stages, page_size=4)
    recorder = Replays()
    recording = _recording(plan, args, recorder)
    tokens, expert_load = _step_by_step(args, sampling)
    assert run_in_process(plan, recording, PROMPTS[:7], sampling, budget=32) == tokens
    assert recorder.num_replayed > recorder.num_recorded, "few recordings, used often"
    assert {
        layer: load for w in recording for layer, load in w.model.expert_load.items()
    } == expert_load, "padding is not counted"


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(temperature=0.0, max_tokens=24), SamplingParams(seed=5, max_tokens=24)],
)
def test_the_same_tokens_of_steps_that_begin_with_tokens_on_the_device(
    sampling: SamplingParams,
) -> None:
    """A graph reads the last tokens anew each time that it is replayed."""
    args = tiny_args(n_layers=3, windows=(24, None, 40))
    plan, recorder = tiny_plan(args, 1, page_size=4), Replays()
    recording = _recording(plan, args, recorder)
    found = run_in_process(
        plan, recording, PROMPTS[:7], sampling, budget=32, max_in_flight=2, async_scheduling=True
    )
    assert found == _step_by_step(args, sampling)[0]
    assert recorder.num_replayed > recorder.num_recorded


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "experts"])
def test_the_same_tokens_where_one_kernel_rotates_and_writes(moe: bool) -> None:
    """In steps of single tokens, in graphs and not; others are rotated by their layers."""
    args, calls = tiny_args(n_layers=3, windows=(24, None, 40), moe=moe), list[int]()

    def rotate_and_write(
        cached: LayerCache, rows_B: Tensor, qkv_BHd: Tensor, cos_Bd: Tensor, sin_Bd: Tensor
    ) -> Tensor:
        calls.append(len(rows_B))
        num_keys = cached.k_NGd.shape[1]
        rotated_BHd = EAGER.apply_rotary(qkv_BHd[:, :-num_keys], cos_Bd, sin_Bd)
        cached.write(rows_B, rotated_BHd[:, -num_keys:], qkv_BHd[:, -num_keys:])
        return rotated_BHd[:, :-num_keys].contiguous()

    plan, sampling = tiny_plan(args, 1, page_size=4), SamplingParams(temperature=0.0, max_tokens=24)
    kernels = AttentionKernels(SdpaPrefill(), PagedDecode(), rotate_and_write=rotate_and_write)
    for recorder in (Replays(), None):
        (worker,) = split_model(random_model(args), plan)
        backend = DeviceBackend(kernels, graph_capture=recorder)
        worker = StageWorker(worker.plan, experts_together(worker.model), backend=backend)
        calls.clear()
        assert (
            run_in_process(plan, [worker], PROMPTS[:7], sampling, budget=32)
            == _step_by_step(args, sampling)[0]
        )
        assert calls


@cache
def _step_by_step(
    args: ModelArgs, sampling: SamplingParams
) -> tuple[list[list[int]], dict[int, list[int]]]:
    """Tokens and expert load without recordings, in one stage: how many there are makes no
    difference.
    """
    plan = tiny_plan(args, 1, page_size=4)
    [worker] = split_model(random_model(args), plan)
    return run_in_process(
        plan, [worker], PROMPTS[:7], sampling, budget=32
    ), worker.model.expert_load


@pytest.mark.parametrize(
    "args",
    [
        pytest.param(
            replace(
                tiny_args(n_layers=2, moe=False), rope_scaling=YarnScaling(4.0, 64, llama4_beta=0.1)
            ),
            id="scaled",
        ),
        pytest.param(tiny_args(n_layers=2, moe=False, tied=True), id="tied"),
    ],
)
def test_other_models_too(args: ModelArgs) -> None:
    plan, recorder = tiny_plan(args, 1, page_size=4), Replays()
    expected = run_in_process(plan, split_model(random_model(args), plan), PROMPTS[:5], budget=32)
    assert (
        run_in_process(plan, _recording(plan, args, recorder), PROMPTS[:5], budget=32) == expected
    )
    assert recorder.num_replayed > recorder.num_recorded


@pytest.mark.parametrize("quantize", [*Quantization])
def test_quantized_weights_too(quantize: Quantization, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose matrices are not packed."""
    monkeypatch.setattr(loader, "pack_linears", lambda *_: {})
    args = tiny_args(n_layers=2, moe=False)
    plan, recorder = tiny_plan(args, 1, page_size=4, quantize=quantize), Replays()
    plain = StageWorker.load(plan.stages[0], RandomWeights(), "cpu")
    recording = StageWorker(
        plan.stages[0],
        plain.model,
        backend=DeviceBackend(
            AttentionKernels(SdpaPrefill(), PagedDecode()), graph_capture=recorder
        ),
    )
    expected = run_in_process(plan, [plain], PROMPTS[:5], budget=32)
    assert run_in_process(plan, [recording], PROMPTS[:5], budget=32) == expected
    assert recorder.num_replayed > recorder.num_recorded


def test_a_stage_that_is_loaded_has_recorded_every_number_of_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder, args = Replays(), tiny_args(n_layers=2, moe=False)
    monkeypatch.setattr(
        stage_worker,
        "select_backend",
        lambda *_: DeviceBackend(
            AttentionKernels(SdpaPrefill(), PagedDecode()), graph_capture=recorder
        ),
    )
    plan = tiny_plan(args, 2, max_num_seqs=5)
    workers = [StageWorker.load(stage, RandomWeights()) for stage in plan.stages]
    for worker in workers:
        assert worker.graphs is not None
        assert [size[0] for size in worker.graphs.sizes] == [8, 4, 2, 1]
    # of nothing but decodes: how many depends on how fast the stages are
    num_steps, launch = 0, StageWorker.launch

    def counted(
        worker: StageWorker, batch: MicroBatch, incoming: HiddenStates | None
    ) -> PendingStep:
        nonlocal num_steps
        num_steps += not batch.chunks and bool(batch.decodes.seq_ids)
        return launch(worker, batch, incoming)

    monkeypatch.setattr(StageWorker, "launch", counted)
    run_in_process(plan, workers, PROMPTS[:5], budget=32)
    assert recorder.num_recorded == 2 * 4
    assert recorder.num_replayed == num_steps > 0


def test_graphs_of_all_sizes_write_their_logits_to_the_same_memory() -> None:
    """Each would keep its own: of 256 decodes and 131,072 tokens they are 128 MiB, of all sizes 1.1
    GiB.
    """
    outs: list[Tensor] = []

    def record(compute: Compute) -> Compute:
        outs.append(compute())
        return compute

    args = tiny_args(n_layers=2, moe=False)
    plan = tiny_plan(args, 2, max_num_seqs=5)
    backend = DeviceBackend(AttentionKernels(SdpaPrefill(), PagedDecode()), graph_capture=record)
    for worker in split_model(random_model(args), plan, backend=backend):
        outs.clear()
        worker.prepare()
        assert [len(each) for each in outs] == [8, 4, 2, 1]
        if worker.plan.is_last:
            assert len({each.untyped_storage().data_ptr() for each in outs}) == 1
            assert outs[0].untyped_storage().nbytes() == 8 * args.vocab_size * 4


@pytest.mark.parametrize(
    ("num_decodes", "num_rows"),
    [
        (1, 1),
        (2, 2),
        (3, 4),
        (5, 8),
        (8, 8),
        (9, 16),
        (17, 24),
        (64, 64),
        (65, 80),
        (80, 80),
        (129, 144),
    ],
)
def test_decodes_are_padded_to_sizes_that_are_recorded(num_decodes: int, num_rows: int) -> None:
    assert padded_rows(num_decodes) == num_rows


class _WholeRing(PagedDecode):
    """Depends on no table's width."""

    finds_pages = True

    def build_mask(self, index: DecodeMetadata) -> GatheredKeys:
        return super().build_mask(replace(index, num_pages=index.ring.ring_pages))


def test_a_kernel_that_finds_pages_has_graphs_of_one_width() -> None:
    """Also for contexts beyond those whose graphs are recorded first: nothing is recorded later."""
    recorder, args = Replays(), tiny_args(n_layers=1, moe=False, windows=(None,), max_seq_len=4096)
    plan = tiny_plan(args, 1, max_num_seqs=2)
    backend = DeviceBackend(AttentionKernels(SdpaPrefill(), _WholeRing()), graph_capture=recorder)
    worker = StageWorker.load(plan.stages[0], RandomWeights())
    worker = StageWorker(plan.stages[0], worker.model, backend=backend)
    worker.prepare()
    assert worker.graphs is not None
    assert worker.graphs.sizes == [(2, (0,)), (1, (0,))]
    run_in_process(plan, [worker], [[i % 90 for i in range(1200)], [1, 2, 3]], budget=2048)
    assert worker.graphs.sizes == [(2, (0,)), (1, (0,))]
    assert recorder.num_replayed > 0


class _FakeGraph(SimpleNamespace):
    """Unlike its base it can be referred to weakly."""


class _FakeCuda:
    """Streams of one thread, and a recording that CUDA breaks off: torch then leaves the thread
    where the recording was.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, breaks: bool) -> None:
        self.current, self.breaks = self.stream("usual"), breaks
        self.graphs: list[SimpleNamespace] = []
        self.replayed: list[int] = []
        self.waits: list[tuple[str, str]] = []  # of a stream for another one
        self.recorded_with: list[dict[str, object]] = []
        fakes: dict[str, object] = {
            "graph_pool_handle": lambda: (7, 7),
            "Stream": lambda: self.stream("warm-up"),
            "current_stream": lambda: self.current,
            "set_stream": self.set_stream,
            "stream": self.on,
            "CUDAGraph": self.graph,
            "graph": self.recording,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, wait_stream=lambda other: self.waits.append((name, other.name))
        )

    def set_stream(self, stream: SimpleNamespace) -> None:
        self.current = stream

    def graph(self) -> SimpleNamespace:
        name = len(self.graphs)
        self.graphs.append(_FakeGraph(name=name, replay=lambda: self.replayed.append(name)))
        return self.graphs[-1]

    @contextmanager
    def on(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def recording(
        self, graph: SimpleNamespace, pool: object, stream: SimpleNamespace, **options: object
    ) -> Iterator[None]:
        self.recorded_with.append({"pool": pool, "stream": stream.name} | options)
        assert not self.current.name.startswith("recording"), (
            "one recording begins when the last one has ended"
        )
        before, self.current = self.current, self.stream(f"recording {graph.name}")
        yield
        if self.breaks:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.current = before


@pytest.mark.parametrize("breaks", [False, True])
def test_whatever_becomes_of_a_recording_the_thread_continues_where_it_was(
    monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    cuda, seen = _FakeCuda(monkeypatch, breaks=breaks), []

    def compute() -> Tensor:
        seen.append(cuda.current.name)
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="during capture") if breaks else nullcontext():
        CudaGraphCapture()(compute)
    assert seen == ["warm-up", "warm-up", "recording 0"]
    assert cuda.current.name == "usual"
    # the warm-up reads what was copied before, and what comes later may read what it has written
    assert cuda.waits == [("warm-up", "usual"), ("usual", "warm-up")]


@pytest.mark.parametrize("breaks", [False, True])
def test_pieces_are_recorded_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    cuda, seen = _FakeCuda(monkeypatch, breaks=breaks), []

    def compute(cut: Cut) -> Tensor:
        for _ in range(2):
            seen.append(cuda.current.name)
            cut()
        seen.append(cuda.current.name)
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="during capture") if breaks else nullcontext():
        pieces = CudaGraphCapture().in_pieces(compute)
        for piece in pieces:
            assert torch.equal(piece(), torch.ones(1))
    of_graphs = ["recording 0"] if breaks else ["recording 0", "recording 1", "recording 2"]
    assert seen == ["warm-up"] * 6 + of_graphs
    assert cuda.replayed == ([] if breaks else [0, 1, 2])
    common = {"pool": (7, 7), "stream": "warm-up", "capture_error_mode": "thread_local"}
    assert cuda.recorded_with == [common] * len(of_graphs), "one memory pool and one stream"
    assert cuda.current.name == "usual"


def test_graphs_that_are_not_used_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would free what other graphs of the stream use."""
    cuda = _FakeCuda(monkeypatch, breaks=False)
    capture = CudaGraphCapture()
    capture.in_pieces(lambda cut: (cut(), torch.ones(1))[1])
    kept = [weakref.ref(graph) for graph in cuda.graphs]
    cuda.graphs.clear()
    gc.collect()
    assert all(graph() is not None for graph in kept)
    assert len(kept) == 2


class _Refuses:
    """A device that cannot record some operations."""

    def __call__(self, _compute: Compute) -> Compute:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")


def test_what_cannot_be_recorded_is_computed_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    args = tiny_args(n_layers=2, moe=False)
    plan = tiny_plan(args, 1)
    expected = run_in_process(plan, split_model(random_model(args), plan), PROMPTS[:5], budget=32)
    backend = DeviceBackend(
        AttentionKernels(SdpaPrefill(), PagedDecode()), graph_capture=_Refuses()
    )
    with caplog.at_level(logging.WARNING, logger="tramontane.workers.stage.cuda_graphs"):
        assert (
            run_in_process(
                plan, split_model(random_model(args), plan, backend=backend), PROMPTS[:5], budget=32
            )
            == expected
        )
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "(operation not permitted when stream is capturing ... more of it)"
    )
