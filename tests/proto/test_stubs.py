"""The stubs that are checked in are those of ``inference.proto``, and the package requires
libraries new enough for them.
"""

import re
import tomllib
from pathlib import Path

from stubs import PROTO, generated

from tramontane.proto import inference_pb2_grpc

ROOT = Path(__file__).parents[2]


def test_the_stubs_are_those_of_the_proto_file() -> None:
    fresh = generated()
    assert fresh.keys() == {"inference_pb2.py", "inference_pb2.pyi", "inference_pb2_grpc.py"}
    for name, text in fresh.items():
        assert (PROTO / name).read_text(encoding="utf-8") == text, f"{name} differs; run make proto"


def test_the_package_requires_what_the_stubs_require() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "dependencies"
    ]
    least = {
        match[1]: _version(match[2])
        for line in listed
        if (match := re.match(r"([\w-]+)>=([\d.]+)", line))
    }
    stub = (PROTO / "inference_pb2.py").read_text(encoding="utf-8")
    wanted = re.search(r"Protobuf Python Version: ([\d.]+)", stub)
    assert wanted is not None
    assert least["protobuf"] >= _version(wanted[1])
    assert least["grpcio"] >= _version(inference_pb2_grpc.GRPC_GENERATED_VERSION)


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))
