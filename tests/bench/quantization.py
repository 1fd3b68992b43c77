"""Benchmark of int8 and fp8 weights, and of int8 activations: quality, memory and speed.

    python tests/bench/quantization.py [--text FILE] [--parts 1000] [--rounds 5]

Quality: the demo model, teacher-forced over the held-out tenth of its text, and a random small
Mixtral; both against the same model in float32. The fp8 arithmetic of GPUs is computed on the CPU.
Memory: bytes of the weights, and how many GPUs of 24 GiB published models need.
Speed: greedy decoding in one process with one thread, in alternating rounds; medians relative to
bfloat16 in the same round. Quality and memory have targets, speed has none.
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
from targets import Target, at_most, conclude
from torch import Tensor
from torch.nn import functional as F

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.proto.errors import PlanError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import Layout, read_model_args
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.presets import PRESETS, preset, tiny_variant
from tramontane.proto.request import SamplingParams
from tramontane.proto.units import GIB
from tramontane.proto.weight_format import Quantization
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.workers.kernels import quantized_linear
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights import loader
from tramontane.workers.weights.random_checkpoint import write_random_checkpoint

INT8, W8A8, FP8 = Quantization.INT8, Quantization.W8A8, Quantization.FP8


@dataclass(frozen=True)
class Precision:
    """``fp8_activations``: the products of a GPU with fp8 arithmetic, whose activations are fp8,
    too, except for few tokens.
    """

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
        choose = quantized_linear.QuantizedKernels(
            quantized_linear.dequantized_linear, quantized_linear.fp8_linear
        ).choose

        def product(x_TK: Tensor, numbers_NK: Tensor, scale_N: Tensor) -> Tensor:
            return choose(len(x_TK))(x_TK, numbers_NK, scale_N)

        with (
            patch.object(loader, "pack_linears", lambda *_: {}),
            patch.object(quantized_linear, "dequantized_linear", product),
        ):
            yield


EXACT, HALF = Precision("float32"), Precision("bfloat16")
PRECISIONS = (
    EXACT,
    Precision("float32", INT8),
    Precision("float32", W8A8),
    Precision("float32", FP8),
    HALF,
    Precision("bfloat16", INT8),
    Precision("bfloat16", W8A8),
    Precision("bfloat16", FP8),
)
ON_GPU = Precision("bfloat16", FP8, fp8_activations=True)
TEXT = Path(__file__).parents[3] / "shared" / "data" / "tinyshakespeare.txt"
console = Console(width=120)
CONTEXT, PROMPT, NEW_TOKENS = 512, 16, 64
MAX_WEIGHT_BYTES = 0.55  # of those in bfloat16
MAX_BITS = 1.001  # per token, of those in float32
MAX_INT8_ERROR, MAX_FP8_ERROR = 1.5, 4.0  # of the error of bfloat16, of that of int8; w8a8 as fp8
# One layer of Mistral 7B with a small vocabulary: large enough that the bytes of its weights
# matter.
LAYER = replace(
    preset("mistral-7b-v0.1"), n_layers=1, windows=(4096,), vocab_size=1024, max_seq_len=CONTEXT
)


# ---- quality


@dataclass(frozen=True)
class Quality:
    """Quality of a model against the same one in float32. ``parted_after``: new tokens until two
    greedy texts differ.
    """

    bits_per_token: float
    relative_error: float
    largest_error: float
    agreement: float
    parted_after: float

    def cells(self, bytes_per_token: float | None) -> list[str]:
        bits = f"{self.bits_per_token / bytes_per_token:.4f}" if bytes_per_token else ""
        errors = f"{self.relative_error:.2%}", f"{self.largest_error:.2f}"
        return [bits, *errors, f"{self.agreement:.2%}", f"{self.parted_after:.0f} of {NEW_TOKENS}"]


def quality(folder: Path, texts: Sequence[tuple[int, ...]]) -> dict[Precision, Quality]:
    exact = [teacher_forced(folder, ids, EXACT.dtype) for ids in texts]
    prompts = [ids[:PROMPT] for ids in texts]
    exact_outputs = LoadedModel(folder, EXACT).generate(prompts)
    found = {}
    for precision in (*PRECISIONS, ON_GPU):
        with precision.products():
            logits = [
                teacher_forced(folder, ids, precision.dtype, precision.quantize) for ids in texts
            ]
            outputs = LoadedModel(folder, precision).generate(prompts)
        parted = [
            _common_prefix_len(ours, theirs)
            for ours, theirs in zip(outputs, exact_outputs, strict=True)
        ]
        found[precision] = _compare(texts, logits, exact, statistics.median(parted))
    return found


def _compare(
    texts: Sequence[tuple[int, ...]], logits: list[Tensor], exact: list[Tensor], parted_after: float
) -> Quality:
    ours_TV, exact_TV = (
        torch.cat([each[:-1] for each in logits]),
        torch.cat([each[:-1] for each in exact]),
    )
    nats = F.cross_entropy(ours_TV, torch.tensor([token for ids in texts for token in ids[1:]]))
    error_TV = ours_TV - exact_TV
    return Quality(
        bits_per_token=nats.item() / math.log(2),
        relative_error=(error_TV.norm() / exact_TV.norm()).item(),
        largest_error=error_TV.abs().max().item(),
        agreement=(ours_TV.argmax(-1) == exact_TV.argmax(-1)).float().mean().item(),
        parted_after=parted_after,
    )


def _common_prefix_len(ours: list[int], theirs: list[int]) -> int:
    """Return the length of the common prefix of two texts: 2 for [1, 2, 3] and [1, 2, 4]."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


def held_out(path: Path, num_parts: int) -> tuple[list[tuple[int, ...]], float]:
    """Return token ids of the last tenth of the demo model's text, in parts, and the bytes per
    token.
    """
    text = path.read_text(encoding="utf-8")
    rest = text[len(text) * 9 // 10 :]
    ids = SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model").encode(rest)[1:]
    pieces = [(1, *ids[start : start + CONTEXT - 1]) for start in range(0, len(ids), CONTEXT - 1)]
    return pieces[:: max(len(pieces) // num_parts, 1)], len(rest.encode()) / len(ids)


def show_quality(path: Path, num_parts: int, small: Path) -> Iterator[Target]:
    table = Table(
        "model",
        "weights",
        "bits/byte",
        "logits off by",
        "at most",
        "same best token",
        "texts part after",
    )
    small_args = read_model_args(small)
    random = [tuple(random_ids(CONTEXT, seed, small_args.vocab_size)) for seed in range(4)]
    models: list[tuple[str, Path, Sequence[tuple[int, ...]], float | None]] = [
        ("random Mixtral", small, random, None)
    ]
    if path.is_file():
        models.insert(0, ("demo", DEMO_MODEL, *held_out(path, num_parts)))
    else:
        print(f"{path} does not exist (see --text): the demo model's quality is not measured")
    for name, folder, texts, bytes_per_token in models:
        found = quality(folder, texts)
        for precision, figures in found.items():
            table.add_row(name, str(precision), *figures.cells(bytes_per_token))
        yield from quality_targets(name, found)
    console.print(table)


def quality_targets(name: str, found: dict[Precision, Quality]) -> Iterator[Target]:
    """Compare int8 with rounding to bfloat16, w8a8 and fp8 with int8, and all with float32 by bits
    per token.
    """
    int8, half = found[Precision("float32", INT8)].relative_error, found[HALF].relative_error
    yield at_most(f"{name}, int8: logits off by, of bfloat16", int8 / half, MAX_INT8_ERROR, "x")
    for quantize in (W8A8, FP8):
        ratio = found[Precision("float32", quantize)].relative_error / int8
        yield at_most(f"{name}, {quantize}: logits off by, of int8", ratio, MAX_FP8_ERROR, "x")
    for quantize in (INT8, W8A8, FP8):
        bits = found[Precision("float32", quantize)].bits_per_token / found[EXACT].bits_per_token
        yield at_most(f"{name}, {quantize}: bits, of float32", bits, MAX_BITS, "x")


# ---- memory


def fewest_gpus(args: ModelArgs, precision: Precision) -> PipelinePlan:
    """Return the plan with the fewest GPUs of 24 GiB that can hold one sequence of full length."""
    for number in range(1, args.n_layers + 1):
        try:
            budgets = (StageBudget(24 * GIB),) * number
            return make_plan(
                args,
                PlanRequest(
                    budgets, precision.dtype, args.max_seq_len, 64, 16, quantize=precision.quantize
                ),
            )
        except PlanError:
            continue
    raise AssertionError("a layer does not fit on a GPU")


def show_memory() -> Iterator[Target]:
    table = Table("model", "weights", "GiB of weights", "GPUs of 24 GiB")
    models = {"demo": read_model_args(DEMO_MODEL)} | {
        name: preset(name) for name in ("mistral-7b-v0.1", "mixtral-8x7b")
    }
    for name, args in models.items():
        gib = {}
        for precision in (HALF, Precision("bfloat16", INT8), Precision("bfloat16", FP8)):
            plan = fewest_gpus(args, precision)
            gib[precision] = sum(stage.weight_bytes for stage in plan.stages) / GIB
            table.add_row(name, str(precision), f"{gib[precision]:.4g}", str(len(plan.stages)))
            if precision != HALF:
                ratio = gib[precision] / gib[HALF]
                yield at_most(
                    f"{name}, {precision.quantize}: bytes of weights, of bfloat16",
                    ratio,
                    MAX_WEIGHT_BYTES,
                    "x",
                )
    console.print(table)


# ---- speed


class LoadedModel:
    """A checkpoint in one stage in this process."""

    def __init__(self, folder: Path, precision: Precision) -> None:
        args, quantize = read_model_args(folder), precision.quantize
        self.plan = make_plan(
            args,
            PlanRequest(
                (StageBudget(8 * GIB),), precision.dtype, CONTEXT, 8, 16, quantize=quantize
            ),
        )
        self.workers = [StageWorker.load(stage, folder) for stage in self.plan.stages]

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS
    ) -> list[list[int]]:
        sampling = SamplingParams(new_tokens, temperature=0.0, ignore_eos=True)
        ids = [list(prompt) for prompt in prompts]
        return run_in_process(self.plan, self.workers, ids, sampling, max_in_flight=1)

    def tokens_per_s(self, num_prompts: int, new_tokens: int) -> float:
        prompts = [random_ids(1, seed, self.plan.args.vocab_size) for seed in range(num_prompts)]
        started = time.perf_counter()
        self.generate(prompts, new_tokens)
        return num_prompts * new_tokens / (time.perf_counter() - started)


def show_speed(models: dict[str, tuple[Path, int]], rounds: int) -> None:
    """Print speeds; ``models`` has by name the folder and the number of tokens to generate in a
    round.
    """
    table = Table("model", "sequences", *map(str, PRECISIONS), "bfloat16: tokens/s")
    for name, (folder, new_tokens) in models.items():
        loaded = {precision: LoadedModel(folder, precision) for precision in PRECISIONS}
        for num_prompts in (1, 8):
            results = [
                {
                    precision: model.tokens_per_s(num_prompts, new_tokens)
                    for precision, model in loaded.items()
                }
                for _ in range(rounds + 1)
            ][1:]  # the first one warms up
            half = statistics.median(speeds[HALF] for speeds in results)
            ratios = [
                statistics.median(speeds[precision] / speeds[HALF] for speeds in results)
                for precision in PRECISIONS
            ]
            table.add_row(
                name, str(num_prompts), *(f"{ratio:.2f} x" for ratio in ratios), f"{half:.1f}"
            )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument(
        "--parts",
        type=int,
        default=1000,
        help="minimum number of parts of 512 tokens, if the text has so many",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds of the speed measurement; 0 skips it"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # as a stage with its own core
    with tempfile.TemporaryDirectory() as folder:
        small, layer = Path(folder, "small"), Path(folder, "layer")
        write_random_checkpoint(small, tiny_variant(PRESETS["mixtral-8x7b"]), Layout.HUGGING_FACE)
        write_random_checkpoint(layer, LAYER, Layout.HUGGING_FACE)
        targets = [*show_memory(), *show_quality(options.text, options.parts, small)]
        if options.rounds:
            show_speed(
                {"demo": (DEMO_MODEL, NEW_TOKENS), "a layer of Mistral 7B": (layer, 8)},
                options.rounds,
            )
    conclude(targets)


if __name__ == "__main__":
    main()
