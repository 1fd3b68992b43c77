"""``tramontane k8s``: what it writes follows from the plan, and what it refuses it names."""

from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from ray.serve._private.application_state import override_deployment_info
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeApplicationSchema
from tiny_models import random_model, tiny_args, write_checkpoint
from typer.main import get_command

from tramontane.cluster.cli.main import app
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.serving.app import UNBOUNDED, build, validate_config
from tramontane.cluster.serving.autoscaling import (
    INTERVALS,
    PipelineAutoscalingPolicy,
    router_scaling_options,
)
from tramontane.proto.errors import ConfigError, PlanError

ROOT = Path(__file__).parents[3]
MIXTRAL = ("--model", "mixtral-8x7b", "--gpu-memory", "48GiB")


def _written(folder: Path, *words: str) -> dict[str, Any]:
    app(["k8s", *words, "--out", str(folder)], standalone_mode=False)
    return {
        path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in folder.iterdir()
    }


def _application(documents: dict[str, Any]) -> dict[str, Any]:
    (application,) = yaml.safe_load(documents["rayservice"]["spec"]["serveConfigV2"])[
        "applications"
    ]
    assert isinstance(application, dict)
    return application


def _groups(documents: dict[str, Any]) -> dict[str, Any]:
    return {
        group["groupName"]: group
        for group in documents["rayservice"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    }


def test_one_pod_for_each_stage_of_each_pipeline(tmp_path: Path) -> None:
    documents = _written(
        tmp_path, *MIXTRAL, "--stages", "4", "--replicas", "2", "--max-replicas", "3"
    )
    stages = _groups(documents)["stages"]
    assert (stages["replicas"], stages["minReplicas"], stages["maxReplicas"]) == (8, 8, 12)
    assert (
        stages["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    )
    assert documents["disruption-budget"]["spec"]["minAvailable"] == 7
    application = _application(documents)
    assert validate_config(application["args"]).replicas == 1, "each is planned as if it were alone"
    scaling = application["deployments"][0]["autoscaling_config"]
    assert (
        scaling["min_replicas"],
        scaling["max_replicas"],
        scaling["target_ongoing_requests"],
    ) == (2, 3, 192)
    assert documents["rayservice"]["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"]


def test_spare_pods_of_stages_are_more_pods_and_no_other_plan(tmp_path: Path) -> None:
    """A drained node takes one pod at a time, with spare ones too."""
    words = (*MIXTRAL, "--stages", "4", "--replicas", "2", "--max-replicas", "3")
    without = _written(tmp_path / "without", *words)
    spared = _written(tmp_path / "spared", *words, "--spare-stages", "2")
    counts = [
        [group["replicas"], group["minReplicas"], group["maxReplicas"]]
        for group in (_groups(without)["stages"], _groups(spared)["stages"])
    ]
    assert counts == [[8, 8, 12], [10, 10, 14]]
    budgets = [each["disruption-budget"]["spec"]["minAvailable"] for each in (without, spared)]
    assert budgets == [7, 9]
    assert _application(without) == _application(spared)
    assert _groups(without)["stages"]["template"] == _groups(spared)["stages"]["template"]


def test_keys_of_the_file_decide_when_pipelines_are_added_and_removed(tmp_path: Path) -> None:
    """The options of a deployment override the application's, so they have to be the ones that the
    application would have.
    """
    keys: dict[str, Any] = {
        "autoscale_load": 0.5,
        "autoscale_tokens": 9000,
        "upscale_delay": 3.0,
        "downscale_delay": 7.0,
    }
    # of which an application on GPUs does not know before there is a plan
    keys["max_num_seqs"] = 64
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump(keys))
    words = ("--stages", "4", "--max-replicas", "3", "--config", str(tmp_path / "keys.yaml"))
    given = _application(_written(tmp_path / "out", *MIXTRAL, *words))["deployments"][0][
        "autoscaling_config"
    ]
    made = router_scaling_options(EngineConfig.build(None, keys | {"max_replicas": 3}))[
        "autoscaling_config"
    ]
    assert (
        given["target_ongoing_requests"],
        given["upscale_delay_s"],
        given["downscale_delay_s"],
    ) == (32, 3.0, 7.0)
    assert given["policy"]["policy_kwargs"] == {"autoscale_load": 0.5, "autoscale_tokens": 9000}
    assert AutoscalingConfig.model_validate(given).model_dump(
        exclude=set(INTERVALS)
    ) == made.model_dump(exclude=set(INTERVALS))


def test_ray_serve_takes_what_the_config_says_over_what_the_application_does(
    tmp_path: Path,
) -> None:
    """Pipelines that come and go, and who is where; other options of the deployments stay."""
    documents = _written(
        tmp_path, *MIXTRAL, "--stages", "4", "--replicas", "2", "--max-replicas", "3"
    )
    given, made = (
        ServeApplicationSchema.model_validate(_application(documents)),
        _deployments(build({})),
    )
    infos = {
        name: DeploymentInfo(each._deployment_config, each._replica_config, 0, "job")
        for name, each in made.items()
    }
    merged = override_deployment_info(infos, given)
    router = merged["Router"].deployment_config
    assert router.autoscaling_config is not None
    assert (router.autoscaling_config.min_replicas, router.autoscaling_config.max_replicas) == (
        2,
        3,
    )
    assert router.max_ongoing_requests == UNBOUNDED
    policy = router.autoscaling_config.policy
    assert isinstance(policy.get_policy()(**policy.policy_kwargs), PipelineAutoscalingPolicy)
    assert merged["Ingress"].deployment_config.num_replicas == 2
    assert merged["Ingress"].deployment_config.max_surge_percent == 0
    assert router.max_surge_percent == 100
    wanted = {
        name: info.replica_config.ray_actor_options["resources"] for name, info in merged.items()
    }
    assert wanted == {
        "Router": {"tramontane_router": 1},
        "Batch": {"tramontane_router": 1},
        "Ingress": {"tramontane_ingress": 1},
    }
    assert {info.replica_config.ray_actor_options["num_cpus"] for info in merged.values()} == {0}


def _deployments(application: Any) -> dict[str, Any]:
    """Of an application and all that it is bound to."""
    bound = application._bound_deployment
    found = {bound.name: bound}
    for argument in bound.init_args:
        if hasattr(argument, "_bound_deployment"):
            found |= _deployments(argument)
    return found


def test_flags_and_a_files_keys_become_the_applications(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text(
        "max_num_seqs: 8\njobs_storage: s3://bucket/jobs\nstages: 2\n"
    )
    file = ("--config", str(tmp_path / "keys.yaml"))
    documents = _written(
        tmp_path / "out",
        *MIXTRAL,
        *file,
        "--stages",
        "4",
        "--link",
        "direct",
        "--threads-per-stage",
        "6",
    )
    config = validate_config(_application(documents)["args"])
    assert (config.stages, config.max_num_seqs, config.link, config.threads_per_stage) == (
        4,
        8,
        "direct",
        6,
    )
    assert str(config.model) == "/models/mixtral-8x7b"
    assert config.jobs_storage is not None
    assert config.jobs_storage.get_secret_value() == "s3://bucket/jobs"


def test_a_folder_here_is_one_of_the_same_name_there(tmp_path: Path) -> None:
    args = tiny_args(n_layers=4)
    folder = write_checkpoint(tmp_path / "My-Model.v1", args, random_model(args))
    documents = _written(
        tmp_path / "out", "--model", str(folder), "--stages", "2", "--gpu-memory", "1GiB", "--cpu"
    )
    assert _application(documents)["args"]["model"] == "/models/My-Model.v1"
    assert documents["model"]["data"]["name"] == "My-Model.v1"
    waits = documents["rayservice"]["spec"]["rayClusterConfig"]["headGroupSpec"]["template"][
        "spec"
    ]["initContainers"]
    assert "/models/My-Model.v1" in waits[0]["command"][-1]
    container = _groups(documents)["stages"]["template"]["spec"]["containers"][0]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_a_model_that_does_not_fit_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match=r"too little memory for stage 1/4 .*; possible: 5 GPUs of 24 GiB"
    ):
        _written(
            tmp_path / "out", "--model", "mixtral-8x7b", "--stages", "4", "--gpu-memory", "24GiB"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--stages", "2", "--gpu-memory", "24GiB,48GiB"), "--gpu-memory must be one size"),
        (
            (*MIXTRAL, "--stages", "4", "--replicas", "3", "--max-replicas", "2"),
            "--max-replicas is 2; it must be at least --replicas, which is 3",
        ),
        (
            (*MIXTRAL, "--stages", "4", "--image", "tramontane"),
            "--image is 'tramontane'; it must have a tag",
        ),
        ((*MIXTRAL, "--stages", "4", "--config", "{}/api.yaml"), "api_key_file (in "),
        (
            (*MIXTRAL, "--stages", "4", "--config", "{}/secret.yaml"),
            "jobs_database: a password is not for a Serve config",
        ),
        (
            (*MIXTRAL, "--stages", "4", "--config", "{}/port.yaml"),
            "port: not for a Serve config; set http_options",
        ),
        (
            (*MIXTRAL, "--stages", "4", "--config", "{}/shared.yaml"),
            "shared.yaml): not allowed in the file, since this command sets it",
        ),
        (
            ("--model", "{}/a b", "--stages", "2", "--gpu-memory", "4GiB"),
            "the folder's name may have only letters",
        ),
    ],
)
def test_mistakes_are_named(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "api.yaml").write_text("api_key_file: keys\n")
    (tmp_path / "secret.yaml").write_text("jobs_database: postgresql://me:secret@host/jobs\n")
    (tmp_path / "port.yaml").write_text("port: 80\n")
    (tmp_path / "shared.yaml").write_text("stages_per_gpu: 2\n")
    args = tiny_args(n_layers=4)
    write_checkpoint(tmp_path / "a b", args, random_model(args))
    with pytest.raises(ConfigError) as refused:
        _written(tmp_path / "out", *(word.replace("{}", str(tmp_path)) for word in words))
    assert message in str(refused.value)
    assert "secret@" not in str(refused.value)


K8S_SETS = {
    "model",
    "placement_timeout",
    "ingress_replicas",
    "api_key_file",
    "replicas",
    "max_replicas",
}
CLUSTER_YAML_SETS = {"model", "address", "gpu_memory", "api_key_file", "replicas", "max_replicas"}
PODS_ARE_ALIKE = {"expert_memory", "gpu_speed", "stages_per_gpu"}  # and so are machines


@pytest.mark.parametrize(
    ("command", "key"),
    [("k8s", key) for key in sorted(K8S_SETS | PODS_ARE_ALIKE)]
    + [("cluster-yaml", key) for key in sorted(CLUSTER_YAML_SETS | PODS_ARE_ALIKE)],
)
def test_a_file_may_not_have_the_keys_that_the_command_sets(
    command: str, key: str, tmp_path: Path
) -> None:
    (tmp_path / "keys.yaml").write_text(f"{key}: 2\n")
    words = (
        "--stages",
        "4",
        "--config",
        str(tmp_path / "keys.yaml"),
        "--out",
        str(tmp_path / "out"),
    )
    provider = ("--provider", "local") if command == "cluster-yaml" else ()
    with pytest.raises(ConfigError) as refused:
        app([command, *MIXTRAL, *words, *provider], standalone_mode=False)
    assert (
        str(refused.value)
        == f"{key} (in {tmp_path / 'keys.yaml'}): not allowed in the file, since this command"
        " sets it"
    )


def test_an_overlay_without_its_base_says_what_kubectl_would_miss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = f"the overlay needs {tmp_path / 'mine/../../base'}, which does not exist"
    words, k8s = (*MIXTRAL, "--stages", "4"), ROOT / "k8s"
    _written(tmp_path / "mine", *words)
    assert missing in capsys.readouterr().out
    for base in (str(k8s), "https://example.com/tramontane//k8s"):
        _written(tmp_path / "mine", *words, "--base", base)
        assert "not there" not in capsys.readouterr().out


@pytest.mark.parametrize("number", ["0", "-1"])
def test_numbers_that_can_only_be_slips_are_named(number: str, tmp_path: Path) -> None:
    with pytest.raises(typer.TyperException):
        _written(tmp_path, *MIXTRAL, "--stages", "4", "--replicas", number)


def test_the_number_of_pods_is_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(typer.TyperException) as refused:
        _written(tmp_path, *MIXTRAL)
    assert "--stages" in refused.value.format_message()


def test_the_documentation_has_every_option() -> None:
    table = (ROOT / "docs" / "deploy" / "kubernetes.md").read_text(encoding="utf-8")
    options = [
        name for parameter in get_command(app).commands["k8s"].params for name in parameter.opts
    ]  # type: ignore[attr-defined]
    assert len(options) > 20
    assert [name for name in options if f"`{name}`" not in table and name != "--help"] == []


def test_files_of_another_origin_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: []\n")
    with pytest.raises(ConfigError, match=r"kustomization\.yaml was not written by this command"):
        _written(tmp_path, *MIXTRAL, "--stages", "4")
    assert [path.name for path in tmp_path.iterdir()] == ["kustomization.yaml"]


@pytest.mark.parametrize(
    ("below", "message"),
    [("", "is a file; give a folder"), ("/x", "cannot be written: Not a directory")],
)
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, below: str, message: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError) as refused:
        app(
            ["k8s", *MIXTRAL, "--stages", "4", "--out", f"{tmp_path}/file{below}"],
            standalone_mode=False,
        )
    assert str(refused.value) == f"--out {tmp_path}/file{below} {message}"


def test_a_file_that_is_no_text_stays(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"kustomization\.yaml was not written by this command"):
        _written(tmp_path, *MIXTRAL, "--stages", "4")


def test_files_of_a_model_that_is_removed_are_removed(tmp_path: Path) -> None:
    _written(tmp_path, *MIXTRAL, "--stages", "4")
    assert set(_written(tmp_path, "--cpu", "--stages", "2", "--gpu-memory", "1GiB")) == {
        *("kustomization", "rayservice", "disruption-budget")
    }
