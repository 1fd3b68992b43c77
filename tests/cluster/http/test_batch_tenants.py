"""Two API keys at one server, over HTTP and gRPC: nothing of one is seen, counted, read, cancelled
or deleted by the other.

The server is the application with its middleware and the gRPC servicer, on the same keys and the
same store as a runner.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from batch_jobs import LIMITS, BatchHarness, new_batch_harness, request, requests
from event_loops import in_event_loop
from google.protobuf.message_factory import GetMessageClass
from http_fuzz import check_error
from pydantic import SecretStr
from scripted_token_source import MODEL, ScriptedSource, client_for, http_app_for

from tramontane.client import AsyncClient
from tramontane.cluster.config.api_keys import ApiKeys
from tramontane.cluster.http.batch_endpoints import BATCH_OPERATIONS, BatchEndpoints
from tramontane.proto import inference_pb2 as pb
from tramontane.proto.errors import OverloadedError, RequestError, UnknownJobError
from tramontane.proto.jobs import JobOptions, JobState
from tramontane.router.batch import service as batch_service
from tramontane.router.batch.service import BatchService
from tramontane.router.grpc.handlers import add_batch_jobs, add_inference
from tramontane.router.grpc.servicer import GrpcServicer

KEYS = {"anna": "sk-the-key-of-anna", "bert": "sk-the-key-of-bert"}
LIMITED = replace(LIMITS, max_open_jobs=4)
UNKNOWN_JOB, UNKNOWN_FILE = f"batch_{'0' * 32}", f"file-{'0' * 32}"
SERVICE = pb.DESCRIPTOR.services_by_name["BatchJobs"]


@dataclass
class User:
    """A client with one key, over HTTP and gRPC."""

    key: str | None
    http: httpx.AsyncClient
    grpc: AsyncClient
    channel: grpc.aio.Channel

    async def upload(self, text: bytes) -> str:
        answer = await self.http.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", text)}
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async def create(self, file: str, **headers: str) -> httpx.Response:
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        return await self.http.post("/v1/batches", json=body, headers=headers)

    async def ids(self, path: str) -> set[str]:
        return {each["id"] for each in (await self.http.get(path)).json()["data"]}

    async def code_of(self, method: str, message: Any) -> tuple[grpc.StatusCode, str]:  # a message
        """The status of a raw call, and its details; responses are read and dropped."""
        described = SERVICE.methods_by_name[method]
        kind = "_".join(
            "stream" if streams else "unary"
            for streams in (described.client_streaming, described.server_streaming)
        )
        call: Any = getattr(self.channel, kind)(f"/{SERVICE.full_name}/{method}")
        metadata = () if self.key is None else (("authorization", f"Bearer {self.key}"),)
        call = call(message.SerializeToString(), metadata=metadata, timeout=60)
        try:
            if described.server_streaming:
                async for _ in call:
                    pass
            else:
                await call
        except grpc.aio.AioRpcError:
            pass
        return await call.code(), await call.details()


@dataclass
class Server:
    harness: BatchHarness
    service: BatchService
    users: dict[str, User]

    def __getitem__(self, name: str) -> User:
        return self.users[name]


@asynccontextmanager
async def _server(harness: BatchHarness, keys: dict[str, str] = KEYS) -> AsyncIterator[Server]:
    """A server with these keys. Without keys its only user is called keyless."""
    service, known = harness.service(limits=LIMITED), ApiKeys(map(SecretStr, keys.values()))
    source = ScriptedSource()
    routes = BatchEndpoints(service).routes()
    app = http_app_for(
        source, keys=known, extra_routes=routes, extra_operations=BATCH_OPERATIONS
    ).app()
    server = grpc.aio.server()
    servicer = GrpcServicer(MODEL, source, service.for_tenant, known)
    add_inference(servicer, server)
    add_batch_jobs(servicer, server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with AsyncExitStack() as opened:
        opened.push_async_callback(server.stop, None)
        users: dict[str, User] = {}
        for name, key in (keys or {"keyless": None}).items():
            http = await opened.enter_async_context(client_for(app))
            http.headers.update({} if key is None else {"authorization": f"Bearer {key}"})
            client = await opened.enter_async_context(AsyncClient(target, key))
            users[name] = User(
                key,
                http,
                client,
                await opened.enter_async_context(grpc.aio.insecure_channel(target)),
            )
        yield Server(harness, service, users)


def _with_server(harness: BatchHarness, scenario: Callable[[Server], Awaitable[None]]) -> None:
    async def run() -> None:
        async with _server(harness) as server:
            await scenario(server)

    asyncio.run(run())


async def _ends(server: Server, user: User, job_id: str) -> dict[str, Any]:
    async with server.harness.running(server.harness.runner()):
        async for _ in user.grpc.watch_job(job_id):
            pass
    ended: dict[str, Any] = (await user.http.get(f"/v1/batches/{job_id}")).json()
    return ended


def test_ids_of_another_key_are_unknown_at_every_endpoint(harness: BatchHarness) -> None:
    """With the same words as for unknown ids. A new endpoint is found by its route, or fails
    here.
    """

    async def scenario(server: Server) -> None:
        anna, bert = server["anna"], server["bert"]
        file = await anna.upload(requests(2))
        ended = await _ends(server, anna, (await anna.create(file)).json()["id"])
        job, output = ended["id"], ended["output_file_id"]
        waiting = (await anna.create(file)).json()["id"]
        without_ids = set()
        for route in BatchEndpoints(server.service).routes():
            for method in (route.methods or set()) - {"HEAD"}:
                if not route.param_convertors:
                    without_ids.add((method, route.path))
                    continue
                for ids in (
                    {"file_id": file, "job_id": job},
                    {"file_id": output, "job_id": waiting},
                ):
                    answer = await bert.http.request(method, route.path.format(**ids))
                    unknown = {"file_id": UNKNOWN_FILE, "job_id": UNKNOWN_JOB}
                    expected = await bert.http.request(method, route.path.format(**unknown))
                    assert (answer.status_code, expected.status_code) == (404, 404), (
                        method,
                        route.path,
                    )
                    check_error(answer.content, code="not_found")
                    name, other = next(
                        (ids[key], unknown[key]) for key in ids if key in route.param_convertors
                    )
                    assert answer.text == expected.text.replace(other, name)
        assert without_ids == {
            (method, f"/v1/{kind}") for method in ("GET", "POST") for kind in ("files", "batches")
        }
        for path in (
            f"/v1/files?after={file}",
            f"/v1/files?after={output}",
            f"/v1/batches?after={job}",
        ):
            assert (await bert.http.get(path)).status_code == 404
        assert (
            (await bert.create(file)).status_code
            == (await bert.create(UNKNOWN_FILE)).status_code
            == 404
        )
        for path in ("/v1/files", "/v1/batches"):
            assert (await bert.http.get(path)).json()["data"] == []
        assert await anna.ids("/v1/files") == {file, output}
        assert await anna.ids("/v1/batches") == {job, waiting}
        assert (await anna.http.get(f"/v1/batches/{waiting}")).json()["status"] == "validating", (
            "it was not cancelled"
        )
        assert (await anna.http.get(f"/v1/files/{file}/content")).content == requests(2)

    _with_server(harness, scenario)


def test_ids_of_another_key_are_unknown_to_every_method(harness: BatchHarness) -> None:
    async def scenario(server: Server) -> None:
        anna, bert = server["anna"], server["bert"]
        ended = (await anna.grpc.submit_job(requests(2))).job_id
        await _ends(server, anna, ended)
        waiting = (await anna.grpc.submit_job(requests(2))).job_id
        without_ids = set()
        for method in SERVICE.methods:
            message = GetMessageClass(method.input_type)
            if "job_id" not in method.input_type.fields_by_name:
                without_ids.add(method.name)
                continue
            for job in (ended, waiting):
                code, details = await bert.code_of(method.name, message(job_id=job))
                expected = await bert.code_of(method.name, message(job_id=UNKNOWN_JOB))
                assert (code, details.replace(job, UNKNOWN_JOB)) == expected
                assert code == grpc.StatusCode.NOT_FOUND, method.name
        assert without_ids == {"SubmitJob", "ListJobs"}
        assert await bert.grpc.list_jobs() == []
        with pytest.raises(UnknownJobError):
            await bert.grpc.list_jobs(after=ended)
        assert [job.job_id for job in await anna.grpc.list_jobs()] == [waiting, ended]
        assert (await anna.grpc.get_job(waiting)).state == JobState.QUEUED, "it was not cancelled"

    _with_server(harness, scenario)


def test_idempotency_keys_are_those_of_an_api_key(harness: BatchHarness) -> None:
    """And with other lines they are an error, not another's results."""

    async def scenario(server: Server) -> None:
        anna, bert = server["anna"], server["bert"]
        file = await anna.upload(requests(2))
        made = {
            (await anna.create(file, **{"idempotency-key": "nightly-1"})).json()["id"],
            (
                await bert.create(
                    await bert.upload(requests(2)), **{"idempotency-key": "nightly-1"}
                )
            ).json()["id"],
            (await anna.grpc.submit_job(requests(3), request_key="nightly-2")).job_id,
            (await bert.grpc.submit_job(requests(3), request_key="nightly-2")).job_id,
        }
        assert len(made) == 4
        assert (await anna.create(file, **{"idempotency-key": "nightly-1"})).json()["id"] in made
        assert (await anna.grpc.submit_job(requests(3), request_key="nightly-2")).job_id in made
        other = await anna.create(
            await anna.upload(requests(3)), **{"idempotency-key": "nightly-1"}
        )
        assert (other.status_code, "use a new key" in other.text) == (400, True)
        other = await anna.create(file, **{"idempotency-key": "nightly-2"})
        assert other.status_code == 400, "it is that of a text"
        for text, options in (
            (requests(4), JobOptions()),
            (requests(3), JobOptions(keeps_order=False)),
        ):
            with pytest.raises(RequestError, match="use a new key"):
                await anna.grpc.submit_job(text, options, request_key="nightly-2")
        assert len(await anna.grpc.list_jobs()) == len(await bert.grpc.list_jobs()) == 2

    _with_server(harness, scenario)


def test_what_another_key_has_does_not_count(harness: BatchHarness) -> None:
    async def scenario(server: Server) -> None:
        anna, bert = server["anna"], server["bert"]
        for _ in range(LIMITED.max_open_jobs):
            await anna.grpc.submit_job(requests(1))
        refused = await anna.create(await anna.upload(requests(1)))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "30")
        message = check_error(refused.content, code="rate_limit_exceeded")["message"]
        assert message.startswith("4 of your batch jobs have not ended, and at most 4 may be open")
        with pytest.raises(OverloadedError, match=r"^4 of your batch jobs"):
            await anna.grpc.submit_job(requests(1))
        for number in range(LIMITED.max_open_jobs):
            assert (await bert.create(await bert.upload(request("a", number)))).status_code == 200
        with pytest.raises(OverloadedError, match=r"^4 of your batch jobs"):
            await bert.grpc.submit_job(requests(1))

    _with_server(harness, scenario)


def test_an_operator_may_hand_jobs_over(harness: BatchHarness) -> None:
    """By the statements in the documentation."""
    page = (Path(__file__).parents[3] / "docs" / "batch-jobs.md").read_text()
    (statements,) = [part.partition("```")[0] for part in page.split("```sql\n")[1:]]
    new, old = [hashlib.sha256(KEYS[name].encode()).hexdigest() for name in ("bert", "anna")]

    async def scenario(server: Server) -> None:
        anna, bert = server["anna"], server["bert"]
        file = await anna.upload(requests(2))
        job = (await anna.create(file, **{"idempotency-key": "nightly-1"})).json()["id"]
        with server.service._database.writing() as connection:
            for line in statements.splitlines()[1:]:
                connection.exec_driver_sql(line.replace("NEW", new).replace("OLD", old))
        assert (await bert.ids("/v1/batches"), await bert.ids("/v1/files")) == ({job}, {file})
        assert (await bert.create(file, **{"idempotency-key": "nightly-1"})).json()["id"] == job
        assert (await anna.ids("/v1/batches"), await anna.ids("/v1/files")) == (set(), set())

    _with_server(harness, scenario)


def test_full_storage_is_refused_before_a_body_is_read(tmp_path: Path) -> None:
    harness = new_batch_harness(tmp_path)

    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    async def scenario() -> None:
        service = harness.service(limits=replace(LIMITS, max_stored_bytes=200_000))
        app = http_app_for(
            ScriptedSource(),
            keys=ApiKeys(map(SecretStr, KEYS.values())),
            extra_routes=BatchEndpoints(service).routes(),
        ).app()
        async with client_for(app) as http:
            headers = {"authorization": f"Bearer {KEYS['anna']}"}
            form: Any = {"data": {"purpose": "batch"}, "headers": headers}
            assert (
                await http.post("/v1/files", files={"file": ("f", b"x" * 150_000)}, **form)
            ).status_code == 200
            described = headers | {
                "content-type": "multipart/form-data; boundary=b",
                "content-length": "200000",
            }
            refused = await http.post("/v1/files", content=unread(), headers=described)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "3600")
            message = check_error(refused.content, code="quota_exceeded")["message"]
            assert "and at most 195 KiB may be stored (--jobs-max-bytes)" in message
            refused = await http.post("/v1/files", files={"file": ("f", b"x" * 60_000)}, **form)
            assert refused.status_code == 429, "a form has a little more than its file"
            form["headers"] = {"authorization": f"Bearer {KEYS['bert']}"}
            assert (
                await http.post("/v1/files", files={"file": ("f", b"x" * 150_000)}, **form)
            ).status_code == 200

    asyncio.run(scenario())
    harness.close()


@in_event_loop
async def test_uploads_that_are_not_complete_are_bounded_for_a_key_and_for_all(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a copy in the temporary folder. Of four, a key has half of what others leave; what
    ends makes room.
    """
    monkeypatch.setattr(batch_service, "MAX_UPLOADS", 4)
    head = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head += b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + requests(
        1
    )
    form = {"content-type": "multipart/form-data; boundary=b"}

    async with _server(harness) as server:
        go_on, num_begun = asyncio.Event(), 0

        async def slow() -> AsyncIterator[bytes]:
            nonlocal num_begun
            yield head
            num_begun += 1
            await go_on.wait()
            yield b"\r\n--b--\r\n"

        def begin(user: str, body: AsyncIterator[bytes]) -> "asyncio.Task[httpx.Response]":
            return asyncio.create_task(
                server[user].http.post("/v1/files", content=body, headers=form)
            )

        async def begin_and_wait(user: str, count: int) -> "list[asyncio.Task[httpx.Response]]":
            wanted = num_begun + count
            tasks = [begin(user, slow()) for _ in range(count)]
            while num_begun < wanted:
                await asyncio.sleep(0)
            return tasks

        uploads = [*await begin_and_wait("anna", 2), *await begin_and_wait("bert", 1)]
        for user, own in (("anna", 2), ("bert", 1)):
            refused = await begin(user, slow())
            assert refused.status_code == 429
            assert (
                check_error(refused.content)["message"]
                == f"{own} of your uploads are in progress, and there is no room for another"
                " one "
                "(a server process has 4 for all keys); try again later"
            )
            assert int(refused.headers["retry-after"]) > 0
        go_on.set()
        assert [(await upload).status_code for upload in uploads] == [200] * 3
        broken = await server["anna"].http.post("/v1/files", content=b"nonsense", headers=form)
        assert broken.status_code == 400
        assert [(await begin("anna", slow())).status_code for _ in range(4)] == [200] * 4, (
            "one after the other"
        )
        assert server.service._uploads.total() == 0


@in_event_loop
async def test_a_server_without_keys_has_what_was_made_without_keys(harness: BatchHarness) -> None:
    """Before keys were configured, and after they were taken away again."""
    async with _server(harness, {}) as server:
        before = (await server["keyless"].grpc.submit_job(requests(1))).job_id
    async with _server(harness) as server:
        assert await server["anna"].ids("/v1/batches") == set()
        own = (await server["anna"].grpc.submit_job(requests(1))).job_id
    async with _server(harness, {"anna": KEYS["anna"], "carl": "another-key"}) as server:
        assert await server["anna"].ids("/v1/batches") == {own}, "whatever other keys there are"
        assert await server["carl"].ids("/v1/batches") == set()
    async with _server(harness, {"anna": KEYS["anna"]}) as server:
        assert await server["anna"].ids("/v1/batches") == {own}, "alone, too"
    async with _server(harness, {}) as server:
        assert await server["keyless"].ids("/v1/batches") == {before}
        assert (await server["keyless"].http.get(f"/v1/batches/{own}")).status_code == 404
        async with harness.running(harness.runner()):
            assert (
                json.loads(
                    (await server["keyless"].http.get(f"/v1/batches/{before}/results")).text
                )["custom_id"]
                == "r0"
            )
