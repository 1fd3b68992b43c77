"""Answers that follow a grammar: what they are, however the work is cut, and what becomes of
grammars that cannot be followed.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
from harness import random_ids, scheduler_for
from json_schemas import Schema, random_schema
from jsonschema import Draft202012Validator
from thinking_models import SpelledTokenizer
from tiny_models import random_model, split_model, tiny_args, tiny_plan

from tramontane.cluster.actors.pipeline_spec import TokenPieceLoader
from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.proto.model_folder import read_model_args
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.request import FinishReason, Request, SamplingParams, SequenceRequest
from tramontane.router.engine.router import Router
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.structured.grammar import ResponseFormat, ThoughtRules, build_grammar
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.reasoning_parser import ReasoningFormat, ReasoningParser

NUM_SCHEMAS, MAX_TOKENS = 200, 64
STOP, LENGTH, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR
# of the tiny model, whose vocabulary is larger by one
PIECES = tuple(chr(32 + i).encode() for i in range(95))
Answers = list[tuple[tuple[int, ...], FinishReason]]


def _grammar(schema: Schema, thoughts: ThoughtRules | None = None) -> str:
    named = {"name": "answer", "schema": schema}
    return build_grammar(
        ResponseFormat.model_validate({"type": "json_schema", "json_schema": named}),
        thoughts=thoughts,
    )


def _run(chain: LocalStageChain, scheduler: Scheduler, specs: Sequence[SequenceRequest]) -> Answers:
    return asyncio.run(_answers(chain, scheduler, specs))


async def _answers(
    chain: LocalStageChain, scheduler: Scheduler, specs: Sequence[SequenceRequest]
) -> Answers:
    """The tokens of each, and why it ended; afterwards every page must be free."""
    router = Router(scheduler, chain)
    running = asyncio.create_task(router.run())
    reported: list[list[int]] = [[] for _ in specs]
    reasons: dict[int, FinishReason] = {}
    async for batch in router.generate(Request(tuple(specs))):
        for event in batch.events:
            reported[event.seq_id].append(event.token_id)
            if event.finish:
                reasons[event.seq_id] = event.finish
    scheduler.check_integrity()
    assert scheduler.is_idle
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    return [(tuple(ids), reasons[index]) for index, ids in enumerate(reported)]


@pytest.fixture(scope="module")
def demo() -> Iterator[tuple[LocalStageChain, PipelinePlan]]:
    args = read_model_args(DEMO_MODEL)
    plan = tiny_plan(args, 2)
    chain = LocalStageChain.load(
        plan, DEMO_MODEL, ["cpu"], None, TokenPieceLoader(DEMO_MODEL, args.vocab_size)
    )
    yield chain, plan
    chain.close()


def test_every_answer_parses_and_follows_its_schema(
    demo: tuple[LocalStageChain, PipelinePlan],
) -> None:
    """200 schemas by chance, on a model that knows Shakespeare and no JSON."""
    chain, plan = demo
    tokenizer = SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model")
    prompt = tokenizer.encode("KING HENRY:\nThe answer: ")
    schemas = [random_schema(seed) for seed in range(NUM_SCHEMAS)]
    sampling = SamplingParams(MAX_TOKENS, seed=5)
    specs = [
        SequenceRequest(prompt, replace(sampling, choice=i, grammar=_grammar(s)))
        for i, s in enumerate(schemas)
    ]
    answers = _run(chain, scheduler_for(plan), specs)
    for schema, (ids, finish) in zip(schemas, answers, strict=True):
        text = tokenizer.decode(ids)
        if finish is LENGTH:
            assert len(ids) == MAX_TOKENS
        else:
            assert finish is STOP, (schema, text)
            Draft202012Validator(schema).validate(json.loads(text))
    finishes = [finish for _, finish in answers]
    assert finishes.count(STOP) > NUM_SCHEMAS * 2 // 3


NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 100, "maximum": 999},
    "minItems": 4,
    "maxItems": 9,
}
RHYMES = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 9}, "b": NUMBERS},
    "required": ["b"],
}


def _mixed(num_tokens: int = 40) -> list[SequenceRequest]:
    """Every third one is free."""
    grammars = ["", _grammar(NUMBERS), _grammar(RHYMES | {"additionalProperties": False})]
    sampling = SamplingParams(num_tokens, 1.0, seed=3)
    return [
        SequenceRequest(
            tuple(random_ids(12, i)), replace(sampling, choice=i, grammar=grammars[i % 3])
        )
        for i in range(12)
    ]


def _text(ids: Sequence[int]) -> str:
    return b"".join(PIECES[token_id] for token_id in ids).decode()


def test_answers_are_the_same_however_they_are_cut() -> None:
    """In chunks, in small micro-batches, one at a time, or computed again where pages run out.

    The model has no end of sequence: an answer to which nothing can be added ends by itself.
    """
    args = tiny_args(window=None, moe=False)
    assert not args.eos_token_ids
    roomy = tiny_plan(args, 2, 4)
    classes = tuple(replace(c, num_pages=60) for c in roomy.cache.classes)
    scarce = replace(
        roomy,
        stages=tuple(replace(s, cache=replace(s.cache, classes=classes)) for s in roomy.stages),
    )
    model = random_model(args)
    outcomes = []
    for plan, budget, together in (
        (roomy, 64, True),
        (scarce, 64, True),
        (roomy, 5, True),
        (roomy, 64, False),
    ):
        chain = LocalStageChain(split_model(model, plan, lambda: PIECES))
        groups = [_mixed()] if together else [[spec] for spec in _mixed()]
        schedulers = [scheduler_for(plan, budget) for _ in groups]
        runs = zip(schedulers, groups, strict=True)
        outcomes.append(
            [answer for scheduler, specs in runs for answer in _run(chain, scheduler, specs)]
        )
        chain.close()
        assert (sum(scheduler.num_preempted for scheduler in schedulers) > 0) == (plan is scarce)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    for i, (ids, finish) in enumerate(outcomes[0]):
        if i % 3 == 0:
            assert finish is LENGTH
        elif finish is not LENGTH:
            assert finish is STOP
            Draft202012Validator(NUMBERS if i % 3 == 1 else RHYMES).validate(json.loads(_text(ids)))
    assert [finish for _, finish in outcomes[0]].count(STOP) >= 4


@pytest.mark.parametrize("is_open", [False, True])
def test_a_thought_is_free_and_the_answer_after_it_follows_its_schema(is_open: bool) -> None:
    """A biased model thinks, says anything there, and ends the thought; JSON follows. "^" and
    "`" are markers.
    """
    begin, end = PIECES.index(b"^"), PIECES.index(b"`")
    pieces = tuple(
        b"" if token_id in (begin, end) else piece for token_id, piece in enumerate(PIECES)
    )
    form = ReasoningFormat("[THINK]", "[/THINK]", begin, end)
    args = tiny_args(window=None, moe=False)
    plan = tiny_plan(args)
    chain = LocalStageChain(split_model(random_model(args), plan, lambda: pieces))
    grammar = _grammar(NUMBERS, ThoughtRules(form, is_open))
    sampling = SamplingParams(
        60, 1.0, seed=3, grammar=grammar, logit_bias=((begin, 4.0), (end, 2.0))
    )
    specs = [
        SequenceRequest(tuple(random_ids(12, i)), replace(sampling, choice=i)) for i in range(12)
    ]
    answers = _run(chain, scheduler_for(plan), specs)
    chain.close()
    thoughts = []
    for ids, finish in answers:
        parser = ReasoningParser(form, SpelledTokenizer(pieces), is_open=is_open, only_first=True)
        splits = [parser.push(token_id) for token_id in ids] + [parser.finish()]
        thoughts.append("".join(split.thought for split in splits))
        assert ids.count(end) <= 1
        if finish is STOP:
            Draft202012Validator(NUMBERS).validate(
                json.loads("".join(split.content for split in splits))
            )
            assert is_open <= (end in ids)
    assert (
        sum(
            finish is STOP and len(thought) > 2
            for (_, finish), thought in zip(answers, thoughts, strict=True)
        )
        >= 4
    )


def _broken_pieces() -> tuple[bytes, ...]:
    raise OSError("the disk is gone")


def test_a_grammar_that_cannot_be_followed_ends_its_own_sequence_only() -> None:
    args = tiny_args(n_layers=1, moe=False)
    plan = tiny_plan(args)
    free = SamplingParams(6, 0.0)
    grammars = ["", "start: (", _grammar({"const": "\u00e9"}), "", _grammar({"const": "x"})]
    specs = [SequenceRequest((1, 2, 3), replace(free, grammar=grammar)) for grammar in grammars]
    model = random_model(args)
    outcomes = []
    for read_pieces in (lambda: PIECES, _broken_pieces, tuple):
        chain = LocalStageChain(split_model(model, plan, read_pieces))
        outcomes.append(_run(chain, scheduler_for(plan), specs))
        outcomes[-1] += _run(chain, scheduler_for(plan), specs[3:4])
        chain.close()
    alone = outcomes[0][-1]
    for answers in outcomes:
        assert answers[0] == answers[3] == answers[-1] == alone
        assert (len(answers[1][0]), answers[1][1], answers[2][1]) == (1, ERROR, ERROR), (
            "the first one with its first token"
        )
        assert (len(alone[0]), alone[1]) == (6, LENGTH)
    assert [(_text(ids).strip(), finish) for ids, finish in outcomes[0][4:5]] == [('"x"', STOP)]
    assert [answers[4][1] for answers in outcomes[1:]] == [ERROR, ERROR], "there is no vocabulary"
