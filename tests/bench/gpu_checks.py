"""Checks that the GPU computes what the CPU does: rows of gpu_rows.py that pass or fail."""

import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from gpu_stage import GREEDY, MISTRAL_7B, Runner, UnavailableError, running, shrunk
from reference import reference_attention
from torch import Tensor

from tramontane.proto.model_args import ModelArgs, MoeArgs
from tramontane.proto.plan import CachePlan, WindowClass, ring_pages
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.workers.attention.backend import DecodeKernel, PrefillKernel
from tramontane.workers.attention.metadata import (
    DecodeMetadata,
    PrefillMetadata,
    build_attention_metadata,
)
from tramontane.workers.attention.rolling_cache import LayerCache, StageSequences
from tramontane.workers.sampling.token_sampler import SampledRows, SampledTokens
from tramontane.workers.stage.cuda_graphs import padded_rows
from tramontane.workers.stage.piecewise_graphs import MAX_TOKENS, piece_sizes
from tramontane.workers.weights import loader, random_checkpoint
from tramontane.workers.weights.random_checkpoint import random_pieces
from tramontane.workers.weights.tensor_specs import TensorSpec

MAX_DIFFERENCE = 2e-2  # relative, by norms
HEADS, SMALL_HEADS, HEAD_DIM = (32, 8), (4, 1), 128  # of queries and of keys
PAGE_SIZES = (16, 64)
TRIED_PARTS = (1, 4, 32)  # of the keys of a token: each takes seconds to compile
# (start, tokens) of chunks: first and later ones, shorter and longer than the windows
CHUNKS = [(0, 700), (90, 2), (3000, 250), (4100, 33)]
BATCHES = (1, 3, 8, 9, 16, 17)
PIECE_LENGTHS = (5, 32, 33, 100, 250)  # of two prompts
POSITIONS = [0, 1, 15, 16, 63, 1000, 4095, 4096, 5001]


@dataclass(frozen=True, slots=True)
class Check:
    """A check, which holds if ``figure`` is below ``limit``."""

    name: str
    figure: float
    limit: float
    detail: str = ""

    @property
    def holds(self) -> bool:
        return self.figure < self.limit  # also false for NaN


def relative(out: Tensor, expected: Tensor) -> float:
    return float(
        (out.double().cpu() - expected.double().cpu()).norm() / expected.double().cpu().norm()
    )


def logits_check(device: str, small: bool) -> Iterator[Check]:
    """Compare logits of prompts and decodes: in the checkpoint's 16 bits on the device, in float32
    on the CPU.

    If two experts' scores are nearly equal, a gate may choose the other one, and that row's logits
    are different. Models with experts are therefore checked by the median row, and the share of
    rows that differ is a separate check.
    """
    dense = four_layers(small)
    sparse = replace(dense, moe=MoeArgs(8, 2), hidden_dim=dense.hidden_dim // 4)
    for name, args in (("dense", dense), ("experts", sparse)):
        both = zip(
            _logits(args, device, "bfloat16", device),
            _logits(args, "cpu", "float32", device),
            strict=True,
        )
        for job, (out_SV, expected_SV) in zip(("prefill", "decode"), both, strict=True):
            title = f"logits, {name}, {job}: 16 bits against float32 on the CPU"
            rows = torch.tensor([relative(*row) for row in zip(out_SV, expected_SV, strict=True)])
            if args.moe is None:
                yield Check(title, relative(out_SV, expected_SV), MAX_DIFFERENCE)
            else:
                yield Check(f"{title}, median row", float(rows.median()), MAX_DIFFERENCE)
                yield Check(
                    f"{title}, rows that differ",
                    float((~(rows <= MAX_DIFFERENCE)).float().mean()),
                    0.6,
                )


def four_layers(small: bool) -> ModelArgs:
    return (
        shrunk(MISTRAL_7B)
        if small
        else replace(MISTRAL_7B, n_layers=4, windows=(64, None, 64, None))
    )


def _logits(args: ModelArgs, device: str, dtype: str, drawn_on: str) -> tuple[Tensor, Tensor]:
    """Return logits of sixteen prompts of 50 tokens, and of the last of 20 decodes with tokens
    independent of sampling.

    Weights are drawn on one device for all models, because devices have different random numbers
    and a GPU draws them fast.
    """

    def pieces(spec: TensorSpec, stored: str, _device: str) -> Iterator[Tensor]:
        return (piece.to(device) for piece in random_pieces(spec, stored, drawn_on))

    with (
        patch.object(random_checkpoint, "random_pieces", pieces),
        patch.object(loader, "pack_linears", lambda *_: {}),  # on CPUs: multiplied by PyTorch
        running(args, device, max_num_seqs=16, max_len=256, dtype=dtype) as runner,
    ):
        runner.prefill(16, 50, 1024)
        with recorded_logits(runner) as logits:
            runner.prefill(16, 50, 1024)
            for step in range(20):
                runner.last = {
                    each.seq_id: (7 * step + 11 * each.seq_id) % args.vocab_size
                    for each in runner.sequences
                }
                runner.decode(1)
        return logits[0], logits[-1]


@contextmanager
def recorded_logits(runner: Runner) -> Iterator[list[Tensor]]:
    """Record the logits of every step that samples, on the CPU."""
    sampler, recorded = runner.worker.last_stage.token_sampler, list[Tensor]()
    sample = sampler.sample

    def record(logits_SV: Tensor, rows: SampledRows) -> SampledTokens:
        recorded.append(logits_SV.float().cpu())
        return sample(logits_SV, rows)

    with patch.object(sampler, "sample", record):
        yield recorded


def mask_checks(device: str, small: bool) -> Iterator[Check]:
    """Compare the attention kernels with the reference for every window and page size, on new
    random numbers.

    The worst kernel of this machine counts. It is a failure if there is none.
    """
    from tramontane.workers.attention.triton_decode import VARIANTS, SplitKDecode
    from tramontane.workers.attention.varlen_backend import VarlenPrefill
    from tramontane.workers.attention.xformers_backend import prefill_kernels

    heads = SMALL_HEADS if small else HEADS
    decodes = {
        f"split-K of {block} keys in {parts} parts, {warps} warps, {stages} stages": SplitKDecode(
            heads[1], block, parts, warps, stages
        )
        for block, warps, stages in VARIANTS
        for parts in TRIED_PARTS
    }
    for window in (None, 16, 1024, 4096):
        tried = {
            name: _tried(partial(_prefill, kernel, window, heads, device))
            for name, kernel in ({"varlen": VarlenPrefill()} | prefill_kernels()).items()
        }
        yield _worst(f"mask: prefill, window {window}", tried)
        for page_size in PAGE_SIZES:
            tried = {
                name: _tried(partial(_decode, k, window, page_size, heads, device))
                for name, k in decodes.items()
            }
            yield _worst(f"mask: decode, window {window}, pages of {page_size}", tried)


def _tried(difference: Callable[[], float]) -> float | str:
    """Return the difference, or the reason why the kernel is not available."""
    try:
        return difference()
    # raised by xformers for unsupported inputs
    except (NotImplementedError, ValueError, ImportError) as error:
        return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()[:60]
    except Exception as error:
        print(error, file=sys.stderr)
        return float("nan")


def _badness(figure: float) -> float:
    """Return the key by which the worst figure is found: NaN is the worst, but ``max`` would ignore
    it.
    """
    return math.inf if math.isnan(figure) else figure


def _worst(title: str, tried: dict[str, float | str]) -> Check:
    figures = {name: figure for name, figure in tried.items() if isinstance(figure, float)}
    refusals = "; ".join(f"{name}: {why}" for name, why in tried.items() if isinstance(why, str))
    worst = max(figures, key=lambda name: _badness(figures[name])) if figures else ""
    detail = f"worst: {worst}; " if worst else ""
    return Check(
        title,
        figures.get(worst, float("inf")),
        MAX_DIFFERENCE,
        f"{detail}{len(figures)} tried; {refusals}",
    )


def _prefill(
    kernel: PrefillKernel, window: int | None, heads: tuple[int, int], device: str
) -> float:
    prefill, _ = _indexes(CHUNKS, window, 16, device)
    assert prefill is not None
    q, k, v = (
        torch.randn(sum(lens), count, HEAD_DIM, dtype=torch.bfloat16, device=device)
        for lens, count in (
            (prefill.query_lens, heads[0]),
            (prefill.key_lens, heads[1]),
            (prefill.key_lens, heads[1]),
        )
    )
    blocks = zip(
        q.split(prefill.query_lens),
        k.split(prefill.key_lens),
        v.split(prefill.key_lens),
        strict=True,
    )
    return relative(
        kernel.attend(q, k, v, kernel.build_mask(prefill)),
        torch.cat([reference_attention(*b, window) for b in blocks]),
    )


def _decode(
    kernel: DecodeKernel, window: int | None, page_size: int, heads: tuple[int, int], device: str
) -> float:
    _, index = _indexes([(position, 1) for position in POSITIONS], window, page_size, device)
    assert index is not None
    num_rows = (int(index.ring.pages_BR.max()) + 2) * page_size
    cached = LayerCache.zeros((num_rows, heads[1], HEAD_DIM), torch.bfloat16, torch.device(device))
    cached.k_NGd.normal_()
    cached.v_NGd.normal_()
    q = torch.randn(len(POSITIONS), heads[0], HEAD_DIM, dtype=torch.bfloat16, device=device)
    expected = []
    for token, position in enumerate(POSITIONS):
        positions = torch.arange(
            0 if window is None else max(position - window + 1, 0), position + 1, device=device
        )
        rows = index.ring.rows(torch.full_like(positions, token), positions)
        expected.append(
            reference_attention(q[token, None], cached.k_NGd[rows], cached.v_NGd[rows], window)
        )
    return relative(kernel.attend(q, cached, kernel.build_mask(index)), torch.cat(expected))


def _indexes(
    chunks: list[tuple[int, int]], window: int | None, page_size: int, device: str
) -> tuple[PrefillMetadata | None, DecodeMetadata | None]:
    """Return what a stage builds for these chunks, each of a different sequence, with pages in
    random order.
    """
    ring = ring_pages(window, page_size, 8192)
    table = StageSequences(
        CachePlan(page_size, (WindowClass(window, ring, ring * len(chunks)),)),
        len(chunks),
        torch.device(device),
    )
    mixed = torch.randperm(ring * len(chunks)).tolist()
    pages = [(tuple(mixed[ring * i : ring * (i + 1)]),) for i in range(len(chunks))]
    past = tuple(
        Chunk(i, 0, (0,) * start, pages[i], GREEDY, False)
        for i, (start, _) in enumerate(chunks)
        if start
    )
    now = tuple(
        Chunk(i, start, (0,) * n, ((),) if start else pages[i], None if start else GREEDY, False)
        for i, (start, n) in enumerate(chunks)
    )
    table.update(MicroBatch(0, 0, past))
    table.update(batch := MicroBatch(0, 1, now))
    index = build_attention_metadata(batch, table, torch.device(device))
    return index.prefill[0], index.decode[0]


def replay_check(device: str, small: bool) -> Iterator[Check]:
    """Compare logits of CUDA graphs with those of eager steps, for fixed tokens: the worst of
    several batch sizes.
    """
    with running(four_layers(small), device, max_num_seqs=17, max_len=512) as runner:
        backend, worst = runner.worker.backend, 0.0
        for batch in BATCHES:
            replayed = forced_logits(runner, batch)
            graphs, runner.worker.graphs = runner.worker.graphs, None
            differences = (
                relative(a, b) for a, b in zip(replayed, forced_logits(runner, batch), strict=True)
            )
            worst = max(worst, *differences, key=_badness)
            runner.worker.graphs = graphs
        yield Check("CUDA graphs: logits against eager steps, at worst", worst, MAX_DIFFERENCE)
        if backend.graph_capture is not None:
            captured_sizes = (
                {num_rows for num_rows, _ in graphs.sizes} if graphs is not None else set()
            )
            missing = {padded_rows(batch) for batch in BATCHES} - captured_sizes
            yield Check("CUDA graphs: sizes that could not be captured", float(len(missing)), 1.0)


def forced_logits(runner: Runner, batch: int) -> list[Tensor]:
    runner.prefill(batch, 100, 1024)
    with recorded_logits(runner) as logits:
        for step in range(12):
            vocab_size = runner.plan.args.vocab_size
            runner.last = {
                each.seq_id: (5 * step + 3 * each.seq_id) % vocab_size for each in runner.sequences
            }
            runner.decode(1)
    return logits


def pieces_check(device: str, small: bool) -> Iterator[Check]:
    """Compare the logits of prompts by piecewise CUDA graphs with those of eager steps, at worst of
    several lengths.
    """
    with running(four_layers(small), device, max_num_seqs=5, max_len=512) as runner:
        worker, worst = runner.worker, 0.0
        for length in PIECE_LENGTHS:
            replayed = prompt_logits(runner, length)
            pieces, worker.pieces = worker.pieces, None
            differences = (
                relative(a, b) for a, b in zip(replayed, prompt_logits(runner, length), strict=True)
            )
            worst = max(worst, *differences, key=_badness)
            worker.pieces = pieces
        yield Check(
            "piecewise CUDA graphs: logits of prompts against eager steps, at worst",
            worst,
            MAX_DIFFERENCE,
        )
        if worker.backend.piecewise_capture is not None:
            missing = set(piece_sizes(MAX_TOKENS)) - set(pieces.sizes if pieces is not None else ())
            yield Check(
                "piecewise CUDA graphs: sizes that could not be captured", float(len(missing)), 1.0
            )


def prompt_logits(runner: Runner, length: int) -> list[Tensor]:
    """Return the logits of the ends of two prompts in one step."""
    with recorded_logits(runner) as logits:
        runner.prefill(2, length, 2 * length)
    return logits


def sanitizer_check() -> Iterator[Check]:
    """Count the errors that compute-sanitizer finds in a small model, its masks and its CUDA
    graphs.
    """
    if shutil.which("compute-sanitizer") is None:
        raise UnavailableError("compute-sanitizer is not installed")
    program = [
        sys.executable,
        str(Path(__file__).with_name("gpu_rows.py")),
        "--small",
        "--only",
        "masks,replay,pieces",
    ]
    done = subprocess.run(
        ["compute-sanitizer", *program], capture_output=True, text=True, check=False, timeout=400
    )
    if (summary := re.search(r"ERROR SUMMARY: (\d+) error", done.stdout + done.stderr)) is None:
        raise RuntimeError((done.stdout + done.stderr).strip().splitlines()[-1])
    yield Check("compute-sanitizer: errors of masks and CUDA graphs", float(summary[1]), 1.0)
    if done.returncode:
        raise RuntimeError(
            f"{Path(program[1]).name} exited with status {done.returncode} under compute-sanitizer"
        )
