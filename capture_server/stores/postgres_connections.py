"""Connections to one PostgreSQL database, and the only place that knows its driver's errors.

Invariant: no exception of psycopg leaves this module through ``Connections.call``, and no message
or representation holds the password. A connection that failed once is never used again.

Few connections, opened when needed and kept: a failed attempt is reported with its reason at
once (a pool that reconnects in the background hides it), and what to retry is decided above.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from middleware.errors import (
    ConfigurationError,
    StoreClosedError,
    StoreError,
    StoreUnavailableError,
)

T = TypeVar("T")
PgConnection = psycopg.Connection[tuple[Any, ...]]

DEFAULT_MAX_CONNECTIONS: Final = 8

# A dead server or network is noticed within seconds; what the URL says itself comes first.
_DEFAULTS: Final = {
    "application_name": "token-capture",
    "connect_timeout": "5",
    "client_encoding": "UTF8",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
    # After a failover: the server that takes writes.
    "target_session_attrs": "read-write",
}
_MIGRATE_HINT: Final = "run: token-capture migrate"


class DatabaseAwayError(StoreUnavailableError):
    """No connection, or it broke: this concerns every rollout, not only the one asked for."""


class PostgresTarget:
    """A parsed store URL. ``repr`` and ``shown`` leave the password out.

    Beside libpq's own parameters the URL may say ``max_connections`` (per process, default 8).

    Raises:
        ConfigurationError: the URL is not understood.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        self.max_connections = _positive(query.pop("max_connections", DEFAULT_MAX_CONNECTIONS))
        # %20, not +: libpq does not read the form encoding.
        plain = urlunsplit(parts._replace(query=urlencode(query).replace("+", "%20")))
        given = _parsed(plain)
        self._password = str(given.get("password") or "")
        self._conninfo = make_conninfo("", **{**_DEFAULTS, **given})
        host = given.get("host") or given.get("hostaddr") or "local socket"
        port = f":{given['port']}" if given.get("port") else ""
        self.shown = f"{host}{port}/{given.get('dbname') or ''}"

    def __repr__(self) -> str:
        return f"PostgresTarget({self.shown!r})"

    def connect(self) -> PgConnection:
        """A new connection in autocommit mode.

        Raises:
            DatabaseAwayError: with the server's or the system's reason.
        """
        try:
            return psycopg.connect(self._conninfo, autocommit=True)
        except psycopg.Error as exc:
            raise DatabaseAwayError(str(self.error_of(exc))) from exc

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Turn the driver's errors into ours."""
        try:
            yield
        except psycopg.Error as exc:
            raise self.error_of(exc) from exc

    def error_of(self, exc: psycopg.Error) -> StoreError:
        """Our error for one of the driver's."""
        what = exc.diag.message_primary or " ".join(str(exc).split()) or type(exc).__name__
        if self._password:
            what = what.replace(self._password, "***")
        if isinstance(exc, (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedFunction)):
            return StoreError(f"the tables in {self.shown} are missing ({what}); {_MIGRATE_HINT}")
        if isinstance(exc, psycopg.errors.ReadOnlySqlTransaction):
            # What we are connected to has become a standby: another server takes the writes now.
            return DatabaseAwayError(f"PostgreSQL at {self.shown}: {what}")
        if isinstance(exc, (psycopg.OperationalError, psycopg.InterfaceError)):
            return StoreUnavailableError(f"PostgreSQL at {self.shown}: {what}")
        return StoreError(f"PostgreSQL at {self.shown} refused a request: {what}")


def _parsed(url: str) -> dict[str, Any]:
    """libpq's parameters. No error quotes any of the URL: it may be a part of the password."""
    with contextlib.suppress(psycopg.Error):
        given = conninfo_to_dict(url)
        where = f"{given.get('host') or ''}{given.get('dbname') or ''}"
        port = str(given.get("port") or "")
        # Otherwise a password with bare special characters is taken for another part.
        if "#" not in url and "@" not in where and port.replace(",", "").isdecimal() == bool(port):
            return given
    raise ConfigurationError(
        "the store URL is no valid PostgreSQL URL; use postgresql://user@host:5432/database "
        "(special characters in a password are percent-encoded)"
    )


def _positive(value: Any) -> int:
    text = str(value)
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise ConfigurationError("max_connections in the store URL must be from 1 to 1000")
    return int(text)


class Connections:
    """At most ``max_connections`` at a time, for any thread; the last used is used first."""

    def __init__(self, target: PostgresTarget) -> None:
        self.target = target
        self._free = threading.BoundedSemaphore(target.max_connections)
        self._lock = threading.Lock()  # guards the two below
        self._idle: list[PgConnection] = []
        self._closed = False

    def call(self, work: Callable[[PgConnection], T]) -> T:
        """Run ``work`` on a connection of its own for that long; no retry.

        Raises:
            DatabaseAwayError: the connection failed; what ``work`` wrote may be committed.
            StoreUnavailableError: not now (a lock, a full disk); likewise.
            StoreError: the database refused it.
        """
        with self._free:
            connection = self._take()
            try:
                result = work(connection)
            except psycopg.Error as exc:
                error = self.target.error_of(exc)
                if connection.closed or isinstance(error, DatabaseAwayError):
                    self._close_idle()  # a restarted server has dropped these too
                    error = DatabaseAwayError(str(error))
                connection.close()
                raise error from exc
            except BaseException:
                connection.close()  # in whatever state it is
                raise
            self._give_back(connection)
            return result

    def close(self) -> None:
        """Close what is idle now, and the rest when it is given back. Idempotent."""
        with self._lock:
            self._closed = True
        self._close_idle()

    def _take(self) -> PgConnection:
        with self._lock:
            if self._closed:
                raise StoreClosedError("the store is closed: this process is shutting down")
            if self._idle:
                return self._idle.pop()
        return self.target.connect()

    def _give_back(self, connection: PgConnection) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
