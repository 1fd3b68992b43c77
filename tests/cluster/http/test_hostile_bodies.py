"""The largest bodies of the shapes that cost most, at every endpoint: the event loop parses none,
and no parser gets too much.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import large_answers
import pytest
from batch_jobs import new_batch_harness
from event_loops import in_event_loop
from hostile_bodies import MAX_BODY, TEMPLATES, bodies, messages, uploads
from http_fuzz import check_error
from large_answers import LARGE_MODEL, TOP, LargeAnswerSource
from pydantic import BaseModel
from scripted_token_source import CHAT, MODEL, ScriptedSource, client_for, http_app_for
from starlette.applications import Starlette

from tramontane.cluster.config.measurements import ExpertLoad
from tramontane.cluster.http import sse, token_endpoints
from tramontane.cluster.http.batch_endpoints import BatchEndpoints
from tramontane.cluster.http.errors import ERROR_HANDLERS
from tramontane.cluster.serving.token_stream import MAX_MESSAGE_VALUES
from tramontane.proto import inference_pb2 as pb
from tramontane.proto import wire
from tramontane.proto.errors import ParameterError
from tramontane.proto.request import RequestOutput
from tramontane.router.grpc import messages as grpc_messages
from tramontane.router.grpc import servicer as servicer_module
from tramontane.router.grpc.handlers import MAX_MESSAGE_BYTES, MalformedMessage, _parser
from tramontane.router.grpc.servicer import GrpcServicer
from tramontane.router.openai import generation as generation_module
from tramontane.router.openai import tokenize
from tramontane.router.openai.generation import BYTES_PER_VALUE, Generation
from tramontane.router.openai.json_limits import (
    MAX_GROUPS,
    MAX_ITEMS,
    MAX_MEMBERS,
    SMALL_BODY,
    count_elements,
)
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate
from tramontane.router.tokenization.tokenizer import PIECE_CHARS

SHARE = 0.2  # of the largest answers
FORM = {"content-type": "multipart/form-data; boundary=b"}


class ParserSpy:
    """Notes what parsers are given; ``faults`` has what they should not have been given."""

    def __init__(self) -> None:
        self.num_large = 0
        self.faults: list[str] = []
        self._loop_thread = threading.get_ident()

    def observe(self, given: str | bytes) -> None:
        text = given.encode() if isinstance(given, str) else bytes(given)
        if len(text) <= SMALL_BODY:
            return
        self.num_large += 1
        if threading.get_ident() == self._loop_thread:
            self.faults.append(f"the event loop parsed {len(text)} bytes: {text[:40]!r}")
        counts = count_elements(text)
        if counts.commas >= MAX_ITEMS or counts.groups > MAX_GROUPS or counts.members > MAX_MEMBERS:
            self.faults.append(f"a parser got {counts}: {text[:40]!r}")


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ParserSpy]:
    made = ParserSpy()

    def watch(owner: Any, name: str, parse: Any) -> None:
        def watched(*args: Any, **kwargs: Any) -> Any:
            made.observe(args[-1])
            return parse(*args, **kwargs)

        monkeypatch.setattr(owner, name, classmethod(watched) if owner is BaseModel else watched)

    watch(BaseModel, "model_validate_json", BaseModel.model_validate_json.__func__)  # type: ignore[attr-defined]
    watch(json, "loads", json.loads)
    watch(grpc_messages, "from_json", grpc_messages.from_json)
    yield made
    assert not made.faults, made.faults[:5]


async def _move(_load: ExpertLoad) -> tuple[int, int]:
    return 0, 1


@pytest.mark.parametrize("path", TEMPLATES)
def test_the_event_loop_parses_no_large_body_and_no_parser_gets_too_many_elements(
    path: str, spy: ParserSpy
) -> None:
    async def scenario() -> None:
        app = http_app_for(ScriptedSource(), max_body_bytes=MAX_BODY, move_experts=_move)
        async with client_for(app.app()) as client:
            for name, body in bodies(path):
                response = await client.post(path, content=body)
                assert response.status_code in (200, 400), (name, response.text[:200])
                if response.status_code == 400:
                    check_error(response.content, path=path)

    asyncio.run(scenario())
    assert spy.num_large


def test_a_form_of_any_shape_is_read_in_small_pieces(tmp_path: Path, spy: ParserSpy) -> None:
    harness = new_batch_harness(tmp_path)

    async def scenario() -> None:
        app = Starlette(
            routes=BatchEndpoints(harness.service()).routes(), exception_handlers=ERROR_HANDLERS
        )
        async with client_for(app) as client:
            for name, body in uploads(2**20):
                response = await client.post("/v1/files", content=body, headers=FORM)
                assert response.status_code in (200, 400), (name, response.text[:200])
            assert (await client.post("/v1/batches", content=b"[" * MAX_BODY)).status_code == 413

    asyncio.run(scenario())
    harness.close()
    assert not spy.num_large


@pytest.mark.parametrize("kind", [pb.GenerateRequest, pb.ScoreRequest])
def test_the_event_loop_converts_no_large_message(
    kind: Any, spy: ParserSpy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of gRPC becomes JSON in between, also in the thread for large bodies."""
    dumped, cases, dumps = list[str](), list(messages()), json.dumps

    def watched_dumps(value: Any, **more: Any) -> str:
        dumped.append(text := dumps(value, **more))
        spy.observe(text)
        return text

    monkeypatch.setattr(grpc_messages.json, "dumps", watched_dumps)
    parse = _parser(kind, MAX_MESSAGE_BYTES)

    async def scenario() -> None:
        servicer = GrpcServicer(MODEL, ScriptedSource())
        method = (
            grpc_messages.parse_generate
            if kind is pb.GenerateRequest
            else grpc_messages.parse_score
        )
        for name, data in cases:
            message = parse(data)
            if isinstance(message, MalformedMessage):
                assert name in ("unknown fields", "twice the largest") or kind is pb.ScoreRequest, (
                    name
                )
                continue
            with pytest.raises(ParameterError):
                await servicer._prepare(method, message, _Context())

    asyncio.run(scenario())
    assert dumped


class _Context:
    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:50123"


@pytest.mark.parametrize(
    ("name", "target", "content"), [*large_answers.requests(SHARE), *large_answers.messages(SHARE)]
)
def test_the_event_loop_formats_no_large_answer(
    name: str, target: str, content: Any, monkeypatch: pytest.MonkeyPatch, off_loop: list[int]
) -> None:
    """Neither what is received, nor what it becomes: Python's objects, JSON, messages of gRPC."""
    sizes, decode, source = list[int](), wire.decode_outputs, LargeAnswerSource()

    def watched_decode(data: bytes) -> Any:
        outputs = decode(data)
        sizes.extend(
            output.num_values for _, output in outputs if isinstance(output, RequestOutput)
        )
        return outputs

    monkeypatch.setattr(wire, "decode_outputs", watched_decode)

    async def over_http() -> None:
        async with client_for(
            http_app_for(source, LARGE_MODEL, max_body_bytes=MAX_BODY).app()
        ) as client:
            response = await client.post(target, json=content)
            assert response.status_code == 200, (name, response.text[:200])

    async def over_grpc() -> None:
        servicer = GrpcServicer(LARGE_MODEL, source)
        if target == "Score":
            assert (await servicer.Score(pb.ScoreRequest.FromString(content), _Context())).data
        else:
            assert [
                each
                async for each in servicer.Generate(
                    pb.GenerateRequest.FromString(content), _Context()
                )
            ]

    asyncio.run(over_http() if target.startswith("/") else over_grpc())
    assert max(sizes) <= MAX_MESSAGE_VALUES
    assert "many choices" in name or sum(sizes) > 2 * MAX_MESSAGE_VALUES
    assert off_loop


@pytest.fixture
def off_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Note what the thread for large bodies does, by bytes. No formatting of that many
    log-probabilities happens elsewhere.
    """
    done, faults, loop_thread = list[int](), list[str](), threading.get_ident()

    def watch(owner: Any, name: str, size_of: Callable[..., int]) -> None:
        format_ = getattr(owner, name)

        def watched(*args: Any) -> Any:
            size = size_of(*args)
            if threading.get_ident() != loop_thread:
                done.append(size)
            elif size > SMALL_BODY:
                faults.append(f"{name}: about {size} bytes")
            return format_(*args)

        monkeypatch.setattr(owner, name, watched)

    def size_of(generation: Generation, batch: RequestOutput) -> int:
        request, choices = generation.request, generation._choices
        new = {event.seq_id for event in batch.events if choices[event.seq_id].is_new}
        repeated = len(new) * len(request.prompt_ids[0]) * 8
        wants_prompt = bool(request.echoed) or request.returns_token_ids
        return batch.num_values * BYTES_PER_VALUE + repeated * wants_prompt

    watch(Generation, "_process", size_of)
    watch(generation_module, "merge_changes", lambda _request, changes: len(repr(changes)) // 2)
    watch(token_endpoints, "encode_and_free", lambda answer, _depth: len(repr(answer)) // 2)
    watch(sse, "encode_and_free", lambda chunk: len(repr(chunk)) // 2)
    num_tokens = lambda changes: sum(len(change["logprobs"]["tokens"]) for change in changes)  # noqa: E731
    watch(
        servicer_module,
        "to_generate_response",
        lambda changes: num_tokens(changes) * (TOP + 1) * BYTES_PER_VALUE,
    )
    watch(servicer_module, "to_score_response", lambda result: len(repr(result)) // 2)
    yield done
    assert not faults, faults[:5]


MANY_TOKENS = "\U0001f600" * 2**19  # four tokens each


@pytest.mark.parametrize(
    ("target", "content"),
    [
        ("/v1/completions", {"prompt": MANY_TOKENS}),
        ("/tokenize", {"prompt": MANY_TOKENS}),
        ("/tokenize", {"messages": [{"role": "user", "content": MANY_TOKENS}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": MANY_TOKENS}]}),
        ("Score", MANY_TOKENS),
    ],
)
def test_no_tokenizer_makes_a_list_of_millions_of_ids(
    target: str, content: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold the interpreter lock until then, in any thread."""
    encode, lengths, loop_thread = (
        SentencePieceTokenizer._encode,
        list[int](),
        threading.get_ident(),
    )

    def watched(tokenizer: SentencePieceTokenizer, text: str) -> tuple[int, ...]:
        assert threading.get_ident() != loop_thread
        lengths.append(len(text))
        return encode(tokenizer, text)

    monkeypatch.setattr(SentencePieceTokenizer, "_encode", watched)
    monkeypatch.setattr(
        MistralChatTemplate, "encode", lambda *_: pytest.fail("the template got it")
    )

    async def over_http() -> str:
        async with client_for(
            http_app_for(ScriptedSource(), LARGE_MODEL, max_body_bytes=MAX_BODY).app()
        ) as client:
            return (await client.post(target, json=content)).text

    async def over_grpc() -> str:
        servicer = GrpcServicer(LARGE_MODEL, ScriptedSource())
        with pytest.raises(ParameterError) as caught:
            await servicer._prepare(
                grpc_messages.parse_score, pb.ScoreRequest(text=content), _Context()
            )
        return str(caught.value)

    answer = asyncio.run(over_http() if target.startswith("/") else over_grpc())
    assert f"tokens > {LARGE_MODEL.max_model_len - 1} maximum" in answer
    assert lengths == [PIECE_CHARS]


def test_json_within_texts_of_a_conversation_is_bounded_like_a_body() -> None:
    """Templates parse the arguments of calls, and some the results of tools."""
    hostile = f"[{'[1],' * MAX_GROUPS}1]"
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": hostile}}
    question, calling = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call]},
    )
    result = {"role": "tool", "tool_call_id": "123456789", "content": hostile}

    async def refusal(*conversation: Any) -> str:
        model = http_app_for(
            ScriptedSource(), max_body_bytes=MAX_BODY, model=replace(MODEL, max_model_len=2**20)
        )
        async with client_for(model.app()) as client:
            response = await client.post("/tokenize", json={"messages": conversation})
            assert response.status_code == 400
            return str(check_error(response.content, "messages")["message"])

    bound = f"has more than {MAX_GROUPS} lists and objects; send fewer at once"
    assert asyncio.run(refusal(question, calling)) == f"the JSON of a tool call {bound}"
    harmless = {**calling, "tool_calls": [call | {"function": {"name": "f", "arguments": "{}"}}]}
    assert asyncio.run(refusal(question, harmless, result)) == f"the result of a tool {bound}"


@in_event_loop
async def test_an_answer_of_tokenize_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written in one step, and a text may have more tokens than the context has positions."""
    monkeypatch.setattr(tokenize, "MAX_ITEMS", 5)

    async with client_for(http_app_for(ScriptedSource(), chat=CHAT).app()) as client:
        assert (await client.post("/tokenize", json={"prompt": "ROMEO:"})).status_code == 200
        for given in (
            {"prompt": "ROMEO: " * 9},
            {"messages": [{"role": "user", "content": "ROMEO: " * 9}]},
        ):
            response = await client.post("/tokenize", json=given)
            assert response.status_code == 400
            assert (
                "tokens; one request may have at most 5"
                in check_error(response.content, next(iter(given)))["message"]
            )
