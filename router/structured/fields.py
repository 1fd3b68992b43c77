"""How a client may want its answers to look: ``response_format``, ``tools`` and ``tool_choice`` in OpenAI's words."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class JsonSchemaFormat(_Body):
    name: str = Field(pattern=NAME)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # here every answer follows its schema


class ResponseFormat(_Body):
    """``response_format`` of a request."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class Function(_Body):
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    """One of ``tools``. Where ``strict`` is not asked for, what a schema says beyond what is supported is passed over."""

    type: Literal["function"]
    function: Function


class FunctionName(_Body):
    name: str


class ToolChoiceFunction(_Body):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | ToolChoiceFunction
