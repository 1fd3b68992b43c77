"""The keys of the configuration: what each one has an effect on is a decision, and is repeated
here.
"""

import json
import re
from inspect import signature
from pathlib import Path

import pytest
import typer
from tiny_models import tiny_args, tiny_plan

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.cli.deploy import THREADS_HELP
from tramontane.cluster.cli.main import app
from tramontane.cluster.cli.serve import drain
from tramontane.cluster.config.engine_config import (
    CLI_ONLY_KEYS,
    FORMER_NAMES,
    GROUPS,
    OTHER_NAMES,
    ConfigFile,
    EngineConfig,
)
from tramontane.cluster.config.key import extra
from tramontane.cluster.deploy.planned_cluster import THREADS
from tramontane.cluster.llm.offline import LLM
from tramontane.cluster.serving.app import validate_config
from tramontane.cluster.serving.autoscaling import PipelineAutoscalingPolicy
from tramontane.proto.errors import ConfigError
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.timing import DEFAULT_DRAIN_S, DRAIN_S
from tramontane.router.engine.router import Router

# P: pipelines with different values are different pipelines, so that no new deployment adopts the
# old ones. S: a Ray Serve config may have the key. F: there is a flag.
KEYS = {
    "model": "PSF",
    "load_format": "PSF",
    "stages": "PSF",
    "stages_per_gpu": "PSF",
    "address": "--F",
    "dtype": "PSF",
    "quantize": "PSF",
    "batch_invariant": "PSF",
    "max_model_len": "PSF",
    "page_size": "PSF",
    "kv_cache_memory": "PSF",
    "kv_cache_dtype": "PSF",
    "threads_per_stage": "PSF",
    "placement_timeout": "-S-",
    "gpu_memory": "PSF",
    "gpu_speed": "PSF",
    "link": "PSF",
    "inline_hidden_states_below": "--F",
    "step_timeout": "-SF",
    "expert_actors": "PSF",
    "expert_replicas": "PSF",
    "expert_memory": "PSF",
    "expert_load": "PSF",
    "stage_times": "PSF",
    "expert_micro_batches": "PSF",
    "max_num_seqs": "PSF",
    "max_num_batched_tokens": "-SF",
    "speculative_config": "PSF",
    "max_in_flight": "-S-",
    "enable_prefix_caching": "-SF",
    "async_scheduling": "-SF",
    "share_prefixes": "-SF",
    "itl_target_ms": "-SF",
    "local": "--F",
    "seed": "--F",
    "json": "--F",
    "served_model_name": "-SF",
    "host": "--F",
    "port": "--F",
    "grpc_port": "--F",
    "ingress_replicas": "-S-",
    "max_queued_requests": "-SF",
    "max_queued_tokens": "-SF",
    "max_body_bytes": "-S-",
    "stream_writes_per_s": "-S-",
    "drain_timeout": "-SF",
    "slow_client_timeout": "-SF",
    "dashboard": "--F",
    "move_experts": "-SF",
    "public_metrics": "-SF",
    "strict_requests": "-SF",
    "allowed_origins": "-SF",
    "api_key": "--F",
    "api_key_file": "-SF",
    "replicas": "-SF",
    "max_replicas": "-SF",
    "autoscale_load": "-SF",
    "autoscale_tokens": "-SF",
    "upscale_delay": "-SF",
    "downscale_delay": "-SF",
    "jobs_database": "-SF",
    "jobs_storage": "-SF",
    "jobs_concurrency": "-SF",
    "jobs_retention": "-SF",
    "jobs_max_open": "-SF",
    "jobs_max_lines": "-SF",
    "jobs_max_bytes": "-SF",
    "jobs_url_prefixes": "-SF",
    "log_format": "-SF",
    "log_level": "-SF",
    "tracing_exporter": "--F",
    "tracing_sampling_ratio": "--F",
}


def test_each_key_has_the_effects_of_the_table() -> None:
    letters = {"defines_pipeline": "P", "in_serve_config": "S", "has_flag": "F"}
    found = {
        field.alias or name: "".join(
            letter if extra(field)[word] else "-" for word, letter in letters.items()
        )
        for group in GROUPS
        for name, field in group.model_fields.items()
    }
    assert found == KEYS


def test_defaults_elsewhere_are_those_of_the_keys() -> None:
    keys = EngineConfig()
    spec = PipelineSpec(
        "app-0",
        tiny_plan(tiny_args(n_layers=2)),
        RandomWeights(),
        threads_per_stage=1,
        use_gpus=False,
    )
    assert (spec.expert_micro_batches, spec.placement_timeout_s) == (
        keys.expert_micro_batches,
        keys.placement_timeout,
    )
    assert signature(Router).parameters["step_timeout_s"].default == keys.step_timeout
    assert PipelineAutoscalingPolicy()._autoscale_load == keys.autoscale_load


def test_a_model_may_be_below_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert EngineConfig.build(None, {"model": "~/models/x"}).model == tmp_path / "models/x"
    assert EngineConfig.build(None, {"model": Path("~")}).model == tmp_path
    assert EngineConfig.build(None, {"model": "~no-such-user/x"}).model == Path("~no-such-user/x")
    assert EngineConfig.build(None, {"model": "a~"}).model == Path("a~")


def test_the_first_name_of_a_model_is_that_of_its_answers() -> None:
    config = EngineConfig.build(None, {"served_model_name": "a, b/c"})
    assert (config.model_name, config.model_names) == ("a", ("a", "b/c"))
    assert EngineConfig.build(None, {}).model_names == ("demo",)
    for wrong in ("a,", ",", "a,b,a", "a, a"):
        with pytest.raises(ConfigError, match="it must be names, all different"):
            EngineConfig.build(None, {"served_model_name": wrong})


def test_texts_have_the_numbers_that_apply() -> None:
    unset = {name: str(extra(field)["unset"]) for name, field in EngineConfig.model_fields.items()}
    assert (
        unset["drain_timeout"]
        == f"{DEFAULT_DRAIN_S:g} for serve, {DRAIN_S:g} in a Ray Serve config"
    )
    assert unset["threads_per_stage"].endswith(
        f"on k8s and cluster-yaml {THREADS}, or 1 with --cpu"
    )
    assert signature(drain).parameters["timeout"].default == DRAIN_S
    assert f"{THREADS}, or 1 with --cpu" in THREADS_HELP


def test_an_inline_limit_is_for_a_cluster_that_the_command_starts() -> None:
    assert (
        EngineConfig.build(None, {"inline_hidden_states_below": "2MiB"}).inline_hidden_states_below
        == 2**21
    )
    with pytest.raises(
        ConfigError, match="--local runs without Ray, so --inline-hidden-states-below"
    ):
        EngineConfig.build(None, {"inline_hidden_states_below": "2MiB", "local": True})
    with pytest.raises(
        ConfigError, match=r"--system-config='\{\"max_direct_call_object_size\": 2097152\}'"
    ):
        EngineConfig.build(None, {"inline_hidden_states_below": "2MiB", "address": "auto"})


WRONG = [
    True,
    1,
    -1,
    0,
    1.5,
    "x",
    "",
    [],
    {},
    [1],
    {"a": 1},
    10**30,
    -(10**30),
    float("nan"),
    float("inf"),
    [None],
    [[1]],
]


@pytest.mark.parametrize("name", sorted(EngineConfig.key_names()))
def test_a_wrong_value_is_described_in_our_words(name: str) -> None:
    """Not in pydantic's, which are about types of Python."""
    messages = []
    for value in WRONG:
        try:
            EngineConfig.build(None, {name: value})
        except ConfigError as error:
            messages.append(str(error))
    assert messages or name == "jobs_url_prefixes"  # takes every text
    for message in messages:
        assert f"--{name.replace('_', '-')}" in message
        assert "not allowed here" not in message
        assert not re.search(
            r"input |valid |should be|<class|instance of|dictionary", message, re.IGNORECASE
        ), message


OTHERS = {
    "pipeline_parallel_size": ("stages", 3),
    "data_parallel_size": ("replicas", 2),
    "quantization": ("quantize", "int8"),
    "block_size": ("page_size", 8),
    "kv_cache_memory_bytes": ("kv_cache_memory", 2**29),
    "measured": ("stage_times", [{"first": 0, "last": 1, "busy": 1.0}]),
    "inline_limit": ("inline_hidden_states_below", 2**21),
    "ping_pong": ("expert_micro_batches", 3),
    "slow_reader_timeout": ("slow_client_timeout", 5.0),
    "target_load": ("autoscale_load", 0.5),
    "target_tokens": ("autoscale_tokens", 900),
}


def test_vllms_names_and_former_names_are_the_keys(tmp_path: Path) -> None:
    """In files, in a Ray Serve config, from Python, and as flags."""
    assert dict(OTHER_NAMES) == {other: name for other, (name, _) in OTHERS.items()}
    file = tmp_path / "server.yaml"
    for other, (name, value) in OTHERS.items():
        expected = EngineConfig.build(None, {name: value})
        assert expected != EngineConfig()
        assert EngineConfig.build(None, {other: value}) == expected
        assert EngineConfig(**{other: value}) == expected
        file.write_text(json.dumps({other.replace("_", "-"): value}))
        assert EngineConfig.build(ConfigFile.read(file), {}) == expected
        if name not in CLI_ONLY_KEYS:
            assert validate_config({other: value}) == expected


def test_flags_have_other_names(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--block-size", "8", "--pipeline-parallel-size=3", "--data-parallel-size", "2"]
    app(["config", *flags, "--json"], standalone_mode=False)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["page_size"], shown["stages"], shown["replicas"]) == (8, 3, 2)
    with pytest.raises(ConfigError, match=r"^--page-size is 0; it must be at least 1"):
        app(["config", "--block-size", "0"], standalone_mode=False)


@pytest.mark.parametrize("other", sorted(OTHERS.keys() - {"measured"}))  # whose flag has a file
def test_every_other_name_is_a_flag(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, value = OTHERS[other]
    app(["config", f"--{other.replace('_', '-')}={value}", "--json"], standalone_mode=False)
    shown = capsys.readouterr()
    assert json.loads(shown.out)[name] == value
    former = f"--{other.replace('_', '-')} is called --{name.replace('_', '-')} now"
    assert (former in shown.err) == (other in FORMER_NAMES)


def test_what_follows_the_options_is_no_former_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.TyperException):
        app(["config", "--", "--slow-reader-timeout=3"], standalone_mode=False)
    with pytest.raises(typer.TyperException):
        app(["plan", "--target-load=1"], standalone_mode=False)
    assert capsys.readouterr().err == ""


def test_a_value_may_look_like_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    app(["config", "--address", "--block-size=8", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["address"] == "--block-size=8"


@pytest.mark.parametrize(
    ("flag", "value", "name", "expected"),
    [
        ("-pp", "3", "stages", 3),
        ("-dp", "2", "replicas", 2),
        ("-q", "fp8", "quantize", "fp8"),
        ("--max_num_seqs", "7", "max_num_seqs", 7),
        ("--pipeline_parallel_size", "3", "stages", 3),
    ],
)
def test_vllms_short_names_and_underscores_are_flags(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, name: str, expected: object
) -> None:
    app(["config", flag, value, "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)[name] == expected


ORIGINS = ("https://chat.example.com", "http://localhost:3000")


@pytest.mark.parametrize("given", [",".join(ORIGINS), json.dumps(ORIGINS), list(ORIGINS)])
def test_origins_are_a_list_with_commas_or_vllms_json(given: object) -> None:
    assert EngineConfig.build(None, {"allowed_origins": given}).allowed_origins == ORIGINS
    assert EngineConfig.build(None, {"allowed_origins": '["*"]'}).allowed_origins == ("*",)
    assert EngineConfig.build(None, {"allowed_origins": "*"}).allowed_origins == ("*",)


@pytest.mark.parametrize(
    "given", ["chat.example.com", "https://a/", "https://a/b", "https://A.b", "a,https://b", "[1"]
)
def test_what_no_browser_sends_is_no_origin(given: str) -> None:
    with pytest.raises(ConfigError, match=r"^--allowed-origins has '"):
        EngineConfig.build(None, {"allowed_origins": given})


def test_help_names_each_option_once(capsys: pytest.CaptureFixture[str]) -> None:
    app(["config", "--help"], standalone_mode=False)
    assert "--page-size" in (text := capsys.readouterr().out)
    assert "--block-size" not in text


FORMER = "--slow-reader-timeout is called --slow-client-timeout now; version 0.4 will refuse"


def test_former_names_are_warned_of(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    app(["config", "--slow-reader-timeout=7", "--block-size=8", "--json"], standalone_mode=False)
    shown = capsys.readouterr()
    assert json.loads(shown.out)["slow_client_timeout"] == 7
    assert shown.err.startswith(f"warning: {FORMER}")
    assert shown.err.count("\n") == 1
    EngineConfig.build(None, {"block_size": 8})
    assert not caplog.messages
    (tmp_path / "server.yaml").write_text("slow-reader-timeout: 7")
    EngineConfig.build(ConfigFile.read(tmp_path / "server.yaml"), {})
    (message,) = caplog.messages
    assert message.startswith(FORMER.replace("--", "").replace("-", "_"))


@pytest.mark.parametrize("names", [("page_size", "block_size"), ("block_size", "page_size")])
def test_a_key_has_one_value_whatever_its_names(tmp_path: Path, names: tuple[str, str]) -> None:
    twice = dict(zip(names, (16, 8), strict=True))
    message = f"{names[0]} and {names[1]} are names of one key; keep page_size$"
    file = tmp_path / "server.yaml"
    file.write_text(json.dumps(twice))
    for read in (lambda: EngineConfig.build(None, twice), lambda: validate_config(twice)):
        with pytest.raises(ConfigError, match=f"^{message}"):
            read()
    with pytest.raises(ConfigError, match=f"^--config {file}: {message}"):
        ConfigFile.read(file)


def test_other_names_are_no_way_around_a_rule() -> None:
    with pytest.raises(ConfigError, match="inline_hidden_states_below: not for a Serve config"):
        validate_config({"inline_limit": "2MiB"})
    with pytest.raises(ConfigError, match="replicas is 2, and LLM runs one pipeline"):
        LLM(data_parallel_size=2)
