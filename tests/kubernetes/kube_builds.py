"""Kubernetes, CoreDNS and the KubeRay operator, built from Go modules and kept in the cache.

The modules come from the Go module proxy. Kubernetes' own go.mod names its staging modules by
folders of its repository, so that it can be built there only: ours replaces them by the versions
that Kubernetes publishes of them.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from kube_paths import BINARIES, BUILDS, CACHE, LOGS

from tramontane.proto.errors import UserError

KUBERNETES = "34.4"  # the version after "v1." of Kubernetes, after "v0." of its staging modules
KUBERNETES_BINARIES = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "kubectl",
)
COREDNS = "v1.15.0"
COREDNS_PLUGINS = ("reload", "health", "ready", "errors", "log", "cache", "kubernetes")
KUBERAY_MODULE = "github.com/ray-project/kuberay/ray-operator"
KUBERAY_SOURCE = "KUBERAY_SOURCE"
OPERATOR_MANIFESTS = BUILDS / "kuberay" / "config"

# a process of a pod's own network namespace, which does nothing
PAUSE = """package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for received := range signals {
		if received != syscall.SIGCHLD {
			os.Exit(0)
		}
		for {
			if pid, _ := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 {
				break
			}
		}
	}
}
"""


def find_go() -> str:
    """The go command, or a UserError."""
    found = shutil.which("go") or shutil.which("/usr/local/go/bin/go")
    if found is None:
        raise UserError("Kubernetes is built with Go: install Go 1.26 and put it into PATH")
    return found


def build_missing(report: Callable[[str], None]) -> None:
    """Build what the cache does not have; ``report`` gets what is being built."""
    BINARIES.mkdir(parents=True, exist_ok=True)
    for name in KUBERNETES_BINARIES:
        if not (BINARIES / name).exists():
            report(f"building {name} 1.{KUBERNETES}")
            build(_kubernetes_module(), f"k8s.io/kubernetes/cmd/{name}", name, _version_flags())
    if not (BINARIES / "coredns").exists():
        report(f"building CoreDNS {COREDNS}")
        build(_coredns_module(), ".", "coredns")
    if not (BINARIES / "pause").exists():
        report("building pause")
        folder = _module("pause", "module pause\n\ngo 1.24\n")
        (folder / "main.go").write_text(PAUSE)
        build(folder, ".", "pause")
    if not (BINARIES / "manager").exists() or _operator_is_another():
        report("building the KubeRay operator")
        build(_operator_source(), ".", "manager")
        (BINARIES / "manager.source").write_text(os.environ.get(KUBERAY_SOURCE, ""))


def build(module: Path, package: str, name: str, linker_flags: str = "") -> None:
    """Build a package of a module into the cache's binary ``name``."""
    unfinished = BINARIES / f".{name}"
    _go(
        ["build", "-ldflags", f"-s -w {linker_flags}", "-o", str(unfinished), package],
        module,
    )
    unfinished.rename(BINARIES / name)


def _go(arguments: list[str], folder: Path) -> str:
    """Run go in a folder of the cache, with modules and objects kept there; its output."""
    environment = os.environ | {
        "CGO_ENABLED": "0",
        "GOFLAGS": f"-mod=mod -modcacherw -trimpath -buildvcs=false -p={os.cpu_count() or 1}",
        "GOMODCACHE": str(CACHE / "modules"),
        "GOCACHE": str(CACHE / "objects"),
        "GOWORK": "off",
    }
    done = subprocess.run(
        # that no build is left behind when this program is killed
        ["setpriv", "--pdeathsig", "TERM", "nice", "-n", "10", find_go(), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        LOGS.mkdir(parents=True, exist_ok=True)
        (LOGS / "go.log").write_text(done.stdout + done.stderr)
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(
            f"go {arguments[0]} failed in {folder} ({last}): see {LOGS / 'go.log'}, and whether"
            " the Go module proxy answers"
        )
    return done.stdout


def download(module: str, version: str) -> dict[str, str]:
    """A module of the proxy: its folder, its go.mod, its version."""
    BUILDS.mkdir(parents=True, exist_ok=True)
    answer: dict[str, str] = json.loads(
        _go(["mod", "download", "-json", f"{module}@{version}"], BUILDS)
    )
    return answer


def _module(name: str, definition: str) -> Path:
    """The folder of a module of ours, with its go.mod."""
    folder = BUILDS / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "go.mod").write_text(definition)
    return folder


def _kubernetes_module() -> Path:
    """A module that can build the commands of Kubernetes."""
    folder = BUILDS / "kubernetes"
    if (folder / "go.mod").exists():
        return folder
    published = Path(download("k8s.io/kubernetes", f"v1.{KUBERNETES}")["GoMod"]).read_text()
    return _module("kubernetes", replace_staging_modules(published, KUBERNETES))


def replace_staging_modules(published: str, version: str) -> str:
    """The go.mod of a module that builds Kubernetes, from Kubernetes' own.

    "k8s.io/api v0.0.0" with "k8s.io/api => ./staging/src/k8s.io/api" becomes
    "k8s.io/api v0.34.4" with "k8s.io/api => k8s.io/api v0.34.4".
    """
    staging = re.findall(r"^\t(k8s\.io/[a-z-]+) => \./staging/", published, re.MULTILINE)
    head = re.findall(r"^(?:go|godebug) .*$", published, re.MULTILINE)
    required = re.findall(r"^require \(\n.*?^\)\n", published, re.MULTILINE | re.DOTALL)
    return "\n".join(
        [
            "module kubernetes.build",
            "",
            *head,
            f"require k8s.io/kubernetes v1.{version}",
            *(block.replace(" v0.0.0\n", f" v0.{version}\n") for block in required),
            "replace (",
            *(f"\t{name} => {name} v0.{version}" for name in staging),
            ")",
            "",
        ]
    )


def _version_flags() -> str:
    """Linker flags by which Kubernetes' binaries know their version."""
    package = "k8s.io/component-base/version"
    values = {
        "gitVersion": f"v1.{KUBERNETES}",
        "gitMajor": "1",
        "gitMinor": KUBERNETES.split(".")[0],
        "gitTreeState": "clean",
        "gitCommit": "0" * 40,
        "buildDate": "1970-01-01T00:00:00Z",
    }
    return " ".join(f"-X {package}.{name}={value}" for name, value in values.items())


def _coredns_module() -> Path:
    """CoreDNS with the plugins that a cluster without an uplink needs."""
    folder = _module(
        "coredns", f"module dns\n\ngo 1.26\n\nrequire github.com/coredns/coredns {COREDNS}\n"
    )
    (folder / "go.sum").unlink(missing_ok=True)
    imports = "".join(f'\t_ "github.com/coredns/coredns/plugin/{p}"\n' for p in COREDNS_PLUGINS)
    names = ", ".join(f'"{p}"' for p in COREDNS_PLUGINS)
    (folder / "main.go").write_text(
        "package main\n\nimport (\n"
        '\t"github.com/coredns/coredns/core/dnsserver"\n'
        '\t"github.com/coredns/coredns/coremain"\n\n'
        f"{imports})\n\nfunc main() {{\n"
        f"\tdnsserver.Directives = []string{{{names}}}\n\tcoremain.Run()\n}}\n"
    )
    return folder


def _operator_is_another() -> bool:
    """Whether the operator in the cache was built from another source than is asked for."""
    wanted = os.environ.get(KUBERAY_SOURCE)
    return wanted is not None and (BINARIES / "manager.source").read_text() != wanted


def _operator_source() -> Path:
    """A copy of the operator's source: of the folder that is given, or of the newest module."""
    given = os.environ.get(KUBERAY_SOURCE)
    if given is None:
        source = Path(download(KUBERAY_MODULE, "latest")["Dir"])
    else:
        source = Path(given).expanduser()
        if not (source / "config" / "crd").is_dir():
            raise UserError(
                f"{KUBERAY_SOURCE} is {given}, which has no config/crd: name the folder"
                " ray-operator of KubeRay's repository"
            )
    definitions = source / "config" / "crd" / "bases" / "ray.io_rayservices.yaml"
    if "authOptions" not in definitions.read_text():
        raise UserError(
            f"the KubeRay operator in {source} is older than 1.5.1 and knows no authOptions, which"
            f" the overlays need: set {KUBERAY_SOURCE} to the folder ray-operator of a newer one"
        )
    copy = BUILDS / "kuberay"
    if copy.exists():
        shutil.rmtree(copy)
    shutil.copytree(source, copy, copy_function=shutil.copyfile)
    return copy
