"""Request-time resolvers over our stores: what was put is what can be continued.

Invariant: an entry is a candidate as soon as ``put`` returned, in every process that shares the
root, and never when its line is damaged. Metadata is kept in memory, tokens are read from the
journal again (bounds and matching: ``middleware.lineage``).

Read-only: nothing here writes, and no journal comes into being by asking.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.filesystem import FileSystem
from capture_server.stores.fold import with_notes
from capture_server.stores.journal import (
    Entry,
    Header,
    LedgerRow,
    Note,
    Record,
    Span,
    decode,
    journal_name,
    scan,
)
from capture_server.stores.memory import MemoryCaptureStore
from middleware.errors import StoreUnavailableError
from middleware.lineage import CursorReset, DeliveryNote, IncrementalLineageStore
from middleware.lineage.ledger import StampedRow
from middleware.paths import validate_rollout_id
from middleware.records import TokenEntry, unpack_entry

if TYPE_CHECKING:
    from capture_server.staging.ledger import StoreLedger

__all__ = ["FileLineageStore", "MemoryLineageStore"]

_HEADER_PROBE: Final = 1024  # bytes; a header line is shorter
_LOCK_TIMEOUT_S: Final = 10.0

T = TypeVar("T")
Fetched = list[tuple[TokenEntry, Any] | DeliveryNote | StampedRow]


@dataclass(frozen=True, slots=True)
class _Cursor:
    """How far one file was read; the header tells files with one inode number apart."""

    inode: int
    header: bytes
    offset: int
    delivered: set[str] = field(default_factory=set)  # calls for which true was seen: it wins


class FileLineageStore(IncrementalLineageStore):
    """Resolver over the journals of a ``TokenCaptureStore`` with the same root.

    Each look reads, under the rollout's lock, only what was appended since the last one. It is
    also a ``CaptureLedger`` (external staging): the rows stand in the same journals.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        max_cached_rollouts: int = 65_536,
        max_cached_tokens: int = 8_000_000,
        fs: FileSystem | None = None,
    ) -> None:
        super().__init__(
            max_cached_rollouts=max_cached_rollouts, max_cached_tokens=max_cached_tokens
        )
        self._root = Path(root).expanduser().absolute()
        self._fs = fs or FileSystem()
        self._ledger_store: TokenCaptureStore | None = None

    # --- the ledger of external staging ------------------------------------------------------

    async def record(self, commit: Any) -> None:
        """Add a staged call's row; see ``StoreLedger``."""
        await self._ledger().record(commit)

    async def record_failure(self, rollout_id: str, model_call_id: str, reason: str) -> None:
        """Add a call that did not commit; see ``StoreLedger``."""
        await self._ledger().record_failure(rollout_id, model_call_id, reason)

    async def manifest(self, rollout_id: str) -> dict[str, Any]:
        """The token-free ledger in wire form; see ``StoreLedger``."""
        return await self._ledger().manifest(rollout_id)

    async def has_rows(self, rollout_id: str) -> bool:
        """Whether any row, committed or failed, exists."""
        return await self._ledger().has_rows(rollout_id)

    async def retire(self, rollout_id: str) -> None:
        """Drop the rows and discard later ones."""
        await self._ledger().retire(rollout_id)

    async def delete(self, rollout_id: str) -> None:
        """Drop the rows and their fence."""
        await self._ledger().delete(rollout_id)

    def _ledger(self) -> StoreLedger:
        # Here, not above: the ledger is made of this package's parts.
        from capture_server.staging.ledger import StoreLedger

        if self._ledger_store is None:
            self._ledger_store = TokenCaptureStore(self._root, fs=self._fs)
        return StoreLedger(self._ledger_store)

    async def close(self) -> None:
        """Forget what is cached, and finish what the ledger writes. Idempotent."""
        await super().close()
        if self._ledger_store is not None:
            await self._ledger_store.close()

    # --- hooks -------------------------------------------------------------------------------

    def _fetch_new_entries(self, rollout_id: str, cursor: Any) -> tuple[Fetched, Any]:
        """See the base class. A missing journal has no entries."""

        def read(fd: int) -> tuple[_Cursor, bytes]:
            size, inode = self._fs.size_and_inode(fd)
            header = _first_line(self._fs.read(fd, 0, min(size, _HEADER_PROBE)))
            known: _Cursor = cursor or _Cursor(inode, header, 0)
            if (known.inode, known.header) != (inode, header) or size < known.offset:
                raise CursorReset
            return known, self._fs.read(fd, known.offset, size - known.offset)

        found = self._with_journal(rollout_id, read)
        if found is None:
            if cursor is not None:
                raise CursorReset
            return [], None
        known, data = found
        return _fetched(scan(data, known.offset), known)

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

        def read(fd: int) -> list[bytes]:
            return [self._fs.read(fd, start, end - start) for start, end in refs]

        lines = self._with_journal(rollout_id, read)
        records = [decode(line.rstrip(b"\n")) for line in lines or ()]
        if not all(isinstance(record, Entry) for record in records):
            return []
        return [unpack_entry(dict(r.entry)) for r in records if isinstance(r, Entry)]

    def _with_journal(self, rollout_id: str, read: Callable[[int], T]) -> T | None:
        """``read`` the current journal under its lock; None if there is no journal.

        Under the lock, because a failing writer cuts its own lines off again.
        """
        path = self._root / journal_name(validate_rollout_id(rollout_id))
        try:
            while True:
                with self._opened(path) as fd:
                    _, inode = self._fs.size_and_inode(fd)
                    if self._fs.inode_at(path) == inode:
                        return read(fd)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise StoreUnavailableError(f"cannot read {path}: {exc.strerror or exc}") from exc

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[int]:
        fd = self._fs.open_read_only(path)
        try:
            if not self._fs.lock(fd, _LOCK_TIMEOUT_S):
                raise StoreUnavailableError(
                    f"another process has kept the lock of {path} for {_LOCK_TIMEOUT_S:g} s"
                )
            yield fd
        finally:
            self._fs.close(fd)  # gives the lock back, too


def _first_line(head: bytes) -> bytes:
    """The header line; b"" while there is none (a damaged one leaves the inode to decide)."""
    line = head[: head.find(b"\n") + 1]
    return line if isinstance(decode(line[:-1]), Header) else b""


def _fetched(spans: Iterator[Span], cursor: _Cursor) -> tuple[Fetched, _Cursor]:
    found: Fetched = []
    offset = cursor.offset
    for span in spans:
        if span.record is None:
            continue
        offset = span.end
        item = _item(span.record, (span.start, span.end), cursor.delivered)
        if item is not None:
            found.append(item)
    return found, _Cursor(cursor.inode, cursor.header, offset, cursor.delivered)


def _item(
    record: Record, ref: tuple[int, int], delivered: set[str]
) -> tuple[TokenEntry, Any] | DeliveryNote | StampedRow | None:
    if isinstance(record, LedgerRow):
        return record
    if isinstance(record, Entry):
        entry = unpack_entry(dict(record.entry))
        if entry.delivered:
            delivered.add(record.call)
        return entry, ref
    if isinstance(record, Note) and "delivered" in record.notes:
        if record.notes["delivered"]:
            delivered.add(record.call)
        return DeliveryNote(record.call, record.call in delivered)
    return None


class MemoryLineageStore(IncrementalLineageStore):
    """Resolver over a ``MemoryCaptureStore``; the cursor is (rollout's identity, entries seen)."""

    def __init__(self, store: MemoryCaptureStore) -> None:
        super().__init__()
        self._store = store

    def is_process_shared(self) -> bool:
        """Never."""
        return False

    def _fetch_new_entries(self, rollout_id: str, cursor: Any) -> tuple[Fetched, Any]:
        identity, entries, notes = self._store.view(rollout_id)
        known, seen = cursor or (identity, 0)
        if known is not identity:
            raise CursorReset
        found: Fetched = [(entry, entry.model_call_id) for entry in entries[seen:]]
        for entry in entries:
            merged = with_notes(entry.model_copy(), notes.get(entry.model_call_id, {}))
            if merged.delivered is not None:
                found.append(DeliveryNote(entry.model_call_id, merged.delivered))
        return found, (identity, len(entries))

    def _load_entry(self, rollout_id: str, ref: Any) -> TokenEntry:
        _, entries, _ = self._store.view(rollout_id)
        return next(entry for entry in entries if entry.model_call_id == ref)
