"""``tramontane k8s`` and ``tramontane cluster-yaml``: files for the pods or machines that a model
needs.
"""

import re
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tramontane.cluster.config.engine_keys import BatchingKeys
from tramontane.cluster.config.key import parse_gpu_memory
from tramontane.cluster.console.options import flag, flags_of, key_option, option, with_options
from tramontane.cluster.console.terminal import check_replaceable, writing
from tramontane.cluster.deploy.helm_chart import CHART_FILE, OPTIONAL_TEMPLATES, chart_files
from tramontane.cluster.deploy.k8s_documents import ServedModel
from tramontane.cluster.deploy.k8s_overlay import (
    FILES,
    OWN_BASE,
    Overlay,
    overlay_files,
    own_files,
)
from tramontane.cluster.deploy.k8s_overlay import MARK as OVERLAY_MARK
from tramontane.cluster.deploy.k8s_pieces import BASE, NAME, check_name
from tramontane.cluster.deploy.k8s_pods import WorkerPodSpec
from tramontane.cluster.deploy.planned_cluster import (
    THREADS,
    application_args,
    command_line,
    model_folder_name,
    plan_on,
    planned_config,
)
from tramontane.cluster.deploy.ray_up import MACHINES, InstanceType, RayUpSpec, render
from tramontane.cluster.deploy.ray_up import MARK as RAY_UP_MARK
from tramontane.proto.errors import ConfigError, PlanError

# Pods are alike: their common keys are options of this command and of cluster-yaml.
SHARED_KEYS = (
    *("stages", "dtype", "quantize", "batch_invariant", "max_model_len"),
    *("page_size", "kv_cache_memory", "kv_cache_dtype", "threads_per_stage", "link"),
    *("step_timeout", "expert_actors", "expert_replicas"),
)
K8S_FIXED_KEYS = {  # which a file of --config must not have
    *("placement_timeout", "ingress_replicas", "api_key_file", "replicas", "max_replicas"),
    # pods and their GPUs are alike, and have a stage each
    *("expert_memory", "gpu_speed", "stages_per_gpu"),
}
IMAGE_NAME = re.compile(r"\S+:[\w.-]+")

RAY_UP_FIXED_KEYS = {
    "address",
    "replicas",
    "max_replicas",
    "api_key_file",
    "expert_memory",
    "gpu_speed",
    "stages_per_gpu",
}
OVERLAY, MACHINES_THERE = "Overlay", "Machines"  # titles of groups of options
MODELS_FOLDER = "/models"
DEFAULT_BASE = "../.."
K8S_DEFAULTS = {"replicas": 1, "spare_stages": 0, "name": NAME, "base": DEFAULT_BASE}
RAY_UP_DEFAULTS = {"replicas": 1, "ssh_user": "ubuntu"}

ModelHere = Annotated[
    Path | None,
    key_option(
        "model",
        help=(
            "Checkpoint folder here, or a published geometry, as for plan. Default: the demo model."
        ),
    ),
]
THREADS_HELP = f"CPU threads of a stage. Default: {THREADS}, or 1 with --cpu."
ThreadsThere = Annotated[int | None, key_option("threads_per_stage", help=THREADS_HELP)]

MACHINE_HELP = (
    "The cloud's machine type, with one GPU of --gpu-memory. Default: the smallest that fits."
)
Machine = Annotated[str | None, option("--machine", help=MACHINE_HELP, panel=MACHINES_THERE)]
SSH_KEY_HELP = "local: private key. Default: ~/.ssh/id_ed25519. In clouds Ray creates one."
SshKey = Annotated[str | None, option("--ssh-key", help=SSH_KEY_HELP, panel=MACHINES_THERE)]


@with_options(*SHARED_KEYS, *flags_of(BatchingKeys))
def k8s(
    context: typer.Context,
    stages: Annotated[
        int, key_option("stages", min=1, help="Pods of a pipeline, one for each stage.")
    ],
    gpu_memory: Annotated[
        str,
        key_option("gpu_memory", help="Memory of each GPU, one per stage and expert actor: 24GiB."),
    ],
    out: Annotated[Path, option("--out", "-o", help="Folder to write the overlay to.")],
    model: ModelHere = None,
    cpu: Annotated[
        bool, flag("--cpu", help="Without GPUs; --gpu-memory is what each stage may use.")
    ] = False,
    threads_per_stage: ThreadsThere = None,
    replicas: Annotated[int, key_option("replicas", min=1, help="Pipelines.")] = 1,
    max_replicas: Annotated[
        int | None, key_option("max_replicas", min=1, help="Pipelines under high load.")
    ] = None,
    spare_stages: Annotated[
        int,
        option(
            "--spare-stages",
            min=0,
            help="More pods for stages than there are stages: one takes over at once.",
            panel=OVERLAY,
        ),
    ] = 0,
    redis: Annotated[
        bool,
        flag(
            "--redis",
            help="Ray's head keeps its state in Redis, and may be replaced.",
            panel=OVERLAY,
        ),
    ] = False,
    image: Annotated[
        str | None,
        option("--image", help="NAME:TAG of the image that k8s/Dockerfile builds.", panel=OVERLAY),
    ] = None,
    helm: Annotated[
        bool, flag("--helm", help="Write a Helm chart in place of an overlay.", panel=OVERLAY)
    ] = False,
    name: Annotated[
        str,
        option(
            "--name",
            help="Of all objects: each model of a namespace needs another. The overlay of another"
            " name has all its manifests itself.",
            panel=OVERLAY,
        ),
    ] = NAME,
    base: Annotated[
        str | None,
        option(
            "--base",
            help="The folder k8s/ of Tramontane, relative to --out, or . to write its files too."
            " Default: ../.., or . with --name.",
            panel=OVERLAY,
        ),
    ] = None,
) -> None:
    """Write a kustomize overlay or a Helm chart that serves a model by the KubeRay operator, one
    pod for each stage.
    """
    _check_folder(out)
    base = _checked_base(name, base, helm)
    command = command_line(context, "k8s", K8S_DEFAULTS)
    args = application_args(context, K8S_FIXED_KEYS)
    args.setdefault("threads_per_stage", 1 if cpu else THREADS)
    config = planned_config(args, model, replicas, max_replicas)
    workers = WorkerPodSpec(
        config.threads_per_stage or 1, config.gpu_memory[0] if config.gpu_memory else 0, not cpu
    )
    served = ServedModel(
        name=name,
        args=args,
        config=config,
        plan=plan_on(config, workers),
        model=None if model is None else model_folder_name(model),
        workers=workers,
        spare_stages=spare_stages,
        redis=redis,
        image=_checked_image(image, cpu),
    )
    with writing(out, "--out"):
        if helm:
            _write_chart(chart_files(served, command), out)
        else:
            _write(Overlay(served, command, base), out)
    apply = f"helm install NAME {out}" if helm else f"kubectl apply -k {out}"
    num_pods = served.pods_per_pipeline * replicas + spare_stages
    typer.echo(
        f"wrote {out}: {num_pods} pods with {gpu_memory} each, the"
        f" ingress pods and the head; {apply}"
    )
    if not helm:
        _warn_without_base(out, base)


def _checked_base(name: str, base: str | None, helm: bool) -> str:
    """Return the folder of other manifests. Raises ConfigError if the name is none, or the options
    do not go together.
    """
    check_name(name, "--name")
    if helm and (base is not None or name != NAME):
        raise ConfigError(
            "--helm: a chart has no base, and its objects have the name of the release; leave out"
            " --name and --base"
        )
    base = base or (DEFAULT_BASE if name == NAME else OWN_BASE)
    if name != NAME and base != OWN_BASE:
        raise ConfigError(f"--base has manifests of the name {NAME}; leave it out with --name")
    return base


def _warn_without_base(out: Path, base: str) -> None:
    needed = out / base / BASE
    if "//" not in base and not needed.is_dir():  # kubectl reads URLs
        typer.echo(
            f"the overlay needs {needed}, which does not exist: give --base . to write it into the"
            f" overlay, or copy Tramontane's k8s/ to {out / base}"
        )


def _checked_image(image: str | None, cpu: bool) -> str:
    """Return the image, or a placeholder for it. Raises ConfigError if it has no tag."""
    if image is None:
        return f"registry.example.com/tramontane:{version('tramontane')}-{'cpu' if cpu else 'cuda'}"
    if not IMAGE_NAME.fullmatch(image):
        raise ConfigError(
            f"--image is {image!r}; it must have a tag, such as registry.example.com/tramontane:1"
        )
    return image


def _write(overlay: Overlay, out: Path) -> None:
    """Write an overlay. Other manifests that are there stay, since they have settings of the user,
    but for those of the base.
    """
    out.mkdir(parents=True, exist_ok=True)
    own = own_files(overlay)
    for path in (out / name for name in own if name.startswith(f"{BASE}/")):
        path.parent.mkdir(exist_ok=True)
        check_replaceable(path, OVERLAY_MARK, "--out")
    files = overlay_files(overlay)
    for name in FILES:
        if name in files:
            (out / name).write_text(files[name], encoding="utf-8")
        else:
            (out / name).unlink(missing_ok=True)
    for name, text in own.items():
        path = out / name
        if name.startswith(f"{BASE}/") or not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")


def _write_chart(files: dict[str, str], out: Path) -> None:
    """Write a chart. Raises ConfigError if one of its files is there, but no chart of ours."""
    if not (out / CHART_FILE).exists():
        for name in files:
            if (out / name).exists():
                raise ConfigError(
                    f"{out / name} was not written by this command; choose another --out"
                )
    for folder in {(out / name).parent for name in files}:
        folder.mkdir(parents=True, exist_ok=True)
    check_replaceable(out / CHART_FILE, OVERLAY_MARK, "--out")
    for path in (out / "templates").iterdir():
        if path.name in OPTIONAL_TEMPLATES:
            path.unlink()
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8")


def _check_folder(out: Path) -> None:
    """Raise ConfigError if the folder cannot be created, or contains a file that the command has
    not written.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; give a folder")
    for path in (out / name for name in FILES):
        if path.exists():
            check_replaceable(path, OVERLAY_MARK, "--out")


# ---- ray up


@with_options(*SHARED_KEYS, *flags_of(BatchingKeys))
def cluster_yaml(
    context: typer.Context,
    provider: Annotated[
        Literal["aws", "gcp", "azure", "local"],
        option("--provider", help="The cloud; local: machines that exist.", panel=MACHINES_THERE),
    ],
    stages: Annotated[
        int, key_option("stages", min=1, help="Machines of a pipeline, one for each stage.")
    ],
    model: ModelHere = None,
    model_path: Annotated[
        str | None,
        option(
            "--model-path",
            help="The model's path there. Default: /models/NAME.",
            panel=MACHINES_THERE,
        ),
    ] = None,
    machine: Machine = None,
    gpu_memory: Annotated[
        str | None, key_option("gpu_memory", help="Memory of each machine's GPU: 24GiB.")
    ] = None,
    cpu: Annotated[
        bool, flag("--cpu", help="local: without GPUs; --gpu-memory is what each stage may use.")
    ] = False,
    hosts: Annotated[
        str | None,
        option(
            "--hosts",
            help="local: addresses, the head's first: 10.0.0.1,10.0.0.2.",
            panel=MACHINES_THERE,
        ),
    ] = None,
    threads_per_stage: ThreadsThere = None,
    replicas: Annotated[int, key_option("replicas", min=1, help="Pipelines.")] = 1,
    wheel: Annotated[
        str | None,
        option("--wheel", help="Tramontane's wheel: a path here, or a URL.", panel=MACHINES_THERE),
    ] = None,
    ssh_user: Annotated[
        str, option("--ssh-user", help="User of the machines.", panel=MACHINES_THERE)
    ] = "ubuntu",
    ssh_key: SshKey = None,
    out: Annotated[
        Path | None, option("--out", "-o", help="File to write. Default: standard output.")
    ] = None,
) -> None:
    """Write a file for ray up: a cluster that serves a model, one machine for each stage."""
    _check_options(provider, machine, gpu_memory, cpu, hosts, ssh_key)
    if out is not None:
        check_replaceable(out, RAY_UP_MARK, "--out")
    args = application_args(context, RAY_UP_FIXED_KEYS | {"gpu_memory"})
    args.setdefault("threads_per_stage", 1 if cpu else THREADS)
    chosen, num_nodes = _machine_for(
        args, model, replicas, provider, machine, gpu_memory, has_gpu=not cpu
    )
    model_key = (
        {}
        if model is None
        else {"model": model_path or f"{MODELS_FOLDER}/{model_folder_name(model)}"}
    )
    file = RayUpSpec(
        command=command_line(context, "cluster-yaml", RAY_UP_DEFAULTS),
        provider=provider,
        machine=chosen.name,
        hosts=_hosts(hosts, num_nodes) if provider == "local" else (),
        num_nodes=num_nodes,
        threads=args["threads_per_stage"],
        memory=chosen.memory if cpu else None,
        serve=model_key | args | ({"replicas": replicas} if replicas > 1 else {}),
        wheel=wheel or f"dist/tramontane-{version('tramontane')}-py3-none-any.whl",
        ssh_user=ssh_user,
        ssh_key=ssh_key or ("~/.ssh/id_ed25519" if provider == "local" else None),
    )
    if out is None:
        typer.echo(render(file), nl=False)
        return
    with writing(out, "--out"):
        out.write_text(render(file), encoding="utf-8")
    typer.echo(
        f"wrote {out}: {num_nodes} machines with one stage"
        f" each{f', {chosen.name}' if chosen.name else ''}"
    )


def _check_options(
    provider: str,
    machine: str | None,
    gpu_memory: str | None,
    cpu: bool,
    hosts: str | None,
    ssh_key: str | None,
) -> None:
    if provider == "local":
        if machine is not None:
            raise ConfigError("--machine is for clouds; give --gpu-memory of your machines instead")
        if gpu_memory is None:
            raise ConfigError(
                "--provider local needs --gpu-memory, the memory of each machine's GPU, such as"
                " 24GiB"
            )
        return
    for flag_name, value in {"--hosts": hosts, "--cpu": cpu, "--ssh-key": ssh_key}.items():
        if value:
            raise ConfigError(f"{flag_name}: only with --provider local")
    if (machine is None) != (gpu_memory is None):
        raise ConfigError(
            "--machine and --gpu-memory belong together: give both, or neither for the smallest"
            " machine that fits"
        )


def _machine_for(
    args: dict[str, Any],
    model: Path | None,
    replicas: int,
    provider: str,
    name: str | None,
    memory: str | None,
    has_gpu: bool,
) -> tuple[InstanceType, int]:
    """Return the machine type and the number of machines. Raises PlanError if the model does not
    fit.
    """
    if memory is not None:
        sizes = parse_gpu_memory(memory)
        candidates: tuple[InstanceType, ...] = (
            InstanceType(name or "", sizes[0] if sizes and len(sizes) == 1 else 0),
        )
    else:
        candidates = MACHINES[provider]
    for machine in candidates:
        config = planned_config(
            args | {"gpu_memory": memory or str(machine.memory)}, model, replicas
        )
        try:
            plan = plan_on(
                config, WorkerPodSpec(config.threads_per_stage or 1, machine.memory, has_gpu)
            )
        except PlanError:
            if machine is candidates[-1]:
                raise
        else:
            return machine, (len(plan.stages) + config.expert_actors) * replicas
    raise AssertionError("there is at least one machine")


def _hosts(text: str | None, num_nodes: int) -> tuple[str, ...]:
    if text is None:
        return tuple(f"HOST-{number}" for number in range(1, num_nodes + 1))
    hosts = tuple(host.strip() for host in text.split(","))
    if len(set(hosts)) != len(hosts) or not all(hosts):
        raise ConfigError(
            f"--hosts is {text!r}; it must be addresses, all different, with commas between them"
        )
    if len(hosts) not in (num_nodes, num_nodes + 1):
        raise ConfigError(
            f"--hosts has {len(hosts)} address{'es' * (len(hosts) > 1)} for {num_nodes}"
            f" stage{'s' * (num_nodes > 1)}; give one for each, or one more, which is then a head"
            " without a stage"
        )
    return hosts
