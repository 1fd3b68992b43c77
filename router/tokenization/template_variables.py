"""Variables of chat templates that clients give as ``chat_template_kwargs``, within bounds."""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, Field

MAX_VARIABLES = 32
MAX_NAME_CHARS = 64
MAX_JSON_CHARS = 4096  # of all variables
MAX_NUMBER = 10**6  # a template may count up to it, or repeat a text as often
MAX_DEPTH = 4


def _check(variables: dict[str, Any]) -> dict[str, Any]:
    """Return the variables without those that say what is done anyway. Raises ValueError for what
    may be large.
    """
    if len(variables) > MAX_VARIABLES:
        raise ValueError(f"it has {len(variables)} variables; it may have at most {MAX_VARIABLES}")
    if wrong := [
        name for name in variables if len(name) > MAX_NAME_CHARS or not name.isidentifier()
    ]:
        raise ValueError(f"{wrong[0]!r:.80} is not the name of a variable")
    _check_values(list(variables.values()), MAX_DEPTH)
    if (num_chars := len(json.dumps(variables))) > MAX_JSON_CHARS:
        raise ValueError(
            f"its JSON has {num_chars} characters; it may have at most {MAX_JSON_CHARS}"
        )
    if variables.get("add_generation_prompt") is True:
        return {name: value for name, value in variables.items() if name != "add_generation_prompt"}
    return variables


def _check_values(values: list[Any], depth: int) -> None:
    if not depth and values:
        raise ValueError(f"its values are nested more than {MAX_DEPTH} deep")
    for value in values:
        if isinstance(value, int | float) and not -MAX_NUMBER <= value <= MAX_NUMBER:
            raise ValueError(f"a number in it is not between {-MAX_NUMBER} and {MAX_NUMBER}")
        if isinstance(value, dict | list):
            _check_values(list(value.values()) if isinstance(value, dict) else value, depth - 1)


TemplateVariables = Annotated[
    dict[str, Any], Field(max_length=MAX_VARIABLES), AfterValidator(_check)
]
