"""``tramontane k8s --name``: two models in one namespace have no object, label or pod in common."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from k8s_documents import K8S, check_schema, ray_service, rendered
from k8s_rules import Document, groups_of, operators_complaints

from tramontane.cluster.cli.main import app
from tramontane.cluster.deploy.k8s_pieces import APPLIED_APART, MAX_NAME
from tramontane.proto.errors import ConfigError

FLAGS = ("--model", "mixtral-8x7b", "--stages", "4", "--gpu-memory", "48GiB", "--redis")
# labels that say no name, and a dashboard
OF_ALL = {"tramontane-role", "tramontane-part", "tramontane-ray-core"}


def _write(folder: Path, name: str, *flags: str) -> Path:
    app(["k8s", *FLAGS, "--name", name, *flags, "--out", str(folder)], standalone_mode=False)
    return folder


def _all_documents(folder: Path) -> tuple[Document, ...]:
    """What all commands of the runbook apply, in one overlay's folder."""
    (folder / "secrets" / "keys.txt").write_text("a-key\n")
    return tuple(
        document
        for part in (folder, *(folder / name for name in APPLIED_APART))
        for document in rendered(part)
    )


@pytest.fixture
def two_models(tmp_path: Path) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    first, second = (_write(tmp_path / name, name) for name in ("mixtral", "nemo-12b"))
    return _all_documents(first), _all_documents(second)


def test_two_models_share_no_object(
    two_models: tuple[tuple[Document, ...], tuple[Document, ...]],
) -> None:
    first, second = ({(d["kind"], d["metadata"]["name"]) for d in each} for each in two_models)
    assert len(first) == len(two_models[0]) > 15
    assert not first & second
    for name, documents in zip(("mixtral", "nemo-12b"), two_models, strict=True):
        assert {d["metadata"]["name"].startswith(name) for d in documents} == {True}


def test_no_selector_finds_a_pod_of_the_other_model(
    two_models: tuple[tuple[Document, ...], tuple[Document, ...]],
) -> None:
    for own, others in (two_models, two_models[::-1]):
        labels = [dict(each) for each in _pod_labels(others)]
        selectors = list(_selectors(list(own)))
        assert len(selectors) > 10
        for selector in selectors:
            if "app.kubernetes.io/component" in selector or "app.kubernetes.io/name" in selector:
                continue  # the operator and Prometheus, which are one for all
            assert selector, "which finds all pods"
            assert not [each for each in labels if selector.items() <= each.items()], selector
            assert "app" in selector, "nor a pod that the operator adds"


def test_nothing_of_an_overlay_with_a_name_has_the_usual_name(
    two_models: tuple[tuple[Document, ...], tuple[Document, ...]],
) -> None:
    for document in two_models[0]:
        if document["kind"] == "PrometheusRule":
            continue
        values = set(_texts(document)) - OF_ALL
        assert not [each for each in values if each.startswith("tramontane-")], document["kind"]


def test_an_overlay_with_a_name_is_what_kubernetes_and_the_operator_accept(
    two_models: tuple[tuple[Document, ...], tuple[Document, ...]],
) -> None:
    for document in two_models[0]:
        check_schema(document)
    assert operators_complaints(ray_service(two_models[0])) == []


def test_another_name_is_all_that_differs(tmp_path: Path) -> None:
    """An overlay with manifests of its own, by the usual name, is one that refers to k8s/."""
    app(["k8s", *FLAGS, "--base", ".", "--out", str(tmp_path / "own")], standalone_mode=False)
    base = os.path.relpath(K8S, tmp_path / "to")
    app(["k8s", *FLAGS, "--base", base, "--out", str(tmp_path / "to")], standalone_mode=False)
    own = rendered(tmp_path / "own")
    assert own == rendered(tmp_path / "to")
    named = rendered(_write(tmp_path / "mixtral", "mixtral"))
    assert [d["kind"] for d in named] == [d["kind"] for d in own]


def test_settings_of_the_user_stay_and_the_base_does_not(tmp_path: Path) -> None:
    """A claim has a storage class, for example; the base follows the version of the command."""
    folder = _write(tmp_path, "mixtral")
    claim, settings = folder / "models-volume" / "claim.yaml", folder / "base" / "settings.yaml"
    claim.write_text("of the user")
    expected = settings.read_text()
    settings.write_text(expected + "  OLD: '1'\n")
    _write(tmp_path, "mixtral", "--replicas", "2")
    assert claim.read_text() == "of the user"
    assert settings.read_text().splitlines()[1:] == expected.splitlines()[1:]


def test_a_base_of_another_origin_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "services.yaml").write_text("of another origin")
    with pytest.raises(ConfigError, match=r"services\.yaml was not written by this command"):
        _write(tmp_path, "mixtral")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Mixtral", "must be small letters"),
        ("mixtral.8x7b", "must be small letters"),
        ("8x7b", "with a letter first"),
        ("mixtral-", "no dash at the end"),
        ("", "must be small letters"),
        ("m" * (MAX_NAME + 1), "has 48 characters; it may have 47"),
        ("mixtral-redis", "the label of another model's Redis"),
        ("true", "does not read as text"),
        ("null", "does not read as text"),
        ("y", "does not read as text"),
    ],
)
def test_a_name_that_no_object_may_have_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        _write(tmp_path / "out", name)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_the_longest_name_fits(tmp_path: Path) -> None:
    documents = _all_documents(_write(tmp_path, "m" * MAX_NAME))
    assert operators_complaints(ray_service(documents)) == []
    assert max(len(d["metadata"]["name"]) for d in documents) <= 63
    (redis,) = (d for d in documents if d["kind"] == "StatefulSet")
    # a label of its pods has its name, a dash and a hash of ten characters
    assert len(redis["metadata"]["name"]) + 11 <= 63 + 1


def test_a_base_with_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--base has manifests of the name tramontane"):
        _write(tmp_path, "mixtral", "--base", "../..")


def _pod_labels(documents: tuple[Document, ...]) -> Iterator[dict[str, str]]:
    for group in groups_of(ray_service(documents)):
        yield group["template"]["metadata"]["labels"]
    head = groups_of(ray_service(documents))[0]["template"]["metadata"]["labels"]
    yield head | {"ray.io/node-type": "redis-cleanup"}  # the operator's job
    for document in documents:
        if document["kind"] in ("StatefulSet", "Job"):
            yield document["spec"]["template"].get("metadata", {}).get("labels", {})


def _selectors(value: Any, key: str = "") -> Iterator[dict[str, str]]:
    """The labels of each selector, of pods and not of namespaces."""
    if isinstance(value, list):
        for part in value:
            yield from _selectors(part, key)
    elif isinstance(value, dict):
        if key in ("selector", "podSelector", "labelSelector"):
            yield value.get("matchLabels", {k: v for k, v in value.items() if isinstance(v, str)})
        for inner, part in value.items():
            yield from _selectors(part, inner)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        yield from _texts(part)
