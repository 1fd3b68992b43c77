"""``tramontane cluster-yaml``: what Ray makes of the files, what their commands do in a shell, and
what is refused.
"""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start
from typer.main import get_command

from tramontane.cluster.cli.main import app
from tramontane.cluster.config.engine_config import ConfigFile, EngineConfig
from tramontane.cluster.config.ray_settings import RAY_SETTINGS, SERVE_SETTINGS, monitoring_settings
from tramontane.cluster.deploy import ray_up as cluster_file
from tramontane.cluster.deploy.ray_up import MARK, SERVE_FILE, SETTINGS_FILE
from tramontane.proto.errors import ConfigError, PlanError

SHIPPED = Path(cluster_file.__file__).parents[1] / "clouds"
PAGE = Path(__file__).parents[3] / "docs" / "deploy" / "ray-up.md"
CLOUDS = {"aws": "AMI", "gcp": "PROJECT IMAGE", "azure": "PUBLISHER OFFER SKU"}  # and their blanks
PROVIDERS = {**CLOUDS, "local": "HOST-1 HOST-2 HOST-3 HOST-4"}
MIXTRAL = ("--model", "mixtral-8x7b", "--stages", "4")
LOCAL = ("--provider", "local", "--stages", "3", "--cpu", "--gpu-memory", "1GiB")


def _shipped(provider: str) -> str:
    return (SHIPPED / f"{provider}.yaml").read_text(encoding="utf-8")


def _written(out: Path, *words: str) -> dict[str, Any]:
    app(["cluster-yaml", *words, "--out", str(out)], standalone_mode=False)
    return _loaded(out.read_text(encoding="utf-8"))


def _loaded(text: str) -> dict[str, Any]:
    document = yaml.safe_load(text)
    assert isinstance(document, dict)
    return document


def _ray_start(document: dict[str, Any], kind: str) -> dict[str, Any]:
    """The options of ``ray start``, as Ray reads them."""
    stop, command = document[f"{kind}_start_ray_commands"]
    assert stop == "ray stop"
    words = shlex.split(re.sub(r".*; (?=ray start )| && .*", "", command))
    assert words[:2] == ["ray", "start"]
    options: dict[str, Any] = start.make_context("start", words[2:]).params
    return options


def _serve_config(document: dict[str, Any], home: Path) -> EngineConfig:
    _run_setup(document, home)
    return EngineConfig.build(ConfigFile.read(home / SERVE_FILE), {})


def _run_setup(document: dict[str, Any], home: Path) -> None:
    """All but what makes an environment and installs."""
    for command in [*document["setup_commands"], *document["head_setup_commands"]]:
        if "venv" not in command and "pip" not in command:
            subprocess.run(
                ["bash", "-ec", command], check=True, env=os.environ | {"HOME": str(home)}
            )


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_shipped_file_is_what_the_command_writes(
    provider: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = _shipped(provider)
    command = shlex.split(shipped.splitlines()[0].removeprefix(MARK))
    assert command[:2] == ["tramontane", "cluster-yaml"]
    app(command[1:], standalone_mode=False)
    assert capsys.readouterr().out == shipped


@pytest.mark.parametrize("provider", PROVIDERS)
def test_ray_takes_a_shipped_file(provider: str) -> None:
    prepared = prepare_config(_loaded(_shipped(provider)))
    validate_config(prepared)
    types = prepared["available_node_types"]
    assert sum(each["min_workers"] for each in types.values()) == (3 if provider == "local" else 4)
    for kind in ("head", "worker"):
        _ray_start(prepared, kind)


def test_ray_refuses_what_it_does_not_know() -> None:
    """Else the test above could not fail."""
    with pytest.raises(Exception, match="Additional properties are not allowed"):
        validate_config(prepare_config(_loaded(_shipped("aws")) | {"machines": 4}))


@pytest.mark.parametrize(("provider", "blanks"), PROVIDERS.items())
def test_nothing_but_the_blanks_is_left_to_fill_in(provider: str, blanks: str) -> None:
    values = re.findall(
        r"^\s*(?:- )?(?:\w+: )?([A-Z][A-Z0-9-]+)$", _shipped(provider), re.MULTILINE
    )
    assert set(values) - {"PERSISTENT", "TERMINATE"} == set(blanks.split())


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_traps_of_ray_up_are_set_right(provider: str, tmp_path: Path) -> None:
    document = _loaded(_shipped(provider))
    _run_setup(document, tmp_path)
    _run_setup(document, tmp_path)  # again, as for every change of the file
    assert (tmp_path / ".bashrc").read_text().count(SETTINGS_FILE) == 1
    shell = [
        "env",
        "-i",
        f"HOME={tmp_path}",
        "PATH=/usr/bin:/bin",
        "bash",
        "-c",
        ". ~/.bashrc; env",
    ]
    lines = subprocess.run(shell, check=True, capture_output=True, text=True).stdout.splitlines()
    there = dict(line.split("=", 1) for line in lines)
    assert {name: there[name] for name in SERVE_SETTINGS} == SERVE_SETTINGS
    assert there["RAY_AUTH_MODE"] == "token"
    assert there.items() >= monitoring_settings().items()
    assert there["PATH"].split(":")[0] == f"{tmp_path}/tramontane/bin"
    assert document["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    for kind in ("head", "worker"):
        assert document[f"{kind}_start_ray_commands"][1].startswith("unset OMP_NUM_THREADS;"), (
            "ray up sets it to 1"
        )
        assert (
            _ray_start(document, kind)["labels"]
            == f"tramontane-role={'head' if kind == 'head' else 'stage'}"
        )
    settings = _ray_start(document, "head")["system_config"]
    assert settings.items() >= RAY_SETTINGS.items()
    version = re.findall(r"RAY_enable_autoscaler_v2=(\d)", document["head_start_ray_commands"][1])
    assert version == ["0" if provider == "local" else "1"]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_every_machine_has_the_cores_of_one_stage(provider: str, tmp_path: Path) -> None:
    document = _loaded(_shipped(provider))
    config = _serve_config(document, tmp_path)
    assert (config.stages, str(config.model), config.address, config.local) == (
        4,
        "/models/mixtral-8x7b",
        "auto",
        False,
    )
    assert _ray_start(document, "worker")["num_cpus"] == config.threads_per_stage
    assert _ray_start(document, "head")["num_cpus"] == (
        config.threads_per_stage if provider == "local" else 0
    )


@pytest.mark.parametrize(
    ("provider", "stages", "machine"),
    [
        ("aws", "8", "g6.2xlarge"),
        ("aws", "4", "g6e.2xlarge"),
        ("aws", "2", "p5.4xlarge"),
        ("gcp", "2", "a2-ultragpu-1g"),
    ],
)
def test_the_smallest_machine_that_will_do_is_chosen(
    provider: str, stages: str, machine: str, tmp_path: Path
) -> None:
    words = ("--provider", provider, "--model", "mixtral-8x7b", "--stages", stages)
    document = _written(tmp_path / "file.yaml", *words)
    stage = document["available_node_types"]["stage"]
    assert machine in stage["node_config"].values()
    assert stage["min_workers"] == stage["max_workers"] == document["max_workers"] == int(stages)


def test_pipelines_want_machines_of_their_own_each(tmp_path: Path) -> None:
    words = (
        "--provider",
        "aws",
        *MIXTRAL,
        "--replicas",
        "2",
        "--machine",
        "mine.large",
        "--gpu-memory",
        "48GiB",
    )
    document = _written(tmp_path / "file.yaml", *words)
    stage = document["available_node_types"]["stage"]
    assert (stage["min_workers"], stage["node_config"]["InstanceType"]) == (8, "mine.large")
    config = _serve_config(document, tmp_path)
    assert (config.replicas, config.gpu_memory) == (2, None), "the GPUs themselves are queried"


def test_hosts_are_as_many_as_stages_or_one_more(tmp_path: Path) -> None:
    for hosts, on_head in (
        ("10.0.0.1,10.0.0.2,10.0.0.3", 1),
        ("10.0.0.1, 10.0.0.2,10.0.0.3,10.0.0.4", 0),
    ):
        document = _written(tmp_path / "file.yaml", *LOCAL, "--hosts", hosts)
        provider = document["provider"]
        assert [provider["head_ip"], *provider["worker_ips"]] == hosts.replace(" ", "").split(",")
        assert _ray_start(document, "head")["num_cpus"] == on_head
        assert _ray_start(document, "worker")["memory"] == 2**30


def test_a_wheel_is_a_path_or_a_url(tmp_path: Path) -> None:
    path = _written(tmp_path / "a.yaml", *LOCAL, "--wheel", "built/tramontane-1.whl")
    assert path["file_mounts"]["~/tramontane-1.whl"] == "built/tramontane-1.whl"
    assert path["setup_commands"][1].endswith("pip install ~/tramontane-1.whl")
    assert path["setup_commands"][2].endswith(
        "pip install --force-reinstall --no-deps ~/tramontane-1.whl"
    ), "also if built anew"
    url = _written(
        tmp_path / "b.yaml", *LOCAL, "--wheel", "https://example.com/tramontane-1.whl?a=1&b=2"
    )
    assert list(url["file_mounts"]) == ["~/.ray/auth_token"]
    assert {shlex.split(command)[-1] for command in url["setup_commands"][1:3]} == {
        "https://example.com/tramontane-1.whl?a=1&b=2"
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--provider", "local", *MIXTRAL), "--provider local needs --gpu-memory"),
        ((*LOCAL, "--machine", "big"), "--machine is for clouds"),
        ((*LOCAL, "--hosts", "a,b"), "--hosts has 2 addresses for 3 stages; "),
        ((*LOCAL, "--hosts", "a"), "--hosts has 1 address for 3 stages; "),
        ((*LOCAL, "--hosts", "a,b,a"), "all different"),
        ((*LOCAL, "--hosts", "a,,b"), "--hosts is 'a,,b'"),
        (("--provider", "aws", *MIXTRAL, "--hosts", "a,b"), "--hosts: only with --provider local"),
        (("--provider", "aws", *MIXTRAL, "--cpu"), "--cpu: only with --provider local"),
        (
            ("--provider", "azure", *MIXTRAL, "--ssh-key", "~/.ssh/mine"),
            "--ssh-key: only with --provider local",
        ),
        (
            ("--provider", "aws", *MIXTRAL, "--gpu-memory", "80GiB"),
            "--machine and --gpu-memory belong together",
        ),
        (
            ("--provider", "local", *MIXTRAL, "--gpu-memory", "24GiB,48GiB"),
            "--gpu-memory must be one size",
        ),
        ((*LOCAL, "--config", "{}/address.yaml"), "address (in "),
    ],
)
def test_mistakes_are_named(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "address.yaml").write_text("address: auto\n")
    with pytest.raises(ConfigError) as refused:
        _written(tmp_path / "file.yaml", *(word.replace("{}", str(tmp_path)) for word in words))
    assert message in str(refused.value)
    assert not (tmp_path / "file.yaml").exists()


def test_a_model_that_fits_no_machine_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="too little memory for stage 1/1"):
        _written(
            tmp_path / "file.yaml", "--provider", "aws", "--model", "mixtral-8x7b", "--stages", "1"
        )


def test_an_unknown_cloud_is_named(tmp_path: Path) -> None:
    with pytest.raises(typer.TyperException):
        _written(tmp_path / "file.yaml", "--provider", "mars", *MIXTRAL)


def test_files_of_another_origin_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("cluster_name: mine\n")
    with pytest.raises(ConfigError, match="was not written by this command"):
        _written(tmp_path / "mine.yaml", *LOCAL)
    assert (tmp_path / "mine.yaml").read_text() == "cluster_name: mine\n"


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.yaml was not written by this command"):
        _written(tmp_path / "binary.yaml", *LOCAL)
    with pytest.raises(
        ConfigError, match=f"--out {tmp_path}/none/file.yaml: there is no folder {tmp_path}/none"
    ):
        _written(tmp_path / "none" / "file.yaml", *LOCAL)
    with pytest.raises(
        ConfigError, match=r"--out /proc/file\.yaml cannot be written: No such file"
    ):
        _written(Path("/proc/file.yaml"), *LOCAL)


def test_the_documentation_has_every_option() -> None:
    table = PAGE.read_text(encoding="utf-8")
    command = get_command(app).commands["cluster-yaml"]  # type: ignore[attr-defined]
    options = [name for parameter in command.params for name in parameter.opts]
    assert len(options) > 20
    assert [name for name in options if f"`{name}`" not in table and name != "--help"] == []
