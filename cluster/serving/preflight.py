"""Where batch jobs are to be kept, looked at before anything starts: later it would be known only once the model is loaded."""

import os
from pathlib import Path

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.serving.batch_replica import job_settings
from tramontane.proto.errors import ConfigError
from tramontane.router.batch.database import Database
from tramontane.router.batch.storage import JobStorage, UrlReader


def check_jobs(config: EngineConfig) -> None:
    """Makes the folders that were named. Raises ConfigError.

    What is on another machine need not be there yet; and without a home to write to there are no batch jobs, but all else.
    """
    settings = job_settings(config.for_other_directories())
    database, storage = Database(settings.database), JobStorage(settings.storage)
    UrlReader(settings.url_prefixes)
    if config.jobs_database is not None and database.file is not None:
        _check_folder("--jobs-database", database.file.parent, 0o700)
        if database.file.is_dir():
            raise ConfigError(f"--jobs-database: {database.file} is a folder; name a file in it")
    if config.jobs_storage is not None and storage.folder is not None:
        _check_folder("--jobs-storage", storage.folder, 0o777)


def _check_folder(flag: str, folder: Path, mode: int) -> None:
    try:
        folder.mkdir(mode, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag}: {folder} cannot be made: {error.strerror}; name another place") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag}: {folder} cannot be written to; name another place, or allow it")
