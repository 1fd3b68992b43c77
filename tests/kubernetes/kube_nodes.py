"""The nodes: each has a network and a mount namespace with containerd, kubelet and kube-proxy."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import kube_cgroups
import kube_images
import kube_network
import yaml
from kube_certificates import (
    AUTHORITY,
    certificate_file,
    config_file,
    create_node_certificate,
    key_file,
)
from kube_paths import (
    BINARIES,
    CLUSTER,
    DNS_SERVICE,
    IMAGES,
    NODES,
    PODS,
    node_address,
    node_name,
    pod_range,
)
from kube_processes import in_network, inside, is_running, running_pid, start, stop, wait_until

SERVICE_NAMES = ("proxy", "kubelet", "containerd")
# folders of this machine in whose place a node sees its own
OWN_FOLDERS = {
    "/run": "run",
    "/var/log": "log",
    "/var/lib/cni": "lib-cni",
    "/var/lib/containerd": "lib-containerd",
    "/var/lib/kubelet": "lib-kubelet",
}
CREATED_FOLDERS = CLUSTER / "created-folders.json"  # those of this machine that were missing
CAP_SYS_RESOURCE = 24


def nodes_with_folders() -> list[int]:
    """The numbers of the nodes that were made, whether they run or not."""
    names = {node_name(number): number for number in range(1, 100)}
    found = NODES.iterdir() if NODES.exists() else []
    return sorted(names[path.name] for path in found if path.name in names)


def is_whole(number: int) -> bool:
    """Whether all services of a node run."""
    return all(is_running(f"{node_name(number)}-{service}") for service in SERVICE_NAMES)


def prepare_node(number: int) -> None:
    """Make what a node needs, from nothing: its folders, network, certificate and settings.

    A node of which a part is missing is made anew, as a machine that was replaced.
    """
    stop_node(number)
    name = node_name(number)
    for own in OWN_FOLDERS.values():
        (NODES / name / own).mkdir(parents=True)
    kube_network.create_node(number, [n for n in nodes_with_folders() if n != number])
    create_node_certificate(number)
    for group in (kube_cgroups.SERVICES, kube_cgroups.PODS):
        kube_cgroups.create(f"{name}/{group}")
    _create_mount_points()
    _write_settings(number)


def start_node(number: int, images: Callable[[int], None]) -> None:
    """Start a node that was prepared; ``images`` imports what it has before its kubelet starts."""
    name = node_name(number)
    folder = NODES / name
    group = f"{name}/{kube_cgroups.SERVICES}"
    separate = ["unshare", "--mount", "--propagation=private", "sh", "-ec", _mounts(folder)]
    start(f"{name}-containerd", group, [*in_network(name), *separate])
    socket = folder / "run" / "containerd" / "containerd.sock"
    wait_until(f"{name}'s containerd", socket.is_socket, 60, f"{name}-containerd")
    images(number)
    here = [*in_network(name), f"--mount=/proc/{running_pid(f'{name}-containerd')}/ns/mnt"]
    start(
        f"{name}-kubelet",
        group,
        [
            *(*here, str(BINARIES / "kubelet"), f"--config={folder / 'kubelet.yaml'}"),
            *(f"--kubeconfig={config_file(name)}", f"--hostname-override={name}"),
            f"--node-ip={node_address(number)}",
        ],
    )
    proxy = [str(BINARIES / "kube-proxy"), f"--config={folder / 'proxy.yaml'}"]
    start(f"{name}-proxy", group, [*here, *proxy])


def wait_for_node(number: int) -> None:
    """Wait until a node is Ready."""
    path = "{.status.conditions[?(@.type=='Ready')].status}"
    command = ["kubectl", "get", "node", node_name(number), f"--output=jsonpath={path}"]
    wait_until(
        f"{node_name(number)}'s registration",
        lambda: inside(command).stdout == "True",
        180,
        f"{node_name(number)}-kubelet",
    )


def stop_node(number: int) -> None:
    """End a node's services and its pods, and remove all that is left of it."""
    name = node_name(number)
    for service in ("proxy", "kubelet"):
        stop(f"{name}-{service}")
    kube_cgroups.end(f"{name}/{kube_cgroups.PODS}")
    stop(f"{name}-containerd", grace_s=3)
    kube_cgroups.end(name)  # shims of containers, which outlive containerd
    kube_cgroups.remove(name)
    kube_network.remove(name)
    shutil.rmtree(NODES / name, ignore_errors=True)


def remove_mount_points() -> None:
    """Remove the folders of this machine that were made as places of mounts."""
    if CREATED_FOLDERS.exists():
        for path in json.loads(CREATED_FOLDERS.read_text()):
            if Path(path).is_dir() and not any(Path(path).iterdir()):
                Path(path).rmdir()


def _create_mount_points() -> None:
    created = json.loads(CREATED_FOLDERS.read_text()) if CREATED_FOLDERS.exists() else []
    missing = [path for path in OWN_FOLDERS if not Path(path).exists()]
    if missing:
        CREATED_FOLDERS.write_text(json.dumps([*created, *missing]))
        for path in missing:
            Path(path).mkdir()


def _mounts(folder: Path) -> str:
    """Shell that makes a node's mounts and becomes its containerd."""
    binds = "\n".join(f"mount --bind {folder / own} {path}" for path, own in OWN_FOLDERS.items())
    resolver = os.path.realpath("/etc/resolv.conf")
    return f"""mount --make-rshared /
    if [ -e {resolver} ]; then mount --bind {folder / "resolv.conf"} {resolver}; fi
    {binds}
    exec containerd --config {folder / "containerd.toml"}"""


def _write_settings(number: int) -> None:
    """Write the configuration files of a node's services."""
    name = node_name(number)
    folder = NODES / name
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # there is none: fail at once
    (folder / "containerd.toml").write_text(_containerd_settings(folder))
    (folder / "cni").mkdir()
    (folder / "cni" / "10-pods.conflist").write_text(json.dumps(_pod_network(number)))
    (folder / "kubelet.yaml").write_text(yaml.safe_dump(_kubelet_settings(number)))
    (folder / "proxy.yaml").write_text(yaml.safe_dump(_proxy_settings(number)))


def _may_lower_oom_scores() -> bool:
    status = Path("/proc/self/status").read_text()
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    return bool(effective >> CAP_SYS_RESOURCE & 1)


def _containerd_settings(folder: Path) -> str:
    restrict = "false" if _may_lower_oom_scores() else "true"
    unused = ", ".join(
        f'"io.containerd.snapshotter.v1.{name}"' for name in ("aufs", "btrfs", "devmapper", "zfs")
    )
    return f"""version = 2
disabled_plugins = [{unused}]
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{kube_images.PAUSE}"
  disable_apparmor = true
  restrict_oom_score_adj = {restrict}
  netns_mounts_under_state_dir = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder / "cni"}"
"""


def _pod_network(number: int) -> dict[str, object]:
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": pod_range(number)}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    plugins = [
        {"type": "ptp", "ipMasq": False, "ipam": addresses},
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ]
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": plugins}


def _kubelet_settings(number: int) -> dict[str, object]:
    name = node_name(number)
    folder = NODES / name
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(certificate_file(AUTHORITY))},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(certificate_file(name)),
        "tlsPrivateKeyFile": str(key_file(name)),
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "oomScoreAdj": -999 if _may_lower_oom_scores() else 0,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{kube_cgroups.GROUP}/{name}/{kube_cgroups.PODS}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [DNS_SERVICE],
        "clusterDomain": "cluster.local",
        "resolvConf": str(folder / "resolv.conf"),
        "volumePluginDir": str(folder / "volume-plugins"),
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": "200Mi",
            "nodefs.available": "2%",
            "imagefs.available": "2%",
        },
    }


def _proxy_settings(number: int) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(config_file("proxy"))},
        "hostnameOverride": node_name(number),
        "mode": "iptables",
        "clusterCIDR": PODS,
        "oomScoreAdj": -999 if _may_lower_oom_scores() else 0,
        "conntrack": {
            "maxPerCore": 0,  # of the machine, which has one table
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
        "iptables": {"minSyncPeriod": "200ms"},
    }


def program_archives() -> list[Path]:
    """The archives of the images that every node has."""
    return [IMAGES / f"{program}.tar" for program in ("pause", "coredns", "manager")]
