"""``tramontane cluster-yaml``: the machines that a model takes, as a file for ``ray up``."""

from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tramontane.cluster.cli.k8s import SHARED
from tramontane.cluster.config.parsers import parse_gpu_memory
from tramontane.cluster.console.options import BATCHING, flag, option, with_options
from tramontane.cluster.deploy.k8s_pods import WorkerPodSpec
from tramontane.cluster.deploy.planned_cluster import (
    THREADS,
    application_args,
    command_line,
    model_folder_name,
    plan_on,
    planned_config,
)
from tramontane.cluster.deploy.ray_up import MACHINES, MARK, InstanceType, RayUpSpec, render
from tramontane.proto.errors import ConfigError, PlanError

COMMAND_OPTIONS = {"address", "replicas", "max_replicas", "api_key_file", "expert_memory", "gpu_speed", "stages_per_gpu"}
MODELS = "/models"
DEFAULTS = {"replicas": 1, "ssh_user": "ubuntu"}


@with_options(SHARED, BATCHING)
def cluster_yaml(
    context: typer.Context,
    provider: Annotated[
        Literal["aws", "gcp", "azure", "local"], option("--provider", help="Whose machines; local: those that there are.")
    ],
    stages: Annotated[int, typer.Option("--stages", min=1, help="Machines of a pipeline, one for each stage.")],
    model: Annotated[
        Path | None, option("--model", help="Checkpoint folder, or a geometry, as for plan. Default: the demo.")
    ] = None,
    model_path: Annotated[str | None, option("--model-path", help="Of the model there. Default: /models/NAME.")] = None,
    machine: Annotated[
        str | None, option("--machine", help="Of the cloud, with one GPU of --gpu-memory. Default: the smallest that will do.")
    ] = None,
    gpu_memory: Annotated[str | None, option("--gpu-memory", help="Of each machine's GPU: 24GiB.")] = None,
    cpu: Annotated[bool, flag("--cpu", help="local: without GPUs; --gpu-memory is what each stage may use.")] = False,
    hosts: Annotated[str | None, option("--hosts", help="local: addresses, the head's first: 10.0.0.1,10.0.0.2.")] = None,
    threads_per_stage: Annotated[
        int | None, option("--threads-per-stage", help="CPU threads of a stage. Default 4, or 1 with --cpu.")
    ] = None,
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="Pipelines.")] = 1,
    wheel: Annotated[str | None, option("--wheel", help="Tramontane's: a path here, or a URL.")] = None,
    ssh_user: Annotated[str, option("--ssh-user", help="Who may log in.")] = "ubuntu",
    ssh_key: Annotated[
        str | None, option("--ssh-key", help="local: private key. Default: ~/.ssh/id_ed25519. In clouds Ray makes one.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File. Default: standard output.")] = None,
) -> None:
    """Write a file for ray up: a cluster that serves a model, one machine for each stage."""
    _check(provider, machine, gpu_memory, cpu, hosts, ssh_key)
    if out is not None and out.exists() and not (out.is_file() and out.read_text(encoding="utf-8").startswith(MARK)):
        raise ConfigError(f"{out} was not written by this command; choose another --out")
    args = application_args(context, COMMAND_OPTIONS | {"gpu_memory"})
    args.setdefault("threads_per_stage", 1 if cpu else THREADS)
    chosen, num_nodes = _machine_for(args, model, replicas, provider, machine, gpu_memory, has_gpu=not cpu)
    where = {} if model is None else {"model": model_path or f"{MODELS}/{model_folder_name(model)}"}
    file = RayUpSpec(
        command=command_line(context, "cluster-yaml", DEFAULTS),
        provider=provider,
        machine=chosen.name,
        hosts=_hosts(hosts, num_nodes) if provider == "local" else (),
        num_nodes=num_nodes,
        threads=args["threads_per_stage"],
        memory=chosen.memory if cpu else None,
        serve=where | args | ({"replicas": replicas} if replicas > 1 else {}),
        wheel=wheel or f"dist/tramontane-{version('tramontane')}-py3-none-any.whl",
        ssh_user=ssh_user,
        ssh_key=ssh_key or ("~/.ssh/id_ed25519" if provider == "local" else None),
    )
    if out is None:
        typer.echo(render(file), nl=False)
        return
    out.write_text(render(file), encoding="utf-8")
    typer.echo(f"wrote {out}: {num_nodes} machines with a stage each{f', {chosen.name}' if chosen.name else ''}")


def _check(provider: str, machine: str | None, gpu_memory: str | None, cpu: bool, hosts: str | None, ssh_key: str | None) -> None:
    if provider == "local":
        if machine is not None:
            raise ConfigError("--machine is for clouds; say by --gpu-memory what your machines have")
        if gpu_memory is None:
            raise ConfigError("--provider local needs --gpu-memory, which says what each machine has, such as 24GiB")
        return
    for flag_name, given in {"--hosts": hosts, "--cpu": cpu, "--ssh-key": ssh_key}.items():
        if given:
            raise ConfigError(f"{flag_name}: only with --provider local")
    if (machine is None) != (gpu_memory is None):
        raise ConfigError("--machine and --gpu-memory belong together: give both, or neither for the smallest that will do")


def _machine_for(
    args: dict[str, Any], model: Path | None, replicas: int, provider: str, named: str | None, memory: str | None, has_gpu: bool
) -> tuple[InstanceType, int]:
    """And how many of them. Raises PlanError if the model does not fit."""
    if memory is not None:
        sizes = parse_gpu_memory(memory)
        candidates: tuple[InstanceType, ...] = (InstanceType(named or "", sizes[0] if sizes and len(sizes) == 1 else 0),)
    else:
        candidates = MACHINES[provider]
    for machine in candidates:
        config = planned_config(args | {"gpu_memory": memory or str(machine.memory)}, model, replicas)
        try:
            plan = plan_on(config, WorkerPodSpec(config.threads_per_stage or 1, machine.memory, has_gpu))
        except PlanError:
            if machine is candidates[-1]:
                raise
        else:
            return machine, (len(plan.stages) + config.expert_actors) * replicas
    raise AssertionError("there is at least one machine")


def _hosts(given: str | None, num_nodes: int) -> tuple[str, ...]:
    if given is None:
        return tuple(f"HOST-{number}" for number in range(1, num_nodes + 1))
    hosts = tuple(host.strip() for host in given.split(","))
    if len(set(hosts)) != len(hosts) or not all(hosts):
        raise ConfigError(f"--hosts is {given!r}; it must be addresses, all different, with commas between them")
    if len(hosts) not in (num_nodes, num_nodes + 1):
        raise ConfigError(
            f"--hosts has {len(hosts)} address{'es' * (len(hosts) > 1)} for {num_nodes} stage{'s' * (num_nodes > 1)}; "
            "give one for each, or one more, which is then a head without a stage"
        )
    return hosts
