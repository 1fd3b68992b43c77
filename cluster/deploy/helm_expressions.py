"""Expressions of Helm in documents. While a document is data, a placeholder stands for each; the
document's text has the expression. Pods get the places of the values that each group has.
"""

import re

from tramontane.cluster.deploy.k8s_overlay import dump_yaml
from tramontane.cluster.deploy.k8s_pods import IMAGE, Document

PLACEHOLDER = re.compile(r"helm-(\d+)-expression")
LINE = re.compile(r"^( *)(- )?helm-(\d+)-lines(?:: null)?$", re.MULTILINE)
BLOCK = re.compile(r"^( *)(\S+): helm-(\d+)-block$", re.MULTILINE)
FULL_NAME = 'include "tramontane.fullname" .'


class Expressions:
    """The expressions of a chart's templates, by the numbers in their placeholders."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def inline(self, expression: str) -> str:
        """Return a placeholder for a text, or for a part of one."""
        return f"helm-{self._number(f'{{{{ {expression} }}}}')}-expression"

    def block(self, value: str) -> str:
        """Return a placeholder for a whole value of a mapping: that of ``.Values``."""
        return f"helm-{self._number(value)}-block"

    def lines(self, text: str) -> str:
        """Return a placeholder for lines of a template: a key of a mapping, without a value, or an
        item of a list. ``INDENT`` in it is the column where they begin.
        """
        return f"helm-{self._number(text)}-lines"

    def lines_if(self, condition: str, text: str) -> str:
        """Return a placeholder for lines that are there if the condition holds."""
        return self.lines(f"{{{{- if {condition} }}}}\n{text}\n{{{{- end }}}}")

    def optional(self, document: Document, key: str, value: str) -> None:
        """Give a document a key that it has only if the value is not empty."""
        lines = f"{{{{- with {value} }}}}\n{key}:\n  {{{{- toYaml . | nindent INDENT+2 }}}}"
        document[self.lines(f"{lines}\n{{{{- end }}}}")] = None

    def optional_text(self, document: Document, key: str, value: str) -> None:
        """Give a document a key with a text that it has only if that is not empty."""
        lines = f"{{{{- with {value} }}}}\n{key}: {{{{ . | quote }}}}\n{{{{- end }}}}"
        document[self.lines(lines)] = None

    def more(self, value: str) -> str:
        """Return what adds the parts of a value to a list or a mapping."""
        return self.lines(
            f"{{{{- with {value} }}}}\n{{{{- toYaml . | nindent INDENT }}}}\n{{{{- end }}}}"
        )

    def dump(self, document: Document) -> str:
        """Return the text of a document, with the expressions in it."""
        text = dump_yaml(document).replace("{{", '{{ "{{" }}')  # braces of its own are not Helm's
        text = LINE.sub(self._expand_lines, text)
        text = BLOCK.sub(self._expand_block, text)
        return PLACEHOLDER.sub(lambda found: self._texts[int(found[1])], text)

    def _number(self, text: str) -> int:
        if text not in self._texts:
            self._texts.append(text)
        return self._texts.index(text)

    def _expand_lines(self, found: re.Match[str]) -> str:
        lines = self._texts[int(found[3])].splitlines()
        columns = len(found[1])
        return "\n".join(
            found[1] + line.replace("INDENT+2", str(columns + 2)).replace("INDENT", str(columns))
            for line in lines
        )

    def _expand_block(self, found: re.Match[str]) -> str:
        indent, key, value = found[1], found[2], self._texts[int(found[3])]
        return f"{indent}{key}:\n{indent}  {{{{- toYaml {value} | nindent {len(indent) + 2} }}}}"


def configure_pod(expressions: Expressions, template: Document, group: str) -> Document:
    """Put the places of a group's values into the template of its pods. Returns the values that
    these have in the document.
    """
    spec, values = template["spec"], f".Values.{group}"
    container = spec["containers"][0]
    defaults = {
        "resources": container["resources"],
        "tolerations": spec.pop("tolerations", []),
        "nodeSelector": {},
        "affinity": {},
        "priorityClassName": "",
        "podLabels": {},
        "podAnnotations": {},
        "extraEnv": [],
        "extraVolumes": [],
        "extraVolumeMounts": [],
    }
    for each in (container, *spec.get("initContainers", [])):
        set_image(expressions, each, ".Values.image")
    container["resources"] = expressions.block(f"{values}.resources")
    expressions.optional(container, "env", f"{values}.extraEnv")
    container["volumeMounts"].append(expressions.more(f"{values}.extraVolumeMounts"))
    spec["volumes"].append(expressions.more(f"{values}.extraVolumes"))
    _configure_affinity(expressions, spec, f"{values}.affinity")
    for key in ("nodeSelector", "tolerations"):
        expressions.optional(spec, key, f"{values}.{key}")
    expressions.optional_text(spec, "priorityClassName", f"{values}.priorityClassName")
    expressions.optional(spec, "imagePullSecrets", ".Values.image.pullSecrets")
    template["metadata"]["labels"][expressions.more(f"{values}.podLabels")] = None
    expressions.optional(template["metadata"], "annotations", f"{values}.podAnnotations")
    return defaults


def set_image(expressions: Expressions, container: Document, values: str) -> None:
    """Take a container's image, and when to pull it, from values."""
    assert container["image"] in (IMAGE, "redis", "rclone")
    container["image"] = expressions.inline(f'printf "%s:%s" {values}.repository {values}.tag')
    expressions.optional_text(container, "imagePullPolicy", f"{values}.pullPolicy")


def _configure_affinity(expressions: Expressions, spec: Document, value: str) -> None:
    """Use the value in the place of the document's own affinity, if there is one."""
    if "affinity" not in spec:
        expressions.optional(spec, "affinity", value)
        return
    own = dump_yaml({"affinity": spec.pop("affinity")}).rstrip()
    lines = f"{{{{- with {value} }}}}\naffinity:\n  {{{{- toYaml . | nindent INDENT+2 }}}}"
    spec[expressions.lines(f"{lines}\n{{{{- else }}}}\n{own}\n{{{{- end }}}}")] = None
