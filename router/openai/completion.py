"""``/v1/completions`` without HTTP: from a parsed request to OpenAI's objects, whole or
streamed.
"""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from tramontane.proto.ports import TokenSource
from tramontane.proto.request import (
    NOT_FINITE_TOKEN,
    ExpertChoices,
    FinishReason,
    RequestOutput,
    RequestTimings,
    SequenceRequest,
    sequence_error,
)
from tramontane.router.engine.active_request import by_layer
from tramontane.router.engine.request_output import remap_seq_ids
from tramontane.router.openai.body_bounds import run_off_loop
from tramontane.router.openai.choice_text import ChoiceBuilder, completion_grammar, make_detokenizer
from tramontane.router.openai.completion_request import CompletionRequest
from tramontane.router.openai.logprobs import (
    TokenLogprob,
    index_by_position,
    prompt_logprobs,
    prompt_tokens,
)
from tramontane.router.openai.responses import (
    CompletionAnswer,
    CompletionChange,
    CompletionChoice,
    Timings,
    Usage,
)
from tramontane.router.openai.resume_state import (
    ChoiceUpdate,
    ProgressCallback,
    ResumeState,
    no_progress,
)
from tramontane.router.openai.served_model import (
    ServedModel,
    tokenize_prompts,
    validate_answer_size,
    validate_request,
)

BYTES_PER_VALUE = 40  # of JSON, for one log-probability with its token; an expert id takes less
BYTES_PER_TOKEN = 8  # of JSON, for a token of a prompt, as an id or as text


class Completion:
    """One request in progress: its sequences and their growing texts. What ``resume_state`` has
    sent is not sent again.
    """

    def __init__(
        self,
        model: ServedModel,
        request: CompletionRequest,
        prompt_ids: list[tuple[int, ...]],
        arrived_at: float,
        builder: ChoiceBuilder,
        resume_state: ResumeState,
    ) -> None:
        self._model, self._request, self._prompt_ids, self._arrived_at = (
            model,
            request,
            prompt_ids,
            arrived_at,
        )
        self._builder, self._choices, self._resume_state = builder, builder.choices, resume_state
        # whether a stream ends with an event about the usage
        self.includes_usage = request.includes_usage
        self.head: dict[str, Any] = {  # of every answer and chunk
            "id": f"{builder.id_prefix}-{resume_state.id}",
            "object": builder.object,
            "created": resume_state.created,
            "model": model.name,
            "system_fingerprint": None,  # until the router has named it
        }
        self._times: RequestTimings | None = None
        self._num_cached = 0  # tokens of prompts
        # those that are in the answer, and others; None without speculation
        self._drafts: tuple[int, int] | None = None
        # of JSON, about, of the last changes and of all, without generated text
        self.change_bytes = self.answer_bytes = 0
        self._decoded_prompts: dict[int, str] = {}
        self._num_echoed: dict[int, int] = {}  # characters of the prompt in the text, by choice
        self._new_token_ids: dict[int, list[int]] = {}  # of the last changes, by choice
        for index, state in resume_state.choices.items():
            self._choices[index].resume(state, is_whole=resume_state.is_buffered)
            self._num_echoed[index] = (
                len(self._prompt_text(index // request.n)) if request.echo else 0
            )

    @classmethod
    async def prepare(
        cls,
        model: ServedModel,
        request: CompletionRequest,
        arrived_at: float,
        builder: ChoiceBuilder | None = None,
        resume_state: ResumeState | None = None,
    ) -> "Completion":
        """Validate and tokenize. Raises RequestError for what can never run. Without a ``builder``
        answers are completions.
        """
        validate_request(model, request)
        prompt_ids = await tokenize_prompts(model, request.prompt, request.suffix)
        validate_answer_size(model, request, [len(ids) for ids in prompt_ids])
        if builder is None:
            texts = [
                make_detokenizer(model.tokenizer, request) for _ in range(request.num_sequences)
            ]
            builder = ChoiceBuilder(
                texts, grammar=await completion_grammar(model.tokenizer, request)
            )
        return cls(model, request, prompt_ids, arrived_at, builder, resume_state or ResumeState())

    def specs(self) -> list[SequenceRequest]:
        """Return the sequences: choice 2 of prompt 1 with n = 3 is sequence 1 * 3 + 2 = 5.

        With the client's seed its random numbers are those of choice 2, as if the prompt were
        alone. Without one they are those of choice 5, so that equal prompts get different texts.
        """
        request, state = self._request, self._resume_state
        sampling = replace(
            # routers always generate a token
            request.to_sampling_params(max(request.max_tokens, 1)),
            return_experts=request.return_experts,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs_count,
            grammar=self._builder.grammar,
            seed=state.seed if request.given_seed is None else request.given_seed,
        )
        num_choices = request.num_sequences if request.given_seed is None else request.n
        choices = [replace(sampling, choice=choice) for choice in range(num_choices)]
        specs = [
            SequenceRequest(
                ids,
                choices[(prompt * request.n + choice) % num_choices],
                already_admitted=state.is_resumed,
            )
            for prompt, ids in enumerate(self._prompt_ids)
            for choice in range(request.n)
        ]
        for index, choice_state in state.choices.items():
            specs[index] = replace(specs[index], output_ids=tuple(choice_state.token_ids))
        return specs

    async def run(
        self, source: TokenSource, report: ProgressCallback = no_progress
    ) -> dict[str, Any]:
        """Return the whole answer. See ``collect`` for ``report``."""
        # which share their long lists
        choices = [CompletionChoice(**choice) for choice in await self.collect(source, report)]
        return CompletionAnswer(
            **self.head, choices=choices, usage=self.usage, timings=self.timings
        ).as_json()

    async def collect(
        self, source: TokenSource, report: ProgressCallback = no_progress
    ) -> list[dict[str, Any]]:
        """Return the fields of whole choices. ``report`` gets all changes but the last; with them
        another ingress can resume.
        """
        parts: list[list[Mapping[str, Any]]] = [[] for _ in self._choices]
        for part in self._resume_state.parts:
            parts[part["index"]].append(part)
        async with aclosing(self.stream(source)) as batches:
            async for changes in batches:
                for change in changes:
                    parts[change["index"]].append(change)
                if not self.is_finished:
                    await report(self.take_updates(), changes, self.change_bytes)
        merge = self._builder.merge_changes
        return await run_off_loop(
            self.answer_bytes, lambda: [merge(changes, self._request) for changes in parts]
        )

    async def stream(self, source: TokenSource) -> AsyncGenerator[list[CompletionChange], None]:
        """Yield the changes of all choices whenever the source returns tokens, until every choice
        has finished.
        """
        yielded, specs = set(self._resume_state.choices), self.specs()
        running = [index for index, choice in enumerate(self._choices) if not choice.finish]
        num_prompt, has_begun = sum(map(len, self._prompt_ids)), bool(self._resume_state.choices)
        with self._model.counts.track(
            self._arrived_at, num_prompt, self._choices, has_begun=has_begun
        ) as recorder:
            async with aclosing(source.generate([specs[index] for index in running])) as batches:
                async for batch in batches:
                    recorder.observe(batch)
                    if batch.fingerprint:
                        self.head["system_fingerprint"] = batch.fingerprint
                    own = batch if len(running) == len(specs) else remap_seq_ids(batch, running)
                    self.change_bytes = self._json_bytes(own, yielded)
                    self.answer_bytes += self.change_bytes
                    changes = await run_off_loop(
                        self.change_bytes, partial(self._process, own, yielded)
                    )
                    self._times = batch.times
                    self._num_cached += batch.num_cached
                    if changes:
                        yield changes
                    if self.is_finished:
                        return

    def take_updates(self) -> list[ChoiceUpdate]:
        """Return what another ingress needs in order to continue after the last changes."""
        new, self._new_token_ids = self._new_token_ids, {}
        return [
            (index, ids, (choice := self._choices[index]).finish, choice.pending_logprobs)
            for index, ids in new.items()
        ]

    @property
    def is_finished(self) -> bool:
        """True once every choice has finished."""
        return all(choice.finish for choice in self._choices)

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the pipeline that made the last tokens, if it is known."""
        fingerprint: str | None = self.head["system_fingerprint"]
        return fingerprint

    def chunk(
        self, choices: Sequence[Mapping[str, Any]], *, has_tokens: bool = True
    ) -> dict[str, Any]:
        """Return one server-sent event. With include_usage every chunk except the last has a usage
        of null.

        With continuous_usage_stats each has the usage so far, without any new tokens if it comes
        before those: ``has_tokens``.
        """
        chunk: dict[str, Any] = {**self.head, "choices": choices}
        if self._request.counts_in_chunks or self._request.includes_usage:
            chunk["usage"] = (
                self._usage(has_tokens=has_tokens).as_json()
                if self._request.counts_in_chunks
                else None
            )
        return chunk

    def last_chunk(self) -> dict[str, Any]:
        """Return the event with the usage."""
        return self._builder.chunk(
            **self.head, choices=[], usage=self.usage, timings=self.timings
        ).as_json()

    @property
    def usage(self) -> Usage:
        """Number of tokens so far. A prompt counts once, however many choices it has."""
        return self._usage(has_tokens=True)

    def _usage(self, *, has_tokens: bool) -> Usage:
        prompt = sum(map(len, self._prompt_ids))
        completion = sum(choice.num_tokens for choice in self._choices) if has_tokens else 0
        thoughts = [
            choice.num_reasoning_tokens
            for choice in self._choices
            if choice.num_reasoning_tokens is not None
        ]
        # a router that continues one of several choices may find their prompt again
        cached = min(self._num_cached, prompt)
        drafts = self._drafts if has_tokens or self._drafts is None else (0, 0)
        return Usage.of(
            prompt, completion, cached, sum(thoughts) * has_tokens if thoughts else None, drafts
        )

    @property
    def timings(self) -> Timings:
        """Seconds in the router, by phase. ``ingress_s`` is the rest of the time since the request
        arrived.
        """
        assert self._times is not None
        times = self._times._asdict() | {
            "ingress_s": time.monotonic() - self._arrived_at - sum(self._times)
        }
        rounded = {name: round(seconds, 6) for name, seconds in times.items()}
        return Timings(**rounded, cached_tokens=self.usage.prompt_tokens_details.cached_tokens)

    def _json_bytes(self, batch: RequestOutput, yielded: set[int]) -> int:
        """Return about how many bytes of JSON a batch becomes. The first change of a choice may
        repeat its prompt.
        """
        num_bytes = batch.num_values * BYTES_PER_VALUE
        if self._request.echo or self._request.return_token_ids:
            firsts = {event.seq_id for event in batch.events} - yielded
            num_bytes += BYTES_PER_TOKEN * sum(map(self._num_prompt, firsts))
        return num_bytes

    def _process(self, batch: RequestOutput, yielded: set[int]) -> list[CompletionChange]:
        """Return one change per choice that the batch has tokens of. ``yielded``: choices that had
        a change before.
        """
        texts: dict[int, list[str]] = {}
        token_ids: dict[int, list[int]] = {}
        scores = index_by_position(batch.logprobs)
        for event in batch.events:
            choice = self._choices[event.seq_id]
            if choice.finish is not None:
                continue
            own_texts, own_ids = (
                texts.setdefault(event.seq_id, []),
                token_ids.setdefault(event.seq_id, []),
            )
            if not self._request.max_tokens:
                if event.token_id == NOT_FINITE_TOKEN:  # log-probabilities of the prompt may lack
                    raise sequence_error(event)
                choice.finish = FinishReason.LENGTH  # drops the one token that was generated
                continue
            score = (
                scores.get((event.seq_id, self._num_prompt(event.seq_id) + choice.num_tokens))
                if scores
                else None
            )
            own_texts.append(choice.push(event, score))
            own_ids.append(event.token_id)
        self._new_token_ids = token_ids
        self._count_drafts(batch, token_ids)
        firsts = texts.keys() - yielded
        changes = [
            self._change(index, "".join(texts[index]), token_ids[index], yielded) for index in texts
        ]
        if self._request.logprobs is not None or self._request.prompt_logprobs is not None:
            for change in changes:
                self._add_logprobs(change, scores, is_first=change["index"] in firsts)
        if self._request.return_experts:
            self._add_experts(changes, batch.experts)
        return changes

    def _count_drafts(self, batch: RequestOutput, taken: Mapping[int, Sequence[int]]) -> None:
        """Count the drafts of choices that have taken tokens of this batch. Right ones after a stop
        string count as wrong.
        """
        for index, num_drafts, num_right in batch.drafts:
            if index in taken:  # else it had finished
                num_accepted = min(num_right, len(taken[index]))
                accepted, rejected = self._drafts or (0, 0)
                self._drafts = accepted + num_accepted, rejected + num_drafts - num_accepted

    def _change(
        self, index: int, text: str, token_ids: list[int], yielded: set[int]
    ) -> CompletionChange:
        finish = self._choices[index].finish
        change: CompletionChange = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": finish and finish.value,
        }
        prompt = index // self._request.n
        is_first = index not in yielded
        yielded.add(index)
        if is_first and self._request.echo:
            change["text"] = self._prompt_text(prompt) + text
            self._num_echoed[index] = len(change["text"]) - len(text)
        if self._request.return_token_ids:
            change["token_ids"] = token_ids
            change["prompt_token_ids"] = list(self._prompt_ids[prompt]) if is_first else None
        return change

    def _add_logprobs(
        self,
        change: CompletionChange,
        scores: dict[tuple[int, int], TokenLogprob],
        *,
        is_first: bool,
    ) -> None:
        """Add log-probabilities to a change. Those of the prompt are in the first one: they come
        with the first token.
        """
        request, tokenizer, index = self._request, self._model.tokenizer, change["index"]
        is_first = is_first and request.prompt_logprobs_count is not None
        echoed = (
            prompt_tokens(tokenizer, self._prompt_ids[index // request.n], index, scores)
            if is_first
            else []
        )
        if is_first and request.prompt_logprobs is not None:
            change["prompt_logprobs"] = prompt_logprobs(tokenizer, echoed, request.prompt_logprobs)
        if request.logprobs is not None:
            start = self._num_echoed.get(index, 0)
            new = [
                token._replace(offset=start + token.offset)
                for token in self._choices[index].take_logprobs()
            ]
            if tokens := [*(echoed if request.echo else ()), *new]:
                change["logprobs"] = self._builder.logprobs(tokenizer, tokens, request.logprobs)

    def _num_prompt(self, index: int) -> int:
        """Return the number of tokens in a sequence's prompt."""
        return len(self._prompt_ids[index // self._request.n])

    def _add_experts(self, changes: list[CompletionChange], batch: Sequence[ExpertChoices]) -> None:
        """Add the experts since the last change, of the tokens that a choice has: more may have
        been generated than it takes.
        """
        own: dict[int, list[ExpertChoices]] = {change["index"]: [] for change in changes}
        for choices in batch:
            if choices.seq_id in own:
                own[choices.seq_id].append(choices)
        for change in changes:
            index = change["index"]
            num_prompt = self._num_prompt(index)
            if prompt := by_layer(own[index], 0, num_prompt):
                change["prompt_experts"] = prompt
            if generated := by_layer(
                own[index], num_prompt, num_prompt + self._choices[index].num_tokens - 1
            ):
                change["experts"] = generated

    def _prompt_text(self, prompt: int) -> str:
        given = self._request.prompt[prompt]
        if isinstance(given, str):
            return given
        if prompt not in self._decoded_prompts:  # all choices repeat it
            self._decoded_prompts[prompt] = (
                self._model.tokenizer.decode(given) if self._model.tokenizer else ""
            )
        return self._decoded_prompts[prompt]
