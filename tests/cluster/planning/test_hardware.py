"""GPUs that are not seen are an error, and never a server on the CPUs."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import ray
import torch
from tiny_models import tiny_args

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.pipeline import engine
from tramontane.cluster.planning import hardware
from tramontane.cluster.planning.hardware import Gpu, Hardware, check_ray_gpus, probe_local
from tramontane.cluster.serving import server
from tramontane.cluster.serving.draining import StopLimit
from tramontane.proto.errors import PlanError
from tramontane.proto.units import GIB
from tramontane.workers.device.probe import VisibleGpu

SHOWN = [VisibleGpu("H100", 80 * GIB), VisibleGpu("L4", 24 * GIB)]


def _driver_and_torch(monkeypatch: pytest.MonkeyPatch, in_driver: int, in_torch: int) -> None:
    monkeypatch.setattr(hardware, "num_visible_gpus", lambda: in_driver)
    monkeypatch.setattr(hardware, "visible_gpus", lambda: SHOWN[:in_torch])


def test_a_plan_is_for_the_gpus_that_torch_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    _driver_and_torch(monkeypatch, 2, 2)
    assert probe_local().gpus == (Gpu("H100", 80 * GIB), Gpu("L4", 24 * GIB, index=1))
    _driver_and_torch(monkeypatch, 0, 2)
    assert probe_local().gpus == (), "PyTorch is not even asked"


@pytest.mark.parametrize(
    ("in_driver", "in_torch", "said"), [(1, 0, "1 GPU, but"), (2, 1, "2 GPUs, but")]
)
def test_a_gpu_that_torch_cannot_use_is_an_error(
    in_driver: int, in_torch: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _driver_and_torch(monkeypatch, in_driver, in_torch)
    with pytest.raises(PlanError) as refused:
        probe_local()
    assert str(refused.value).startswith(
        f"this machine has {said} PyTorch {torch.__version__} shows {in_torch}; install"
    )
    assert "CUDA_VISIBLE_DEVICES" in str(refused.value)


@pytest.mark.parametrize(
    ("in_ray", "in_plan", "selected", "is_refused"),
    [
        (1, 0, None, True),
        (2, 1, None, True),
        (0, 0, None, False),
        (2, 2, None, False),
        (0, 1, None, False),
        (1, 0, "-1", False),
    ],
)
def test_a_gpu_that_only_ray_has_found_is_an_error(
    in_ray: int,
    in_plan: int,
    selected: str | None,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless the user has said which ones are to be used; Ray counts names, also "-1", which hides
    all.
    """
    monkeypatch.setattr(
        ray, "cluster_resources", lambda: {"CPU": 8.0} | ({"GPU": float(in_ray)} if in_ray else {})
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if selected is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", selected)
    planned = Hardware(
        (8,), (GIB,), tuple(Gpu("H100", 80 * GIB, index=index) for index in range(in_plan))
    )
    if not is_refused:
        check_ray_gpus(planned)
        return
    said = (
        f"Ray has found {in_ray} GPUs? on this machine, but the plan is for {in_plan}; check that"
        " nvidia-smi"
    )
    with pytest.raises(PlanError, match=said):
        check_ray_gpus(planned)


@pytest.mark.parametrize(
    ("free_gib", "planned_gib", "held_gib"),
    [(None, 80, 0), (80, 80, 0), (81, 80, 0), (79.9, 80, 0), (50, 50, 30), (0, 0, 80)],
)
def test_what_other_processes_hold_is_not_planned_and_is_said(
    free_gib: float | None,
    planned_gib: int,
    held_gib: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """NVML's total may be more than CUDA's; the driver's own 100 MiB are not another process."""
    free = None if free_gib is None else int(free_gib * GIB)
    monkeypatch.setattr(hardware, "num_visible_gpus", lambda: 1)
    monkeypatch.setattr(hardware, "visible_gpus", lambda: [VisibleGpu("H100", 80 * GIB, free)])
    assert probe_local().gpus == (Gpu("H100", planned_gib * GIB, held=held_gib * GIB),)
    said = (
        f"GPU 0 (H100) has {planned_gib} {'GiB' if planned_gib else 'B'} of 80 GiB free, because"
        " other processes hold the rest"
    )
    assert (said in caplog.text) is bool(held_gib)
    assert bool(caplog.records) is bool(held_gib)


@pytest.mark.parametrize(("num_available", "planned_gib"), [(2, 50), (1.5, 80)])
def test_what_actors_hold_is_planned(
    num_available: float, planned_gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new pipeline is planned while there is one that it will follow on the same GPUs."""
    monkeypatch.setattr(ray, "available_resources", lambda: {"GPU": num_available})
    monkeypatch.setattr(hardware, "_run_on", lambda _node, list_gpus: list_gpus())
    monkeypatch.setattr(hardware, "_gather", dict)
    monkeypatch.setattr(hardware, "_address", lambda node: f"address of {node}")
    gpus = hardware._probe_gpus({"a": 2}, lambda: [VisibleGpu("H100", 80 * GIB, 50 * GIB)] * 2)
    assert [(gpu.node, gpu.index, gpu.memory // GIB) for gpu in gpus] == [
        ("a", 0, planned_gib),
        ("a", 1, planned_gib),
    ]


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_what_ray_has_found_is_compared_before_anything_is_placed(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = Hardware((8,), (GIB,))
    spec = SimpleNamespace(num_workers=1, threads_per_stage=1)
    module = engine if command == "generate" else server
    monkeypatch.setattr(module, "probe_local", lambda: planned)
    monkeypatch.setattr(module, "pipeline_spec", lambda *_: spec)
    monkeypatch.setattr(module, "local_ray_cluster", lambda *_, **__: nullcontext(""))
    monkeypatch.setattr(server, "check_ports", lambda *_: None)
    monkeypatch.setattr(server, "validate_model", lambda *_: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 1.0})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = EngineConfig()

    async def generate() -> None:
        async with engine._ray_pipeline(config, tiny_args(), lambda _: None, None):
            raise AssertionError("it was placed")

    def serve() -> None:
        with server._own_cluster(config, lambda _: None, None, StopLimit(None)):
            raise AssertionError("it was placed")

    with pytest.raises(PlanError, match="Ray has found 1 GPU on this machine"):
        serve() if command == "serve" else asyncio.run(generate())
