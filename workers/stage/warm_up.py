"""Steps that a stage on a GPU computes before it is ready, so that no request waits for one-time
work.

The first product of a shape loads its kernel from the library (CUDA loads modules when they are
first used), the first kernel of Triton's or Inductor's for a kind of arguments is compiled, and
memory is taken from the device. CUDA graphs do all that for decode-only steps; these steps do it
for prompts of every length, alone and next to decodes, and for sampling. Steps that return expert
choices replay no graph, so such steps are computed too.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from tramontane.proto.plan import CachePlan, StagePlan
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import NO_DECODES, Chunk, DecodeColumns, MicroBatch
from tramontane.workers.stage.piecewise_graphs import MAX_TOKENS

SHORTEST = 16  # tokens of a prompt
MAX_DECODES = 2  # decodes next to a prompt
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.95)


def warm_up_runs(plan: StagePlan, epoch: int) -> list[list[MicroBatch]]:
    """Return steps, in runs that each begin without sequences.

    Prompts of 16, 32, 64, ... tokens alone, then the longest in two chunks, then a part of it next
    to decodes. Where a sequence has room for 100 positions the prompts have 16, 32, 64 and 100
    tokens. For a model with experts, the steps that piecewise graphs would compute are repeated,
    each with a decode after it.
    """
    longest = _longest(plan)
    lengths = [
        *(
            length
            for length in (SHORTEST << n for n in range(longest.bit_length()))
            if length < longest
        ),
        longest,
    ]
    runs = [
        [_Run(plan.cache, epoch).step([(0, 0, length)], sampling)]
        for length in lengths
        for sampling in (GREEDY, SAMPLED)
    ]
    run, middle = _Run(plan.cache, epoch), max(longest // 2, 1)
    runs.append(
        [
            run.step([(0, *ends)], GREEDY)
            for ends in pairwise((0, middle, longest))
            if ends[0] < ends[1]
        ]
    )
    if decoding := tuple(
        range(min(MAX_DECODES, plan.max_num_seqs - 1, plan.max_num_batched_tokens - 1))
    ):
        run, ones = _Run(plan.cache, epoch), (1,) * len(decoding)
        first = run.step([(seq_id, 0, 1) for seq_id in decoding], GREEDY)
        runs.append(
            [
                first,
                run.step([(len(decoding), 0, middle)], GREEDY, DecodeColumns(decoding, ones, ones)),
            ]
        )
    if plan.args.moe is not None:
        choices = replace(GREEDY, return_experts=tuple(plan.layers))
        for length in (each for each in lengths if each <= MAX_TOKENS):
            run = _Run(plan.cache, epoch)
            decode = DecodeColumns((0,), (length - 1,), (1,))
            runs.append([run.step([(0, 0, length)], choices), run.step([], GREEDY, decode)])
    return runs


def _longest(plan: StagePlan) -> int:
    """Return the tokens of the longest prompt that is computed in one step: as many as this or a
    sequence has room for.
    """
    rooms = (
        each.ring_pages * plan.cache.page_size for each in plan.cache.classes if each.window is None
    )
    return min(plan.max_num_batched_tokens, plan.args.max_seq_len, *rooms)


class _Run:
    """Micro-batches of one run. Pages are taken in turn, and reused where there are too few: no
    result is used.
    """

    def __init__(self, cache: CachePlan, epoch: int) -> None:
        self._cache, self._epoch, self._num_steps = cache, epoch, 0
        self._num_taken = Counter[int]()  # pages, by window class

    def step(
        self,
        chunks: list[tuple[int, int, int]],
        sampling: SamplingParams,
        decodes: DecodeColumns = NO_DECODES,
    ) -> MicroBatch:
        """Return the next micro-batch. ``chunks``: sequence, start and end of each."""
        made = tuple(self._chunk(*each, sampling) for each in chunks)
        self._num_steps += 1
        return MicroBatch(self._epoch, self._num_steps - 1, made, decodes=decodes)

    def _chunk(self, seq_id: int, start: int, end: int, sampling: SamplingParams) -> Chunk:
        pages = []
        for number, each in enumerate(self._cache.classes):
            num_new = len(each.new_pages(start, end, self._cache.page_size))
            first = self._num_taken[number]
            self._num_taken[number] += num_new
            pages.append(tuple(page % each.num_pages for page in range(first, first + num_new)))
        return Chunk(
            seq_id,
            start,
            (0,) * (end - start),
            tuple(pages),
            None if start else sampling,
            needs_sample=True,
        )
