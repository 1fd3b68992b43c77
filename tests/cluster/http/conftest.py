"""The fixtures of batch jobs, and of a server for official clients."""

from batch_fixtures import harness, postgres_url, sqlite_harness
from listening_server import client, listening, server

__all__ = ["client", "harness", "listening", "postgres_url", "server", "sqlite_harness"]
