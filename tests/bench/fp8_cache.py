"""Benchmark of a key/value cache in FP8: how far attention and logits are off, against the same in
float32.

    python tests/bench/fp8_cache.py [--text FILE] [--parts 8] [--json]

Attention: random queries, keys and values of heads of 128, 1024 keys, by the cache's own rounding,
and for comparison with scales that are powers of two and with one scale for all keys and one for
all values. Logits: the demo model over parts of 512 tokens of the held-out tenth of its text, or
without the text of its own greedy answers, and greedy answers until they differ. The arithmetic is
that of the machine's CPU; what a GPU reads of a cache are the same numbers.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from harness import random_ids, run_in_process
from quantization import CONTEXT, TEXT, held_out
from rich.table import Table
from stage_driver import teacher_forced
from targets import Target, at_least, at_most, conclude
from torch import Tensor

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.proto.model_folder import read_model_args
from tramontane.proto.plan import KvCacheDtype
from tramontane.proto.request import SamplingParams
from tramontane.proto.units import GIB
from tramontane.workers.attention.quantized_rows import FP8, PER_LARGEST, dequantize, quantize
from tramontane.workers.stage.stage_worker import StageWorker

QUERIES, KEYS, HEAD_DIM, TRIES = 16, 1024, 128, 20
PROMPT, NEW_TOKENS = 16, 64
CACHES: tuple[tuple[str, KvCacheDtype], ...] = (
    ("float32", "fp8"),
    ("bfloat16", "auto"),
    ("bfloat16", "fp8"),
)
EXACT = ("float32", "auto")
MAX_ATTENTION_ERROR, MAX_LOGITS_ERROR, MIN_AGREEMENT = 0.05, 0.05, 0.9
Inputs = tuple[Tensor, Tensor, Tensor]
Round = Callable[[Tensor], Tensor]


# ---- attention


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
    return dequantize(*quantize(x), torch.float32)


def round_by_powers(x: Tensor) -> Tensor:
    """Round with scales that are powers of two, of which one byte would be enough."""
    scales = (x.abs().amax(dim=-1, keepdim=True) * PER_LARGEST).log2().ceil().exp2()
    return (x / scales).to(FP8).float() * scales


def round_all(x: Tensor) -> Tensor:
    """Round with one scale for all, as after a calibration that was right."""
    scale = x.abs().max() * PER_LARGEST
    return (x / scale).to(FP8).float() * scale


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


def attention_error(make: Callable[[torch.Generator], Inputs], rounding: Round) -> float:
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


# ---- a trained model


@dataclass(frozen=True)
class Quality:
    """Of logits against those with caches in float32. ``parted_after``: new tokens until two greedy
    answers differ, a median.
    """

    relative_error: float
    largest_error: float
    agreement: float
    parted_after: float


def answers(
    prompts: Sequence[Sequence[int]], dtype: str, kv_cache_dtype: KvCacheDtype, new_tokens: int
) -> list[list[int]]:
    """Return greedy answers of the demo model."""
    args = read_model_args(DEMO_MODEL)
    request = PlanRequest(
        (StageBudget(2 * GIB),), dtype, CONTEXT, 8, 16, kv_cache_dtype=kv_cache_dtype
    )
    plan = make_plan(args, request)
    workers = [StageWorker.load(stage, DEMO_MODEL) for stage in plan.stages]
    return run_in_process(
        plan,
        workers,
        list(map(list, prompts)),
        SamplingParams(new_tokens, temperature=0.0, ignore_eos=True),
    )


def texts_of_demo(path: Path, num_parts: int) -> list[tuple[int, ...]]:
    """Return held-out text, or greedy answers of the model to random prompts where there is
    none.
    """
    if path.is_file():
        return held_out(path, num_parts)[0][:num_parts]
    prompts = [
        random_ids(PROMPT, seed, read_model_args(DEMO_MODEL).vocab_size)
        for seed in range(num_parts)
    ]
    found = answers(prompts, *EXACT, CONTEXT // 2)
    return [(*prompt, *answer) for prompt, answer in zip(prompts, found, strict=True)]


def quality(texts: Sequence[tuple[int, ...]]) -> dict[str, Quality]:
    """Return figures of each cache, by ``bfloat16, fp8`` and so on."""
    exact_TV = torch.cat([teacher_forced(DEMO_MODEL, ids, EXACT[0]) for ids in texts])
    prompts = [ids[:PROMPT] for ids in texts]
    exact_answers, found = answers(prompts, *EXACT, NEW_TOKENS), {}
    for dtype, kind in CACHES:
        logits_TV = torch.cat(
            [teacher_forced(DEMO_MODEL, ids, dtype, kv_cache_dtype=kind) for ids in texts]
        )
        error_TV = logits_TV.float() - exact_TV.float()
        pairs = zip(answers(prompts, dtype, kind, NEW_TOKENS), exact_answers, strict=True)
        parted = [
            next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), NEW_TOKENS)
            for pair in pairs
        ]
        found[f"{dtype}, {kind}"] = Quality(
            relative_error=float(error_TV.norm() / exact_TV.norm()),
            largest_error=float(error_TV.abs().max()),
            agreement=float((logits_TV.argmax(-1) == exact_TV.argmax(-1)).float().mean()),
            parted_after=statistics.median(parted),
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument(
        "--parts", type=int, default=8, help="parts of 512 tokens, at most as many as the text has"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    attention = {
        name: {kind: attention_error(make, rounding) for kind, rounding in ROUNDINGS.items()}
        for name, make in INPUTS.items()
    }
    texts = texts_of_demo(options.text, options.parts)
    model = quality(texts)
    targets: list[Target] = []
    for name, errors in attention.items():
        error = errors["a scale for each vector"]
        targets.append(at_most(f"attention, {name}: off by", error, MAX_ATTENTION_ERROR, "%"))
    for name in ("float32, fp8", "bfloat16, fp8"):
        targets.append(
            at_most(
                f"demo model, {name}: logits off by",
                model[name].relative_error,
                MAX_LOGITS_ERROR,
                "%",
            )
        )
        targets.append(
            at_least(
                f"demo model, {name}: same best token", model[name].agreement, MIN_AGREEMENT, "%"
            )
        )
    num_tokens = sum(map(len, texts))
    table = Table("keys", *ROUNDINGS)
    for name, errors in attention.items():
        table.add_row(name, *(f"{error:.2%}" for error in errors.values()))
    logits = Table(
        f"demo model, {num_tokens} tokens",
        "logits off by",
        "at most",
        "same best token",
        "answers differ after",
    )
    for name, each in model.items():
        cells = (
            f"{each.relative_error:.2%}",
            f"{each.largest_error:.2f}",
            f"{each.agreement:.2%}",
            f"{each.parted_after:.0f}",
        )
        logits.add_row(name, *cells)
    figures = {
        "attention": attention,
        "tokens": num_tokens,
        "demo": {name: asdict(each) for name, each in model.items()},
    }
    conclude(targets, table, logits, data=figures, as_json=options.json)


if __name__ == "__main__":
    main()
