"""``PostgresCaptureStore``: one database for any number of sidecars on any number of nodes.

Invariant: as the file store's: what is acknowledged is committed (the log of the database is on
its disk), and a rollout's state is the fold of its records. Both stores use the same rules
(``decisions``, ``fold``) and the same record format (``journal``), so they cannot differ.

Fencing is by the lock of the rollout's row and a compare-and-swap on its head
(``postgres_history``); one round trip per put, also when it must be sent again after a lost
connection. Schema and migrations: ``migrate``. Needs the extra ``postgres`` (psycopg 3).

The event loop never waits for the database: everything happens in a few threads, each with a
connection. An intent is durable as soon as it is visible here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from capture_server.stores.attempts import OpenAttempts, new_attempt
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
    STORE_FAILURE,
    RolloutFold,
    entry_record,
)
from capture_server.stores.holders import current_holder
from capture_server.stores.housekeeping import with_owed
from capture_server.stores.journal import Cancel, Entry, Incomplete, Intent, Note, Record
from capture_server.stores.migrate import require_schema
from capture_server.stores.postgres_committer import PostgresCommitter
from capture_server.stores.postgres_connections import Connections, PgConnection, PostgresTarget
from capture_server.stores.postgres_history import History, Operation
from capture_server.stores.postgres_lineage import PostgresLineageStore
from capture_server.stores.postgres_records import entry_of, read_record
from capture_server.stores.spill import SpillLog, spill_directory
from capture_server.stores.statistics import StoreStatistics
from capture_server.stores.views import slim_packed
from middleware.errors import InvalidInputError, StoreError, StoreUnavailableError
from middleware.paths import validate_call_id, validate_rollout_id
from middleware.protocols import CallIntent, RolloutStatus, TokenCaptureSnapshot
from middleware.records import TokenEntry, payload_digest

__all__ = ["PostgresCaptureStore", "open_postgres_store"]

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S: Final = 30.0

T = TypeVar("T")
_PROBE_ROLLOUT: Final = "!probe"  # no rollout id starts like this
_AFTER_ALL_IDS: Final = "\x7f"

_READ_ENTRIES: Final = (
    "SELECT pos, token, line, arrays FROM token_capture_records "
    "WHERE rollout_id = %b AND pos < %b AND (arrays IS NOT NULL OR pos = %b - 1) ORDER BY pos"
)
_PROBE: Final = "INSERT INTO token_capture_rollouts (rollout_id, head, state) VALUES (%s, 0, '')"
_LIST: Final = (
    "SELECT rollout_id FROM token_capture_rollouts WHERE rollout_id > %(after)s "
    "AND rollout_id >= %(prefix)s AND rollout_id < %(end)s "
    "AND (%(state)s::text IS NULL OR state = %(state)s) ORDER BY rollout_id LIMIT %(limit)s"
)
_TOMBSTONES: Final = (
    "SELECT rollout_id FROM token_capture_rollouts "
    "WHERE retired_at IS NOT NULL AND retired_at <= %s ORDER BY rollout_id LIMIT 1000"
)
_DELETE: Final = "SELECT token_capture_delete_v1(%s::text, %s::double precision)"


class _SupersededError(Exception):
    """The history was replaced between the decision and the reading of its records."""


@dataclass(frozen=True, slots=True)
class _Ticket:
    first_call: bool

    async def wait_durable(self) -> None:
        """It is already: the commit was acknowledged."""


class PostgresCaptureStore:
    """See ``middleware.protocols.CaptureStore``; the method docs there hold here too.

    Nothing is connected before the first use; ``open_postgres_store`` checks the schema first.
    Safe to use from any thread and event loop. ``retry_for_s``: how long an operation is retried
    while the database is away; ``max_cached`` rollouts' states are kept, without tokens;
    ``spill`` keeps marks meanwhile (see ``spill``).
    """

    def __init__(
        self,
        url: str,
        *,
        retry_for_s: float = 10.0,
        max_cached: int = 16_384,
        spill: SpillLog | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._attempts = OpenAttempts()
        self._connections = Connections(PostgresTarget(url))
        self._committer = PostgresCommitter(
            self._connections, retry_for_s=retry_for_s, max_cached=max_cached, spill=spill
        )

    def __repr__(self) -> str:
        return f"PostgresCaptureStore({self._connections.target.shown!r})"

    def check_schema(self) -> None:
        """Connect once and see that the database is migrated; blocks.

        Raises:
            ConfigurationError: the schema is missing, older or newer; says what to do.
            StoreUnavailableError: no connection.
        """
        self._connections.call(lambda c: require_schema(c, self._connections.target))

    def open_resolver(self) -> PostgresLineageStore:
        """The request-time resolver over this store's database; uses its connections."""
        return PostgresLineageStore(self._committer.call)

    def statistics(self) -> StoreStatistics:
        """This process's counters (live object)."""
        return self._committer.statistics

    def spill_usage(self) -> tuple[int, int]:
        """See ``SpillingStore``."""
        return self._committer.owed.spill_usage()

    def is_process_shared(self) -> bool:
        """Everyone on the database sees every record as soon as it is acknowledged."""
        return True

    # --- the life of a call ------------------------------------------------------------------

    async def open_intent(self, intent: CallIntent) -> _Ticket:
        """See ``CaptureStore.open_intent``; durable on return."""
        call = validate_call_id(intent.model_call_id)
        record = Intent(
            call=call,
            at=intent.created_at or self._clock(),
            request_digest=intent.request_digest,
            observed=intent.observed,
            holder=intent.holder or current_holder(),
            attempt=intent.attempt or new_attempt(),
        )
        cancel = Cancel(call=call, reason=STORE_FAILURE, at=record.at, attempt=record.attempt)
        operation = Operation(
            decide=lambda fold: decide_intent(fold, record),
            value=lambda fold: fold.first_call(record.request_digest),
            # An attempt that the caller named may be taken elsewhere when it is sent again:
            # only the caller knows that it is over.
            owed=[] if intent.attempt else [cancel],
            call=call,
        )
        first_call = await self._done(intent.rollout_id, operation)
        self._attempts.opened(intent.rollout_id, call, record.attempt)
        return _Ticket(first_call)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """See ``CaptureStore.begin_call``."""
        await self.open_intent(CallIntent(rollout_id=rollout_id, model_call_id=model_call_id))

    async def cancel_call(self, rollout_id: str, model_call_id: str, reason: str = "") -> None:
        """See ``CaptureStore.cancel_call``; durable on return."""
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
        operation = Operation(
            decide=lambda fold: decide_cancel(fold, cancel, exact=exact), owed=[cancel], call=call
        )
        await self._done(rollout_id, operation)

    async def put(self, entry: TokenEntry) -> None:
        """See ``TokenSink.put``. Do not change the entry until this returns."""
        await self._put(entry.rollout_id, [(entry, entry.model_call_id)])

    async def put_choices(self, entries: Sequence[TokenEntry], intent_id: str) -> None:
        """``put`` for all choices of one request: one append, and the last closes the intent."""
        if not entries:
            raise InvalidInputError("put_choices needs at least one entry")
        rollout_id = entries[0].rollout_id
        if any(entry.rollout_id != rollout_id for entry in entries):
            raise InvalidInputError("the choices of one request belong to one rollout")
        validate_call_id(intent_id)
        await self._put(rollout_id, list(choice_groups(entries, intent_id)))

    async def _put(self, rollout_id: str, entries: Sequence[tuple[TokenEntry, str]]) -> None:
        for entry, _ in entries:
            validate_call_id(entry.model_call_id)
        call, at = entries[-1][1], self._clock()
        self._attempts.closed(rollout_id, call)
        records: list[Entry] = []

        def pack() -> None:
            records.extend(
                entry_record(
                    entry, payload=payload_digest(entry), closes=closes, packed=slim_packed(entry)
                )
                for entry, closes in entries
            )

        lost = "the record of this call could not be brought into the database"
        operation = Operation(
            prepare=pack,
            decide=lambda fold: decide_put(fold, records, at),
            owed=[Incomplete(code=STORE_FAILURE, call=call, detail=lost, at=at)],
            call=call,
        )
        await self._done(rollout_id, operation)

    async def note_delivery(
        self, rollout_id: str, model_call_id: str, notes: Mapping[str, Any]
    ) -> None:
        """See ``CaptureStore.note_delivery``."""
        note = Note(call=validate_call_id(model_call_id), notes=dict(notes))
        operation = Operation(decide=lambda fold: decide_note(fold, note), call=note.call)
        await self._done(rollout_id, operation)

    async def mark_incomplete(
        self, rollout_id: str, model_call_id: str = "", reason: str = "", detail: str = ""
    ) -> None:
        """Durably mask the rollout. While the database is away the mark is kept and retried.

        Returns when it is durable: in the database, or else in the spill.

        Raises:
            StoreUnavailableError: it is kept in memory only (see ``owed``).
        """
        if model_call_id:
            validate_call_id(model_call_id)
        code = reason or MARKED_INCOMPLETE
        mark = Incomplete(code=code, call=model_call_id, detail=detail, at=self._clock())
        operation = Operation(
            decide=lambda fold: decide_incomplete(fold, mark), owed=[mark], call=model_call_id
        )
        try:
            await self._done(rollout_id, operation)
        except StoreUnavailableError:
            if not self._committer.owed.is_safe(rollout_id, mark):
                raise

    # --- freeze, read, retire ----------------------------------------------------------------

    async def fence(self, rollout_id: str) -> Sequence[str]:
        """See ``CaptureStore.fence``; ask again to see which calls are left."""
        at = self._clock()
        operation = Operation(
            decide=lambda fold: decide_fence(fold, at),
            answer=lambda fold, _: fold.awaited_intents(),
        )
        waited: list[str] = await self._done(rollout_id, operation)
        return waited

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """See ``TokenSource.freeze``; what is open now dangles. No waiting: see ``fence``."""
        snapshot_id, at = secrets.token_hex(16), self._clock()
        return await self._snapshot(rollout_id, lambda fold: decide_freeze(fold, snapshot_id, at))

    async def snapshot(self, rollout_id: str) -> TokenCaptureSnapshot:
        """See ``CaptureStore.snapshot``."""
        return await self._snapshot(rollout_id, lambda fold: Decision())

    async def _snapshot(
        self, rollout_id: str, decide: Callable[[RolloutFold], Decision]
    ) -> TokenCaptureSnapshot:
        while True:
            operation = Operation(decide=decide, answer=_frozen_state, finish=self._read_frozen)
            try:
                snapshot: TokenCaptureSnapshot = await self._done(rollout_id, operation)
            except _SupersededError:
                continue  # retired or deleted at this very moment: decide on what is there now
            return snapshot

    def _read_frozen(self, history: History, state: TokenCaptureSnapshot) -> TokenCaptureSnapshot:
        """The state with the entries, in the order they were put."""
        return TokenCaptureSnapshot(
            rollout_id=state.rollout_id,
            entries=self._read_entries(history),
            incomplete=state.incomplete,
            snapshot_id=state.snapshot_id,
            version=state.version,
            incomplete_reasons=state.incomplete_reasons,
        )

    def _read_entries(self, history: History) -> list[TokenEntry]:
        length = history.length
        rows = self._committer.call(
            lambda c: c.execute(
                _READ_ENTRIES, [history.rollout_id, length, length], binary=True
            ).fetchall()
        )
        if not rows or rows[-1][:2] != (length - 1, history.head):
            raise _SupersededError
        entries, notes = [], history.fold.notes
        for _, _, line, arrays in rows:
            record = read_record(line, arrays)
            if isinstance(record, Entry):
                entries.append(entry_of(record, notes.get(record.call, {})))
        return entries

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """See ``TokenSource.drop``."""
        at = self._clock()

        def decide(fold: RolloutFold) -> Decision:
            tombstone = decide_retire(fold, snapshot_id, version, at)
            return Decision([tombstone] if tombstone and fold.retired is None else [])

        def is_retired(fold: RolloutFold, _: Any) -> bool:
            return fold.retired is not None and (
                decide_retire(fold, snapshot_id, version, at) is not None
            )

        operation = Operation(decide=decide, answer=is_retired, alone=True)
        retired: bool = await self._done(rollout_id, operation)
        return retired

    async def retire_many(self, snapshots: Mapping[str, tuple[str, int]]) -> dict[str, bool]:
        """``drop`` for many: rollout id -> (snapshot id, version) in, rollout id -> retired out."""
        done = await asyncio.gather(
            *(self.drop(r, snapshot_id=s, version=v) for r, (s, v) in snapshots.items())
        )
        return dict(zip(snapshots, done, strict=True))

    async def delete(self, rollout_id: str) -> bool:
        """See ``CaptureStore.delete``. After a lost connection it may say False of its own work."""
        return await self._delete(rollout_id, None)

    async def delete_many(self, rollout_ids: Sequence[str]) -> dict[str, bool]:
        """``delete`` for many."""
        done = await asyncio.gather(*map(self.delete, rollout_ids))
        return dict(zip(rollout_ids, done, strict=True))

    async def sweep_retired(self, older_than_seconds: float) -> int:
        """See ``CaptureStore.sweep_retired``."""
        cutoff = self._clock() - older_than_seconds
        total = 0
        while True:
            rows = await self._query(_TOMBSTONES, [cutoff])
            swept = sum(await asyncio.gather(*(self._delete(row[0], cutoff) for row in rows)))
            total += swept
            if not swept:  # none left, or others sweep them
                return total

    async def _delete(self, rollout_id: str, retired_before: float | None) -> bool:
        def finish(history: History, _: Any) -> bool:
            row = self._committer.call(
                lambda c: c.execute(_DELETE, [rollout_id, retired_before]).fetchone()
            )
            existed = bool(row and row[0])
            if existed:
                history.forget()
                self._committer.owed.forget(rollout_id)
            return existed

        operation = Operation(decide=lambda fold: Decision(), finish=finish, alone=True)
        existed: bool = await self._done(rollout_id, operation)
        return existed

    # --- looking -----------------------------------------------------------------------------

    async def status(self, rollout_id: str) -> RolloutStatus:
        """See ``CaptureStore.status``."""

        def answer(fold: RolloutFold, _: Any) -> RolloutStatus:
            return with_owed(fold.status(), self._committer.owed.of(rollout_id))

        operation = Operation(decide=lambda fold: Decision(), answer=answer)
        status: RolloutStatus = await self._done(rollout_id, operation)
        return status

    # --- rules of others (``capture_server.staging.ledger``) ---------------------------------

    async def apply_rule(
        self,
        rollout_id: str,
        rule: Callable[[RolloutFold], Decision],
        *,
        call: str = "",
        owed: Sequence[Record] = (),
    ) -> None:
        """Append what a pure rule decides on the current state; durable when this returns.

        ``owed`` is what the rollout must get later if the database is away.
        """
        await self._done(rollout_id, Operation(decide=rule, owed=list(owed), call=call))

    async def look(self, rollout_id: str, view: Callable[[RolloutFold], T]) -> T:
        """What ``view`` makes of the current state; it must copy what it returns."""
        operation = Operation(decide=lambda fold: Decision(), answer=lambda fold, _: view(fold))
        found: T = await self._done(rollout_id, operation)
        return found

    async def retire_now(self, rollout_id: str) -> None:
        """Leave only a tombstone, whatever the state. Idempotent."""
        at = self._clock()

        def decide(fold: RolloutFold) -> Decision:
            tombstone = decide_retire_now(fold, at)
            return Decision([tombstone] if tombstone is not None else [])

        await self._done(rollout_id, Operation(decide=decide, alone=True))

    async def list_rollouts(
        self, *, state: str | None = None, prefix: str = "", limit: int = 100, cursor: str = ""
    ) -> tuple[Sequence[RolloutStatus], str | None]:
        """See ``CaptureStore.list_rollouts``."""
        rows = await self._query(
            _LIST,
            {
                "after": cursor,
                "prefix": prefix,
                "end": prefix + _AFTER_ALL_IDS,
                "state": state,
                "limit": limit + 1,
            },
        )
        ids = [row[0] for row in rows[:limit]]
        found = await asyncio.gather(*map(self.status, ids))
        # What changed since the listing is shown as it is, or not at all.
        shown = [status for status in found if status.state != "unknown"]
        return shown, ids[-1] if len(rows) > limit else None

    async def healthy(self) -> str | None:
        """None when a write works now; what is owed is tried first."""
        try:
            await asyncio.to_thread(self._connections.call, _probe)
        except StoreError as exc:
            return str(exc)
        self._committer.failure = None
        if len(self._committer.owed):
            await asyncio.to_thread(self._committer.owed.retry_now)
            if left := len(self._committer.owed):
                return f"{left} marks of rollouts are not in the database yet"
        return None

    async def close(self) -> None:
        """Finish what was begun, then release threads and connections. Idempotent."""
        await asyncio.to_thread(self.close_now)

    def close_now(self) -> None:
        """``close`` for callers without an event loop; blocks."""
        self._committer.close(_CLOSE_TIMEOUT_S)

    # --- plumbing ----------------------------------------------------------------------------

    async def _done(self, rollout_id: str, operation: Operation) -> Any:
        self._committer.submit(validate_rollout_id(rollout_id), operation)
        return await asyncio.wrap_future(operation.done)

    async def _query(self, sql: Any, parameters: Any) -> list[tuple[Any, ...]]:
        def work(connection: PgConnection) -> list[tuple[Any, ...]]:
            return connection.execute(sql, parameters).fetchall()

        return await asyncio.to_thread(self._committer.call, work)


def open_postgres_store(url: str, *, spill_dir: Path | None = None) -> PostgresCaptureStore:
    """A store on a migrated database; blocks until that is known.

    ``spill_dir`` is where marks are kept that the database does not take (see ``spill``).

    Raises:
        ConfigurationError: the URL is wrong, or the schema missing, older or newer.
        StoreUnavailableError: no connection.
    """
    spill = SpillLog(spill_directory(PostgresTarget(url).shown, spill_dir))
    store = PostgresCaptureStore(url, spill=spill)
    try:
        store.check_schema()
    except BaseException:
        store.close_now()
        raise
    return store


def _frozen_state(fold: RolloutFold, _: Any) -> TokenCaptureSnapshot:
    """The snapshot without its entries."""
    frozen = require_frozen(fold)
    reasons = fold.reasons()
    return TokenCaptureSnapshot(
        rollout_id=fold.rollout_id,
        entries=(),
        incomplete=bool(reasons),
        snapshot_id=frozen.snapshot_id,
        version=fold.version,
        incomplete_reasons=reasons,
    )


def _probe(connection: PgConnection) -> None:
    """Write and take it back: a standby, a missing right and a missing table show."""
    with connection.transaction(force_rollback=True):
        connection.execute(_PROBE, [_PROBE_ROLLOUT])
