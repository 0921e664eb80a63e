"""The PostgreSQL schema: numbered files in ``sql/``, applied in order, each in one transaction.

Invariant: a file that was released is never changed; what it made is changed by a later one.
Functions carry a version in their name, so that sidecars of two releases run on one schema.
Migrating again does nothing; several processes may try at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Final

import psycopg

from capture_server.stores.postgres_connections import PgConnection, PostgresTarget
from middleware.errors import ConfigurationError

_LOCK_KEY: Final = 0x746F6B656E636170  # any constant that only we use
_VERSIONS: Final = """
    CREATE TABLE IF NOT EXISTS token_capture_migrations (
        version integer PRIMARY KEY,
        name text NOT NULL,
        applied_at timestamptz NOT NULL DEFAULT now()
    )
"""


@dataclass(frozen=True, slots=True)
class Migration:
    """One file: ``0001_what_it_does.sql``."""

    version: int
    name: str
    sql: str


def migrations() -> list[Migration]:
    """All that this release brings, in order."""
    found = []
    for file in resources.files("capture_server.stores").joinpath("sql").iterdir():
        number, _, name = file.name.removesuffix(".sql").partition("_")
        found.append(Migration(int(number), name, file.read_text(encoding="utf-8")))
    return sorted(found, key=lambda migration: migration.version)


def migrate(url: str) -> Sequence[Migration]:
    """Bring the database to this release's schema; return what was applied.

    Raises:
        ConfigurationError: the schema is newer than this release, or the URL is wrong.
        StoreError: the database is not reachable or refuses.
    """
    target = PostgresTarget(url)
    with target.translated(), target.connect() as connection:
        known = migrations()
        with connection.transaction():
            # Waits for another process that migrates now.
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK_KEY])
            connection.execute(_VERSIONS)
            version = _version(connection)
            _refuse_newer(version, known[-1].version, target)
            todo = [migration for migration in known if migration.version > version]
            for migration in todo:
                connection.execute(migration.sql.encode())
                connection.execute(
                    "INSERT INTO token_capture_migrations (version, name) VALUES (%s, %s)",
                    [migration.version, migration.name],
                )
    return todo


def require_schema(connection: PgConnection, target: PostgresTarget) -> None:
    """Check that the schema is the one that this release works with.

    Raises:
        ConfigurationError: missing, older or newer; the message says what to do.
    """
    needed = migrations()[-1].version
    try:
        version = _version(connection)
    except psycopg.errors.UndefinedTable:
        version = 0
    _refuse_newer(version, needed, target)
    if version < needed:
        found = f"has schema version {version}" if version else "has no tables of ours"
        raise ConfigurationError(
            f"the database {target.shown} {found}, this release needs version {needed}; "
            "run: token-capture migrate"
        )


def _version(connection: PgConnection) -> int:
    row = connection.execute("SELECT max(version) FROM token_capture_migrations").fetchone()
    return int(row[0] or 0) if row else 0


def _refuse_newer(version: int, known: int, target: PostgresTarget) -> None:
    if version > known:
        raise ConfigurationError(
            f"the database {target.shown} has schema version {version}, this release knows "
            f"{known}; a newer token-capture migrated it: upgrade this one"
        )
