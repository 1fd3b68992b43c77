"""A router without a pipeline, for doors: it says what the test wrote down, and remembers what it was asked."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import httpx
from starlette.applications import Starlette

from tramontane.cluster.config import DEMO_MODEL
from tramontane.cluster.expert_load import MeasuredLoad
from tramontane.cluster.http_door import HttpDoor
from tramontane.proto.errors import TramontaneError
from tramontane.proto.request import FinishReason, RequestTimes, SequenceSpec, TokenBatch, TokenEvent
from tramontane.router.completions import ServedModel
from tramontane.router.tokenizer_kinds import SentencePieceTokenizer

TOKENIZER = SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model")
CONTEXT, MAX_BODY, VOCAB_SIZE = 128, 2**16, TOKENIZER.vocab_size
MODEL = ServedModel("tiny", TOKENIZER, CONTEXT, 16, VOCAB_SIZE)
TIMES = RequestTimes(0.0, 0.0, 0.0)


class ScriptedSource:
    """Every sequence gets the tokens of ``text``, one at a time, as many as it wants; then it has finished.

    ``fails_at``: raises ``failure`` instead of this token of each, 0 being the first.
    """

    def __init__(self, text: str = "Good morrow, my lord.", failure: TramontaneError | None = None, fails_at: int = 0) -> None:
        self.token_ids = TOKENIZER.encode(text)[1:]
        self.asked: list[Sequence[SequenceSpec]] = []
        self._failure, self._fails_at = failure, fails_at

    async def generate(self, specs: Sequence[SequenceSpec]) -> AsyncGenerator[TokenBatch, None]:
        self.asked.append(specs)
        lengths = [min(spec.sampling.max_tokens, len(self.token_ids)) for spec in specs]
        for step in range(max(lengths)):
            await asyncio.sleep(0)
            if self._failure is not None and step >= self._fails_at:
                raise self._failure
            running = [(seq_id, length) for seq_id, length in enumerate(lengths) if step < length]
            yield TokenBatch(tuple(self._event(specs, seq_id, step, length) for seq_id, length in running), TIMES)

    def _event(self, specs: Sequence[SequenceSpec], seq_id: int, step: int, length: int) -> TokenEvent:
        wanted = specs[seq_id].sampling.max_tokens
        finish = FinishReason.LENGTH if length == wanted else FinishReason.STOP
        return TokenEvent(seq_id, self.token_ids[step], finish if step == length - 1 else None)


async def _ready() -> bool:
    return True


async def _load() -> MeasuredLoad:
    return MeasuredLoad(((1, 2), (3, 0)), 2)


def door_of(source: ScriptedSource, model: ServedModel = MODEL, **settings: object) -> HttpDoor:
    """``settings`` are those that ``HttpDoor`` takes by name."""
    make: Callable[..., HttpDoor] = HttpDoor
    return make(model, source, _ready, _load, MAX_BODY, 10**9, **settings)


def client_of(app: Starlette) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://door")
