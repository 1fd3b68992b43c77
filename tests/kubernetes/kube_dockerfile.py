"""What k8s/Dockerfile makes of its base image, read from it: packages, variables, user, program,
files that it copies from the checkout.
"""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class ImageSettings:
    """The settings of a target, with those of the stages that it is made from."""

    packages: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=lambda: {"PATH": BASE_PATH})
    labels: dict[str, str] = field(default_factory=dict)
    files: list[tuple[str, str]] = field(default_factory=list)  # in the checkout, in the image
    user: str = ""
    folder: str = "/"
    entry_point: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=lambda: ["python3"])

    def config(self) -> dict[str, object]:
        """The settings as an image's config has them."""
        return {
            "Env": [f"{name}={value}" for name, value in self.variables.items()],
            "Labels": self.labels,
            "User": self.user,
            "WorkingDir": self.folder,
            "Entrypoint": self.entry_point,
            "Cmd": self.command,
        }


def read_target(dockerfile: Path, target: str) -> ImageSettings:
    """Read the settings of a target; stages that it only copies from do not count."""
    stages = _stages(dockerfile.read_text())
    chain = [target]
    while (below := stages[chain[0]][0]) in stages:
        chain.insert(0, below)
    settings = ImageSettings()
    for stage in chain:
        for word, rest in stages[stage][1]:
            _apply(settings, word, rest)
    return settings


def _stages(text: str) -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """The stages by their names: what each is made from, and its instructions."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    instructions = re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()
    stages: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    current: list[tuple[str, str]] = []
    for line in filter(str.strip, instructions):
        word, _, rest = line.strip().partition(" ")
        if word.upper() == "FROM":
            below, *named = rest.split()
            current = []
            stages[named[-1] if named else below] = (below, current)
        else:
            current.append((word.upper(), rest.strip()))
    return stages


def _apply(settings: ImageSettings, word: str, rest: str) -> None:
    if word == "ENV":
        for pair in shlex.split(rest):
            name, _, value = pair.partition("=")
            settings.variables[name] = re.sub(
                r"\$\{?(\w+)\}?", lambda found: settings.variables.get(found[1], ""), value
            )
    elif word == "LABEL":
        settings.labels |= dict(pair.partition("=")[::2] for pair in shlex.split(rest))
    elif word == "COPY":
        name, target = rest.split()[-2:]
        settings.files += [] if rest.startswith("--from=") else [(name, target)]
    elif word == "USER":
        settings.user = rest
    elif word == "WORKDIR":
        settings.folder = rest
    elif word == "RUN":
        for installed in re.findall(r"apt-get install ([^&;|]*)", rest):
            settings.packages += [name for name in installed.split() if not name.startswith("-")]
    else:
        _apply_program(settings, word, rest)


def _apply_program(settings: ImageSettings, word: str, rest: str) -> None:
    if word == "ENTRYPOINT":
        settings.entry_point, settings.command = json.loads(rest), []
    elif word == "CMD":
        settings.command = json.loads(rest)
