"""``tramontane config``: what is in force, where it is from, and nothing that is secret."""

import json
from pathlib import Path

import pytest
import yaml

from tramontane.cluster.cli.main import app
from tramontane.cluster.config.engine_config import EngineConfig
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


def test_what_is_printed_is_a_file_of_the_same_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = _file(tmp_path, **GIVEN)
    printed = _printed(capsys, "--config", str(given), "--stages", "2", "--gpu-memory", "24GiB", "--seed", "7")
    config = EngineConfig.build(None, GIVEN | {"stages": 2, "gpu_memory": "24GiB", "seed": 7})
    keys = yaml.safe_load(printed)
    assert keys.keys() == EngineConfig.key_names() - {"json"}
    assert EngineConfig.build(None, keys) == config
    assert EngineConfig.build(None, json.loads(_printed(capsys, "--config", str(_file(tmp_path, **keys)), "--json"))) == config


def test_each_value_says_where_it_is_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = _file(tmp_path, stages=4, port=8123)
    lines = _printed(capsys, "--config", str(given), "--stages", "2", "--api-key-file", "keys").splitlines()
    sources = {line.partition(":")[0]: line.rpartition("  # ")[2] for line in lines}
    assert {key: source for key, source in sources.items() if source != "default"} == {
        "stages": "--stages",
        "port": str(given),
        "api_key_file": "--api-key-file",
    }


@pytest.mark.parametrize("as_json", [False, True])
def test_no_key_and_no_password_is_shown(as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = _file(tmp_path, api_key=["first-secret", "second-secret"], jobs_storage="/folder/secret")
    words = ["--config", str(given), "--jobs-database", "postgresql://me:secret@host/jobs", *(["--json"] if as_json else [])]
    printed = _printed(capsys, *words)
    assert "secret" not in printed
    if not as_json:
        assert "# jobs_database is given by --jobs-database and not shown" in printed
        assert f"# api_key is given by {given} and not shown" in printed


def test_what_would_be_refused_is_refused_here_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stages \(in .*given.yaml\) is 0"):
        app(["config", "--config", str(_file(tmp_path, stages=0))], standalone_mode=False)
