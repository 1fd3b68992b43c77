"""``/v1/completions`` without the HTTP: a parsed request in, OpenAI's objects out."""

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from tramontane.proto.errors import RequestError
from tramontane.proto.ports import TokenSource
from tramontane.proto.request import ExpertChoices, RequestTimes, SamplingParams, SequenceSpec, TokenBatch
from tramontane.router.choice_text import ChoiceText
from tramontane.router.expert_history import by_layer
from tramontane.router.openai_schema import CompletionRequest, ParameterError
from tramontane.router.tokenizer import Tokenizer

LONG_TEXT = 4096  # characters of one request; more are tokenized beside the event loop
MAX_EXPERT_IDS = 2**19  # that one request may ask for: 2 MiB on their way from a router, which is half of what a message may have


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a door knows of the model behind it. Without a tokenizer it takes and gives token ids only.

    ``num_layers`` and ``experts_per_token`` are those of a model with experts, else 0.
    """

    name: str
    tokenizer: Tokenizer | None
    max_model_len: int
    max_sequences: int  # of one request
    vocab_size: int
    num_layers: int = 0
    experts_per_token: int = 0


class Completion:
    """One request on its way: its sequences, and the texts that grow."""

    def __init__(
        self, model: ServedModel, request: CompletionRequest, prompt_ids: list[tuple[int, ...]], arrived_at: float
    ) -> None:
        self._request = request
        self._model = model
        self._prompt_ids = prompt_ids
        self._choices = [ChoiceText(model.tokenizer, request.stop) for _ in range(len(prompt_ids) * request.n)]
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
        }
        self._arrived_at = arrived_at
        self._times: RequestTimes | None = None

    @classmethod
    async def prepare(cls, model: ServedModel, request: CompletionRequest, arrived_at: float) -> "Completion":
        """Tokenize and bound. Raises RequestError for what could never run."""
        num_sequences = len(request.prompt) * request.n
        if num_sequences > model.max_sequences:
            raise ParameterError(
                f"{len(request.prompt)} prompt{'s' * (len(request.prompt) > 1)} with n = {request.n}: {num_sequences} sequences; "
                f"one request may have at most {model.max_sequences}",
                "prompt",
            )
        if model.tokenizer is None and request.stop:
            raise ParameterError("stop needs text, and this model has no tokenizer", "stop")
        _check_layers(model, request.return_experts)
        prompt_ids = await _encode(model, request.prompt)
        for ids in prompt_ids:
            if len(ids) >= model.max_model_len:  # the router would say so too, but many such prompts are a burden to send
                raise ParameterError(
                    f"the prompt has {len(ids)} tokens; with a context of {model.max_model_len} positions "
                    f"it may have at most {model.max_model_len - 1}",
                    "prompt",
                )
        _check_num_experts(model, request, prompt_ids)
        return cls(model, request, prompt_ids, arrived_at)

    def specs(self) -> list[SequenceSpec]:
        """Choice 2 of prompt 1 with n = 3 is sequence 1 * 3 + 2 = 5."""
        request = self._request
        seed = secrets.randbits(63) if request.seed is None else request.seed
        return [
            SequenceSpec(
                ids,
                SamplingParams(
                    request.max_tokens,
                    request.temperature,
                    request.top_p,
                    max(request.top_k, 0),
                    seed,
                    choice,
                    request.ignore_eos,
                    request.return_experts,
                ),
            )
            for ids in self._prompt_ids
            for choice in range(request.n)
        ]

    async def run(self, source: TokenSource) -> dict[str, Any]:
        """The whole answer at once."""
        parts: list[list[dict[str, Any]]] = [[] for _ in self._choices]
        async with aclosing(self.stream(source)) as changes:
            async for choices in changes:
                for choice in choices:
                    parts[choice["index"]].append(choice)
        choices = [_joined(own, self._request.return_experts) for own in parts]
        return {**self._head, "choices": choices, "usage": self.usage, "timings": self.timings}

    async def stream(self, source: TokenSource) -> AsyncGenerator[list[dict[str, Any]], None]:
        """What has changed, choice by choice, each time something is ready; ends with the last choice."""
        yielded: set[int] = set()
        async with aclosing(source.generate(self.specs())) as batches:
            async for batch in batches:
                changes = self._take(batch, yielded)
                self._times = batch.times
                if changes:
                    yield changes
                if self.is_finished:
                    return

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

    def _take(self, batch: TokenBatch, yielded: set[int]) -> list[dict[str, Any]]:
        texts: dict[int, list[str]] = {}
        token_ids: dict[int, list[int]] = {}
        for event in batch.events:
            choice = self._choices[event.seq_id]
            if choice.finish is None:
                texts.setdefault(event.seq_id, []).append(choice.push(event))
                token_ids.setdefault(event.seq_id, []).append(event.token_id)
        changes = [self._change(index, "".join(texts[index]), token_ids[index], yielded) for index in texts]
        if self._request.return_experts:
            self._add_experts(changes, batch.experts)
        return changes

    def _change(self, index: int, text: str, token_ids: list[int], yielded: set[int]) -> dict[str, Any]:
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
        if self._request.return_token_ids:
            change["token_ids"] = token_ids
            change["prompt_token_ids"] = list(self._prompt_ids[prompt]) if first else None
        return change

    def _add_experts(self, changes: list[dict[str, Any]], news: Sequence[ExpertChoices]) -> None:
        """What is known since the last change; of the tokens that a choice has, also where more were made than it takes."""
        own: dict[int, list[ExpertChoices]] = {change["index"]: [] for change in changes}
        for choices in news:
            if choices.seq_id in own:
                own[choices.seq_id].append(choices)
        for change in changes:
            index = change["index"]
            num_prompt = len(self._prompt_ids[index // self._request.n])
            made = by_layer(own[index], num_prompt, num_prompt + self._choices[index].num_tokens - 1)
            told = {"prompt_experts": by_layer(own[index], 0, num_prompt), "experts": made}
            change |= {name: layers for name, layers in told.items() if layers}

    def _prompt_text(self, prompt: int) -> str:
        given = self._request.prompt[prompt]
        if isinstance(given, str):
            return given
        return self._model.tokenizer.decode(given) if self._model.tokenizer else ""


async def _encode(model: ServedModel, prompts: Sequence[str | tuple[int, ...]]) -> list[tuple[int, ...]]:
    num_characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))

    def encode() -> list[tuple[int, ...]]:
        return [prompt if not isinstance(prompt, str) else _encode_text(model, prompt) for prompt in prompts]

    if num_characters <= LONG_TEXT:
        return encode()
    return await asyncio.get_running_loop().run_in_executor(None, encode)


def _encode_text(model: ServedModel, text: str) -> tuple[int, ...]:
    if model.tokenizer is None:
        raise ParameterError("this model has no tokenizer; give the prompt as token ids", "prompt")
    if len(text) > model.max_model_len * model.tokenizer.longest_piece:  # no need to tokenize to know
        raise ParameterError(
            f"the prompt has {len(text)} characters; with a context of {model.max_model_len} positions that is too long",
            "prompt",
        )
    return model.tokenizer.encode(text)


def _check_layers(model: ServedModel, layers: Sequence[int]) -> None:
    if layers and not model.num_layers:
        raise ParameterError("return_experts: this model has no experts", "return_experts")
    if wrong := [layer for layer in layers if layer >= model.num_layers]:
        raise ParameterError(
            f"return_experts: there is no layer {wrong[0]}; this model has layers 0 to {model.num_layers - 1}", "return_experts"
        )


def _check_num_experts(model: ServedModel, request: CompletionRequest, prompt_ids: Sequence[tuple[int, ...]]) -> None:
    """As many as there may be: an answer can be as long as was asked for, or as the context."""
    num_tokens = request.n * sum(min(len(ids) + request.max_tokens, model.max_model_len) for ids in prompt_ids)
    num_ids = num_tokens * len(request.return_experts) * model.experts_per_token
    if num_ids > MAX_EXPERT_IDS:
        raise ParameterError(
            f"return_experts: {len(request.return_experts)} layers of up to {num_tokens} tokens are {num_ids} experts; "
            f"one request may ask for at most {MAX_EXPERT_IDS}, so ask for fewer layers or tokens",
            "return_experts",
        )


def _joined(changes: list[dict[str, Any]], layers: Sequence[int]) -> dict[str, Any]:
    whole = changes[0] | {"text": "".join(change["text"] for change in changes), "finish_reason": changes[-1]["finish_reason"]}
    if "token_ids" in whole:
        whole["token_ids"] = [token_id for change in changes for token_id in change["token_ids"]]
    for name in ("prompt_experts", "experts") if layers else ():
        parts = [change.get(name, {}) for change in changes]
        whole[name] = {str(layer): [ids for part in parts for ids in part.get(str(layer), ())] for layer in layers}
    return whole


def model_entry(model: ServedModel, created: int) -> dict[str, Any]:
    """``GET /v1/models/{name}``."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "tramontane",
        "max_model_len": model.max_model_len,
        "vocab_size": model.vocab_size,
    }


def model_list(model: ServedModel, created: int) -> dict[str, Any]:
    """``GET /v1/models``."""
    return {"object": "list", "data": [model_entry(model, created)]}


def check_model_name(model: ServedModel, name: str | None) -> None:
    """Raises RequestError if the client asks for another model."""
    if name is not None and name != model.name:
        raise UnknownModelError(f"the model {name!r:.80} does not exist; this server has {model.name!r}")


class UnknownModelError(RequestError):
    """The client named a model that is not served here."""
