"""``tramontane generate``: continue prompts, and print each text as it grows."""

import asyncio
import sys
from dataclasses import replace
from typing import Annotated

import typer
from rich.segment import Segments

from tramontane.cluster.common.process_age import process_age_s
from tramontane.cluster.common.signals import cancel_on_signal
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.engine_keys import BatchingKeys, ExpertKeys, PipelineKeys, RunKeys
from tramontane.cluster.console.display import Display, sanitize
from tramontane.cluster.console.options import (
    SAMPLING,
    Temperature,
    TopK,
    TopP,
    flags_of,
    load_config,
    option,
    with_options,
)
from tramontane.cluster.console.prompts import (
    Prompt,
    encode_prompts,
    read_prompts,
    sampling_params,
    sized_for_prompts,
)
from tramontane.cluster.console.run_summary import (
    Completion,
    ExpertIds,
    GenerateResult,
    TokenColors,
    as_json,
    cache_note,
    check_layer,
    render_summary,
    truncation_note,
)
from tramontane.cluster.pipeline.engine import Engine, open_engine
from tramontane.proto.request import (
    ExpertChoices,
    FinishReason,
    Request,
    SamplingParams,
    sequence_error,
)
from tramontane.router.engine.active_request import by_layer
from tramontane.router.tokenization.tokenizer import Tokenizer


@with_options(*flags_of(PipelineKeys, ExpertKeys, BatchingKeys, RunKeys))
def generate(
    context: typer.Context,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            help=(
                "Prompts. Without any, each line of standard input is one, except blank lines; with"
                " any, it is not read."
            )
        ),
    ] = None,
    max_tokens: Annotated[
        int, option("--max-tokens", help="New tokens per prompt.", panel=SAMPLING)
    ] = 128,
    temperature: Temperature = 0.8,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    show_experts: Annotated[
        int | None,
        option(
            "--show-experts", help="Color each token by the heaviest of its experts in this layer."
        ),
    ] = None,
) -> None:
    """Continue prompts, all of them at once, and print how busy the stages were."""
    with load_config(context) as settings:
        sampling = sampling_params(max_tokens, temperature, top_p, top_k, settings.seed)
        display = Display(live=sys.stdout.isatty(), silent=settings.json_output)
        try:
            run = run_generate(settings, read_prompts(prompts), sampling, display, show_experts)
            outcome = asyncio.run(cancel_on_signal(run))
        finally:
            display.stop()
    if (note := truncation_note(outcome, max_tokens)) is not None:
        display.note(note)
    for number, completion in enumerate(outcome.completions, start=1):
        if completion.error:
            display.note(f"prompt {number}: {completion.error}")
    if settings.json_output:
        print(as_json(outcome))
    else:
        display.stderr.print(render_summary(outcome))


async def run_generate(
    config: EngineConfig,
    prompts: list[Prompt],
    sampling: SamplingParams,
    display: Display,
    show_experts: int | None = None,
) -> GenerateResult:
    """Run all prompts at once; ``show_experts`` is the layer whose experts color the tokens.

    Raises UserError before any process is started if one of the prompts cannot be served.
    """
    colors = None
    if show_experts is not None:
        colors = TokenColors(show_experts, check_layer(config, show_experts))
        sampling = replace(sampling, return_experts=(show_experts,))
    tokenizer, prompt_ids = encode_prompts(config, prompts)
    config = sized_for_prompts(config.single_pipeline(), prompt_ids, sampling.max_tokens)
    async with open_engine(config, display.report, show_loading=display.loading) as engine:
        ready_s = process_age_s()
        display.note_in_terminal(cache_note(engine.plan))
        devices = await engine.list_devices() if config.json_output else ()
        display.start([prompt.text for prompt in prompts], colors)
        run = _GenerateRun(engine, tokenizer, sampling, display, colors)
        try:
            async with asyncio.TaskGroup() as group:
                pairs = enumerate(zip(prompts, prompt_ids, strict=True))
                tasks = [
                    group.create_task(run.complete(index, prompt.text, ids))
                    for index, (prompt, ids) in pairs
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            display.stop()
        engine.router.scheduler.check_integrity()
        completions = tuple(task.result() for task in tasks)
        seconds = ready_s, run.first_token_s
        now = engine.router.snapshot()
        drafts = (
            (now.num_draft_tokens, now.num_accepted_draft_tokens)
            if config.speculative_config
            else None
        )
        return GenerateResult(
            completions,
            engine.plan,
            engine.usage,
            devices,
            *seconds,
            engine.router.fingerprint,
            drafts,
        )


class _GenerateRun:
    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        display: Display,
        colors: TokenColors | None,
    ) -> None:
        self.engine, self.tokenizer, self.sampling, self.display = (
            engine,
            tokenizer,
            sampling,
            display,
        )
        self.colors = colors
        self.first_token_s = float("inf")  # since the command was started

    async def complete(self, index: int, prompt: str, prompt_ids: tuple[int, ...]) -> Completion:
        decoder = self.tokenizer.decoder()
        pieces: list[str] = []
        token_ids: list[int] = []
        experts: list[ExpertChoices] = []
        finish, error = None, ""
        request = Request.of(prompt_ids, self.sampling)
        async for batch in self.engine.router.generate(request):
            self.first_token_s = min(self.first_token_s, process_age_s())
            finish = batch.events[-1].finish
            if finish is FinishReason.ERROR:
                error = str(sequence_error(batch.events[-1]))
            new_ids = [
                event.token_id for event in batch.events if event.finish is not FinishReason.ERROR
            ]
            new = [*map(decoder.push, new_ids), *([decoder.finish()] if finish else [])]
            token_ids += new_ids
            experts += batch.experts
            pieces += new
            self.display.add(index, "".join(new))
        assert finish is not None
        num_prompt, end = len(prompt_ids), len(prompt_ids) + len(token_ids) - 1
        chosen = by_layer(experts, 0, num_prompt), by_layer(experts, num_prompt, end)
        self.display.end(
            index, self._colorize([*self.tokenizer.pieces(prompt_ids), *pieces], chosen)
        )
        return Completion(prompt, "".join(pieces), tuple(token_ids), finish, *chosen, error)

    def _colorize(self, pieces: list[str], chosen: tuple[ExpertIds, ExpertIds]) -> Segments | None:
        if self.colors is None:
            return None
        heaviest = [ids[0] for experts in chosen for layer in experts.values() for ids in layer]
        return self.colors.colorize(list(map(sanitize, pieces)), heaviest)
