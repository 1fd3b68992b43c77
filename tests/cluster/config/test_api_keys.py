"""API keys: which are accepted, that nothing is done without one, and that nothing shows them."""

import hashlib
import json
import logging
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from event_loops import in_event_loop
from http_fuzz import check_error
from pydantic import SecretStr
from scripted_token_source import ScriptedSource, client_for, http_app_for
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tramontane.cluster.config.api_keys import MAX_FILE, MAX_KEYS, ApiKeys
from tramontane.cluster.config.engine_config import ConfigFile, EngineConfig
from tramontane.cluster.config.key import has_password
from tramontane.cluster.config.logging import LogSettings
from tramontane.cluster.console.server_client import auth_headers, raise_if_unauthorized
from tramontane.cluster.console.terminal import redact_arguments
from tramontane.cluster.observability.logging import use_serve_log
from tramontane.cluster.serving.app import build
from tramontane.cluster.serving.batch_replica import job_settings
from tramontane.proto.errors import ConfigError
from tramontane.proto.request import Identity
from tramontane.router.batch.files import JobStorage
from tramontane.router.batch.urls import UrlReader

KEY, OTHER = "sk-first-kept-secret", "sk-second-kept-secret"
BODY = {"model": "tiny", "prompt": "What news?", "max_tokens": 4}


def _allows(keys: ApiKeys, authorization: str | None) -> bool:
    return keys.authenticate(authorization) is not None


def _keys(*keys: str, file: Path | None = None) -> ApiKeys:
    return ApiKeys(map(SecretStr, keys), file)


# Which header is one


def test_without_keys_every_request_is_allowed() -> None:
    keys = ApiKeys()
    assert not keys.is_enabled
    assert _allows(keys, None)
    assert _allows(keys, "Bearer whatever")


@pytest.mark.parametrize(
    "given", [f"Bearer {KEY}", f"Bearer {OTHER}", f"bearer {KEY}", f"BEARER  {KEY} "]
)
def test_each_of_several_keys_is_good(given: str) -> None:
    assert _allows(_keys(KEY, OTHER), given)


@pytest.mark.parametrize(
    "given",
    [
        *(
            None,
            "",
            "Bearer",
            "Bearer ",
            KEY,
            f"Basic {KEY}",
            f"Bearer {KEY}x",
            f"Bearer {KEY[:-1]}",
            f"Bearer {KEY} {OTHER}",
        ),
        *(
            f"Bearer {KEY},{OTHER}",
            f"Bearer{KEY}",
            "Bearer \udcff",
            "Bearer \xe9",
            f"Bearer {KEY.upper()}",
        ),
    ],
)
def test_nothing_else_is_good(given: str | None) -> None:
    assert not _allows(_keys(KEY, OTHER), given)


def test_what_belongs_to_a_key_belongs_to_its_digest() -> None:
    """However many keys there are, and where: jobs and files stay with it."""
    own = hashlib.sha256(KEY.encode()).hexdigest()
    for keys in (_keys(KEY), _keys(KEY, OTHER), _keys(OTHER, "third", KEY)):
        for header in (f"Bearer {KEY}", f"bearer  {KEY} "):
            identity = keys.authenticate(header)
            assert identity is not None
            assert identity.tenant == own
    assert _keys(KEY).authenticate(f"Bearer {KEY}") == Identity(0, own)
    numbers = {
        found.owner
        for key in (KEY, OTHER)
        if (found := _keys(KEY, OTHER).authenticate(f"Bearer {key}"))
    }
    assert numbers == {1, 2}
    assert (
        ApiKeys().authenticate(f"Bearer {KEY}") == ApiKeys().authenticate(None) == Identity(0, "")
    )


def test_every_key_is_looked_at_however_early_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(_given: bytes, known: bytes) -> bool:
        compared.append(known)
        return True

    keys = _keys(KEY, OTHER, "third")
    monkeypatch.setattr("tramontane.cluster.config.api_keys.hmac.compare_digest", compare)
    _allows(keys, f"Bearer {KEY}")
    assert len(set(compared)) == 3
    assert all(KEY.encode() not in known for known in compared), "digests, of one length"


@pytest.mark.parametrize("bad", ["", " ", "a b", "a\n", "\xe9", "x" * 1025])
def test_what_no_header_can_carry_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="--api-key must be printable") as refused:
        _keys(KEY, bad)
    assert KEY not in str(refused.value)


# The file


def test_a_file_has_a_key_per_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"# of the team\n\n" + KEY.encode() + b"\r\n  " + OTHER.encode() + b"  ")
    keys = _keys("given", file=file)
    assert all(_allows(keys, f"Bearer {key}") for key in (KEY, OTHER, "given"))
    assert not _allows(keys, "Bearer # of the team")
    assert not _allows(keys, "Bearer ")


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(KEY)
    keys = _keys(file=file)
    (tmp_path / "new").write_text(OTHER)
    (tmp_path / "new").rename(file)  # whole at once, as those do who do not want it read half
    assert _allows(keys, f"Bearer {OTHER}")
    assert not _allows(keys, f"Bearer {KEY}")
    file.write_text(f"{KEY}\n{OTHER}")
    assert _allows(keys, f"Bearer {KEY}")


@pytest.mark.parametrize("how", ["replaced", "written to"])
def test_a_file_whose_key_was_exchanged_for_one_of_equal_length_is_read_again(
    tmp_path: Path, how: str
) -> None:
    """Its size and its time of modification are those of before: a revoked key must not stay
    good.
    """
    file, key, other = tmp_path / "keys", "sk-a-key", "sk-b-key"
    file.write_text(key)
    before = file.stat()
    keys = _keys(file=file)
    assert _allows(keys, f"Bearer {key}")
    if how == "replaced":
        (tmp_path / "new").write_text(other)
        (tmp_path / "new").replace(file)
    # until the file system's clock has moved
    while how == "written to" and file.stat().st_ctime_ns == before.st_ctime_ns:
        file.write_text(other)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert not _allows(keys, f"Bearer {key}")
    assert _allows(keys, f"Bearer {other}")


def test_a_file_is_read_only_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text(KEY)
    keys = _keys(file=file)
    monkeypatch.setattr(
        "tramontane.cluster.config.api_keys.read_key_file", lambda _file: pytest.fail("it was read")
    )
    assert _allows(keys, f"Bearer {KEY}")


SPOILED: dict[str, bytes | None] = {
    "gone": None,
    "empty": b"",
    "comments": b"# no key\n",
    "no text": b"\xff\xfe" + KEY.encode(),
    "spaces": f"{OTHER}\nmy {KEY}".encode(),
    "large": b"x\n" * (MAX_FILE // 2 + 1),
    "many": b"".join(b"%d\n" % number for number in range(MAX_KEYS + 1)),
}


def test_in_a_replica_the_warning_is_in_ray_serves_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = logging.FileHandler(tmp_path / "replica.log")
    monkeypatch.setattr(logging.getLogger("ray.serve"), "handlers", [written])
    use_serve_log(LogSettings(), "ingress")
    (file := tmp_path / "keys").write_text(KEY)
    keys = _keys(file=file)
    file.write_text("")
    _allows(keys, None)
    written.close()
    assert (tmp_path / "replica.log").read_text().count(
        "holds no key; the keys that were read before remain valid"
    ) == 1


@pytest.mark.parametrize("how", SPOILED)
def test_a_file_that_is_spoiled_changes_nothing_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    file, content = tmp_path / "keys", SPOILED[how]
    file.write_text(f"{KEY}\n")
    keys = _keys(file=file)
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert _allows(keys, f"Bearer {KEY}")
            assert not _allows(keys, f"Bearer {OTHER}")
            assert not _allows(keys, None)
    [record] = caplog.records
    assert "the keys that were read before remain valid" in record.getMessage()
    assert not any(key in caplog.text for key in (KEY, OTHER))
    file.write_text(OTHER)
    assert _allows(keys, f"Bearer {OTHER}")
    assert not _allows(keys, f"Bearer {KEY}")


@pytest.mark.parametrize("how", SPOILED)
def test_a_server_does_not_start_with_a_file_that_is_spoiled(tmp_path: Path, how: str) -> None:
    file, content = tmp_path / "keys", SPOILED[how]
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="--api-key-file") as refused:
        _keys(file=file)
    assert not any(key in str(refused.value) for key in (KEY, OTHER))


# The API server


async def _also_here(_request: Request) -> JSONResponse:
    return JSONResponse({})


REQUESTS = [
    *[
        ("GET", path)
        for path in (
            "/v1/models",
            "/v1/models/tiny",
            "/experts",
            "/also",
            "/nothing",
            "/version",
            "/health/",
        )
    ],
    *[
        ("GET", path)
        for path in ("/docs", "/openapi.json", "/%68ealth/../v1/models", "http://ingress//health")
    ],
    *[
        ("POST", path)
        for path in ("/v1/completions", "/tokenize", "/detokenize", "/also", "/v1/models")
    ],
]


@pytest.mark.parametrize("authorization", [[], ["Bearer wrong"], [KEY], [f"Bearer {KEY}"] * 2])
@in_event_loop
async def test_without_a_key_nothing_answers_and_nothing_is_read(authorization: list[str]) -> None:
    async def body() -> Any:
        pytest.fail("the body was read")
        yield b""

    source = ScriptedSource()
    app = http_app_for(
        source, keys=_keys(KEY), extra_routes=[Route("/also", _also_here, methods=["GET", "POST"])]
    ).app()
    async with client_for(app) as client:
        headers = [("authorization", value) for value in authorization]
        for method, path in REQUESTS:
            content = body() if method == "POST" else None
            response = await client.request(
                method, path, content=content, headers=[*headers, ("x-request-id", "mine")]
            )
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"] == "mine"
            error = check_error(response.content, code="invalid_api_key")
            assert error["type"] == "invalid_request_error"
        assert (await client.get("/health", headers=headers)).status_code == 200
        assert (await client.post("/ping", headers=headers)).status_code == 200
    assert source.requested == []


@in_event_loop
async def test_with_a_key_everything_answers() -> None:
    source = ScriptedSource()
    app = http_app_for(source, keys=_keys(KEY), extra_routes=[Route("/also", _also_here)]).app()
    async with client_for(app) as client:
        client.headers["authorization"] = f"Bearer {KEY}"
        for path in ("/v1/models", "/experts", "/health", "/also"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/nothing")).status_code == 404
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    assert len(source.requested) == 1


# What shows them


def test_no_configuration_shows_its_keys(tmp_path: Path) -> None:
    config = EngineConfig.build(None, {"api_key": [KEY, OTHER]})
    shown = [
        repr(config),
        str(config),
        repr(config.model_dump()),
        config.model_dump_json(),
        repr(_keys(KEY).__dict__),
    ]
    assert not any(KEY in text or OTHER in text for text in shown)
    assert pickle.loads(pickle.dumps(config)) == config, "as replicas get it"
    assert _allows(ApiKeys(pickle.loads(pickle.dumps(config)).api_key), f"Bearer {OTHER}")
    without = config.without_secrets()
    assert (without.api_key, without.api_key_file) == ((), None)
    file = tmp_path / "file.yaml"
    file.write_text(f"api_key: {KEY}\n")
    assert EngineConfig.build(ConfigFile.read(file), {}).api_key == (SecretStr(KEY),)
    assert EngineConfig.build(ConfigFile.read(file), {"api_key": ()}).api_key == (
        SecretStr(KEY),
    ), "a flag that was not given"


@pytest.mark.parametrize(
    "text",
    [f"api_key: [{KEY}", f"api_key: *{KEY}", f"api_key: {{{KEY}: 1}}", f"api_key:\n  a: {KEY}\n"],
)
def test_no_complaint_about_a_file_repeats_a_key(tmp_path: Path, text: str) -> None:
    (tmp_path / "file.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        EngineConfig.build(ConfigFile.read(tmp_path / "file.yaml"), {})
    assert KEY not in str(refused.value)


def test_a_key_that_is_a_number_is_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("api_key: 123456\n")
    with pytest.raises(ConfigError, match="--api-key must be a text") as refused:
        EngineConfig.build(ConfigFile.read(tmp_path / "file.yaml"), {})
    assert "123456" not in str(refused.value)


def test_a_serve_config_may_name_a_file_of_keys_but_no_key() -> None:
    with pytest.raises(ConfigError, match="give an api_key_file") as refused:
        build({"api_key": KEY})
    assert KEY not in str(refused.value)


DATABASE = f"postgresql://jobs:{KEY}@host/jobs"


def test_no_configuration_shows_the_password_of_its_store() -> None:
    config = EngineConfig.build(
        None, {"jobs_database": DATABASE, "jobs_storage": f"s3://me:{OTHER}@bucket"}
    )
    settings = job_settings(config)
    assert (settings.database, settings.storage) == (DATABASE, f"s3://me:{OTHER}@bucket")
    shown = [
        repr(config),
        str(config),
        repr(config.model_dump()),
        config.model_dump_json(),
        repr(settings),
    ]
    for wrong in ({"jobs_database": {KEY: OTHER}}, {"jobs_storage": [KEY, OTHER]}):
        with pytest.raises(ConfigError, match="must be a text") as refused:
            EngineConfig.build(None, wrong)
        shown.append(str(refused.value))
    for prefixes in (f"file:///in,s3://me:{KEY}@bucket/in", [f"https://host/in?token={KEY}"]):
        with pytest.raises(ConfigError, match="--jobs-url-prefixes has a password") as refused:
            EngineConfig.build(None, {"jobs_url_prefixes": prefixes})
        shown.append(str(refused.value))
    for refuse in (
        lambda: JobStorage(f"nosuch://me:{KEY}@bucket"),
        lambda: UrlReader([f"://me:{KEY}@x"]),
    ):
        with pytest.raises(ConfigError) as refused:
            refuse()
        shown.append(str(refused.value))
    assert not any(KEY in text or OTHER in text for text in shown)


@pytest.mark.parametrize("query", ["password=", "user=me&password=", "sslpassword="])
def test_a_serve_config_has_no_password_of_a_store(query: str) -> None:
    for settings in (
        {"jobs_database": DATABASE},
        {"jobs_database": f"postgresql://host/jobs?{query}{KEY}"},
    ):
        with pytest.raises(
            ConfigError, match="jobs_database: a password is not for a Serve config"
        ) as refused:
            build(settings)
        assert KEY not in str(refused.value)
    assert not any(
        map(
            has_password,
            (
                "postgresql://me@host:5432/jobs?sslmode=require",
                "sqlite:////a/b.sqlite",
                "s3://bucket/a",
            ),
        )
    )


def test_ray_gets_a_command_line_without_keys() -> None:
    """Ray shows how a process was started on its dashboard, as ps does."""
    arguments = [
        "serve",
        "--api-key",
        KEY,
        f"--api-key={OTHER}",
        "--api-key-file",
        "keys",
        "--port",
        "80",
    ]
    arguments += ["--jobs-database", DATABASE, f"--jobs-storage=s3://me:{OTHER}@bucket"]
    hidden = [
        "serve",
        "--api-key",
        "***",
        "--api-key=***",
        "--api-key-file",
        "keys",
        "--port",
        "80",
    ]
    hidden += ["--jobs-database", "***", "--jobs-storage=***"]
    assert redact_arguments(arguments) == hidden
    underscores = ["--api_key", KEY, f"--jobs_database={KEY}"]
    assert redact_arguments(underscores) == ["--api_key", "***", "--jobs_database=***"]
    several = ["serve", "m", "--api-key", KEY, OTHER, "-x", "y", "--api_key=-a", OTHER, "--port"]
    shown = ["serve", "m", "--api-key", "***", "***", "-x", "y", "--api_key=***", "***", "--port"]
    assert redact_arguments(several) == shown
    program = (
        "import json, sys; from tramontane.cluster.console.terminal import hide_secrets_in_title\n"
        "hide_secrets_in_title(sys.argv)\n"
        "from ray._private.utils import get_entrypoint_name\n"
        "print(json.dumps([get_entrypoint_name(), open('/proc/self/cmdline').read()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    for reported in json.loads(done.stdout):
        assert "--api-key=***" in reported
        assert KEY not in reported
        assert OTHER not in reported


def test_no_key_is_seen_in_the_command_line_of_a_command_that_runs() -> None:
    """The server that it calls reads it as ps does, while the command waits for an answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        command = [
            sys.executable,
            "-m",
            "tramontane.cluster.cli",
            "batch",
            "list",
            "--url",
            url,
            "--api-key",
            KEY,
        ]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            try:
                server.accept()[0].close()
            finally:
                shown = " ".join(psutil.Process(process.pid).cmdline())
                process.kill()
    assert f"{url} --api-key ***" in shown
    assert KEY not in shown


# The other side


def test_a_command_shows_the_key_that_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"# ours\n{KEY}\n{OTHER}\n")
    assert auth_headers(None, None) == {}
    assert (
        auth_headers(KEY, None)
        == auth_headers(None, tmp_path / "keys")
        == {"authorization": f"Bearer {KEY}"}
    )
    with pytest.raises(ConfigError, match="use one of them"):
        auth_headers(KEY, tmp_path / "keys")
    with pytest.raises(ConfigError, match="printable") as refused:
        auth_headers(f"{KEY}\n", None)
    assert KEY not in str(refused.value)


def test_a_command_sends_the_first_key_of_the_environment_where_it_is_given_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text("sk-of-the-file")
    monkeypatch.setenv("TRAMONTANE_API_KEY", f" {KEY},{OTHER}")
    assert auth_headers(None, None) == {"authorization": f"Bearer {KEY}"}
    assert auth_headers(OTHER, None) == {"authorization": f"Bearer {OTHER}"}
    assert auth_headers(None, tmp_path / "keys") == {"authorization": "Bearer sk-of-the-file"}
    monkeypatch.setenv("TRAMONTANE_API_KEY", f"{KEY} {OTHER}")
    with pytest.raises(ConfigError, match=r"^TRAMONTANE_API_KEY must hold an API key") as refused:
        auth_headers(None, None)
    assert KEY not in str(refused.value)
    monkeypatch.delenv("TRAMONTANE_API_KEY")
    assert auth_headers(None, None) == {}


@in_event_loop
async def test_a_server_that_wants_another_key_is_named_without_it() -> None:
    async with client_for(http_app_for(ScriptedSource(), keys=_keys(KEY)).app()) as client:
        client.headers.update(auth_headers(OTHER, None))
        with pytest.raises(ConfigError, match="http://ingress requires another API key") as refused:
            raise_if_unauthorized(client, await client.get("/v1/models"))
        assert OTHER not in str(refused.value)
        client.headers.update(auth_headers(KEY, None))
        raise_if_unauthorized(client, await client.get("/v1/models"))
