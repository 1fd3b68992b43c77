"""Recorded steps of decodes, on the CPU: the operations that ran once are run again, on the same memory and with nothing else."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from harness import PROMPTS, run_in_process
from tiny_models import experts_together, random_model, split_model, tiny_args, tiny_plan
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tramontane.proto.model_args import ModelArgs, Quantization, YarnScaling
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import PipelinePlan, WindowClass
from tramontane.proto.request import SamplingParams
from tramontane.workers.attention.backend import AttentionKernels
from tramontane.workers.attention.metadata import build_decode_metadata
from tramontane.workers.attention.rolling_cache import PageRings
from tramontane.workers.attention.sdpa_backend import PagedDecode, SdpaPrefill
from tramontane.workers.stage import stage_worker
from tramontane.workers.stage.cuda_graphs import Compute, CudaGraphCapture
from tramontane.workers.stage.device_backend import DeviceBackend
from tramontane.workers.stage.stage_worker import StageWorker

WINDOWS = [
    pytest.param((24,) * 3, id="windowed"),
    pytest.param((None,) * 3, id="full"),
    pytest.param((24, None, 40), id="interleaved"),
]


TRACING = threading.Lock()  # stages are threads here, and a trace changes methods of nn.Module in the whole process


class Replays:
    """A ``Recorder`` as a CUDA graph is one: nothing of Python runs again, so numbers of the host stay what they were."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def capture(self, compute: Compute) -> Compute:
        with TRACING:
            self.num_recorded += 1
            compute()
            graph = make_fx(compute)()

        def replay() -> Tensor:
            self.num_replayed += 1
            out: Tensor = graph()
            return out

        return replay


def _recording(plan: PipelinePlan, args: ModelArgs, recorder: Replays) -> list[StageWorker]:
    backend = DeviceBackend(AttentionKernels(SdpaPrefill(), PagedDecode()), graph_capture=recorder)
    workers = split_model(random_model(args), plan)
    return [StageWorker(worker.plan, experts_together(worker.model), backend=backend) for worker in workers]


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0, max_tokens=24), SamplingParams(seed=5, max_tokens=24)])
def test_the_same_tokens_as_step_by_step(
    windows: tuple[int | None, ...], num_stages: int, sampling: SamplingParams, moe: bool
) -> None:
    args = tiny_args(n_layers=3, windows=windows, moe=moe)
    plan = tiny_plan(args, num_stages, page_size=4)
    recorder = Replays()
    plain, recording = split_model(random_model(args), plan), _recording(plan, args, recorder)
    expected = run_in_process(plan, plain, PROMPTS[:7], sampling, budget=32)
    assert run_in_process(plan, recording, PROMPTS[:7], sampling, budget=32) == expected
    assert recorder.num_replayed > 5 * recorder.num_recorded, "few recordings, used often"
    assert [w.model.expert_load for w in recording] == [w.model.expert_load for w in plain], "padding is not counted"


@pytest.mark.parametrize(
    "args",
    [
        pytest.param(replace(tiny_args(n_layers=2, moe=False), rope_scaling=YarnScaling(4.0, 64, llama4_beta=0.1)), id="scaled"),
        pytest.param(tiny_args(n_layers=2, moe=False, tied=True), id="tied"),
    ],
)
def test_other_models_too(args: ModelArgs) -> None:
    plan, recorder = tiny_plan(args, 1, page_size=4), Replays()
    expected = run_in_process(plan, split_model(random_model(args), plan), PROMPTS[:5], budget=32)
    assert run_in_process(plan, _recording(plan, args, recorder), PROMPTS[:5], budget=32) == expected
    assert recorder.num_replayed > recorder.num_recorded


@pytest.mark.parametrize("quantize", [*Quantization])
def test_quantised_weights_too(quantize: Quantization) -> None:
    args = tiny_args(n_layers=2, moe=False)
    plan, recorder = tiny_plan(args, 1, page_size=4, quantize=quantize), Replays()
    plain = StageWorker.load(plan.stages[0], RandomWeights(), "cpu")
    recording = StageWorker(
        plan.stages[0], plain.model, backend=DeviceBackend(AttentionKernels(SdpaPrefill(), PagedDecode()), graph_capture=recorder)
    )
    expected = run_in_process(plan, [plain], PROMPTS[:5], budget=32)
    assert run_in_process(plan, [recording], PROMPTS[:5], budget=32) == expected
    assert recorder.num_replayed > recorder.num_recorded


def test_what_xformers_reads_follows_the_numbers_of_the_step() -> None:
    """Its masks, built from fixed memory as recorded steps do, replayed with other slots and positions."""
    kernels = pytest.importorskip(
        "tramontane.workers.attention.xformers_backend", reason="xformers is published for Linux on x86-64 only"
    )
    ring = PageRings(WindowClass(24, 7, 28), 4, 4, torch.device("cpu"))
    for slot in range(4):
        ring.append_pages(slot, tuple(range(7 * slot, 7 * slot + 7)))
    ring.flush()
    numbers_2B = torch.tensor([[ring.scratch_slot] * 4, [0] * 4])

    def tensors() -> Tensor:
        mask = kernels.PagedDecode(None).build_mask(build_decode_metadata(ring, numbers_2B[0], numbers_2B[1], 7, []))
        keys = torch.stack([mask.k_seqinfo.seqstart[:-1], mask.k_seqinfo.seqlen], dim=1)
        return torch.cat([mask.block_tables, keys, mask.q_seqinfo.seqstart[:-1, None]], dim=1)

    replayed = make_fx(tensors)()
    for slots, positions in (([0, 3, 1, 2], [5, 23, 24, 400]), ([2, 0, ring.scratch_slot, 1], [99, 0, 0, 26])):
        numbers_2B.copy_(torch.tensor([slots, positions]))
        assert torch.equal(replayed(), tensors())


def test_a_stage_that_is_loaded_has_recorded_every_number_of_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, args = Replays(), tiny_args(n_layers=2, moe=False)
    monkeypatch.setattr(
        stage_worker,
        "backend_for",
        lambda *_: DeviceBackend(AttentionKernels(SdpaPrefill(), PagedDecode()), graph_capture=recorder),
    )
    plan = tiny_plan(args, 2, max_num_seqs=5)
    workers = [StageWorker.load(stage, RandomWeights()) for stage in plan.stages]
    for worker in workers:
        assert worker.graphs is not None
        assert [size[0] for size in worker.graphs.sizes] == [8, 4, 2, 1]
    run_in_process(plan, workers, PROMPTS[:5], budget=32)
    assert (recorder.num_recorded, recorder.num_replayed > 20) == (2 * 4, True)


class _FakeCuda:
    """Streams of one thread, and a recording that CUDA breaks off: torch then leaves the thread where the recording was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, breaks: bool) -> None:
        self.current, self.breaks = self.stream("usual"), breaks
        fakes: dict[str, object] = {
            "graph_pool_handle": lambda: (0, 0),
            "Stream": lambda: self.stream("warm-up"),
            "current_stream": lambda: self.current,
            "set_stream": self.set_stream,
            "stream": self.on,
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "graph": lambda *_, **__: self.recording(),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda _other: None)

    def set_stream(self, stream: SimpleNamespace) -> None:
        self.current = stream

    @contextmanager
    def on(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def recording(self) -> Iterator[None]:
        before, self.current = self.current, self.stream("recording")
        yield
        if self.breaks:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.current = before


@pytest.mark.parametrize("breaks", [False, True])
def test_whatever_becomes_of_a_recording_the_thread_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, breaks: bool) -> None:
    cuda, seen = _FakeCuda(monkeypatch, breaks=breaks), []

    def compute() -> Tensor:
        seen.append(cuda.current.name)
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="during capture") if breaks else nullcontext():
        CudaGraphCapture().capture(compute)
    assert seen == ["warm-up", "warm-up", "recording"]
    assert cuda.current.name == "usual"


class _Refuses:
    """A device that cannot record some of what it is asked for."""

    def capture(self, _compute: Compute) -> Compute:
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")


def test_what_cannot_be_recorded_is_computed_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    args = tiny_args(n_layers=2, moe=False)
    plan = tiny_plan(args, 1)
    expected = run_in_process(plan, split_model(random_model(args), plan), PROMPTS[:5], budget=32)
    backend = DeviceBackend(AttentionKernels(SdpaPrefill(), PagedDecode()), graph_capture=_Refuses())
    with caplog.at_level(logging.WARNING, logger="tramontane.workers.stage.cuda_graphs"):
        assert run_in_process(plan, split_model(random_model(args), plan, backend=backend), PROMPTS[:5], budget=32) == expected
    (record,) = caplog.records
    assert record.getMessage().endswith("(operation not permitted when stream is capturing ... more of it)")
