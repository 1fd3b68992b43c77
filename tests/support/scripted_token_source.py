"""A router without a pipeline, for doors: it says what the test wrote down, and remembers what it was asked."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx
from starlette.applications import Starlette

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.config.expert_load import MeasuredLoad
from tramontane.cluster.http.app import HttpApp, HttpAppConfig
from tramontane.proto.errors import OverloadedError, TramontaneError
from tramontane.proto.ports import TokenSource
from tramontane.proto.request import FinishReason, Logprobs, RequestOutput, RequestTimings, SequenceRequest, TokenEvent
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.chat import ChatTemplate
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate

TOKENIZER = SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model")
CHAT: ChatTemplate = MistralChatTemplate.from_sentencepiece(DEMO_MODEL / "tokenizer.model")
CONTEXT, MAX_BODY, VOCAB_SIZE = 128, 2**16, TOKENIZER.vocab_size
MODEL = ServedModel("tiny", TOKENIZER, CONTEXT, 16, VOCAB_SIZE)
TIMES = RequestTimings(0.0, 0.0, 0.0)
SAID = "Good morrow, my lord."
OTHER_ID = 300  # what is told as the next likely token


class ScriptedSource:
    """Every sequence gets these tokens, one at a time, as many as it wants; then it has finished.

    ``fails_at``: raises ``try_or_reason`` instead of this token of each, 0 being the first. All may be changed between requests.
    """

    def __init__(
        self, token_ids: Sequence[int] = TOKENIZER.encode(SAID)[1:], failure: TramontaneError | None = None, fails_at: int = 0
    ) -> None:
        self.token_ids, self.failure, self.fails_at = token_ids, failure, fails_at
        self.is_known_full = False  # then a failure for overload is known before anything is asked
        self.asked: list[Sequence[SequenceRequest]] = []

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        if isinstance(self.failure, OverloadedError) and self.is_known_full:
            raise self.failure

    async def generate(self, specs: Sequence[SequenceRequest]) -> AsyncGenerator[RequestOutput, None]:
        self.asked.append(specs)
        ends = [min(spec.sampling.max_tokens, len(self.token_ids)) for spec in specs]
        for step in range(max(ends)):
            await asyncio.sleep(0)
            if self.failure is not None and step >= self.fails_at:
                raise self.failure
            running = [index for index, end in enumerate(ends) if step < end]
            events = tuple(self._event(specs[index], index, step, ends[index]) for index in running)
            told = [self._logprobs(specs[index], index, step) for index in running]
            yield RequestOutput(events, TIMES, logprobs=tuple(each for each in told if each is not None))

    def _event(self, spec: SequenceRequest, index: int, step: int, end: int) -> TokenEvent:
        finish = FinishReason.LENGTH if end == spec.sampling.max_tokens else FinishReason.STOP
        return TokenEvent(index, self.token_ids[step], finish if step == end - 1 else None)

    def _logprobs(self, spec: SequenceRequest, index: int, step: int) -> Logprobs | None:
        """Every token has -0.5, another one -1.5."""
        if spec.sampling.logprobs is None:
            return None
        top = ((self.token_ids[step], -0.5), (OTHER_ID, -1.5))[: spec.sampling.logprobs]
        return Logprobs(index, len(spec.prompt_ids) + step, (-0.5,), (top,))


async def _ready() -> bool:
    return True


async def _load() -> MeasuredLoad:
    return MeasuredLoad(((1, 2), (3, 0)), 2)


def door_of(source: TokenSource, model: ServedModel = MODEL, **settings: object) -> HttpApp:
    """``settings`` are fields of ``HttpAppConfig``."""
    fields: dict[str, Any] = {"chat": CHAT} | settings
    return HttpApp(
        HttpAppConfig(
            model=model,
            source=source,
            is_ready=_ready,
            expert_load=_load,
            max_body_bytes=MAX_BODY,
            writes_per_s=10**9,
            **fields,
        )
    )


def client_of(app: Starlette) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://door")
