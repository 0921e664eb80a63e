"""``MemoryCaptureStore``: the same contract in one process's memory, for tests and ``memory:``.

Invariant: every decision is the file store's own (``fold``); only the medium differs. Nothing
survives the process and no other process sees it. Not meant for production.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from capture_server.stores.attempts import new_attempt
from capture_server.stores.decisions import (
    Decision,
    choice_groups,
    decide_cancel,
    decide_fence,
    decide_freeze,
    decide_incomplete,
    decide_intent,
    decide_note,
    decide_put,
    decide_retire,
    decide_retire_now,
    require_frozen,
)
from capture_server.stores.fold import (
    MARKED_INCOMPLETE,
    RolloutFold,
    entry_record,
    with_notes,
)
from capture_server.stores.holders import current_holder
from capture_server.stores.housekeeping import page
from capture_server.stores.journal import (
    Cancel,
    Entry,
    Incomplete,
    Intent,
    Note,
    Record,
    Retired,
)
from capture_server.stores.statistics import StoreStatistics
from middleware.errors import InvalidInputError, StoreClosedError
from middleware.paths import validate_call_id, validate_rollout_id
from middleware.protocols import CallIntent, RolloutStatus, TokenCaptureSnapshot
from middleware.records import TokenEntry, payload_digest

__all__ = ["MemoryCaptureStore"]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Rollout:
    fold: RolloutFold
    entries: dict[str, TokenEntry] = field(default_factory=dict)  # private copies, in put order


@dataclass(frozen=True, slots=True)
class _Ticket:
    first_call: bool

    async def wait_durable(self) -> None:
        """Memory is as durable as it gets."""


class MemoryCaptureStore:
    """See ``middleware.protocols.CaptureStore``; the method docs there hold here too."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._statistics = StoreStatistics()
        self._lock = threading.RLock()  # guards the two below; held for moments, never awaiting
        self._rollouts: dict[str, _Rollout] = {}
        self._closed = False

    def statistics(self) -> StoreStatistics:
        """This store's counters (live object)."""
        return self._statistics

    def is_process_shared(self) -> bool:
        """Never."""
        return False

    async def open_intent(self, intent: CallIntent) -> _Ticket:
        """See ``CaptureStore.open_intent``."""
        record = Intent(
            call=validate_call_id(intent.model_call_id),
            at=intent.created_at or self._clock(),
            request_digest=intent.request_digest,
            observed=intent.observed,
            holder=intent.holder or current_holder(),
            attempt=intent.attempt or new_attempt(),
        )
        with self._lock:
            rollout = self._get(intent.rollout_id)
            first_call = rollout.fold.first_call(record.request_digest)
            self._apply(rollout, decide_intent(rollout.fold, record))
        return _Ticket(first_call)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """See ``CaptureStore.begin_call``."""
        await self.open_intent(CallIntent(rollout_id=rollout_id, model_call_id=model_call_id))

    async def cancel_call(self, rollout_id: str, model_call_id: str, reason: str = "") -> None:
        """See ``CaptureStore.cancel_call``."""
        cancel = Cancel(call=validate_call_id(model_call_id), reason=reason, at=self._clock())
        with self._lock:
            rollout = self._get(rollout_id)
            self._apply(rollout, decide_cancel(rollout.fold, cancel))

    async def cancel_attempt(
        self, rollout_id: str, model_call_id: str, attempt: str, reason: str = ""
    ) -> None:
        """``cancel_call`` that comes late: it closes the intent of this attempt or none."""
        call = validate_call_id(model_call_id)
        cancel = Cancel(call=call, reason=reason, at=self._clock(), attempt=attempt)
        with self._lock:
            rollout = self._get(rollout_id)
            self._apply(rollout, decide_cancel(rollout.fold, cancel, exact=True))

    async def put(self, entry: TokenEntry) -> None:
        """See ``TokenSink.put``."""
        self._put([(entry, entry.model_call_id)])

    async def put_choices(self, entries: Sequence[TokenEntry], intent_id: str) -> None:
        """See ``CaptureStore.put_choices``."""
        if not entries:
            raise InvalidInputError("put_choices needs at least one entry")
        if any(entry.rollout_id != entries[0].rollout_id for entry in entries):
            raise InvalidInputError("the choices of one request belong to one rollout")
        validate_call_id(intent_id)
        self._put(list(choice_groups(entries, intent_id)))

    def _put(self, entries: Sequence[tuple[TokenEntry, str]]) -> None:
        for entry, _ in entries:
            validate_call_id(entry.model_call_id)
        records = [
            entry_record(
                entry,
                payload=payload_digest(entry),
                closes=closes,
                # What a fold looks at; the tokens stay in the entry itself.
                packed=entry.model_dump(
                    mode="json",
                    include={
                        "request_digest",
                        "parent_resolution",
                        "parent_call_id",
                        "drift_at",
                        "created_at",
                    },
                ),
            )
            for entry, closes in entries
        ]
        by_call = {entry.model_call_id: entry for entry, _ in reversed(entries)}
        with self._lock:
            rollout = self._get(entries[0][0].rollout_id)
            decision = decide_put(rollout.fold, records, self._clock())
            self._apply(rollout, decision)
            for record in decision.records:
                if isinstance(record, Entry):
                    self._statistics.put_records += 1
                    rollout.entries[record.call] = by_call[record.call].model_copy(deep=True)

    async def note_delivery(
        self, rollout_id: str, model_call_id: str, notes: Mapping[str, Any]
    ) -> None:
        """See ``CaptureStore.note_delivery``."""
        note = Note(call=validate_call_id(model_call_id), notes=dict(notes))
        with self._lock:
            rollout = self._get(rollout_id)
            self._apply(rollout, decide_note(rollout.fold, note))

    async def mark_incomplete(
        self, rollout_id: str, model_call_id: str = "", reason: str = "", detail: str = ""
    ) -> None:
        """See ``CaptureStore.mark_incomplete``."""
        if model_call_id:
            validate_call_id(model_call_id)
        mark = Incomplete(
            code=reason or MARKED_INCOMPLETE, call=model_call_id, detail=detail, at=self._clock()
        )
        with self._lock:
            rollout = self._get(rollout_id)
            self._apply(rollout, decide_incomplete(rollout.fold, mark))

    async def fence(self, rollout_id: str) -> Sequence[str]:
        """See ``CaptureStore.fence``."""
        with self._lock:
            rollout = self._get(rollout_id)
            self._apply(rollout, decide_fence(rollout.fold, self._clock()))
            return rollout.fold.awaited_intents()

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """See ``TokenSource.freeze``."""
        with self._lock:
            rollout = self._get(rollout_id)
            self._apply(rollout, decide_freeze(rollout.fold, secrets.token_hex(16), self._clock()))
            return self._snapshot(rollout)

    async def snapshot(self, rollout_id: str) -> TokenCaptureSnapshot:
        """See ``CaptureStore.snapshot``."""
        with self._lock:
            return self._snapshot(self._get(rollout_id))

    def _snapshot(self, rollout: _Rollout) -> TokenCaptureSnapshot:
        frozen = require_frozen(rollout.fold)
        reasons = rollout.fold.reasons()
        return TokenCaptureSnapshot(
            rollout_id=rollout.fold.rollout_id,
            entries=self._read(rollout),
            incomplete=bool(reasons),
            snapshot_id=frozen.snapshot_id,
            version=rollout.fold.version,
            incomplete_reasons=reasons,
        )

    def _read(self, rollout: _Rollout) -> list[TokenEntry]:
        notes = rollout.fold.notes
        return [
            with_notes(entry.model_copy(deep=True), notes.get(call, {}))
            for call, entry in rollout.entries.items()
        ]

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """See ``TokenSource.drop``."""
        with self._lock:
            rollout = self._get(rollout_id)
            tombstone = decide_retire(rollout.fold, snapshot_id, version, self._clock())
            if tombstone is None:
                return False
            self._bury(rollout_id, tombstone)
            return True

    async def delete(self, rollout_id: str) -> bool:
        """See ``CaptureStore.delete``."""
        with self._lock:
            return self._rollouts.pop(validate_rollout_id(rollout_id), None) is not None

    async def sweep_retired(self, older_than_seconds: float) -> int:
        """See ``CaptureStore.sweep_retired``."""
        cutoff = self._clock() - older_than_seconds
        with self._lock:
            old = [
                rollout_id
                for rollout_id, rollout in self._rollouts.items()
                if rollout.fold.retired is not None and rollout.fold.retired.at <= cutoff
            ]
            for rollout_id in old:
                del self._rollouts[rollout_id]
        return len(old)

    async def status(self, rollout_id: str) -> RolloutStatus:
        """See ``CaptureStore.status``."""
        with self._lock:
            return self._get(rollout_id).fold.status()

    def read_entries(self, rollout_id: str) -> list[TokenEntry]:
        """All records, in the order they were put, whatever the state."""
        with self._lock:
            return self._read(self._get(rollout_id))

    def view(
        self, rollout_id: str
    ) -> tuple[object, list[TokenEntry], Mapping[str, Mapping[str, Any]]]:
        """For the resolver: an identity (new after drop or delete), the entries, their notes.

        The entries are the store's own: do not change them.
        """
        with self._lock:
            rollout = self._get(rollout_id)
            return rollout, list(rollout.entries.values()), dict(rollout.fold.notes)

    async def list_rollouts(
        self, *, state: str | None = None, prefix: str = "", limit: int = 100, cursor: str = ""
    ) -> tuple[Sequence[RolloutStatus], str | None]:
        """See ``CaptureStore.list_rollouts``."""
        with self._lock:
            ids = sorted(r for r in self._rollouts if r > cursor and r.startswith(prefix))
        return await page(ids, self.status, state=state, limit=limit)

    async def healthy(self) -> str | None:
        """Always well until closed."""
        return "the store is closed" if self._closed else None

    async def close(self) -> None:
        """Refuse further use. Idempotent."""
        self._closed = True

    async def apply_rule(
        self,
        rollout_id: str,
        rule: Callable[[RolloutFold], Decision],
        *,
        call: str = "",
        owed: Sequence[Record] = (),
    ) -> None:
        """Append what a pure rule decides on the current state (``staging.ledger``)."""
        del call, owed  # memory does not fail
        with self._lock:
            rollout = self._get(rollout_id)
            self._apply(rollout, rule(rollout.fold))

    async def look(self, rollout_id: str, view: Callable[[RolloutFold], T]) -> T:
        """What ``view`` makes of the current state; it must copy what it returns."""
        with self._lock:
            return view(self._get(rollout_id).fold)

    async def retire_now(self, rollout_id: str) -> None:
        """Leave only a tombstone, whatever the state. Idempotent."""
        with self._lock:
            tombstone = decide_retire_now(self._get(rollout_id).fold, self._clock())
            if tombstone is not None:
                self._bury(rollout_id, tombstone)

    def _bury(self, rollout_id: str, tombstone: Retired) -> None:
        fold = RolloutFold(rollout_id)
        fold.apply(tombstone)
        self._rollouts[rollout_id] = _Rollout(fold)

    def _get(self, rollout_id: str) -> _Rollout:
        """The rollout, or an empty one that ``_apply`` keeps if anything happens to it."""
        if self._closed:
            raise StoreClosedError("the store is closed: this process is shutting down")
        validate_rollout_id(rollout_id)
        return self._rollouts.get(rollout_id) or _Rollout(RolloutFold(rollout_id))

    def _apply(self, rollout: _Rollout, decision: Decision) -> None:
        self._statistics.late_records += decision.late
        self._statistics.conflicts += bool(decision.error and decision.records)
        for record in decision.records:
            rollout.fold.apply(record)
            self._rollouts[rollout.fold.rollout_id] = rollout
        if decision.error is not None:
            raise decision.error
