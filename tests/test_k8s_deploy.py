"""The demo overlay's Serve config, as kubectl renders it, deployed by REST on a Ray that was
started as its pods are.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from blocking_head import blocking_head
from k8s_documents import overlay, ray_service, serve_config
from k8s_rules import groups_of, offered_resources
from ray.util import get_node_ip_address
from serve_cluster import GRPC, GRPC_PORT, PORT, URL, wait_until_ready

from tramontane.client import Client

DASHBOARD, GCS_PORT = 8767, 8768
BIN = Path(sys.executable).parent
KEY = "a-key-of-the-test"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of the pods: what the ConfigMap has, and a token, as the operator gives it."""
    (settings,) = (d for d in overlay("demo") if d["kind"] == "ConfigMap")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return kept | settings["data"] | token | {"HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture
def cluster(environment: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """All pods of the demo on one node, which offers what they offer together; the URL of its
    dashboard.
    """
    # pytest's own names are too long for Ray's sockets
    folder = Path(tempfile.mkdtemp(prefix="k8s-"))
    groups = groups_of(ray_service(overlay("demo")))
    cpus = sum(
        int(group["rayStartParams"]["num-cpus"]) * group.get("replicas", 1) for group in groups
    )
    offered = {
        kind: n * group["replicas"]
        for group in groups[1:]
        for kind, n in offered_resources(group).items()
    }
    ports = {"port": GCS_PORT, "dashboard-port": DASHBOARD}
    options = {
        "num-cpus": cpus,
        "resources": json.dumps(offered),
        "object-store-memory": 2**28,
        "temp-dir": folder,
    }
    url = f"http://127.0.0.1:{DASHBOARD}"
    with blocking_head(
        ports | options,
        environment,
        tmp_path / "ray.log",
        lambda: _answers(url, environment["RAY_AUTH_TOKEN"]),
    ):
        yield url
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.ray
@pytest.mark.serve
def test_the_demos_config_deploys_and_answers(
    cluster: str, environment: dict[str, str], tmp_path: Path
) -> None:
    """Ports and the file of keys are the test's; everything else is as rendered."""
    config = serve_config(ray_service(overlay("demo")))
    config["http_options"]["port"], config["grpc_options"]["port"] = PORT, GRPC_PORT
    config["applications"][0]["args"]["api_key_file"] = str(tmp_path / "keys")
    (tmp_path / "keys").write_text(f"{KEY}\n")
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    assert httpx.get(f"{cluster}/api/serve/applications/", timeout=30).status_code in (401, 403), (
        "the cluster obeys those with its token"
    )
    deploy = [BIN / "serve", "deploy", "--address", cluster, str(tmp_path / "serve.yaml")]
    done = subprocess.run(
        deploy, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    while (status := _application(cluster, environment["RAY_AUTH_TOKEN"]))["status"] != "RUNNING":
        assert status["status"] in ("DEPLOYING", "NOT_STARTED"), status["message"]
        time.sleep(0.5)
    assert {name: d["status"] for name, d in status["deployments"].items()} == dict.fromkeys(
        ("Router", "Batch", "Ingress"), "HEALTHY"
    )
    assert len(status["deployments"]["Ingress"]["replicas"]) == 2
    wait_until_ready()
    body = {"prompt": "ROMEO:", "max_tokens": 8, "temperature": 0}
    assert httpx.post(f"{URL}/v1/completions", json=body, timeout=120).status_code == 401
    answer = httpx.post(
        f"{URL}/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=120
    )
    assert answer.json()["usage"]["completion_tokens"] == 8, answer.text
    with Client(GRPC, api_key=KEY) as client:
        pieces = "".join(
            piece.text for piece in client.generate("ROMEO:", max_tokens=8, temperature=0)
        )
    assert pieces == answer.json()["choices"][0]["text"]
    drain = [BIN / "tramontane", "drain", "--address", f"{get_node_ip_address()}:{GCS_PORT}"]
    done = subprocess.run(
        drain, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    refused = httpx.post(
        f"{URL}/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=120
    )
    assert refused.status_code == 503, refused.text


def _answers(url: str, token: str) -> bool:
    try:
        return (
            httpx.get(
                f"{url}/api/serve/applications/", headers=_bearer(token), timeout=10
            ).status_code
            == 200
        )
    except httpx.HTTPError:
        return False


def _application(url: str, token: str) -> dict[str, Any]:
    described = httpx.get(
        f"{url}/api/serve/applications/", headers=_bearer(token), timeout=30
    ).json()["applications"]
    found: dict[str, Any] = described.get("tramontane", {"status": "NOT_STARTED", "message": ""})
    return found


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}
