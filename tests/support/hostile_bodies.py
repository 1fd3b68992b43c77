"""The largest bodies that a server reads, of every shape that costs a parser the most, for every
endpoint, and how they are sent.
"""

import http.client
import json
from collections.abc import Iterator

import grpc

from tramontane.proto import inference_pb2 as pb

MAX_BODY = 8 * 2**20  # the default of max_body_bytes
MAX_MESSAGE = 2 * 2**20 - 64  # of gRPC; larger ones are refused before they are parsed
MAX_GRPC = 4 * 2**20 - 64
METHODS = ("Generate", "Score")
FORM = "multipart/form-data; boundary=b"
ANSWERED = range(200, 500)
CODES = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
TIMEOUT_S = 120.0  # of an answer
PLACE = "VALUE"  # where a value goes in a template
ITEMS = {
    "numbers": "1,",
    "lists": "[1],",
    "texts": '"",',
    "objects": "{},",
    "big numbers": "9" * 4000 + ",",
    "long numbers": "9" * 500 + ",",
}
TEXTS = {
    "letters": "a",
    "escapes": "\\n",
    "quotes": '\\"',
    "code points": "\\u00e9",
    "backslashes": "\\\\",
}
FILES = {"line ends": b"\n", "returns": b"\r\n", "boundaries": b"\r\n--a", "lists": b"[1],"}
SCHEMA = (
    '"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"enum":VALUE}}}'
)
USER = '{"messages":[{"role":"user","content":"a"}],'
CALL = (
    '{"messages":[{"role":"assistant","tool_calls":[{"id":"123456789","type":"function",'
    '"function":{"name":"f","arguments":'
)
TOOL = '"tools":[{"type":"function","function":{"name":"f","parameters":{"enum":VALUE}}}]}'
MESSAGE = '{"max_tokens":1,"messages":[{"role":"user","content":"a"}],'
TEMPLATES = {
    "/v1/completions": (
        '{"prompt":VALUE}',
        "VALUE",
        '{"prompt":"a","stop":VALUE}',
        '{"prompt":"a","logit_bias":VALUE}',
        '{"prompt":"a","suffix":VALUE}',
        '{"other":VALUE}',
        '{"prompt":"a",' + SCHEMA + "}",
    ),
    "/v1/chat/completions": (
        '{"messages":[{"role":"user","content":VALUE}]}',
        '{"messages":VALUE}',
        '{"messages":[{"role":"user","content":"a","other":VALUE}]}',
        CALL + "VALUE}}]}]}",
        USER + '"tools":VALUE}',
        USER + TOOL,
        USER + '"tool_choice":VALUE}',
        '{"tool_choice":VALUE}',
        USER + SCHEMA + "}",
    ),
    "/v1/responses": (
        '{"input":VALUE}',
        '{"input":[{"role":"user","content":VALUE}]}',
        '{"input":[{"type":"function_call_output","call_id":"123456789","output":VALUE}]}',
        '{"input":[{"type":VALUE}]}',
        '{"input":"a","tools":VALUE}',
        '{"input":"a","tools":[{"type":"function","name":"f","parameters":{"enum":VALUE}}]}',
        '{"input":"a","text":{"format":{"type":"json_schema","name":"a","schema":{"enum":VALUE}}}}',
        '{"input":"a","tool_choice":VALUE}',
        '{"input":"a","metadata":VALUE}',
        '{"input":"a","prompt_cache_options":{"mode":VALUE}}',
        '{"input":"a","previous_response_id":VALUE}',
    ),
    "/v1/messages": (
        '{"max_tokens":1,"messages":[{"role":"user","content":VALUE}]}',
        '{"max_tokens":1,"messages":VALUE}',
        '{"max_tokens":1,"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":VALUE}]}]}',
        '{"max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"123456789","name":"f","input":VALUE}]}]}',
        '{"max_tokens":1,"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"f","input":{"a":VALUE}}]}]}',
        MESSAGE + '"system":VALUE}',
        MESSAGE + '"tools":VALUE}',
        MESSAGE + '"tools":[{"name":"f","input_schema":{"enum":VALUE}}]}',
        MESSAGE + '"stop_sequences":VALUE}',
        MESSAGE + '"tool_choice":VALUE}',
        MESSAGE + '"output_config":{"format":{"type":"json_schema","schema":{"enum":VALUE}}}}',
    ),
    "/v1/messages/count_tokens": (
        '{"messages":[{"role":"user","content":VALUE}]}',
        '{"messages":VALUE}',
        '{"other":VALUE}',
    ),
    "/tokenize": ('{"prompt":VALUE}', '{"messages":VALUE}', USER + TOOL, '{"other":VALUE}'),
    "/detokenize": ('{"tokens":VALUE}', '{"other":VALUE}'),
    "/experts": ('{"tokens_by_layer":VALUE}', "VALUE"),
}


def structures(num_bytes: int) -> Iterator[tuple[str, str]]:
    """Yield names and JSON values, of about ``num_bytes``, with as many elements as there is room
    for.
    """
    for name, item in ITEMS.items():
        yield f"a list of {name}", f"[{(item * (num_bytes // len(item)))[:-1]}]"
    yield "many members", "{" + "".join(f'"{n}":1,' for n in range(num_bytes // 11))[:-1] + "}"
    yield "JSON in a text", json.dumps(f"[{('[1],' * (num_bytes // 4))[:-1]}]")


def values(num_bytes: int) -> Iterator[tuple[str, str]]:
    """Yield names and all JSON values of about ``num_bytes``."""
    yield from structures(num_bytes)
    for name, character in TEXTS.items():
        yield f"a text of {name}", f'"{character * (num_bytes // len(character))}"'
    yield "deep lists", "[" * num_bytes
    yield "white space", " " * num_bytes


def bodies(path: str, num_bytes: int = MAX_BODY) -> Iterator[tuple[str, bytes]]:
    """Yield names and bodies for one endpoint: every value in its first template, and structures in
    the others.
    """
    for number, template in enumerate(TEMPLATES[path]):
        for name, value in (structures if number else values)(num_bytes - len(template) - 2):
            yield f"{name} in {template:.80}", template.replace(PLACE, value).encode()


def uploads(num_bytes: int = MAX_BODY) -> Iterator[tuple[str, bytes]]:
    """Yield names and forms, with the boundary ``b``, for ``/v1/files``."""
    head = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head += b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    for name, piece in FILES.items():
        yield f"a file of {name}", head + piece * (num_bytes // len(piece)) + b"\r\n--b--\r\n"


def messages() -> Iterator[tuple[str, bytes]]:
    """Yield names and messages for the methods Generate and Score of gRPC, as bytes."""
    prompt, unknown, empty_stop, ids = (
        pb.GenerateRequest(text="a").SerializeToString(),
        b"\xa0\x06\x00",
        b"z\x00",
        b"\x01",
    )
    biases = pb.GenerateRequest(text="a", logit_bias=dict.fromkeys(range(MAX_MESSAGE // 15), 1.0))
    yield "unknown fields", prompt + unknown * (MAX_MESSAGE // 3)
    yield "stops", prompt + empty_stop * (MAX_MESSAGE // 2)
    yield (
        "token ids",
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids * MAX_MESSAGE)).SerializeToString(),
    )
    yield (
        "twice the largest",
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids * MAX_GRPC)).SerializeToString(),
    )
    yield "biases", biases.SerializeToString()
    for name, value in values(MAX_MESSAGE - 64):
        yield (
            f"{name} as response_format",
            pb.GenerateRequest(text="a", response_format=value).SerializeToString(),
        )
    yield "a text", pb.GenerateRequest(text="a" * MAX_MESSAGE).SerializeToString()


def hostile_requests() -> Iterator[tuple[str, str, bytes]]:
    """Yield names, paths or methods, and what is sent to them."""
    for path in TEMPLATES:
        yield from ((name, path, body) for name, body in bodies(path))
    yield from ((name, "/v1/files", body) for name, body in uploads())
    for method in METHODS:
        yield from ((name, method, message) for name, message in messages())


def send(port: int, channel: grpc.Channel, target: str, content: bytes) -> str:
    """Send a body over HTTP to a path, or over gRPC to a method; return how it failed."""
    if target.startswith("/"):
        return send_over_http(port, target, content)
    return send_over_grpc(channel, target, content)


def send_over_http(port: int, path: str, body: bytes) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request(
            "POST",
            path,
            body,
            {"content-type": FORM if path == "/v1/files" else "application/json"},
        )
        response = connection.getresponse()
        response.read()
        status = response.status
        return "" if status in ANSWERED else f"status {status}"
    except OSError as error:
        return repr(error)
    finally:
        connection.close()


def send_over_grpc(channel: grpc.Channel, method: str, message: bytes) -> str:
    make = channel.unary_stream if method == "Generate" else channel.unary_unary
    call = make(
        f"/tramontane.v1.Inference/{method}", request_serializer=None, response_deserializer=None
    )
    try:
        answer = call(message, timeout=TIMEOUT_S)
        for _ in answer if method == "Generate" else ():
            pass
    except grpc.RpcError as error:
        code = error.code()  # type: ignore[attr-defined]
        return "" if code in CODES else str(code)
    return ""
