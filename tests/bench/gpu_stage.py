"""A whole model in one stage of this process, and sequences that run through it: what the rows of gpu.py drive."""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.proto.model_args import DTYPE_BYTES, ModelArgs, Quantization
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import StagePlan, kv_bytes_per_position
from tramontane.proto.presets import preset
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import NO_DECODES, Chunk, DecodeColumns, MicroBatch, StepResult
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.sequence import Sequence as Life
from tramontane.workers.stage.stage_worker import StageWorker

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
GIB = 2**30
MISTRAL_7B, MIXTRAL_8X7B = preset("mistral-7b-v0.1"), preset("mixtral-8x7b")


def shrunk(args: ModelArgs) -> ModelArgs:
    """The same kind of model, so small that a CPU runs it: to try the program, not to measure."""
    windows = tuple(window and window // 128 for window in args.windows[:4])
    heads = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 16}
    return replace(args, dim=64, n_layers=4, hidden_dim=96, vocab_size=256, windows=windows, **heads)


class UnavailableError(Exception):
    """What a row needs is not on this machine."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of each step: by the clock of whoever asks, and on the device, from when the step's inputs are there: without what
    the host prepares, with what the device waits for launches of a step that is not recorded.
    """

    whole: tuple[float, ...]
    device: tuple[float, ...]


@dataclass(slots=True)
class Runner:
    """Sequences of one stage that is the whole model."""

    worker: StageWorker
    ledger: PageAllocator
    lives: list[Life] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)  # each sequence's newest token
    num_steps: int = 0
    sampled: tuple[int, ...] = ()  # whose tokens the step under way brings

    @property
    def plan(self) -> StagePlan:
        return self.worker.plan

    def prefill(self, num_sequences: int, length: int, budget: int) -> float:
        """New sequences of so many random tokens, up to ``budget`` of them in a micro-batch; returns seconds."""
        self.clear()
        generator = torch.Generator().manual_seed(length)
        for seq_id in range(num_sequences):
            ids = torch.randint(0, self.plan.args.vocab_size, (length,), generator=generator).tolist()
            self.lives.append(Life(seq_id, tuple(ids), GREEDY, max_len=self.plan.args.max_seq_len))
            assert self.ledger.reserve_for_admission(self.lives[-1]), "the planned cache is too small for this row"
        began = time.perf_counter()
        for chunks in packed(self.lives, budget):
            self._take(self.worker.step(self._batch(tuple(self._chunk(*chunk) for chunk in chunks)), None))
        return time.perf_counter() - began

    def decode(self, num_steps: int) -> StepTimes:
        """So many tokens of every sequence, each step after the one before."""
        whole, device = [], []
        for _ in range(num_steps):
            began = time.perf_counter()
            starts = [life.num_dispatched for life in self.lives]
            pages = [self._grown(life, start + 1) for life, start in zip(self.lives, starts, strict=True)]
            new_pages = tuple((i, own) for i, own in enumerate(pages) if any(own))
            ids = tuple(life.seq_id for life in self.lives)
            decodes = DecodeColumns(ids, tuple(starts), tuple(self.last[i] for i in ids), new_pages)
            result = self.worker.step(self._batch((), decodes), None)
            self._take(result)
            whole.append(time.perf_counter() - began)
            assert isinstance(result, StepResult)
            device.append(result.timings[0].busy_s)
        return StepTimes(tuple(whole), tuple(device))

    def clear(self) -> None:
        for life in self.lives:
            self.ledger.release(life)
        self.lives, self.last, self.num_steps = [], {}, 0
        self.worker.fence(self.worker.epoch + 1)

    def live_bytes(self) -> float:
        """Of keys and values that a decode step of these sequences reads."""
        args = self.plan.args
        seen = sum(min(life.num_dispatched, window or life.num_dispatched) for life in self.lives for window in args.windows)
        return float(seen * kv_bytes_per_position(args, self.plan.dtype))

    def _chunk(self, life: Life, start: int, num_tokens: int) -> Chunk:
        ids, ends = life.prompt_ids[start : start + num_tokens], start + num_tokens == len(life.prompt_ids)
        return Chunk(life.seq_id, start, ids, self._grown(life, start + num_tokens), GREEDY if start == 0 else None, ends)

    def _grown(self, life: Life, num_positions: int) -> tuple[tuple[int, ...], ...]:
        assert self.ledger.reserve(life, num_positions), "the planned cache is too small for this row"
        life.num_dispatched = num_positions
        return self.ledger.allocate(life, num_positions)

    def _batch(self, chunks: tuple[Chunk, ...], decodes: DecodeColumns = NO_DECODES) -> MicroBatch:
        in_order = tuple(sorted(chunks, key=lambda chunk: chunk.num_tokens == 1))
        batch = MicroBatch(self.worker.epoch, self.num_steps, in_order, (), decodes)
        self.num_steps, self.sampled = self.num_steps + 1, batch.sampled_seq_ids
        return batch

    def _take(self, result: object) -> None:
        assert isinstance(result, StepResult)
        self.last |= dict(zip(self.sampled, result.token_ids, strict=True))


def packed(lives: Sequence[Life], budget: int) -> Iterator[list[tuple[Life, int, int]]]:
    """Prompts one after the other, cut where a micro-batch is full: (sequence, start, tokens).

    Two of 5 tokens, 4 at a time: [(a, 0, 4)], [(a, 4, 1), (b, 0, 3)], [(b, 3, 2)].
    """
    batch: list[tuple[Life, int, int]] = []
    room = budget
    for life in lives:
        start = 0
        while start < len(life.prompt_ids):
            num_tokens = min(room, len(life.prompt_ids) - start)
            batch.append((life, start, num_tokens))
            start, room = start + num_tokens, room - num_tokens
            if not room:
                yield batch
                batch, room = [], budget
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
) -> Iterator[Runner]:
    """A stage with random weights made in place, and as many pages as these sequences can hold. Its memory is given back."""
    args, dtype = replace(args, max_seq_len=max_len), dtype or args.dtype
    cache = max_num_seqs * sum(min(w or max_len, max_len) + 2 * page_size for w in args.windows)
    memory = int((_weight_room(args, dtype) + cache * kv_bytes_per_position(args, dtype)) * 1.3) + GIB
    request = PlanRequest((StageBudget(memory),), dtype, max_len, max_num_seqs, page_size, quantize=quantize)
    plan = make_plan(args, request)
    worker = StageWorker.load(plan.stages[0], RandomWeights(), device)
    runner = Runner(worker, PageAllocator(plan.cache))
    del worker
    try:
        yield runner
    finally:
        del runner.worker  # whoever was given the runner may hold it
        release_memory(device)


def release_memory(device: str) -> None:
    """Memory that nobody holds, to the device."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def _weight_room(args: ModelArgs, dtype: str) -> int:
    experts = args.moe.num_experts if args.moe else 1
    per_layer = args.dim * (args.head_dim * (2 * args.n_heads + 2 * args.n_kv_heads) + 3 * args.hidden_dim * experts)
    return DTYPE_BYTES[dtype] * (args.n_layers * per_layer + 2 * args.vocab_size * args.dim)


def weight_bytes_read(runner: Runner, experts_touched: float | None = None) -> float:
    """Of all matrices that a step multiplies with; of experts, on average, those that are touched in a layer."""
    total = 0.0
    for name, tensor in runner.worker.model.state_dict().items():
        if name.startswith("tok_embeddings"):
            continue  # a row per token
        of_expert = name.startswith("experts.") and runner.plan.args.moe is not None
        share = experts_touched / runner.plan.args.moe.num_experts if of_expert and experts_touched is not None else 1.0  # type: ignore[union-attr]
        total += share * tensor.numel() * tensor.element_size()
    return total
