"""Ray's dashboard on the cluster that ``serve`` starts: its token, and whether it can show the
stages of the pipelines.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tramontane.cluster.config.ray_settings import (
    CORE_DASHBOARD_TITLE,
    CORE_DASHBOARD_UID,
    GRAFANA,
    PROMETHEUS,
)
from tramontane.cluster.serving.batch_replica import HOME_FOLDER
from tramontane.proto.errors import ConfigError

TIMEOUT_S = 3.0
PROMETHEUS_HOST, GRAFANA_HOST, UID = (
    "RAY_PROMETHEUS_HOST",
    "RAY_GRAFANA_HOST",
    "RAY_GRAFANA_DEFAULT_DASHBOARD_UID",
)


def let_dashboard_show_stages() -> str:
    """Have Ray's dashboard, which inherits this environment, embed our panels, or return why it
    cannot.
    """
    prometheus, grafana = (
        os.environ.get(PROMETHEUS_HOST, PROMETHEUS),
        os.environ.get(GRAFANA_HOST, GRAFANA),
    )
    problem = _missing_panels(prometheus.rstrip("/"), grafana.rstrip("/"))
    if not problem:
        # an empty variable is as good as none
        uid = os.environ[UID] = os.environ.get(UID) or CORE_DASHBOARD_UID
        problem = (
            "" if uid == CORE_DASHBOARD_UID else f"{UID} names another dashboard, {uid!r}; unset it"
        )
    return problem


def _missing_panels(prometheus: str, grafana: str) -> str:
    missing = []
    if _get(f"{prometheus}/api/v1/query?query=vector(1)") is None:
        missing.append(f"no Prometheus answers at {prometheus} ({PROMETHEUS_HOST})")
    if _get(f"{grafana}/api/health") is None:
        missing.append(f"no Grafana answers at {grafana} ({GRAFANA_HOST})")
    else:
        found = _get(f"{grafana}/api/dashboards/uid/{CORE_DASHBOARD_UID}")
        if found is None:
            missing.append(
                f"Grafana at {grafana} has no dashboard with the UID {CORE_DASHBOARD_UID} for"
                " anonymous users"
            )
        elif (title := _title(found)) != CORE_DASHBOARD_TITLE:
            missing.append(
                f"another dashboard of Grafana at {grafana} has the UID {CORE_DASHBOARD_UID}:"
                f" {title!r}"
            )
    return "; ".join(missing)


def _get(url: str) -> Any:  # JSON
    """Return the JSON of an answer with status 200, or None."""
    try:
        response = httpx.get(url, timeout=TIMEOUT_S, trust_env=False)
        return response.json() if response.status_code == 200 else None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return None


def _title(answer: Any) -> str:  # JSON
    try:
        return str(answer["dashboard"]["title"])
    except (KeyError, TypeError):
        return ""


@contextmanager
def token_file(port: int) -> Iterator[str]:
    """Keep the token that Ray's dashboard asks for in a file of the user's while the block runs,
    and yield where it is.

    Yields nothing if the cluster asks for no token. ``port``: of HTTP, which no other server of
    this machine has.
    """
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    if not token or os.environ.get("RAY_AUTH_MODE", "token") != "token":
        yield ""
        return
    path = Path.home() / HOME_FOLDER / f"ray-token-{port}"
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.unlink(missing_ok=True)
        with open(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
        ) as file:
            file.write(token)
    except OSError as error:
        raise ConfigError(
            f"--dashboard: the token for it cannot be written to {path}: {error.strerror}"
        ) from error
    try:
        yield str(path)
    finally:
        path.unlink(missing_ok=True)
