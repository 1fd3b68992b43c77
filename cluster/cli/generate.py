"""``tramontane generate``: prompts in, text out, while it is made."""

import asyncio
import time
from dataclasses import replace

import psutil
from rich.segment import Segments

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.console.display import Display, sanitize
from tramontane.cluster.console.prompts import Prompt, encode_prompts
from tramontane.cluster.console.run_summary import Completion, ExpertIds, GenerateResult
from tramontane.cluster.console.token_colors import TokenColors, check_layer
from tramontane.cluster.pipeline.engine import Engine, open_engine
from tramontane.proto.request import ExpertChoices, SamplingParams, SequenceRequest
from tramontane.router.engine.active_request import by_layer
from tramontane.router.tokenization.tokenizer import Tokenizer


async def generate(
    config: EngineConfig, prompts: list[Prompt], sampling: SamplingParams, display: Display, show_experts: int | None = None
) -> GenerateResult:
    """Run all prompts at once; ``show_experts`` is a layer by whose experts to colour them.

    Raises UserError before anything is started if one of them cannot be served.
    """
    born = psutil.Process().create_time()
    colours = None
    if show_experts is not None:
        colours = TokenColors(show_experts, check_layer(config, show_experts))
        sampling = replace(sampling, return_experts=(show_experts,))
    tokenizer, prompt_ids = encode_prompts(config, prompts)
    alone = config.single_pipeline()
    async with open_engine(alone, display.report, show_loading=display.loading) as engine:
        ready = time.time()
        display.start([prompt.text for prompt in prompts], colours)
        run = _GenerateRun(engine, tokenizer, sampling, display, colours)
        try:
            async with asyncio.TaskGroup() as group:
                pairs = enumerate(zip(prompts, prompt_ids, strict=True))
                tasks = [group.create_task(run.complete(index, prompt.text, ids)) for index, (prompt, ids) in pairs]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            display.stop()
        engine.router.scheduler.check_integrity()
        return GenerateResult(tuple(t.result() for t in tasks), engine, ready - born, run.first_token_at - born)


class _GenerateRun:
    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, sampling: SamplingParams, display: Display, colours: TokenColors | None
    ) -> None:
        self.engine, self.tokenizer, self.sampling, self.display = engine, tokenizer, sampling, display
        self.colours = colours
        self.first_token_at = float("inf")

    async def complete(self, index: int, prompt: str, prompt_ids: tuple[int, ...]) -> Completion:
        decoder = self.tokenizer.decoder()
        pieces: list[str] = []
        token_ids: list[int] = []
        experts: list[ExpertChoices] = []
        finish = None
        async for batch in self.engine.router.generate([SequenceRequest(prompt_ids, self.sampling)]):
            self.first_token_at = min(self.first_token_at, time.time())
            token_ids += [event.token_id for event in batch.events]
            experts += batch.experts
            finish = batch.events[-1].finish
            new = [decoder.push(event.token_id) for event in batch.events]
            new[-1] += decoder.finish() if finish else ""
            pieces += new
            self.display.add(index, "".join(new))
        assert finish is not None
        num_prompt, end = len(prompt_ids), len(prompt_ids) + len(token_ids) - 1
        chosen = by_layer(experts, 0, num_prompt), by_layer(experts, num_prompt, end)
        self.display.end(index, self._painted([*self.tokenizer.pieces(prompt_ids), *pieces], chosen))
        return Completion(prompt, "".join(pieces), tuple(token_ids), finish, *chosen)

    def _painted(self, pieces: list[str], chosen: tuple[ExpertIds, ExpertIds]) -> Segments | None:
        if self.colours is None:
            return None
        heaviest = [ids[0] for told in chosen for of_layer in told.values() for ids in of_layer]
        return self.colours.colorize(list(map(sanitize, pieces)), heaviest)
