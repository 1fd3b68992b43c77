"""The largest answers that one request may have, and a source of tokens that returns them as an
ingress receives them.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from scripted_token_source import MODEL

from tramontane.cluster.serving.token_stream import TokenStream, _messages
from tramontane.proto import inference_pb2 as pb
from tramontane.proto import wire
from tramontane.proto.request import (
    ExpertChoices,
    FinishReason,
    Logprobs,
    Request,
    RequestOutput,
    RequestTimings,
    SequenceRequest,
    TokenEvent,
)
from tramontane.router.engine.request_output import OutputQueue
from tramontane.router.openai.served_model import MAX_STREAMED_LOGPROBS, MAX_WHOLE_LOGPROBS

TOP = 20
STEP = 128  # tokens of each sequence in one output
TIMES = RequestTimings(0.0, 0.0, 0.0)
MAX_CHOICES = 128
LONG_PROMPT = 32_000  # tokens, which each choice repeats
LARGE_MODEL = replace(
    MODEL,
    max_model_len=2 * MAX_WHOLE_LOGPROBS,
    max_sequences=MAX_CHOICES,
    expert_layers=range(4),
    experts_per_token=2,
)


def requests(share: float = 1.0) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield names, paths and bodies, for answers of this share of the largest."""
    many, streamed = (
        int(share * MAX_WHOLE_LOGPROBS),
        int(share * MAX_STREAMED_LOGPROBS) // (TOP + 1),
    )
    few, long = many // (TOP + 1), [7] * int(share * LONG_PROMPT)
    tops = {"prompt": [7] * few, "prompt_logprobs": TOP, "max_tokens": 1}
    completions: dict[str, dict[str, Any]] = {
        "prompt_logprobs of few tokens with others": tops,
        "prompt_logprobs of many tokens": {
            "prompt": [7] * many,
            "prompt_logprobs": 0,
            "max_tokens": 1,
        },
        "echoed logprobs": {"prompt": [7] * few, "logprobs": TOP, "echo": True, "max_tokens": 0},
        "logprobs": {"prompt": [7], "logprobs": TOP, "max_tokens": few},
        "logprobs of several choices": {
            "prompt": [7],
            "logprobs": TOP,
            "max_tokens": few // 8,
            "n": 8,
        },
        "experts": {
            "prompt": [7] * few,
            "return_experts": [0, 1, 2, 3],
            "max_tokens": many // 2 - few,
        },
        "prompts of many choices": {
            "prompt": long,
            "n": MAX_CHOICES,
            "return_token_ids": True,
            "max_tokens": 1,
        },
        "echoes of many choices": {"prompt": long, "n": MAX_CHOICES, "echo": True, "max_tokens": 1},
    }
    for name, body in completions.items():
        yield name, "/v1/completions", body
        yield f"{name}, streamed", "/v1/completions", body | {"stream": True}
    yield (
        "more logprobs, streamed",
        "/v1/completions",
        completions["logprobs"] | {"max_tokens": streamed, "stream": True},
    )
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": TOP}
    yield "logprobs of a chat", "/v1/chat/completions", chat | {"max_tokens": few}
    yield (
        "logprobs of a chat, streamed",
        "/v1/chat/completions",
        chat | {"max_tokens": streamed, "stream": True},
    )


def messages(share: float = 1.0) -> Iterator[tuple[str, str, bytes]]:
    """Yield names, methods and messages of gRPC, likewise."""
    many, streamed = (
        int(share * MAX_WHOLE_LOGPROBS),
        int(share * MAX_STREAMED_LOGPROBS) // (TOP + 1),
    )
    few, ones = pb.TokenIds(ids=[7] * (many // (TOP + 1))), pb.TokenIds(ids=[7] * many)
    yield (
        "logprobs of few tokens",
        "Score",
        pb.ScoreRequest(token_ids=few, logprobs=TOP).SerializeToString(),
    )
    yield "logprobs of many tokens", "Score", pb.ScoreRequest(token_ids=ones).SerializeToString()
    generate = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7]), logprobs=TOP, max_tokens=streamed)
    yield "logprobs", "Generate", generate.SerializeToString()


class LargeAnswerSource:
    """Returns ``max_tokens`` tokens with all that is asked for, as fast as they are read.

    Outputs are encoded once per shape of request, and decoded and merged for each as an ingress
    does. A router in another process encodes them, so that is not done on the reader's event loop
    while it serves.
    """

    def __init__(self) -> None:
        self._encoded: dict[tuple[int, ...], list[bytes]] = {}

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        """Accept everything."""

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        specs = request.sequences
        sampling, queue = specs[0].sampling, OutputQueue()
        asked = (
            sampling.max_tokens,
            sampling.logprobs,
            sampling.prompt_logprobs,
            len(sampling.return_experts),
        )
        shape = (
            len(specs),
            len(specs[0].prompt_ids),
            *(-1 if each is None else each for each in asked),
        )
        if shape not in self._encoded:
            self._encoded[shape] = await asyncio.to_thread(encoded, specs)
        num_left = len(specs)
        for message in self._encoded[shape]:
            await asyncio.sleep(0.002)
            for _, output in wire.decode_outputs(message):
                queue.put(output)
            while queue._filled.is_set():
                output = await queue.get()
                num_left -= sum(event.finish is not None for event in output.events)
                yield output
        assert not num_left


def encoded(specs: Sequence[SequenceRequest]) -> list[bytes]:
    """Return the messages of a router with these outputs."""
    stream, found = TokenStream(), list[bytes]()
    for output in outputs(specs):
        stream.put(0, output)
        ready, stream._ready = stream._ready, []
        found += _messages(ready)
    return found


def outputs(specs: Sequence[SequenceRequest]) -> Iterator[RequestOutput]:
    """Yield the outputs of a request whose sequences have equal lengths."""
    sampling, num_prompt = specs[0].sampling, len(specs[0].prompt_ids)
    tops = tuple(
        (7 + n, -0.12345 * n) for n in range(sampling.logprobs or sampling.prompt_logprobs or 0)
    )
    for start in range(0, sampling.max_tokens, STEP):
        num = min(STEP, sampling.max_tokens - start)
        last = FinishReason.LENGTH if start + num == sampling.max_tokens else None
        first = num_prompt + start if start or sampling.prompt_logprobs is None else 1
        end = num_prompt + start + num
        events, logprobs, experts = list[TokenEvent](), list[Logprobs](), list[ExpertChoices]()
        for index in range(len(specs)):
            events += [TokenEvent(index, 7, last if n == num - 1 else None) for n in range(num)]
            if sampling.logprobs is not None or first == 1:
                last_scored = end if sampling.logprobs is not None else num_prompt
                count = last_scored - first
                logprobs.append(Logprobs(index, first, (-0.5,) * count, (tops,) * count))
            begin = num_prompt + start - 1 if start else 0
            experts += [
                ExpertChoices(index, layer, begin, ((1, 3),) * (end - 1 - begin))
                for layer in sampling.return_experts
            ]
        yield RequestOutput(tuple(events), TIMES, tuple(experts), tuple(logprobs))
