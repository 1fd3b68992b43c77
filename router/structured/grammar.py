"""OpenAI's fields that constrain answers, and their grammars (llguidance's Lark), which the last
stage follows.

    grammar = build_grammar(request.response_format, request.tools, request.tool_choice,
    chat.tool_format) SamplingParams(..., grammar=grammar)

An answer has its properties in the schema's order. JSON is written on one line, with an optional
space after commas and colons: with free whitespace a model may emit spaces and line breaks forever.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple

from llguidance import LLMatcher
from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from tramontane.proto.errors import ParameterError
from tramontane.router.structured.request_model import RequestModel
from tramontane.router.structured.validator import validate_grammar
from tramontane.router.tokenization.chat import ToolFormat
from tramontane.router.tokenization.reasoning_parser import ReasoningFormat

# Grammar rules for the reasoning of a model before the constrained answer; the reasoning itself is
# unconstrained.

START, SAID = "start:", "said:"


@dataclass(frozen=True, slots=True)
class ThoughtRules:
    """The markers of reasoning, and whether the prompt has already begun it, so that the grammar
    begins inside of it.

    Otherwise reasoning is optional, as the model decides.
    """

    form: ReasoningFormat
    is_open: bool

    def before(self, rules: Sequence[str]) -> list[str]:
        """Return the rules of a grammar, whose first rule is ``start``, with reasoning before
        them.
        """
        first, *others = rules
        begin = "" if self.is_open else f"{self._marker(self.form.begin, self.form.begin_id)} "
        # Line breaks after the marker belong to it.
        after = " BREAKS?" if self.form.trims else ""
        start = f"{START} {'thought' if self.is_open else 'thought?'} said"
        made = [start, first.replace(START, SAID, 1), *others]
        if self.form.end_id is None:  # the text up to the first marker
            made += [
                f"thought: {begin}to_end{after}",
                f"to_end[lazy]: /(.|\\n)*{self._pattern(self.form.end)}/",
            ]
        else:
            made += [
                f"thought: {begin}THOUGHT? <[{self.form.end_id}]>{after}",
                r"THOUGHT: /(.|\n)+/",
            ]
        return made + [r"BREAKS: /\n{1,2}/"] * self.form.trims

    @staticmethod
    def _marker(text: str, token_id: int | None) -> str:
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    @staticmethod
    def _pattern(text: str) -> str:
        return text.replace("/", r"\/")


# Constraints on an answer or on the arguments of a call, as rules of a grammar (llguidance's Lark),
# within limits.

MAX_GRAMMAR_CHARS = 2**16  # total of one request's schemas
MAX_DEPTH = 32  # of a schema, counting every list and object
# of a whole number in a schema, 462 digits: writing one takes time quadratic in its length
MAX_NUMBER_BITS = 1536
# product of all different values of ``multipleOf``: compiling takes 5 microseconds per remainder
MAX_MULTIPLE = 10_000
# No numeric escapes: "\u0061" would count as a property that the schema does not name, although it
# reads as "a".
JSON_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',
}
OPTIONS = "x-guidance"  # key of llguidance's options in a schema


def check_numbers(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema. Raises ValueError for a number that JSON does not support, or an integer
    that is too long to write.
    """
    level: list[Any] = [schema]
    while level:
        if any(isinstance(node, int) and node.bit_length() > MAX_NUMBER_BITS for node in level):
            raise ValueError(f"a number has more than {MAX_NUMBER_BITS} bits")
        if any(isinstance(node, float) and not math.isfinite(node) for node in level):
            raise ValueError("NaN and Infinity are not JSON")
        level = [child for node in level for child in _children(node)]
    return schema


JsonSchema = Annotated[dict[str, Any], AfterValidator(check_numbers)]


class Constraint(NamedTuple):
    """A constraint on the answer: JSON of a schema (a dictionary), one of several texts, or a text
    that matches a pattern.

    ``where``: the parameter of the request.
    """

    kind: Literal["json", "choice", "regex"]
    value: Any
    where: str


class AnswerRule(NamedTuple):
    """A rule of the grammar. ``where``: the parameter of the request."""

    rule: str
    where: str
    definition: str


def constraint_rule(rule: str, constraint: Constraint) -> AnswerRule:
    """Return the rule for a constraint. Raises ParameterError if it is too large."""
    kind, value, where = constraint
    if kind == "json":
        return json_rule(rule, value, where)
    if (num_chars := len(value) if kind == "regex" else sum(map(len, value))) > MAX_GRAMMAR_CHARS:
        raise too_large(num_chars, where)
    if kind == "choice":
        return AnswerRule(
            rule, where, " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
        )
    # llguidance writes a pattern between slashes, and escapes slashes in it.
    written = json.loads(LLMatcher.grammar_from_regex(value))["grammars"][0]["lark_grammar"]
    return AnswerRule(rule, where, written.removeprefix("start: "))


def json_rule(
    rule: str, schema: Mapping[str, Any], where: str, *, lenient: bool = False
) -> AnswerRule:
    """Return the rule for JSON of a schema. Raises ParameterError if it is too large or too deep.

    ``lenient``: unsupported keywords are ignored.
    """
    if OPTIONS in schema:
        raise ParameterError(f"{where}: {OPTIONS} is not supported; leave it out", where)
    multiples = _multiple_ofs(schema, where)
    text = json.dumps({**schema, OPTIONS: JSON_STYLE | {"lenient": lenient}}, allow_nan=False)
    # limits the product below, whose factors may have hundreds of digits
    if len(text) > MAX_GRAMMAR_CHARS:
        raise too_large(len(text), where)
    if math.prod(multiples) > MAX_MULTIPLE:
        raise ParameterError(
            f"{where}: the values of multipleOf are too large, their product may be at most"
            f" {MAX_MULTIPLE}",
            where,
        )
    return AnswerRule(rule, where, f"%json {text}")


def too_large(num_chars: int, where: str) -> ParameterError:
    """Return the error for schemas of this number of characters."""
    return ParameterError(
        f"the schemas take {num_chars} characters; they may take {MAX_GRAMMAR_CHARS}", where
    )


def _multiple_ofs(schema: object, where: str) -> set[int]:
    """Return the digits of every ``multipleOf``: 125 of 12.5. Raises ParameterError if a schema is
    too deep or too large.
    """
    level: list[Any] = [schema]
    multiples: set[int] = set()
    num_chars = 0  # without numbers and punctuation
    for _ in range(MAX_DEPTH):
        num_chars += sum(len(node) for node in level if isinstance(node, str))
        num_chars += sum(len(name) for node in level if isinstance(node, dict) for name in node)
        values = [node.get("multipleOf") for node in level if isinstance(node, dict)]
        multiples |= {_digits(value) for value in values if isinstance(value, int | float)}
        level = [child for node in level for child in _children(node)]
    if level:
        raise ParameterError(f"{where} is nested more than {MAX_DEPTH} deep", where)
    if num_chars > MAX_GRAMMAR_CHARS:
        raise too_large(num_chars, where)
    return multiples


def _digits(number: float) -> int:
    if isinstance(number, int):
        return abs(number)  # may be too large for a float
    decimal = Decimal(str(number)).normalize()
    exponent = decimal.as_tuple().exponent
    assert isinstance(exponent, int)
    return int(abs(decimal.scaleb(-min(exponent, 0))))


def _children(value: object) -> Sequence[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


MAX_SENT_CHARS = 2**20  # total of one request: each sequence carries the grammar to the stages
NO_TOOLS = "this model's chat format has no tools; leave tools out"
MAX_TOOLS = 128
TEXT = r"TEXT: /(.|\n)+/"
NAME = r"^[a-zA-Z0-9_-]{1,64}$"
TOOL_CHOICE_EXAMPLE = '{"type": "function", "function": {"name": "..."}}'


class JsonSchemaFormat(RequestModel):
    """A named JSON schema that the answer follows."""

    name: str = Field(pattern=NAME)
    description: str | None = None
    schema_: JsonSchema = Field(alias="schema")
    strict: bool | None = None  # ignored: every answer follows its schema


class ResponseFormat(RequestModel):
    """``response_format`` of a request."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class Function(RequestModel):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """One of ``tools``. Without ``strict``, unsupported keywords of its schema are ignored."""

    type: Literal["function"]
    function: Function


class FunctionName(RequestModel):
    """Name of a function."""

    name: str


class ToolChoiceFunction(RequestModel):
    """A ``tool_choice`` that requires one tool."""

    type: Literal["function"]
    function: FunctionName


TOOL_CHOICES = ("none", "auto", "required", "any")


def _check_tool_choice(value: Any) -> Any:  # any JSON
    if not (
        isinstance(value, dict | ToolChoiceFunction)
        or (isinstance(value, str) and value in TOOL_CHOICES)
    ):
        raise ValueError(f"it must be one of {', '.join(TOOL_CHOICES)}, or {TOOL_CHOICE_EXAMPLE}")
    return value


def _form_of_tool_choice(value: Any) -> str:
    return "word" if isinstance(value, str) else "function"


def _mistral_as_openai(choice: Any) -> Any:
    """Return Mistral's "any" as OpenAI's "required"."""
    return "required" if choice == "any" else choice


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required", "any"], Tag("word")]
    | Annotated[ToolChoiceFunction, Tag("function")],
    Discriminator(_form_of_tool_choice),
    BeforeValidator(_check_tool_choice),
    AfterValidator(_mistral_as_openai),
]


def build_grammar(
    response_format: ResponseFormat | Constraint | None,
    tools: Sequence[Tool] | None = None,
    tool_choice: ToolChoice | None = None,
    tool_format: ToolFormat | None = None,
    *,
    parallel: bool = True,
    num_sequences: int = 1,
    drops_space: bool = False,
    thoughts: ThoughtRules | None = None,
) -> str:
    """Return the grammar of one request's answers, empty if they are unconstrained.

    ``tool_format``: the model's, None if it has no tools. Without ``parallel`` there is at most one
    call. ``drops_space``: a space with which an answer begins does not reach the client.
    ``thoughts``: the reasoning before the answer. Raises ParameterError for schemas that are
    malformed, too large, or cannot be followed. Call it in ``run_in_grammar_pool``: it takes 30 ms
    for new schemas, and a second of a separate process for hostile ones.
    """
    callable_tools = _allowed_tools(tools or (), tool_choice)
    must_call = bool(callable_tools) and tool_choice not in (None, "auto")
    answer = None if must_call else _answer(response_format)
    if not answer and not callable_tools:
        return ""
    schemas = [answer] if answer else []
    rules = ["start: answer"]
    if callable_tools:
        if tool_format is None:
            raise ParameterError(NO_TOOLS, "tools")
        schemas += [_arguments(tool.function, index) for index, tool in enumerate(callable_tools)]
        rules[0] = (
            "start: calls"
            if must_call
            else "start: answer | calls"
            if answer
            else "start: TEXT? calls?"
        )
        rules += [*_calls(callable_tools, tool_format, parallel=parallel), TEXT]
    if answer:  # leading spaces are insignificant in JSON
        rules.append(
            'answer: " "? body'
            if drops_space or answer.definition.startswith("%json")
            else "answer: body"
        )
    rules += [f"{schema.rule}: {schema.definition}" for schema in schemas]
    grammar = "\n".join(thoughts.before(rules) if thoughts else rules)
    _check_size(grammar, num_sequences, schemas[0].where)
    _check(grammar, schemas)
    return grammar


def visible_tools(tools: Sequence[Tool] | None, tool_choice: ToolChoice | None) -> tuple[Tool, ...]:
    """Return the tools that are described to the model: none if it must not call any."""
    return () if tool_choice == "none" else tuple(tools or ())


def _answer(response_format: ResponseFormat | Constraint | None) -> AnswerRule | None:
    """Return the rule of the answer, None for text."""
    if isinstance(response_format, Constraint):
        return constraint_rule("body", response_format)
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return json_rule("body", {"type": "object"}, "response_format")
    if response_format.json_schema is None:
        raise ParameterError(
            "response_format.json_schema is missing", "response_format.json_schema"
        )
    return json_rule(
        "body", response_format.json_schema.schema_, "response_format.json_schema.schema"
    )


def _allowed_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> tuple[Tool, ...]:
    """Return the tools that may be called."""
    if len(tools) > MAX_TOOLS:
        raise ParameterError(
            f"there are {len(tools)} tools; there may be at most {MAX_TOOLS}", "tools"
        )
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ParameterError("two tools have the same name", "tools")
    if choice not in (None, "none", "auto") and not tools:
        raise ParameterError("tool_choice is only allowed with tools", "tool_choice")
    if isinstance(choice, ToolChoiceFunction):
        if choice.function.name not in names:
            raise ParameterError(
                f"tool_choice: there is no tool {choice.function.name!r:.80}", "tool_choice"
            )
        return (tools[names.index(choice.function.name)],)
    return visible_tools(tools, choice)


def _calls(tools: Sequence[Tool], tool_format: ToolFormat, *, parallel: bool) -> list[str]:
    """Return the rules for calls: a list after one control token, or control tokens before each
    call and its arguments.
    """
    names = enumerate(tool.function.name for tool in tools)
    if tool_format.args is None:
        more = ' (", " call)*' if parallel else ""
        rules = [f'calls: <[{tool_format.calls}]> " "? "[" call{more} "]"']
        each = [
            json.dumps(f'{{"name": "{name}", "arguments": ') + f' args{i} "}}"' for i, name in names
        ]
    else:
        rules = ["calls: call+" if parallel else "calls: call"]
        call_id = ""
        if tool_format.call_id is not None:
            call_id = " id?"
            rules += [f"id: <[{tool_format.call_id}]> CALL_ID", "CALL_ID: /[a-zA-Z0-9]{9}/"]
        each = [
            f'<[{tool_format.calls}]> " "? "{name}"{call_id} <[{tool_format.args}]> " "? args{i}'
            for i, name in names
        ]
    return [*rules, "call: " + " | ".join(each)]


def _arguments(function: Function, index: int) -> AnswerRule:
    where = f"tools[{index}].function.parameters"
    schema = {"type": "object"} | (function.parameters or {})
    if schema["type"] != "object":
        raise ParameterError(f"{where}: its type must be object", where)
    return json_rule(f"args{index}", schema, where, lenient=not function.strict)


def _check_size(grammar: str, num_sequences: int, where: str) -> None:
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise too_large(len(grammar), where)
    if len(grammar) * num_sequences > MAX_SENT_CHARS:
        raise ParameterError(
            f"{num_sequences} sequences with schemas of {len(grammar)} characters are too much for"
            " one request; ask for fewer",
            where,
        )


def _check(grammar: str, schemas: Sequence[AnswerRule]) -> None:
    """Raise ParameterError with the schema that is wrong and the reason."""
    found = validate_grammar(grammar, tuple(f"start: {schema.definition}" for schema in schemas))
    if found is None:
        return
    if found.part or len(schemas) == 1:
        schema = schemas[max(found.part - 1, 0)]
        raise ParameterError(f"{schema.where} cannot be followed: {found.reason}", schema.where)
    raise ParameterError(
        f"the schemas cannot be followed together: {found.reason}", schemas[0].where
    )
