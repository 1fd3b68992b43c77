"""Drafts of a draft model on one worker: those of a model with the large one's weights are all
right, wherever they begin.
"""

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from examples import examples
from harness import random_ids, run_prompts, scheduler_for
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ATTENTION_KINDS, random_model, split_model, tiny_args, tiny_plan

from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import DraftRequest, MicroBatch
from tramontane.workers.sampling.token_sampler import SampledRows, SampledTokens
from tramontane.workers.stage import draft_model
from tramontane.workers.stage.draft_model import DraftModel
from tramontane.workers.stage.hidden_states import StageOutput
from tramontane.workers.stage.stage_worker import StageWorker

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None, reason="without kernels in C other rows have other roundings"
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True)
CUT = replace(SEEDED, temperature=1.0, top_p=0.9, top_k=40, min_p=0.01, seed=6, choice=2)
TINY = tiny_args(n_layers=1, window=8, moe=False, max_seq_len=64)


def _plan(
    kind: str,
    page_size: int = 16,
    max_num_seqs: int = 8,
    num_drafts: int = 4,
    max_num_batched_tokens: int = 512,
) -> PipelinePlan:
    return tiny_plan(
        ATTENTION_KINDS[kind],
        1,
        page_size,
        max_num_seqs,
        num_drafts=num_drafts,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def _worker(plan: PipelinePlan) -> StageWorker:
    return split_model(random_model(plan.args), plan)[0]


def _tiny(max_num_seqs: int = 2, page_size: int = 4, **changes: int) -> DraftModel:
    return DraftModel(_worker(tiny_plan(TINY, 1, page_size, max_num_seqs, **changes)))


def _begin(seq_id: int, token_ids: Sequence[int] = (1, 2, 3), num_tokens: int = 3) -> DraftRequest:
    return DraftRequest(seq_id, 0, tuple(token_ids), num_tokens, GREEDY)


def _continue(
    seq_id: int, num_kept: int, token_ids: Sequence[int] = (4,), num_tokens: int = 3
) -> DraftRequest:
    return DraftRequest(seq_id, num_kept, tuple(token_ids), num_tokens, GREEDY)


# ---- the large model's tokens


PROMPTS = [tuple(random_ids(length, seed)) for seed, length in enumerate((1, 16, 40, 70, 25, 7))]
WISHES = (GREEDY, SEEDED, CUT, replace(SEEDED, seed=None), replace(GREEDY, choice=1), SEEDED)


@cache
def _answers(kind: str) -> list[tuple[int, ...]]:
    """Return what a large model of two stages answers to each prompt."""
    plan = tiny_plan(ATTENTION_KINDS[kind], 2)
    chain = LocalStageChain(split_model(random_model(plan.args), plan))
    try:
        return [
            tuple(asyncio.run(run_prompts(chain, scheduler_for(plan), [list(prompt)], wish))[0])
            for prompt, wish in zip(PROMPTS, WISHES, strict=True)
        ]
    finally:
        chain.close()


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_a_model_with_the_same_weights_drafts_the_large_models_tokens(
    kind: str, page_size: int
) -> None:
    model, answers = DraftModel(_worker(_plan(kind, page_size))), _answers(kind)
    others = replace(
        WISHES[0],
        presence_penalty=1.0,
        logit_bias=((3, 90.0),),
        stop_token_ids=(1, 2),
        min_tokens=9,
        logprobs=2,
    )
    wishes = (others, *WISHES[1:])  # none of these changes what is drafted
    numbered = list(enumerate(zip(PROMPTS, wishes, strict=True)))
    drafts = model.draft(
        [DraftRequest(i, 0, prompt, 5 + i, wish) for i, (prompt, wish) in numbered]
    )
    assert drafts == [answers[i][: 5 + i] for i in range(len(PROMPTS))]
    # All drafts are right, and one more token is known; then the last two are wrong after all.
    drafts = model.draft(
        [DraftRequest(i, len(p) + 5 + i, answers[i][5 + i : 6 + i], 4, w) for i, (p, w) in numbered]
    )
    assert drafts == [answers[i][6 + i : 10 + i] for i in range(len(PROMPTS))]
    drafts = model.draft([DraftRequest(i, len(p) + 8 + i, (), 25, w) for i, (p, w) in numbered])
    assert drafts == [answers[i][8 + i : 33 + i] for i in range(len(PROMPTS))]


def test_each_parameter_of_sampling_matters() -> None:
    """So that the test above shows that they reach the sampler."""
    model = DraftModel(_worker(_plan("dense")))
    wishes = [
        SEEDED,
        replace(SEEDED, seed=7),
        replace(SEEDED, choice=1),
        replace(SEEDED, temperature=1.5),
        GREEDY,
    ]
    wishes += [replace(SEEDED, top_k=2), replace(SEEDED, top_p=0.4), replace(SEEDED, min_p=0.5)]
    drafts = model.draft(
        [DraftRequest(i, 0, PROMPTS[1], 40, wish) for i, wish in enumerate(wishes)]
    )
    assert len(set(drafts)) == len(wishes)


# ---- any history of calls


@dataclass
class _Caller:
    """Keeps texts as a router does, and which sequences the draft model has to hold; compares
    drafts with a fresh model's.
    """

    model: DraftModel
    max_num_seqs: int
    reference: StageWorker
    texts: dict[int, tuple[int, ...]] = field(default_factory=dict)  # the least recently used first
    num_lost: int = 0

    def call(
        self, wanted: Sequence[tuple[int, int, tuple[int, ...], int]], ended: Sequence[int]
    ) -> None:
        """Ask for sequences: (number, tokens to go back, new tokens, drafts)."""
        for seq_id in ended:
            self.texts.pop(seq_id, None)
        requests, expected = [], []
        for seq_id, num_back, new_ids, num_tokens in wanted:
            num_kept = max(len(self.texts.get(seq_id, ())) - num_back, 0)
            known = new_ids if num_kept or new_ids else (9,)
            requests.append(DraftRequest(seq_id, num_kept, known, num_tokens, _wish(seq_id)))
            expected.append(self._text(requests[-1], {each for each, *_ in wanted}))
        drafts = self.model.draft(requests, ended)
        for request, text, found in zip(requests, expected, drafts, strict=True):
            assert found == (None if text is None else self._fresh(text, request))
            if text is not None and found is not None:
                self.texts[request.seq_id] = text + found

    def _text(self, request: DraftRequest, called: set[int]) -> tuple[int, ...] | None:
        """Return the request's text, or None if its sequence finds no slot."""
        old = self.texts.pop(request.seq_id, None)
        if old is None and len(self.texts) == self.max_num_seqs:
            dropped = next((seq_id for seq_id in self.texts if seq_id not in called), None)
            if dropped is None:
                return None
            del self.texts[dropped]
            self.num_lost += 1
        self.texts[request.seq_id] = (old or ())[: request.num_kept] + request.token_ids
        return self.texts[request.seq_id]

    def _fresh(self, text: tuple[int, ...], request: DraftRequest) -> tuple[int, ...]:
        fresh = DraftModel(self.reference)
        (drafts,) = fresh.draft([DraftRequest(0, 0, text, request.num_tokens, request.sampling)])
        assert drafts is not None
        return drafts


def _wish(seq_id: int) -> SamplingParams:
    return replace(SEEDED, seed=seq_id) if seq_id % 2 else GREEDY


@cache
def _reference(kind: str) -> StageWorker:
    """Return a worker whose rings never wrap around."""
    return _worker(_plan(kind, 16, 1, num_drafts=256))


TOKENS = st.one_of(st.integers(0, 4), st.integers(0, 70)).flatmap(
    lambda n: st.integers(0, 99).map(lambda seed: tuple(random_ids(n, seed)))
)
WANTED = st.tuples(
    st.integers(0, 6), st.one_of(st.integers(0, 5), st.integers(0, 90)), TOKENS, st.integers(1, 6)
)
CALLS = st.lists(
    st.tuples(
        st.lists(WANTED, min_size=1, max_size=4, unique_by=lambda each: each[0]),
        st.lists(st.integers(0, 6), max_size=2, unique=True),
    ),
    min_size=2,
    max_size=9,
)


@settings(max_examples=examples(30, least=3))
@given(
    calls=CALLS,
    page_size=st.sampled_from([1, 4, 16]),
    num_drafts=st.sampled_from([0, 3, 20]),
    max_num_seqs=st.integers(1, 4),
    max_tokens=st.sampled_from([3, 20, 512]),
)
@pytest.mark.parametrize("kind", ATTENTION_KINDS)
def test_drafts_are_those_of_a_fresh_model(
    kind: str,
    calls: list[tuple[list[tuple[int, int, tuple[int, ...], int]], list[int]]],
    page_size: int,
    num_drafts: int,
    max_num_seqs: int,
    max_tokens: int,
) -> None:
    """Whatever was drafted before, for whichever sequences."""
    plan = _plan(kind, page_size, max_num_seqs, num_drafts, max_tokens)
    caller = _Caller(DraftModel(_worker(plan)), max_num_seqs, _reference(kind))
    for wanted, ended in calls:
        caller.call(wanted, ended)


# ---- what is computed


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[MicroBatch]:
    """The micro-batches of all workers."""
    recorded: list[MicroBatch] = []
    step = StageWorker.step

    def record(worker: StageWorker, batch: MicroBatch, incoming: None) -> StageOutput:
        recorded.append(batch)
        return step(worker, batch, incoming)

    monkeypatch.setattr(StageWorker, "step", record)
    return recorded


def _first_starts(batches: Sequence[MicroBatch]) -> list[int]:
    first = batches[0]
    return [*(chunk.start for chunk in first.chunks), *first.decodes.starts]


def test_micro_batches_are_bounded(batches: list[MicroBatch]) -> None:
    model = DraftModel(_worker(_plan("window")))
    model.draft([_begin(i, random_ids(200, i)) for i in range(4)])
    assert [batch.num_tokens for batch in batches] == [512, 290, 4, 2]
    batches.clear()
    model.draft([_continue(i, 203, random_ids(i, i)) for i in range(4)])
    assert [(len(batch.chunks), len(batch.decodes.seq_ids)) for batch in batches] == [
        (3, 1),
        (0, 4),
        (0, 4),
    ]
    assert _first_starts(batches) == [202, 202, 202, 202], "the cache has all but the last draft"


def test_a_call_is_bounded_and_the_next_ones_compute_the_rest(
    batches: list[MicroBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text of 60 tokens; 10 in a micro-batch, and at most 30 in a call. The short text drafts at
    once.
    """
    text = tuple(random_ids(60, 1))
    unbounded = _tiny().draft([_begin(1, text)])
    monkeypatch.setattr(draft_model, "MAX_CALL_TOKENS", 25)
    model = _tiny(max_num_batched_tokens=10)
    drafts = model.draft([_begin(1, text), _begin(2)])
    assert drafts[0] == ()
    assert drafts[1] == _tiny().draft([_begin(2)])[0]
    assert model.draft([_continue(1, 60, ())]) == [()]
    batches.clear()
    assert model.draft([_continue(1, 60, ())]) == unbounded
    assert _first_starts(batches) == [55]


@pytest.mark.parametrize(("num_kept", "start"), [(18, 17), (17, 17), (15, 15), (14, 0), (3, 0)])
def test_what_goes_back_further_than_the_ring_begins_again(
    batches: list[MicroBatch], num_kept: int, start: int
) -> None:
    """A window of 8, and three pages of 4: of 17 tokens the positions from 8 on remain, which
    position 15 sees.
    """
    model = _tiny()
    model.draft([_begin(0, random_ids(15, 0))])
    batches.clear()
    model.draft([_continue(0, num_kept)])
    assert _first_starts(batches) == [start]


@pytest.mark.parametrize(
    ("page_size", "num_tokens", "num_kept", "start"), [(4, 5, 3, 3), (1, 7, 8, 8), (1, 7, 7, 0)]
)
def test_a_short_text_is_kept_from_its_first_token_on(
    batches: list[MicroBatch], page_size: int, num_tokens: int, num_kept: int, start: int
) -> None:
    """Of 9 tokens on 8 pages of one token the first is lost, which position 7 sees."""
    model = _tiny(page_size=page_size)
    model.draft([_begin(0, random_ids(num_tokens, 0))])
    batches.clear()
    model.draft([_continue(0, num_kept)])
    assert _first_starts(batches) == [start]


@pytest.mark.parametrize(("num_kept", "start"), [(15, 15), (12, 0)])
def test_tokens_that_were_taken_back_have_taken_pages(
    batches: list[MicroBatch], num_kept: int, start: int
) -> None:
    """Of 16 tokens alone the positions from 4 on would remain; a 17th was there before."""
    model = _tiny()
    model.draft([_begin(0, random_ids(15, 0))])
    model.draft([_continue(0, 15, num_tokens=1)])
    batches.clear()
    model.draft([_continue(0, num_kept)])
    assert _first_starts(batches) == [start]


def test_pages_are_new_once_and_ended_sequences_freed(batches: list[MicroBatch]) -> None:
    model = _tiny(max_num_seqs=1)
    model.draft([_begin(0, random_ids(6, 0), 4)])
    assert [
        batch.chunks[0].new_pages if batch.chunks else batch.decodes.new_pages for batch in batches
    ] == [
        ((0, 1),),
        *[(), (), ((0, ((2,),)),)],
    ]
    batches.clear()
    model.draft([], ended=[0])
    model.draft([_begin(0, random_ids(19, 0), 2)])
    assert [batch.freed_seq_ids for batch in batches] == [(0,), ()]
    assert batches[0].chunks[0].new_pages == ((2, 0, 1),), "of the pages 0 to 4 the last three"


# ---- what is held


def test_a_sequence_that_is_not_held_so_far_has_no_drafts() -> None:
    model = _tiny()
    assert model.draft([_continue(0, 3)]) == [None]
    assert model.draft([_begin(0), _continue(1, 1)])[1] is None
    assert model.draft([_continue(0, 7)]) == [None], "it has three tokens and three drafts"
    assert model.draft([_continue(0, 6)]) != [None]
    assert model.draft([_continue(0, 6)], ended=[0, 5]) == [None]


def test_a_sequence_begins_again_with_other_wishes() -> None:
    model = _tiny()
    greedy = model.draft([_begin(0)])
    again = model.draft([_begin(0)._replace(sampling=SEEDED), _begin(1)._replace(sampling=SEEDED)])
    assert again[0] == again[1] != greedy[0]


def test_the_least_recently_used_sequence_makes_room() -> None:
    model = _tiny(max_num_seqs=3)
    model.draft([_begin(0), _begin(1), _begin(2)])
    model.draft([_continue(0, 3)])
    assert None not in model.draft([_begin(3)])
    assert model.draft([_continue(i, 3) for i in (1, 0, 2, 3)])[0] is None, "that was sequence 1"
    assert None not in model.draft([_continue(i, 3) for i in (0, 2, 3)])


def test_no_sequence_of_a_call_makes_room_for_another() -> None:
    model = _tiny(max_num_seqs=2)
    assert [drafts is None for drafts in model.draft([_begin(0), _begin(1), _begin(2)])] == [
        False,
        False,
        True,
    ]
    assert [drafts is None for drafts in model.draft([_begin(3), _begin(4), _continue(0, 3)])] == [
        False,
        True,
        False,
    ]
    assert [drafts is None for drafts in model.draft([_begin(1), _begin(4)], ended=[3])] == [
        False,
        False,
    ]


def test_a_failed_step_forgets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _tiny()
    first = model.draft([_begin(0)])
    step = StageWorker.step

    def fail(worker: StageWorker, batch: MicroBatch, incoming: None) -> StageOutput:
        step(worker, batch, incoming)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(StageWorker, "step", fail)
        with pytest.raises(RuntimeError, match="memory"):
            model.draft([_continue(0, 3)])
    assert model.draft([_continue(0, 3), _begin(1)]) == [None, *first]
    assert None not in model.draft([_begin(0), _begin(1)])


# ---- bounds


@pytest.mark.parametrize(("max_model_len", "num_expected"), [(64, 5), (60, 1), (57, 1), (56, 0)])
def test_a_text_ends_with_the_context(max_model_len: int, num_expected: int) -> None:
    """Of 59 tokens; a ring of pages without a window holds a whole number of pages of 4."""
    args = tiny_args(n_layers=2, windows=(8, None), moe=False, max_seq_len=64)
    model = DraftModel(_worker(tiny_plan(args, 1, 4, 2, max_model_len=max_model_len)))
    text = random_ids(59, 0)
    (drafts,) = model.draft([_begin(0, text, 9)])
    assert drafts is not None
    assert len(drafts) == num_expected
    (again,) = model.draft([_continue(0, 50, text[50:], 9)])
    assert again == drafts
    (shorter,) = model.draft([_continue(0, 50, text[50:53], 2)])
    assert shorter is not None
    assert len(shorter) == 2
    assert [shorter] == model.draft([_begin(1, text[:53], 2)])


def test_rings_with_a_window_end_with_the_models_context() -> None:
    model = _tiny(max_model_len=20)
    assert [len(drafts or ()) for drafts in model.draft([_begin(0, random_ids(60, 0), 9)])] == [4]


def test_a_sequence_that_overflows_has_no_drafts_and_others_have_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = [_begin(0, (1, 2, 3)), _begin(1, (7, 8))]
    expected, model = _tiny().draft(requests), _tiny()
    last = model._worker.last_stage
    assert last is not None
    sample = last.token_sampler.sample

    def overflow(logits_SV: torch.Tensor, rows: SampledRows) -> SampledTokens:
        for row, position in enumerate(rows.positions):
            logits_SV[row] += torch.nan if rows.seq_ids[row] == bad and position >= 4 else 0
        return sample(logits_SV, rows)

    bad = 1  # an id on the worker
    monkeypatch.setattr(last.token_sampler, "sample", overflow)
    found = model.draft(requests)
    lengths = [len(drafts) for drafts in found if drafts is not None]
    assert sorted(lengths) in ([1, 3], [2, 3])
    assert all(
        drafts == whole[: len(drafts)]
        for drafts, whole in zip(found, expected, strict=True)
        if drafts and whole
    )


def test_nothing_is_computed_for_no_drafts() -> None:
    model = _tiny()
    assert model.draft([_begin(0, (1, 2, 3), 0)]) == [()]
    assert model.draft([_continue(0, 3, (), 2)], ended=[7]) == model.draft(
        [_begin(1, (1, 2, 3), 2)]
    )
    assert model.draft([]) == []


def test_a_plan_with_too_few_pages_is_refused() -> None:
    plan = tiny_plan(TINY, 1, 4, 2)
    (own,) = plan.cache.classes
    few = replace(plan.cache, classes=(replace(own, num_pages=own.num_pages - 1),))
    with pytest.raises(AssertionError, match="pages of its own"):
        DraftModel(_worker(replace(plan, stages=(replace(plan.stages[0], cache=few),))))
