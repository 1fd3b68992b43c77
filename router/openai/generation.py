"""A request of any API as token ids, sampling parameters and a grammar, and its progress.

Every API parses its requests to a ``GenerationRequest``, and writes its answers from the changes of
a ``Generation``, see ``formatter``.
"""

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from tramontane.proto.ports import TokenSource
from tramontane.proto.request import (
    NOT_FINITE_TOKEN,
    ExpertChoices,
    FinishReason,
    Request,
    RequestOutput,
    RequestTimings,
    SamplingParams,
    SequenceRequest,
    TokenEvent,
    sequence_error,
)
from tramontane.router.engine.active_request import by_layer
from tramontane.router.engine.request_output import remap_seq_ids
from tramontane.router.openai.detokenizer import ChoiceDetokenizer
from tramontane.router.openai.json_limits import run_off_loop
from tramontane.router.openai.logprobs import (
    TokenLogprobs,
    TokenWithLogprobs,
    completion_logprobs,
    index_by_position,
    merge_logprobs,
    prompt_logprobs,
    prompt_tokens,
)
from tramontane.router.openai.response_models import CompletionChange, Timings, Usage
from tramontane.router.openai.resume_state import (
    ChoiceState,
    ChoiceUpdate,
    ProgressCallback,
    ResumeState,
    no_progress,
)
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.tokenizer import Tokenizer

BYTES_PER_VALUE = 40  # of JSON, for one log-probability with its token; an expert id takes less
BYTES_PER_TOKEN = 8  # of JSON, for a token of a prompt, as an id or as text


class LogprobsFormat(NamedTuple):
    """How an API writes the log-probabilities of tokens, and merges several parts."""

    write: Callable[[Tokenizer | None, Sequence[TokenWithLogprobs], int], dict[str, Any]]
    merge: Callable[[Iterable[dict[str, Any] | None]], dict[str, Any]]


COMPLETION_LOGPROBS = LogprobsFormat(completion_logprobs, merge_logprobs)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """``n`` choices for each of some prompts: choice 2 of prompt 1 with n = 3 is sequence 1 * 3 + 2
    = 5.

    ``sampling``: of all choices, except for their seed. ``seed``: the client's. ``scores_only``: no
    new tokens are generated; only log-probabilities of prompts are returned. ``echoed``: the
    prompts as given, if answers begin with them; empty otherwise. ``prompt_logprobs``: the number
    shown in a separate list, as vLLM does; ``sampling.prompt_logprobs`` may be more, for the text
    of ``echoed``.
    """

    prompt_ids: tuple[tuple[int, ...], ...]
    n: int
    sampling: SamplingParams
    seed: int | None = None
    scores_only: bool = False
    echoed: tuple[str | tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None
    returns_token_ids: bool = False
    includes_usage: bool = False
    counts_in_chunks: bool = False
    logprobs_format: LogprobsFormat = COMPLETION_LOGPROBS
    cache_salt: str = ""  # the client's own

    @property
    def num_sequences(self) -> int:
        """Sequences of all prompts."""
        return len(self.prompt_ids) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; each prompt counts once, regardless of its number of choices."""
        return sum(map(len, self.prompt_ids))

    def sequences(self, seed: int) -> list[SequenceRequest]:
        """Return the sequences. ``seed``: used if the client gave none.

        With the client's seed, sequence 5 above uses the random numbers of choice 2, as if its
        prompt were alone. Without one it uses the random numbers of choice 5, so that equal prompts
        get different texts.
        """
        num_choices = self.num_sequences if self.seed is None else self.n
        sampling = replace(self.sampling, seed=seed if self.seed is None else self.seed)
        choices = [replace(sampling, choice=choice) for choice in range(num_choices)]
        return [
            SequenceRequest(ids, choices[(prompt * self.n + choice) % num_choices])
            for prompt, ids in enumerate(self.prompt_ids)
            for choice in range(self.n)
        ]


class Choice:
    """One sequence of a generation and its progress.

    ``text``: its detokenizer. ``is_new``: none of its changes has been returned yet.
    """

    def __init__(self, index: int, prompt_ids: tuple[int, ...], text: ChoiceDetokenizer) -> None:
        self.index, self.prompt_ids, self.text = index, prompt_ids, text
        self.is_new = True
        self.num_echoed = 0  # characters of the prompt in the text

    def resume(self, state: ChoiceState, echoed: str, *, is_buffered: bool) -> None:
        """Continue a choice that another ingress has begun."""
        self.text.resume(state, is_whole=is_buffered)
        self.is_new, self.num_echoed = False, len(echoed)

    def push(self, event: TokenEvent, scores: Mapping[tuple[int, int], TokenLogprobs]) -> str:
        """Return the text that a token completes. ``scores``: by sequence and position."""
        position = len(self.prompt_ids) + self.text.num_tokens
        return self.text.push(event, scores.get((self.index, position)) if scores else None)

    def take_logprobs(self) -> list[TokenWithLogprobs]:
        """Return new tokens with log-probabilities, with offsets in the text that the client
        has.
        """
        new = self.text.take_logprobs()
        return [token._replace(offset=self.num_echoed + token.offset) for token in new]


class Generation:
    """One request in progress. Text that another ingress has already sent (``resume_state``) is
    skipped.

    ``texts``: the detokenizer of each sequence. ``kind``: the prefix of the answer's id, and its
    ``object``.
    """

    def __init__(
        self,
        model: ServedModel,
        request: GenerationRequest,
        texts: Sequence[ChoiceDetokenizer],
        arrived_at: float,
        resume_state: ResumeState,
        kind: tuple[str, str],
    ) -> None:
        self.request, self.texts = request, texts
        self._model, self._arrived_at, self._resume_state = model, arrived_at, resume_state
        prefix, object_name = kind
        self.head: dict[str, Any] = {  # of every answer and chunk
            "id": f"{prefix}-{resume_state.id}",
            "object": object_name,
            "created": resume_state.created,
            "model": model.name,
            "system_fingerprint": None,  # until the router has sent it
        }
        self._times: RequestTimings | None = None
        self._num_cached = 0  # tokens of prompts
        # accepted and rejected drafts; None without speculation
        self._drafts: tuple[int, int] | None = None
        # approximate size in JSON of the last changes and of all changes, without generated text
        self.change_bytes = self.answer_bytes = 0
        self._decoded_prompts: dict[int, str] = {}
        self._new_token_ids: dict[int, list[int]] = {}  # of the last changes, by choice
        self._choices = [
            Choice(index, request.prompt_ids[index // request.n], text)
            for index, text in enumerate(texts)
        ]
        for index, state in resume_state.choices.items():
            echoed = self._echoed_text(index)
            self._choices[index].resume(state, echoed, is_buffered=resume_state.is_buffered)

    @property
    def has_begun(self) -> bool:
        """Whether the client has received anything from another ingress."""
        return bool(self._resume_state.choices)

    def sequences(self) -> list[SequenceRequest]:
        """Return the sequences, with the tokens that they have."""
        sequences = self.request.sequences(self._resume_state.seed)
        for index, choice in self._resume_state.choices.items():
            sequences[index] = replace(sequences[index], output_ids=tuple(choice.token_ids))
        return sequences

    async def collect(
        self, source: TokenSource, report: ProgressCallback = no_progress
    ) -> list[dict[str, Any]]:
        """Return the fields of whole choices. ``report`` gets all changes but the last; with these
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
        return await run_off_loop(
            self.answer_bytes, lambda: [merge_changes(self.request, each) for each in parts]
        )

    async def stream(self, source: TokenSource) -> AsyncGenerator[list[CompletionChange], None]:
        """Yield the changes of all choices whenever the source returns tokens, until every choice
        has finished.
        """
        sequences = self.sequences()
        running = [index for index, text in enumerate(self.texts) if not text.finish]
        request = Request(
            tuple(sequences[index] for index in running),
            already_admitted=self._resume_state.is_resumed,
            cache_salt=self.request.cache_salt,
        )
        with self._model.counts.track(
            self._arrived_at,
            self.request.num_prompt_tokens,
            self.texts,
            has_begun=self.has_begun,
        ) as recorder:
            async with aclosing(source.generate(request)) as batches:
                async for batch in batches:
                    recorder.observe(batch)
                    is_whole = len(running) == len(sequences)
                    own = batch if is_whole else remap_seq_ids(batch, running)
                    if changes := await self._take(own):
                        yield changes
                    if self.is_finished:
                        return

    async def _take(self, batch: RequestOutput) -> list[CompletionChange]:
        """Process the output of a source, and return the resulting changes."""
        if batch.fingerprint:
            self.head["system_fingerprint"] = batch.fingerprint
        self.change_bytes = self._json_bytes(batch)
        self.answer_bytes += self.change_bytes
        changes = await run_off_loop(self.change_bytes, partial(self._process, batch))
        self._times = batch.times
        self._num_cached += batch.num_cached
        return changes

    def take_updates(self) -> list[ChoiceUpdate]:
        """Return the state that another ingress needs in order to continue after the last
        changes.
        """
        new, self._new_token_ids = self._new_token_ids, {}
        return [
            (index, ids, (text := self.texts[index]).finish, text.pending_logprobs)
            for index, ids in new.items()
        ]

    @property
    def is_finished(self) -> bool:
        """True once every choice has finished."""
        return all(text.finish for text in self.texts)

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the pipeline that made the last tokens, if known."""
        fingerprint: str | None = self.head["system_fingerprint"]
        return fingerprint

    @property
    def usage(self) -> Usage:
        """Number of tokens so far. A prompt counts once, regardless of its number of choices."""
        return self.usage_of(has_tokens=True)

    def usage_of(self, *, has_tokens: bool) -> Usage:
        """Return the usage so far, or without ``has_tokens`` before any new token."""
        prompt = self.request.num_prompt_tokens
        completion = sum(text.num_tokens for text in self.texts) if has_tokens else 0
        thoughts = [
            text.num_reasoning_tokens
            for text in self.texts
            if text.num_reasoning_tokens is not None
        ]
        # a router that continues one of several choices may find their prompt in its cache again
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

    def _json_bytes(self, batch: RequestOutput) -> int:
        """Return the approximate size of a batch in bytes of JSON. The first change of a choice may
        repeat its prompt.
        """
        num_bytes = batch.num_values * BYTES_PER_VALUE
        if self.request.echoed or self.request.returns_token_ids:
            choices = [self._choices[index] for index in {event.seq_id for event in batch.events}]
            num_bytes += BYTES_PER_TOKEN * sum(
                len(choice.prompt_ids) for choice in choices if choice.is_new
            )
        return num_bytes

    def _process(self, batch: RequestOutput) -> list[CompletionChange]:
        """Return one change per choice with tokens in the batch."""
        texts: dict[int, list[str]] = {}
        token_ids: dict[int, list[int]] = {}
        scores = index_by_position(batch.logprobs)
        for event in batch.events:
            choice = self._choices[event.seq_id]
            if choice.text.finish is not None:
                continue
            own_texts = texts.setdefault(event.seq_id, [])
            own_ids = token_ids.setdefault(event.seq_id, [])
            if self.request.scores_only:
                if event.token_id == NOT_FINITE_TOKEN:  # log-probabilities of the prompt may lack
                    raise sequence_error(event)
                # the one token that was generated is dropped
                choice.text.finish = FinishReason.LENGTH
                continue
            own_texts.append(choice.push(event, scores))
            own_ids.append(event.token_id)
        self._new_token_ids = token_ids
        self._count_drafts(batch, token_ids)
        changes = [
            self._change(self._choices[index], "".join(texts[index]), token_ids[index], scores)
            for index in texts
        ]
        if self.request.sampling.return_experts:
            self._add_experts(changes, batch.experts)
        return changes

    def _count_drafts(self, batch: RequestOutput, taken: Mapping[int, Sequence[int]]) -> None:
        """Count the drafts of choices that have taken tokens of this batch. Accepted drafts after a
        stop string count as rejected.
        """
        for index, num_drafts, num_right in batch.drafts:
            if index in taken:  # else it had finished
                num_accepted = min(num_right, len(taken[index]))
                accepted, rejected = self._drafts or (0, 0)
                self._drafts = accepted + num_accepted, rejected + num_drafts - num_accepted

    def _change(
        self,
        choice: Choice,
        text: str,
        token_ids: list[int],
        scores: dict[tuple[int, int], TokenLogprobs],
    ) -> CompletionChange:
        request, finish, is_first = self.request, choice.text.finish, choice.is_new
        choice.is_new = False
        echoed = self._echoed_text(choice.index) if is_first else ""
        choice.num_echoed += len(echoed)
        change: CompletionChange = {
            "index": choice.index,
            "text": echoed + text,
            "logprobs": None,
            "finish_reason": finish and finish.value,
        }
        if request.returns_token_ids:
            change["token_ids"] = token_ids
            change["prompt_token_ids"] = list(choice.prompt_ids) if is_first else None
        if request.sampling.logprobs is not None or request.prompt_logprobs is not None:
            self._add_logprobs(change, choice, scores, is_first=is_first)
        return change

    def _add_logprobs(
        self,
        change: CompletionChange,
        choice: Choice,
        scores: dict[tuple[int, int], TokenLogprobs],
        *,
        is_first: bool,
    ) -> None:
        """Add log-probabilities to a change. The first change has those of the prompt, which arrive
        with the first token.
        """
        request, tokenizer = self.request, self._model.tokenizer
        is_scored = is_first and request.sampling.prompt_logprobs is not None
        prompt = (
            prompt_tokens(tokenizer, choice.prompt_ids, choice.index, scores) if is_scored else []
        )
        if is_scored and request.prompt_logprobs is not None:
            change["prompt_logprobs"] = prompt_logprobs(tokenizer, prompt, request.prompt_logprobs)
        if request.sampling.logprobs is not None:
            tokens = [*(prompt if request.echoed else ()), *choice.take_logprobs()]
            if tokens:
                write, num_top = request.logprobs_format.write, request.sampling.logprobs
                change["logprobs"] = write(tokenizer, tokens, num_top)

    def _add_experts(self, changes: list[CompletionChange], batch: Sequence[ExpertChoices]) -> None:
        """Add the experts since the last change, for the tokens that a choice has: more may have
        been generated than it takes.
        """
        own: dict[int, list[ExpertChoices]] = {change["index"]: [] for change in changes}
        for choices in batch:
            if choices.seq_id in own:
                own[choices.seq_id].append(choices)
        for change in changes:
            choice = self._choices[change["index"]]
            num_prompt = len(choice.prompt_ids)
            if prompt := by_layer(own[choice.index], 0, num_prompt):
                change["prompt_experts"] = prompt
            end = num_prompt + choice.text.num_tokens - 1
            if generated := by_layer(own[choice.index], num_prompt, end):
                change["experts"] = generated

    def _echoed_text(self, index: int) -> str:
        """Return the prompt if the choice's text begins with it, else ""."""
        if not self.request.echoed:
            return ""
        prompt = index // self.request.n
        given = self.request.echoed[prompt]
        if isinstance(given, str):
            return given
        if prompt not in self._decoded_prompts:  # all choices repeat it
            tokenizer = self._model.tokenizer
            self._decoded_prompts[prompt] = tokenizer.decode(given) if tokenizer else ""
        return self._decoded_prompts[prompt]


def merge_changes(
    request: GenerationRequest, changes: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the fields of one whole choice, given all of its changes."""
    layers = request.sampling.return_experts
    text = "".join(change["text"] for change in changes)
    merged = {**changes[0], "text": text, "finish_reason": changes[-1]["finish_reason"]}
    if "token_ids" in merged:
        merged["token_ids"] = [token_id for change in changes for token_id in change["token_ids"]]
    if request.sampling.logprobs is not None:
        merged["logprobs"] = request.logprobs_format.merge(change["logprobs"] for change in changes)
    for name in ("prompt_experts", "experts") if layers else ():
        parts = [change.get(name, {}) for change in changes]
        merged[name] = {
            str(layer): [ids for part in parts for ids in part.get(str(layer), ())]
            for layer in layers
        }
    return merged
