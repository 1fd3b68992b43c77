"""Small faults for ``tests/mutation.py``: every place of a module's source where one can be put,
and the source with it.

A fault is a change of the text at one node of the syntax tree, so lines and comments stay as they
are. Left out is what no test should see: docstrings, texts, log lines, annotations, decorators,
assertions, and a module's durations (tests use no clock).
"""

import ast
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")},
    **{
        ast.Eq: ("==", "!="),
        ast.NotEq: ("!=", "=="),
        ast.Is: ("is", "is not"),
        ast.IsNot: (r"is\s+not", "is"),
    },
    **{ast.In: ("in", "not in"), ast.NotIn: (r"not\s+in", "in")},
}
ARITHMETIC = {
    **{
        ast.Add: (r"\+", "-"),
        ast.Sub: ("-", "+"),
        ast.Mult: (r"\*", "//"),
        ast.Pow: (r"\*\*", "*"),
    },
    **{ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//")},
}
EXTREMES = {"min": "max", "max": "min"}
UNSEEN_KEYWORDS = {"daemon", "exc_info", "flush", "frozen", "slots", "stacklevel", "strict"}
LOGGER = re.compile(r"_?(log|logger|logging|warnings)", re.IGNORECASE)
SECONDS = re.compile(r"[A-Z_]+_S")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: ``old`` at ``start`` of the source becomes ``new``."""

    path: str
    line: int
    kind: str
    start: int
    old: str
    new: str

    def apply(self, source: str) -> str:
        assert source[self.start :].startswith(self.old)
        return source[: self.start] + self.new + source[self.start + len(self.old) :]

    def diff(self, source: str) -> str:
        """Return the changed lines."""
        lines = difflib.unified_diff(
            source.splitlines(), self.apply(source).splitlines(), n=0, lineterm=""
        )
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def find_mutants(path: str, source: str) -> list[Mutant]:
    """Return all faults of a module, in the order of the source."""
    return sorted(
        _Finder(path, source).find(), key=lambda mutant: (mutant.start, mutant.kind, mutant.new)
    )


class _Finder:
    def __init__(self, path: str, source: str) -> None:
        self._path, self._source = path, source
        self._lines = source.splitlines(keepends=True)
        self._offsets = [0]
        for line in self._lines:
            self._offsets.append(self._offsets[-1] + len(line))

    def find(self) -> Iterator[Mutant]:
        for node in ast.parse(self._source).body:
            if not (
                _is_duration(node)
                or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
            ):
                yield from self._of(node, in_init=False)

    def _of(self, node: ast.AST, *, in_init: bool) -> Iterator[Mutant]:
        """Return the faults at this node and below it."""
        if _is_unseen(node):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            in_init = node.name == "__init__"
        if isinstance(node, ast.stmt):
            yield from self._of_statement(node, in_init)
        elif isinstance(node, ast.expr):
            yield from self._of_expression(node)
        for child in _children(node):
            yield from self._of(child, in_init=in_init)

    def _of_statement(self, node: ast.stmt, in_init: bool) -> Iterator[Mutant]:
        if _can_be_deleted(node, in_init):
            yield self._at(node, "deleted statement", "pass")
        if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
            token, other = ARITHMETIC[type(node.op)]
            yield from self._between(node.target, node.value, "arithmetic", f"{token}(?==)", other)
        if isinstance(node, ast.If | ast.While):
            yield from self._negated(node.test)

    def _of_expression(self, node: ast.expr) -> Iterator[Mutant]:
        match node:
            case ast.Compare() | ast.BoolOp() | ast.BinOp() | ast.UnaryOp():
                yield from self._of_operator(node)
            case ast.Constant(value=bool() | int() | float() as value):
                yield self._at(node, "constant", _other_constant(value))
            case ast.IfExp(test=test):
                yield from self._negated(test)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                for test in (test for part in node.generators for test in part.ifs):
                    yield from self._negated(test)
            case ast.Call(func=ast.Name(id=name)) if name in EXTREMES:
                yield self._at(node.func, "arithmetic", EXTREMES[name])

    def _of_operator(
        self, node: ast.Compare | ast.BoolOp | ast.BinOp | ast.UnaryOp
    ) -> Iterator[Mutant]:
        match node:
            case ast.Compare(left=left, ops=operators, comparators=others):
                for before, operator, after in zip(
                    [left, *others], operators, others, strict=False
                ):
                    yield from self._between(
                        before, after, "comparison", *_word(*COMPARISONS[type(operator)])
                    )
            case ast.BoolOp(op=operator, values=values):
                old, new = ("and", "or") if isinstance(operator, ast.And) else ("or", "and")
                yield self._all_between(node, values, old, new)
            case ast.BinOp(left=left, op=operator, right=right) if type(
                operator
            ) in ARITHMETIC and not _is_text(left, right):
                yield from self._between(left, right, "arithmetic", *ARITHMETIC[type(operator)])
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                kind = "boolean" if isinstance(node.op, ast.Not) else "arithmetic"
                yield self._at(node, kind, f"({self._text(operand)})")

    def _negated(self, test: ast.expr) -> Iterator[Mutant]:
        """Negate a condition, unless the fault in its only comparison, constant or ``not`` is the
        same.
        """
        one = isinstance(test, ast.Compare) and len(test.ops) == 1
        if one and isinstance(
            test.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn
        ):  # type: ignore[attr-defined]
            return
        if not isinstance(test, ast.Constant) and not (
            isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        ):
            yield self._at(test, "negated condition", f"not ({self._text(test)})")

    def _between(
        self, left: ast.expr, right: ast.expr, kind: str, token: str, new: str
    ) -> Iterator[Mutant]:
        """Replace the operator between two expressions."""
        start, end = self._span(left)[1], self._span(right)[0]
        if found := re.search(token, self._source[start:end]):
            yield Mutant(
                self._path,
                self._line(start + found.start()),
                kind,
                start + found.start(),
                found[0],
                new,
            )

    def _all_between(self, node: ast.BoolOp, values: list[ast.expr], old: str, new: str) -> Mutant:
        text, end = "", self._span(values[0])[0]
        for before, after in zip(values, [*values[1:], None], strict=True):
            start, end = self._span(before)
            text += self._source[start:end]
            if after is not None:
                text += re.sub(
                    rf"\b{old}\b", new, self._source[end : self._span(after)[0]], count=1
                )
        start = self._span(values[0])[0]
        return Mutant(self._path, node.lineno, "boolean", start, self._source[start:end], text)

    def _at(self, node: ast.expr | ast.stmt, kind: str, new: str) -> Mutant:
        return Mutant(self._path, node.lineno, kind, self._span(node)[0], self._text(node), new)

    def _text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self._span(node)
        return self._source[start:end]

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return where the node's text begins and ends. Columns of a syntax tree are counted in
        bytes.
        """
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(
            node.end_lineno, node.end_col_offset
        )

    def _offset(self, line: int, column: int) -> int:
        return self._offsets[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _line(self, offset: int) -> int:
        return self._source.count("\n", 0, offset) + 1


def _word(token: str, new: str) -> tuple[str, str]:
    return (rf"\b{token}\b" if token[0].isalpha() else re.escape(token)), new


def _other_constant(value: float) -> str:
    """Return another constant: 1 for 0, 9 for 8, 1.0 for 0.5, 1.0 for 0.0, False for True."""
    if isinstance(value, bool):
        return str(not value)
    return repr(value + 1 if isinstance(value, int) else value * 2 or 1.0)


def _is_text(*sides: ast.expr) -> bool:
    texts = ast.JoinedStr | ast.List | ast.Tuple
    return any(
        isinstance(side, texts) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in sides
    )


def _is_duration(node: ast.stmt) -> bool:
    """Return True for a module's constant in seconds."""
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    names = [
        each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)
    ]
    return any(map(SECONDS.fullmatch, names))


def _is_unseen(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.keyword):
        return node.arg in UNSEEN_KEYWORDS
    return _is_log_call(node.value if isinstance(node, ast.Expr) else node)


def _is_log_call(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    owner = node.func.value
    name = (
        owner.attr
        if isinstance(owner, ast.Attribute)
        else owner.id
        if isinstance(owner, ast.Name)
        else ""
    )
    return bool(LOGGER.fullmatch(name))


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Return what is below a node, without annotations, decorators, the texts of errors, and
    keywords that no test sees.
    """
    skipped = {"annotation", "returns", "decorator_list", "type_params", "bases", "cause"}
    if isinstance(node, ast.Raise):
        skipped.add("exc")
    for name, value in ast.iter_fields(node):
        if name not in skipped:
            yield from (
                each
                for each in (value if isinstance(value, list) else [value])
                if isinstance(each, ast.AST)
            )


def _can_be_deleted(node: ast.stmt, in_init: bool) -> bool:
    match node:
        case (
            ast.Expr(value=ast.Call() | ast.Await())
            | ast.AugAssign()
            | ast.Raise()
            | ast.Delete()
            | ast.Break()
            | ast.Continue()
        ):
            return True
        case ast.Return(value=None):
            return True
        # of an attribute or an element; without it __init__ would only make half an object
        case ast.Assign(targets=targets):
            return not in_init and all(
                isinstance(target, ast.Attribute | ast.Subscript) for target in targets
            )
    return False
