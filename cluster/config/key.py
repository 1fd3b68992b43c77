"""How a key of the configuration is declared."""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr
from pydantic.fields import FieldInfo

# Larger numbers are mistakes: what is allocated in advance has to stay small.
PositiveInt = Annotated[int, Field(ge=1, le=2**24)]
SmallInt = Annotated[int, Field(ge=1, le=2**14)]
Seconds = Annotated[float, Field(ge=0, le=86_400)]
PositiveSeconds = Annotated[float, Field(gt=0, le=86_400)]
Text = Annotated[str, Field(min_length=1)]
SecretText = Annotated[SecretStr, Field(min_length=1)]


def key(
    default: Any,  # noqa: ANN401 - of the field's type
    description: str,
    *,
    unset: str = "",
    metavar: str | None = None,
    alias: str | None = None,
    has_flag: bool = True,
    in_serve_config: bool = True,
    defines_pipeline: bool = False,
) -> Any:  # noqa: ANN401 - pydantic's Field is declared so, too
    """Declare a key: its default, its description, and what flags and documentation need to know about it.

    Args:
        default: The value if the key is not given.
        description: Full sentences for ``--help`` and docs/configuration.md.
        unset: What applies if the key is not given, in words, where the default value does not show it.
        metavar: How ``--help`` names the value; the type's name if it is None.
        alias: The name in files and flags if it cannot be the field's.
        has_flag: False for a key that only files may have.
        in_serve_config: False if a Ray Serve config must not have the key.
        defines_pipeline: True if pipelines with different values of the key are different pipelines.
    """
    extra = {
        "unset": unset,
        "metavar": metavar,
        "has_flag": has_flag,
        "in_serve_config": in_serve_config,
        "defines_pipeline": defines_pipeline,
    }
    return Field(default, description=description, alias=alias, json_schema_extra=extra)  # type: ignore[arg-type]


class KeyGroup(BaseModel):
    """Keys that belong together; ``title`` heads them in ``--help`` and in the documentation."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    title: ClassVar[str]


def extra(field: FieldInfo) -> dict[str, Any]:
    """Return what ``key`` was given beyond the default and the description."""
    assert isinstance(field.json_schema_extra, dict)
    return dict(field.json_schema_extra)


def keys_with(keys: type[BaseModel], **words: bool) -> set[str]:
    """Return the fields for which ``key`` was given these words, such as ``has_flag=False``, by their names in files."""
    return {field.alias or name for name, field in keys.model_fields.items() if words.items() <= extra(field).items()}
