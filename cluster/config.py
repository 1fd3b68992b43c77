"""The one validated configuration: every flag of the command line is a key of it."""

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ByteSize, ConfigDict, Field, PositiveInt, ValidationError

from tramontane.proto.errors import ConfigError

DEMO_MODEL = Path(__file__).parent / "demo_model"


class EngineConfig(BaseModel):
    """How a pipeline is built. None means: chosen from the model and the machines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path = DEMO_MODEL
    stages: PositiveInt | None = None
    local: bool = False
    address: str | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: PositiveInt | None = None
    max_num_seqs: PositiveInt = 64
    max_num_batched_tokens: PositiveInt = 512
    max_in_flight: PositiveInt | None = Field(None, description="micro-batches in flight; stages + 1 if not given")
    page_size: PositiveInt = 16
    kv_cache_memory: ByteSize | None = Field(None, description="bytes per stage, such as 512MiB")
    threads_per_stage: PositiveInt | None = None
    link: Literal["object-store"] = "object-store"
    seed: int = 0

    @classmethod
    def build(cls, file: Path | None, flags: dict[str, Any]) -> Self:
        """Keys of the YAML file, if there is one, overridden by flags that were given."""
        keys = _read_yaml(file) if file else {}
        keys |= {name: value for name, value in flags.items() if value is not None}
        try:
            config = cls(**keys)
        except ValidationError as error:
            raise ConfigError("; ".join(_explain(problem) for problem in error.errors())) from None
        if config.local and config.address:
            raise ConfigError("--local runs without Ray, so --address cannot be used with it")
        return config


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        keys = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"--config {file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(keys, dict):
        raise ConfigError(f"--config {file} must hold keys and values, such as 'stages: 2'")
    return {str(key).replace("-", "_"): value for key, value in keys.items()}


def _explain(problem: Any) -> str:  # noqa: ANN401 - pydantic's ErrorDetails is private
    name = "--" + "-".join(str(part) for part in problem["loc"]).replace("_", "-")
    if problem["type"] == "extra_forbidden":
        return f"{name.removeprefix('--')} is not a key of the configuration"
    return f"{name} is {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
