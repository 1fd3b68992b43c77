"""A complete model in one stage of this process, and sequences that run through it: the engine of
the rows of gpu_rows.py.
"""

import gc
import time
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import StagePlan, kv_bytes_per_position
from tramontane.proto.presets import preset
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import (
    NO_DECODES,
    PLACEHOLDER_TOKEN,
    Chunk,
    DecodeColumns,
    MicroBatch,
    StepResult,
)
from tramontane.proto.weight_format import DTYPE_BYTES, Quantization
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.sequence import Sequence
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.stage.step_record import PendingStep

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
GIB = 2**30
MISTRAL_7B, MIXTRAL_8X7B = preset("mistral-7b-v0.1"), preset("mixtral-8x7b")


def shrunk(args: ModelArgs) -> ModelArgs:
    """Return a model of the same kind that is small enough for a CPU: to try the program, not to
    measure.
    """
    windows = tuple(window and window // 128 for window in args.windows[:4])
    heads = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 16}
    return replace(
        args, dim=64, n_layers=4, hidden_dim=96, vocab_size=256, windows=windows, **heads
    )


class UnavailableError(Exception):
    """The row needs something that this machine does not have."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of each step.

    ``whole`` is by the caller's clock. ``device`` starts when the step's inputs are on the device:
    it does not include the host's preparation, but it includes waits of the device for launches of
    a step without a CUDA graph.
    """

    whole: tuple[float, ...]
    device: tuple[float, ...]


@dataclass(slots=True)
class Runner:
    """Runs sequences through one stage that is the complete model."""

    worker: StageWorker
    allocator: PageAllocator
    sequences: list[Sequence] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)  # each sequence's newest token
    num_steps: int = 0
    sampled: tuple[int, ...] = ()  # sequences that get a token from the current step

    @property
    def plan(self) -> StagePlan:
        return self.worker.plan

    @property
    def room(self) -> int:
        """Return how many more tokens the longest sequence may have, which is few with a small
        model.
        """
        return self.plan.args.max_seq_len - max(
            sequence.num_dispatched for sequence in self.sequences
        )

    def prefill(self, num_sequences: int, length: int, budget: int) -> float:
        """Start sequences of ``length`` random tokens, up to ``budget`` tokens in a micro-batch;
        returns seconds.
        """
        self.clear()
        self.add_sequences(num_sequences, length)
        began = time.perf_counter()
        for chunks in packed(self.sequences, budget):
            self._complete(
                self.worker.step(self._batch(tuple(self._chunk(*chunk) for chunk in chunks)), None)
            )
        return time.perf_counter() - began

    def add_sequences(self, num_sequences: int, length: int) -> None:
        """Add sequences of ``length`` random tokens."""
        generator = torch.Generator().manual_seed(length)
        for seq_id in range(num_sequences):
            ids = torch.randint(
                0, self.plan.args.vocab_size, (length,), generator=generator
            ).tolist()
            self.sequences.append(
                Sequence(seq_id, tuple(ids), GREEDY, max_len=self.plan.args.max_seq_len)
            )
            assert self.allocator.reserve_for_admission(self.sequences[-1]), (
                "the planned cache is too small for this row"
            )

    def decode(self, num_steps: int, *, ahead: bool = False) -> StepTimes:
        """Decode ``num_steps`` tokens of every sequence, one step after the other.

        ``ahead``: each step is launched before the one before it has been read, as with
        asynchronous scheduling. A time is then that from one result to the next.
        """
        whole, device, open_steps = list[float](), list[float](), deque[PendingStep]()
        began = time.perf_counter()
        for number in range(num_steps + ahead):
            if number < num_steps:
                open_steps.append(
                    self.worker.launch(
                        self._batch((), self._decodes(are_known=not open_steps)), None
                    )
                )
            if number < ahead:
                continue
            result = open_steps.popleft().read()
            self._complete(result)
            before, began = began, time.perf_counter()
            whole.append(began - before)
            assert isinstance(result, StepResult)
            device.append(result.timings[0].busy_s)
        return StepTimes(tuple(whole), tuple(device))

    def _decodes(self, *, are_known: bool) -> DecodeColumns:
        """Return a row of every sequence, with its last token if that has been read."""
        starts = [sequence.num_dispatched for sequence in self.sequences]
        pages = [
            self._grow(sequence, start + 1)
            for sequence, start in zip(self.sequences, starts, strict=True)
        ]
        ids = tuple(sequence.seq_id for sequence in self.sequences)
        tokens = tuple(self.last[i] if are_known else PLACEHOLDER_TOKEN for i in ids)
        return DecodeColumns(
            ids, tuple(starts), tokens, tuple((i, own) for i, own in enumerate(pages) if any(own))
        )

    def clear(self) -> None:
        for sequence in self.sequences:
            self.allocator.release(sequence)
        self.sequences, self.last, self.num_steps = [], {}, 0
        self.worker.fence(self.worker.epoch + 1)

    def live_bytes(self) -> float:
        """Return the bytes of keys and values that a decode step of these sequences reads."""
        args = self.plan.args
        lengths = [sequence.num_dispatched for sequence in self.sequences]
        visible = sum(
            min(length, window or length) for length in lengths for window in args.windows
        )
        return float(
            visible * kv_bytes_per_position(args, self.plan.dtype, 0, self.plan.kv_cache_dtype)
        )

    def _chunk(self, sequence: Sequence, start: int, num_tokens: int) -> Chunk:
        ids, ends = (
            sequence.prompt_ids[start : start + num_tokens],
            start + num_tokens == len(sequence.prompt_ids),
        )
        pages = self._grow(sequence, start + num_tokens)
        return Chunk(sequence.seq_id, start, ids, pages, GREEDY if start == 0 else None, ends)

    def _grow(self, sequence: Sequence, num_positions: int) -> tuple[tuple[int, ...], ...]:
        assert self.allocator.reserve(sequence, num_positions), (
            "the planned cache is too small for this row"
        )
        start, sequence.num_dispatched = sequence.num_dispatched, num_positions
        return self.allocator.allocate(sequence, start, num_positions)

    def _batch(self, chunks: tuple[Chunk, ...], decodes: DecodeColumns = NO_DECODES) -> MicroBatch:
        in_order = tuple(sorted(chunks, key=lambda chunk: chunk.num_tokens == 1))
        batch = MicroBatch(self.worker.epoch, self.num_steps, in_order, (), decodes)
        self.num_steps, self.sampled = self.num_steps + 1, batch.sampled_seq_ids
        return batch

    def _complete(self, result: object) -> None:
        assert isinstance(result, StepResult)
        self.last |= dict(zip(self.sampled, result.token_ids, strict=True))


def packed(sequences: Seq[Sequence], budget: int) -> Iterator[list[tuple[Sequence, int, int]]]:
    """Pack prompts into micro-batches of ``budget`` tokens, as lists of (sequence, start, tokens).

    Two of 5 tokens, 4 at a time: [(a, 0, 4)], [(a, 4, 1), (b, 0, 3)], [(b, 3, 2)].
    """
    batch: list[tuple[Sequence, int, int]] = []
    left = budget
    for sequence in sequences:
        start = 0
        while start < len(sequence.prompt_ids):
            num_tokens = min(left, len(sequence.prompt_ids) - start)
            batch.append((sequence, start, num_tokens))
            start, left = start + num_tokens, left - num_tokens
            if not left:
                yield batch
                batch, left = [], budget
    if batch:
        yield batch


@contextmanager
def running(
    args: ModelArgs,
    device: str,
    *,
    max_num_seqs: int,
    max_len: int,
    page_size: int = 16,
    dtype: str | None = None,
    quantize: Quantization | None = None,
    batch_invariant: bool | None = None,
) -> Iterator[Runner]:
    """Load a stage with random weights and with pages for ``max_num_seqs`` sequences; its memory is
    freed afterwards.
    """
    args, dtype = replace(args, max_seq_len=max_len), dtype or args.dtype
    memory = (
        int(
            (
                _weight_bytes(args, dtype)
                + _cache_bytes(args, dtype, max_num_seqs, max_len, page_size)
            )
            * 1.3
        )
        + GIB
    )
    budgets = (StageBudget(memory),)
    request = PlanRequest(
        budgets,
        dtype,
        max_len,
        max_num_seqs,
        page_size,
        quantize=quantize,
        batch_invariant=batch_invariant,
    )
    plan = make_plan(args, request)
    worker = StageWorker.load(plan.stages[0], RandomWeights(), device)
    runner = Runner(worker, PageAllocator(plan.cache))
    del worker
    try:
        yield runner
    finally:
        del runner.worker  # the caller may keep the runner
        release_memory(device)


def release_memory(device: str) -> None:
    """Collect garbage and return cached memory to a GPU; on a CPU, where models are small, leave
    both as they are.
    """
    if device != "cpu":
        gc.collect()
        torch.cuda.empty_cache()


def that_fits(
    args: ModelArgs, free_bytes: int, max_num_seqs: int, max_len: int
) -> tuple[ModelArgs, Quantization | None]:
    """Return the model as it is, in fp8, or the largest half, quarter and so on of its layers in
    fp8 that fits into memory.

    Mixtral 8x7B with 64 sequences of 1280 tokens needs 87.0 GiB and 10.3 of cache, in fp8 43.5, and
    4 GiB are for the rest: on 80 GiB it runs in fp8, and on 40 GiB half of it.
    """
    halves = range(args.n_layers.bit_length())  # 32 layers, 16, 8, 4, 2, 1
    tries = [(args.n_layers, None), *[(args.n_layers >> half, Quantization.FP8) for half in halves]]
    for num_layers, quantize in tries:
        part = replace(args, n_layers=num_layers, windows=args.windows[:num_layers])
        weights = _weight_bytes(part, args.dtype) // (DTYPE_BYTES[args.dtype] if quantize else 1)
        if (
            weights + _cache_bytes(part, args.dtype, max_num_seqs, max_len, 16) + 4 * GIB
            <= free_bytes
        ):
            return part, quantize
    raise UnavailableError(
        f"{free_bytes / GIB:.1f} GiB of memory are free, which is too few for one layer"
    )


def _cache_bytes(
    args: ModelArgs, dtype: str, max_num_seqs: int, max_len: int, page_size: int
) -> int:
    positions = max_num_seqs * sum(min(w or max_len, max_len) + 2 * page_size for w in args.windows)
    return positions * kv_bytes_per_position(args, dtype)


def _weight_bytes(args: ModelArgs, dtype: str) -> int:
    experts = args.moe.num_experts if args.moe else 1
    per_layer = args.dim * (
        args.head_dim * (2 * args.n_heads + 2 * args.n_kv_heads) + 3 * args.hidden_dim * experts
    )
    return DTYPE_BYTES[dtype] * (args.n_layers * per_layer + 2 * args.vocab_size * args.dim)


def weight_bytes_read(runner: Runner, experts_touched: float | None = None) -> float:
    """Return the bytes of all matrices that a step reads; of experts only the mean number used per
    layer, if given.
    """
    total = 0.0
    for name, tensor in runner.worker.model.state_dict().items():
        if name.startswith("tok_embeddings"):
            continue  # a step reads one row per token
        of_expert = name.startswith("experts.") and runner.plan.args.moe is not None
        share = (
            experts_touched / runner.plan.args.moe.num_experts
            if of_expert and experts_touched is not None
            else 1.0
        )  # type: ignore[union-attr]
        total += share * tensor.numel() * tensor.element_size()
    return total
