"""The fixtures of batch jobs."""

from batch_fixtures import harness, postgres_url, sqlite_harness

__all__ = ["harness", "postgres_url", "sqlite_harness"]
