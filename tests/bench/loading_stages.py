"""Stage actors that measure themselves while they load a checkpoint, for ``loading.py``."""

import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import page_cache
import ray
from bench_parts import say, table_of
from page_cache import evict_page_cache, read_from_disk, write_model
from rich.table import Table

from tramontane.cluster.actors.pipeline_spec import WorkerSettings
from tramontane.cluster.actors.stage_actor import StageActor, remote_stage_class
from tramontane.cluster.actors.supervisor import wait_until_ready
from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster
from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import Layout, RandomWeights, WeightSource, read_model_args
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.units import GIB
from tramontane.proto.weight_format import Quantization
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights.tensor_specs import stage_tensors

READ_LIMIT, MEMORY_LIMIT = 1.05, 1.15
# buffers are a larger share of a stage of half a GiB, as with int8 here, than of seven GiB
ALWAYS_ALLOWED = 128 * 2**20
SAMPLE_EVERY_S = 0.002


@dataclass(frozen=True)
class Figures:
    """Bytes, and seconds of the whole loading."""

    seconds: float
    weights: int  # as the plan says
    stored: int  # of the same tensors in the checkpoint
    requested: int  # read from the checkpoint by the loader's own count
    from_disk: int
    peak_own: int
    peak_with_files: int

    @property
    def read_ratio(self) -> float:
        """Bytes read to the bytes stored."""
        return max(self.requested, self.from_disk) / self.stored

    @property
    def memory_ratio(self) -> float:
        """Peak memory to what is allowed: 1.15 times the weights, or 128 MiB more than the
        weights.
        """
        allowed = max(MEMORY_LIMIT * self.weights, self.weights + ALWAYS_ALLOWED)
        return max(self.peak_own, self.peak_with_files) / allowed


class MeasuredStage(StageActor):
    """A stage that measures its own process while it loads."""

    def _load(self) -> StageWorker:
        import torch

        torch.zeros(64).bfloat16().normal_().float()  # PyTorch's initial allocations are no weights
        before, read_before = _memory(), read_from_disk()
        started = time.perf_counter()
        with _sampled() as samples:
            worker = super()._load()
        seconds = time.perf_counter() - started
        read = read_from_disk() - read_before
        own, with_files = (
            max(each) - start
            for each, start in zip(zip(*samples, strict=True), before, strict=True)
        )
        size = self._plan.weight_bytes
        stored = sum(
            spec.stored_bytes(self._plan.args.dtype)
            for spec in stage_tensors(self._plan.args, self._plan.layers)
        )
        self._figures = Figures(seconds, size, stored, self._bytes_read, read, own, with_files)
        return worker

    def figures(self) -> Figures:
        return self._figures


@contextmanager
def _sampled() -> Iterator[list[tuple[int, int]]]:
    """Sample this process's memory until the block ends."""
    samples, stopped = [_memory()], threading.Event()

    def watch() -> None:
        while not stopped.wait(SAMPLE_EVERY_S):
            samples.append(_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    yield samples
    stopped.set()
    thread.join()
    samples.append(_memory())


def _memory() -> tuple[int, int]:
    """Return this process's bytes in memory: private ones, and these with mapped files."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    size = {
        words[0]: int(words[1]) * 1024 for words in lines if words[0] in ("RssAnon:", "RssFile:")
    }
    return size["RssAnon:"], size["RssAnon:"] + size["RssFile:"]


def plan_for(
    args: ModelArgs, num_stages: int, dtype: str, quantize: Quantization | None
) -> PipelinePlan:
    """Make a plan with a cache for one short sequence only, since caches are not measured."""
    return make_plan(
        args,
        PlanRequest((StageBudget(64 * GIB),) * num_stages, dtype, 64, 1, 16, quantize=quantize),
    )


def measure(plan: PipelinePlan, weights: WeightSource) -> list[Figures]:
    if isinstance(weights, Path):
        evict_page_cache(weights)
    settings = WorkerSettings(weights, "cpu", threads=1)
    stages = [
        remote_stage_class(MeasuredStage).options(num_cpus=1).remote(stage, settings)
        for stage in plan.stages
    ]
    wait_until_ready({str(number): stage for number, stage in enumerate(stages)})
    figures: list[Figures] = ray.get([stage.figures.remote() for stage in stages])
    for stage in stages:
        ray.kill(stage)
    return figures


def run(num_layers: int, num_stages: int) -> dict[str, list[Figures]]:
    with tempfile.TemporaryDirectory(prefix="tramontane-bench-") as home:
        folder = Path(home) / "model"
        say("writing a random checkpoint")
        write_model(folder, num_layers, Layout.HUGGING_FACE)
        args = read_model_args(folder)
        cases: dict[str, tuple[str, Quantization | None, WeightSource]] = {
            "as stored": (args.dtype, None, folder),
            "to float16": ("float16", None, folder),
            "in float32": ("float32", None, folder),
            "to int8": (args.dtype, Quantization.INT8, folder),
            "dummy": (args.dtype, None, RandomWeights()),
            "dummy in int8": (args.dtype, Quantization.INT8, RandomWeights()),
        }
        say("loading it")
        for module in (sys.modules[__name__], page_cache):  # actors cannot import benchmarks
            ray.cloudpickle.register_pickle_by_value(module)
        with local_ray_cluster(num_cpus=num_stages):
            return {
                name: measure(plan_for(args, num_stages, dtype, quantize), weights)
                for name, (dtype, quantize, weights) in cases.items()
            }


def table(figures: dict[str, list[Figures]]) -> Table:
    columns = ("loaded", "stage", "seconds", "MiB", "requested", "from disk", "peak, own")
    rows = [
        (
            *(name, f"{number}/{len(stages)}", f"{f.seconds:.1f}", f"{f.weights / 2**20:.0f}"),
            *(f"{read / f.stored:.3f}" for read in (f.requested, f.from_disk)),
            *(f"{peak / f.weights:.3f}" for peak in (f.peak_own, f.peak_with_files)),
        )
        for name, stages in figures.items()
        for number, f in enumerate(stages, start=1)
    ]
    return table_of((*columns, "with files"), rows)
