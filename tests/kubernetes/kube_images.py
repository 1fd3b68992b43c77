"""The cluster's images: of one program each, and the stand-in for the image of k8s/Dockerfile.

The stand-in is a checkout's environment in Debian's root file system. Its archive has a marker
file only; on each node its snapshot is filled with hard links, so that any number of nodes share
one copy on the disk and in the page cache.
"""

import hashlib
import io
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kube_dockerfile
import kube_packages
import yaml
from kube_paths import BINARIES, CHECKOUT, CLUSTER, IMAGES, NODES, node_name

from tramontane.proto.errors import UserError

PAUSE, DNS, OPERATOR = "localhost/pause:1", "localhost/dns:1", "localhost/kuberay-operator:1"
STAND_IN = "tramontane"
# images of one program of Debian: the package, and the folder of k8s/ that names the image
DEBIAN_IMAGES = {"redis": ("redis-server", "redis"), "rclone": ("rclone", "models-volume")}
MARKER = ".standin-"
ENVIRONMENT = Path("opt/tramontane")  # as in k8s/Dockerfile
NAMES_FILE = IMAGES / "names.json"


def create_program_images() -> None:
    """Create the archives of pause, CoreDNS and the operator."""
    for name, program in ((PAUSE, "pause"), (DNS, "coredns"), (OPERATOR, "manager")):
        binary = BINARIES / program
        archive = IMAGES / f"{program}.tar"
        if archive.exists() and archive.stat().st_mtime > binary.stat().st_mtime:
            continue
        files = {
            f"/{program}": (binary.read_bytes(), 0o755),
            "/etc/passwd": (b"root:x:0:0::/:\nnonroot:x:65532:65532::/:\n", 0o644),
            "/etc/nsswitch.conf": (b"hosts: files dns\n", 0o644),
        }
        config = {"Entrypoint": [f"/{program}"], "User": "65532:65532"}
        _write_archive(archive, [name], config, files)


ROOMS = ("proto", "workers", "router", "cluster")
PROJECT_FILES = ("pyproject.toml", "README.md", "LICENSE")
IMAGE_FILES = ("k8s/Dockerfile", "k8s/ray", ".venv/.installed")


def source_key(checkout: Path) -> str:
    """A digest of the times and sizes of what a checkout's stand-in is made from."""
    files = [checkout / name for name in (*PROJECT_FILES, *IMAGE_FILES)]
    for room in ROOMS:
        found = sorted((checkout / room).rglob("*"))
        files += [path for path in found if path.is_file() and path.suffix != ".pyc"]
    states = [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in files]
    return hashlib.sha256(repr(states).encode()).hexdigest()


def is_current(image: str, checkout: Path) -> bool:
    """Whether a stand-in was made from a checkout as it is now."""
    return (IMAGES / f"{image}.key").read_text() == source_key(checkout)


def create_stand_in(checkout: Path, report: Callable[[str], None]) -> str:
    """Create the tree and the archive of a checkout's stand-in; return its number.

    Every call makes another one, as containers still run on the snapshots of the last.
    """
    settings = kube_dockerfile.read_target(checkout / "k8s" / "Dockerfile", "cpu")
    root = kube_packages.root_file_system([*settings.packages, "python3"], report)
    report(f"linking the environment of {checkout}")
    key = source_key(checkout)
    number = f"{STAND_IN}-{time.time_ns() // 1_000_000}"
    tree = IMAGES / number
    tree.mkdir(parents=True)
    _link(root, tree)
    _add_user(tree, settings)
    _add_environment(checkout, tree)
    for name, target in settings.files:
        file = tree / target.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(checkout / name, file)
    for old in IMAGES.glob(f"{STAND_IN}-*"):
        if old.name < number:
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    (IMAGES / f"{number}.key").write_text(key)
    _archive_marker(number, application_names(), settings.config())
    return number


def create_debian_images(report: Callable[[str], None]) -> None:
    """Create the trees and the archives of the images with one program of Debian."""
    for number, (package, folder) in zip(debian_images(), DEBIAN_IMAGES.values(), strict=True):
        if (IMAGES / f"{number}.tar").exists():
            continue
        tree = IMAGES / number
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        _link(kube_packages.root_file_system([package], report), tree)
        config = {"Env": [f"PATH={kube_dockerfile.BASE_PATH}"], "Cmd": [package]}
        _archive_marker(number, [_image_name(CHECKOUT / "k8s" / folder)], config)


def debian_images() -> list[str]:
    """The numbers of the images with one program of Debian."""
    return [f"{name}-1" for name in DEBIAN_IMAGES]


def application_names() -> list[str]:
    """The names that the overlays of the checkout give the application's image."""
    folders = sorted((CHECKOUT / "k8s" / "overlays").glob("*/kustomization.yaml"))
    return sorted({_image_name(file.parent) for file in folders})


def _image_name(folder: Path) -> str:
    image = yaml.safe_load((folder / "kustomization.yaml").read_text())["images"][0]
    return f"{image['newName']}:{image['newTag']}"


def import_archive(number: int, archive: Path) -> None:
    """Import an archive on a node."""
    _ctr(number, "images", "import", str(archive))


def import_stand_in(number: int, image: str) -> None:
    """Import an image of a marker on a node, and fill its snapshot with hard links."""
    import_archive(number, IMAGES / f"{image}.tar")
    snapshots = NODES / node_name(number) / "lib-containerd"
    markers = list(
        snapshots.glob(f"io.containerd.snapshotter.v1.overlayfs/snapshots/*/fs/{MARKER}{image}")
    )
    assert len(markers) == 1, f"{len(markers)} snapshots of {image} on {node_name(number)}"
    if not (markers[0].parent / "usr").exists():
        _link(IMAGES / image, markers[0].parent)


def import_given(number: int, archive: Path) -> None:
    """Import a real image on a node, under all names that the overlays have for it."""
    with tarfile.open(archive) as tar:
        member = tar.extractfile("manifest.json")
        assert member is not None
        tags = json.load(member)[0]["RepoTags"]
    if not tags:
        raise UserError(f"the image in {archive} has no name: save it by name and tag")
    import_archive(number, archive)
    for name in application_names():
        if name not in tags:
            _ctr(number, "images", "tag", "--force", tags[0], name)


def _ctr(number: int, *arguments: str) -> None:
    socket = NODES / node_name(number) / "run" / "containerd" / "containerd.sock"
    done = subprocess.run(
        ["ctr", "--address", str(socket), "--namespace", "k8s.io", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise UserError(f"{node_name(number)} does not take the image: {done.stderr.strip()}")


def _link(source: Path, target: Path) -> None:
    """Copy a tree by hard links; by contents where it is on another file system."""
    for option in ("--link", "--reflink=auto"):
        command = ["cp", "--archive", "--force", option, f"{source}/.", str(target)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode == 0:
            return
    raise UserError(f"{source} cannot be copied: {done.stderr.strip().splitlines()[-1]}")


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file of a tree anew: what was there may be another tree's too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(mode)


def _add_user(tree: Path, settings: kube_dockerfile.ImageSettings) -> None:
    """Add the image's user and its home."""
    user, home = int(settings.user or 0), settings.folder
    passwd = (tree / "etc" / "passwd").read_text()
    group = (tree / "etc" / "group").read_text()
    _write(tree / "etc/passwd", f"{passwd}tramontane:x:{user}:{user}::{home}:/bin/sh\n")
    _write(tree / "etc/group", f"{group}tramontane:x:{user}:\n")
    folder = tree / home.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.chown(folder, user, user)


def _add_environment(checkout: Path, tree: Path) -> None:
    """Add the checkout's environment, with the project as `pip install` installs it."""
    python = checkout / ".venv" / "bin" / "python"
    if not python.exists():
        raise UserError(f"{checkout} has no .venv: run make kubernetes there, which installs it")
    facts = (
        "import json, sys, sysconfig; print(json.dumps([sys.base_prefix,"
        " sysconfig.get_path('purelib'), sysconfig.get_path('stdlib')]))"
    )
    done = subprocess.run([python, "-c", facts], capture_output=True, text=True, check=True)
    base, packages, library = (Path(text) for text in json.loads(done.stdout))
    _add_python(base, library, tree)
    target = tree / ENVIRONMENT
    site = target / packages.relative_to(checkout / ".venv")
    site.mkdir(parents=True)
    _link(packages, site)
    for pattern in ("__editable__*", "tramontane*"):
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in site.glob("*.pth"):
        if str(checkout) in path.read_text(errors="replace"):
            path.unlink()
    scripts = [path for path in packages.parents[2].joinpath("bin").iterdir() if path.is_file()]
    for script in scripts:
        with script.open("rb") as file:
            if file.read(2) != b"#!":
                continue
        text = script.read_text().replace(str(checkout / ".venv"), f"/{ENVIRONMENT}")
        _write(target / "bin" / script.name, text, 0o755)
    for name in ("python", "python3", python.resolve().name):
        link = target / "bin" / name
        link.unlink(missing_ok=True)
        link.symlink_to(python.resolve())
    version = ".".join(map(str, sys.version_info[:3]))
    _write(
        target / "pyvenv.cfg",
        f"home = {base}/bin\ninclude-system-site-packages = false\nversion = {version}\n",
    )
    _install_project(checkout, python, site)


def _add_python(base: Path, library: Path, tree: Path) -> None:
    """Add the interpreter at the path that it has here; where it is the system's, it is there."""
    if base == Path("/usr"):
        if not (tree / str(library).lstrip("/")).exists():
            raise UserError(f"Debian's root file system has no {library}: use its own Python")
        return
    copied = tree / str(base).lstrip("/")
    for part in [copied, *copied.parents]:
        if part == tree:
            break
        part.mkdir(parents=True, exist_ok=True)
        part.chmod(0o755)  # /root is closed to others
    for source in [base / "bin", *base.glob("lib/libpython*"), library]:
        target = copied / source.relative_to(base)
        if source.is_dir():
            target.mkdir(parents=True)
            _link(source, target)
        else:
            target.parent.mkdir(exist_ok=True)
            subprocess.run(["cp", "-a", str(source), str(target)], check=True)
    for unused in ("site-packages", "test"):
        shutil.rmtree(copied / library.relative_to(base) / unused, ignore_errors=True)


def _install_project(checkout: Path, python: Path, site: Path) -> None:
    """Install the project from a copy of what k8s/Dockerfile copies, and compile it."""
    source = CLUSTER / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    for name in PROJECT_FILES:
        shutil.copy(checkout / name, source)
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(checkout / room, source / room, ignore=ignored)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--compile"]
    done = subprocess.run(
        [python, "-m", "pip", "install", *options, "--target", str(source / "out"), str(source)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(source)},
    )
    if done.returncode != 0:
        raise UserError(f"pip cannot install {checkout}: {done.stderr.strip().splitlines()[-1]}")
    shutil.rmtree(source / "out" / "bin", ignore_errors=True)
    _link(source / "out", site)
    shutil.rmtree(source)


def _archive_marker(number: str, names: list[str], config: dict[str, Any]) -> None:
    """Write the archive of an image whose contents are in the tree of the same name."""
    _write_archive(IMAGES / f"{number}.tar", names, config, {f"/{MARKER}{number}": (b"", 0o644)})


def _write_archive(
    path: Path, names: list[str], config: dict[str, Any], files: dict[str, tuple[bytes, int]]
) -> None:
    """Write an image with one layer, in the form of `docker save`."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        folder = tarfile.TarInfo("tmp")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(folder)
        for name, (content, mode) in files.items():
            member = tarfile.TarInfo(name.lstrip("/"))
            member.size, member.mode = len(content), mode
            tar.addfile(member, io.BytesIO(content))
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    machine = platform.machine()
    description = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine),
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": names, "Layers": ["layer.tar"]}]
    members = {
        "layer.tar": layer.getvalue(),
        "config.json": json.dumps(description).encode(),
        "manifest.json": json.dumps(manifest).encode(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    with tarfile.open(unfinished, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    unfinished.rename(path)
