"""The gRPC servicer over a real server in this process: the same rules as over HTTP, for any input
and any client that leaves.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from batch_jobs import new_batch_harness, requests
from event_loops import in_event_loop
from fake_job_service import NEW, FakeJobService, OneKey, some_lines
from grpc import StatusCode
from grpc_fuzz import METHODS, REFUSALS, code_of, end_of, every_code
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse
from guessing_drafter import guess
from running_router import new_scheduler, running
from scripted_chain import Gate, ScriptedChain, no_gate
from tokenizer_files import SENTENCEPIECE

from tramontane.client import AsyncClient, Client, CompletionTokensDetails, RetryPolicy
from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.proto import inference_pb2 as pb
from tramontane.proto.errors import (
    DEFECT,
    AuthenticationError,
    ConfigError,
    ConnectionLostError,
    DeadlineExceededError,
    OverloadedError,
    ParameterError,
    PipelineError,
    RequestError,
    TramontaneError,
    UnimplementedError,
    UnknownJobError,
    UnknownModelError,
)
from tramontane.proto.inference_pb2_grpc import InferenceStub
from tramontane.proto.jobs import Job, JobOptions, JobState, ResultLine
from tramontane.proto.plan import CachePlan, SpeculativeConfig, WindowClass
from tramontane.proto.request import FinishReason, Identity
from tramontane.proto.step import MicroBatch
from tramontane.router.client.messages import generate_request
from tramontane.router.engine.router import Router
from tramontane.router.grpc.handlers import MAX_MESSAGE_BYTES, add_batch_jobs, add_inference
from tramontane.router.grpc.messages import (
    PIECE_TOKENS,
    parse_generate,
    to_score_response,
    token_logprobs,
)
from tramontane.router.grpc.servicer import GrpcServicer, coalesce, submit
from tramontane.router.openai.completion import prepare_completion
from tramontane.router.openai.completion_request import CompletionRequest, parse_completion
from tramontane.router.openai.json_limits import MAX_GROUPS, MAX_ITEMS
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.tokenizer import encode_fim

CONTEXT = 256
MODEL = ServedModel(
    "tiny", SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model"), CONTEXT, 8, 1000
)
CACHE = CachePlan(16, (WindowClass(64, 5, 10),), 1)
SHORT_RETRY = RetryPolicy(total_s=30, retry_s=0.01)


@dataclass
class Harness:
    """A server, the router behind it, and a client in front of it."""

    target: str
    server: grpc.aio.Server
    servicer: GrpcServicer
    router: Router
    jobs: FakeJobService
    client: AsyncClient

    async def becomes_idle(self) -> None:
        while not self.router.scheduler.is_idle:
            await asyncio.sleep(0)
        self.router.scheduler.check_integrity()
        assert self.router.num_requests == 0

    async def restart(self) -> None:
        """The same server at the same port, after every connection was cut."""
        await self.server.stop(None)
        self.jobs.breaking = None
        self.server = await _server(self.servicer, self.target)


async def _server(servicer: GrpcServicer, target: str) -> grpc.aio.Server:
    server = grpc.aio.server()
    add_inference(servicer, server)
    add_batch_jobs(servicer, server)
    server.bound_port = server.add_insecure_port(target)
    await server.start()
    return server


@asynccontextmanager
async def _harness(
    gate: Gate = no_gate,
    max_queued_seqs: int = 8,
    key: str | None = None,
    speculative: SpeculativeConfig | None = None,
    **more: Any,
) -> AsyncIterator[Harness]:
    limits = {"max_queued_seqs": max_queued_seqs, "speculative": speculative}
    scheduler = new_scheduler(CACHE, max_len=CONTEXT, enable_prefix_caching=True, **limits)
    router, jobs = Router(scheduler, ScriptedChain(gate)), FakeJobService()
    servicer = GrpcServicer(MODEL, router, **{"jobs": lambda _tenant: jobs} | more)
    server = await _server(servicer, "127.0.0.1:0")
    target = f"127.0.0.1:{server.bound_port}"
    async with running(router), AsyncClient(target, key, retry_policy=SHORT_RETRY) as client:
        harness = Harness(target, server, servicer, router, jobs, client)
        try:
            yield harness
        finally:
            await harness.server.stop(None)


async def _never(_batch: MicroBatch) -> None:
    await asyncio.Event().wait()


# ---- Generate


@in_event_loop
async def test_what_made_the_tokens_is_in_the_trailing_metadata() -> None:
    async with _harness() as harness, grpc.aio.insecure_channel(harness.target) as channel:
        stub = InferenceStub(channel)

        async def trailers() -> list[str]:
            generating = stub.Generate(pb.GenerateRequest(text="What news?", max_tokens=3))
            assert [response async for response in generating]
            scoring = stub.Score(pb.ScoreRequest(text="What news?"))
            await scoring
            pairs = [
                pair for call in (generating, scoring) for pair in await call.trailing_metadata()
            ]
            return [value for key, value in pairs if key == "x-tramontane-fingerprint"]

        assert await trailers() == [], "it is not known"
        harness.router.fingerprint = "fp_a"
        assert await trailers() == ["fp_a", "fp_a"]


@in_event_loop
async def test_generate_streams_what_a_completion_is() -> None:
    async with _harness() as harness:
        request = parse_completion(
            b'{"prompt": "What news?", "max_tokens": 9, "n": 2, "seed": 5, "return_token_ids":'
            b" true}"
        )
        whole = await (await prepare_completion(MODEL, request, 0.0)).run(harness.router)
        pieces = [
            piece
            async for piece in harness.client.generate(
                "What news?", max_tokens=9, n=2, seed=5, model="tiny"
            )
        ]
        for choice in whole["choices"]:
            own = [piece for piece in pieces if piece.index == choice["index"]]
            assert "".join(piece.text for piece in own) == choice["text"]
            assert (
                [token for piece in own for token in piece.token_ids]
                == choice["token_ids"]
                == [7] * 9
            )
            assert [piece.finish_reason for piece in own if piece.finish_reason] == [
                FinishReason.LENGTH
            ]
        assert len(pieces) > 2, "they are streamed"
        usage, timings = pieces[-1].usage, pieces[-1].timings
        assert usage is not None
        assert timings is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            whole["usage"]["prompt_tokens"],
            18,
        )
        assert timings.decode_s >= 0
        assert {piece.usage for piece in pieces[:-1]} == {None}
        by_ids = [piece async for piece in harness.client.generate([5, 6], max_tokens=3)]
        assert by_ids[-1].usage is not None
        assert by_ids[-1].usage.prompt_tokens == 2


class TwoKeys:
    """Each key is a tenant."""

    def authenticate(self, authorization: str | None) -> Identity | None:
        key = (authorization or "").removeprefix("Bearer ")
        return Identity(len(key), key) if key in ("mine", "theirs") else None


@in_event_loop
async def test_cached_tokens_are_those_of_the_callers_own_prompts() -> None:
    """Of two pages and eight tokens. With the client, in the message, and as a completion has
    them.
    """
    prompt = list(range(40))

    async def num_cached(client: AsyncClient) -> int:
        [*_, last] = [piece async for piece in client.generate(prompt, max_tokens=3)]
        assert last.usage is not None
        assert last.timings is not None
        assert (last.usage.prompt_tokens, last.usage.total_tokens) == (40, 43)
        assert last.timings.cached_tokens == last.usage.prompt_tokens_details.cached_tokens
        return last.usage.prompt_tokens_details.cached_tokens

    async with (
        _harness(keys=TwoKeys(), key="mine") as harness,
        AsyncClient(harness.target, "theirs") as theirs,
    ):
        assert [await num_cached(harness.client) for _ in range(2)] == [0, 32]
        assert [await num_cached(theirs) for _ in range(2)] == [0, 32], "nothing of another key's"
        async with grpc.aio.insecure_channel(harness.target) as channel:
            generating = InferenceStub(channel).Generate(
                pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), max_tokens=3),
                metadata=[("authorization", "Bearer mine")],
            )
            responses = [response async for response in generating]
        assert responses[-1].usage.prompt_tokens_details.cached_tokens == 32


@in_event_loop
async def test_where_the_server_speculates_the_usage_says_how_many_drafts_were_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guess(monkeypatch, lambda _: 7, 0.6)

    async with _harness(speculative=SpeculativeConfig(4, 1, 3)) as harness:
        [*_, last] = [piece async for piece in harness.client.generate([5, 6], max_tokens=60)]
        assert last.usage is not None
        counts = harness.router.scheduler.draft_counts
        num_right, num_wrong = (
            counts.num_accepted_tokens,
            counts.num_draft_tokens - counts.num_accepted_tokens,
        )
        assert min(num_right, num_wrong) > 3
        assert last.usage.completion_tokens_details == CompletionTokensDetails(num_right, num_wrong)
        assert last.usage.completion_tokens == 60
        score = await harness.client.score([5, 6, 7])
        assert score.usage.completion_tokens_details == CompletionTokensDetails(0, 0)
    async with _harness() as harness:
        [*_, last] = [piece async for piece in harness.client.generate([5, 6], max_tokens=9)]
        assert last.usage is not None
        assert last.usage.completion_tokens_details is None


@in_event_loop
async def test_threads_share_a_synchronous_client() -> None:
    """Each call has its own timeout; a stream that is closed or dropped is cancelled; closing the
    client ends all calls.
    """

    def use(client: Client, seed: int) -> str:
        next(client.generate("What news?", max_tokens=200))  # dropped after its first chunk
        return "".join(
            chunk.text for chunk in client.generate("What news?", max_tokens=9, seed=seed)
        )

    async with _harness() as harness:
        client = Client(harness.target)
        texts = await asyncio.gather(*(asyncio.to_thread(use, client, 5) for _ in range(4)))
        assert len(set(texts)) == 1
        await harness.becomes_idle()
        client.close()
        with pytest.raises(ValueError, match="closed channel"):
            client.models()
    async with _harness(_never) as harness:
        with Client(harness.target) as client:
            slow = asyncio.create_task(asyncio.to_thread(list, client.generate("a", max_tokens=9)))
            with pytest.raises(DeadlineExceededError, match=r"timeout_s=0\.05"):
                await asyncio.to_thread(client.score, "a b", timeout_s=0.05)
            assert not slow.done()
        with pytest.raises(TramontaneError):
            await slow


@in_event_loop
async def test_the_synchronous_client_gets_the_same() -> None:
    def use_client(target: str) -> tuple[list[int], str, list[str]]:
        with Client(target) as client:
            pieces = list(client.generate("What news?", max_tokens=9, stop="nothing like it"))
            for _ in client.generate("What news?", max_tokens=200):
                break
            with pytest.raises(UnknownModelError, match="this server has 'tiny'"):
                list(client.generate("a", model="other"))
            tokens = [token for piece in pieces for token in piece.token_ids]
            return (
                tokens,
                "".join(piece.text for piece in pieces),
                [model.name for model in client.models()],
            )

    async with _harness() as harness:
        tokens, text, names = await asyncio.to_thread(use_client, harness.target)
        assert tokens == [7] * 9
        assert text == MODEL.tokenizer.decode(tuple(tokens)) if MODEL.tokenizer else ""
        assert names == ["tiny"]
        await harness.becomes_idle()


MISTAKES: list[dict[str, Any]] = [
    {"temperature": -1.0},
    {"max_tokens": 0},
    {"max_tokens": -5},
    {"top_p": 2.0},
    {"top_k": -2},
    {"n": 0},
    {"n": 129},
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_object", "schem": {}}},
    {"response_format": []},
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=str)
@in_event_loop
async def test_parameters_are_judged_as_over_http(mistake: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as over_http:
        parse_completion(json.dumps({"prompt": "a"} | mistake).encode())
    async with _harness() as harness:
        with pytest.raises(ParameterError) as over_grpc:
            await anext(harness.client.generate("a", **mistake))
        assert str(over_grpc.value) == str(over_http.value)
        assert over_grpc.value.parameter == over_http.value.parameter


SCHEMA = {
    "type": "object",
    "properties": {"b": {"type": "integer"}, "a": {"enum": ["x", "y"]}},
    "required": ["b", "a"],
}


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    ],
    ids=str,
)
def test_a_response_format_is_the_grammar_that_it_is_over_http(
    response_format: dict[str, Any],
) -> None:
    """With the properties in the schema's order, which is not the alphabet's."""

    async def grammar(parsed: CompletionRequest) -> str:
        [spec] = (await prepare_completion(MODEL, parsed, 0.0)).generation.sequences()
        return spec.sampling.grammar

    over_http = parse_completion(
        json.dumps({"prompt": "a", "response_format": response_format}).encode()
    )
    over_grpc = parse_generate(generate_request("a", {"response_format": response_format}))
    assert asyncio.run(grammar(over_grpc)) == asyncio.run(grammar(over_http)) != ""


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 30_000, "9" * 5000, '{"type": "json_object"}, "echo": true']
)
def test_a_response_format_that_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ParameterError, match="response_format must be JSON") as refused:
        parse_generate(pb.GenerateRequest(text="a", response_format=text))
    assert refused.value.parameter == "response_format"


def test_a_suffix_is_one_over_http() -> None:
    path = SENTENCEPIECE["v3"]
    tokenizer = SentencePieceTokenizer(path)
    model = ServedModel("tiny", tokenizer, CONTEXT, 8, tokenizer.vocab_size)
    request = parse_generate(generate_request("def f(", {"suffix": "return"}))

    async def prompt_ids() -> tuple[int, ...]:
        [spec] = (await prepare_completion(model, request, 0.0)).generation.sequences()
        return spec.prompt_ids

    assert asyncio.run(prompt_ids()) == encode_fim(tokenizer, "def f(", "return")
    with pytest.raises(ParameterError, match="suffix is for prompts that are texts, not token ids"):
        parse_generate(generate_request([1, 2], {"suffix": "return"}))


NEWER = b"\xa0\x06\x01"  # field 100: 1
IDS, OPTIONS = pb.TokenIds.FromString(NEWER), pb.JobOptions.FromString(NEWER)


IN_OTHERS = {
    "Generate": pb.GenerateRequest(token_ids=IDS).SerializeToString(),
    "Score": pb.ScoreRequest(token_ids=IDS).SerializeToString(),
    "SubmitJob": pb.SubmitJobRequest(options=OPTIONS).SerializeToString(),
}


@pytest.mark.parametrize(
    ("method", "sent"),
    [(method, NEWER) for method in METHODS]
    + [
        (method, IN_OTHERS[name])
        for method in METHODS
        if (name := method[0].rpartition("/")[2]) in IN_OTHERS
    ],
    ids=str,
)
@in_event_loop
async def test_a_field_that_is_not_known_is_not_passed_over(
    method: tuple[str, bool, bool], sent: bytes
) -> None:
    """Another server's parameter, or one of a newer version: the answer would not be what was
    requested.
    """
    async with _harness() as harness, grpc.aio.insecure_channel(harness.target) as channel:
        code, details = await end_of(channel, method, sent)
        assert code == StatusCode.INVALID_ARGUMENT
        assert "has a field that this server does not know" in details


@in_event_loop
async def test_a_stream_counts_from_its_first_tokens_to_its_end_and_waits_for_its_turn() -> None:
    """Requests that wait for a slot would make the writes of all streams rare."""

    class Pace:
        def __init__(self) -> None:
            self.num_streams = 0
            self.counts: list[int] = []

        @contextmanager
        def open_stream(self) -> Iterator[None]:
            self.num_streams += 1
            yield
            self.num_streams -= 1

        async def wait_turn(self, _last_write: float) -> None:
            self.counts.append(self.num_streams)

    gate, pace = asyncio.Event(), Pace()

    async def wait(_batch: MicroBatch) -> None:
        await gate.wait()

    async def read() -> int:
        return len([piece async for piece in harness.client.generate("a", max_tokens=9)])

    async with _harness(wait, pace=pace) as harness:
        reading = asyncio.create_task(read())
        while not harness.router.num_requests:
            await asyncio.sleep(0)
        assert pace.num_streams == 0
        gate.set()
        num_pieces = await reading
        assert num_pieces > 1
        assert pace.counts == [1] * (num_pieces - 1), "after the last one there is none to wait for"
        assert pace.num_streams == 0


@in_event_loop
async def test_what_cannot_be_done_has_a_code_and_is_the_clients_own_error() -> None:
    async def ends(
        harness: Harness,
        request: pb.GenerateRequest,
        path: str = "/tramontane.v1.Inference/Generate",
    ) -> StatusCode:
        async with grpc.aio.insecure_channel(harness.target) as channel:
            return await code_of(channel, (path, False, True), request.SerializeToString())

    async with _harness() as harness:
        assert (
            await ends(harness, pb.GenerateRequest(text="a", model="other")) == StatusCode.NOT_FOUND
        )
        assert await ends(harness, pb.GenerateRequest()) == StatusCode.INVALID_ARGUMENT
        assert (
            await ends(harness, pb.GenerateRequest(text="a"), "/tramontane.v1.Inference/Nothing")
            == StatusCode.UNIMPLEMENTED
        )
        with pytest.raises(ParameterError, match="text or token_ids"):
            await anext(
                harness.client._stream(
                    harness.client._inference.Generate, pb.GenerateRequest(), None
                )
            )
        with pytest.raises(RequestError, match="256 tokens > 255 maximum"):
            await anext(harness.client.generate([5] * 256))
        with pytest.raises(
            ConfigError, match=r"no parameter temprature; did you mean temperature\? There are freq"
        ):
            await anext(harness.client.generate("a", temprature=1))
        with pytest.raises(ConfigError, match=r"^max_tokens is 'many'; it must be a whole number$"):
            await anext(harness.client.generate("a", max_tokens="many"))
        with pytest.raises(ConfigError, match=r"^the prompt must be"):
            await anext(harness.client.generate(["a"]))  # type: ignore[list-item]
        with pytest.raises(
            ConfigError, match=r"^not-here.jsonl cannot be read: No such file or directory$"
        ):
            await harness.client.submit_job(Path("not-here.jsonl"))
        harness.router.failure = PipelineError("stage 1 died")
        with pytest.raises(PipelineError, match="stage 1 died"):
            await anext(harness.client.generate("a"))
    async with _harness(jobs=None) as harness:
        with pytest.raises(UnimplementedError, match="does not accept batch jobs"):
            await harness.client.get_job("a")
    async with AsyncClient(harness.target) as client:
        with pytest.raises(ConnectionLostError):
            await client.models()


@in_event_loop
async def test_a_full_server_says_when_to_retry() -> None:
    gate = asyncio.Event()

    async def wait(_batch: MicroBatch) -> None:
        await gate.wait()

    async with _harness(wait, max_queued_seqs=0) as harness, asyncio.TaskGroup() as group:
        running = [group.create_task(_all(harness, max_tokens=2)) for _ in range(8)]
        while harness.router.num_requests < 8:
            await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="too much is waiting") as refused:
            await anext(harness.client.generate("a"))
        assert refused.value.retry_after_s == 1
        gate.set()
        assert [len(await task) for task in running] == [2] * 8


async def _all(harness: Harness, **parameters: Any) -> list[int]:
    return [
        token
        async for piece in harness.client.generate("a", **parameters)
        for token in piece.token_ids
    ]


# ---- leaving


@in_event_loop
async def test_a_client_that_leaves_frees_its_slots() -> None:
    async with _harness() as harness:
        async with aclosing(harness.client.generate("a", max_tokens=200)) as pieces:
            await anext(pieces)
        await harness.becomes_idle()
    async with _harness(_never) as harness:
        task = asyncio.create_task(_all(harness))
        while not harness.router.num_requests:
            await asyncio.sleep(0)
        task.cancel()
        while harness.router.num_requests:
            await asyncio.sleep(0)


@in_event_loop
async def test_a_deadline_ends_the_work() -> None:
    async with _harness(_never) as harness:
        request_task = asyncio.create_task(_all(harness, timeout_s=0.2))
        while not harness.router.num_requests:
            await asyncio.sleep(0)
        with pytest.raises(DeadlineExceededError, match=r"within timeout_s=0\.2$"):
            await request_task
        while harness.router.num_requests:
            await asyncio.sleep(0)


# ---- who may come in


@in_event_loop
async def test_without_the_key_nothing_is_done() -> None:
    async with _harness(keys=OneKey(), key="right") as harness:
        assert [model.name for model in await harness.client.models()] == ["tiny"]
        for key in (None, "wrong", "right "):
            async with AsyncClient(harness.target, key) as unauthorized:
                with pytest.raises(
                    AuthenticationError, match=r"API key is missing or wrong; give api_key="
                ):
                    await anext(unauthorized.generate("a"))
        async with grpc.aio.insecure_channel(harness.target) as channel:
            codes = [await code_of(channel, method, b"\xff\xff") for method in METHODS]
        assert set(codes) == {StatusCode.UNAUTHENTICATED}
        assert harness.router._seq_ids.__reduce__()[1] == (0,), "nothing was ever submitted"
    async with _harness(allow_peer=lambda peer: not peer.startswith("ipv4:127.")) as harness:
        with pytest.raises(AuthenticationError, match="its --host says so"):
            await harness.client.models()


@in_event_loop
async def test_reflection_is_for_those_who_have_a_key() -> None:
    requested = ServerReflectionRequest(list_services="")
    path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"

    async def services(harness: Harness, *messages: bytes, key: str = "right") -> list[str]:
        async with grpc.aio.insecure_channel(harness.target) as channel:
            call = channel.stream_stream(
                path, response_deserializer=ServerReflectionResponse.FromString
            )
            reported = call(iter(messages), metadata=(("authorization", f"Bearer {key}"),))
            return [
                service.name
                async for answer in reported
                for service in answer.list_services_response.service
            ]

    async def refused(harness: Harness, *messages: bytes, key: str = "right") -> StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await services(harness, *messages, key=key)
        code: StatusCode = error.value.code()
        return code

    async with _harness(keys=OneKey()) as harness:
        ours = [
            "grpc.reflection.v1alpha.ServerReflection",
            "tramontane.v1.BatchJobs",
            "tramontane.v1.Inference",
        ]
        assert sorted(await services(harness, requested.SerializeToString())) == ours
        assert (
            await refused(harness, requested.SerializeToString(), key="another")
            == StatusCode.UNAUTHENTICATED
        )
        assert await refused(harness, b"\xff\xff") == StatusCode.INVALID_ARGUMENT


# ---- hostile messages


@in_event_loop
async def test_hostile_messages_are_refused_and_the_server_continues() -> None:
    async with _harness(max_message=500_000) as harness:
        async with grpc.aio.insecure_channel(harness.target) as channel:
            codes = await every_code(channel)
        assert codes.keys() <= REFUSALS | {StatusCode.OK}, codes
        assert codes[StatusCode.INVALID_ARGUMENT] > sum(codes.values()) / 2
        assert await _all(harness, max_tokens=3) == [7] * 3
        with pytest.raises(RequestError, match="larger than 488 KiB"):
            await anext(harness.client.generate("x" * 500_001))
        await harness.becomes_idle()


@in_event_loop
async def test_a_message_that_is_too_large_is_refused_before_it_is_parsed() -> None:
    """It is no message at all. One that is just small enough is parsed, and so is a larger part of
    a batch job.
    """
    async with _harness() as harness, grpc.aio.insecure_channel(harness.target) as channel:
        for num_bytes, reason in (
            (MAX_MESSAGE_BYTES, "is not a"),
            (MAX_MESSAGE_BYTES + 1, "larger than 2 MiB"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await channel.unary_unary("/tramontane.v1.Inference/Score")(b"\xff" * num_bytes)
            assert failure.value.code() == StatusCode.INVALID_ARGUMENT
            assert reason in (failure.value.details() or "")
        part = channel.stream_unary("/tramontane.v1.BatchJobs/SubmitJob")(
            iter([b"\xff" * (MAX_MESSAGE_BYTES + 1)])
        )
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await part
        assert "is not a" in (failure.value.details() or "")


@in_event_loop
async def test_a_defect_is_reported_as_one_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with _harness() as harness:
        harness.jobs.jobs["a"] = replace(NEW, created_at="never")  # type: ignore[arg-type]
        with pytest.raises(TramontaneError, match=DEFECT):
            await harness.client.get_job("a")
    assert "a defect of the server" in caplog.text


# ---- Score


def test_a_score_is_read_from_a_completion_with_its_prompt() -> None:
    reported = {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -0.5],
        "top_logprobs": [None, {"b": -0.5, "c": -2.0}],
    }
    usage = {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}
    answer = to_score_response({"choices": [{"logprobs": reported}], "usage": usage})
    score = pb.ScoreResponse.FromString(answer.SerializeToString())
    first, second = score.tokens
    assert (first.token, first.HasField("logprob")) == ("a", False)
    assert (second.token, second.logprob) == ("b", -0.5)
    assert [(top.token, top.logprob) for top in second.top] == [("b", -0.5), ("c", -2.0)]
    assert score.usage.total_tokens == 2
    assert token_logprobs(None) == []


@pytest.mark.parametrize("num_tokens", [0, 1, PIECE_TOKENS - 1, PIECE_TOKENS, 2 * PIECE_TOKENS + 1])
@pytest.mark.parametrize("has_tops", [False, True])
def test_a_long_score_is_serialized_in_pieces_as_if_at_once(
    num_tokens: int, has_tops: bool
) -> None:
    tops = [{f"other {n}": -float(n)} for n in range(num_tokens)] if has_tops else None
    columns = {
        "tokens": [str(n) for n in range(num_tokens)],
        "token_logprobs": [-n / 8 for n in range(num_tokens)],
    }
    logprobs = columns | {"top_logprobs": tops}
    usage = {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
    whole = pb.ScoreResponse(tokens=token_logprobs(logprobs), usage=pb.Usage(**usage))
    choices = [{"logprobs": logprobs}]
    assert (
        pb.ScoreResponse.FromString(to_score_response({"choices": choices, "usage": usage}).data)
        == whole
    )
    assert not choices, "freed in the thread that serializes"


# ---- BatchJobs


@in_event_loop
async def test_jobs_are_submitted_listed_watched_and_cancelled(tmp_path: Path) -> None:
    def use_client(target: str) -> list[Job]:
        with Client(target) as client:
            (tmp_path / "lines").write_bytes(b"{}\n" * 300_000)  # several messages
            job = client.submit_job(
                tmp_path / "lines", JobOptions("/v1/chat/completions", False, {"owner": "me"})
            )
            assert client.get_job(job.job_id) == job
            assert client.list_jobs() == [job]
            assert client.list_jobs(1, after=job.job_id) == []
            with pytest.raises(RequestError, match=r"ftp://x is not allowed"):
                client.submit_job(url="ftp://x")
            with pytest.raises(RequestError, match="no line"):
                client.submit_job(b"")
            with pytest.raises(ConfigError, match="either lines or a url"):
                client.submit_job()
            with pytest.raises(UnknownJobError, match="there is no job 'x'"):
                client.cancel("x")
            with pytest.raises(UnknownJobError):
                list(client.watch_job("x"))
            with pytest.raises(UnknownJobError):
                list(client.results("x"))
            with pytest.raises(ParameterError, match="offset is -1"):
                list(client.results(job.job_id, -1))
            return [job, *client.watch_job(job.job_id), client.cancel(job.job_id)]

    async with _harness() as harness:
        job, *seen, cancelled = await asyncio.to_thread(use_client, harness.target)
        assert harness.jobs.uploads == [b"{}\n" * 300_000]
        assert job == replace(
            NEW,
            options=JobOptions("/v1/chat/completions", False, {"owner": "me"}),
            num_lines=300_000,
            error="none",
            started_at=2.5,
            ended_at=3.5,
        )
        assert [each.state for each in seen] == [
            JobState.QUEUED,
            JobState.RUNNING,
            JobState.COMPLETED,
        ]
        assert cancelled == replace(job, state=JobState.CANCELLED)


@pytest.mark.parametrize("is_url", [False, True])
def test_a_submission_that_comes_again_with_its_key_is_the_same_job(
    tmp_path: Path, is_url: bool
) -> None:
    """With other lines it is refused. The content of a URL is not read again."""
    batch = new_batch_harness(tmp_path)
    (tmp_path / "in.jsonl").write_bytes(requests(3))

    async def scenario() -> None:
        async with _harness(
            jobs=batch.service(url_prefixes=(f"file://{tmp_path}",)).for_tenant
        ) as harness:
            url = f"file://{tmp_path}/in.jsonl" if is_url else None
            submit = harness.client.submit_job
            first = await submit(None if is_url else requests(3), url=url, request_key="k")
            (tmp_path / "in.jsonl").unlink()
            assert await submit(None if is_url else requests(3), url=url, request_key="k") == first
            with pytest.raises(
                RequestError, match="belongs to a job with other lines or another URL"
            ):
                await submit(
                    None if is_url else requests(2), url=url and f"{url}.jsonl", request_key="k"
                )
            if not is_url:
                others = [await submit(requests(3), request_key=key) for key in ("l", None, None)]
                assert len({first.job_id, *(job.job_id for job in others)}) == 4
            for wrong in ("", "k" * 257, "a\0b"):
                with pytest.raises(RequestError, match="key must have 1 to 256"):
                    await submit(b"", request_key=wrong)

    try:
        asyncio.run(scenario())
    finally:
        batch.close()


def test_a_lost_connection_costs_no_result_and_repeats_none() -> None:
    """The server stops when two results have arrived; the client requests those that follow
    them.
    """

    def collect(target: str, lines: list[ResultLine]) -> list[JobState]:
        with Client(target, retry_policy=SHORT_RETRY) as client:
            lines.extend(client.results("a", 1))
            return [job.state for job in client.watch_job("a")]

    async def collect_async(harness: Harness, lines: list[ResultLine]) -> list[JobState]:
        async for line in harness.client.results("a", 1):
            lines.append(line)
        return [job.state async for job in harness.client.watch_job("a")]

    async def scenario(is_async: bool) -> None:
        async with _harness() as harness:
            harness.jobs.lines, harness.jobs.jobs["a"] = some_lines(9), NEW
            harness.jobs.breaking = asyncio.Event()
            lines: list[ResultLine] = []
            results = (
                collect_async(harness, lines)
                if is_async
                else asyncio.to_thread(collect, harness.target, lines)
            )
            collecting = asyncio.create_task(results)
            await harness.jobs.breaking.wait()
            while len(lines) < 2:  # they may be on their way
                await asyncio.sleep(0.01)
            await harness.restart()
            states = await collecting
            assert lines == some_lines(9)[1:]
            assert harness.jobs.requested == [1, 3]
            assert states[-1] == JobState.COMPLETED
            assert harness.jobs.num_open == 0

    asyncio.run(scenario(is_async=False))
    asyncio.run(scenario(is_async=True))


def test_retries_end() -> None:
    lost = ConnectionLostError("gone")
    assert RetryPolicy(10, 2).pause(lost, 8) == 2
    with pytest.raises(ConnectionLostError):
        RetryPolicy(10, 2).pause(lost, 8.5)
    with pytest.raises(UnknownJobError):
        RetryPolicy(10, 2).pause(UnknownJobError("no"), 0)


@in_event_loop
async def test_what_is_ready_travels_together() -> None:
    gate = asyncio.Event()

    async def source(*sizes: int) -> AsyncGenerator[int, None]:
        for size in sizes:
            if size == 0:
                await gate.wait()
            elif size < 0:
                raise ZeroDivisionError
            yield size

    async def bunches(*sizes: int) -> list[list[int]]:
        return [bunch async for bunch in coalesce(source(*sizes), lambda size: size, 8)]

    assert await bunches(3, 4, 5) == [[3, 4], [5]]
    assert await bunches(9, 1, 7, 1) == [[9], [1, 7], [1]]
    assert await bunches() == []
    async with aclosing(coalesce(source(1, 2, 0, 3), lambda size: size, 8)) as slow:
        assert await anext(slow) == [1, 2]
        gate.set()
        assert await anext(slow) == [0, 3]
    failing = coalesce(source(1, -1), lambda size: size, 8)
    assert await anext(failing) == [1]
    with pytest.raises(ZeroDivisionError):
        await anext(failing)


@in_event_loop
async def test_an_upload_that_is_broken_off_is_no_job() -> None:
    """Ray Serve's stream of messages just ends where its client has left."""

    class Upload:
        def __init__(self, *parts: pb.SubmitJobRequest, is_cancelled: bool = False) -> None:
            self._parts, self.is_cancelled = iter(parts), lambda: is_cancelled

        def __aiter__(self) -> "Upload":
            return self

        async def __anext__(self) -> pb.SubmitJobRequest:
            for part in self._parts:
                return part
            raise StopAsyncIteration

    options, data = pb.SubmitJobRequest(options=pb.JobOptions()), pb.SubmitJobRequest(data=b"{}\n")
    wrong = [
        (Upload(options, data, is_cancelled=True), "was broken off"),
        (Upload(options, is_cancelled=True), "was broken off"),
        (Upload(options, data, options), "either data or one url"),
        (Upload(options, pb.SubmitJobRequest(url="a"), data), "nothing may follow a url"),
        (Upload(data), "must hold options"),
        (Upload(), "must hold options"),
        (
            Upload(pb.SubmitJobRequest(options=pb.JobOptions(endpoint="/v1/x"))),
            "there are /v1/completions and /v1/chat",
        ),
    ]

    jobs = FakeJobService()
    for upload, message in wrong:
        with pytest.raises(RequestError, match=message):
            await submit(jobs, upload)
    assert not jobs.uploads
    await submit(jobs, Upload(options, data, data))
    assert jobs.uploads == [b"{}\n{}\n"]


def test_a_call_has_a_name_in_the_log_and_on_its_way(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    async def look(batch: MicroBatch) -> None:
        seen.extend(chunk.request_id for chunk in batch.chunks)
        raise PipelineError("stage 1 died")

    async def scenario() -> None:
        async with _harness(
            look, id_of=lambda context: dict(context.invocation_metadata())["user-agent"][:4]
        ) as harness:
            with pytest.raises(TramontaneError):
                await harness.client.score("ROMEO:")

    with caplog.at_level(logging.INFO, "tramontane.router"):
        asyncio.run(scenario())
    assert set(seen) == {"grpc"}
    lines = [
        record.getMessage() for record in caplog.records if vars(record).get("request_id") == "grpc"
    ]
    assert lines[0] == "request grpc came over gRPC: ScoreRequest"
    assert any(
        line.startswith("request grpc has made the pipeline fail three times") for line in lines
    )


@pytest.mark.parametrize(
    ("request_message", "message"),
    [
        (
            pb.GenerateRequest(text="a", stop=["a"] * 17),
            "stop has 17 items; it may have at most 16",
        ),
        (
            pb.GenerateRequest(text="a", logit_bias=dict.fromkeys(range(1025), 1.0)),
            "logit_bias has 1025 items; it may have at most 1024",
        ),
        (
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=bytes(MAX_ITEMS + 1))),
            f"prompt has {MAX_ITEMS + 1} items; it may have at most {MAX_ITEMS}",
        ),
        (
            pb.GenerateRequest(text="a", response_format="[" + "[]," * MAX_GROUPS + "[]]"),
            f"response_format has more than {MAX_GROUPS} lists and objects; send fewer at once",
        ),
    ],
    ids=["stop", "logit_bias", "token_ids", "response_format"],
)
def test_what_a_message_has_too_much_of_is_refused_before_it_is_converted(
    request_message: pb.GenerateRequest, message: str
) -> None:
    with pytest.raises(ParameterError) as refused:
        parse_generate(request_message)
    assert str(refused.value) == message
