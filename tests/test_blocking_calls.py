"""No coroutine of the router or the cluster calls directly what may block its event loop."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKING = {
    *(
        "ray.get",
        "ray.wait",
        "ray.kill",
        "ray.get_actor",
        "ray.nodes",
        "ray.put",
        "ray.init",
        "ray.shutdown",
        "ray.cancel",
    ),
    *(
        "time.sleep",
        "subprocess.run",
        "subprocess.Popen",
        "subprocess.check_output",
        "socket.create_connection",
        "open",
    ),
    *(
        "os.open",
        "shutil.rmtree",
        "sqlite3.connect",
        "serve.status",
        "serve.run",
        "serve.delete",
        "socket.getaddrinfo",
    ),
    *(
        "shut_down_pipeline",
        "create_supervisor",
        "remove_pipeline",
        "actor_names",
        "_pipelines",
        "read_resources",
    ),
    *("self._service.close", "self._database.close", "self._batches.close"),
}
ALLOWED = {("router/client/client.py", "_sleep")}  # of the client that blocks


class Finder(ast.NodeVisitor):
    """Finds calls within coroutines; what a function or a lambda inside one calls may run in a
    thread.
    """

    def __init__(self) -> None:
        self.functions: list[ast.AST] = []
        self.found: list[tuple[str, str]] = []

    def _enter(self, node: ast.AST) -> None:
        self.functions.append(node)
        self.generic_visit(node)
        self.functions.pop()

    visit_AsyncFunctionDef = visit_FunctionDef = visit_Lambda = _enter

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if (
            name in BLOCKING
            and self.functions
            and isinstance(inside := self.functions[-1], ast.AsyncFunctionDef)
        ):
            self.found.append((inside.name, name))
        self.generic_visit(node)


def _find(text: str) -> list[tuple[str, str]]:
    finder = Finder()
    finder.visit(ast.parse(text))
    return finder.found


@pytest.mark.parametrize("room", ["cluster", "router"])
def test_no_coroutine_blocks(room: str) -> None:
    paths = sorted((ROOT / room).rglob("*.py"))
    found = {
        (str(path.relative_to(ROOT)), *each)
        for path in paths
        for each in _find(path.read_text(encoding="utf-8"))
        if (str(path.relative_to(ROOT)), each[0]) not in ALLOWED
    }
    assert len(paths) > 50
    assert found == set()


@pytest.mark.nightly
def test_what_would_block_is_found() -> None:
    text = """
async def f():
    ray.get_actor("x")
    await asyncio.to_thread(ray.kill, x)
    await asyncio.to_thread(lambda: ray.get(x))
    def g():
        time.sleep(1)
    with open("x"):
        pass
"""
    assert _find(text) == [("f", "ray.get_actor"), ("f", "open")]
