"""``tramontane generate``: prompts in, text out, while it is made."""

import asyncio
import time
from dataclasses import dataclass

import psutil

from tramontane.cluster.config import EngineConfig
from tramontane.cluster.display import Display
from tramontane.cluster.launch import Engine, open_engine
from tramontane.cluster.prompts import Prompt, encode_prompts
from tramontane.proto.request import FinishReason, SamplingParams, SequenceSpec
from tramontane.router.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Completion:
    prompt: str
    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything a finished run has to tell. Seconds count from the start of the process."""

    completions: tuple[Completion, ...]
    engine: Engine
    ready_after_s: float
    first_token_after_s: float


async def generate(config: EngineConfig, prompts: list[Prompt], sampling: SamplingParams, display: Display) -> Outcome:
    """Run all prompts at once. Raises UserError before anything is started if one of them cannot be served."""
    born = psutil.Process().create_time()
    tokenizer, prompt_ids = encode_prompts(config, prompts)
    alone = config.model_copy(update={"replicas": 1})  # of a file that was written for serve
    async with open_engine(alone, display.report, show_loading=display.loading) as engine:
        ready = time.time()
        display.start([prompt.text for prompt in prompts])
        run = _Run(engine, tokenizer, sampling, display)
        try:
            async with asyncio.TaskGroup() as group:
                pairs = enumerate(zip(prompts, prompt_ids, strict=True))
                tasks = [group.create_task(run.complete(index, prompt.text, ids)) for index, (prompt, ids) in pairs]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            display.stop()
        engine.router.scheduler.check_integrity()
        return Outcome(tuple(t.result() for t in tasks), engine, ready - born, run.first_token_at - born)


class _Run:
    def __init__(self, engine: Engine, tokenizer: Tokenizer, sampling: SamplingParams, display: Display) -> None:
        self.engine, self.tokenizer, self.sampling, self.display = engine, tokenizer, sampling, display
        self.first_token_at = float("inf")

    async def complete(self, index: int, prompt: str, prompt_ids: tuple[int, ...]) -> Completion:
        decoder = self.tokenizer.decoder()
        text, token_ids, finish = "", [], None
        async for batch in self.engine.router.generate([SequenceSpec(prompt_ids, self.sampling)]):
            self.first_token_at = min(self.first_token_at, time.time())
            token_ids += [event.token_id for event in batch.events]
            finish = batch.events[-1].finish
            piece = "".join(decoder.push(event.token_id) for event in batch.events) + (decoder.finish() if finish else "")
            text += piece
            self.display.add(index, piece)
        assert finish is not None
        self.display.end(index)
        return Completion(prompt, text, tuple(token_ids), finish)
