"""Requests for ``/v1/responses``, OpenAI's Responses API, and their conversion to chats.

Fields, items and tools that this server does not know have no effect. Fields that would change an
answer are refused by name.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from tramontane.proto.errors import ParameterError
from tramontane.router.chat_apis.conversation import (
    OTHER,
    ClientTool,
    Conversation,
    Effort,
    RequestMetadata,
    by_type,
    known_types,
    refused,
    typed,
)
from tramontane.router.chat_apis.responses_items import InputItems, add_items
from tramontane.router.openai.chat_request import CUSTOM_INPUT
from tramontane.router.openai.completion_request import Text, parse_body
from tramontane.router.openai.sampling_values import Seed
from tramontane.router.structured.grammar import (
    MAX_TOOLS,
    NAME,
    Function,
    FunctionName,
    JsonSchemaFormat,
    ResponseFormat,
    Tool,
    ToolChoiceFunction,
)
from tramontane.router.structured.request_model import (
    NoEffect,
    OtherObject,
    RequestBody,
    RequestModel,
    bounded,
    default_if_null,
)
from tramontane.router.structured.schemas import JsonSchema

NOT_STORED = "this server stores no answers; send the whole conversation as input"
MAX_INCLUDED = 64
MAX_NAME = 128  # characters of a function's name
INCLUDED_LOGPROBS = "message.output_text.logprobs"
# Parameters of a chat, and their names here.
NAMES = (
    (r"^messages$", "input"),
    (r"^tools\[(\d+)\]\.function\.parameters", r"tools[\1].parameters"),
    (r"^response_format\.json_schema", "text.format"),
    (r"^response_format", "text.format"),
    (r"^max_tokens$", "max_output_tokens"),
    (r"^logprobs$", "top_logprobs"),
    (r"^reasoning_effort$", "reasoning.effort"),
)


class TextFormat(RequestModel):
    """Plain text."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(RequestModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    name: Annotated[str, default_if_null("answer")] = "answer"
    schema_: JsonSchema = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


Format = Annotated[
    Annotated[TextFormat, typed("text")]
    | Annotated[JsonObjectFormat, typed("json_object")]
    | Annotated[SchemaFormat, typed("json_schema")],
    by_type("text", "json_object", "json_schema"),
    known_types(
        ("text", "json_object", "json_schema"),
        "{type} is not supported; it must be text, json_object or json_schema",
    ),
]


class TextConfig(RequestModel):
    """``text`` of a request."""

    format: Format | None = None
    verbosity: NoEffect = None


class FunctionTool(RequestModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None
    allowed_callers: NoEffect = None
    defer_loading: NoEffect = None
    output_schema: NoEffect = None

    def function(self) -> Function:
        """Return the function as chats have it."""
        return Function(
            name=self.name,
            description=self.description,
            parameters=self.parameters,
            strict=self.strict,
        )


class InputFormat(RequestModel):
    """The format of a custom tool's input: any text, or one that follows a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Text | None = None


class CustomTool(RequestModel):
    """A tool whose input is one text. The model sees a function with one argument."""

    type: Literal["custom"]
    name: str = Field(pattern=NAME)
    description: str | None = None
    format: InputFormat | None = None
    allowed_callers: NoEffect = None
    defer_loading: NoEffect = None

    def function(self) -> Function:
        """Return the function as chats have it. A regular expression is enforced; another grammar
        is only described.
        """
        text: dict[str, Any] = {"type": "string"}
        lines = [self.description] if self.description else []
        if self.format is not None and self.format.definition:
            if self.format.syntax == "regex":
                text["pattern"] = f"^(?:{self.format.definition})$"
            lines.append(
                f"The {CUSTOM_INPUT} follows this {self.format.syntax} grammar:\n"
                f"{self.format.definition}"
            )
        parameters: dict[str, Any] = {"type": "object", "properties": {CUSTOM_INPUT: text}}
        parameters |= {"required": [CUSTOM_INPUT], "additionalProperties": False}
        return Function(name=self.name, description="\n".join(lines) or None, parameters=parameters)


ClientFunction = Annotated[
    Annotated[FunctionTool, typed("function")]
    | Annotated[CustomTool, typed("custom")]
    | Annotated[OtherObject, typed(OTHER)],
    by_type("function", "custom"),
]


class Namespace(RequestModel):
    """Tools under a common name."""

    type: Literal["namespace"]
    name: Text
    description: NoEffect = None
    tools: Annotated[tuple[ClientFunction, ...], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ChosenFunction(RequestModel):
    """The function that the model has to call."""

    type: Literal["function", "custom"]
    name: str


class ReasoningConfig(RequestModel):
    """``reasoning`` of a request. Summaries are not made: thoughts are returned whole."""

    effort: Effort | None = None
    context: NoEffect = None
    mode: NoEffect = None
    summary: NoEffect = None
    generate_summary: NoEffect = None


CHOICES = ("none", "auto", "required")


def _check_tool_choice(value: Any) -> Any:
    is_function = isinstance(value, dict) and value.get("type") in ("function", "custom")
    if not (is_function or (isinstance(value, str) and value in CHOICES)):
        raise ValueError(
            f'it must be one of {", ".join(CHOICES)}, or {{"type": "function", "name": "..."}}'
        )
    return value


def _form_of_tool_choice(value: Any) -> str:
    return "word" if isinstance(value, str) else "function"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[ChosenFunction, Tag("function")],
    Discriminator(_form_of_tool_choice),
    BeforeValidator(_check_tool_choice),
]
# Tools that only another server runs are left out.
Tools = Annotated[
    tuple[
        Annotated[
            Annotated[FunctionTool, typed("function")]
            | Annotated[CustomTool, typed("custom")]
            | Annotated[Namespace, typed("namespace")]
            | Annotated[OtherObject, typed(OTHER)],
            by_type("function", "custom", "namespace"),
        ],
        ...,
    ],
    Field(max_length=MAX_TOOLS, fail_fast=True),
]


class ResponsesRequest(RequestBody):
    """Body of ``POST /v1/responses``."""

    has_history = True
    model: str | None = None
    messages: Annotated[
        Any,
        refused(
            "a conversation is input here; /v1/chat/completions and /v1/messages take messages"
        ),
    ] = None
    input: InputItems
    instructions: Text | None = None
    max_output_tokens: Annotated[int | None, bounded("max_tokens")] = None
    temperature: Annotated[float, bounded("temperature"), default_if_null(1.0)] = 1.0
    top_p: Annotated[float, bounded("top_p"), default_if_null(1.0)] = 1.0
    text: TextConfig | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Annotated[bool, default_if_null(True)] = True
    reasoning: ReasoningConfig | None = None
    include: Annotated[tuple[str, ...], Field(max_length=MAX_INCLUDED, fail_fast=True)] | None = (
        None
    )
    top_logprobs: Annotated[int | None, bounded("logprobs")] = None
    stream: Annotated[bool, default_if_null(False)] = False
    metadata: RequestMetadata | None = None
    truncation: NoEffect = None  # a conversation longer than the context is refused
    store: NoEffect = None
    user: NoEffect = None
    safety_identifier: NoEffect = None
    prompt_cache_key: NoEffect = None
    prompt_cache_retention: NoEffect = None
    prompt_cache_options: NoEffect = None
    service_tier: NoEffect = None
    max_tool_calls: NoEffect = None
    client_metadata: NoEffect = None
    context_management: NoEffect = None  # edits that would make the conversation shorter

    background: Annotated[Any, refused(f"{NOT_STORED}, and wait for its answer")] = None
    conversation: Annotated[Any, refused(NOT_STORED)] = None
    moderation: Annotated[Any, refused("this server has no moderation; leave it out")] = None
    previous_response_id: Annotated[Any, refused(NOT_STORED, "")] = None
    prompt: Annotated[Any, refused("this server stores no prompts; send the text as input")] = None
    seed: Seed | None = None
    stream_options: NoEffect = None

    def unused_fields(self) -> tuple[str, ...]:
        """See ``RequestBody``."""
        is_unused = self.include and set(self.include) != {INCLUDED_LOGPROBS}
        return ("include",) if is_unused else ()

    @property
    def returns_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return INCLUDED_LOGPROBS in (self.include or ())

    def response_format(self) -> ResponseFormat | None:
        """Return the response format in the format of chats."""
        given = self.text.format if self.text is not None else None
        if not isinstance(given, SchemaFormat):
            return None if given is None else ResponseFormat(type=given.type)
        schema = {"name": given.name, "schema": given.schema_, "strict": given.strict}
        return ResponseFormat(
            type="json_schema", json_schema=JsonSchemaFormat.model_validate(schema)
        )

    def conversation_of(self) -> Conversation:
        """Return the request as a chat. Raises ParameterError for conversations that a chat cannot
        have.
        """
        choice, functions = self.tool_choice, self.functions()
        client_tools = {
            name: ClientTool(tool.name, namespace, isinstance(tool, CustomTool))
            for name, (tool, namespace) in functions.items()
            if namespace is not None or isinstance(tool, CustomTool)
        }
        fields: Mapping[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "logprobs": self.returns_logprobs,
            "top_logprobs": self.top_logprobs if self.returns_logprobs else None,
            "stream": self.stream,
            "response_format": self.response_format(),
            "tools": tuple(
                Tool(type="function", function=tool.function().model_copy(update={"name": name}))
                for name, (tool, _) in functions.items()
            )
            or None,
            "tool_choice": ToolChoiceFunction(
                type="function", function=FunctionName(name=choice.name)
            )
            if isinstance(choice, ChosenFunction)
            else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
        }
        messages = add_items(self.instructions, self.input, client_tools)
        return replace(messages.build(fields, NAMES, self), client_tools=client_tools)

    def functions(self) -> dict[str, tuple[FunctionTool | CustomTool, str | None]]:
        """Return the functions that the model sees, by their names, with their namespaces.

        A function of a namespace has its own name where no other function has it, and otherwise
        ``namespace.name``. Raises ParameterError for too many functions, or two of one name.
        """
        functions = [
            (each, tool.name if isinstance(tool, Namespace) else None)
            for tool in self.tools or ()
            for each in (tool.tools if isinstance(tool, Namespace) else (tool,))
            if isinstance(each, FunctionTool | CustomTool)
        ]
        if len(functions) > MAX_TOOLS:
            raise ParameterError(
                f"there are {len(functions)} tools; there may be at most {MAX_TOOLS}", "tools"
            )
        outside = {each.name for each, namespace in functions if namespace is None}
        found: dict[str, tuple[FunctionTool | CustomTool, str | None]] = {}
        for each, namespace in functions:
            is_taken = namespace is not None and (each.name in found or each.name in outside)
            name = _qualified_name(namespace or "", each.name) if is_taken else each.name
            if name in found:
                raise ParameterError(f"tools: there are two of the name {name!r}", "tools")
            found[name] = (each, namespace)
        return found

    def echo(self) -> dict[str, Any]:
        """Return the fields of an answer that repeat the request."""
        choice, form = self.tool_choice, self.text.format if self.text is not None else None
        written: dict[str, Any] = {"type": form.type} if form is not None else {"type": "text"}
        if isinstance(form, SchemaFormat):
            written |= {"name": form.name, "schema": form.schema_, "strict": form.strict}
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {
                "effort": self.reasoning.effort if self.reasoning is not None else None,
                "summary": None,
            },
            "store": False,
            "temperature": self.temperature,
            "text": {"format": written},
            "tool_choice": {"type": choice.type, "name": choice.name}
            if isinstance(choice, ChosenFunction)
            else choice or "auto",
            "tools": [
                _echo_of(tool) for tool in self.tools or () if not isinstance(tool, OtherObject)
            ],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": "disabled",
        }


def _qualified_name(namespace: str, name: str) -> str:
    """Return ``namespace.name`` with the letters that names of functions have, and no more of
    them.
    """
    prefix = re.sub(r"[^a-zA-Z0-9_.:/-]", "_", namespace[:MAX_NAME])
    return f"{prefix}.{name}"[-MAX_NAME:]


def _echo_of(tool: FunctionTool | CustomTool | Namespace) -> dict[str, Any]:
    """Return a tool as an answer repeats it: without fields that have no effect, whose values may
    be more than JSON has, as NaN.
    """
    echo: dict[str, Any] = {"type": tool.type, "name": tool.name}
    if isinstance(tool, Namespace):
        inner = (each for each in tool.tools if not isinstance(each, OtherObject))
        return echo | {"tools": [_echo_of(each) for each in inner]}
    echo["description"] = tool.description
    if isinstance(tool, FunctionTool):
        return echo | {"parameters": tool.parameters, "strict": tool.strict}
    if (form := tool.format) is not None:
        fields = {"type": form.type, "syntax": form.syntax, "definition": form.definition}
        echo["format"] = {key: value for key, value in fields.items() if value is not None}
    return echo


def parse_responses(body: bytes) -> Conversation:
    """Parse and validate a body. Raises ParameterError, which names the first problem."""
    request = parse_body(ResponsesRequest, body)
    if request.top_logprobs and not request.returns_logprobs:
        raise ParameterError(
            f'top_logprobs is only allowed with include: ["{INCLUDED_LOGPROBS}"]', "top_logprobs"
        )
    return replace(request.conversation_of(), echo=request.echo(), echo_bytes=len(body))
