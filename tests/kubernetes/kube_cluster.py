"""A real Kubernetes on this machine, for tests: `make kubernetes` and `make kubernetes-down`.

Every part runs in namespaces without an uplink. `run` gives any command the cluster's network and
its kubectl: `kube_cluster.py run kubectl get pods`.
"""

import argparse
import contextlib
import fcntl
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kube_builds
import kube_cgroups
import kube_control_plane
import kube_images
import kube_network
import kube_nodes
import kube_packages
from kube_paths import (
    CACHE,
    CHECKOUT,
    CLUSTER,
    CONTROL_PLANE,
    GIVEN_IMAGE,
    IMAGES,
    KUBECONFIG,
    MAX_NODES,
    node_name,
)
from kube_processes import cluster_environment, in_network, kubectl
from rich.console import Console

from tramontane.proto.errors import UserError

NUM_NODES = 6
CONSOLE = Console(stderr=True, highlight=False)


class Progress:
    """Lines that say what is done and how long it took, and what is being done."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._doing: str | None = None
        self._since = self._began
        self._status = CONSOLE.status("")

    def __enter__(self) -> "Progress":
        self._status.start()
        return self

    def __exit__(self, kind: object, *_rest: object) -> None:
        if kind is None:
            self._finish()
        self._status.stop()

    def __call__(self, text: str) -> None:
        """Begin another step."""
        self._finish()
        self._doing, self._since = text, time.monotonic()
        self._status.update(f"{text} ...")

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def _finish(self) -> None:
        if self._doing is not None:
            CONSOLE.print(f"{time.monotonic() - self._since:6.1f} s  {self._doing}")
        self._doing = None


def check_machine() -> None:
    """Raise a UserError where a cluster cannot be made."""
    if platform.system() != "Linux":
        raise UserError("Kubernetes' nodes need Linux: run this in a virtual machine with Linux")
    if os.geteuid() != 0:
        raise UserError("namespaces and mounts need root: run sudo make kubernetes")
    if not kube_cgroups.hierarchies():
        raise UserError(f"there are no control groups at {kube_cgroups.ROOT}: mount them")
    if not os.access(kube_cgroups.hierarchies()[0], os.W_OK):
        raise UserError(f"{kube_cgroups.ROOT} is read-only: use a privileged container")
    kube_network.check_namespaces()


@contextlib.contextmanager
def only_one() -> Iterator[None]:
    """Hold the lock of this machine's cluster; wait for another run that changes it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            CONSOLE.print("Waiting for another run that starts or ends the cluster.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def bring_up(num_nodes: int, image: Path | None) -> None:
    """Start what does not run yet of a cluster."""
    if not 1 <= num_nodes <= MAX_NODES:
        raise UserError(f"--nodes is {num_nodes}: it must be between 1 and {MAX_NODES}")
    with Progress() as report:
        kube_packages.install_missing(report)
        kube_builds.build_missing(report)
        report("images of the control plane")
        kube_images.create_program_images()
        kube_images.create_debian_images(report)
        if image is not None:
            _remember_image(image)
        elif not GIVEN_IMAGE.exists() and not _is_current():
            kube_images.create_stand_in(CHECKOUT, report)
            for number in filter(kube_nodes.is_whole, kube_nodes.nodes_with_folders()):
                import_images(number)
        report("starting the control plane")
        kube_control_plane.start_control_plane()
        start_nodes(range(1, num_nodes + 1), report)
        report("starting DNS and the operator")
        kube_control_plane.start_system_pods()
    CONSOLE.print(
        f"{num_nodes} nodes run, after {report.elapsed():.0f} s. Commands in the cluster's network:"
        f"\n  {_program()} run kubectl get nodes\n  {_program()} run bash",
        soft_wrap=True,
    )


def start_nodes(numbers: range | list[int], report: Callable[[str], None]) -> None:
    """Start nodes, some at a time, and wait until they are Ready."""
    missing = [number for number in numbers if not kube_nodes.is_whole(number)]
    report(f"starting {len(missing)} of {len(numbers)} nodes")
    for number in missing:
        kube_nodes.prepare_node(number)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(lambda n: kube_nodes.start_node(n, import_images), missing))
    for number in numbers:
        kube_nodes.wait_for_node(number)


def import_images(number: int) -> None:
    """Import on a node all images that the cluster has."""
    for archive in kube_nodes.program_archives():
        kube_images.import_archive(number, archive)
    for image in kube_images.debian_images():
        kube_images.import_stand_in(number, image)
    if GIVEN_IMAGE.exists():
        kube_images.import_given(number, GIVEN_IMAGE.resolve())
    else:
        kube_images.import_stand_in(number, _stand_ins()[-1])


def replace_image(image: Path | None, checkout: Path) -> None:
    """Give all nodes another image: of an archive, or the stand-in of a checkout."""
    with Progress() as report:
        if image is not None:
            _remember_image(image)
        else:
            GIVEN_IMAGE.unlink(missing_ok=True)
            kube_images.create_stand_in(checkout, report)
        for number in kube_nodes.nodes_with_folders():
            report(f"image on {node_name(number)}")
            import_images(number)
    CONSOLE.print("Pods that start from now on have the new image.")


def take_down() -> None:
    """End everything that was started and remove all but the cache."""
    with Progress() as report:
        numbers = kube_nodes.nodes_with_folders()
        report(f"ending {len(numbers)} nodes")
        with ThreadPoolExecutor(max_workers=8) as pool:
            list(pool.map(kube_nodes.stop_node, numbers))
        report("ending the control plane")
        kube_control_plane.stop_control_plane()
        kube_cgroups.end("")  # of which the folder was removed by hand
        kube_cgroups.remove()
        kube_network.remove(CONTROL_PLANE)
        for number in range(1, MAX_NODES + 1):
            kube_network.remove(node_name(number))
        report("removing files")
        kube_nodes.remove_mount_points()
        shutil.rmtree(CLUSTER, ignore_errors=True)


def remove_node(number: int) -> None:
    """End a node at once, as a machine that is switched off and not coming back."""
    kube_nodes.stop_node(number)
    kubectl("delete", "node", node_name(number), "--ignore-not-found")


def run_inside(command: list[str]) -> None:
    """Become a command in the control plane's network, with the cluster's kubectl."""
    if not KUBECONFIG.exists() or not (kube_network.NAMESPACES / CONTROL_PLANE).exists():
        raise UserError("there is no cluster: run make kubernetes")
    words = [*in_network(CONTROL_PLANE), *command]
    os.execvpe(words[0], words, os.environ | cluster_environment())


def _remember_image(image: Path) -> None:
    if not image.is_file():
        raise UserError(f"there is no image archive {image}: write one by docker save")
    IMAGES.mkdir(parents=True, exist_ok=True)
    GIVEN_IMAGE.unlink(missing_ok=True)
    GIVEN_IMAGE.symlink_to(image.resolve())


def _is_current() -> bool:
    """Whether the newest stand-in was made from this checkout as it is now."""
    return bool(_stand_ins()) and kube_images.is_current(_stand_ins()[-1], CHECKOUT)


def _stand_ins() -> list[str]:
    """The stand-ins that are complete, the newest last."""
    return sorted(path.stem for path in IMAGES.glob(f"{kube_images.STAND_IN}-*.tar"))


def _program() -> str:
    return f"{CHECKOUT / '.venv/bin/python'} {Path(__file__).relative_to(CHECKOUT)}"


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start what does not run yet")
    up.add_argument("--nodes", type=int, default=NUM_NODES)
    image = commands.add_parser("image", help="give the nodes a new image")
    image.add_argument("--checkout", type=Path, default=CHECKOUT, help="of the stand-in")
    for command in (up, image):
        command.add_argument(
            "--image", type=Path, help="archive of a real image (docker save), not the stand-in"
        )
    for name, text in (("add-node", "start a further node"), ("remove-node", "end a node")):
        commands.add_parser(name, help=text).add_argument("number", type=int)
    run = commands.add_parser("run", help="run a command in the cluster's network")
    run.add_argument("words", nargs=argparse.REMAINDER)
    commands.add_parser("down", help="end and remove everything but the cache")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Run one command."""
    options = parse(arguments)
    check_machine()
    if options.command == "run":
        run_inside(options.words or ["bash"])
    with only_one():
        if options.command == "up":
            bring_up(options.nodes, options.image)
        elif options.command == "image":
            replace_image(options.image, options.checkout.resolve())
        elif options.command == "add-node":
            with Progress() as report:
                start_nodes([options.number], report)
        elif options.command == "remove-node":
            remove_node(options.number)
        else:
            take_down()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        CONSOLE.print(f"Error: {error}", soft_wrap=True)
        sys.exit(1)
