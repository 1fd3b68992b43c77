"""A token source for API servers in tests: it yields scripted tokens and records the requests that
it gets.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Container, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain, cycle, islice
from typing import Any

import httpx
from starlette.applications import Starlette

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.config.measurements import MeasuredLoad
from tramontane.cluster.http.app import HttpApp, HttpAppConfig
from tramontane.cluster.http.sse import Pacer
from tramontane.proto.errors import TramontaneError
from tramontane.proto.ports import TokenSource
from tramontane.proto.request import (
    NOT_FINITE_TOKEN,
    ExpertChoices,
    FinishReason,
    Logprobs,
    Request,
    RequestOutput,
    RequestTimings,
    SequenceDrafts,
    SequenceRequest,
    TokenEvent,
)
from tramontane.router.engine.health import PipelineHealth
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.chat import ChatTemplate
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate

TOKENIZER = SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model")
CHAT: ChatTemplate = MistralChatTemplate.from_sentencepiece(DEMO_MODEL / "tokenizer.model")
CONTEXT, MAX_BODY, VOCAB_SIZE = 128, 2**16, TOKENIZER.vocab_size
MODEL = ServedModel("tiny", TOKENIZER, CONTEXT, 16, VOCAB_SIZE)
TIMES = RequestTimings(0.0, 0.0, 0.0)
FINGERPRINT = "fp_0123456789abcdef"
SAID = "Good morrow, my lord."
SAID_IDS = TOKENIZER.encode(SAID)[1:]
OTHER_ID = 300  # the token with the second best log-probability


# of a sequence's index, a position and its token: the log-probability, and the likeliest tokens
Scores = Callable[[int, int, int], tuple[float, tuple[tuple[int, float], ...]]]
# of sequences by index: their tokens in an output, their drafts, and the right ones of these
Step = Mapping[int, tuple[int, int, int]]


def even_scores(_index: int, _position: int, token_id: int) -> tuple[float, Any]:
    """Give every token -0.5, and another one -1.5."""
    return -0.5, ((token_id, -0.5), (OTHER_ID, -1.5))


def scores_by_position(_index: int, position: int, _token_id: int) -> tuple[float, Any]:
    """Give every token another value."""
    return -float(position), ((OTHER_ID, -0.25),)


@dataclass
class ScriptedSource:
    """The one ``TokenSource`` without a router. Attributes may change between requests.

    Every sequence gets ``token_ids`` up to its ``max_tokens``, after those that it has already; an
    output has one token of each. With ``failure`` set, it is raised in place of output ``fails_at``
    of a request, 0 being the first, or after the last one.
    """

    token_ids: Sequence[int] = SAID_IDS
    failure: TramontaneError | None = None
    fails_at: int = 0
    _: KW_ONLY
    # the numbers of the requests that fail, 0 being the first; None: all
    failing_requests: Container[int] | None = None
    # raised by ``check_capacity`` once so many requests have begun
    refusal: TramontaneError | None = None
    capacity: int = 0
    scripts: Sequence[Sequence[int]] = ()  # of each sequence, instead of ``token_ids``
    by_choice: bool = False  # choice c of a prompt begins with token c of its script
    # tokens of each output, again and again, in turns over the sequences
    sizes: Sequence[int] = ()
    steps: Sequence[Step] = ()  # all outputs of a request
    finish: FinishReason | None = None  # of every sequence, instead of the one by its length
    overflows_at: int | None = None  # the token that is not finite
    pause_s: float = 0.0  # before each output
    held_at: int | None = None  # the output that never comes
    fingerprints: Sequence[str] = ()  # of the first outputs of a request
    num_cached: Sequence[int] = ()  # tokens of prompts, in the first outputs of a request
    # with each token: how many, and the right ones; None without speculation
    drafts: tuple[int, int] | None = None
    scores: Scores = even_scores  # for those who ask for log-probabilities
    # by sequence, layer and position, for those who ask for them
    experts: Callable[[int, int, int], tuple[int, ...]] | None = None
    times: Callable[[int], RequestTimings] = lambda _number: TIMES  # by the number of outputs
    requests: list[Request] = field(default_factory=list)
    num_open: int = 0  # requests that are being answered
    num_outputs: int = 0

    @property
    def requested(self) -> list[tuple[SequenceRequest, ...]]:
        """The sequences of all requests so far."""
        return [request.sequences for request in self.requests]

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        if self.refusal is not None and len(self.requests) >= self.capacity:
            raise self.refusal

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        number, answer = len(self.requests), _Answer(self, request.sequences)
        self.requests.append(request)
        failure = (
            self.failure
            if self.failing_requests is None or number in self.failing_requests
            else None
        )
        self.num_open += 1
        try:
            for at, indices in enumerate(answer.outputs()):
                await asyncio.sleep(self.pause_s)
                if at == self.held_at:
                    await asyncio.Event().wait()
                if failure is not None and at >= self.fails_at:
                    raise failure
                self.num_outputs += 1
                yield answer.output(at, indices, is_failing=failure is not None)
            if failure is not None:
                raise failure
        finally:
            self.num_open -= 1


class _Answer:
    """The outputs for one request."""

    def __init__(self, source: ScriptedSource, specs: Sequence[SequenceRequest]) -> None:
        assert len(specs) == len(source.scripts) or not source.scripts
        self._source, self._specs = source, specs
        self._scripts = [self._script(index, spec) for index, spec in enumerate(specs)]
        self._num_sent = [len(spec.output_ids) for spec in specs]

    def _script(self, index: int, spec: SequenceRequest) -> tuple[int, ...]:
        source, bad = self._source, self._source.overflows_at
        all_ids = source.scripts[index] if source.scripts else source.token_ids
        first = spec.sampling.choice if source.by_choice else 0
        ids = tuple(all_ids[first:])[: spec.sampling.max_tokens]
        if bad is not None and bad < len(ids):
            ids = (*ids[:bad], NOT_FINITE_TOKEN)
        assert len(spec.output_ids) < len(ids)
        assert spec.output_ids == ids[: len(spec.output_ids)]
        return ids

    def outputs(self) -> Iterator[Sequence[int]]:
        """Yield the sequence of each token of each output."""
        source, begun = self._source, tuple(self._num_sent)
        if source.steps:
            for step in source.steps:
                yield [index for index, (num, *_) in step.items() for _ in range(num)]
            return
        rounds = [
            [i for i, ids in enumerate(self._scripts) if begun[i] <= turn < len(ids)]
            for turn in range(min(begun), max(map(len, self._scripts)))
        ]
        if not source.sizes:
            yield from filter(None, rounds)
            return
        indices, sizes = iter(chain.from_iterable(rounds)), cycle(source.sizes)
        while output := list(islice(indices, next(sizes))):
            yield output

    def output(self, at: int, indices: Sequence[int], *, is_failing: bool) -> RequestOutput:
        source, sent = self._source, list(self._num_sent)
        events, scores = list[TokenEvent](), list[Logprobs]()
        for index in indices:
            scores += self._logprobs(index)
            events.append(self._event(index, is_failing=is_failing))
            self._num_sent[index] += 1
        return RequestOutput(
            tuple(events),
            source.times(source.num_outputs),
            tuple(self._experts(sent)),
            tuple(scores),
            source.fingerprints[at] if at < len(source.fingerprints) else "",
            source.num_cached[at] if at < len(source.num_cached) else 0,
            self._drafts(at, indices),
        )

    def _event(self, index: int, *, is_failing: bool) -> TokenEvent:
        ids, place = self._scripts[index], self._num_sent[index]
        if ids[place] == NOT_FINITE_TOKEN:
            return TokenEvent(index, NOT_FINITE_TOKEN, FinishReason.ERROR)
        by_length = (
            FinishReason.LENGTH
            if len(ids) == self._specs[index].sampling.max_tokens
            else FinishReason.STOP
        )
        is_last = place == len(ids) - 1 and not is_failing
        return TokenEvent(
            index, ids[place], (self._source.finish or by_length) if is_last else None
        )

    def _logprobs(self, index: int) -> Iterator[Logprobs]:
        """Yield those of the prompt with the first token, and that of the next token."""
        spec, place = self._specs[index], self._num_sent[index]
        known, num_prompt = (*spec.prompt_ids, *self._scripts[index]), len(spec.prompt_ids)
        asked = (
            (spec.sampling.prompt_logprobs, range(1, 0 if place else num_prompt)),
            (spec.sampling.logprobs, range(num_prompt + place, num_prompt + place + 1)),
        )
        for num_top, positions in asked:
            if num_top is not None and positions:
                scores = [self._source.scores(index, at, known[at]) for at in positions]
                yield Logprobs(
                    index,
                    positions.start,
                    tuple(score for score, _ in scores),
                    tuple(top[:num_top] for _, top in scores),
                )

    def _experts(self, before: Sequence[int]) -> Iterator[ExpertChoices]:
        """Yield those of all tokens that have gone into the model since ``before``."""
        if self._source.experts is None:
            return
        for index, spec in enumerate(self._specs):
            num_known = len(spec.prompt_ids) - 1
            start = num_known + before[index] if before[index] else 0
            places = range(start, num_known + self._num_sent[index])
            for layer in spec.sampling.return_experts if self._num_sent[index] else ():
                ids = tuple(self._source.experts(index, layer, at) for at in places)
                yield from [ExpertChoices(index, layer, start, ids)] if ids else []

    def _drafts(self, at: int, indices: Sequence[int]) -> tuple[SequenceDrafts, ...]:
        if self._source.steps:
            return tuple((i, num, right) for i, (_, num, right) in self._source.steps[at].items())
        drafts = self._source.drafts
        return () if drafts is None else tuple((index, *drafts) for index in dict.fromkeys(indices))


async def _ready() -> PipelineHealth:
    return PipelineHealth("ready")


async def _load() -> MeasuredLoad:
    return MeasuredLoad(((1, 2), (3, 0)), 2)


def http_app_for(source: TokenSource, model: ServedModel = MODEL, **settings: object) -> HttpApp:
    """``settings`` are fields of ``HttpAppConfig``."""
    fields: dict[str, Any] = {"chat": CHAT, "max_body_bytes": MAX_BODY} | settings
    return HttpApp(
        HttpAppConfig(
            model=model,
            source=source,
            health=_ready,
            expert_load=_load,
            pacer=Pacer(10**9),
            **fields,
        )
    )


def client_for(app: Starlette) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://ingress")
