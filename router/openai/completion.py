"""``/v1/completions`` without the HTTP: a parsed request in, OpenAI's objects out.

In what the answers of endpoints differ, and what a whole answer is made of.
"""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import Any

from tramontane.proto.errors import ParameterError
from tramontane.proto.ports import TokenSource
from tramontane.proto.request import ExpertChoices, FinishReason, RequestOutput, RequestTimings, SequenceRequest
from tramontane.router.engine.active_request import by_layer
from tramontane.router.engine.resumable_request import remap_seq_ids
from tramontane.router.openai.choice_text import ChoiceDetokenizer
from tramontane.router.openai.completion_request import CompletionRequest
from tramontane.router.openai.logprobs import (
    TokenLogprobs,
    TokenWithLogprobs,
    completion_logprobs,
    index_by_position,
    merge_logprobs,
    prompt_logprobs,
    prompt_tokens,
)
from tramontane.router.openai.resume_state import ChoiceUpdate, ResumeState
from tramontane.router.openai.served_model import ServedModel, tokenize_prompts, validate_prompts, validate_request
from tramontane.router.structured.grammar import build_grammar
from tramontane.router.structured.validator import run_in_grammar_pool
from tramontane.router.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChoiceBuilder:
    """Of one endpoint. ``choices``: one for each sequence; ``grammar``: of every answer."""

    choices: Sequence[ChoiceDetokenizer]
    logprobs: Callable[[Tokenizer | None, Sequence[TokenWithLogprobs], int], dict[str, Any]] = completion_logprobs
    merge_logprobs: Callable[[Iterable[dict[str, Any] | None]], dict[str, Any]] = merge_logprobs
    grammar: str = ""

    def merge_chunks(self, changes: Sequence[dict[str, Any]], request: CompletionRequest) -> dict[str, Any]:
        """One choice, from all of its changes."""
        layers = request.return_experts
        text = "".join(change["text"] for change in changes)
        whole = changes[0] | {"text": text, "finish_reason": changes[-1]["finish_reason"]}
        if "token_ids" in whole:
            whole["token_ids"] = [token_id for change in changes for token_id in change["token_ids"]]
        if request.logprobs is not None:
            whole["logprobs"] = self.merge_logprobs(change["logprobs"] for change in changes)
        for name in ("prompt_experts", "experts") if layers else ():
            parts = [change.get(name, {}) for change in changes]
            whole[name] = {str(layer): [ids for part in parts for ids in part.get(str(layer), ())] for layer in layers}
        return whole


ProgressCallback = Callable[[list[ChoiceUpdate], list[dict[str, Any]]], Awaitable[None]]


async def no_progress(_news: list[ChoiceUpdate], _changes: list[dict[str, Any]]) -> None:
    """Whoever asks hears of the whole answer only."""


class Completion:
    """One request on its way: its sequences, and the texts that grow.

    What ``begun`` has told already is not told again.
    """

    def __init__(
        self,
        model: ServedModel,
        request: CompletionRequest,
        prompt_ids: list[tuple[int, ...]],
        arrived_at: float,
        form: ChoiceBuilder,
        begun: ResumeState,
    ) -> None:
        self._request = request
        self._model = model
        self._prompt_ids = prompt_ids
        self._form, self._choices, self._begun = form, form.choices, begun
        self._head = {
            "id": f"cmpl-{begun.id}",
            "object": "text_completion",
            "created": begun.created,
            "model": model.name,
        }
        self._arrived_at = arrived_at
        self._times: RequestTimings | None = None
        self._num_echoed: dict[int, int] = {}  # characters, by choice
        self._news: dict[int, list[int]] = {}  # tokens of the last changes, by choice
        for index, told in begun.choices.items():
            self._choices[index].resume(told, is_whole=begun.is_buffered)
            self._num_echoed[index] = len(self._prompt_text(index // request.n)) if request.echo else 0

    @classmethod
    async def prepare(
        cls,
        model: ServedModel,
        request: CompletionRequest,
        arrived_at: float,
        form: ChoiceBuilder | None = None,
        begun: ResumeState | None = None,
    ) -> "Completion":
        """Tokenize and bound. Raises RequestError for what could never run. Without a ``form`` answers are completions."""
        validate_request(model, request)
        prompt_ids = await tokenize_prompts(model, request.prompt)
        validate_prompts(model, request, [len(ids) for ids in prompt_ids])
        if form is None:
            texts = [ChoiceDetokenizer(model.tokenizer, request.stop, request.min_tokens) for _ in range(request.num_sequences)]
            form = ChoiceBuilder(texts, grammar=await _grammar(model, request))
        return cls(model, request, prompt_ids, arrived_at, form, begun or ResumeState())

    def specs(self) -> list[SequenceRequest]:
        """Choice 2 of prompt 1 with n = 3 is sequence 1 * 3 + 2 = 5. Routers make a token also where none is wanted."""
        request = self._request
        sampling = replace(
            request.to_sampling_params(max(request.max_tokens, 1)),
            return_experts=request.return_experts,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs_count,
            grammar=self._form.grammar,
            seed=self._begun.seed if request.seed is None else request.seed,
        )
        choices = [replace(sampling, choice=choice) for choice in range(request.n)]
        had_place = self._begun.is_resumed
        specs = [SequenceRequest(ids, choice, already_admitted=had_place) for ids in self._prompt_ids for choice in choices]
        for index, told in self._begun.choices.items():
            specs[index] = replace(specs[index], output_ids=tuple(told.token_ids))
        return specs

    async def run(self, source: TokenSource, tell: ProgressCallback = no_progress) -> dict[str, Any]:
        """The whole answer at once. ``tell`` hears how it grows, until it is finished, for a door that may have to go on."""
        parts: list[list[dict[str, Any]]] = [[] for _ in self._choices]
        for part in self._begun.parts:
            parts[part["index"]].append(part)
        async with aclosing(self.stream(source)) as changes:
            async for choices in changes:
                for choice in choices:
                    parts[choice["index"]].append(choice)
                if not self.is_finished:
                    await tell(self.take_updates(), choices)
        choices = [self._form.merge_chunks(changes, self._request) for changes in parts]
        return {**self._head, "choices": choices, "usage": self.usage, "timings": self.timings}

    async def stream(self, source: TokenSource) -> AsyncGenerator[list[dict[str, Any]], None]:
        """What has changed, choice by choice, each time something is ready; ends with the last choice."""
        yielded, specs = set(self._begun.choices), self.specs()
        going = [index for index, choice in enumerate(self._choices) if not choice.finish]
        num_prompt, has_begun = sum(map(len, self._prompt_ids)), bool(self._begun.choices)
        with self._model.counts.track(self._arrived_at, num_prompt, self._choices, has_begun=has_begun) as counted:
            async with aclosing(source.generate([specs[index] for index in going])) as batches:
                async for batch in batches:
                    counted.observe(batch)
                    changes = self._process(batch if len(going) == len(specs) else remap_seq_ids(batch, going), yielded)
                    self._times = batch.times
                    if changes:
                        yield changes
                    if self.is_finished:
                        return

    def take_updates(self) -> list[ChoiceUpdate]:
        """What another door would have to know to go on after the last changes."""
        news, self._news = self._news, {}
        return [(index, ids, (choice := self._choices[index]).finish, choice.pending_logprobs) for index, ids in news.items()]

    @property
    def is_finished(self) -> bool:
        return all(choice.finish for choice in self._choices)

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One server-sent event. With include_usage every chunk but the last has a usage of null."""
        return {**self._head, "choices": choices} | ({"usage": None} if self._request.includes_usage else {})

    def last_chunk(self) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": self.usage, "timings": self.timings}

    @property
    def usage(self) -> dict[str, int]:
        """A prompt counts once, however many choices it has."""
        prompt = sum(map(len, self._prompt_ids))
        completion = sum(choice.num_tokens for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    @property
    def timings(self) -> dict[str, float]:
        """Seconds in the router, by phase, and all the rest of them, spent in the doors."""
        assert self._times is not None
        inside = asdict(self._times)
        times = {"ingress_s": time.monotonic() - self._arrived_at - sum(inside.values()), **inside}
        return {name: round(seconds, 6) for name, seconds in times.items()}

    def _process(self, batch: RequestOutput, yielded: set[int]) -> list[dict[str, Any]]:
        texts: dict[int, list[str]] = {}
        token_ids: dict[int, list[int]] = {}
        scores = index_by_position(batch.logprobs)
        for event in batch.events:
            choice = self._choices[event.seq_id]
            if choice.finish is not None:
                continue
            own_texts, own_ids = texts.setdefault(event.seq_id, []), token_ids.setdefault(event.seq_id, [])
            if not self._request.max_tokens:
                choice.finish = FinishReason.LENGTH  # the one token that was made is nobody's
                continue
            score = scores.get((event.seq_id, self._num_prompt(event.seq_id) + choice.num_tokens)) if scores else None
            own_texts.append(choice.push(event, score))
            own_ids.append(event.token_id)
        self._news = token_ids
        firsts = texts.keys() - yielded
        changes = [self._chunk_for(index, "".join(texts[index]), token_ids[index], yielded) for index in texts]
        if self._request.logprobs is not None or self._request.prompt_logprobs is not None:
            for change in changes:
                self._add_logprobs(change, scores, is_first=change["index"] in firsts)
        if self._request.return_experts:
            self._add_experts(changes, batch.experts)
        return changes

    def _chunk_for(self, index: int, text: str, token_ids: list[int], yielded: set[int]) -> dict[str, Any]:
        finish = self._choices[index].finish
        change: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": finish and finish.value,
        }
        prompt = index // self._request.n
        first = index not in yielded
        yielded.add(index)
        if first and self._request.echo:
            change["text"] = self._prompt_text(prompt) + text
            self._num_echoed[index] = len(change["text"]) - len(text)
        if self._request.return_token_ids:
            change["token_ids"] = token_ids
            change["prompt_token_ids"] = list(self._prompt_ids[prompt]) if first else None
        return change

    def _add_logprobs(self, change: dict[str, Any], scores: dict[tuple[int, int], TokenLogprobs], *, is_first: bool) -> None:
        """The prompt's with the first change: they came with the first token."""
        request, tokenizer, index = self._request, self._model.tokenizer, change["index"]
        prompt = index // request.n
        is_first = is_first and request.prompt_logprobs_count is not None
        echoed = prompt_tokens(tokenizer, self._prompt_ids[prompt], index, scores) if is_first else []
        if is_first and request.prompt_logprobs is not None:
            change["prompt_logprobs"] = prompt_logprobs(tokenizer, echoed, request.prompt_logprobs)
        if request.logprobs is not None:
            start = self._num_echoed.get(index, 0)
            told = [token._replace(offset=start + token.offset) for token in self._choices[index].take_logprobs()]
            if told := [*(echoed if request.echo else ()), *told]:
                change["logprobs"] = self._form.logprobs(tokenizer, told, request.logprobs)

    def _num_prompt(self, index: int) -> int:
        """Tokens of a sequence's prompt."""
        return len(self._prompt_ids[index // self._request.n])

    def _add_experts(self, changes: list[dict[str, Any]], news: Sequence[ExpertChoices]) -> None:
        """What is known since the last change; of the tokens that a choice has, also where more were made than it takes."""
        own: dict[int, list[ExpertChoices]] = {change["index"]: [] for change in changes}
        for choices in news:
            if choices.seq_id in own:
                own[choices.seq_id].append(choices)
        for change in changes:
            index = change["index"]
            num_prompt = self._num_prompt(index)
            made = by_layer(own[index], num_prompt, num_prompt + self._choices[index].num_tokens - 1)
            told = {"prompt_experts": by_layer(own[index], 0, num_prompt), "experts": made}
            change |= {name: layers for name, layers in told.items() if layers}

    def _prompt_text(self, prompt: int) -> str:
        given = self._request.prompt[prompt]
        if isinstance(given, str):
            return given
        return self._model.tokenizer.decode(given) if self._model.tokenizer else ""


async def _grammar(model: ServedModel, request: CompletionRequest) -> str:
    if request.response_format is None:
        return ""
    if model.tokenizer is None:
        raise ParameterError("response_format needs text, and this model has no tokenizer", "response_format")
    return await run_in_grammar_pool(lambda: build_grammar(request.response_format, num_sequences=request.num_sequences))
