"""The commands of k8s/README.md."""

import ast
import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "k8s" / "README.md"
PROGRAMS = ("kubectl", "helm", "tramontane", "docker", "openssl", "curl", "serve", "make")
# text of the README that names a command in passing, or to advise against it
NAMES = frozenset(
    {
        *("kubectl apply -k", "kubectl delete -k", "kubectl drain"),
        *("helm install", "helm template", "helm uninstall", "helm upgrade"),
        *("tramontane k8s", "tramontane k8s --helm", "serve shutdown"),
        *("make test-image", "make test-kubernetes"),
    }
)
COMMENT = re.compile(r"\s{2,}# .*$")


def one_line(text: str) -> str:
    """A command as the comparison has it: on one line, without the comment at its end.

    ``kubectl get nodes \\`` and ``  -o name   # all`` become ``kubectl get nodes -o name``.
    """
    lines = [COMMENT.sub("", line).rstrip(" \\") for line in text.splitlines()]
    return " ".join(" ".join(lines).split())


def commands_of(text: str) -> list[str]:
    """The commands of a page: of its blocks without a language or with that of the shell, and
    those between single backticks that are more than a name.
    """
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    of_shell = [block for language, block in blocks if language in ("", "sh")]
    found = [one_line(each) for block in of_shell for each in _split(block)]
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found += [one_line(each) for each in re.findall(r"`([^`]+)`", prose)]
    return [each for each in dict.fromkeys(found) if _is_command(each) and each not in NAMES]


def _split(block: str) -> list[str]:
    """The commands of a block: a line that ends in a backslash or within quotes continues."""
    commands, unfinished = [], ""
    for line in block.splitlines():
        unfinished += COMMENT.sub("", line) + "\n"
        if not line.endswith("\\") and unfinished.count("'") % 2 == 0:
            commands.append(unfinished)
            unfinished = ""
    return commands


def _is_command(text: str) -> bool:
    """Whether a program begins it, also after an assignment such as ``HEAD=$(kubectl ...)``."""
    words = re.sub(r"^[A-Z]+=\$\(", "", text).split()
    return len(words) > 1 and words[0] in PROGRAMS


def texts_of(file: Path) -> set[str]:
    """All texts that a module of Python has, each on one line."""
    tree = ast.walk(ast.parse(file.read_text()))
    constants = (each.value for each in tree if isinstance(each, ast.Constant))
    return {one_line(each) for each in constants if isinstance(each, str)}
