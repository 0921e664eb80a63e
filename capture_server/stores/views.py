"""What is read from a journal: taken under its lock, made into entries after it.

Invariant: a view is one moment of one rollout. Reading folds the file anew, so damage that came
since the last look counts. The expensive part (unpacking) holds no lock.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

from capture_server.stores.decisions import require_frozen
from capture_server.stores.fold import with_notes
from capture_server.stores.journal import Entry
from capture_server.stores.journal_file import JournalFile
from middleware.errors import StoreError
from middleware.protocols import TokenCaptureSnapshot
from middleware.records import TokenEntry, pack_entry, unpack_entry

# Restored by validation when read; a changed default needs a new schema version.
_DEFAULTS: Final = {
    name: field.default.value if isinstance(field.default, Enum) else field.default
    for name, field in TokenEntry.model_fields.items()
    if not field.is_required() and field.default_factory is None and name != "schema_version"
}


def slim_packed(entry: TokenEntry) -> dict[str, Any]:
    """``pack_entry`` without the declared fields that hold their default."""
    return {
        name: value
        for name, value in pack_entry(entry).items()
        if name not in _DEFAULTS or value != _DEFAULTS[name]
    }


class StoredEntries:
    """Records read under the lock, unpacked after it."""

    def __init__(self, journal: JournalFile) -> None:
        self._path = journal.path
        self._entries = journal.read_entries()
        self._notes = dict(journal.fold.notes)

    def unpacked(self) -> list[TokenEntry]:
        return [self._unpack(record) for record in self._entries]

    def _unpack(self, record: Entry) -> TokenEntry:
        try:
            return with_notes(unpack_entry(dict(record.entry)), self._notes.get(record.call, {}))
        except ValueError as exc:
            raise StoreError(
                f"the record of call {record.call!r} in {self._path} is undamaged but not "
                f"understood: {exc}"
            ) from exc


class FrozenView(StoredEntries):
    """A frozen rollout's state and records, as of one moment under the lock."""

    def __init__(self, journal: JournalFile) -> None:
        require_frozen(journal.fold)
        super().__init__(journal)  # folds the file anew: damage since then counts
        self._rollout_id = journal.rollout_id
        self._snapshot_id = require_frozen(journal.fold).snapshot_id
        self._version = journal.fold.version
        self._reasons = journal.fold.reasons()

    def snapshot(self) -> TokenCaptureSnapshot:
        return TokenCaptureSnapshot(
            rollout_id=self._rollout_id,
            entries=self.unpacked(),
            incomplete=bool(self._reasons),
            snapshot_id=self._snapshot_id,
            version=self._version,
            incomplete_reasons=self._reasons,
        )
