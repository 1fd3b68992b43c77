"""Generator of the stubs of ``proto/inference.proto``: ``python tests/support/stubs.py`` (``make
proto``) writes them.
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

PROTO = Path(__file__).parents[2] / "proto"


def generated() -> dict[str, str]:
    """Return the stubs by file name. They import ``tramontane.proto`` because of the path that is
    passed to protoc.
    """
    with TemporaryDirectory() as folder:
        kinds = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        path = "tramontane/proto/inference.proto"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "grpc_tools.protoc",
                f"-Itramontane/proto={PROTO}",
                *kinds,
                path,
            ],
            check=True,
        )
        return {file.name: file.read_text(encoding="utf-8") for file in Path(folder).rglob("*.py*")}


if __name__ == "__main__":
    for name, text in generated().items():
        (PROTO / name).write_text(text, encoding="utf-8")
