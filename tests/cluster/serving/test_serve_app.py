"""The whole application over HTTP: official clients, many clients, clients that leave, routers that
die.
"""

import asyncio
import json
import os
import random
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any

import fake_job_service as listed_jobs
import grpc
import httpx
import openai
import psutil
import pytest
import ray
from fake_job_service import JobsServicer, some_lines
from grpc_fuzz import REFUSALS, every_code
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from harness import random_ids
from http_fuzz import BODIES, check_error
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI, OpenAI
from ray import cloudpickle, serve
from ray.exceptions import RayError
from real_clients import run_autogen, run_guidellm
from serve_cluster import (
    GRPC,
    GRPC_PORT,
    PORT,
    URL,
    complete,
    content_length,
    deploy,
    events,
    exchange,
    ingress_stats,
    leftovers,
    num_proxy_calls,
    post_request,
    processes,
    router_stats,
    running_application,
    send_and_leave,
    stopped_stages,
    wait_until_idle,
    wait_until_ready,
)

from tramontane.client import AsyncClient, Client, Usage
from tramontane.cluster.cli.main import app
from tramontane.cluster.config.engine_config import DEMO_MODEL, EngineConfig
from tramontane.cluster.config.measurements import MeasuredLoad, read_load
from tramontane.cluster.console.server_client import ask_activity, last_seen
from tramontane.cluster.pipeline.engine import open_engine
from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster
from tramontane.cluster.planning.hardware import probe_cluster, probe_local
from tramontane.cluster.serving import preflight as serve_checks
from tramontane.cluster.serving.app import APPLICATION
from tramontane.cluster.serving.preflight import check_running_serve
from tramontane.proto import inference_pb2 as pb
from tramontane.proto.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineExceededError,
    ParameterError,
    RequestError,
    UnknownJobError,
    UnknownModelError,
)
from tramontane.proto.inference_pb2_grpc import InferenceStub
from tramontane.proto.jobs import JobOptions, JobState
from tramontane.proto.request import Request, SamplingParams
from tramontane.router.tokenization.backends import SentencePieceTokenizer

pytestmark = [
    pytest.mark.ray,
    pytest.mark.serve,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "stages": 2,
    "max_num_seqs": 32,
    "threads_per_stage": 1,
    "slow_client_timeout": 3.0,
}
TOKENIZER = SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model")
_TEXT = "ROMEO: speak, my lord; what news from Rome and the tribunes? KING good morrow, neighbour O"
WORDS = tuple(_TEXT.split())


@pytest.fixture(scope="module", autouse=True)
def _app() -> Iterator[None]:
    with local_ray_cluster(num_cpus=4), running_application(**SETTINGS):
        yield


def test_a_cluster_of_our_own_has_no_more_cores_than_the_machine() -> None:
    """However many CPUs Ray was promised, so that it places all stages."""
    assert ray.cluster_resources()["CPU"] == 4  # type: ignore[no-untyped-call]
    assert probe_cluster().node_cpus == probe_local().node_cpus


def test_without_a_dashboard_none_of_its_daemons_runs() -> None:
    """Ray's own ``include_dashboard=False`` starts all three, which takes a third of the start of a
    cluster.
    """
    commands: list[str] = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.ZombieProcess, psutil.NoSuchProcess):  # of a cluster before
            commands.append(" ".join(each.cmdline()))
    daemons = {
        name
        for command in commands
        for name in re.findall(r"(\w+)\.py|/(gcs_server|raylet)\b", command)
    }
    names = {"".join(each) for each in daemons}
    assert names >= {"gcs_server", "raylet", "agent"}
    assert names & {"dashboard", "monitor", "log_monitor"} == set()


def _prompt(rng: random.Random, most: int = 12) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))


def _local(prompts: list[tuple[int, ...]], sampling: SamplingParams) -> list[list[int]]:
    """The same engine in this process, without Ray."""

    async def run() -> list[list[int]]:
        async with open_engine(EngineConfig(local=True, dtype="float32", stages=1)) as engine:

            async def one(ids: tuple[int, ...]) -> list[int]:
                batches = [
                    batch async for batch in engine.router.generate(Request.of(ids, sampling))
                ]
                return [event.token_id for batch in batches for event in batch.events]

            return list(await asyncio.gather(*map(one, prompts)))

    return asyncio.run(run())


# ---- clients from the package index


def test_autogens_agents_talk_through_the_server() -> None:
    assert run_autogen(URL) == "5 ['user', 'poet', 'critic', 'poet', 'critic']"


@pytest.mark.nightly
def test_guidellm_measures_the_server_without_a_failed_request(tmp_path: Path) -> None:
    totals = run_guidellm(URL, tmp_path, "/v1/chat/completions", num_requests=6)
    assert totals == {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}


# ---- gRPC


def test_http_and_grpc_name_the_pipeline_as_one_in_one_process_does() -> None:
    """Of one stage: on one machine batch-invariant pipelines of any number of stages have the same
    fingerprint.
    """

    async def local() -> str:
        async with open_engine(EngineConfig(local=True, dtype="float32", stages=1)) as engine:
            assert [
                output
                async for output in engine.router.generate(
                    Request.of((1, 2), SamplingParams(max_tokens=1))
                )
            ]
            return engine.router.fingerprint

    answer = httpx.post(
        f"{URL}/v1/completions", json={"prompt": "ROMEO:", "max_tokens": 3}, timeout=60
    )
    named = answer.json()["system_fingerprint"]
    assert named == answer.headers["x-tramontane-fingerprint"]
    assert named.startswith("fp_")
    if shutil.which("cc"):
        assert named == asyncio.run(local())
    with grpc.insecure_channel(GRPC) as channel:
        stub, metadata = (
            InferenceStub(channel),
            (("application", APPLICATION), ("request_id", "mine")),
        )
        generating = stub.Generate(
            pb.GenerateRequest(text="ROMEO:", max_tokens=3), metadata=metadata
        )
        assert list(generating)
        _, scoring = stub.Score.with_call(pb.ScoreRequest(text="ROMEO:"), metadata=metadata)
        for call in (generating, scoring):
            trailers = [
                (key, value)
                for key, value in call.trailing_metadata()
                if key in ("request_id", "x-tramontane-fingerprint")
            ]
            assert sorted(trailers) == [("request_id", "mine"), ("x-tramontane-fingerprint", named)]


def _as_over_http(usage: Usage) -> dict[str, Any]:
    """Return usage as JSON has it: details that are not known are left out."""
    return {name: value for name, value in asdict(usage).items() if value is not None}


def test_grpc_gives_the_tokens_that_http_gives() -> None:
    parameters: dict[str, Any] = {
        "max_tokens": 24,
        "temperature": 0.9,
        "seed": 5,
        "n": 2,
        "stop": ["zz"],
    }
    over_http = complete(prompt="ROMEO:", return_token_ids=True, **parameters)
    with Client(GRPC) as client:
        pieces = list(client.generate("ROMEO:", **parameters))
        assert [model.name for model in client.models()] == ["demo"]
    for choice in over_http["choices"]:
        own = [piece for piece in pieces if piece.index == choice["index"]]
        assert len(own) > 1, "it is streamed"
        assert [token for piece in own for token in piece.token_ids] == choice["token_ids"]
        assert "".join(piece.text for piece in own) == choice["text"]
        assert own[-1].finish_reason == choice["finish_reason"]
    assert pieces[-1].usage is not None
    assert _as_over_http(pieces[-1].usage) == over_http["usage"]
    assert pieces[-1].timings is not None
    assert asdict(pieces[-1].timings).keys() == over_http["timings"].keys()
    with grpc.insecure_channel(GRPC) as channel:
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert sorted(services) == [
            reflection.SERVICE_NAME,
            "tramontane.v1.BatchJobs",
            "tramontane.v1.Inference",
        ], "ours alone"
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/ray.serve.RayServeAPIService/ListApplications")(b"")
        assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert b"success" in channel.unary_unary("/ray.serve.RayServeAPIService/Healthz")(b"")


def test_grpc_scores_a_text_as_http_does() -> None:
    over_http = complete(prompt="What news?", echo=True, logprobs=2, max_tokens=0)
    reported = over_http["choices"][0]["logprobs"]
    with Client(GRPC) as client:
        score = client.score("What news?", logprobs=2)
    assert [token.token for token in score.tokens] == reported["tokens"]
    assert [token.logprob for token in score.tokens] == pytest.approx(
        reported["token_logprobs"], abs=1e-5
    )
    assert _as_over_http(score.usage) == over_http["usage"]


def test_grpc_clients_that_leave_or_are_late_give_their_places_back() -> None:
    async def run() -> None:
        async with AsyncClient(GRPC) as client:
            async with aclosing(
                client.generate("ROMEO:", max_tokens=2000, ignore_eos=True, n=8)
            ) as pieces:
                await anext(pieces)
            with pytest.raises(DeadlineExceededError):
                async for _ in client.generate(
                    "ROMEO:", max_tokens=2000, ignore_eos=True, n=8, timeout_s=1
                ):
                    pass

    before = sum(stats["steps"] for stats in wait_until_idle())
    asyncio.run(run())
    assert sum(stats["steps"] for stats in wait_until_idle()) < before + 2000, (
        "the last token was not waited for"
    )


def test_grpc_clients_that_leave_while_they_are_written_to_leave_no_call_in_the_proxy() -> None:
    """Of so many some do: the proxy is either about that, or waits for the next message."""

    async def leave(client: AsyncClient, num_pieces: int) -> None:
        async with aclosing(
            client.generate("ROMEO:", max_tokens=400, ignore_eos=True, n=4)
        ) as pieces:
            for _ in range(num_pieces):
                await anext(pieces)

    async def run() -> None:
        async with AsyncClient(GRPC) as client:
            for _ in range(10):
                await asyncio.gather(*(leave(client, num_pieces) for num_pieces in range(1, 9)))

    asyncio.run(run())
    wait_until_idle()
    assert num_proxy_calls() == 0


def test_grpc_refusals_keep_their_codes_and_hostile_messages_affect_no_other() -> None:
    before = processes()
    with Client(GRPC) as client:
        with pytest.raises(UnknownModelError, match="this server has 'demo'"):
            next(client.generate("O", model="other"))
        with pytest.raises(ParameterError, match="temperature is -1") as refused:
            next(client.generate("O", temperature=-1))
        assert refused.value.parameter == "temperature"
        with pytest.raises(UnknownJobError):
            list(client.watch_job("a"))
        with pytest.raises(RequestError):
            next(client.generate("x" * 4 * 2**20))

    async def codes() -> dict[grpc.StatusCode, int]:
        async with grpc.aio.insecure_channel(GRPC) as channel:
            return await every_code(channel)

    assert asyncio.run(codes()).keys() <= REFUSALS | {grpc.StatusCode.OK}
    wait_until_idle()
    assert processes() == before


def test_a_job_gets_the_answers_that_requests_get_and_is_the_same_over_http_and_grpc() -> None:
    bodies = [
        {"prompt": f"{word}:", "max_tokens": 12, "seed": 3, "temperature": 0.9}
        for word in WORDS[:8]
    ]
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    text = "\n".join(
        [
            *map(json.dumps, lines),
            "no JSON",
            json.dumps(lines[0] | {"custom_id": "late", "body": {"prompt": []}}),
        ]
    )
    with Client(GRPC) as client:
        job = client.submit_job(text.encode())
        assert (job.num_lines, job.num_invalid) == (10, 1)
        assert [seen.state for seen in client.watch_job(job.job_id)][-1] == JobState.COMPLETED
        results = list(client.results(job.job_id))
    assert [result.line for result in results] == list(range(1, 11))
    assert [result.is_error for result in results] == [False] * 8 + [True] * 2
    answers = [json.loads(result.body)["choices"][0]["text"] for result in results[:8]]
    assert answers == [complete(**body)["choices"][0]["text"] for body in bodies]
    over_http = httpx.get(f"{URL}/v1/batches/{job.job_id}", timeout=30).json()
    assert over_http["request_counts"] == {"total": 10, "completed": 8, "failed": 2}
    wait_until_idle()


def test_jobs_travel_through_ray_serve_and_the_key_is_required() -> None:
    """Next to the other application: metadata say for which a call is."""
    cloudpickle.register_pickle_by_value(listed_jobs)  # replicas do not find the modules of tests
    deployment = serve.deployment(JobsServicer).options(ray_actor_options={"num_cpus": 0})
    try:
        serve.run(deployment.bind(), name="jobs", route_prefix="/jobs")
        with (
            Client(GRPC, application="jobs") as unauthorized,
            pytest.raises(AuthenticationError, match="API key is missing or wrong"),
        ):
            unauthorized.list_jobs()
        with Client(GRPC, "wrong", application="jobs") as unauthorized:
            with pytest.raises(AuthenticationError):
                list(unauthorized.results("job-1"))
            with pytest.raises(AuthenticationError):
                unauthorized.submit_job(b"{}\n" * 10**6)
        with Client(GRPC, "right", application="jobs") as client:
            job = client.submit_job(b"{}\n" * 10**6, JobOptions(metadata={"owner": "me"}))
            assert (job.num_lines, job.options.metadata) == (10**6, {"owner": "me"})
            assert [seen.state for seen in client.watch_job(job.job_id)][-1] == JobState.COMPLETED
            assert list(client.results(job.job_id, 3)) == some_lines(2500)[3:]
            with pytest.raises(UnknownJobError):
                client.get_job("x")
            assert client.cancel(job.job_id).state == JobState.CANCELLED
        with Client(GRPC) as client:
            assert [model.name for model in client.models()] == ["demo"]
    finally:
        serve.delete("jobs")
        cloudpickle.unregister_pickle_by_value(listed_jobs)


def test_a_later_server_uses_the_ports_as_they_are_or_is_refused_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def config(**ports: int) -> EngineConfig:
        return EngineConfig.build(None, {"port": PORT, "grpc_port": GRPC_PORT} | ports)

    reported: list[str] = []
    assert check_running_serve(config(), reported.append)
    assert not check_running_serve(config(grpc_port=0), reported.append)
    with pytest.raises(ConfigError, match=f"give --grpc-port {GRPC_PORT}, or 0 for none"):
        check_running_serve(config(grpc_port=1234), reported.append)
    with pytest.raises(ConfigError, match=f"give --host 127.0.0.1 --port {PORT}"):
        check_running_serve(config(port=1234), reported.append)
    assert reported == []
    monkeypatch.setattr(serve_checks, "GRPC_FUNCTIONS", ("another.function",))
    assert not check_running_serve(config(grpc_port=1234), reported.append), (
        "Ray Serve was started without our gRPC"
    )
    assert [message.partition(",")[0] for message in reported] == ["gRPC is off"]


# ---- prefix caching


def _ask_in_turn(how: str, body: dict[str, Any]) -> tuple[str, int, int]:
    """Return the text of the answer to ``messages`` or a ``prompt``, the tokens of the prompt, and
    those that were cached.
    """
    if how == "gRPC":
        with Client(GRPC) as client:
            chunks = list(client.generate(**body))
        assert chunks[-1].usage is not None
        return (
            "".join(chunk.text for chunk in chunks),
            chunks[-1].usage.prompt_tokens,
            chunks[-1].usage.prompt_tokens_details.cached_tokens,
        )
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    if how == "streamed":
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
    response = httpx.post(f"{URL}{path}", json=body, timeout=120)
    assert response.status_code == 200, response.text
    parts = events(response.text) if how == "streamed" else [response.json()]
    choices = [choice for part in parts for choice in part["choices"]]
    texts = [
        (choice.get("delta") or choice.get("message") or {"content": choice.get("text")})["content"]
        for choice in choices
    ]
    return "".join(texts), *_numbers(parts[-1]["usage"])


def _numbers(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    ("how", "is_chat"),
    [("whole", True), ("streamed", True), ("whole", False), ("streamed", False), ("gRPC", False)],
)
def test_each_turn_finds_the_turns_before_it_cached(how: str, is_chat: bool) -> None:
    """The first is longer than the window. The same comes again, with ``return_experts`` by
    computing the whole prompt.

    The activity counts the tokens that usages name, but not where the whole prompt is computed:
    nothing was looked up.
    """
    wait_until_idle()
    rng = random.Random(f"{how} {is_chat}")
    with httpx.Client(base_url=URL, timeout=30) as client:
        before = ask_activity(client).pipelines[0]
        texts, num_before, numbers = [_prompt(rng) + " ".join(rng.choices(WORDS, k=60))], 0, []
        for turn in range(3):
            roles = ["user", "assistant"] * 3
            messages = [
                {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
            ]
            body = {"messages": messages} if is_chat else {"prompt": "\n".join(texts)}
            body |= {"max_tokens": 20, "temperature": 0.8, "seed": turn}
            text, num_prompt, num_cached = _ask_in_turn(how, body)
            again, *computed = _ask_in_turn(
                "whole", body if is_chat else body | {"return_experts": [0]}
            )
            assert (again, computed[0]) == (text, num_prompt)
            assert is_chat or computed[1] == 0
            assert num_cached >= num_before - 32 if turn else num_cached == 0, (
                "but for a page, and where texts are joined"
            )
            numbers += [(num_prompt, num_cached), *([computed] if is_chat else [])]
            num_before = num_prompt
            texts += [text, _prompt(rng)]
        wait_until_idle()
        after = ask_activity(client).pipelines[0]
    grown = (
        after.prefix_cache_queries - before.prefix_cache_queries,
        after.prefix_cache_hits - before.prefix_cache_hits,
    )
    assert grown == tuple(map(sum, zip(*numbers, strict=True)))
    assert grown[1] > 0
    assert 0 < after.pages_cached <= after.pages


def test_lines_of_a_job_find_their_system_prompt_cached() -> None:
    """One line of an earlier job computed it, so all lines of the next one find it, in whatever
    micro-batches they come.

    The first line has 106 tokens, 98 of them the prompt that all have, so the last 5 pages have all
    that the token at 96 sees (windows of 64), also if it is one chunk, of which only the last pages
    are kept.
    """
    rng = random.Random("a job")
    system = {"role": "system", "content": " ".join(rng.choices(WORDS, k=52))}
    bodies = [{"messages": [system, {"role": "user", "content": "0"}], "max_tokens": 1}]
    for number in range(1, 12):
        bodies.append(
            {
                "messages": [system, {"role": "user", "content": f"{number} {_prompt(rng)}"}],
                "max_tokens": 5,
            }
        )
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    (first,), others = _usages_of_job(lines[:1]), _usages_of_job(lines[1:])
    assert first == (106, 0)
    assert len(others) == 11
    assert all(num_prompt > num_cached >= 96 for num_prompt, num_cached in others), others
    wait_until_idle()


def _usages_of_job(lines: list[dict[str, Any]]) -> list[tuple[int, int]]:
    with Client(GRPC) as client:
        job = client.submit_job(
            "\n".join(map(json.dumps, lines)).encode(), JobOptions(endpoint="/v1/chat/completions")
        )
        assert [seen.state for seen in client.watch_job(job.job_id)][-1] == JobState.COMPLETED
        return [_numbers(json.loads(result.body)["usage"]) for result in client.results(job.job_id)]


# ---- official clients


def test_the_official_client_gets_what_generate_gives() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    prompts = [_prompt(random.Random(i)) for i in range(8)]
    expected = _local(
        [TOKENIZER.encode(p) for p in prompts],
        SamplingParams(max_tokens=24, temperature=0.9, seed=5),
    )
    together = client.completions.create(
        model="demo",
        prompt=prompts,
        max_tokens=24,
        temperature=0.9,
        seed=5,
        extra_body={"return_token_ids": True},
    )
    assert [choice.token_ids for choice in together.choices] == expected  # type: ignore[attr-defined]
    assert [choice.text for choice in together.choices] == [
        TOKENIZER.decode(tuple(ids)) for ids in expected
    ]
    assert {choice.finish_reason for choice in together.choices} == {"length"}
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(len(TOKENIZER.encode(p)) for p in prompts)
    assert together.usage.completion_tokens == 8 * 24


def test_every_form_of_prompt_and_every_parameter() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")

    def text(**more: Any) -> str:
        options: dict[str, Any] = {
            "model": "demo",
            "prompt": "ROMEO:",
            "max_tokens": 12,
            "temperature": 0.0,
        }
        return client.completions.create(**(options | more)).choices[0].text

    plain = text()
    assert text(prompt=list(TOKENIZER.encode("ROMEO:"))) == plain
    assert text(echo=True) == "ROMEO:" + plain
    assert text(echo=True, prompt=list(TOKENIZER.encode("ROMEO:"))).endswith("ROMEO:" + plain)
    assert text(temperature=5.0, extra_body={"top_k": 1}) == plain
    assert text(temperature=5.0, top_p=1e-9) == plain
    assert text(stop=[plain[3:6]]) == plain[: plain.index(plain[3:6])]
    assert (
        text(temperature=1.0, seed=3)
        == text(temperature=1.0, seed=3)
        != text(temperature=1.0, seed=4)
    )
    assert text(extra_body={"ignore_eos": True}) == plain
    several = client.completions.create(
        model="demo", prompt=["O", "ROMEO:"], n=3, max_tokens=8, temperature=1.0, seed=1
    )
    assert [choice.index for choice in several.choices] == list(range(6))
    assert len({choice.text for choice in several.choices}) == 6
    alone = client.completions.create(
        model="demo", prompt="ROMEO:", n=3, max_tokens=8, temperature=1.0, seed=1
    )
    assert [c.text for c in alone.choices] == [c.text for c in several.choices[3:]]
    assert client.models.list().data[0].id == "demo"


def test_the_asynchronous_client_streams() -> None:
    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="none") as client:
            stream = await client.completions.create(
                model="demo",
                prompt="ROMEO:",
                n=2,
                max_tokens=16,
                seed=2,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"return_token_ids": True},
            )
            texts, ids, reasons, usage = ["", ""], [[], []], [None, None], None
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                    ids[choice.index] += choice.token_ids  # type: ignore[attr-defined]
                    reasons[choice.index] = choice.finish_reason or reasons[choice.index]
                usage = chunk.usage or usage
            whole = await client.completions.create(
                model="demo", prompt="ROMEO:", n=2, max_tokens=16, seed=2
            )
            assert texts == [choice.text for choice in whole.choices]
            assert [len(each) for each in ids] == [16, 16]
            assert reasons == ["length", "length"]
            assert usage == whole.usage
            assert usage is not None
            assert (usage.prompt_tokens, usage.completion_tokens) == (3, 32)

    asyncio.run(run())


def test_the_synchronous_client_streams_up_to_a_stop_string() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    options: dict[str, Any] = {
        "model": "demo",
        "prompt": "ROMEO:",
        "max_tokens": 24,
        "temperature": 0.0,
    }
    plain = client.completions.create(**options).choices[0].text
    stop = plain[12:15]
    chunks = list(client.completions.create(**options, stop=stop, stream=True))
    assert (
        "".join(choice.text for chunk in chunks for choice in chunk.choices)
        == plain[: plain.index(stop)]
    )
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_mistakes_arrive_as_the_clients_own_errors() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="this server has 'demo'"):
        client.completions.create(model="gpt-4", prompt="O")
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        client.completions.create(model="demo", prompt="O", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="2048 tokens > 2047 maximum"):
        client.completions.create(model="demo", prompt=[5] * 2048)
    with pytest.raises(openai.BadRequestError, match="the model's vocabulary has the ids 0 to 999"):
        client.completions.create(model="demo", prompt=[10**6])
    with pytest.raises(openai.NotFoundError, match="is not here"):
        client.embeddings.create(model="demo", input="O")


def test_the_experts_load_grows_by_what_is_requested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every token is given to two experts of each of the eight layers."""

    def reported() -> MeasuredLoad:
        return MeasuredLoad.from_data(httpx.get(f"{URL}/experts", timeout=30).json())

    wait_until_idle()
    before = reported()
    usage = complete(prompt="ROMEO:", max_tokens=20, ignore_eos=True)["usage"]
    wait_until_idle()
    after = reported()
    assert before.num_pipelines == after.num_pipelines == 1
    assert len(after.tokens) == 8
    grown = [sum(new) - sum(old) for new, old in zip(after.tokens, before.tokens, strict=True)]
    assert grown == [2 * (usage["total_tokens"] - 1)] * 8, "the last token is not computed with"
    app(["experts", "--json", "--url", f"{URL}/v1"], standalone_mode=False)
    (tmp_path / "load.json").write_text(capsys.readouterr().out)
    assert read_load(tmp_path / "load.json") == after.tokens
    app(["experts", "--url", URL], standalone_mode=False)
    assert "since loading, 1 pipeline:" in capsys.readouterr().out


def test_the_activity_is_what_was_requested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every micro-batch passes both stages; the trace is of what runs while it is taken."""
    wait_until_idle()
    with httpx.Client(base_url=URL, timeout=30) as client:
        before = ask_activity(client)
        usage = complete(prompt="ROMEO:", max_tokens=20, ignore_eos=True)["usage"]
        wait_until_idle()
        (reported,) = ask_activity(client, last_seen(before)).pipelines
    assert sum(batch.prefill_tokens for batch in reported.micro_batches) == usage["prompt_tokens"]
    assert sum(batch.decodes for batch in reported.micro_batches) == 19, (
        "the first token is the prompt's"
    )
    for batch in reported.micro_batches:
        assert [stage for stage, *_ in batch.stages] == [0, 1]
        assert all(0 < busy_s <= elapsed_s for _, _, busy_s, elapsed_s in batch.stages)
    assert (reported.running, reported.waiting, reported.pages_held) == (0, 0, 0)
    assert reported.first_token_s is not None
    app(["top", "--once", "--url", URL], standalone_mode=False)
    assert "Stage 2/2 layers 4-7" in capsys.readouterr().out
    is_over = Event()
    with ThreadPoolExecutor(1) as pool:
        request_task = pool.submit(
            lambda: [complete(prompt="ROMEO:", max_tokens=5) for _ in iter(is_over.is_set, True)]
        )
        app(
            ["trace", "-o", str(tmp_path / "trace.json"), "--seconds", "1", "--url", URL],
            standalone_mode=False,
        )
        is_over.set()
        request_task.result()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0, 1000}


def test_streamed_equals_unstreamed_for_random_requests() -> None:
    rng = random.Random(11)

    async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        plain = (await client.post("/v1/completions", json=body)).json()
        stream = (await client.post("/v1/completions", json=body | {"stream": True})).text
        texts, reasons = {}, {}
        for event in events(stream):
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                reasons[choice["index"]] = choice["finish_reason"]
        assert texts == {c["index"]: c["text"] for c in plain["choices"]}, body
        assert reasons == {c["index"]: c["finish_reason"] for c in plain["choices"]}, body

    def body() -> dict[str, Any]:
        drawn = {
            "prompt": _prompt(rng),
            "max_tokens": rng.randint(1, 20),
            "temperature": rng.choice([0, 0.7, 1.3]),
            "seed": rng.randrange(1000),
            "n": rng.choice([1, 1, 1, 2]),
            "echo": rng.random() < 0.2,
        }
        return drawn | (
            {"stop": rng.choice(["e", " the", ["\n", "r,"]])} if rng.random() < 0.4 else {}
        )

    async def run() -> None:
        async with httpx.AsyncClient(base_url=URL, timeout=240) as client:
            waiting = [body() for _ in range(100)]

            async def worker() -> None:
                while waiting:
                    await one(client, waiting.pop())

            await asyncio.gather(*(worker() for _ in range(16)))

    asyncio.run(run())
    wait_until_idle()


# ---- many clients, and clients that leave


async def _leave_early(client: httpx.AsyncClient, rng: random.Random) -> bool:
    """One request that is perhaps given up at a random moment; True if it was."""
    body = {
        "prompt": _prompt(rng, 40),
        "max_tokens": rng.randint(1, 40),
        "seed": 1,
        "n": rng.choice([1, 1, 2]),
    }
    body["stream"] = rng.random() < 0.6
    call = asyncio.create_task(client.post("/v1/completions", json=body))
    leaves = rng.random() < 0.5
    done, _ = await asyncio.wait([call], timeout=rng.random() * 2 if leaves else None)
    if not done:
        call.cancel()
        await asyncio.wait([call])
        return True
    assert call.result().status_code == 200, call.result().text
    return False


def _storm(num_requests: int, seed: int) -> int:
    """Requests from 64 clients; returns how many were given up."""
    rng = random.Random(seed)

    async def run() -> int:
        waiting, left = list(range(num_requests)), 0
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=URL, timeout=240, limits=limits) as client:

            async def worker() -> None:
                nonlocal left
                while waiting:
                    waiting.pop()
                    gave_up = await _leave_early(client, rng)
                    left += gave_up

            await asyncio.gather(*(worker() for _ in range(64)))
        return left

    return asyncio.run(run())


@pytest.mark.timeout(900)
def test_requests_with_random_cancels_leave_nothing_behind() -> None:
    _storm(100, seed=1)
    (before,), ingress_before = wait_until_idle(), ingress_stats()
    memory_before = _memory(before, ingress_before)
    assert _storm(250, seed=2) > 50, "many must have left"
    (after,), ingress_after = wait_until_idle(), ingress_stats()
    assert after["steps"] > before["steps"]
    assert after["tasks"] <= before["tasks"] + 3
    assert ingress_after["tasks"] <= ingress_before["tasks"] + 3
    for name, num_bytes in _memory(after, ingress_after).items():
        assert num_bytes < memory_before[name] + 24 * 2**20, (
            f"memory of {name} is flat after the first storm"
        )


def _memory(router: dict[str, Any], ingress: dict[str, Any]) -> dict[str, int]:
    """Bytes of every process that works on requests; pages of the stages' caches, which are small,
    stay once they are used.
    """
    stages = {
        stage["label"]: psutil.Process(stage["pid"]).memory_info().rss for stage in router["stages"]
    }
    return {"the router": router["rss"], "the ingress": ingress["rss"], **stages}


def test_a_client_that_leaves_frees_its_slot_while_the_rest_continues() -> None:
    """Whether it was streaming, waiting for all of its answer, or waiting for a place."""
    (before,) = wait_until_idle()

    async def leave(body: dict[str, Any], running: int, waiting: int) -> None:
        async with httpx.AsyncClient(base_url=URL, timeout=240) as client:
            call = asyncio.create_task(
                client.post(
                    "/v1/completions", json={"max_tokens": 2000, "ignore_eos": True, **body}
                )
            )
            while True:
                stats = (await asyncio.to_thread(router_stats))[0]
                if (stats["sequences"], stats["waiting"]) == (running, waiting):
                    break
                await asyncio.sleep(0.05)
            call.cancel()
            await asyncio.wait([call])

    asyncio.run(leave({"prompt": "ROMEO:", "stream": True}, 1, 0))
    wait_until_idle()
    asyncio.run(leave({"prompt": "ROMEO:"}, 1, 0))
    wait_until_idle()
    asyncio.run(leave({"prompt": ["ROMEO:"] * 40, "stream": True}, 32, 8))
    (after,) = wait_until_idle()
    assert after["steps"] - before["steps"] < 1000, "none of them ran to its end"


async def _until_no_step_comes_back() -> None:
    """Stages that were stopped may have sent results before: then the next steps are in flight."""
    earlier = -1
    while (steps := (await asyncio.to_thread(router_stats, stages=False))[0]["steps"]) != earlier:
        earlier = steps
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("stream", [True, False])
def test_once_a_router_knows_that_a_client_has_left_it_makes_no_step_for_it(stream: bool) -> None:
    """Stages that stand still during the test make it exact: what is in flight comes back, and then
    nothing more happens.
    """
    before = wait_until_idle()

    async def leave() -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=URL, timeout=240) as client:
            body = {
                "prompt": ["ROMEO:"] * 8,
                "max_tokens": 2000,
                "ignore_eos": True,
                "stream": stream,
            }
            call = asyncio.create_task(client.post("/v1/completions", json=body))
            while (await asyncio.to_thread(router_stats))[0]["steps"] < before[0]["steps"] + 20:
                pass
            with stopped_stages(before):
                await _until_no_step_comes_back()
                call.cancel()
                await asyncio.wait([call])
                while (stats := (await asyncio.to_thread(router_stats, stages=False))[0])[
                    "requests"
                ]:
                    await asyncio.sleep(0.05)
                return stats

    held = asyncio.run(leave())
    assert held["sequences"] > 0
    assert held["pages_held"] > 0, "what is in flight may touch them"
    assert wait_until_idle()[0]["steps"] == held["steps"]


# ---- too much at once


def test_a_request_of_too_many_sequences_is_refused_for_good() -> None:
    response = httpx.post(f"{URL}/v1/completions", json={"prompt": ["O"] * 300, "n": 1}, timeout=60)
    assert response.status_code == 400
    assert "at most 288" in response.json()["error"]["message"]


def test_when_too_many_wait_the_next_is_refused_with_a_time_to_retry() -> None:
    async def run() -> None:
        async with httpx.AsyncClient(base_url=URL, timeout=240) as client:
            long = {"prompt": ["O"] * 250, "max_tokens": 1900, "stream": True, "ignore_eos": True}
            full = asyncio.create_task(client.post("/v1/completions", json=long))
            while (await asyncio.to_thread(router_stats))[0]["waiting"] < 200:
                await asyncio.sleep(0.05)
            refused = await client.post("/v1/completions", json={"prompt": ["O"] * 60})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
            full.cancel()
            await asyncio.wait([full])

    asyncio.run(run())
    wait_until_idle()


@contextmanager
def _unread(body: bytes) -> Iterator[socket.socket]:
    """A connection with small buffers, on which a request was sent and nothing is read."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", PORT))
        connection.sendall(post_request(body, content_length(body)))
        yield connection


def _received_before_it_was_cut(connection: socket.socket) -> int:
    received = 0
    try:
        while part := connection.recv(2**16):
            received += len(part)
    except ConnectionResetError:
        return received
    raise AssertionError("it ended as others do")


def test_a_client_that_does_not_read_is_dropped_and_its_connection_cut() -> None:
    """Of some 30 MB that it has requested; the socket's buffers take a few."""
    request_body = {
        "prompt": "O",
        "n": 12,
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 20,
    }
    with _unread(json.dumps(request_body).encode()) as connection:
        while ingress_stats()["requests"] == 0:
            time.sleep(0.05)
        while (stats := ingress_stats())["requests"]:
            time.sleep(0.2)
        assert wait_until_idle()[0]["preempted"] == 0
        port = connection.getsockname()[1]
        while any(
            c.laddr.port == PORT and c.raddr and c.raddr.port == port
            for c in psutil.net_connections("tcp")
        ):
            time.sleep(0.2)
        assert _received_before_it_was_cut(connection) < 2**24
    assert stats["pid"] == ingress_stats()["pid"]


# ---- whatever comes


@contextmanager
def _server_unharmed() -> Iterator[None]:
    """Afterwards nothing is held, every process is the one that it was, and answers."""
    wait_until_idle()
    before = processes()
    yield
    wait_until_idle()
    assert processes() == before
    assert complete(prompt="ROMEO:", max_tokens=3)["usage"]["completion_tokens"] == 3


REQUEST_BODY = b'{"prompt": "ROMEO:", "max_tokens": 3, "temperature": 0}'
ENDLESS = b'{"prompt": "ROMEO:", "max_tokens": 2000, "ignore_eos": true, "stream": true}'
TEN_MB = b'{"prompt": "' + b"la " * (10**7 // 3) + b'"}'
REFUSED_BODIES = {
    b"": "the body is not JSON: it ends too early (column ",
    b"null": "the body must be a JSON object",
    b"[1, 2]": "the body must be a JSON object",
    b"{}": "prompt is missing",
    b'{"prompt": {"text": "O"}}': "prompt: it must be a text",
    b'{"prompt": []}': "it is an empty list; it must have",
    b'{"prompt": ["O", 5]}': "a list must hold either",
    b'{"prompt": [1.5]}': "a list must hold either",
    b'{"prompt": [true]}': "a list must hold either",
    b'{"prompt": [-1]}': "token ids are whole numbers from 0",
    b'{"prompt": [1%s]}' % (b"0" * 400): "token ids are whole numbers from 0",
    b'{"prompt": [100000]}': "the model's vocabulary has the ids 0 to 999",
    b'{"prompt": %s}'
    % json.dumps([[1]] * 100_000).encode(): "the body has more than 32768 lists and objects",
    b'{"prompt": "O", "max_tokens": "5"}': "max_tokens is '5'; it must be a whole number",
    b'{"prompt": "O", "max_tokens": true}': "max_tokens is true; it must be a whole number",
    b'{"prompt": "O", "max_tokens": 0}': (
        "max_tokens is 0: without echo: true there would be no answer"
    ),
    b'{"prompt": "O", "max_tokens": 1%s}' % (b"0" * 99): "max_tokens is 1000",
    b'{"prompt": "O", "max_tokens": 1%s}'
    % (b"0" * 9999): "the body is not JSON: a number has too many digits",
    b'{"prompt": "O", "max_tokens": 1e400}': "max_tokens is inf",
    b'{"prompt": "O", "temperature": NaN}': "temperature is nan; it must be a finite number",
    b'{"prompt": "O", "temperature": Infinity}': "temperature is inf; it must be a finite number",
    b'{"prompt": "O", "temperature": -Infinity}': "temperature is -inf",
    b'{"prompt": "O", "temperature": -0.1}': "temperature is -0.1",
    b'{"prompt": "O", "top_p": 1e999}': "top_p is inf",
    b'{"prompt": "O", "seed": 1.5}': "seed is 1.5; it must be a whole number",
    b'{"prompt": "O", "stop": [1]}': "stop: it must be a text or a list of texts",
    b'{"prompt": "O", "stream": "yes"}': "stream is 'yes'; it must be true or false",
    b'{"prompt": "O", "strea\\u0000m": 1}': "strea?m is not a parameter of this endpoint",
    b'{"prompt": "O", "prompt": 5}': "prompt: it must be a text",
    b'{"prompt": "\\ud800"}': (
        "the body is not JSON: an escape \\u is cut off, or half of a surrogate pair"
    ),
    b'{"prompt": "\xff\xfe"}': "the body is not valid UTF-8 (byte 12)",
    b"\xef\xbb\xbf" + REQUEST_BODY: "the body is not JSON: a request begins with { (column 1)",
    REQUEST_BODY.decode().encode("utf-16"): "the body is UTF-16, which JSON over HTTP is not",
    REQUEST_BODY + b"x": "the body is not JSON: there is more after its end (column 56)",
    REQUEST_BODY[:-1]: "the body is not JSON: it ends too early (column ",
    b'{"prompt": ' + b"[" * 10**6: "the body has more than 32768 lists and objects",
    b'{"prompt": ' + b"[" * 30_000: "the body is not JSON: it is nested too deeply",
    b'{"prompt": '
    + b"[" * 30_000
    + b"]" * 30_000
    + b"}": "the body is not JSON: it is nested too deeply",
    b'{"prompt": "' + b"la " * 2**20 + b'"}': "tokens > 2047 maximum",
    TEN_MB: "the body is larger than 8 MiB; send less at once",
}


def test_a_body_that_makes_no_sense_is_refused_with_what_is_wrong() -> None:
    with _server_unharmed(), httpx.Client(base_url=URL, timeout=240) as client:
        for body, message in REFUSED_BODIES.items():
            response = client.post("/v1/completions", content=body)
            assert response.status_code == (413 if body is TEN_MB else 400), message
            assert message in check_error(response.content)["message"]


def test_random_bodies_are_answered_or_refused() -> None:
    """As in the tests of the API server, through Ray Serve and many at a time."""

    async def send(bodies: list[bytes]) -> None:
        async with httpx.AsyncClient(base_url=URL, timeout=240) as client:
            for response in await asyncio.gather(
                *(client.post("/v1/completions", content=body) for body in bodies)
            ):
                assert response.status_code in (200, 400, 404, 413, 429)
                if response.status_code != 200:
                    check_error(response.content)

    @settings(derandomize=True, deadline=None, max_examples=3)
    @given(bodies=st.lists(st.one_of(*BODIES.values()), min_size=32, max_size=32))
    def whatever(bodies: list[bytes]) -> None:
        asyncio.run(send(bodies))

    with _server_unharmed():
        whatever()


def _chunk(part: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(part), part)


CHUNKED = b"Transfer-Encoding: chunked"
NOT_HERE, DOES_NOT_TAKE = "is not here; there are /v1/chat/completions, ", "does not take"
FRAMED = {
    "in chunks": (
        post_request(_chunk(REQUEST_BODY[:9]) + _chunk(REQUEST_BODY[9:]) + _chunk(b""), CHUNKED),
        200,
        "",
    ),
    "of an older HTTP": (
        post_request(
            REQUEST_BODY, content_length(REQUEST_BODY), line=b"POST /v1/completions HTTP/1.0"
        ),
        200,
        "",
    ),
    "with two hosts": (
        post_request(REQUEST_BODY, content_length(REQUEST_BODY), b"Host: another"),
        200,
        "",
    ),
    "with a strange content type": (
        post_request(REQUEST_BODY, content_length(REQUEST_BODY), b"Content-Type: \xff/xml"),
        200,
        "",
    ),
    "with a strange encoding": (
        post_request(REQUEST_BODY, content_length(REQUEST_BODY), b"Content-Encoding: gzip"),
        200,
        "",
    ),
    "with many headers": (
        post_request(
            REQUEST_BODY, content_length(REQUEST_BODY), *(b"X-%d: x" % i for i in range(1000))
        ),
        200,
        "",
    ),
    "with a huge header": (
        post_request(REQUEST_BODY, content_length(REQUEST_BODY), b"X: " + b"x" * 60_000),
        200,
        "",
    ),
    "that expects a 100 response": (
        post_request(REQUEST_BODY, content_length(REQUEST_BODY), b"Expect: 100-continue"),
        200,
        "",
    ),
    "with wrong keys": (
        post_request(
            REQUEST_BODY,
            content_length(REQUEST_BODY),
            b"Authorization: \xff",
            b"Cookie: \xff",
            b"Accept: \xff",
        ),
        200,
        "",
    ),
    "without a length": (
        post_request(b""),
        400,
        "the body is not JSON: it ends too early (column ",
    ),
    "longer than it says": (
        post_request(REQUEST_BODY, content_length(REQUEST_BODY[:10]), b"Connection: close"),
        400,
        "the body is not JSON: it ends too early (column ",
    ),
    "that says it is too large": (
        post_request(b"", b"Content-Length: 10000000"),
        413,
        "the body is larger than 8 MiB",
    ),
    "that says it is endless": (
        post_request(b"", b"Content-Length: %d" % 2**63),
        413,
        "the body is larger than 8 MiB",
    ),
    "too large in chunks": (
        post_request(_chunk(b" " * 2**20) * 9 + _chunk(b""), CHUNKED),
        413,
        "the body is larger than 8 MiB",
    ),
    "by GET": (
        post_request(
            REQUEST_BODY, content_length(REQUEST_BODY), line=b"GET /v1/completions HTTP/1.1"
        ),
        405,
        DOES_NOT_TAKE,
    ),
    "by DELETE": (
        post_request(
            REQUEST_BODY, content_length(REQUEST_BODY), line=b"DELETE /v1/completions HTTP/1.1"
        ),
        405,
        DOES_NOT_TAKE,
    ),
    "by PROPFIND": (post_request(b"", line=b"PROPFIND /v1/models HTTP/1.1"), 405, DOES_NOT_TAKE),
    "by CONNECT": (post_request(b"", line=b"CONNECT /v1/completions HTTP/1.1"), 405, DOES_NOT_TAKE),
    "for nothing": (post_request(b"", line=b"GET /nothing HTTP/1.1"), 404, NOT_HERE),
    "for embeddings": (
        post_request(
            REQUEST_BODY, content_length(REQUEST_BODY), line=b"POST /v1/embeddings HTTP/1.1"
        ),
        404,
        NOT_HERE,
    ),
    "for a path with dots": (
        post_request(
            REQUEST_BODY, content_length(REQUEST_BODY), line=b"POST /v1/../v1/completions HTTP/1.1"
        ),
        404,
        NOT_HERE,
    ),
    "for no character": (post_request(b"", line=b"GET /%ff%00%0d%0a HTTP/1.1"), 404, NOT_HERE),
    "for a long path": (
        post_request(b"", line=b"GET /" + b"x" * 60_000 + b" HTTP/1.1"),
        404,
        NOT_HERE,
    ),
    "to a strange host": (b"GET /nothing HTTP/1.1\r\nHost: [\xff\r\n\r\n", 404, NOT_HERE),
}


@pytest.mark.parametrize("how", FRAMED)
def test_a_request(how: str) -> None:
    request, wanted, message = FRAMED[how]
    with _server_unharmed():
        status, body = exchange(request)
        assert status == wanted
        assert status == 200 or message in check_error(body)["message"]


@pytest.mark.parametrize(
    "name",
    [b"X-Request-Id", b"X-Session-Id", b"serve_multiplexed_model_id", b"X-Request-Timeout-Seconds"],
)
def test_headers_that_ray_serve_reads_may_hold_anything(name: bytes) -> None:
    with _server_unharmed():
        assert exchange(post_request(REQUEST_BODY, content_length(REQUEST_BODY), name + b": \xff"))[
            0
        ] in (200, 400)


@pytest.mark.parametrize(
    "header", [b"X-Request-Timeout-Seconds: 0.001", b"X-Request-Disconnect-Disabled: ?1"]
)
def test_a_client_cannot_give_ray_serve_orders(header: bytes) -> None:
    with _server_unharmed():
        assert exchange(post_request(REQUEST_BODY, content_length(REQUEST_BODY), header))[0] == 200


NOT_HTTP = (
    b"\r\n\r\nnothing at all\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + b"\xaa" * 40,  # TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    post_request(REQUEST_BODY, b"Content-Length: -5"),
    post_request(REQUEST_BODY, b"Content-Length: abc"),
    post_request(REQUEST_BODY, b"Content-Length: " + b"9" * 30),
    post_request(REQUEST_BODY, content_length(REQUEST_BODY), b"Content-Length: 5"),
    post_request(_chunk(REQUEST_BODY), CHUNKED, b"Content-Length: 5"),
    post_request(b"zz\r\n" + REQUEST_BODY, CHUNKED),
    post_request(b"-5\r\n" + REQUEST_BODY, CHUNKED),
    post_request(b"f" * 17 + b"\r\n" + REQUEST_BODY, CHUNKED),
    post_request(REQUEST_BODY, b"Transfer-Encoding: gzip"),
    post_request(REQUEST_BODY, content_length(REQUEST_BODY), b"no colon"),
    post_request(REQUEST_BODY, content_length(REQUEST_BODY), b"X: \x00"),
    post_request(b"", line=b"GIVE /v1/models HTTP/1.1"),
    post_request(b"", line=b"GET /\xff HTTP/1.1"),
    post_request(b"", line=b"GET /v1/models?" + b"x" * 70_000 + b" HTTP/1.1"),
)


def test_what_is_not_http_does_not_get_past_ray_serves_proxy() -> None:
    """The proxy's own refusal, in plain text: there is no request yet that could be answered in
    OpenAI's words.
    """
    with _server_unharmed():
        for request in NOT_HTTP:
            assert exchange(request) == (400, b"Invalid HTTP request received.")


@pytest.mark.parametrize("abruptly", [False, True])
def test_clients_that_leave_in_the_middle_of_a_request_leave_nothing(abruptly: bool) -> None:
    whole = post_request(ENDLESS, content_length(ENDLESS))
    chunked = post_request(_chunk(ENDLESS), CHUNKED)  # without the end
    start = whole.index(ENDLESS)
    with _server_unharmed():
        steps = router_stats()[0]["steps"]
        for cut in (0, 1, 9, 30, start - 1, start, start + 1, start + 40, len(whole) - 1):
            send_and_leave(whole[:cut], abruptly=abruptly)
        for cut in (start + 3, len(chunked) - 2, len(chunked)):
            send_and_leave(chunked[:cut], abruptly=abruptly)
        assert wait_until_idle()[0]["steps"] == steps, "nothing of them was ever run"
        for having_read in (0, 1, 500):  # bytes: nothing, the first, some tokens
            send_and_leave(whole, abruptly=abruptly, having_read=having_read)
        assert wait_until_idle()[0]["steps"] - steps < 1000, "none of them ran to its end"


# ---- a router that dies


def test_a_killed_router_adopts_its_pipeline_and_reads_no_weights_and_streams_continue() -> None:
    (before,) = wait_until_idle()
    _check_undisturbed_by(lambda: os.kill(before["pid"], signal.SIGKILL))
    while True:
        try:
            (after,) = router_stats()
            if after["pid"] != before["pid"]:
                break
        except Exception:
            pass
        time.sleep(0.1)
    wait_until_ready()
    assert after["pipeline"] == before["pipeline"]
    assert after["epoch"] > before["epoch"]
    for old, new in zip(before["stages"], after["stages"], strict=True):
        assert (new["pid"], new["bytes_read"]) == (
            old["pid"],
            old["bytes_read"],
        ), "the same process, which has read nothing more"
        assert new["holder"] != old["holder"]
    sizes = [health["bytes_read"] for health in after["stages"]]
    assert sum(sizes) == (DEMO_MODEL / "model.safetensors").stat().st_size - _header_bytes()
    assert complete(prompt="ROMEO:", max_tokens=5)["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)]
)
def test_streams_of_a_stage_that_dies_or_stands_still_only_wait(how: signal.Signals) -> None:
    (before,) = wait_until_idle()
    _check_undisturbed_by(lambda: os.kill(before["stages"][1]["pid"], how))
    (after,) = wait_until_idle()
    assert (after["pid"], after["stages"][0]["pid"]) == (before["pid"], before["stages"][0]["pid"])
    assert after["stages"][1]["pid"] != before["stages"][1]["pid"]


def _check_undisturbed_by(fault: Callable[[], None]) -> None:
    """While streams and plain requests are on their way; each gets what it gets without."""
    bodies = [
        {
            "prompt": f"Scene {n}.",
            "max_tokens": 150,
            "seed": n,
            "temperature": n % 2,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for n in range(12)
    ]

    async def one(
        client: httpx.AsyncClient, body: dict[str, Any], began: asyncio.Semaphore
    ) -> list[int]:
        if body["seed"] % 3 == 0:
            answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
            return list(answer["choices"][0]["token_ids"])
        got: list[int] = []
        async with client.stream(
            "POST", "/v1/completions", json=body | {"stream": True}
        ) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    got += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
                    began.release()
        return got

    async def all_of_them(fault: Callable[[], None] | None) -> list[list[int]]:
        began = asyncio.Semaphore(0)
        async with httpx.AsyncClient(base_url=URL, timeout=240) as client:
            tasks = [asyncio.create_task(one(client, body, began)) for body in bodies]
            if fault is not None:
                for _ in range(40):  # pieces of streams
                    await began.acquire()
                assert not any(task.done() for task in tasks)
                fault()
            return await asyncio.gather(*tasks)

    calm = asyncio.run(all_of_them(None))
    assert [len(tokens) for tokens in calm] == [150] * 12
    assert asyncio.run(all_of_them(fault)) == calm


def _header_bytes() -> int:
    """Of a safetensors file: eight bytes of length, and the header itself."""
    with (DEMO_MODEL / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_an_idle_stage_that_dies_is_fenced_anew_without_a_request() -> None:
    (before,) = wait_until_idle()
    os.kill(before["stages"][1]["pid"], signal.SIGKILL)
    while True:
        try:
            (after,) = router_stats()
            if (
                after["epoch"] > before["epoch"]
                and httpx.get(f"{URL}/health", timeout=60).status_code == 200
            ):
                break
        except RayError:
            pass
        httpx.get(f"{URL}/health", timeout=60)  # the health check is what notices
        time.sleep(0.1)
    assert after["stages"][0]["pid"] == before["stages"][0]["pid"]
    assert complete(prompt="ROMEO:", max_tokens=5)["usage"]["completion_tokens"] == 5


# ---- other ways to start and stop


def test_deleting_the_application_removes_every_pipeline() -> None:
    serve.delete(APPLICATION)
    while leftovers():
        time.sleep(0.1)
    assert ray.is_initialized()


@pytest.mark.nightly
def test_a_serve_config_scales_whole_pipelines_up_and_down() -> None:
    """What ``serve deploy`` sends to the controller: the code and its arguments stay,
    ``num_replicas`` changes.
    """
    _redeploy(1)
    # the replicas of another version have ended
    while serve.status().applications[APPLICATION].status != "RUNNING":
        time.sleep(0.1)
    wait_until_ready()
    (first,) = router_stats()
    _redeploy(2)
    while len(stats := _stats_once_they_settle()) != 2:
        time.sleep(0.1)
    assert len({s["pipeline"] for s in stats}) == 2
    assert first["pid"] in {s["pid"] for s in stats}, "the one that was there continues"

    async def run() -> None:
        async with httpx.AsyncClient(base_url=URL, timeout=240) as client:
            bodies = [
                {"prompt": random_ids(20, i, 200), "max_tokens": 30, "ignore_eos": True}
                for i in range(24)
            ]
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json=body) for body in bodies)
            )
            assert {answer.status_code for answer in answers} == {200}

    before = {s["pid"]: s["steps"] for s in stats}
    asyncio.run(run())
    assert all(s["steps"] > before[s["pid"]] for s in router_stats()), "both have worked"
    asyncio.run(_chats_stay_with_their_pipelines())
    _scale_down_under_load()
    while len(leftovers()) > 4:  # one supervisor, two stages, one placement group
        time.sleep(0.1)
    wait_until_ready()
    assert complete(prompt="ROMEO:", max_tokens=5)["usage"]["completion_tokens"] == 5
    _redeploy(0)
    while leftovers():
        time.sleep(0.1)


async def _chats_stay_with_their_pipelines() -> None:
    """Of what one pipeline alone would find cached, all turns before but for their last pages, nine
    tenths are found.
    """
    chats, num_before, num_cached, num_possible = (
        [random_ids(400 + 50 * i, i, 1000) for i in range(4)],
        [0] * 4,
        0,
        0,
    )
    async with httpx.AsyncClient(base_url=URL, timeout=240) as client:
        for _ in range(3):
            await asyncio.to_thread(_wait_until_digests_are_known)
            bodies = [
                {"prompt": chat, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
                for chat in chats
            ]
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json=body) for body in bodies)
            )
            for number, answer in enumerate(each.json() for each in answers):
                num_cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                num_possible += num_before[number]
                num_before[number] = (answer["usage"]["total_tokens"] - 1) // 16 * 16
                chats[number] += [
                    *answer["choices"][0]["token_ids"],
                    *random_ids(20, len(chats[number]), 1000),
                ]
    assert num_cached >= 0.9 * num_possible > 0


def _wait_until_digests_are_known() -> None:
    wait_until_idle()
    handle = serve.get_deployment_handle("Router", APPLICATION)
    while {
        name: digest.known for digest, name in handle.broadcast("prefix_digest", {}).results()
    } != ingress_stats()["digests"]:
        time.sleep(0.1)


def _scale_down_under_load() -> None:
    """From two pipelines to one while both stream: every stream ends as if nothing had happened,
    and then one pipeline goes.
    """

    async def stream(
        client: httpx.AsyncClient, body: dict[str, Any], begun: asyncio.Semaphore
    ) -> str:
        async with client.stream(
            "POST", "/v1/completions", json=body | {"stream": True}
        ) as response:
            parts = response.aiter_text()
            text = await anext(parts)
            begun.release()
            return text + "".join([part async for part in parts])

    async def run() -> None:
        async with httpx.AsyncClient(base_url=URL, timeout=240) as client:
            bodies = [
                {"prompt": f"KING {i}", "max_tokens": 600, "temperature": 0, "ignore_eos": True}
                for i in range(6)
            ]
            begun = asyncio.Semaphore(0)
            routers = await asyncio.to_thread(router_stats)
            streams = [asyncio.create_task(stream(client, body, begun)) for body in bodies]
            for _ in streams:
                await begun.acquire()
            # so that none of them ends before one of the two is to go
            with stopped_stages(routers):
                working = await asyncio.to_thread(router_stats, stages=False)
                assert all(router["requests"] for router in working), working
                _redeploy(1)
                while (
                    serve.status()
                    .applications[APPLICATION]
                    .deployments["Router"]
                    .replica_states.get("STOPPING")
                    != 1
                ):
                    await asyncio.sleep(0.05)
                late = asyncio.create_task(client.post("/v1/completions", json=bodies[0]))
                assert len(leftovers()) == 8, "what still works stays"
            streamed = [events(text) for text in await asyncio.gather(*streams)]
            texts = ["".join(event["choices"][0]["text"] for event in each) for each in streamed]
            assert [each[-1]["choices"][0]["finish_reason"] for each in streamed] == [
                "length"
            ] * len(bodies)
            assert (await late).json()["choices"][0]["text"] == texts[0]
            again = await asyncio.gather(
                *(client.post("/v1/completions", json=body) for body in bodies)
            )
            assert texts == [answer.json()["choices"][0]["text"] for answer in again]

    asyncio.run(run())


def _stats_once_they_settle() -> list[dict[str, Any]]:
    try:
        return router_stats()
    except RayError:  # one of them is just starting or being stopped
        return []


def _redeploy(num_pipelines: int) -> None:
    deploy(SETTINGS, num_pipelines, graceful_shutdown_timeout_s=240)
