"""``TokenCaptureStore``: the default store, one append-only journal per rollout below a root.

Invariant: ``put`` returns after the record is on disk; an intent is in the kernel (so it survives
a kill) when ``open_intent`` returns and on disk when its ticket says so; a rollout's state is the
fold of its journal (``journal`` shows the format, ``fold`` the rules). Any number of processes on
one host may share a root; kernel locks keep them apart, one rollout at a time.

Assumed of the disk: an fsync that returned holds; a failed one may have lost anything since the
last; a rename is atomic. No network file system without working ``flock``.

The event loop never waits for the disk: everything happens in a few threads (``lanes``), which
take all waiting operations of one rollout together, so that they share a write and an fsync. The
plain functions of the seed's API block their caller; use the coroutines on an event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from capture_server.stores import housekeeping
from capture_server.stores.attempts import OpenAttempts, new_attempt
from capture_server.stores.committer import Committer
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
)
from capture_server.stores.filesystem import FileSystem
from capture_server.stores.fold import (
    MARKED_INCOMPLETE,
    STORE_FAILURE,
    RolloutFold,
    entry_record,
)
from capture_server.stores.holders import current_holder
from capture_server.stores.journal import Cancel, Entry, Incomplete, Intent, Note, Record
from capture_server.stores.journal_file import JournalFile
from capture_server.stores.operations import FileIntentTicket, Operation, Outcome
from capture_server.stores.spill import SpillLog
from capture_server.stores.statistics import StoreStatistics
from capture_server.stores.views import FrozenView, StoredEntries, slim_packed
from middleware._lazy import lazy_attributes
from middleware.errors import InvalidInputError, StoreUnavailableError
from middleware.paths import validate_call_id, validate_rollout_id
from middleware.protocols import CallIntent, RolloutStatus, TokenCaptureSnapshot
from middleware.records import TokenEntry, payload_digest

if TYPE_CHECKING:
    from capture_server.stores.lineage import FileLineageStore

__all__ = ["FileLineageStore", "TokenCaptureStore", "make_token_store", "validate_rollout_id"]

# Where the seed's users look for it; it imports this module, so it comes when it is asked for.
__getattr__ = lazy_attributes(__name__, {"FileLineageStore": "capture_server.stores.lineage"})

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S: Final = 30.0

T = TypeVar("T")


class TokenCaptureStore:
    """Durable records of tagged rollouts below ``root`` (created when first written to).

    Safe to use from any thread and event loop. ``spill`` keeps marks that the disk refuses (on
    another disk, see ``spill``). ``fs`` and ``clock`` are seams for tests.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        fs: FileSystem | None = None,
        clock: Callable[[], float] = time.time,
        max_threads: int = 8,
        max_open_files: int | None = None,
        spill: SpillLog | None = None,
    ) -> None:
        self._root = Path(root).expanduser().absolute()
        self._fs = fs or FileSystem()
        self._clock = clock
        self._committer = Committer(
            self._root,
            fs=self._fs,
            clock=clock,
            max_threads=max_threads,
            max_open_files=max_open_files,
            spill=spill,
        )
        self._attempts = OpenAttempts()
        self._housekeeper = housekeeping.Housekeeper(self._root, self._fs)

    @property
    def root(self) -> Path:
        """The directory that holds everything."""
        return self._root

    def statistics(self) -> StoreStatistics:
        """This process's counters (live object)."""
        return self._committer.statistics

    def spill_usage(self) -> tuple[int, int]:
        """See ``SpillingStore``."""
        return self._committer.owed.spill_usage()

    def is_process_shared(self) -> bool:
        """Other processes with the same root see every record as soon as it is acknowledged."""
        return True

    # --- the life of a call ------------------------------------------------------------------

    async def open_intent(self, intent: CallIntent) -> FileIntentTicket:
        """See ``CaptureStore.open_intent``."""
        operation = self._submit(intent.rollout_id, self._intent_operation(intent))
        first_call = await asyncio.wrap_future(operation.visible)
        return FileIntentTicket(first_call, operation.done)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """``open_intent`` and wait until it is on disk."""
        intent = CallIntent(
            rollout_id=rollout_id, model_call_id=model_call_id, created_at=self._clock()
        )
        ticket = await self.open_intent(intent)
        await ticket.wait_durable()

    def _intent_operation(self, intent: CallIntent) -> Operation:
        call = validate_call_id(intent.model_call_id)
        at = intent.created_at or self._clock()
        record = Intent(
            call=call,
            at=at,
            request_digest=intent.request_digest,
            observed=intent.observed,
            holder=intent.holder or current_holder(),
            attempt=intent.attempt or new_attempt(),
        )
        cancel = Cancel(call=call, reason=STORE_FAILURE, at=at, attempt=record.attempt)
        owed: list[Record] = []

        def step(journal: JournalFile) -> bool:
            first_call = journal.fold.first_call(record.request_digest)
            decision = decide_intent(journal.fold, record)
            self._apply(journal, decision, call)
            # From here on it may be in the file. An attempt that the caller named may be taken
            # by another worker when it is sent again: only the caller knows that it is over.
            if decision.records and not intent.attempt:
                owed.append(cancel)
            self._attempts.opened(journal.rollout_id, call, record.attempt)
            return first_call

        lost = "the intent of this call could not be brought to disk"
        return Operation(
            step=step,
            creates=True,
            visible_early=True,
            owed_unwritten=owed,
            owed_unsynced=[Incomplete(code=STORE_FAILURE, call=call, detail=lost, at=at)],
        )

    async def cancel_call(self, rollout_id: str, model_call_id: str, reason: str = "") -> None:
        """Close an intent of which nothing generated reached the client; durable on return."""
        attempt = self._attempts.closed(rollout_id, model_call_id)
        await self._cancel(rollout_id, model_call_id, attempt, reason, exact=False)

    async def cancel_attempt(
        self, rollout_id: str, model_call_id: str, attempt: str, reason: str = ""
    ) -> None:
        """``cancel_call`` that comes late: it closes the intent of this attempt or none."""
        await self._cancel(rollout_id, model_call_id, attempt, reason, exact=True)

    async def _cancel(
        self, rollout_id: str, model_call_id: str, attempt: str, reason: str, *, exact: bool
    ) -> None:
        call = validate_call_id(model_call_id)
        cancel = Cancel(call=call, reason=reason, at=self._clock(), attempt=attempt)

        def step(journal: JournalFile) -> None:
            self._apply(journal, decide_cancel(journal.fold, cancel, exact=exact), call)

        await self._done(rollout_id, Operation(step=step, owed_unwritten=[cancel]))

    async def put(self, entry: TokenEntry) -> None:
        """See ``TokenSink.put``. Do not change the entry until this returns."""
        await self._done(entry.rollout_id, self._put_operation([(entry, entry.model_call_id)]))

    def append(self, entry: TokenEntry) -> None:
        """``put`` for callers without an event loop; blocks."""
        operation = self._put_operation([(entry, entry.model_call_id)])
        self._submit(entry.rollout_id, operation).done.result()

    async def put_choices(self, entries: Sequence[TokenEntry], intent_id: str) -> None:
        """``put`` for all choices of one request: one write, and the last closes the intent."""
        if not entries:
            raise InvalidInputError("put_choices needs at least one entry")
        rollout_id = entries[0].rollout_id
        if any(entry.rollout_id != rollout_id for entry in entries):
            raise InvalidInputError("the choices of one request belong to one rollout")
        validate_call_id(intent_id)
        operation = self._put_operation(list(choice_groups(entries, intent_id)))
        await self._done(rollout_id, operation)

    def _put_operation(self, entries: Sequence[tuple[TokenEntry, str]]) -> Operation:
        for entry, _ in entries:
            validate_call_id(entry.model_call_id)
        call, at = entries[-1][1], self._clock()
        self._attempts.closed(entries[0][0].rollout_id, call)
        records: list[Entry] = []
        refused: list[Record] = []

        def pack() -> None:
            for entry, closes in entries:
                records.append(
                    entry_record(
                        entry,
                        payload=payload_digest(entry),
                        closes=closes,
                        packed=slim_packed(entry),
                    )
                )

        def step(journal: JournalFile) -> None:
            decision = decide_put(journal.fold, records, at)
            self._apply(journal, decision, call, refused)
            self._committer.statistics.put_records += len(decision.records)

        lost = "the record of this call could not be brought to disk"
        return Operation(
            prepare=pack,
            step=step,
            creates=True,
            owed_unwritten=[Incomplete(code=STORE_FAILURE, call=call, detail=lost, at=at)],
            owed_refused=refused,
        )

    async def note_delivery(
        self, rollout_id: str, model_call_id: str, notes: Mapping[str, Any]
    ) -> None:
        """Merge ``delivered``/``sink_ms`` into a stored record; visible on return, not synced."""
        note = Note(call=validate_call_id(model_call_id), notes=dict(notes))

        def step(journal: JournalFile) -> None:
            self._apply(journal, decide_note(journal.fold, note), note.call)

        await self._done(rollout_id, Operation(step=step, syncs=False))

    async def mark_incomplete(
        self, rollout_id: str, model_call_id: str = "", reason: str = "", detail: str = ""
    ) -> None:
        """Durably mask the rollout. If the disk refuses, the mark is kept and retried.

        Returns when it is on disk: in the journal, or else in the spill.

        Raises:
            StoreUnavailableError: it is kept in memory only (see ``owed``).
        """
        if model_call_id:
            validate_call_id(model_call_id)
        code = reason or MARKED_INCOMPLETE
        mark = Incomplete(code=code, call=model_call_id, detail=detail, at=self._clock())

        def step(journal: JournalFile) -> None:
            self._apply(journal, decide_incomplete(journal.fold, mark), model_call_id)

        try:
            await self._done(rollout_id, Operation(step=step, creates=True, owed_unwritten=[mark]))
        except StoreUnavailableError:
            if not self._committer.owed.is_safe(rollout_id, mark):
                raise

    # --- freeze, read, retire ----------------------------------------------------------------

    async def fence(self, rollout_id: str) -> Sequence[str]:
        """Refuse new intents (durable); return the open intents that may still be closed.

        Those whose process is known to be dead are left out: waiting for them is in vain. Ask
        again to see which are left.
        """

        def step(journal: JournalFile) -> list[str]:
            self._apply(journal, decide_fence(journal.fold, self._clock()), "")
            return journal.fold.awaited_intents()

        waited: list[str] = await self._done(rollout_id, Operation(step=step, creates=True))
        return waited

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """See ``TokenSource.freeze``; what is open now dangles. No waiting: see ``fence``."""
        snapshot: TokenCaptureSnapshot = await self._done(rollout_id, self._freeze_operation())
        return snapshot

    def freeze_now(self, rollout_id: str) -> TokenCaptureSnapshot:
        """``freeze`` for callers without an event loop; blocks."""
        operation = self._submit(rollout_id, self._freeze_operation())
        snapshot: TokenCaptureSnapshot = operation.done.result()
        return snapshot

    def _freeze_operation(self) -> Operation:
        def step(journal: JournalFile) -> FrozenView:
            decision = decide_freeze(journal.fold, secrets.token_hex(16), self._clock())
            self._apply(journal, decision, "")
            return FrozenView(journal)

        return Operation(step=step, finish=FrozenView.snapshot, creates=True)

    async def snapshot(self, rollout_id: str) -> TokenCaptureSnapshot:
        """See ``CaptureStore.snapshot``."""
        operation = Operation(step=FrozenView, finish=FrozenView.snapshot)
        snapshot: TokenCaptureSnapshot = await self._done(rollout_id, operation)
        return snapshot

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Retire exactly this snapshot, leaving a tombstone; False if it is not the state."""

        def step(journal: JournalFile) -> bool:
            tombstone = decide_retire(journal.fold, snapshot_id, version, self._clock())
            if tombstone is None:
                return False
            if journal.fold.retired is None:
                journal.retire(tombstone)
            return True

        retired: bool = await self._done(rollout_id, Operation(step=step))
        return retired

    async def retire_many(self, snapshots: Mapping[str, tuple[str, int]]) -> dict[str, bool]:
        """``drop`` for many: rollout id -> (snapshot id, version) in, rollout id -> retired out."""
        done = await asyncio.gather(
            *(self.drop(r, snapshot_id=s, version=v) for r, (s, v) in snapshots.items())
        )
        return dict(zip(snapshots, done, strict=True))

    def delete(self, rollout_id: str) -> Any:
        """Clear a rollout unconditionally: an ``Outcome[bool]``, True if there was anything."""

        def step(journal: JournalFile) -> bool:
            existed = journal.fold.state != "unknown"
            journal.remove()
            self._committer.owed.forget(rollout_id)  # what failed above still owes its marks
            return existed

        return Outcome[bool](self._submit(rollout_id, Operation(step=step, removes=True)).done)

    async def delete_many(self, rollout_ids: Sequence[str]) -> dict[str, bool]:
        """``delete`` for many."""
        done = await asyncio.gather(*map(self.delete, rollout_ids))
        return dict(zip(rollout_ids, done, strict=True))

    def sweep_retired(self, older_than_seconds: float) -> Any:
        """Remove old tombstones: an ``Outcome[int]``, their number."""
        cutoff = self._clock() - older_than_seconds
        return Outcome[int](self._housekeeper.sweep(lambda r: self._sweep_one(r, cutoff)))

    def _sweep_one(self, rollout_id: str, cutoff: float) -> Future[Any]:
        def step(journal: JournalFile) -> bool:
            retired = journal.fold.retired
            return retired is not None and retired.at <= cutoff and journal.remove()

        return self._submit(rollout_id, Operation(step=step, syncs=False, removes=True)).done

    # --- looking -----------------------------------------------------------------------------

    async def status(self, rollout_id: str) -> RolloutStatus:
        """See ``CaptureStore.status``."""
        status: RolloutStatus = await self._done(rollout_id, self._status_operation(rollout_id))
        return status

    def is_incomplete(self, rollout_id: str) -> bool:
        """Whether the rollout must be masked as far as is known now; blocks."""
        operation = self._submit(rollout_id, self._status_operation(rollout_id))
        status: RolloutStatus = operation.done.result()
        return status.incomplete

    def _status_operation(self, rollout_id: str) -> Operation:
        def step(journal: JournalFile) -> RolloutStatus:
            return housekeeping.with_owed(
                journal.fold.status(), self._committer.owed.of(rollout_id)
            )

        return Operation(step=step, writes=False, syncs=False)

    def read_entries(self, rollout_id: str) -> list[TokenEntry]:
        """All records, in the order they were put, whatever the state; blocks."""

        def step(journal: JournalFile) -> StoredEntries:
            return StoredEntries(journal)

        operation = Operation(step=step, finish=StoredEntries.unpacked, writes=False, syncs=False)
        entries: list[TokenEntry] = self._submit(rollout_id, operation).done.result()
        return entries

    async def list_rollouts(
        self, *, state: str | None = None, prefix: str = "", limit: int = 100, cursor: str = ""
    ) -> tuple[Sequence[RolloutStatus], str | None]:
        """See ``CaptureStore.list_rollouts``."""
        ids = await asyncio.wrap_future(self._housekeeper.rollout_ids(prefix, after=cursor))
        return await housekeeping.page(ids, self.status, state=state, limit=limit)

    async def healthy(self) -> str | None:
        """None when writes work. After a failure it tries a write, and what is owed."""
        failure, owed = self._committer.failure, self._committer.owed
        if failure is not None or not self._committer.statistics.syncs:
            failure = await asyncio.wrap_future(self._housekeeper.probe())
            self._committer.failure = failure
        if failure is None and len(owed):
            await asyncio.wrap_future(self._housekeeper.run(owed.retry_now))
            failure = self._committer.failure
        if failure is None and (left := len(owed)):
            return f"{left} marks of rollouts are not on disk yet"
        return failure

    def path_for(self, rollout_id: str) -> Path:
        """The rollout's journal: records, intents, marks, state and lock in one file."""
        return self._committer.path_for(validate_rollout_id(rollout_id))

    incomplete_path_for = intents_path_for = lock_path_for = state_path_for = path_for

    async def close(self) -> None:
        """Finish what was begun, then release threads and descriptors. Idempotent."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """``close`` for callers without an event loop; blocks."""
        self._committer.close(_CLOSE_TIMEOUT_S)
        self._housekeeper.close()

    # --- rules of others (``capture_server.staging.ledger``) ---------------------------------

    async def apply_rule(
        self,
        rollout_id: str,
        rule: Callable[[RolloutFold], Decision],
        *,
        call: str = "",
        owed: Sequence[Record] = (),
    ) -> None:
        """Append what a pure rule decides on the current state; on disk when this returns.

        ``owed`` is what the rollout must get later if the disk refuses.
        """

        refused: list[Record] = []

        def step(journal: JournalFile) -> None:
            self._apply(journal, rule(journal.fold), call, refused)

        operation = Operation(step=step, creates=True, owed_unwritten=owed, owed_refused=refused)
        await self._done(rollout_id, operation)

    async def look(self, rollout_id: str, view: Callable[[RolloutFold], T]) -> T:
        """What ``view`` makes of the current state; it must copy what it returns."""
        operation = Operation(step=lambda j: view(j.fold), writes=False, syncs=False)
        found: T = await self._done(rollout_id, operation)
        return found

    async def retire_now(self, rollout_id: str) -> None:
        """Leave only a tombstone, whatever the state. Durable on return; idempotent."""

        def step(journal: JournalFile) -> None:
            tombstone = decide_retire_now(journal.fold, self._clock())
            if tombstone is not None:
                journal.retire(tombstone)

        await self._done(rollout_id, Operation(step=step, creates=True))

    # --- plumbing ----------------------------------------------------------------------------

    def _submit(self, rollout_id: str, operation: Operation) -> Operation:
        return self._committer.submit(validate_rollout_id(rollout_id), operation)

    async def _done(self, rollout_id: str, operation: Operation) -> Any:
        return await asyncio.wrap_future(self._submit(rollout_id, operation).done)

    def _apply(
        self,
        journal: JournalFile,
        decision: Decision,
        call: str,
        refused: list[Record] | None = None,
    ) -> None:
        """Append the decision's records, count what must be seen, raise its error.

        ``refused`` gets what comes with an error and must not be lost with it.
        """
        if decision.late:
            self._committer.statistics.late_records += 1
            logger.warning(
                "late record of call %r ignored: rollout %s is %s",
                call,
                journal.rollout_id,
                journal.fold.state,
                extra={"action": "late_record", "rollout_id": journal.rollout_id},
            )
        if decision.error is not None and decision.records:
            self._committer.statistics.conflicts += 1
            if refused is not None:
                refused.extend(decision.records)
        journal.apply(decision)


def make_token_store(global_config_dict: Any) -> TokenCaptureStore | None:
    """The seed's constructor: None when capture is off, has no directory, or a sink of its own."""
    # Here, not above: the configuration may itself want to build stores.
    from capture_server.config import token_id_capture_config

    directory = token_id_capture_config(global_config_dict).resolved_dir()
    return TokenCaptureStore(directory) if directory is not None else None
