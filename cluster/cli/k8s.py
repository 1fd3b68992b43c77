"""``tramontane k8s``: the pods that a model needs, as a kustomize overlay."""

import re
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from tramontane.cluster.config.engine_keys import BatchingKeys
from tramontane.cluster.console.options import flag, flags_of, key_option, option, with_options
from tramontane.cluster.console.output_files import check_replaceable, writing
from tramontane.cluster.deploy.k8s_overlay import FILES, MARK, Overlay, overlay_files
from tramontane.cluster.deploy.k8s_pods import WorkerPodSpec
from tramontane.cluster.deploy.planned_cluster import (
    THREADS,
    application_args,
    command_line,
    model_folder_name,
    plan_on,
    planned_config,
)
from tramontane.proto.errors import ConfigError

# Pods are alike: the keys that they share are options of this command and of cluster-yaml.
SHARED_KEYS = (
    *("stages", "dtype", "quantize", "max_model_len", "page_size", "kv_cache_memory", "threads_per_stage", "link"),
    *("step_timeout", "expert_actors", "expert_replicas"),
)
FIXED_KEYS = {  # which a file of --config must not have
    *("placement_timeout", "ingress_replicas", "api_key_file", "replicas", "max_replicas"),
    *("expert_memory", "gpu_speed", "stages_per_gpu"),  # pods and their GPUs are alike, and have a stage each
}
IMAGE_NAME = re.compile(r"\S+:[\w.-]+")

ModelHere = Annotated[
    Path | None,
    key_option("model", help="Checkpoint folder here, or a published geometry, as for plan. Default: the demo model."),
]
THREADS_HELP = f"CPU threads of a stage. Default: {THREADS}, or 1 with --cpu."
ThreadsThere = Annotated[int | None, key_option("threads_per_stage", help=THREADS_HELP)]


@with_options(*SHARED_KEYS, *flags_of(BatchingKeys))
def k8s(
    context: typer.Context,
    stages: Annotated[int, key_option("stages", min=1, help="Pods of a pipeline, one for each stage.")],
    gpu_memory: Annotated[str, key_option("gpu_memory", help="Memory of each GPU, one per stage and expert actor: 24GiB.")],
    out: Annotated[Path, option("--out", "-o", help="Folder to write the overlay to.")],
    model: ModelHere = None,
    cpu: Annotated[bool, flag("--cpu", help="Without GPUs; --gpu-memory is what each stage may use.")] = False,
    threads_per_stage: ThreadsThere = None,
    replicas: Annotated[int, key_option("replicas", min=1, help="Pipelines.")] = 1,
    max_replicas: Annotated[int | None, key_option("max_replicas", min=1, help="Pipelines under high load.")] = None,
    redis: Annotated[bool, flag("--redis", help="Ray's head keeps its state in Redis, and may be replaced.")] = False,
    image: Annotated[str | None, option("--image", help="NAME:TAG of the image that k8s/Dockerfile builds.")] = None,
    base: Annotated[str, option("--base", help="The folder k8s/ of Tramontane, relative to --out.")] = "../..",
) -> None:
    """Write a kustomize overlay that serves a model by the KubeRay operator, one pod for each stage."""
    _check_folder(out)
    image = image or f"registry.example.com/tramontane:{version('tramontane')}-{'cpu' if cpu else 'cuda'}"
    if not IMAGE_NAME.fullmatch(image):
        raise ConfigError(f"--image is {image!r}; it must have a tag, such as registry.example.com/tramontane:1")
    args = application_args(context, FIXED_KEYS)
    args.setdefault("threads_per_stage", 1 if cpu else THREADS)
    config = planned_config(args, model, replicas, max_replicas)
    workers = WorkerPodSpec(config.threads_per_stage or 1, config.gpu_memory[0] if config.gpu_memory else 0, not cpu)
    plan = plan_on(config, workers)
    overlay = Overlay(
        command=command_line(context, "k8s", {"replicas": 1, "base": "../.."}),
        args=args,
        config=config,
        plan=plan,
        model=None if model is None else model_folder_name(model),
        workers=workers,
        redis=redis,
        image=image,
        base=base,
    )
    with writing(out, "--out"):
        _write(overlay_files(overlay), out)
    pods = (len(plan.stages) + config.expert_actors) * replicas
    typer.echo(f"wrote {out}: {pods} pods with {gpu_memory} each, the ingress pods and the head; kubectl apply -k {out}")
    needed = out / base / "base"
    if "//" not in base and not needed.is_dir():  # kubectl reads URLs
        typer.echo(f"the overlay needs {needed}, which does not exist: copy Tramontane's k8s/ to {out / base}, or give --base")


def _write(files: dict[str, str], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if name in files:
            (out / name).write_text(files[name], encoding="utf-8")
        else:
            (out / name).unlink(missing_ok=True)


def _check_folder(out: Path) -> None:
    """Raise ConfigError if no folder can be there, or a file is in it that the command has not written."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; give a folder")
    for path in (out / name for name in FILES):
        if path.exists():
            check_replaceable(path, MARK, "--out")
