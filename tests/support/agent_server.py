"""An API server for programs of users, without a router: it answers the first request of a
conversation with a call of one of the client's own tools, and a result with a text.

The server's own code reads, renders, constrains and writes; only the sampled tokens are scripted,
and each must be one that the request's grammar allows.
"""

import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from llguidance import LLMatcher
from scripted_token_source import ScriptedSource, http_app_for
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tokenizer_files import small_tekken, thinking_tekken

from tramontane.proto.request import Request, RequestOutput
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.loader import load_chat_template, require_tokenizer
from tramontane.router.tokenization.tokenizer import Tokenizer
from tramontane.workers.sampling.structured_output import (
    LIMITS,
    NO_FORCING,
    GrammarError,
    GrammarState,
    Vocabulary,
)

MODEL_NAME = "demo"
CONTEXT, MAX_BODY = 2**20, 2**24
MAX_VOCAB = 2**18
ANSWER = "The notes say that the wind has turned to the north."
FORMATS = ("v3", "v11", "v13")
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GENERATES = frozenset(
    (CHAT, RESPONSES, MESSAGES, f"{MESSAGES}/count_tokens", "/v1/completions")
)  # paths of requests for answers, or for their cost
Wanted = Mapping[str, Mapping[str, Any]]  # arguments by the tool's name, in the order of preference


@dataclass
class Exchange:
    """A request, and the response to it. ``last_at``: the time of its last part, by a monotonic
    clock. ``broken``: why the response has no end, if the server is at fault.
    """

    method: str
    path: str
    raw: bytes
    user_agent: str
    status: int = 0
    warning: str = ""
    answer: bytes = b""
    is_whole: bool = False
    last_at: float = 0.0
    broken: str = ""

    @property
    def body(self) -> dict[str, Any]:
        """The request's JSON; {} if it is none."""
        try:
            parsed = json.loads(self.raw or b"{}")
        except ValueError:
            return {}
        return parsed if isinstance(parsed, dict) else {}


CURRENT: ContextVar[Exchange] = ContextVar("CURRENT")


def tool_schemas(path: str, body: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the schemas of the functions that a client has, by name."""
    found: dict[str, dict[str, Any]] = {}
    for tool in body.get("tools") or ():
        for each in tool.get("tools", ()) if tool.get("type") == "namespace" else (tool,):
            given = each.get("function", each)
            if "name" in given and each.get("type") in (None, "function", "custom"):
                schema = given.get("parameters") or given.get("input_schema")
                found[given["name"]] = schema or {"type": "object"}
    return found


def results_of(path: str, body: Mapping[str, Any]) -> list[str]:
    """Return the results of tools in a conversation, as JSON."""
    if path == RESPONSES:
        items = body["input"] if isinstance(body.get("input"), list) else []
        return [json.dumps(each) for each in items if str(each.get("type")).endswith("_output")]
    messages = body.get("messages") or []
    if path.startswith(MESSAGES):
        blocks = [
            block
            for message in messages
            for block in (message["content"] if isinstance(message["content"], list) else ())
        ]
        return [json.dumps(block) for block in blocks if block["type"] == "tool_result"]
    return [json.dumps(each) for each in messages if each["role"] == "tool"]


def instance_of(schema: Mapping[str, Any], wanted: Mapping[str, Any]) -> Any:  # any JSON
    """Return a small value that follows a schema, an object with the ``wanted`` properties."""
    if "const" in schema or "enum" in schema:
        return schema.get("const", (schema.get("enum") or [None])[0])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return instance_of(schema[several][0], wanted)
    kind = schema.get("type", "string")
    match kind if isinstance(kind, str) else kind[0]:
        case "object":
            required = schema.get("required", ())
            return {
                name: wanted[name] if name in wanted else instance_of(each, {})
                for name, each in schema.get("properties", {}).items()
                if name in wanted or name in required
            }
        case "array":
            return [instance_of(schema["items"], {})] if schema.get("minItems") else []
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return False
        case "null":
            return None
        case _:
            return "north"


def answer_schema(path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the schema that an answer must follow, None for a text."""
    if path.startswith(MESSAGES):
        form = (body.get("output_config") or {}).get("format") or {}
    elif path == RESPONSES:
        form = (body.get("text") or {}).get("format") or {}
    else:
        form = body.get("response_format") or {}
        form = form.get("json_schema") or form
    if form.get("type") == "json_object":
        return {"type": "object"}
    schema: dict[str, Any] | None = form.get("schema")
    return schema


class AgentSource(ScriptedSource):
    """Scripts the answer to each request by its body."""

    def __init__(self, tokenizer: Tokenizer, calls: Any) -> None:
        super().__init__()
        self.tokenizer, self.format = tokenizer, calls
        self.wanted: Wanted = {}
        self.last: Wanted = {}  # calls after a result, for clients that end by a call
        self._vocabulary = Vocabulary(tokenizer.vocabulary())

    def script(self, exchange: Exchange) -> tuple[int, ...]:
        """Return the tokens of the answer to a request."""
        path, body = exchange.path, exchange.body
        schemas, results = tool_schemas(path, body), results_of(path, body)
        for name, arguments in (self.last if results else self.wanted).items():
            if name in schemas:
                return self._call(name, instance_of(schemas[name], arguments))
        if (schema := answer_schema(path, body)) is not None:
            return self.tokenizer.encode(json.dumps(instance_of(schema, {})))[1:]
        return self.tokenizer.encode(ANSWER)[1:]

    def _call(self, name: str, arguments: Any) -> tuple[int, ...]:
        encode = self.tokenizer.encode
        if self.format.args is None:
            written = json.dumps([{"name": name, "arguments": arguments}], ensure_ascii=False)
            return (self.format.calls, *encode(written)[1:])
        written = json.dumps(arguments, ensure_ascii=False)
        return (self.format.calls, *encode(name)[1:], self.format.args, *encode(written)[1:])

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Yield the scripted tokens. Raises GrammarError for one that the grammar forbids."""
        ids = self.script(CURRENT.get())
        for spec in request.sequences:
            if spec.sampling.grammar:
                self._check(spec.sampling.grammar, ids)
        source = ScriptedSource(ids, fingerprints=("fp_0123456789abcdef",))
        async for output in source.generate(request):
            yield output

    def _check(self, grammar: str, ids: Sequence[int]) -> None:
        matcher = LLMatcher(self._vocabulary.tokenizer, NO_FORCING + grammar, limits=LIMITS)
        state = GrammarState(matcher, self._vocabulary.num_pieces, 0)
        state.advance(ids)
        if not state.can_stop:
            raise GrammarError("the scripted tokens are not a whole answer")


@dataclass
class Recorder:
    """Passes requests to the server, and keeps them with the responses."""

    app: ASGIApp
    exchanges: list[Exchange] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request as the server does."""
        raw, more = b"", True
        while more:
            message = await receive()
            raw += message.get("body", b"")
            more = message.get("more_body", False)
        headers = dict(scope["headers"])
        agent = headers.get(b"user-agent", b"").decode("latin-1")
        exchange = Exchange(scope["method"], scope["path"], raw, agent, last_at=time.monotonic())
        self.exchanges.append(exchange)
        CURRENT.set(exchange)
        waiting: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                named = {name.lower(): value for name, value in message["headers"]}
                exchange.warning = named.get(b"warning", b"").decode("latin-1")
            else:
                exchange.answer += message.get("body", b"")
                exchange.is_whole = not message.get("more_body", False)
            exchange.last_at = time.monotonic()
            await send(message)

        try:
            await self.app(scope, replay, note)
        except Exception as error:
            exchange.broken = repr(error)
            raise


@dataclass
class AgentServer:
    """The running server. ``source``: of its tokens, if they are scripted."""

    url: str
    recorder: Recorder
    source: AgentSource | None = None


def write_tekken(folder: Path, version: str) -> None:
    """Write a small tekken.json of this version, with the markers of thoughts from version 11 on;
    the published file is of version 3.
    """
    if version == "v3":
        small_tekken(folder)
    else:
        thinking_tekken(folder, version)


def agent_app(version: str, folder: Path) -> tuple[AgentSource, Recorder]:
    """Return a server whose model has the chat format of this version."""
    write_tekken(folder / version, version)
    tokenizer = require_tokenizer(folder / version, MAX_VOCAB)
    chat: Any = load_chat_template(folder / version, tokenizer)
    source = AgentSource(tokenizer, chat.tool_format)
    model = ServedModel(MODEL_NAME, tokenizer, CONTEXT, 16, tokenizer.vocab_size)
    app = http_app_for(source, model, chat=chat, max_body_bytes=MAX_BODY).app()
    return source, Recorder(app)


@contextmanager
def running_agent_server(version: str, folder: Path) -> Iterator[AgentServer]:
    """Run a server with scripted tokens during the block."""
    source, recorder = agent_app(version, folder)
    with served(recorder) as url:
        yield AgentServer(url, recorder, source)


@contextmanager
def served(app: ASGIApp) -> Iterator[str]:
    """Run an application on a port of this machine during the block; yield its URL."""
    config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join()
