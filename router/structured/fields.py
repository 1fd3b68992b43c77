"""Request fields that constrain answers: OpenAI's ``response_format``, ``tools`` and ``tool_choice``."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class JsonSchemaFormat(_Body):
    """A named JSON schema that the answer follows."""

    name: str = Field(pattern=NAME)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # ignored: every answer follows its schema


class ResponseFormat(_Body):
    """``response_format`` of a request."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class Function(_Body):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    """One of ``tools``. Without ``strict``, unsupported keywords of its schema are ignored."""

    type: Literal["function"]
    function: Function


class FunctionName(_Body):
    """Name of a function."""

    name: str


class ToolChoiceFunction(_Body):
    """A ``tool_choice`` that requires one tool."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | ToolChoiceFunction
