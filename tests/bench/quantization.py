"""Benchmark of weights and activations in int8 and fp8, and of a key/value cache in FP8.

    python tests/bench/quantization.py weights [--text FILE] [--parts 1000] [--rounds 5]
    python tests/bench/quantization.py cache [--text FILE] [--parts 8]

Both have ``--json``, and compare with the same in float32. The arithmetic is that of the machine's
CPU; what a GPU reads of a cache are the same numbers.

**Weights**: quality, memory and speed. Quality: the demo model, teacher-forced over the held-out
tenth of its text, and a random small Mixtral. The fp8 arithmetic of GPUs is computed on the CPU.
Memory: bytes of the weights, and how many GPUs of 24 GiB published models need. Speed: greedy
decoding in one process with one thread, in alternating rounds; medians relative to bfloat16 in the
same round. Quality and memory have targets, speed has none.

**Cache**: how far attention and logits are off. Attention: random queries, keys and values of heads
of 128, 1024 keys, by the cache's own rounding, and for comparison with scales that are powers of
two and with one scale for all keys and one for all values. Logits: the demo model over parts of 512
tokens of the held-out tenth of its text, or without the text of its own greedy answers, and greedy
answers until they differ.
"""

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from bench_parts import Part, Report, conclude_part, say, table_of
from harness import random_ids, run_in_process
from rich.table import Table
from stage_driver import teacher_forced
from targets import Target, at_least, at_most
from torch import Tensor
from torch.nn import functional as F

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.proto.errors import PlanError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import Layout, read_model_args
from tramontane.proto.plan import KvCacheDtype, PipelinePlan
from tramontane.proto.presets import PRESETS, preset, tiny_variant
from tramontane.proto.request import SamplingParams
from tramontane.proto.units import GIB
from tramontane.proto.weight_format import Quantization
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.workers.attention.quantized_rows import FP8 as CACHE_FP8
from tramontane.workers.attention.quantized_rows import PER_LARGEST, dequantize
from tramontane.workers.attention.quantized_rows import quantize as quantize_rows
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
CONTEXT, PROMPT, NEW_TOKENS = 512, 16, 64
MAX_WEIGHT_BYTES = 0.55  # of those in bfloat16
MAX_BITS = 1.001  # per token, of those in float32
MAX_INT8_ERROR, MAX_FP8_ERROR = 1.5, 4.0  # of the error of bfloat16, of that of int8; w8a8 as fp8
QUERIES, KEYS, HEAD_DIM, TRIES = 16, 1024, 128, 20
CACHES: tuple[tuple[str, KvCacheDtype], ...] = (
    ("float32", "fp8"),
    ("bfloat16", "auto"),
    ("bfloat16", "fp8"),
)
MAX_ATTENTION_ERROR, MAX_LOGITS_ERROR, MIN_AGREEMENT = 0.05, 0.05, 0.9
Inputs = tuple[Tensor, Tensor, Tensor]
Make, Round = Callable[[torch.Generator], Inputs], Callable[[Tensor], Tensor]
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

    COLUMNS = ("logits off by", "at most", "same best token", "texts part after")

    def cells(self, bytes_per_token: float | None) -> list[str]:
        bits = f"{self.bits_per_token / bytes_per_token:.4f}" if bytes_per_token else ""
        errors = f"{self.relative_error:.2%}", f"{self.largest_error:.2f}"
        return [bits, *errors, f"{self.agreement:.2%}", f"{self.parted_after:.0f} of {NEW_TOKENS}"]


def quality(folder: Path, texts: Sequence[tuple[int, ...]]) -> dict[Precision, Quality]:
    exact, found = Exact(folder, texts), {}
    for precision in (*PRECISIONS, ON_GPU):
        with precision.products():
            found[precision] = exact.compare(precision.dtype, quantize=precision.quantize)
    return found


class Exact:
    """Texts and greedy answers of a model in float32, with which others are compared."""

    def __init__(self, folder: Path, texts: Sequence[tuple[int, ...]]) -> None:
        self._folder, self._texts = folder, texts
        self._logits_TV = self._logits(EXACT.dtype)
        self._answers = self._generate(EXACT.dtype)

    def compare(self, dtype: str, **formats: Any) -> Quality:
        """Return the quality of the same model in other formats."""
        ours_TV, exact_TV = self._logits(dtype, **formats), self._logits_TV
        following = torch.tensor([token for ids in self._texts for token in ids[1:]])
        nats, error_TV = F.cross_entropy(ours_TV, following), ours_TV - exact_TV
        pairs = zip(self._generate(dtype, **formats), self._answers, strict=True)
        return Quality(
            bits_per_token=nats.item() / math.log(2),
            relative_error=(error_TV.norm() / exact_TV.norm()).item(),
            largest_error=error_TV.abs().max().item(),
            agreement=(ours_TV.argmax(-1) == exact_TV.argmax(-1)).float().mean().item(),
            parted_after=statistics.median(_common_prefix_len(*pair) for pair in pairs),
        )

    def _logits(self, dtype: str, **formats: Any) -> Tensor:
        logits = [teacher_forced(self._folder, ids, dtype, **formats) for ids in self._texts]
        return torch.cat([each[:-1].float() for each in logits])

    def _generate(self, dtype: str, **formats: Any) -> list[list[int]]:
        return LoadedModel(self._folder, dtype, **formats).generate(
            [ids[:PROMPT] for ids in self._texts]
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


def measure_quality(path: Path, num_parts: int, small: Path) -> tuple[Table, list[Target]]:
    small_args = read_model_args(small)
    random = [tuple(random_ids(CONTEXT, seed, small_args.vocab_size)) for seed in range(4)]
    models: list[tuple[str, Path, Sequence[tuple[int, ...]], float | None]] = [
        ("random Mixtral", small, random, None)
    ]
    if path.is_file():
        models.insert(0, ("demo", DEMO_MODEL, *held_out(path, num_parts)))
    else:
        say(f"{path} does not exist (see --text): the demo model's quality is not measured")
    rows, targets = [], list[Target]()
    for name, folder, texts, bytes_per_token in models:
        found = quality(folder, texts)
        targets += quality_targets(name, found)
        rows += [(name, key, *each.cells(bytes_per_token)) for key, each in found.items()]
    return table_of(("model", "weights", "bits/byte", *Quality.COLUMNS), rows), targets


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


def measure_memory() -> tuple[Table, list[Target]]:
    rows, targets = [], []
    models = {"demo": read_model_args(DEMO_MODEL)} | {
        name: preset(name) for name in ("mistral-7b-v0.1", "mixtral-8x7b")
    }
    for name, args in models.items():
        gib = {}
        for precision in (HALF, Precision("bfloat16", INT8), Precision("bfloat16", FP8)):
            plan = fewest_gpus(args, precision)
            gib[precision] = sum(stage.weight_bytes for stage in plan.stages) / GIB
            rows.append((name, precision, f"{gib[precision]:.4g}", len(plan.stages)))
            if precision != HALF:
                what = f"{name}, {precision.quantize}: bytes of weights, of bfloat16"
                ratio = gib[precision] / gib[HALF]
                targets.append(at_most(what, ratio, MAX_WEIGHT_BYTES, "x"))
    return table_of(("model", "weights", "GiB of weights", "GPUs of 24 GiB"), rows), targets


# ---- speed


class LoadedModel:
    """A checkpoint in one stage in this process."""

    def __init__(self, folder: Path, dtype: str, **formats: Any) -> None:
        request = PlanRequest((StageBudget(8 * GIB),), dtype, CONTEXT, 8, 16, **formats)
        self.plan = make_plan(read_model_args(folder), request)
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


def measure_speed(models: dict[str, tuple[Path, int]], rounds: int) -> Table:
    """Return speeds; ``models`` has by name the folder and the number of tokens to generate in a
    round.
    """
    rows = []
    for name, (folder, new_tokens) in models.items():
        loaded = {
            each: LoadedModel(folder, each.dtype, quantize=each.quantize) for each in PRECISIONS
        }
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
            rows.append((name, num_prompts, *(f"{each:.2f} x" for each in ratios), f"{half:.1f}"))
    return table_of(("model", "sequences", *map(str, PRECISIONS), "bfloat16: tokens/s"), rows)


def weights(options: argparse.Namespace) -> Report:
    """quality, memory and speed of int8 and fp8 weights"""
    torch.set_num_threads(1)  # as a stage with its own core
    with tempfile.TemporaryDirectory() as folder:
        small, layer = Path(folder, "small"), Path(folder, "layer")
        write_random_checkpoint(small, tiny_variant(PRESETS["mixtral-8x7b"]), Layout.HUGGING_FACE)
        write_random_checkpoint(layer, LAYER, Layout.HUGGING_FACE)
        memory, of_memory = measure_memory()
        table, of_quality = measure_quality(options.text, options.parts, small)
        tables = [memory, table]
        if options.rounds:
            models = {"demo": (DEMO_MODEL, NEW_TOKENS), "a layer of Mistral 7B": (layer, 8)}
            tables.append(measure_speed(models, options.rounds))
    return Report([*of_memory, *of_quality], tables)


# ---- cache


def normal(generator: torch.Generator) -> Inputs:
    """Return queries, keys and values of normal numbers."""
    q, k, v = (torch.randn(rows, HEAD_DIM, generator=generator) for rows in (QUERIES, KEYS, KEYS))
    return q, k, v


def with_outliers(generator: torch.Generator) -> Inputs:
    """Return inputs whose keys have two channels that are 20 times as large, one of which is seldom
    near 0.
    """
    q, k, v = normal(generator)
    k[:, [7, 71]] *= 20
    k[:, 7] += 20
    return 0.3 * q, k, v


def of_unlike_tokens(generator: torch.Generator) -> Inputs:
    """Return inputs in which sizes of elements of keys, and of channels of values, differ by powers
    of e.
    """
    q, k, v = normal(generator)
    return (
        q,
        k * torch.randn(k.shape, generator=generator).exp(),
        v * torch.randn(HEAD_DIM, generator=generator).exp(),
    )


def round_by_vector(x: Tensor) -> Tensor:
    """Round as the cache does."""
    return dequantize(*quantize_rows(x), torch.float32)


def round_by_powers(x: Tensor) -> Tensor:
    """Round with scales that are powers of two, of which one byte would be enough."""
    scales = (x.abs().amax(dim=-1, keepdim=True) * PER_LARGEST).log2().ceil().exp2()
    return (x / scales).to(CACHE_FP8).float() * scales


def round_all(x: Tensor) -> Tensor:
    """Round with one scale for all, as after a calibration that was right."""
    scale = x.abs().max() * PER_LARGEST
    return (x / scale).to(CACHE_FP8).float() * scale


INPUTS = {
    "normal": normal,
    "two large channels": with_outliers,
    "of unlike sizes": of_unlike_tokens,
}
ROUNDINGS: dict[str, Round] = {
    "a scale for each vector": round_by_vector,
    "powers of two": round_by_powers,
    "one scale for all": round_all,
}


def attention_error(
    make: Callable[[torch.Generator], Inputs], rounding: Callable[[Tensor], Tensor]
) -> float:
    """Return the relative error of attention, by norms, the mean of several tries."""
    generator, errors = torch.Generator().manual_seed(0), []
    for _ in range(TRIES):
        q, k, v = make(generator)
        pairs = (k, v), (rounding(k), rounding(v))
        exact, found = (
            torch.softmax(q @ keys.T / HEAD_DIM**0.5, -1) @ values for keys, values in pairs
        )
        errors.append(float((found - exact).norm() / exact.norm()))
    return statistics.mean(errors)


def texts_of_demo(path: Path, num_parts: int) -> list[tuple[int, ...]]:
    """Return held-out text, or greedy answers of the model to random prompts where there is
    none.
    """
    if path.is_file():
        return held_out(path, num_parts)[0][:num_parts]
    model = LoadedModel(DEMO_MODEL, EXACT.dtype)
    prompts = [random_ids(PROMPT, seed, model.plan.args.vocab_size) for seed in range(num_parts)]
    answers = model.generate(prompts, CONTEXT // 2)
    return [(*prompt, *answer) for prompt, answer in zip(prompts, answers, strict=True)]


def cache_quality(texts: Sequence[tuple[int, ...]]) -> dict[str, Quality]:
    """Return figures of each cache, by ``bfloat16, fp8`` and so on."""
    exact = Exact(DEMO_MODEL, texts)
    return {f"{dtype}, {kind}": exact.compare(dtype, kv_cache_dtype=kind) for dtype, kind in CACHES}


def cache(options: argparse.Namespace) -> Report:
    """how far attention and logits are off with a cache in FP8"""
    torch.set_num_threads(1)
    attention = {
        name: {kind: attention_error(make, rounding) for kind, rounding in ROUNDINGS.items()}
        for name, make in INPUTS.items()
    }
    texts = texts_of_demo(options.text, options.parts)
    model, num_tokens = cache_quality(texts), sum(map(len, texts))
    targets: list[Target] = []
    for name, errors in attention.items():
        error = errors["a scale for each vector"]
        targets.append(at_most(f"attention, {name}: off by", error, MAX_ATTENTION_ERROR, "%"))
    for name in ("float32, fp8", "bfloat16, fp8"):
        found, row = model[name], f"demo model, {name}"
        targets += [
            at_most(f"{row}: logits off by", found.relative_error, MAX_LOGITS_ERROR, "%"),
            at_least(f"{row}: same best token", found.agreement, MIN_AGREEMENT, "%"),
        ]
    errors = [(name, *(f"{each:.2%}" for each in row.values())) for name, row in attention.items()]
    logits = [(name, *each.cells(None)[1:]) for name, each in model.items()]
    tables = [
        table_of(("keys", *ROUNDINGS), errors),
        table_of((f"demo model, {num_tokens} tokens", *Quality.COLUMNS), logits),
    ]
    demo = {name: asdict(each) for name, each in model.items()}
    return Report(targets, tables, {"attention": attention, "tokens": num_tokens, "demo": demo})


AT_LEAST = "minimum number of parts of 512 tokens, if the text has so many"
AT_MOST = "parts of 512 tokens, at most as many as the text has"
PARTS = {
    "weights": Part(
        weights,
        {
            "--text": TEXT,
            "--parts": {"default": 1000, "help": AT_LEAST},
            "--rounds": {"default": 5, "help": "rounds of the speed measurement; 0 skips it"},
        },
    ),
    "cache": Part(cache, {"--text": TEXT, "--parts": {"default": 8, "help": AT_MOST}}),
}


def main() -> None:
    conclude_part(__doc__, PARTS)


if __name__ == "__main__":
    main()
