"""What int8 and fp8 weights cost in quality, and what they save in memory and time.

    python tests/bench/quantization.py [--text FILE] [--parts 1000] [--rounds 5]

Quality: the demo model, teacher-forced over the tenth of its text that it was not trained on, and a random small Mixtral;
both against the same model in float32. Where a GPU multiplies in fp8, that arithmetic is done here, on a CPU.
Memory: what a stage holds, and how many GPUs of 24 GiB published models need.
Speed: greedy decoding in one process, on one thread, in rounds that alternate; medians, relative to bfloat16 in the same round.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from harness import random_ids, run_in_process
from rich.console import Console
from rich.table import Table
from stage_driver import teacher_forced
from torch import Tensor
from torch.nn import functional as F

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.proto.byte_size import GIB
from tramontane.proto.errors import PlanError
from tramontane.proto.model_args import ModelArgs, Quantization
from tramontane.proto.model_folder import Layout, read_model_args
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.presets import PRESETS, preset, tiny_variant
from tramontane.proto.request import SamplingParams
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.workers.kernels import quantized_linear
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights.random_checkpoint import write_random_checkpoint

INT8, FP8 = Quantization.INT8, Quantization.FP8


@dataclass(frozen=True)
class Way:
    """``fp8_activations``: the products of a GPU that multiplies in fp8, with activations as fp8, too, beyond a few tokens."""

    dtype: str
    quantize: Quantization | None = None
    fp8_activations: bool = False

    def __str__(self) -> str:
        quantize = f", {self.quantize}" if self.quantize else ""
        return f"{self.dtype}{quantize}{' and activations' if self.fp8_activations else ''}"

    @contextmanager
    def products(self) -> Iterator[None]:
        if not self.fp8_activations:
            yield
            return
        choose = quantized_linear.QuantizedKernels(quantized_linear.dequantized_linear, quantized_linear.fp8_linear).choose
        with patch.object(quantized_linear, "_cpu_product", lambda x_TK, _numbers_NK: choose(len(x_TK))):
            yield


EXACT, HALF = Way("float32"), Way("bfloat16")
WAYS = EXACT, Way("float32", INT8), Way("float32", FP8), HALF, Way("bfloat16", INT8), Way("bfloat16", FP8)
ON_GPU = Way("bfloat16", FP8, fp8_activations=True)
TEXT = Path(__file__).parents[3] / "shared" / "data" / "tinyshakespeare.txt"
shown = Console(width=120)
CONTEXT, PROMPT, NEW_TOKENS = 512, 16, 64
# One layer of Mistral 7B and few words: so large that it matters how many bytes its weights have.
LAYER = replace(preset("mistral-7b-v0.1"), n_layers=1, windows=(4096,), vocab_size=1024, max_seq_len=CONTEXT)


# ---- quality


@dataclass(frozen=True)
class Quality:
    """Of a model against the same one in float32. ``parted_after``: new tokens until two greedy texts part."""

    bits_per_token: float
    relative_error: float
    largest_error: float
    agreement: float
    parted_after: float

    def cells(self, bytes_per_token: float | None) -> list[str]:
        bits = f"{self.bits_per_token / bytes_per_token:.4f}" if bytes_per_token else ""
        errors = f"{self.relative_error:.2%}", f"{self.largest_error:.2f}"
        return [bits, *errors, f"{self.agreement:.2%}", f"{self.parted_after:.0f} of {NEW_TOKENS}"]


def quality(folder: Path, texts: Sequence[tuple[int, ...]]) -> dict[Way, Quality]:
    exact = [teacher_forced(folder, ids, EXACT.dtype) for ids in texts]
    prompts = [ids[:PROMPT] for ids in texts]
    freely = Loaded(folder, EXACT).continued(prompts)
    found = {}
    for way in (*WAYS, ON_GPU):
        with way.products():
            logits = [teacher_forced(folder, ids, way.dtype, way.quantize) for ids in texts]
            free = Loaded(folder, way).continued(prompts)
        parted = [_shared(ours, theirs) for ours, theirs in zip(free, freely, strict=True)]
        found[way] = _compared(texts, logits, exact, statistics.median(parted))
    return found


def _compared(texts: Sequence[tuple[int, ...]], logits: list[Tensor], exact: list[Tensor], parted_after: float) -> Quality:
    ours_TV, exact_TV = torch.cat([each[:-1] for each in logits]), torch.cat([each[:-1] for each in exact])
    nats = F.cross_entropy(ours_TV, torch.tensor([token for ids in texts for token in ids[1:]]))
    off_TV = ours_TV - exact_TV
    return Quality(
        bits_per_token=nats.item() / math.log(2),
        relative_error=(off_TV.norm() / exact_TV.norm()).item(),
        largest_error=off_TV.abs().max().item(),
        agreement=(ours_TV.argmax(-1) == exact_TV.argmax(-1)).float().mean().item(),
        parted_after=parted_after,
    )


def _shared(ours: list[int], theirs: list[int]) -> int:
    """How many tokens two texts have in common from their beginning: [1, 2, 3] and [1, 2, 4] have 2."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


def held_out(path: Path, num_parts: int) -> tuple[list[tuple[int, ...]], float]:
    """Token ids of the last tenth of the demo model's text in pieces, and the bytes that a token stands for."""
    text = path.read_text(encoding="utf-8")
    rest = text[len(text) * 9 // 10 :]
    ids = SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model").encode(rest)[1:]
    pieces = [(1, *ids[start : start + CONTEXT - 1]) for start in range(0, len(ids), CONTEXT - 1)]
    return pieces[:: max(len(pieces) // num_parts, 1)], len(rest.encode()) / len(ids)


def show_quality(path: Path, num_parts: int, small: Path) -> None:
    table = Table("model", "weights", "bits/byte", "logits off by", "at most", "same best token", "texts part after")
    small_args = read_model_args(small)
    random = [tuple(random_ids(CONTEXT, seed, small_args.vocab_size)) for seed in range(4)]
    models: list[tuple[str, Path, Sequence[tuple[int, ...]], float | None]] = [("random Mixtral", small, random, None)]
    if path.is_file():
        models.insert(0, ("demo", DEMO_MODEL, *held_out(path, num_parts)))
    else:
        print(f"{path} is not there (give --text): the demo model's quality is not measured")
    for name, folder, texts, bytes_per_token in models:
        for way, found in quality(folder, texts).items():
            table.add_row(name, str(way), *found.cells(bytes_per_token))
    shown.print(table)


# ---- memory


def fewest_gpus(args: ModelArgs, way: Way) -> PipelinePlan:
    """The plan with the fewest GPUs of 24 GiB that can hold one sequence of full length."""
    for number in range(1, args.n_layers + 1):
        try:
            rooms = (StageBudget(24 * GIB),) * number
            return make_plan(args, PlanRequest(rooms, way.dtype, args.max_seq_len, 64, 16, quantize=way.quantize))
        except PlanError:
            continue
    raise AssertionError("a layer has no room on a GPU")


def show_memory() -> None:
    table = Table("model", "weights", "GiB of weights", "GPUs of 24 GiB")
    models = {"demo": read_model_args(DEMO_MODEL)} | {name: preset(name) for name in ("mistral-7b-v0.1", "mixtral-8x7b")}
    for name, args in models.items():
        for way in (HALF, Way("bfloat16", INT8), Way("bfloat16", FP8)):
            plan = fewest_gpus(args, way)
            gib = sum(stage.weight_bytes for stage in plan.stages) / GIB
            table.add_row(name, str(way), f"{gib:.4g}", str(len(plan.stages)))
    shown.print(table)


# ---- speed


class Loaded:
    """A checkpoint in one stage in this process."""

    def __init__(self, folder: Path, way: Way) -> None:
        args = read_model_args(folder)
        self.plan = make_plan(args, PlanRequest((StageBudget(8 * GIB),), way.dtype, CONTEXT, 8, 16, quantize=way.quantize))
        self.workers = [StageWorker.load(stage, folder) for stage in self.plan.stages]

    def continued(self, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
        sampling = SamplingParams(new_tokens, temperature=0.0, ignore_eos=True)
        ids = [list(prompt) for prompt in prompts]
        return run_in_process(self.plan, self.workers, ids, sampling, max_in_flight=1)

    def tokens_per_s(self, num_prompts: int, new_tokens: int) -> float:
        prompts = [random_ids(1, seed, self.plan.args.vocab_size) for seed in range(num_prompts)]
        started = time.perf_counter()
        self.continued(prompts, new_tokens)
        return num_prompts * new_tokens / (time.perf_counter() - started)


def show_speed(models: dict[str, tuple[Path, int]], rounds: int) -> None:
    """By name: the folder and how many tokens to make in a round."""
    table = Table("model", "sequences", *map(str, WAYS), "bfloat16: tokens/s")
    for name, (folder, new_tokens) in models.items():
        loaded = {way: Loaded(folder, way) for way in WAYS}
        for num_prompts in (1, 8):
            turns = [
                {way: each.tokens_per_s(num_prompts, new_tokens) for way, each in loaded.items()} for _ in range(rounds + 1)
            ][1:]  # the first one warms up
            half = statistics.median(speeds[HALF] for speeds in turns)
            relative = {way: statistics.median(speeds[way] / speeds[HALF] for speeds in turns) for way in WAYS}
            table.add_row(name, str(num_prompts), *(f"{relative[way]:.2f} x" for way in WAYS), f"{half:.1f}")
    shown.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--parts", type=int, default=1000, help="at least so many pieces of 512 tokens, if there are")
    parser.add_argument("--rounds", type=int, default=5, help="of the speed; 0: not measured")
    options = parser.parse_args()
    torch.set_num_threads(1)  # what a stage has when each has a core
    with tempfile.TemporaryDirectory() as folder:
        small, layer = Path(folder, "small"), Path(folder, "layer")
        write_random_checkpoint(small, tiny_variant(PRESETS["mixtral-8x7b"]), Layout.HUGGING_FACE)
        write_random_checkpoint(layer, LAYER, Layout.HUGGING_FACE)
        show_memory()
        show_quality(options.text, options.parts, small)
        if options.rounds:
            show_speed({"demo": (DEMO_MODEL, NEW_TOKENS), "a layer of Mistral 7B": (layer, 8)}, options.rounds)


if __name__ == "__main__":
    main()
