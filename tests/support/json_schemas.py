"""Random JSON schemas within what ``response_format`` supports. Each has a short valid answer."""

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
WORDS = ("name", "age", "king", "queen", "Denmark", "a b", "é", "sword")
PATTERNS = ("^[a-z]{1,4}$", "^(to|not to) be$", r"^\d{2}-\d{2}$", "^[A-F0-9]{3}$", "x?y")
FORMATS = ("date", "time", "uuid", "ipv4")


def random_schema(seed: int) -> Schema:
    """Return a schema: mostly of an object, as OpenAI's clients request, and sometimes of any other
    type.
    """
    rng = random.Random(seed)
    root = _object(rng, 3) if rng.random() < 0.8 else _any(rng, 3)
    if rng.random() < 0.2:  # with a definition that is referenced twice
        pair = {
            "properties": {"first": {"$ref": "#/$defs/part"}, "last": {"$ref": "#/$defs/part"}},
            "required": ["first", "last"],
        }
        root = {
            "$defs": {"part": _any(rng, 2)},
            "type": "object",
            "additionalProperties": False,
            **pair,
        }
    return root


def _any(rng: random.Random, depth: int) -> Schema:
    leaves: list[Callable[[random.Random], Schema]] = [
        _string,
        _number,
        _enum,
        _constant,
        lambda _: {"type": "boolean"},
    ]
    if depth == 0 or rng.random() < 0.5:
        return rng.choice(leaves)(rng)
    return rng.choice([_object, _array, _either])(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 3))
    required = [name for name in names if rng.random() < 0.7]
    properties = {name: _any(rng, depth - 1) for name in names}
    schema = {"type": "object", "properties": properties, "required": required}
    if rng.random() < 0.9:
        return schema | {"additionalProperties": False}
    return schema | {"additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}}


def _array(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.2:
        return {
            "type": "array",
            "prefixItems": [_any(rng, depth - 1), _any(rng, 0)],
            "items": False,
            "minItems": 2,
        }
    low = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _any(rng, depth - 1),
        "minItems": low,
        "maxItems": low + rng.randint(0, 2),
    }


def _either(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.3:
        return {"allOf": [_object(rng, depth), {"type": "object"}]}
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _string(rng: random.Random) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS)}
    low = rng.randint(0, 6)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 12)}


def _number(rng: random.Random) -> Schema:
    low = rng.randint(-100, 1000)
    bounds: Schema = {"minimum": low, "maximum": low + rng.randint(1, 500)}
    if rng.random() < 0.3:
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": low + rng.randint(2, 500)}
    kind = rng.choice(["integer", "number"])
    if kind == "integer" and rng.random() < 0.2:
        bounds["multipleOf"] = rng.choice([1, 2])
    return {"type": [kind, "null"] if rng.random() < 0.2 else kind} | bounds


def _enum(rng: random.Random) -> Schema:
    return {"enum": rng.sample([*WORDS, 1, 2.5, None, True, ["x"], {"y": 1}], rng.randint(1, 4))}


def _constant(rng: random.Random) -> Schema:
    return {"const": rng.choice([*WORDS, 7, None, [1, 2]])}
