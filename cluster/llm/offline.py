"""``LLM``: a pipeline for the Python program that creates it, without a server. Its results have
the shape of vLLM's.
"""

import asyncio
import reprlib
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tramontane.cluster.config.engine_config import EngineConfig, with_first_names
from tramontane.cluster.console.display import Display
from tramontane.cluster.llm.engine_thread import EngineThread
from tramontane.cluster.llm.inputs import (
    Message,
    Prompt,
    PromptEncoder,
    SamplingParams,
    as_conversations,
    as_prompts,
)
from tramontane.cluster.pipeline.engine import Engine
from tramontane.proto.errors import ConfigError, RequestError
from tramontane.proto.request import FinishReason, Request, sequence_error
from tramontane.router.openai.detokenizer import ChatDetokenizer, ChoiceDetokenizer
from tramontane.router.openai.logprobs import TokenLogprobs as TokenLogprob
from tramontane.router.openai.logprobs import index_by_position


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt. ``index`` counts the completions of the same prompt.

    ``text`` ends before a stop string, and ``token_ids`` with the token that completed it.
    ``logprobs`` has an entry per token if ``SamplingParams.logprobs`` is set, or else is empty.
    ``reasoning``: a model's reasoning before an answer to ``chat``; it is not in ``text``.
    ``error``: the reason if ``finish_reason`` is an error, else "".
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """A prompt and its completions. ``prompt`` is None where the prompt was given as token ids.

    ``prompt_logprobs`` has an entry per token of the prompt after the first if
    ``SamplingParams.prompt_logprobs`` is set, or else is empty. ``num_cached_tokens``: tokens of
    the prompt that the first completion found in the caches.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    # the same output may have been computed or found
    num_cached_tokens: int = field(default=0, compare=False)


class LLM:
    """A model in its own pipeline: over Ray, or with ``local=True`` in this process.

    Keyword arguments are keys of ``EngineConfig``, such as ``LLM(model=folder, stages=2)``;
    ``config`` gives all of them at once. Close it, or use it as a context manager, so that the
    pipeline is removed; otherwise that happens when the object is collected or the program ends.
    ``generate`` and ``chat`` may be called from several threads. ``progress`` shows loading and a
    progress bar on standard error.

    Raises:
        ConfigError: a key or a combination of keys is wrong.
        CheckpointError: the model folder cannot be read.
        PlanError: no plan fits the machines.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        progress: bool = True,
        **options: Any,  # EngineConfig validates them
    ) -> None:
        if config is not None and (options or model is not None):
            raise ConfigError("give an EngineConfig, or its keys as keyword arguments, not both")
        options = with_first_names(options)
        if many := [
            key for key in ("replicas", "max_replicas") if options.get(key) not in (None, 1)
        ]:
            raise ConfigError(
                f"{many[0]} is {options[many[0]]}, and LLM runs one pipeline; several are for"
                " tramontane serve"
            )
        if not isinstance(config, EngineConfig | None):
            raise ConfigError(
                f"config is {reprlib.repr(config)}; it must be an EngineConfig, such as"
                " EngineConfig(stages=2)"
            )
        config = config or EngineConfig.build(None, {"model": model} | options)
        config.check_combinations()
        self.config = config.single_pipeline()
        self._progress = progress
        self._engine = EngineThread(self.config, Display(live=False) if progress else None)
        self._finalizer = weakref.finalize(self, self._engine.close)
        plan = self._engine.engine.plan
        try:
            self._prompts = PromptEncoder(
                self.config.model, plan.max_model_len, plan.args.vocab_size
            )
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        n: int | None = None,
    ) -> list[GenerationOutput]:
        """Complete all prompts at once; the results are in the order of the prompts.

        ``prompts`` is one text, one sequence of token ids, or several of either; each gets
        ``sampling_params.n`` completions. Without a seed the completions of all prompts are sampled
        apart, so equal prompts get different texts, the same in every run. The argument ``n`` is
        deprecated.

        Raises:
            RequestError: a prompt is empty or does not fit into the context; no completions are
                generated then.
            PipelineError: the pipeline failed and could not be started again.
        """
        several = as_prompts(prompts)
        encoded = [
            self._prompts.encode(prompt, f"prompt {number}")
            for number, prompt in enumerate(several, start=1)
        ]
        texts = [prompt if isinstance(prompt, str) else None for prompt in several]
        return self._complete(texts, encoded, _sampling(sampling_params, n), is_answer=False)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        n: int | None = None,
        reasoning_effort: str | None = None,
    ) -> list[GenerationOutput]:
        """Answer one conversation, or several at once, in the checkpoint's chat format.

        A message is ``{"role": "user", "content": "..."}``; the roles are system, user and
        assistant. An assistant's message may have its ``reasoning`` too. ``reasoning_effort``: how
        much the model is to think, None for its default. The argument ``n`` is deprecated in favor
        of ``sampling_params.n``.

        Raises:
            RequestError: a conversation is empty, not in the format's order, or does not fit into
                the context; or the model does not support the effort.
            CheckpointError: the model folder has no chat format.
        """
        encode, several = self._prompts.encode_chat, as_conversations(messages)
        encoded = [
            encode(each, f"conversation {number}", reasoning_effort)
            for number, each in enumerate(several, start=1)
        ]
        return self._complete(
            [None] * len(encoded), encoded, _sampling(sampling_params, n), is_answer=True
        )

    def close(self) -> None:
        """Remove the pipeline, and the Ray cluster that was started for it. Safe to call more than
        once.
        """
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _complete(
        self,
        texts: Sequence[str | None],
        encoded: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        *,
        is_answer: bool,
    ) -> list[GenerationOutput]:
        n, tokenizer = sampling.n, self._prompts.tokenizer
        if sampling.stop and tokenizer is None:
            raise RequestError("stop needs text, and this model has no tokenizer")

        async def complete(engine: Engine, progress: Progress) -> list[GenerationOutput]:
            bar = progress.add_task("generating", total=len(encoded) * n)

            async def complete_one(prompt: int, index: int) -> _Completion:
                choice = index if sampling.seed is not None else prompt * n + index
                text = (
                    self._prompts.answer_text(encoded[prompt], sampling)
                    if is_answer
                    else ChoiceDetokenizer(
                        tokenizer,
                        sampling.stop,
                        sampling.min_tokens,
                        stop_token_ids=sampling.stop_token_ids,
                    )
                )
                request = Request.of(encoded[prompt], sampling.of_choice(choice))
                output = await _completion(engine, text, request, index)
                progress.advance(bar)
                return output

            async with asyncio.TaskGroup() as group:
                tasks = [
                    [group.create_task(complete_one(prompt, index)) for index in range(n)]
                    for prompt in range(len(encoded))
                ]
            rows = zip(texts, encoded, tasks, strict=True)
            return [
                _to_output(text, ids, [task.result() for task in row]) for text, ids, row in rows
            ]

        try:
            with _progress_bar(self._progress) as progress:
                return self._engine.run(lambda engine: complete(engine, progress))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None


def _sampling(sampling: SamplingParams | None, n: int | None) -> SamplingParams:
    """Return the parameters of a call, with ``n`` of its deprecated argument if that was given."""
    sampling = SamplingParams() if sampling is None else sampling
    if not isinstance(sampling, SamplingParams):
        raise RequestError(
            f"sampling_params is {reprlib.repr(sampling)}; give a SamplingParams, such as"
            " SamplingParams(n=2)"
        )
    if n is None:
        return sampling
    warnings.warn(
        "the argument n is deprecated; use SamplingParams(n=...)", DeprecationWarning, stacklevel=3
    )
    return replace(sampling, n=n)


# and log-probabilities and cached tokens of the prompt
_Completion = tuple[CompletionOutput, tuple[TokenLogprob, ...], int]


def _to_output(
    text: str | None, prompt_ids: tuple[int, ...], completions: Sequence[_Completion]
) -> GenerationOutput:
    return GenerationOutput(
        text, prompt_ids, tuple(output for output, *_ in completions), *completions[0][1:]
    )


async def _completion(
    engine: Engine, text: ChoiceDetokenizer, request: Request, index: int
) -> _Completion:
    """Generate completion ``index`` of a prompt; its text is empty where the model has no
    tokenizer.
    """
    pieces: list[str] = []
    token_ids: list[int] = []
    # by position: of the prompt, then of the completion
    logprobs: dict[int, TokenLogprob] = {}
    num_cached, failure = 0, ""
    async with aclosing(engine.router.generate(request)) as batches:
        async for batch in batches:
            num_cached += batch.num_cached
            scores = index_by_position(batch.logprobs)
            logprobs.update((position, score) for (_, position), score in scores.items())
            for event in batch.events:
                if event.finish is FinishReason.ERROR:  # its token is not part of the answer
                    text.finish, failure = FinishReason.ERROR, str(sequence_error(event))
                elif text.finish is None:
                    pieces.append(text.push(event))
                    token_ids.append(event.token_id)
            if text.finish is not None:
                break
    assert text.finish is not None
    ours = [logprobs[position] for position in sorted(logprobs)]
    num_prompt_ids = len(request.sequences[0].prompt_ids)
    num_prompt = sum(position < num_prompt_ids for position in logprobs)
    own = ours[num_prompt:][: len(token_ids)]
    reasoning = text.take_reasoning() if isinstance(text, ChatDetokenizer) else ""
    output = CompletionOutput(
        index, "".join(pieces), tuple(token_ids), text.finish, tuple(own), reasoning, failure
    )
    return output, tuple(ours[:num_prompt]), num_cached


@contextmanager
def _progress_bar(shown: bool) -> Iterator[Progress]:
    """Show completed prompts on standard error, if that is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, disable=not (shown and console.is_terminal)
    ) as progress:
        yield progress
