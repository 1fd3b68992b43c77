"""Constraints on an answer or on the arguments of a call, as rules of a grammar (llguidance's
Lark), within limits.
"""

import json
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from llguidance import LLMatcher

from tramontane.proto.errors import ParameterError
from tramontane.router.structured.schemas import (
    MAX_GRAMMAR_CHARS,
    NUM_WEAKER,
    OPTIONS,
    Schema,
    as_enforced,
    as_lenient,
    too_large,
    weaker_schema,
)

# No numeric escapes: "\u0061" would count as a property that the schema does not name, although it
# reads as "a".
JSON_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',
}


class Constraint(NamedTuple):
    """A constraint on the answer: JSON of a schema (a dictionary), one of several texts, a text
    that matches a pattern, or tokens of a set.

    ``where``: the parameter of the request.
    """

    kind: Literal["json", "choice", "regex", "tokens"]
    value: Any
    where: str


@dataclass(frozen=True, slots=True)
class AnswerRule:
    """A rule of the grammar. ``where``: the parameter of the request. ``label``: how errors name
    it.

    ``schema``: of a tool that is not strict. ``num_weakened``: which of its weaker forms is used,
    because the ones before cannot be followed.
    """

    rule: str
    where: str
    definition: str
    label: str = ""
    schema: Schema | None = None
    num_weakened: int = 0

    @property
    def name(self) -> str:
        """The name in errors."""
        return self.label or self.where

    @property
    def can_weaken(self) -> bool:
        """Whether there is a weaker schema."""
        return self.schema is not None and self.num_weakened < NUM_WEAKER

    def weakened(self, num_steps: int) -> "AnswerRule":
        """Return the rule with a weaker schema, if there is one."""
        if self.schema is None:
            return self
        number = min(self.num_weakened + num_steps, NUM_WEAKER)
        definition = _json_definition(weaker_schema(self.schema, number), lenient=True)
        return replace(self, definition=definition, num_weakened=number)


def constraint_rule(rule: str, constraint: Constraint) -> AnswerRule:
    """Return the rule for a constraint. Raises ParameterError if it is too large."""
    kind, value, where = constraint
    if kind == "json":
        return json_rule(rule, value, where)
    if kind == "tokens":
        return AnswerRule(rule, where, f"<[{','.join(map(str, sorted(set(value))))}]>+")
    if (num_chars := len(value) if kind == "regex" else sum(map(len, value))) > MAX_GRAMMAR_CHARS:
        raise too_large(num_chars, where)
    if kind == "choice":
        return AnswerRule(
            rule, where, " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
        )
    # llguidance writes a pattern between slashes, and escapes slashes in it.
    written = json.loads(LLMatcher.grammar_from_regex(value))["grammars"][0]["lark_grammar"]
    return AnswerRule(rule, where, written.removeprefix("start: "))


def json_rule(rule: str, schema: Schema, where: str) -> AnswerRule:
    """Return the rule for JSON of a schema. Raises ParameterError if it is too large or too
    deep.
    """
    if schema.get(OPTIONS) is not None:
        raise ParameterError(f"{where}: {OPTIONS} is not supported; leave it out", where)
    return _bounded_rule(rule, as_enforced(schema, where, where), where, where)


def tool_rule(rule: str, schema: Schema, where: str, label: str, *, strict: bool) -> AnswerRule:
    """Return the rule for the arguments of a tool. What cannot be enforced of its schema is ignored
    unless it is ``strict``; then this raises ParameterError as ``json_rule`` does.
    """
    if strict:
        if schema.get(OPTIONS) is not None:
            raise ParameterError(f"{label}: {OPTIONS} is not supported; leave it out", where)
        return _bounded_rule(rule, as_enforced(schema, label, where), where, label)
    enforced = as_lenient(schema, label, where)
    return replace(_bounded_rule(rule, enforced, where, label, lenient=True), schema=enforced)


def _bounded_rule(
    rule: str, schema: Schema, where: str, label: str, *, lenient: bool = False
) -> AnswerRule:
    made = AnswerRule(rule, where, _json_definition(schema, lenient=lenient), label)
    if len(made.definition) > MAX_GRAMMAR_CHARS:
        raise too_large(len(made.definition), where, label)
    return made


def _json_definition(schema: Schema, *, lenient: bool) -> str:
    options = {OPTIONS: JSON_STYLE | {"lenient": lenient}}
    written = json.dumps({**schema, **options}, allow_nan=False, separators=(",", ":"))
    return f"%json {written}"
