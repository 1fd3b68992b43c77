"""The configuration and the plan for a cluster that does not exist yet, for the commands that write
its files.
"""

import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import typer

from tramontane.cluster.config.engine_config import ConfigFile, EngineConfig
from tramontane.cluster.deploy.k8s_pods import WorkerPodSpec
from tramontane.cluster.planning.hardware import Gpu, Hardware
from tramontane.cluster.planning.plan_search import plan_pipeline
from tramontane.cluster.serving.app import validate_config
from tramontane.proto.errors import ConfigError
from tramontane.proto.model_folder import is_preset, resolve_model_args
from tramontane.proto.plan import PipelinePlan

THREADS = 4  # of a stage with a GPU, which only launches kernels
FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def application_args(context: typer.Context, fixed: Collection[str]) -> dict[str, Any]:
    """Return the keys of ``--config`` and of flags, without ``fixed`` and the model, whose path
    differs there.

    Raises ConfigError if the file has such keys.
    """
    path = context.params["config"]
    keys = dict(ConfigFile.read(path).keys) if path else {}
    if others := sorted(({*fixed, "model"}) & keys.keys()):
        raise ConfigError(
            f"{', '.join(others)} (in {path}): not allowed in the file, since this command sets it"
        )
    not_args = {*fixed, "model", "config"}
    flags = {
        name: value
        for name, value in context.params.items()
        if name in EngineConfig.key_names() - not_args
    }
    return keys | {name: value for name, value in flags.items() if value is not None}


def planned_config(
    args: dict[str, Any], model: Path | None, replicas: int, max_replicas: int | None = None
) -> EngineConfig:
    """Return the configuration of the application, with the model's local path."""
    model_key = {} if model is None else {"model": model}
    presets = {"load_format": "dummy"} if model is not None and is_preset(model) else {}
    config = validate_config(
        presets | args | model_key | {"replicas": replicas, "max_replicas": max_replicas}
    )
    if config.num_draft_models:
        raise ConfigError(
            "The files of this command have no place for a draft model; use method ngram of"
            " --speculative-config"
        )
    if config.gpu_memory is None or len(config.gpu_memory) != 1:
        raise ConfigError(
            "--gpu-memory must be one size: stages over unlike GPUs are tied to nodes, "
            "and a machine or pod that is replaced is another node to Ray"
        )
    return config


def plan_on(config: EngineConfig, workers: WorkerPodSpec) -> PipelinePlan:
    """Return the plan that the cluster will make. Raises PlanError if the model does not fit."""
    number = ((config.stages or 0) + config.expert_actors) * config.max_pipelines
    gpus = (
        tuple(Gpu("gpu", workers.memory, node=str(node)) for node in range(number))
        if workers.has_gpu
        else ()
    )
    hardware = Hardware((workers.threads,) * number, (workers.memory,) * number, gpus)
    return plan_pipeline(config, resolve_model_args(config.model), hardware)


def model_folder_name(model: Path) -> str:
    """Return the name of the model's folder. Raises ConfigError for names that need quotes."""
    name = model.name if is_preset(model) else model.resolve().name
    if not FOLDER_NAME.fullmatch(name):
        raise ConfigError(
            f"--model is {model}; the folder's name may have only letters, digits, dots, dashes and"
            " underscores"
        )
    return name


def command_line(context: typer.Context, command: str, defaults: Mapping[str, object]) -> str:
    """Return the command line without ``--out``, so that equal files have equal command lines."""
    options = {
        name: value
        for name, value in context.params.items()
        if value not in (None, False) and name != "out"
    }
    words = ["tramontane", command]
    for name, value in sorted(
        options.items(), key=lambda item: list(context.params).index(item[0])
    ):
        if defaults.get(name) != value:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return shlex.join(words)
