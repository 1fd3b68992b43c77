"""``tramontane config``: what is in force, where it is from, and nothing that is secret."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from tramontane.cluster.cli.main import COMMANDS, app
from tramontane.cluster.config.engine_config import SECRETS, EngineConfig
from tramontane.cluster.console.terminal import FLAGS
from tramontane.proto.errors import ConfigError

GIVEN = {
    "stages": 3,
    "gpu_memory": ["24GiB", "80GiB", "24GiB"],
    "kv_cache_memory": "512MiB",
    "expert_replicas": "auto",
    "expert_actors": 2,
    "expert_load": [[1, 2, 3], [4, 5, 6]],
    "served_model_name": "mod\u00e8le: #1",
    "jobs_url_prefixes": ["file:///in", "s3://bucket/in"],
    "max_model_len": 4096,
}


def _file(folder: Path, **keys: object) -> Path:
    path = folder / "given.yaml"
    path.write_text(yaml.safe_dump(keys, allow_unicode=True), encoding="utf-8")
    return path


def _printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    app(["config", *words], standalone_mode=False)
    return capsys.readouterr().out


def test_what_is_printed_is_a_file_of_the_same_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = _file(tmp_path, **GIVEN)
    printed = _printed(
        capsys, "--config", str(given), "--stages", "2", "--gpu-memory", "24GiB", "--seed", "7"
    )
    config = EngineConfig.build(None, GIVEN | {"stages": 2, "gpu_memory": "24GiB", "seed": 7})
    keys = yaml.safe_load(printed)
    assert keys.keys() == EngineConfig.key_names() - {"json"}
    assert (keys["gpu_memory"], keys["kv_cache_memory"], keys["jobs_max_bytes"]) == (
        ["24GiB"],
        "512MiB",
        "64GiB",
    )
    assert EngineConfig.build(None, keys) == config
    assert (
        EngineConfig.build(
            None, json.loads(_printed(capsys, "--config", str(_file(tmp_path, **keys)), "--json"))
        )
        == config
    )


def test_each_value_says_where_it_is_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = _file(tmp_path, stages=4, port=8123)
    lines = _printed(
        capsys, "--config", str(given), "--stages", "2", "--api-key-file", "keys"
    ).splitlines()
    sources = {line.partition(":")[0]: line.rpartition("  # ")[2] for line in lines}
    assert {key: source for key, source in sources.items() if source != "default"} == {
        "stages": "--stages",
        "port": str(given),
        "api_key_file": "--api-key-file",
    }


@pytest.mark.parametrize("as_json", [False, True])
def test_no_key_and_no_password_is_shown(
    as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = _file(
        tmp_path, api_key=["first-secret", "second-secret"], jobs_storage="/folder/secret"
    )
    words = [
        "--config",
        str(given),
        "--jobs-database",
        "postgresql://me:secret@host/jobs",
        *(["--json"] if as_json else []),
    ]
    printed = _printed(capsys, *words)
    assert "secret" not in printed
    if not as_json:
        assert "# jobs_database is given by --jobs-database and not shown" in printed
        assert f"# api_key is given by {given} and not shown" in printed


def test_what_would_be_refused_is_refused_here_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stages \(in .*given.yaml\) is 0"):
        app(["config", "--config", str(_file(tmp_path, stages=0))], standalone_mode=False)


def test_the_page_of_the_documentation_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = Path(__file__).parents[3] / "docs" / "configuration.md"
    assert _printed(capsys, "--markdown") == page.read_text(encoding="utf-8"), (
        "run: tramontane config --markdown"
    )


def test_the_page_has_every_key_and_every_flag() -> None:
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text(encoding="utf-8")
    flags = {
        name for parameter in get_command(app).commands["config"].params for name in parameter.opts
    }  # type: ignore[attr-defined]
    assert [key for key in EngineConfig.key_names() if f"| `{key}` |" not in page] == []
    assert [
        name for name in flags - {"--help", "--config", "--markdown"} if f"| `{name}` |" not in page
    ] == []


def test_secrets_on_the_command_line_are_those_of_the_configuration() -> None:
    assert {f"--{key.replace('_', '-')}" for key in (*SECRETS, "api_key")} == set(FLAGS)


def test_the_help_says_when_a_folder_is_made_at_home() -> None:
    options = {
        parameter.opts[0]: parameter for parameter in get_command(app).commands["serve"].params
    }  # type: ignore[attr-defined]
    default = (
        "Default: ~/.tramontane/jobs.sqlite, created with its folder for the first job or file."
    )
    assert options["--jobs-database"].help.endswith(default)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_begins_as_in_the_list_of_commands(name: str) -> None:
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    assert command.help == COMMANDS[name]


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = (
        "import sys; from tramontane.cluster.cli.main import app; app(['--help'],"
        " standalone_mode=False); print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.splitlines()[-1].split())
    assert {"ray", "torch", "httpx", "pydantic", "numpy"} & loaded == set()
    assert [name for name in loaded if name.startswith("tramontane.cluster.cli.")] == [
        "tramontane.cluster.cli.main"
    ]
