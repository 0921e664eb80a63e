"""The request-time resolver over PostgreSQL: what was put is what can be continued, on every node.

Invariant: an entry is a candidate as soon as ``put`` returned anywhere, and never when its record
is damaged. A look reads only what was appended since the last one; the token of the last record
seen tells whether the history is still the same (see ``postgres_history``).

Read-only. Metadata is kept in memory, tokens are read again (bounds and matching:
``middleware.lineage``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from capture_server.stores.journal import Entry, LedgerRow, Note
from capture_server.stores.postgres_connections import PgConnection
from capture_server.stores.postgres_records import entry_of, read_record
from middleware.errors import StoreUnavailableError
from middleware.lineage import CursorReset, DeliveryNote, IncrementalLineageStore
from middleware.lineage.ledger import StampedRow
from middleware.paths import validate_rollout_id
from middleware.records import TokenEntry

T = TypeVar("T")
Fetched = list[tuple[TokenEntry, Any] | DeliveryNote | StampedRow]

# The last record seen comes along, without its content, to prove that the rest continues it.
_NEW_RECORDS: Final = (
    "SELECT pos, token, CASE WHEN pos >= %b THEN line END, CASE WHEN pos >= %b THEN arrays END "
    "FROM token_capture_records WHERE rollout_id = %b AND pos >= %b - 1 ORDER BY pos"
)
_SOME_RECORDS: Final = (
    "SELECT pos, token, line, arrays FROM token_capture_records "
    "WHERE rollout_id = %b AND pos = ANY(%b)"
)


class Caller(Protocol):
    """Runs something on a connection, again if the database went away."""

    def __call__(self, work: Callable[[PgConnection], T], /) -> T: ...


@dataclass(frozen=True, slots=True)
class _Cursor:
    """How far one history was read."""

    token: int
    length: int
    delivered: set[str] = field(default_factory=set)  # calls for which true was seen: it wins


class PostgresLineageStore(IncrementalLineageStore):
    """Resolver over the records of a ``PostgresCaptureStore``; made by its ``open_resolver``."""

    def __init__(
        self,
        call: Caller,
        *,
        max_cached_rollouts: int = 65_536,
        max_cached_tokens: int = 8_000_000,
    ) -> None:
        super().__init__(
            max_cached_rollouts=max_cached_rollouts, max_cached_tokens=max_cached_tokens
        )
        self._call = call

    def _fetch_new_entries(self, rollout_id: str, cursor: Any) -> tuple[Fetched, Any]:
        """See the base class. An unknown rollout has no entries."""
        known: _Cursor | None = cursor
        length = known.length if known is not None else 0
        parameters = [length, length, validate_rollout_id(rollout_id), length]
        rows = self._call(lambda c: c.execute(_NEW_RECORDS, parameters, binary=True).fetchall())
        if known is not None:
            if not rows or rows[0][:2] != (known.length - 1, known.token):
                raise CursorReset
            rows = rows[1:]
        if not rows:
            return [], known
        delivered = known.delivered if known is not None else set()
        found = [item for row in rows if (item := _item(row, delivered)) is not None]
        return found, _Cursor(rows[-1][1], rows[-1][0] + 1, delivered)

    def _load_entry(self, rollout_id: str, ref: Any) -> TokenEntry:
        """See the base class.

        Raises:
            StoreUnavailableError: the handle is stale.
        """
        entries = self._load_entries(rollout_id, [ref])
        if not entries:
            raise StoreUnavailableError(f"a record of rollout {rollout_id!r} is gone")
        return entries[0]

    def _load_entries(self, rollout_id: str, refs: Sequence[Any]) -> list[TokenEntry]:
        """See the base class; nothing where a handle is stale (the base class then proves none)."""
        positions = [position for position, _ in refs]
        rows = self._call(
            lambda c: c.execute(_SOME_RECORDS, [rollout_id, positions], binary=True).fetchall()
        )
        by_ref = {(row[0], row[1]): read_record(row[2], row[3]) for row in rows}
        records = [by_ref.get(ref) for ref in refs]
        if not all(isinstance(record, Entry) for record in records):
            return []
        return [entry_of(record, {}) for record in records if isinstance(record, Entry)]


def _item(
    row: tuple[Any, ...], delivered: set[str]
) -> tuple[TokenEntry, Any] | DeliveryNote | StampedRow | None:
    position, token, line, arrays = row
    record = read_record(line, arrays)
    if isinstance(record, LedgerRow):
        return record
    if isinstance(record, Entry):
        entry = entry_of(record, {})
        if entry.delivered:
            delivered.add(record.call)
        return entry, (position, token)
    if isinstance(record, Note) and "delivered" in record.notes:
        if record.notes["delivered"]:
            delivered.add(record.call)
        return DeliveryNote(record.call, record.call in delivered)
    return None
