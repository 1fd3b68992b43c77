"""Machines with one GPU that clouds rent out, the smallest GPU first, and what the head node runs on.

A file for ``ray up``: from what is to be served and on which machines, its text. Pure.
"""

import json
import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any

import yaml

from tramontane.cluster.config.ray_settings import RAY_SETTINGS, SERVE_SETTINGS
from tramontane.proto.byte_size import GIB


@dataclass(frozen=True, slots=True)
class InstanceType:
    """``memory`` is what CUDA shows of the GPU, rounded down: less than the name says."""

    name: str
    memory: int


MACHINES = MappingProxyType(
    {
        "aws": (
            InstanceType("g6.2xlarge", 22 * GIB),
            InstanceType("g6e.2xlarge", 44 * GIB),
            InstanceType("p5.4xlarge", 79 * GIB),
        ),
        "gcp": (
            InstanceType("g2-standard-8", 22 * GIB),
            InstanceType("a2-highgpu-1g", 39 * GIB),
            InstanceType("a2-ultragpu-1g", 79 * GIB),
        ),
        "azure": (
            InstanceType("Standard_NV36ads_A10_v5", 22 * GIB),
            InstanceType("Standard_NC24ads_A100_v4", 79 * GIB),
            InstanceType("Standard_NC40ads_H100_v5", 93 * GIB),
        ),
    }
)
HEAD_INSTANCES = MappingProxyType({"aws": "m7i.xlarge", "gcp": "n2-standard-4", "azure": "Standard_D4s_v5"})

MARK = "# Written by: "
NAME = "tramontane"  # of the cluster
SETTINGS_FILE, SERVE_FILE = "tramontane.env", "tramontane.yaml"  # at home on every node, and on the head
TOKEN = "~/.ray/auth_token"
ROLE_LABEL, HEAD, STAGE = "tramontane-role", "head", "stage"
STORE_BYTES = GIB  # Ray's object store on each node: some micro-batches of hidden states
DISK_GIB = 256
GCS_PORT = 6379
ORPHANED_S = 15  # after which a node of machines that ``ray down`` does not switch off misses its head and ends
# What Ray then still leaves on it is stopped, unless Ray has been started again.
STOP_ORPHANS = "tail --pid=$(pgrep -nx raylet) -f /dev/null; sleep 15; pgrep -x raylet || ray stop --force"
SDKS = {  # with which Ray's autoscaler on the head node asks for machines
    "aws": ("boto3",),
    "gcp": ("google-api-python-client", "google-auth", "cryptography"),
    "azure": (
        *("azure-core", "azure-identity", "azure-mgmt-compute", "azure-mgmt-network"),
        *("azure-mgmt-resource", "azure-common", "msrest", "msrestazure"),
    ),
}


@dataclass(frozen=True, slots=True)
class RayUpSpec:
    """``serve`` is for ``tramontane serve --config``; ``memory`` what a stage without a GPU may use.

    ``hosts``: addresses of machines that there are, the head's first.
    """

    command: str
    provider: str
    machine: str
    hosts: tuple[str, ...]
    num_nodes: int
    threads: int
    memory: int | None
    serve: dict[str, Any]
    wheel: str
    ssh_user: str
    ssh_key: str | None

    @property
    def stage_on_head(self) -> bool:
        """Where there are no more hosts than stages. A cloud's head is a small machine beside them."""
        return bool(self.hosts) and len(self.hosts) == self.num_nodes


def render(file: RayUpSpec) -> str:
    document = {"cluster_name": NAME, **_machines(file), **_software(file), **_ray(file)}
    needed = "rsync" if file.memory else "rsync, a driver for CUDA, gcc and Python's headers (Triton compiles with them)"
    lines = [
        f"{MARK}{file.command}",
        "# In capitals: what to fill in. The token that Ray will ask for is made once, by: ray get-auth-token --generate",
        f"# On every node: Python 3.11 or later with venv, {needed}"
        f"{f', and the model at {model}' if (model := file.serve.get('model')) else ''}.",
        f"# ray up FILE; ray exec FILE 'ray status', until {file.num_nodes + (not file.stage_on_head)} nodes are active; then:",
        f"# ray exec FILE 'tramontane serve --config {SERVE_FILE}'",
    ]
    return "\n".join(lines) + "\n" + yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Long commands over several lines, as they are typed."""


def _folded(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=">" if len(text) > 100 else None)


_Dumper.add_representer(str, _folded)


def _machines(file: RayUpSpec) -> dict[str, Any]:
    auth: dict[str, Any] = {"ssh_user": file.ssh_user}
    if file.ssh_key is not None:
        auth["ssh_private_key"] = file.ssh_key
    if file.hosts:
        head, *workers = file.hosts
        count = len(workers)
        provider = {"type": "local", "head_ip": head, "worker_ips": workers}
        return {"provider": provider, "auth": auth, "min_workers": count, "max_workers": count}
    providers: dict[str, dict[str, Any]] = {
        "aws": {"region": "us-west-2"},
        "gcp": {"region": "us-central1", "availability_zone": "us-central1-a", "project_id": "PROJECT"},
        "azure": {"location": "westus2", "resource_group": NAME},
    }
    count = file.num_nodes
    types = {
        HEAD: {"resources": {"CPU": 0}, "node_config": _node(file.provider, HEAD_INSTANCES[file.provider])},
        STAGE: {
            **{"min_workers": count, "max_workers": count, "resources": {"CPU": file.threads, "GPU": 1}},
            "node_config": _node(file.provider, file.machine),
        },
    }
    return {
        **{"provider": {"type": file.provider, **providers[file.provider]}, "auth": auth, "max_workers": count},
        **{"available_node_types": types, "head_node_type": HEAD},
    }


def _node(provider: str, machine: str) -> dict[str, Any]:
    """The same image for all: Ray wants the same Python everywhere."""
    if provider == "aws":
        disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": DISK_GIB, "VolumeType": "gp3"}}
        return {"InstanceType": machine, "ImageId": "AMI", "BlockDeviceMappings": [disk]}
    if provider == "gcp":
        boot: dict[str, Any] = {"boot": True, "autoDelete": True, "type": "PERSISTENT"}
        boot["initializeParams"] = {"diskSizeGb": DISK_GIB, "sourceImage": "IMAGE"}
        stop = [{"onHostMaintenance": "TERMINATE"}]  # machines with GPUs cannot be moved
        return {"machineType": machine, "disks": [boot], "scheduling": stop}
    image = {"imagePublisher": "PUBLISHER", "imageOffer": "OFFER", "imageSku": "SKU", "imageVersion": "latest"}
    return {"azure_arm_parameters": {"vmSize": machine, **image}}


def _software(file: RayUpSpec) -> dict[str, Any]:
    """What is installed, into a virtual environment of its own, and set for every shell and thus for all that Ray starts."""
    is_url = "://" in file.wheel
    wheel = file.wheel if is_url else f"~/{PurePosixPath(file.wheel).name}"
    pip, name = "~/tramontane/bin/python -m pip install", shlex.quote(wheel) if is_url else wheel
    settings = {"RAY_AUTH_MODE": "token", **SERVE_SETTINGS}
    lines = ["export PATH=~/tramontane/bin:$PATH", *(f"export {name}={value}" for name, value in settings.items())]
    serve = json.dumps({"address": "auto", **file.serve})  # which is YAML, too
    return {
        "file_mounts": {TOKEN: TOKEN, **({} if is_url else {wheel: file.wheel})},
        "setup_commands": [
            "test -x ~/tramontane/bin/python || python3 -m venv ~/tramontane",
            f"{pip} {name}",
            f"{pip} --force-reinstall --no-deps {name}",  # pip leaves what has the same version, however it was built
            f"printf '%s\\n' {' '.join(map(shlex.quote, lines))} > ~/{SETTINGS_FILE}",
            f"grep -qs {SETTINGS_FILE} ~/.bashrc || echo '. ~/{SETTINGS_FILE}' >> ~/.bashrc",
        ],
        "head_setup_commands": [
            *([f"{pip} {' '.join(sdks)}"] if (sdks := SDKS.get(file.provider)) else []),
            f"echo {shlex.quote(serve)} > ~/{SERVE_FILE}",
        ],
        "worker_setup_commands": [],
    }


def _ray(file: RayUpSpec) -> dict[str, Any]:
    """``ray up`` sets OMP_NUM_THREADS to 1, which Ray would leave to all actors, whatever cores they have."""
    before = "unset OMP_NUM_THREADS; ulimit -Sn hard"
    common = f"--object-store-memory={STORE_BYTES} --disable-usage-stats"
    ray_settings: dict[str, Any] = dict(RAY_SETTINGS)
    if file.hosts:
        ray_settings["gcs_rpc_server_reconnect_timeout_s"] = ORPHANED_S
        # Machines that cannot reach the internet do not know their own address: theirs is the one that ssh has come to.
        before += "; set -- $SSH_CONNECTION"
        common += " --node-ip-address=$3"
    # Version 2 replaces machines; with those that there are it counts on states that only version 1 keeps.
    autoscaler = f"export RAY_enable_autoscaler_v2={0 if file.hosts else 1}"
    offered = f"--num-cpus={file.threads}" + ("" if file.memory is None else f" --memory={file.memory}")
    head = offered if file.stage_on_head else "--num-cpus=0 --num-gpus=0"
    config = f"--autoscaling-config=~/ray_bootstrap_config.yaml --system-config={shlex.quote(json.dumps(ray_settings))}"
    label = f"--labels={ROLE_LABEL}"
    after = f" && (setsid nohup sh -c {shlex.quote(STOP_ORPHANS)} > /dev/null 2>&1 &)" if file.hosts else ""
    return {
        "head_start_ray_commands": [
            "ray stop",
            f"{before}; {autoscaler}; ray start --head --port={GCS_PORT} {head} {common} {label}={HEAD} {config}",
        ],
        "worker_start_ray_commands": [
            "ray stop",
            f"{before}; ray start --address=$RAY_HEAD_IP:{GCS_PORT} {offered} {common} {label}={STAGE}{after}",
        ],
    }
