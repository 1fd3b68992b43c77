"""The programs of ``make agents``: what is installed, how each is configured and started, and the
tool that the model calls.
"""

import json
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from agent_scripts import JAVASCRIPT, PYTHON
from agent_server import MODEL_NAME, Wanted

# some of the programs need version 22
MACHINES = {"x86_64": "x64", "AMD64": "x64", "aarch64": "arm64"}
NODE = f"node-{sys.platform}-{MACHINES.get(platform.machine(), platform.machine())}@22.23.5"
PROMPT = "Read the file notes.txt in this folder and tell me what it says."
PYTHONS = ("python3.13", "python3.12")  # Mistral Vibe needs one of them


@dataclass(frozen=True)
class Place:
    """Where a program runs: the server, its home, its folder of work, and the installed
    packages.
    """

    url: str
    home: Path
    work: Path
    packages: Path  # of this program

    @property
    def notes(self) -> Path:
        """The file that the model has read."""
        return self.work / "notes.txt"

    @property
    def node_bin(self) -> Path:
        """The folder of the installed commands of Node.js."""
        return self.packages / "node_modules" / ".bin"

    def write(self, name: str, content: str) -> Path:
        """Write a file below the home folder."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        return path


@dataclass(frozen=True)
class Start:
    """A command, and its variables of the environment besides the common ones."""

    command: Sequence[str | Path]
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """A program. ``api``: what it uses of the server. ``packages``: of npm or, without ``is_npm``,
    of PyPI. ``calls``: tools with arguments; the first that the client has is called. ``last``:
    calls after the result, for programs that end by one. ``answers``: how often it prints the
    answer.
    """

    name: str
    api: str
    packages: tuple[str, ...]
    start: Callable[[Place], Start]
    calls: Callable[[Place], Wanted]
    is_npm: bool = True
    needs: Sequence[str] = ()  # interpreters of Python, if not this one
    last: Wanted = field(default_factory=dict)
    answers: int = 1

    @property
    def version(self) -> str:
        """The version of the first package."""
        name = self.packages[0]
        return name.rpartition("@")[2] if self.is_npm else name.rpartition("==")[2]


def _claude(place: Place) -> Start:
    names = ("HAIKU", "SONNET", "OPUS")
    return Start(
        (place.node_bin / "claude", "-p", PROMPT, "--model", MODEL_NAME, "--allowedTools", "Read"),
        {
            "ANTHROPIC_BASE_URL": place.url,
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": MODEL_NAME,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL_NAME,
            **{f"ANTHROPIC_DEFAULT_{name}_MODEL": MODEL_NAME for name in names},
            "CLAUDE_CONFIG_DIR": str(place.home / ".claude"),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
        },
    )


def _codex(place: Place) -> Start:
    place.write(
        ".codex/config.toml",
        f"""
model = "{MODEL_NAME}"
model_provider = "local"
model_context_window = 100000
check_for_update_on_startup = false
[model_providers.local]
name = "local"
base_url = "{place.url}/v1"
env_key = "LOCAL_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
[analytics]
enabled = false
[feedback]
enabled = false
""",
    )
    free = "--dangerously-bypass-approvals-and-sandbox"  # containers lack what its sandbox needs
    return Start(
        (place.node_bin / "codex", "exec", "--skip-git-repo-check", free, PROMPT),
        {"CODEX_HOME": str(place.home / ".codex"), "LOCAL_KEY": "none"},
    )


def _opencode(place: Place) -> Start:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "local",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": "none"},
        "models": {MODEL_NAME: {"name": MODEL_NAME, "tool_call": True}},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {"local": provider},
        "model": f"local/{MODEL_NAME}",
        "small_model": f"local/{MODEL_NAME}",
        "autoupdate": False,
        "share": "disabled",
        "enabled_providers": ["local"],
    }
    path = place.write(".config/opencode/opencode.json", json.dumps(config))
    return Start(
        (place.node_bin / "opencode", "run", "--model", f"local/{MODEL_NAME}", PROMPT),
        {
            "OPENCODE_CONFIG": str(path),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
    )


def _continue(place: Place) -> Start:
    config = place.write(
        ".continue/config.yaml",
        f"""
name: local
version: 0.0.1
schema: v1
models:
  - name: {MODEL_NAME}
    provider: openai
    model: {MODEL_NAME}
    apiBase: {place.url}/v1
    apiKey: none
    roles: [chat]
    capabilities: [tool_use]
""",
    )
    return Start(
        (place.node_bin / "cn", "-p", PROMPT, "--config", config, "--allow", "Read"),
        {"CONTINUE_GLOBAL_DIR": str(place.home / ".continue"), "CONTINUE_TELEMETRY_ENABLED": "0"},
    )


def _cline(place: Place) -> Start:
    cline, folder = place.node_bin / "cline", place.home / "cline"
    given = ("--provider", "openai", "--modelid", MODEL_NAME, "--baseurl", f"{place.url}/v1")
    auth = shlex.join(map(str, (cline, "auth", *given, "--apikey", "none", "--config", folder)))
    run = shlex.join(map(str, (cline, "--config", folder, PROMPT)))
    return Start(("sh", "-c", f"{auth} && exec {run}"), {"CLINE_TELEMETRY_DISABLED": "1"})


def _vibe(place: Place) -> Start:
    place.write(
        ".vibe/config.toml",
        f"""
active_model = "{MODEL_NAME}"
enable_telemetry = false
enable_update_checks = false
enable_auto_update = false
[[providers]]
name = "local"
api_base = "{place.url}/v1"
api_key_env_var = "MISTRAL_API_KEY"
backend = "mistral"
[[models]]
name = "{MODEL_NAME}"
provider = "local"
alias = "{MODEL_NAME}"
""",
    )
    return Start(
        (place.packages / "bin" / "vibe", "-p", PROMPT, "--output", "text", "--trust"),
        {"VIBE_HOME": str(place.home / ".vibe"), "MISTRAL_API_KEY": "none"},
    )


def _read(tool: str, argument: str) -> Callable[[Place], Wanted]:
    return lambda place: {tool: {argument: str(place.notes)}}


AGENTS = (
    Program(
        "Claude Code",
        "Messages",
        ("@anthropic-ai/claude-code@2.1.332",),
        _claude,
        _read("Read", "file_path"),
    ),
    Program(
        "Codex CLI",
        "Responses",
        ("@openai/codex@0.171.0",),
        _codex,
        lambda _: {
            "exec_command": {"cmd": "cat notes.txt"},
            "shell": {"command": ["cat", "notes.txt"]},
            "shell_command": {"command": "cat notes.txt"},
        },
    ),
    Program(
        "Mistral Vibe",
        "chat",
        ("mistral-vibe==3.0.2",),
        _vibe,
        _read("read_file", "path"),
        is_npm=False,
        needs=PYTHONS,
    ),
    Program("OpenCode", "chat", ("opencode-ai@1.18.33",), _opencode, _read("read", "filePath")),
    Program(
        "Continue CLI",
        "chat",
        ("@continuedev/cli@1.5.47",),
        _continue,
        _read("Read", "filepath"),
    ),
    Program(
        "Cline CLI",
        "chat",
        ("cline@3.0.65",),
        _cline,
        lambda place: {"read_files": {"files": [{"path": str(place.notes)}]}},
    ),
)

OPENAI_JS, AI = "openai@7.59.0", "ai@7.0.173"
PACKAGES: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "openai (chat)": ("chat", ("openai==3.57.0",)),
        "openai (responses)": ("Responses", ("openai==3.57.0",)),
        "anthropic": ("Messages", ("anthropic==2.14.0",)),
        "mistralai": ("chat", ("mistralai==3.7.0",)),
        "pydantic-ai MistralModel": ("chat", ("pydantic-ai-slim[mistral]==2.68.0",)),
        "pydantic-ai OpenAIChatModel": ("chat", ("pydantic-ai-slim[openai]==2.68.0",)),
        "langchain-openai": ("chat", ("langchain-openai==1.7.4",)),
        "langchain-mistralai": ("chat", ("langchain-mistralai==1.1.6",)),
        "LiteLLM": ("chat, Messages", ("litellm==1.110.2",)),
        "openai (JavaScript)": ("chat, Responses", (OPENAI_JS,)),
        "@mistralai/mistralai": ("chat", ("@mistralai/mistralai@2.7.0",)),
        "ai and @ai-sdk/openai-compatible": ("chat", (AI, "@ai-sdk/openai-compatible@3.0.92")),
        "ai and @ai-sdk/mistral": ("chat", (AI, "@ai-sdk/mistral@4.0.87")),
    }
)

# whole and as a stream, by several APIs
ANSWERS = MappingProxyType({"LiteLLM": 6, "openai (JavaScript)": 4})


def _script(name: str) -> Program:
    api, packages = PACKAGES[name]

    def start(place: Place) -> Start:
        if name in PYTHON:
            path = place.write("program.py", PYTHON[name])
            return Start((place.packages / "bin" / "python", path, place.url, place.notes))
        path = place.write("program.mjs", JAVASCRIPT[name])
        # where Node.js finds the packages
        (place.home / "node_modules").symlink_to(place.packages / "node_modules")
        return Start(("node", path, place.url, place.notes))

    calls, answers = _read("read_notes", "path"), ANSWERS.get(name, 2)
    is_npm = name in JAVASCRIPT
    return Program(name, api, packages, start, calls, is_npm=is_npm, answers=answers)


PROGRAMS = (*AGENTS, *map(_script, PACKAGES))


class MissingError(Exception):
    """A program cannot be installed; the message has the reason."""


def install_node(cache: Path) -> Path:
    """Install Node.js, once; return the folder of its command. Raises MissingError."""
    node = Program("Node.js", "", (NODE,), lambda _: Start(()), lambda _: {})
    name = NODE.rpartition("@")[0]
    return install(node, cache) / "node_modules" / name / "bin"


def install(program: Program, cache: Path) -> Path:
    """Install a program's packages in a folder of their own, once; return the folder. Raises
    MissingError.
    """
    words = "".join(each if each.isalnum() else "-" for each in " ".join(program.packages))
    folder = cache / words.strip("-")
    done, wanted = folder / "done.json", json.dumps([sys.version, program.packages])
    if done.is_file() and done.read_text(encoding="utf-8") == wanted:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if program.is_npm:
        (folder / "package.json").write_text('{"private": true}\n', encoding="utf-8")
        quiet = ("--no-fund", "--no-audit", "--loglevel", "error", "--save-exact")
        _run("npm", "install", "--prefix", folder, *quiet, *program.packages)
    else:
        python = next(filter(None, map(_interpreter, program.needs)), None)
        if program.needs and python is None:
            raise MissingError(f"it needs one of {', '.join(program.needs)}")
        _run(python or sys.executable, "-m", "venv", folder)
        quiet = ("--quiet", "--no-compile", "--disable-pip-version-check")
        _run(folder / "bin" / "python", "-m", "pip", "install", *quiet, *program.packages)
    done.write_text(wanted, encoding="utf-8")
    return folder


def _interpreter(name: str) -> str | None:
    """Return a Python of this name that runs: pyenv has commands for all versions that it knows."""
    path = shutil.which(name)
    if path is None:
        return None
    asked = "import sys; print(sys.executable)"
    run = subprocess.run([path, "-c", asked], capture_output=True, text=True, check=False)
    return run.stdout.strip() if run.returncode == 0 else None


def _run(*command: str | Path) -> None:
    if shutil.which(str(command[0])) is None:
        raise MissingError(f"{command[0]} is not installed")
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if run.returncode:
        raise MissingError((run.stderr or run.stdout).strip()[-600:])
