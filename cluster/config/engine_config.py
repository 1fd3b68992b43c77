"""The validated configuration, and its files."""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import yaml
from pydantic import ValidationError, model_validator

from tramontane.cluster.config.engine_keys import (
    DEMO_MODEL,
    SEQS_ON_CPUS,
    BatchingKeys,
    ExpertKeys,
    PipelineKeys,
    RunKeys,
)
from tramontane.cluster.config.key import (
    KeyGroup,
    absolute_database,
    absolute_folder,
    describe_wrong_value,
    extra,
    keys_with,
)
from tramontane.cluster.config.logging import LogSettings
from tramontane.cluster.config.measurements import StageTime
from tramontane.cluster.config.serving_keys import JobKeys, LoggingKeys, ScalingKeys, ServingKeys
from tramontane.proto.errors import ConfigError, did_you_mean
from tramontane.proto.model_folder import RandomWeights, WeightSource, is_preset
from tramontane.proto.plan import MAX_DRAFTED_STEPS

logger = logging.getLogger(__name__)

GROUPS: tuple[type[KeyGroup], ...] = (
    *(
        PipelineKeys,
        ExpertKeys,
        BatchingKeys,
        RunKeys,
        ServingKeys,
        ScalingKeys,
        JobKeys,
        LoggingKeys,
    ),
)
PIPELINES_PER_INGRESS = 16
SECRETS = {"jobs_database", "jobs_storage"}  # may contain a password


class EngineConfig(
    LoggingKeys, JobKeys, ScalingKeys, ServingKeys, RunKeys, BatchingKeys, ExpertKeys, PipelineKeys
):  # backwards: pydantic takes the fields of the last base first
    """All keys, flat. None: chosen from the model and the machines."""

    @model_validator(mode="before")
    @classmethod
    def _accept_other_names(cls, keys: dict[str, Any]) -> dict[str, Any]:
        return with_first_names(keys)

    @classmethod
    def key_names(cls) -> set[str]:
        """Return the keys' names in files and flags."""
        return {field.alias or name for name, field in cls.model_fields.items()}

    @property
    def model_name(self) -> str:
        """The name of the model in answers; the first name in ``/v1/models``."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names by which clients may call the model."""
        if self.served_model_name is not None:
            return tuple(name.strip() for name in self.served_model_name.split(","))
        return (
            "demo" if self.model.resolve() == DEMO_MODEL.resolve() else self.model.resolve().name,
        )

    @property
    def num_drafts(self) -> int:
        """The maximum number of drafts of a sequence in flight: as many micro-batches have drafts
        as there are stages, if that is known.
        """
        if self.speculative_config is None:
            return 0
        return self.speculative_config.max_drafts(
            1 if self.local else self.stages or MAX_DRAFTED_STEPS
        )

    @property
    def num_draft_models(self) -> int:
        """The actors of a pipeline that draft: 1 with a draft model."""
        return int(
            self.speculative_config is not None and self.speculative_config.method == "draft_model"
        )

    @property
    def max_pipelines(self) -> int:
        """The largest number of pipelines at a time."""
        return self.max_replicas or self.replicas

    @property
    def num_ingresses(self) -> int:
        """The ingress replicas: the configured number, else 1 for one pipeline, 2 for up to 32
        pipelines, 4 for 64.

        One replica is one process, which takes part of the tokens of all pipelines. With two, one
        serves while the other is replaced.
        """
        if self.ingress_replicas is not None or self.max_pipelines == 1:
            return self.ingress_replicas or 1
        return max(2, math.ceil(self.max_pipelines / PIPELINES_PER_INGRESS))

    def single_pipeline(self) -> Self:
        """Return the configuration with one pipeline: the file may have been written for
        ``serve``.
        """
        return self.model_copy(update={"replicas": 1, "max_replicas": None})

    def sized_for(self, num_seqs: int, length: int | None = None) -> Self:
        """Return the configuration with no more cache than ``num_seqs`` sequences of ``length``
        positions fill.

        Without ``length``, and where ``max_model_len`` is given, a sequence may be as long as
        before. Drafts have rows, too.
        """
        num_rows = num_seqs * (
            1 + (self.speculative_config.num_speculative_tokens if self.speculative_config else 0)
        )
        most = num_rows if num_rows <= SEQS_ON_CPUS else None  # None: left to the planner
        sizes = {
            "max_num_seqs": most if self.max_num_seqs is None else min(self.max_num_seqs, num_rows),
            "max_model_len": self.max_model_len or length,
        }
        return self.model_copy(update=sizes)

    @property
    def weights(self) -> WeightSource:
        """The source of every stage's weights."""
        return RandomWeights() if self.load_format == "dummy" else self.model.resolve()

    @property
    def logs(self) -> LogSettings:
        """The level and format of the processes' logs."""
        return LogSettings(self.log_format, self.log_level)

    def with_absolute_paths(self) -> Self:
        """Return the configuration for processes with another working directory."""
        model = self.model if is_preset(self.model) else self.model.resolve()
        drafts = self.speculative_config
        if self.num_draft_models and drafts is not None:
            drafts = replace(drafts, model=str(Path(drafts.model).resolve()))
        return self.model_copy(
            update={
                "model": model,
                "speculative_config": drafts,
                "api_key_file": self.api_key_file and self.api_key_file.absolute(),
                "jobs_database": self.jobs_database and absolute_database(self.jobs_database),
                "jobs_storage": self.jobs_storage and absolute_folder(self.jobs_storage),
            }
        )

    def without_secrets(self) -> Self:
        """Return the configuration without API keys, for processes that do not check keys."""
        return self.model_copy(update={"api_key": (), "api_key_file": None})

    @classmethod
    def build(cls, file: "ConfigFile | None", flags: dict[str, Any]) -> Self:
        """Merge the keys of the file, if there is one, with the flags that were given (None: not
        given), which override it.

        Raises ConfigError for values that are not allowed, alone or together.
        """
        keys = (file.keys if file else {}) | _given(flags)
        try:
            config = cls(**keys)
        except ValidationError as error:
            raise ConfigError(
                "; ".join(_format_error(problem) for problem in error.errors())
            ) from None
        config.check_combinations()
        return config

    def check_combinations(self) -> None:
        """Raise ConfigError for values that are not allowed together."""
        if self.max_pipelines < self.replicas:
            raise ConfigError(
                f"--max-replicas is {self.max_replicas}; it must be at least --replicas, which is"
                f" {self.replicas}"
            )
        if self.served_model_name is not None and (
            not all(names := self.model_names) or len(set(names)) < len(names)
        ):
            raise ConfigError(
                f"--served-model-name is {self.served_model_name!r}; it must be names, all"
                " different, with commas between them"
            )
        if self.local:
            self._check_local()
        if self.dashboard and self.address:
            raise ConfigError(
                "--dashboard is for a Ray cluster that serve starts; the one at --address has its"
                " own, or none"
            )
        if self.address and self.inline_hidden_states_below is not None:
            raise ConfigError(
                "--inline-hidden-states-below is for a Ray cluster that this command starts;"
                " for another give"
                ' ray start --head --system-config=\'{"max_direct_call_object_size":'
                f" {self.inline_hidden_states_below:d}}}'"
            )
        if self.load_format == "auto" and is_preset(self.model):
            raise ConfigError(
                f"--model is {self.model}, a published geometry without weights; "
                "give a checkpoint's folder, or --load-format dummy for random weights"
            )

    def _check_local(self) -> None:
        """Raise ConfigError for values that need Ray."""
        if self.address:
            raise ConfigError("--local runs without Ray, so --address cannot be used with it")
        if self.inline_hidden_states_below is not None:
            raise ConfigError(
                "--local runs without Ray, so --inline-hidden-states-below cannot be used with it"
            )
        if self.link == "direct":
            raise ConfigError(
                "--local keeps all stages in one process without links, so --link direct cannot be"
                " used with it"
            )
        if self.expert_actors:
            raise ConfigError(
                "--local keeps everything in one process, so --expert-actors cannot be used with it"
            )
        if self.num_draft_models:
            raise ConfigError(
                "--local keeps everything in one process, so --speculative-config cannot have a"
                " draft model with it"
            )


def with_first_names(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys with their first names: ``block_size`` becomes ``page_size``. Warns of names
    from 0.2.

    Raises ConfigError if two of them are names of one key.
    """
    given_as: dict[str, str] = {}
    for given in keys:
        name = OTHER_NAMES.get(given, given)
        if name in given_as:
            raise ConfigError(f"{given_as[name]} and {given} are names of one key; keep {name}")
        given_as[name] = given
        if given in FORMER_NAMES:
            logger.warning("%s", describe_former_name(given, name))
    return {name: keys[given] for name, given in given_as.items()}


def describe_former_name(former: str, name: str) -> str:
    """Return the warning about a key or a flag that was given by its name of 0.2."""
    return f"{former} is called {name} now; version 0.4 will refuse the former name"


FORMER_NAMES = frozenset(
    former
    for field in EngineConfig.model_fields.values()
    for former in extra(field)["former_names"]
)
OTHER_NAMES = MappingProxyType(
    {
        other: name
        for name, field in EngineConfig.model_fields.items()
        for other in (*extra(field)["other_names"], *extra(field)["former_names"])
    }
)
# the only keys that are inside the value of another
STAGE_TIME_KEYS = tuple(field.name for field in fields(StageTime))
PIPELINE_KEYS = keys_with(EngineConfig, defines_pipeline=True)
CLI_ONLY_KEYS = keys_with(EngineConfig, in_serve_config=False)


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The YAML file of ``--config``: keys and values."""

    path: Path
    keys: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file. Raises ConfigError if it cannot be read, is not valid YAML or has unknown
        keys.
        """
        try:
            text = path.read_text(encoding="utf-8")
            keys, twice = (
                yaml.safe_load(text) or {},
                _repeated_key(yaml.compose(text, yaml.SafeLoader)),
            )
        except OSError as error:
            raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
        except yaml.MarkedYAMLError as error:
            raise ConfigError(f"--config {path} is not valid YAML{_position(error)}") from None
        except (yaml.YAMLError, UnicodeDecodeError):
            raise ConfigError(
                f"--config {path} is not valid YAML: it holds characters that are not allowed"
            ) from None
        if twice:
            raise ConfigError(f"--config {path} has {twice} twice; remove one of them")
        if not isinstance(keys, dict):
            raise ConfigError(f"--config {path} must hold keys and values, such as 'stages: 2'")
        try:
            keys = with_first_names(
                {str(key).replace("-", "_"): value for key, value in keys.items()}
            )
        except ConfigError as error:
            raise ConfigError(f"--config {path}: {error}") from None
        if unknown := [key for key in keys if key not in EngineConfig.key_names()]:
            raise ConfigError(
                "; ".join(f"{key} (in {path}): no such key{_hint(key)}" for key in unknown)
            )
        return cls(path, keys)

    def named_in(self, message: str, flags: dict[str, Any]) -> str:
        """Name the options of a message by the file's keys: ``--stages is 9`` becomes ``stages (in
        file.yaml) is 9``.

        ``--stage-times[0].last`` becomes ``stage_times[0].last (in file.yaml)``. An option that was
        given as a flag keeps its dashes.
        """

        def name(option: re.Match[str]) -> str:
            key = option[1].replace("-", "_")
            return (
                f"{key}{option[2]} (in {self.path})"
                if key in self.keys.keys() - _given(flags).keys()
                else option[0]
            )

        return re.sub(r"--([a-z][a-z-]*)((?:\[\d+\]|\.\w+)*)", name, message)


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the given flags: the others are None, or () if a flag may be repeated."""
    return {name: value for name, value in flags.items() if value is not None and value != ()}


def _hint(unknown: str) -> str:
    # of several names that begin with it the last counts, so the shortest: stages of stage
    known = sorted(EngineConfig.key_names(), key=lambda name: (-len(name), name))
    return did_you_mean(unknown, known) or "; tramontane config prints all keys"


def _repeated_key(node: yaml.Node | None) -> str:
    """Return a key that a mapping of the file has twice, with - or with _, and the line of the
    second; else "".
    """
    if isinstance(node, yaml.SequenceNode):
        return next(filter(None, map(_repeated_key, node.value)), "")
    if not isinstance(node, yaml.MappingNode):
        return ""
    seen = set[str]()
    for key, value in node.value:
        name = str(key.value).replace("-", "_")
        if name in seen:
            return f"{key.value!s:.100} (again in line {key.start_mark.line + 1})"
        seen.add(name)
        if inner := _repeated_key(value):
            return inner
    return ""


def _position(error: yaml.MarkedYAMLError) -> str:
    """Return the position of the error, without the text there, which may be an API key."""
    mark = error.problem_mark or error.context_mark
    return f": line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def _format_error(problem: Any) -> str:  # pydantic's ErrorDetails is private
    first, *inner = problem["loc"]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inner)
    name = f"--{str(first).replace('_', '-')}{path}"
    if problem["type"] == "extra_forbidden":
        return f"{first} is not a key of the configuration{_hint(str(first))}"
    if first in SECRETS:
        return f"{name} must be a text that is not empty"
    if problem["type"] == "unexpected_keyword_argument":
        hint = (
            did_you_mean(str(inner[-1]), STAGE_TIME_KEYS)
            or f"; its keys are {', '.join(STAGE_TIME_KEYS)}"
        )
        return f"{name} is not a key of a stage's time{hint}"
    if problem["type"] == "missing":
        return f"{name} is missing"
    return describe_wrong_value(name, problem)
