"""A token source for API servers in tests: it yields scripted tokens and records the requests that
it gets.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
from starlette.applications import Starlette

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.config.measurements import MeasuredLoad
from tramontane.cluster.http.app import HttpApp, HttpAppConfig
from tramontane.cluster.http.sse import Pacer
from tramontane.proto.errors import OverloadedError, TramontaneError
from tramontane.proto.ports import TokenSource
from tramontane.proto.request import (
    FinishReason,
    Logprobs,
    Request,
    RequestOutput,
    RequestTimings,
    SequenceRequest,
    TokenEvent,
)
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
OTHER_ID = 300  # the token with the second best log-probability


class ScriptedSource:
    """A source that yields these tokens for every sequence, one at a time, up to its
    ``max_tokens``.

    If ``failure`` is set it is raised instead of token ``fails_at``, 0 being the first. Attributes
    may change between requests.
    """

    def __init__(
        self,
        token_ids: Sequence[int] = TOKENIZER.encode(SAID)[1:],
        failure: TramontaneError | None = None,
        fails_at: int = 0,
    ) -> None:
        self.token_ids, self.failure, self.fails_at = token_ids, failure, fails_at
        self.fingerprint = ""  # of the pipeline
        self.num_cached = 0  # tokens of the prompt
        # with each token: how many, and the right ones; None without speculation
        self.drafts: tuple[int, int] | None = None
        self.is_known_full = False  # then ``check_capacity`` raises an OverloadedError already
        self.requests: list[Request] = []

    @property
    def requested(self) -> list[tuple[SequenceRequest, ...]]:
        """The sequences of all requests so far."""
        return [request.sequences for request in self.requests]

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        if isinstance(self.failure, OverloadedError) and self.is_known_full:
            raise self.failure

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        specs = request.sequences
        self.requests.append(request)
        ends = [min(spec.sampling.max_tokens, len(self.token_ids)) for spec in specs]
        for step in range(max(ends)):
            await asyncio.sleep(0)
            if self.failure is not None and step >= self.fails_at:
                raise self.failure
            running = [index for index, end in enumerate(ends) if step < end]
            events = tuple(self._event(specs[index], index, step, ends[index]) for index in running)
            logprobs = [self._logprobs(specs[index], index, step) for index in running]
            fingerprint, num_cached = ("", 0) if step else (self.fingerprint, self.num_cached)
            scores = tuple(each for each in logprobs if each is not None)
            drafts = (
                () if self.drafts is None else tuple((index, *self.drafts) for index in running)
            )
            yield RequestOutput(events, TIMES, (), scores, fingerprint, num_cached, drafts)

    def _event(self, spec: SequenceRequest, index: int, step: int, end: int) -> TokenEvent:
        finish = FinishReason.LENGTH if end == spec.sampling.max_tokens else FinishReason.STOP
        return TokenEvent(index, self.token_ids[step], finish if step == end - 1 else None)

    def _logprobs(self, spec: SequenceRequest, index: int, step: int) -> Logprobs | None:
        """Return -0.5 for every token, and -1.5 for another one."""
        if spec.sampling.logprobs is None:
            return None
        top = ((self.token_ids[step], -0.5), (OTHER_ID, -1.5))[: spec.sampling.logprobs]
        return Logprobs(index, len(spec.prompt_ids) + step, (-0.5,), (top,))


async def _ready() -> bool:
    return True


async def _load() -> MeasuredLoad:
    return MeasuredLoad(((1, 2), (3, 0)), 2)


def http_app_for(source: TokenSource, model: ServedModel = MODEL, **settings: object) -> HttpApp:
    """``settings`` are fields of ``HttpAppConfig``."""
    fields: dict[str, Any] = {"chat": CHAT, "max_body_bytes": MAX_BODY} | settings
    return HttpApp(
        HttpAppConfig(
            model=model,
            source=source,
            is_ready=_ready,
            expert_load=_load,
            pacer=Pacer(10**9),
            **fields,
        )
    )


def client_for(app: Starlette) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://ingress")
