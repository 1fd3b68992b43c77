"""Where batch jobs are kept, as it was given."""

import re
from pathlib import Path

from pydantic import SecretStr


def has_password(url: str) -> bool:
    """Before the host, or as a parameter: ``postgresql://me:secret@host/jobs``, ``postgresql://host/jobs?password=secret``."""
    return bool(re.search(r"://[^@/]*:.*@|[?&][^=]*(pass|secret|token|key)[^=]*=", url, re.IGNORECASE))


def absolute_database(given: SecretStr) -> SecretStr:
    """``sqlite:///jobs.sqlite`` with the folder where it is from here; three slashes and a path that begins with none."""
    url = given.get_secret_value()
    driver, mark, path = url.partition(":///")
    is_relative = driver.startswith("sqlite") and mark and path and not path.startswith(("/", ":memory:", "file:"))
    return SecretStr(f"{driver}{mark}{Path.cwd() / path}") if is_relative else given


def absolute_folder(given: SecretStr) -> SecretStr:
    url = given.get_secret_value()
    path = url.removeprefix("file://").removeprefix("file:")
    return given if "::" in path or "://" in path else SecretStr(str(Path(path).expanduser().absolute()))
