"""OpenAI's fields that constrain answers, and their grammars (llguidance's Lark), which the last
stage follows.

    grammar = build_grammar(request.response_format, request.tools, request.tool_choice,
    chat.tool_format) SamplingParams(..., grammar=grammar)

An answer has its properties in the schema's order. JSON is written on one line, with an optional
space after commas and colons: with free whitespace a model may emit spaces and line breaks forever.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from tramontane.proto.errors import ParameterError
from tramontane.router.structured.answer_rules import (
    AnswerRule,
    Constraint,
    constraint_rule,
    json_rule,
    tool_rule,
)
from tramontane.router.structured.request_model import RequestModel
from tramontane.router.structured.schemas import (
    MAX_GRAMMAR_CHARS,
    NUM_WEAKER,
    TYPES,
    JsonSchema,
    ToolSchema,
    too_large,
    writable_schema_of,
)
from tramontane.router.structured.validator import GrammarError, validate_grammar
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


MAX_WEAKENINGS = 4  # of the schemas of a request, each followed by a check of at most a second
MAX_SENT_CHARS = 2**20  # total of one request: each sequence carries the grammar to the stages
NO_TOOLS = "this model's chat format has no tools; leave tools out"
MAX_TOOLS = 256
TEXT = r"TEXT: /(.|\n)+/"
NAME = r"^[a-zA-Z0-9_.:/-]{1,128}$"
TOOL_CHOICE_EXAMPLE = '{"type": "function", "function": {"name": "..."}}'


class JsonSchemaFormat(RequestModel):
    """A JSON schema that the answer follows, with a name that only the client uses."""

    name: str | None = None
    description: str | None = None
    schema_: JsonSchema = Field(alias="schema")
    strict: bool | None = None  # ignored: every answer follows its schema


class ResponseFormat(RequestModel):
    """``response_format`` of a request. ``schema``: where other servers have it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: JsonSchema | None = Field(default=None, alias="schema")


class Function(RequestModel):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: ToolSchema | None = None
    strict: bool | None = None

    _writable = model_validator(mode="before")(writable_schema_of("parameters"))


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
    if _is_of_tokens(response_format, may_call=bool(callable_tools)):
        thoughts, drops_space = None, False  # thoughts and spaces are tokens like the others
    schemas, calls = [answer] if answer else [], list[str]()
    if callable_tools:
        if tool_format is None:
            raise ParameterError(NO_TOOLS, "tools")
        schemas += [
            _arguments(tool.function, f"args{number}", index)
            for number, (index, tool) in enumerate(callable_tools)
        ]
        names = [tool.function.name for _, tool in callable_tools]
        calls = _calls(names, tool_format, parallel=parallel)
    rules = _rules(answer, calls, must_call=must_call, drops_space=drops_space)

    def written(schemas: Sequence[AnswerRule]) -> str:
        made = [*rules, *(f"{schema.rule}: {schema.definition}" for schema in schemas)]
        grammar = "\n".join(thoughts.before(made) if thoughts else made)
        _check_size(grammar, num_sequences, "tools" if callable_tools else schemas[0].where)
        return grammar

    return _followable(written, schemas)


def _rules(
    answer: AnswerRule | None, calls: Sequence[str], *, must_call: bool, drops_space: bool
) -> list[str]:
    """Return the rules of an answer, of calls, or of either, without those of their schemas."""
    rules = ["start: answer"]
    if calls:
        rules[0] = (
            "start: calls"
            if must_call
            else "start: answer | calls"
            if answer
            else "start: TEXT? calls?"
        )
        rules += [*calls, TEXT]
    if answer:  # leading spaces are insignificant in JSON
        rules.append(
            'answer: " "? body'
            if drops_space or answer.definition.startswith("%json")
            else "answer: body"
        )
    return rules


def _is_of_tokens(response_format: ResponseFormat | Constraint | None, *, may_call: bool) -> bool:
    """Return whether the answer is of the tokens of a set. Raises ParameterError where it may be a
    call instead.
    """
    if not isinstance(response_format, Constraint) or response_format.kind != "tokens":
        return False
    if may_call:
        raise ParameterError(
            f"{response_format.where} says what all of the answer must be, and a call of a tool"
            ' would be something else; leave it out, or send tool_choice: "none"',
            response_format.where,
        )
    return True


def visible_tools(tools: Sequence[Tool] | None, tool_choice: ToolChoice | None) -> tuple[Tool, ...]:
    """Return the tools that are described to the model: none if it must not call any."""
    return () if tool_choice == "none" else tuple(tools or ())


def _answer(response_format: ResponseFormat | Constraint | None) -> AnswerRule | None:
    """Return the rule of the answer, None for text."""
    if isinstance(response_format, Constraint):
        return constraint_rule("body", response_format)
    if response_format is None or response_format.type == "text":
        return None
    where = "response_format.schema"
    schema = response_format.schema_
    if response_format.json_schema is not None and response_format.type == "json_schema":
        where, schema = "response_format.json_schema.schema", response_format.json_schema.schema_
    elif schema is None and response_format.type == "json_schema":
        raise ParameterError(
            "response_format.json_schema is missing", "response_format.json_schema"
        )
    return json_rule("body", {"type": "object"} if schema is None else schema, where)


def _allowed_tools(
    tools: Sequence[Tool], choice: ToolChoice | None
) -> tuple[tuple[int, Tool], ...]:
    """Return the tools that may be called, each with its index."""
    if len(tools) > MAX_TOOLS:
        raise ParameterError(
            f"there are {len(tools)} tools; there may be at most {MAX_TOOLS}", "tools"
        )
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise ParameterError(f"two tools have the same name, {twice!r}", "tools")
    if choice not in (None, "none", "auto") and not tools:
        raise ParameterError("tool_choice is only allowed with tools", "tool_choice")
    if isinstance(choice, ToolChoiceFunction):
        if choice.function.name not in names:
            raise ParameterError(
                f"tool_choice: there is no tool {choice.function.name!r:.80}", "tool_choice"
            )
        index = names.index(choice.function.name)
        return ((index, tools[index]),)
    return tuple(enumerate(visible_tools(tools, choice)))


def _calls(names: Sequence[str], tool_format: ToolFormat, *, parallel: bool) -> list[str]:
    """Return the rules for calls: a list after one control token, or control tokens before each
    call and its arguments.
    """
    if tool_format.args is None:
        more = ' (", " call)*' if parallel else ""
        rules = [f'calls: <[{tool_format.calls}]> " "? "[" call{more} "]"']
        each = [
            _literal(f'{{"name": {_literal(name)}, "arguments": ') + f' args{i} "}}"'
            for i, name in enumerate(names)
        ]
    else:
        rules = ["calls: call+" if parallel else "calls: call"]
        call_id = ""
        if tool_format.call_id is not None:
            call_id = " id?"
            rules += [f"id: <[{tool_format.call_id}]> CALL_ID", "CALL_ID: /[a-zA-Z0-9]{9}/"]
        each = [
            f'<[{tool_format.calls}]> " "? {_literal(name)}{call_id} <[{tool_format.args}]> " "?'
            f" args{i}"
            for i, name in enumerate(names)
        ]
    return [*rules, "call: " + " | ".join(each)]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _arguments(function: Function, rule: str, index: int) -> AnswerRule:
    where = f"tools[{index}].function.parameters"
    label = f'{where} ("{function.name}")'
    schema = {"type": "object"} | (function.parameters or {})
    if schema["type"] is None or not (function.strict or _is_another_type(schema["type"])):
        schema["type"] = "object"
    if schema["type"] != "object":
        raise ParameterError(f"{label}: its type must be object", where)
    return tool_rule(rule, schema, where, label, strict=bool(function.strict))


def _is_another_type(given: Any) -> bool:  # any JSON
    """Return whether a type is known and not an object's: true of "array", not of "Object"."""
    types = given if isinstance(given, list) else [given]
    known = all(isinstance(each, str) and each in TYPES for each in types)
    return bool(types) and known and "object" not in types


def _check_size(grammar: str, num_sequences: int, where: str) -> None:
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise too_large(len(grammar), where)
    if len(grammar) * num_sequences > MAX_SENT_CHARS:
        raise ParameterError(
            f"{num_sequences} sequences with schemas of {len(grammar)} characters are too much for"
            " one request; ask for fewer",
            where,
        )


def _followable(
    written: Callable[[Sequence[AnswerRule]], str], schemas: Sequence[AnswerRule]
) -> str:
    """Return the grammar of these schemas that can be followed. Of tools that are not strict, what
    cannot be is weakened.

    Raises ParameterError with the schema that is wrong and the reason.
    """
    for number in itertools.count(1):
        grammar = written(schemas)
        found = validate_grammar(grammar, tuple(f"start: {each.definition}" for each in schemas))
        if not found:
            return grammar
        schemas = _weakened(schemas, found)
        if number == MAX_WEAKENINGS:
            schemas = [each.weakened(NUM_WEAKER) for each in schemas]
    raise AssertionError


def _weakened(schemas: Sequence[AnswerRule], found: Sequence[GrammarError]) -> list[AnswerRule]:
    """Return the schemas with those weakened that have errors; all of them if only the whole has
    one. Raises ParameterError if one cannot be weakened.
    """
    whole, *parts = found
    if parts:
        wrong = {error.part - 1: error.reason for error in parts}
        refused = next((index for index in wrong if not schemas[index].can_weaken), None)
    else:
        # The second step leaves out what takes long, such as patterns.
        wrong = {index: whole.reason for index, each in enumerate(schemas) if each.can_weaken}
        refused = None
    if refused is not None or (not wrong and len(schemas) == 1):
        schema = schemas[refused or 0]
        reason = wrong.get(refused or 0, whole.reason)
        raise ParameterError(f"{schema.name} cannot be followed: {reason}", schema.where)
    if not wrong:
        raise ParameterError(
            f"the schemas cannot be followed together: {whole.reason}", schemas[0].where
        )
    return [
        schema.weakened(1 if parts else 2) if index in wrong else schema
        for index, schema in enumerate(schemas)
    ]
