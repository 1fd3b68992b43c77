"""``tramontane monitoring``: files that make Ray's own dashboard show the stages, through
Prometheus and Grafana.
"""

from pathlib import Path
from shlex import quote
from typing import Annotated
from urllib.parse import urlsplit

import typer

from tramontane.cluster.config.ray_settings import GRAFANA, PROMETHEUS
from tramontane.cluster.console.options import option
from tramontane.cluster.console.terminal import check_replaceable, writing
from tramontane.cluster.deploy.monitoring_files import (
    ENVIRONMENT_FILE,
    GRAFANA_FILE,
    MARK,
    PROMETHEUS_FILE,
    monitoring_files,
)
from tramontane.proto.errors import ConfigError


def monitoring(
    out: Annotated[Path, option("--out", "-o", help="Folder to write the files to.")],
    prometheus: Annotated[
        str, option("--prometheus", help="Address of Prometheus, for Grafana and Ray's head.")
    ] = PROMETHEUS,
    grafana: Annotated[
        str, option("--grafana", help="Address of Grafana, for Ray's head and browsers.")
    ] = GRAFANA,
) -> None:
    """Write configuration for Prometheus, Grafana and Ray with which Ray's dashboard shows the
    stages at work.
    """
    for name, url in {"--prometheus": prometheus, "--grafana": grafana}.items():
        _check_url(name, url)
    _check_folder(out)
    folder = out.resolve()
    with writing(out, "--out"):
        for name, text in monitoring_files(
            folder, prometheus.rstrip("/"), grafana.rstrip("/")
        ).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    typer.echo(
        f"wrote {out}; on the machine of Ray's head:\n  prometheus"
        f" --config.file={quote(str(folder / PROMETHEUS_FILE))}\n  grafana server --homepath"
        f" /usr/share/grafana --config {quote(str(folder / GRAFANA_FILE))}\n  set -a; ."
        f" {quote(str(folder / ENVIRONMENT_FILE))}; set +a\nthen ray start --head, or tramontane"
        " serve --dashboard"
    )


def _check_url(name: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        is_address = False
    if not is_address:
        raise ConfigError(f"{name} is {url!r}; it must be an address such as http://10.0.0.1:9090")


def _check_folder(out: Path) -> None:
    """Raise ConfigError unless the folder is new, is empty or has files of this command."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; give a folder")
    with writing(out, "--out"):
        is_empty = not out.exists() or not any(out.iterdir())
    if is_empty:
        return
    if not (out / PROMETHEUS_FILE).exists():
        raise ConfigError(
            f"--out {out} has files that this command has not written; give another folder"
        )
    for name in (PROMETHEUS_FILE, GRAFANA_FILE, ENVIRONMENT_FILE):
        check_replaceable(out / name, MARK, "--out")
