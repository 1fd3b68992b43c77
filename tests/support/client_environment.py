"""Environments of clients from the package index, which run against a server as their users run
them.
"""

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

CACHE = Path(__file__).parents[2] / ".bench" / "clients"  # git ignores it
GUIDELLM = ("guidellm==0.8.1",)
AUTOGEN = ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5")
UNREACHABLE = (
    "NewConnectionError",
    "Name or service not known",
    "Temporary failure in name resolution",
    "No matching distribution",
)


def client_python(packages: Sequence[str]) -> Path:
    """Return the interpreter of an environment with these packages, which is made once.

    It also sees the packages of this environment, torch and transformers among them, and installs
    what these lack. Skips the test if the package index cannot be reached.
    """
    name = packages[0].replace("==", "-")
    folder, done = CACHE / name, CACHE / f"{name}.json"
    python = folder / "bin" / "python"
    wanted = json.dumps([sys.executable, list(packages)])
    if done.is_file() and done.read_text(encoding="utf-8") == wanted and python.exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    own = next((folder / "lib").glob("python*")) / "site-packages"
    (own / "development.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "--disable-pip-version-check",
        "--quiet",
    ]
    # most of their modules are never imported
    install = [*pip, "install", "--no-compile", *packages]
    result = subprocess.run(install, capture_output=True, text=True, check=False)
    if result.returncode and any(sign in result.stderr for sign in UNREACHABLE):
        pytest.skip(f"{packages[0]} cannot be had from the package index: {result.stderr[-200:]}")
    assert result.returncode == 0, result.stderr[-2000:]
    done.write_text(wanted, encoding="utf-8")
    return python
