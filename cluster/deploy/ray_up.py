"""Files for ``ray up``: the machine types of the clouds, and the values of the template
``clouds/ray_up.yaml.j2``.
"""

import json
import shlex
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from tramontane.cluster.config.ray_settings import RAY_SETTINGS, SERVE_SETTINGS, monitoring_settings
from tramontane.proto.units import GIB

MARK = "# Written by: "
# in the home folder of every node, and of the head
SETTINGS_FILE, SERVE_FILE = "tramontane.env", "tramontane.yaml"
ROLE_LABEL = "tramontane-role"
GCS_PORT = 6379
STORE_BYTES = GIB  # Ray's object store on each node: some micro-batches of hidden states
DISK_GIB = 256
# ``ray down`` does not switch off machines of one's own: a node that loses its head for this time
# ends, and the remaining Ray processes on it are stopped, unless Ray has been started again.
ORPHAN_TIMEOUT_S = 15
STOP_ORPHANS = (
    "tail --pid=$(pgrep -nx raylet) -f /dev/null; sleep 15; pgrep -x raylet || ray stop --force"
)
SDKS = MappingProxyType(  # Ray's autoscaler on the head node starts machines with these
    {
        "aws": ("boto3",),
        "gcp": ("google-api-python-client", "google-auth", "cryptography"),
        "azure": (
            *("azure-core", "azure-identity", "azure-mgmt-compute", "azure-mgmt-network"),
            *("azure-mgmt-resource", "azure-common", "msrest", "msrestazure"),
        ),
    }
)


@dataclass(frozen=True, slots=True)
class InstanceType:
    """A machine with one GPU; ``memory`` is the memory that CUDA reports, rounded down: less than
    the nominal size.
    """

    name: str
    memory: int


MACHINES = MappingProxyType(  # the smallest GPU first
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
HEAD_INSTANCES = MappingProxyType(
    {"aws": "m7i.xlarge", "gcp": "n2-standard-4", "azure": "Standard_D4s_v5"}
)


@dataclass(frozen=True, slots=True)
class RayUpSpec:
    """A cluster for ``ray up``.

    ``serve`` holds the keys of ``tramontane serve --config``. ``memory``: of a stage without a GPU.
    ``hosts``: addresses of existing machines, the head's first; empty for clouds.
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
        """True if there are no more hosts than stages. A cloud's head is a small machine in
        addition to them.
        """
        return bool(self.hosts) and len(self.hosts) == self.num_nodes


def render(spec: RayUpSpec) -> str:
    """Return the text of the file."""
    is_url = "://" in spec.wheel
    ray_settings = dict(RAY_SETTINGS) | (
        {"gcs_rpc_server_reconnect_timeout_s": ORPHAN_TIMEOUT_S} if spec.hosts else {}
    )
    return _template().render(
        asdict(spec),
        stage_on_head=spec.stage_on_head,
        head_machine=HEAD_INSTANCES.get(spec.provider),
        sdks=SDKS.get(spec.provider),
        settings={"RAY_AUTH_MODE": "token", **SERVE_SETTINGS, **monitoring_settings()},
        ray_settings=ray_settings,
        serve_config={"address": "auto", **spec.serve},
        wheel_is_url=is_url,
        wheel_there=shlex.quote(spec.wheel) if is_url else f"~/{PurePosixPath(spec.wheel).name}",
    )


@cache
def _template() -> Template:
    folder = FileSystemLoader(Path(__file__).parents[1] / "clouds")
    environment = Environment(
        loader=folder,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"json": json.dumps, "shell": shlex.quote, "yaml": _to_yaml}
    environment.globals |= {name: value for name, value in globals().items() if name.isupper()}
    return environment.get_template("ray_up.yaml.j2")


def _to_yaml(text: str) -> str:
    """Return a scalar, in quotes only if YAML needs them."""
    return str(yaml.safe_dump(text, width=float("inf"))).removesuffix("...\n").strip()
