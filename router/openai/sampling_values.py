"""Values of sampling parameters in requests, and their parsers."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from tramontane.proto.request import MAX_BIAS, MAX_BIASES, MAX_STOP_TOKENS
from tramontane.router.structured.guided import MAX_TOKEN_ID
from tramontane.router.structured.request_model import bounded, default_if_null

MAX_STOPS = 16
MAX_STOP_CHARS = 1024

Stop = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
StopInput = Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)]
LogitBiasInput = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")],
        Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)],
    ],
    Field(max_length=MAX_BIASES),
]
LogitBias = tuple[tuple[int, float], ...]


def parse_stops(value: Any) -> tuple[str, ...]:
    """Return stop strings, from one text or several; empty ones are left out. Raises ValueError."""
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(
        isinstance(stop, str) for stop in stops[: MAX_STOPS + 1]
    ):
        raise ValueError("it must be a text or a list of texts")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise ValueError(
            f"there may be at most {MAX_STOPS} of at most {MAX_STOP_CHARS} characters each"
        )
    return tuple(filter(None, stops))


def parse_biases(value: Any) -> LogitBias:
    """Return the biases of tokens. Raises ValueError."""
    biases = {} if value is None else value
    if not isinstance(biases, dict):
        raise ValueError("it must be an object with a number for each token id")
    if len(biases) > MAX_BIASES:
        raise ValueError(f"it has {len(biases)} tokens; there may be at most {MAX_BIASES}")
    return tuple((_token_id(key), _bias(key, bias)) for key, bias in biases.items())


def _token_id(key: str) -> int:
    if not (
        key.isascii()
        and key.isdecimal()
        and len(key) <= 10
        and str(int(key)) == key
        and int(key) < MAX_TOKEN_ID
    ):
        raise ValueError(
            f"{key[:40]!r} is not a token id, which is a whole number from 0 to {MAX_TOKEN_ID - 1}"
        )
    return int(key)


def _bias(key: str, bias: Any) -> float:
    if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
        raise ValueError(
            f"the bias of token {key} must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}"
        )
    return float(bias)


def _wrapped_seed(value: Any) -> Any:
    """Return a whole number modulo 2**64, from -2**63 on: 2.0 as 2, and 2**64 - 1 as -1. Other
    values are left to the type's check.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return (value + 2**63) % 2**64 - 2**63 if type(value) is int else value


Seed = Annotated[int, bounded("seed"), BeforeValidator(_wrapped_seed, json_schema_input_type=int)]
StopTokens = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=MAX_TOKEN_ID)], ...],
    Field(max_length=MAX_STOP_TOKENS, strict=False, fail_fast=True),
    default_if_null(()),
]
