"""The API server over a real router and a tiny model, without Ray: OpenAI's shapes, for any input
and any client that leaves.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from event_loops import in_event_loop
from examples import examples
from http_fuzz import BODIES, check_error
from hypothesis import given, settings
from logit_formulas import changed_logits
from reference import assert_best_experts, reference_logits
from running_router import new_scheduler, running
from scripted_chain import Gate
from starlette.applications import Starlette
from starlette.requests import Request
from tiny_models import random_model, split_model, tiny_args, tiny_plan

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.config.measurements import ExpertLoad, MeasuredLoad
from tramontane.cluster.http.app import HttpApp, HttpAppConfig, MoveExperts
from tramontane.cluster.http.sse import Pacer, SseResponse
from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.proto.errors import DEFECT, ConfigError, PipelineError
from tramontane.proto.ports import StageChain
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.proto.units import format_bytes
from tramontane.router.engine.health import PipelineHealth
from tramontane.router.engine.router import Router
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.tokenizer import Tokenizer

CONTEXT = 64
MAX_BODY = 4096
MAX_SEQUENCES = 16
TURNS = 100  # of the event loop, within which a client that left is forgotten
ARGS = replace(tiny_args(n_layers=2, window=16, max_seq_len=CONTEXT), vocab_size=1000)
PLAN = tiny_plan(ARGS, num_stages=2, max_num_seqs=8)
GREEDY = {"model": "tiny", "prompt": "What news?", "max_tokens": 8, "temperature": 0}
LONG = GREEDY | {"max_tokens": CONTEXT, "stream": True}

Message = MutableMapping[str, Any]
Serve = Callable[..., AbstractAsyncContextManager[Any]]


class GatedChain:
    """The real stages; every result passes through ``gate`` before the router gets it. One that has
    failed is lost for good.
    """

    has_lost_node = False

    def __init__(self, inner: StageChain, gate: Gate) -> None:
        self._inner, self._gate = inner, gate
        self.num_stages = inner.num_stages
        self._failure: PipelineError | None = None

    async def fence(self) -> int:
        if self._failure is not None:
            raise self._failure
        return await self._inner.fence()

    def submit(self, batch: MicroBatch) -> Awaitable[StepResult]:
        return self._gated(batch, self._inner.submit(batch))

    async def _gated(self, batch: MicroBatch, result: Awaitable[StepResult]) -> StepResult:
        done = await result
        try:
            await self._gate(batch)
        except PipelineError as error:
            self._failure = error
            raise
        return done


def _changes(events: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    """Return the parts of a stream's choice, in order."""
    return [change for event in events for change in event["choices"] if change["index"] == index]


@dataclass
class Harness:
    """An API server, the router behind it, and a client in front of it."""

    server: HttpApp
    app: Starlette
    router: Router
    client: httpx.AsyncClient
    health: PipelineHealth = field(default_factory=lambda: PipelineHealth("ready"))
    load: MeasuredLoad = field(default_factory=lambda: MeasuredLoad(((1, 2), (3, 0)), 2))

    async def post(self, body: dict[str, Any] | bytes, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.client.post("/v1/completions", content=content, headers=headers)

    async def becomes_idle(self) -> None:
        while not self.router.scheduler.is_idle:
            await asyncio.sleep(0)
        self.router.scheduler.check_integrity()
        assert self.router.num_requests == 0


async def _open(_batch: MicroBatch) -> None:
    pass


@asynccontextmanager
async def _harness(
    chain: StageChain,
    tokenizer: Tokenizer,
    gate: Gate = _open,
    *,
    max_num_seqs: int = 8,
    max_queued_seqs: int = 8,
    max_queued_tokens: int = 1000,
    move_experts: MoveExperts | None = None,
) -> AsyncIterator[Harness]:
    sizes = {"num_seqs": max_num_seqs, "max_len": CONTEXT, "vocab_size": ARGS.vocab_size}
    limits = {"max_queued_seqs": max_queued_seqs, "max_queued_tokens": max_queued_tokens}
    scheduler = new_scheduler(PLAN.cache, budget=32, in_flight=2, **sizes, **limits)
    router = Router(scheduler, GatedChain(chain, gate))

    async def health() -> PipelineHealth:
        return harness.health

    async def expert_load() -> MeasuredLoad:
        return harness.load

    numbers = (CONTEXT, MAX_SEQUENCES, ARGS.vocab_size)
    experts = {"expert_layers": ARGS.moe_layers, "experts_per_token": 2}
    model = ServedModel("tiny", tokenizer, *numbers, **experts, aliases=("small", "org/tiny"))
    config = HttpAppConfig(
        model=model,
        source=router,
        health=health,
        expert_load=expert_load,
        max_body_bytes=MAX_BODY,
        pacer=Pacer(10**9),
        move_experts=move_experts,
    )
    server = HttpApp(config)
    app = server.app()
    transport = httpx.ASGITransport(app)
    async with (
        running(router),
        httpx.AsyncClient(transport=transport, base_url="http://ingress") as client,
    ):
        harness = Harness(server, app, router, client)
        yield harness


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model")


@pytest.fixture(scope="module")
def chain() -> Iterator[LocalStageChain]:
    stages = LocalStageChain(split_model(random_model(ARGS), PLAN))
    yield stages
    stages.close()


@pytest.fixture
def serve(chain: LocalStageChain, tokenizer: Tokenizer) -> Serve:
    """Return what serves the model within a context; it takes the other arguments of
    ``_harness``.
    """
    return partial(_harness, chain, tokenizer)


def _openai_client(harness: Harness) -> openai.AsyncOpenAI:
    base_url, own = "http://ingress/v1", harness.client
    return openai.AsyncOpenAI(api_key="none", base_url=base_url, http_client=own, max_retries=0)


def _events(response: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream that ended as it should."""
    *events, done, nothing = response.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


# Answers


@in_event_loop
async def test_a_plain_completion_has_openais_shape(serve: Serve, tokenizer: Tokenizer) -> None:
    async with serve() as harness:
        response = await harness.post(GREEDY | {"return_token_ids": True})
        assert response.status_code == 200
        answer = response.json()
        assert answer.keys() == {
            "id",
            "object",
            "created",
            "model",
            "choices",
            "usage",
            "timings",
            "system_fingerprint",
        }
        assert answer["id"].startswith("cmpl-")
        assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
        [choice] = answer["choices"]
        assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
        assert choice["text"] == tokenizer.decode(tuple(choice["token_ids"]))
        assert choice["prompt_token_ids"] == list(tokenizer.encode("What news?"))
        num_prompt = len(choice["prompt_token_ids"])
        totals = {
            "prompt_tokens": num_prompt,
            "completion_tokens": 8,
            "total_tokens": num_prompt + 8,
        }
        assert answer["usage"] == totals | {"prompt_tokens_details": {"cached_tokens": 0}}
        assert answer["timings"].keys() == {
            "ingress_s",
            "queue_s",
            "prefill_s",
            "decode_s",
            "cached_tokens",
        }
        await harness.becomes_idle()


@in_event_loop
async def test_a_stream_says_what_a_plain_answer_says(serve: Serve) -> None:
    async with serve() as harness:
        request_body = GREEDY | {
            "prompt": ["What news?", "la"],
            "n": 2,
            "echo": True,
            "max_tokens": 20,
        }
        plain = (await harness.post(request_body)).json()
        response = await harness.post(
            request_body | {"stream": True, "stream_options": {"include_usage": True}}
        )
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        *events, last = _events(response)
        assert [event["usage"] for event in events] == [None] * len(events)
        assert len({event["id"] for event in (*events, last)}) == 1
        assert (last["choices"], last["usage"]) == ([], plain["usage"])
        for choice in plain["choices"]:
            own = _changes(events, choice["index"])
            assert "".join(change["text"] for change in own) == choice["text"]
            assert [change["finish_reason"] for change in own] == [None] * (len(own) - 1) + [
                choice["finish_reason"]
            ]


@in_event_loop
async def test_experts_are_those_that_the_gates_choose_streamed_or_not(serve: Serve) -> None:
    """Of prompts in several pieces and of every new token but the last, for every choice its
    own.
    """
    weights = random_model(ARGS).state_dict()

    async with serve() as harness:
        request_body = {
            "model": "tiny",
            "prompt": ["What news? " * 4, "la"],
            "n": 2,
            "max_tokens": 12,
            "seed": 3,
        }
        request_body |= {"return_experts": [1, 0], "return_token_ids": True}
        plain = (await harness.post(request_body)).json()
        events = _events(await harness.post(request_body | {"stream": True}))
        for choice in plain["choices"]:
            own = _changes(events, choice["index"])
            reported = {
                layer: choice["prompt_experts"][str(layer)] + choice["experts"][str(layer)]
                for layer in (0, 1)
            }
            assert len(choice["prompt_experts"]["0"]) == len(choice["prompt_token_ids"])
            assert_best_experts(
                weights, ARGS, choice["prompt_token_ids"] + choice["token_ids"][:-1], reported
            )
            for name in ("prompt_experts", "experts"):
                parts = [change[name] for change in own if name in change]
                assert {
                    layer: [i for part in parts for i in part[layer]] for layer in choice[name]
                } == choice[name]


@in_event_loop
async def test_without_include_usage_there_is_none(serve: Serve) -> None:
    async with serve() as harness:
        events = _events(await harness.post(GREEDY | {"stream": True}))
        assert all(event["choices"] and "usage" not in event for event in events)


@in_event_loop
async def test_many_at_once_get_what_each_gets_alone(serve: Serve) -> None:
    async with serve() as harness:
        bodies = [GREEDY | {"prompt": "la " * n, "temperature": 1, "seed": n} for n in range(1, 9)]
        alone = [(await harness.post(body)).json()["choices"] for body in bodies]
        together = await asyncio.gather(*(harness.post(body) for body in bodies))
        assert [response.json()["choices"] for response in together] == alone
        streamed = await asyncio.gather(*(harness.post(body | {"stream": True}) for body in bodies))
        texts = [
            "".join(e["choices"][0]["text"] for e in _events(response)) for response in streamed
        ]
        assert texts == [choices[0]["text"] for choices in alone]
        await harness.becomes_idle()


@in_event_loop
async def test_a_stop_string_ends_the_work_too(serve: Serve) -> None:
    async with serve() as harness:
        request_body = GREEDY | {"max_tokens": CONTEXT}
        whole = (await harness.post(request_body)).json()["choices"][0]["text"]
        await harness.becomes_idle()
        num_steps = harness.router.scheduler.num_steps
        [choice] = (await harness.post(request_body | {"stop": whole[5:8]})).json()["choices"]
        assert choice["text"] == whole.split(whole[5:8])[0]
        assert choice["finish_reason"] == "stop"
        await harness.becomes_idle()
        assert harness.router.scheduler.num_steps < 1.5 * num_steps


@in_event_loop
async def test_openais_own_client_understands_every_answer(serve: Serve) -> None:
    async with serve() as harness:
        client = _openai_client(harness)
        assert [model.id async for model in client.models.list()] == ["tiny", "small", "org/tiny"]
        plain = await client.completions.create(
            model="tiny", prompt="What news?", max_tokens=8, temperature=0
        )
        assert plain.usage is not None
        assert plain.usage.completion_tokens == 8
        stream = await client.completions.create(
            model="tiny",
            prompt="What news?",
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == plain.choices[0].text
        assert chunks[-1].usage == plain.usage
        with pytest.raises(openai.NotFoundError, match="'gpt' does not exist"):
            await client.completions.create(model="gpt", prompt="a")
        with pytest.raises(openai.BadRequestError, match="n is 0") as refused:
            await client.completions.create(model="tiny", prompt="a", n=0)
        assert (refused.value.param, refused.value.type) == ("n", "invalid_request_error")


@in_event_loop
async def test_a_prompt_is_scored_without_an_answer(serve: Serve, tokenizer: Tokenizer) -> None:
    """As evaluation harnesses request it: echo, log-probabilities, no tokens; also by ids,
    streamed, and with an answer.
    """
    weights = random_model(ARGS).state_dict()
    prompts = [tokenizer.encode("What news? " * 4), tokenizer.encode("la")]

    async with serve() as harness:
        client = _openai_client(harness)
        request_body: dict[str, Any] = {
            "model": "tiny",
            "prompt": [list(ids) for ids in prompts],
            "logprobs": 3,
            "echo": True,
            "seed": 1,
        }
        scored = await client.completions.create(**request_body, max_tokens=0)
        answered = await client.completions.create(
            **request_body, max_tokens=4, extra_body={"return_token_ids": True}
        )
        assert scored.usage is not None
        assert scored.usage.completion_tokens == 0
        stream = await client.completions.create(**request_body, max_tokens=0, stream=True)
        streamed = {choice.index: choice async for chunk in stream for choice in chunk.choices}
        for choice, longer, ids in zip(scored.choices, answered.choices, prompts, strict=True):
            assert choice.text == tokenizer.decode(ids)
            assert streamed[choice.index].model_dump() == choice.model_dump()
            assert longer.text.startswith(choice.text)
            assert choice.logprobs is not None
            assert longer.logprobs is not None
            assert longer.logprobs.tokens is not None
            assert longer.logprobs.token_logprobs is not None
            assert choice.logprobs.tokens == longer.logprobs.tokens[: len(ids)]
            whole = [*ids, *longer.model_dump()["token_ids"]]
            expected = reference_logits(weights, ARGS, whole).log_softmax(-1)
            for position in range(1, len(whole)):
                logprob, best = longer.logprobs.token_logprobs[position], expected[position - 1]
                assert abs(logprob - best[whole[position]].item()) < 1e-3
                top = (longer.logprobs.top_logprobs or [])[position]
                assert sorted(top.values())[-3:] == pytest.approx(
                    sorted(best.topk(3).values.tolist()), abs=1e-3
                )
                assert len(longer.logprobs.tokens) == len(whole)


@in_event_loop
async def test_penalties_and_biases_over_http_are_those_of_their_formulas(
    serve: Serve, tokenizer: Tokenizer
) -> None:
    weights = random_model(ARGS).state_dict()
    changes: dict[str, Any] = {
        "presence_penalty": 1.0,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
    }
    prompt = list(tokenizer.encode("What news? " * 2))

    async with serve() as harness:
        plain = (await harness.post(GREEDY | {"prompt": prompt, "return_token_ids": True})).json()[
            "choices"
        ][0]
        bias = {str(plain["token_ids"][0]): -2, "700": 3}
        request_body = (
            GREEDY | {"prompt": prompt, "return_token_ids": True, "logit_bias": bias} | changes
        )
        token_ids = (await harness.post(request_body)).json()["choices"][0]["token_ids"]
        assert token_ids != plain["token_ids"]
        sampling = SamplingParams(
            **changes, logit_bias=tuple((int(token), float(by)) for token, by in bias.items())
        )
        for place, token_id in enumerate(token_ids):
            made = token_ids[:place]
            logits = reference_logits(weights, ARGS, prompt + made)[-1].tolist()
            wanted = changed_logits(logits, sampling, prompt, made)
            assert max(wanted) - wanted[token_id] < 1e-4


@in_event_loop
async def test_the_model_is_listed(serve: Serve) -> None:
    async with serve() as harness:
        response = await harness.client.get("/v1/models")
        assert response.status_code == 200
        listed = response.json()
        assert listed["object"] == "list"
        model, *others = listed["data"]
        names = ["tiny", "small", "org/tiny"]
        assert others == [
            model | {"id": name, "aliases": [each for each in names if each != name]}
            for name in names[1:]
        ]
        assert (model["id"], model["object"], model["owned_by"]) == ("tiny", "model", "tramontane")
        assert (model["max_model_len"], model["vocab_size"]) == (CONTEXT, ARGS.vocab_size)
        assert isinstance(model["created"], int)
        assert (await harness.client.get("/v1/models/tiny")).json() == model
        assert (await harness.client.get("/v1/models/org/tiny")).json() == others[1]
        unknown = await harness.client.get("/v1/models/gpt/4")
        assert unknown.status_code == 404
        error = check_error(unknown.content)
        assert error["code"] == "model_not_found"
        assert (
            error["message"]
            == "the model 'gpt/4' does not exist; this server has 'tiny' or 'small' or"
            " 'org/tiny'"
        )


@pytest.mark.parametrize("name", ["tiny", "small", "org/tiny", None])
@in_event_loop
async def test_a_request_may_give_each_name_and_answers_have_the_first(
    serve: Serve, name: str | None
) -> None:
    async with serve() as harness:
        body = {"prompt": [1, 2, 3], "max_tokens": 2} | ({} if name is None else {"model": name})
        answer = await harness.client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert answer.json()["model"] == "tiny"


@in_event_loop
async def test_health_follows_the_pipeline(serve: Serve) -> None:
    async with serve() as harness:
        ready = await harness.client.get("/health")
        assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
        harness.health = PipelineHealth("degraded", "waiting for 1 of 2 stages", 12.34)
        degraded = await harness.client.get("/health")
        assert degraded.status_code == 200, "requests are accepted, and wait"
        assert degraded.json() == {
            "status": "degraded",
            "reason": "waiting for 1 of 2 stages",
            "since_s": 12.3,
        }
        harness.health = PipelineHealth("unavailable", "waiting for 2 of 2 stages")
        unready = await harness.client.get("/health")
        assert unready.status_code == 503
        assert unready.headers["retry-after"] == "1"
        error = check_error(unready.content)
        assert error["type"] == "server_error"
        assert error["message"] == "no pipeline can make tokens now: waiting for 2 of 2 stages"


@pytest.mark.parametrize("method", ["GET", "POST"])
@in_event_loop
async def test_ping_is_health_by_another_name(serve: Serve, method: str) -> None:
    async with serve() as harness:
        assert (await harness.client.request(method, "/ping")).json() == {"status": "ready"}
        harness.health = PipelineHealth("unavailable", "no router has answered")
        assert (await harness.client.request(method, "/ping")).status_code == 503


@in_event_loop
async def test_the_load_of_the_experts_is_reported(serve: Serve) -> None:
    async with serve() as harness:
        reported = await harness.client.get("/experts")
        assert (reported.status_code, reported.json()) == (
            200,
            {"tokens_per_expert": [[1, 2], [3, 0]], "pipelines": 2},
        )
        harness.load = MeasuredLoad((), 1)
        without = await harness.client.get("/experts")
        assert without.status_code == 404
        assert (
            check_error(without.content, None, "no_experts")["message"]
            == "the model has no experts"
        )
        harness.load = MeasuredLoad((), 0)
        down = await harness.client.get("/experts")
        assert (down.status_code, down.headers["retry-after"]) == (503, "1")
        assert check_error(down.content)["type"] == "server_error"


def test_experts_are_moved_where_clients_may_request_it(serve: Serve) -> None:
    loads: list[ExpertLoad] = []

    async def move(load: ExpertLoad) -> tuple[int, int]:
        loads.append(load)
        if len(load) == 1:
            raise ConfigError("the measured load is not of this model")
        return 5, 2

    async def scenario() -> None:
        async with serve(move_experts=move) as harness:
            moved = await harness.client.post(
                "/experts", json={"tokens_per_expert": [[1, 2], [3, 0]]}
            )
            assert (moved.status_code, moved.json()) == (200, {"moved": 5, "pipelines": 2})
            refused = await harness.client.post("/experts", json={"tokens_per_expert": [[1, 2]]})
            assert refused.status_code == 400
            assert (
                check_error(refused.content)["message"] == "the measured load is not of this model"
            )
            for body in (
                b"",
                b"[]",
                b"{}",
                b'{"tokens_per_expert": [[-1]]}',
                b'{"tokens_per_expert": 3}',
                b"\xff",
                b"[" * 900,
            ):
                bad = await harness.client.post("/experts", content=body)
                assert bad.status_code == 400
                assert "tokens_per_expert" in check_error(bad.content)["message"]
            large = await harness.client.post("/experts", content=b" " * (MAX_BODY + 1))
            assert large.status_code == 413
            assert (await harness.client.get("/experts")).status_code == 200

    asyncio.run(scenario())
    assert loads == [((1, 2), (3, 0)), ((1, 2),)]


# Refusals


@pytest.mark.parametrize("path", ["/v1", "/v1/chat", "/v2/completions", "/%0a%22%ff", "/docs/x/y"])
@in_event_loop
async def test_another_path_is_not_found(serve: Serve, path: str) -> None:
    async with serve() as harness:
        for method in ("GET", "POST"):
            response = await harness.client.request(method, path)
            assert response.status_code == 404
            assert check_error(response.content)["type"] == "invalid_request_error"


@in_event_loop
async def test_what_exists_is_named_where_nothing_is(serve: Serve) -> None:
    """Every path that the message names has an answer; ``/metrics`` is said to be Ray's."""
    async with serve() as harness:
        message = check_error((await harness.client.get("/-")).content)["message"]
        paths = re.findall(r"/[\w./]+", message)
        chats, *others = paths
        assert chats == "/v1/chat/completions"
        assert others == ["/v1/models", "/ui", "/docs", "/openapi.json"]
        assert 404 not in [(await harness.client.get(path)).status_code for path in paths]
        for path, advice in (
            ("/v1/v1/messages", "leave /v1 out of yours"),
            ("/chat/completions", "base URL needs /v1 at its end"),
            ("/models", "base URL needs /v1 at its end"),
        ):
            response = await harness.client.get(path)
            assert advice in response.json()["error"]["message"]
        for path in ("/metrics", "/metrics/", "/v1/metrics"):
            error = check_error((await harness.client.get(path)).content)
            assert error["message"].startswith(
                f"'{path}' is not here; Ray exports the metrics of every node, at /metrics of"
            )
        assert "## Metrics" in (Path(__file__).parents[3] / "docs/observability.md").read_text(
            encoding="utf-8"
        )


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/health", "GET"),
        ("POST", "/experts", "GET"),
    ],
)
@in_event_loop
async def test_another_method_is_not_allowed(
    serve: Serve, method: str, path: str, allowed: str
) -> None:
    async with serve() as harness:
        response = await harness.client.request(method, path)
        assert response.status_code == 405
        assert allowed in response.headers["allow"].split(", ")
        check_error(response.content)


@in_event_loop
async def test_a_strange_host_header_is_no_defect(serve: Serve) -> None:
    async with serve() as harness:
        for path in ("/nothing", "/v1/completions"):
            response = await harness.client.get(path, headers={"host": "["})
            assert response.status_code in (400, 404, 405)
            check_error(response.content)


@in_event_loop
async def test_another_model_does_not_exist(serve: Serve) -> None:
    async with serve() as harness:
        for stream in (False, True):
            response = await harness.post(GREEDY | {"model": "x" * 1000, "stream": stream})
            assert response.status_code == 404
            error = check_error(response.content, "model", "model_not_found")
            assert "'tiny'" in error["message"]
            assert len(error["message"]) < 200
        assert (await harness.post({"prompt": "a", "model": None})).status_code == 200


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": "la " * 500}, "prompt"),
        ({"prompt": "la " * CONTEXT}, "prompt"),
        ({"prompt": [1] * CONTEXT}, "prompt"),
        ({"prompt": [ARGS.vocab_size]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": ["a"] * (MAX_SEQUENCES + 1)}, "prompt"),
        ({"return_experts": [2]}, "return_experts"),
        ({"return_experts": [0, 0]}, "return_experts"),
        ({"return_experts": "0"}, "return_experts"),
        ({"prompt": ["a"] * 2, "n": MAX_SEQUENCES}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {str(ARGS.vocab_size): 1}}, "logit_bias"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_token": 5}, "max_token"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@in_event_loop
async def test_a_request_that_cannot_run_is_refused_by_its_parameter(
    serve: Serve, changes: dict[str, Any], param: str, stream: bool
) -> None:
    async with serve() as harness:
        response = await harness.post(GREEDY | changes | {"stream": stream})
        assert response.status_code == 400
        assert check_error(response.content, param)["type"] == "invalid_request_error"
        assert harness.router.scheduler.num_steps == 0


@in_event_loop
async def test_of_several_prompts_none_runs_if_one_cannot(serve: Serve) -> None:
    async with serve() as harness:
        response = await harness.post(GREEDY | {"prompt": [[1, 2], [ARGS.vocab_size]]})
        assert response.status_code == 400
        assert str(ARGS.vocab_size) in check_error(response.content, "prompt")["message"]
        assert harness.router.scheduler.is_idle


@in_event_loop
async def test_a_body_as_large_as_allowed_is_read_and_one_byte_more_is_not(serve: Serve) -> None:
    async with serve() as harness:
        whole = json.dumps(GREEDY).encode().ljust(MAX_BODY)
        assert (await harness.post(whole)).status_code == 200
        response = await harness.post(whole + b" ")
        assert response.status_code == 413
        assert format_bytes(MAX_BODY) in check_error(response.content)["message"]


@in_event_loop
async def test_a_body_without_a_length_is_bounded_as_it_comes(serve: Serve) -> None:
    async def parts(num_parts: int) -> AsyncIterator[bytes]:
        yield json.dumps(GREEDY).encode()
        for _ in range(num_parts):
            yield b" " * 100

    async with serve() as harness:
        small = await harness.client.post("/v1/completions", content=parts(10))
        assert small.status_code == 200
        assert "content-length" not in small.request.headers
        large = await harness.client.post("/v1/completions", content=parts(100))
        assert large.status_code == 413
        check_error(large.content)


@pytest.mark.parametrize("declared", [str(MAX_BODY + 1), "9" * 20, "9" * 5000])
@in_event_loop
async def test_a_body_that_says_it_is_too_large_is_not_read_at_all(
    serve: Serve, declared: str
) -> None:
    async with serve() as harness:
        caller = Caller(harness.app, b"", headers=[(b"content-length", declared.encode())])
        await caller.call()
        assert caller.status == 413
        check_error(caller.body)
        assert caller.num_received == 0


@pytest.mark.parametrize("declared", ["", "1", "-1", "abc", "0" * 30, "\u00b2", "1e9"])
@in_event_loop
async def test_a_wrong_content_length_bounds_nothing(serve: Serve, declared: str) -> None:
    async with serve() as harness:
        header = [(b"content-length", declared.encode("latin-1"))]
        fitting = Caller(harness.app, json.dumps(GREEDY).encode(), headers=header)
        await fitting.call()
        assert fitting.status == 200
        too_large = Caller(harness.app, b" " * (MAX_BODY + 1), headers=header)
        await too_large.call()
        assert too_large.status == 413


@pytest.mark.parametrize(
    ("changes", "bounds"),
    [
        ({"n": 4}, {"max_num_seqs": 1, "max_queued_seqs": 2}),
        ({"prompt": ["a", "b", "c", "d"]}, {"max_num_seqs": 1, "max_queued_seqs": 2}),
        ({"prompt": [[1] * 20] * 2}, {"max_num_seqs": 1, "max_queued_tokens": 39}),
    ],
)
@in_event_loop
async def test_a_full_router_says_when_to_come_back(
    serve: Serve, changes: dict[str, Any], bounds: dict[str, int]
) -> None:
    first_step, release = asyncio.Event(), asyncio.Event()

    async def gate(_batch: MicroBatch) -> None:
        first_step.set()
        await release.wait()

    async with serve(gate, **bounds) as harness:
        running = asyncio.create_task(harness.post(GREEDY))
        await first_step.wait()
        before = (
            harness.router.scheduler.num_running,
            harness.router.scheduler.num_waiting,
            harness.router.num_requests,
        )
        for stream in (False, True):
            response = await harness.post(GREEDY | changes | {"stream": stream})
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert (
                check_error(response.content, code="rate_limit_exceeded")["type"]
                == "rate_limit_error"
            )
        scheduler = harness.router.scheduler
        assert (scheduler.num_running, scheduler.num_waiting, harness.router.num_requests) == before
        waiting = asyncio.create_task(harness.post(GREEDY | {"prompt": [1] * 20}))
        release.set()
        assert (await running).status_code == (await waiting).status_code == 200
        await harness.becomes_idle()


# Failures


def _fails_at(step: int) -> Gate:
    async def gate(batch: MicroBatch) -> None:
        if batch.step_id >= step:
            raise PipelineError("stage 1 died")

    return gate


@pytest.mark.parametrize("stream", [False, True])
@in_event_loop
async def test_a_pipeline_that_fails_before_the_first_token_is_a_status(
    serve: Serve, stream: bool
) -> None:
    async with serve(_fails_at(0)) as harness:
        for _ in range(2):
            response = await harness.post(GREEDY | {"stream": stream})
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            error = check_error(response.content, code="unavailable")
            assert (error["type"], error["message"]) == ("server_error", "stage 1 died")


@in_event_loop
async def test_a_pipeline_that_fails_later_ends_a_plain_answer_as_a_status(serve: Serve) -> None:
    async with serve(_fails_at(3)) as harness:
        response = await harness.post(GREEDY)
        assert response.status_code == 503
        check_error(response.content, code="unavailable")


@in_event_loop
async def test_a_pipeline_that_fails_later_ends_a_stream_with_an_error(serve: Serve) -> None:
    async with serve(_fails_at(3)) as harness:
        response = await harness.post(GREEDY | {"stream": True})
        assert response.status_code == 200
        first, *_, last, nothing = response.text.split("\n\n")
        assert nothing == ""
        assert json.loads(first.removeprefix("data: "))["choices"][0]["finish_reason"] is None
        error = check_error(last.removeprefix("data: ").encode(), code="unavailable")
        assert error["message"] == "stage 1 died"
        assert "[DONE]" not in response.text


@in_event_loop
async def test_openais_own_client_raises_what_ends_a_stream(serve: Serve) -> None:
    async with serve(_fails_at(3)) as harness:
        client = _openai_client(harness)
        stream = await client.completions.create(
            model="tiny", prompt="a", max_tokens=8, stream=True
        )
        with pytest.raises(openai.APIError, match="stage 1 died"):
            async for _ in stream:
                pass


@in_event_loop
async def test_a_defect_is_a_status_without_its_insides(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(*_args: object) -> None:
        raise ZeroDivisionError("secret")

    async with serve() as harness:
        monkeypatch.setattr(harness.router, "generate", defect)
        transport = httpx.ASGITransport(harness.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://ingress") as client:
            response = await client.post("/v1/completions", json=GREEDY)
        assert response.status_code == 500
        assert check_error(response.content)["message"] == DEFECT


# Clients that leave


class Caller:
    """One call of the application by hand, so that the client can leave at any point.

    ``leaves_at`` counts messages to the client: 0 is the start of the response, 1 the first piece
    of its body.
    """

    def __init__(
        self,
        app: Starlette,
        body: bytes,
        leaves_at: int | None = None,
        spec_version: str = "2.3",
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        self._app, self._parts, self._leaves_at = app, [body], leaves_at
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec_version},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/completions",
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"ingress"), *(headers or [])],
            "server": ("ingress", 80),
        }
        self._raises_when_left = spec_version >= "2.4"
        self.left = asyncio.Event()
        self.sent: list[Message] = []
        self.num_received = 0

    async def call(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def _receive(self) -> Message:
        self.num_received += 1
        if self._parts:
            return {"type": "http.request", "body": self._parts.pop(), "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if len(self.sent) == self._leaves_at:
            self.left.set()
            if self._raises_when_left:
                raise OSError("the client has left")
            await asyncio.Event().wait()
        self.sent.append(message)


@dataclass
class HeldHarness:
    """A server whose pipeline stops after a few steps until ``release``, so that a request is
    surely unfinished.
    """

    harness: Harness
    release: asyncio.Event

    async def has_let_go(self) -> None:
        """No request needs tokens any more, and the few steps that were in flight are the last."""
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert self.harness.router.num_requests == 0
        num_steps = self.harness.router.scheduler.num_steps
        self.release.set()
        await self.harness.becomes_idle()
        assert self.harness.router.scheduler.num_steps == num_steps
        assert self.harness.server._config.pacer.num_streams == 0
        response = await self.harness.post(GREEDY)
        assert response.status_code == 200


@asynccontextmanager
async def _held(serve: Serve, after_step: int = 4) -> AsyncIterator[HeldHarness]:
    release = asyncio.Event()

    async def gate(batch: MicroBatch) -> None:
        if batch.step_id >= after_step:
            await release.wait()

    async with serve(gate) as harness:
        yield HeldHarness(harness, release)


@pytest.mark.parametrize("leaves_at", [0, 1, 2])
@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
@in_event_loop
async def test_a_client_that_leaves_a_stream_takes_its_work_along(
    serve: Serve, leaves_at: int, spec_version: str
) -> None:
    async with _held(serve) as held:
        caller = Caller(held.harness.app, json.dumps(LONG).encode(), leaves_at, spec_version)
        with suppress(Exception):
            await caller.call()
        assert caller.left.is_set()
        await held.has_let_go()


@pytest.mark.parametrize(
    "changes", [{}, {"stream": False}, {"n": 4}, {"prompt": ["a", "b"], "n": 8}]
)
@pytest.mark.parametrize("after_step", [0, 4])
@in_event_loop
async def test_a_call_that_is_cancelled_takes_its_work_along(
    serve: Serve, changes: dict[str, Any], after_step: int
) -> None:
    async with _held(serve, after_step) as held:
        caller = Caller(held.harness.app, json.dumps(LONG | changes).encode())
        calling = asyncio.create_task(caller.call())
        while held.harness.router.scheduler.num_steps <= after_step:
            await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await held.has_let_go()


@pytest.mark.parametrize("num_read", [1, 2])
@in_event_loop
async def test_a_response_that_is_closed_takes_its_work_along(serve: Serve, num_read: int) -> None:
    async with _held(serve) as held:
        caller = Caller(held.harness.app, json.dumps(LONG).encode())
        response = await held.harness.server.tokens.completions(
            Request(caller._scope, caller._receive)
        )
        assert isinstance(response, SseResponse)
        body = response.events
        async with aclosing(body):
            for _ in range(num_read):
                await anext(body)
        del body, response
        await held.has_let_go()


@in_event_loop
async def test_a_client_that_leaves_before_its_body_is_whole_leaves_nothing(serve: Serve) -> None:
    async with serve() as harness:
        caller = Caller(harness.app, b"")
        caller._parts.clear()
        caller.left.set()
        await caller.call()
        assert caller.status == 499
        assert harness.router.scheduler.num_steps == 0


@in_event_loop
async def test_those_who_stay_do_not_notice_who_leaves(serve: Serve) -> None:
    async with serve() as harness:
        alone = (await harness.post(LONG | {"stream": False})).json()["choices"][0]["text"]
        staying = [asyncio.create_task(harness.post(LONG | {"stream": False})) for _ in range(3)]
        leaving = [
            Caller(harness.app, json.dumps(LONG).encode(), leaves_at) for leaves_at in (0, 1, 2, 3)
        ]
        await asyncio.gather(*(caller.call() for caller in leaving))
        assert [
            response.json()["choices"][0]["text"] for response in await asyncio.gather(*staying)
        ] == [alone] * 3
        await harness.becomes_idle()


# Pace


@pytest.mark.parametrize(
    ("num_streams", "now", "waits"),
    [(1, 100.0, [0.002]), (64, 100.0, [0.128]), (64, 100.128, []), (0, 100.0, [])],
)
def test_streams_share_the_writes_evenly(
    monkeypatch: pytest.MonkeyPatch, num_streams: int, now: float, waits: list[float]
) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    async def scenario() -> None:
        pacer = Pacer(500)
        pacer.num_streams = num_streams
        with monkeypatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "time", lambda: now)
            patch.setattr(asyncio, "sleep", sleep)
            await pacer.wait_turn(100.0)

    asyncio.run(scenario())
    assert waited == pytest.approx(waits)


# Whatever comes


@pytest.mark.hypothesis
@pytest.mark.parametrize("kind", BODIES)
def test_whatever_is_sent_is_answered_or_refused_and_leaves_nothing(
    serve: Serve, kind: str
) -> None:
    async def send(harness: Harness, body: bytes) -> None:
        response = await harness.post(body)
        assert response.status_code in (200, 400, 404, 413, 429)
        if response.status_code != 200:
            check_error(response.content)
        elif response.headers["content-type"].startswith("text/event-stream"):
            assert all("error" not in event for event in _events(response))
        else:
            assert response.json()["choices"]
        await harness.becomes_idle()

    with asyncio.Runner() as runner:
        opening = serve()
        harness = runner.run(opening.__aenter__())

        @settings(derandomize=True, deadline=None, max_examples=examples(100))
        @given(body=BODIES[kind])
        def whatever(body: bytes) -> None:
            runner.run(send(harness, body))

        whatever()
        normal = runner.run(harness.post(GREEDY))
        assert (normal.status_code, normal.json()["usage"]["completion_tokens"]) == (200, 8)
        runner.run(opening.__aexit__(None, None, None))
