"""Runs the queued operations of a rollout as one batch: lock, catch up, decide, write, sync.

Invariant: an operation succeeds only after what it relies on is where it promised: in the kernel
for ``visible``, on disk for ``done``. When the disk fails, every operation of the batch that
needed it fails, and what the rollout must still be told is owed (``owed``).

It decides nothing about rollouts (``fold``) and knows no file format (``journal_file``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from capture_server.stores.decisions import Decision, decide_cancel, decide_incomplete
from capture_server.stores.directories import Directories
from capture_server.stores.filesystem import FileSystem
from capture_server.stores.fold import RolloutFold
from capture_server.stores.journal import Cancel, Incomplete, Record
from capture_server.stores.journal_cache import JournalCache
from capture_server.stores.journal_file import JournalFile, LockHeldError
from capture_server.stores.lanes import Lanes
from capture_server.stores.operations import Operation
from capture_server.stores.owed import OwedRecords
from capture_server.stores.spill import SpillLog
from capture_server.stores.statistics import StoreStatistics
from middleware.errors import StoreClosedError, StoreError, StoreUnavailableError

logger = logging.getLogger(__name__)


class Committer:
    """The threads, the journals at hand, and the health of one store in one process."""

    def __init__(
        self,
        root: Path,
        *,
        fs: FileSystem,
        clock: Callable[[], float],
        max_threads: int,
        max_open_files: int | None,
        spill: SpillLog | None = None,
    ) -> None:
        self.statistics = StoreStatistics()
        self.failure: str | None = None  # why the last write or sync failed; None: it did not
        self.owed = OwedRecords(self._retry_owed, spill)
        self._fs = fs
        self._directories = Directories(fs)
        self._clock = clock
        self._pid = os.getpid()
        self._lanes = Lanes(self._run, max_threads=max_threads)
        self._cache = JournalCache(root, self._make_journal, max_open=max_open_files)
        self.owed.adopt()

    def _make_journal(self, path: Path, rollout_id: str) -> JournalFile:
        return JournalFile(
            path,
            rollout_id,
            fs=self._fs,
            clock=self._clock,
            statistics=self.statistics,
            while_waiting=self._lanes.blocked,
            directories=self._directories,
        )

    def path_for(self, rollout_id: str) -> Path:
        """Where the rollout's journal stands."""
        return self._cache.path_for(rollout_id)

    def submit(self, rollout_id: str, operation: Operation) -> Operation:
        """Queue it behind the rollout's earlier operations.

        Raises:
            StoreClosedError: after ``close``.
            StoreError: in a forked child (threads and kernel locks are not inherited).
        """
        if os.getpid() != self._pid:
            raise StoreError("this store was opened before a fork: open one in each process")
        self._lanes.submit(rollout_id, operation)
        return operation

    def close(self, timeout_s: float) -> None:
        """Finish what is queued, then release threads and descriptors. Idempotent."""
        self.owed.close()
        given_up = self._lanes.close(timeout_s)
        self._cache.close()
        if given_up or len(self.owed):
            logger.error(
                "store closed with %d operations unfinished and %d marks not on disk",
                given_up,
                len(self.owed),
                extra={"action": "store_close_incomplete"},
            )

    def _retry_owed(self, rollout_id: str) -> None:
        operation = Operation(step=lambda journal: journal.uid, creates=True)
        try:
            self.submit(rollout_id, operation).done.result()
        except StoreClosedError:
            return
        except Exception as exc:  # noqa: BLE001 - it stays owed, and the next round tries again
            logger.debug("still owed to %s: %s", rollout_id, exc)

    # --- one batch ---------------------------------------------------------------------------

    def _run(self, rollout_id: str, queued: list[Operation]) -> None:
        ready = [operation for operation in queued if _prepared(operation)]
        start = 0
        for index, operation in enumerate(ready, start=1):
            if operation.removes or index == len(ready):
                self._run_batch(rollout_id, ready[start:index])
                start = index

    def _run_batch(self, rollout_id: str, ready: Sequence[Operation]) -> None:
        # Readers do not wait for a disk that takes no writes.
        writing = any(op.writes or op.creates for op in ready)
        owed = self.owed.of(rollout_id) if writing else ()
        try:
            with self._cache.use(rollout_id) as journal:
                self._write_batch(journal, ready, owed)
                self._sync_batch(journal, ready, owed)
        except BaseException as exc:  # noqa: BLE001 - the callers must hear of it, whatever it is
            self._fail(rollout_id, ready, as_error(exc), written=False)

    def _write_batch(
        self, journal: JournalFile, batch: Sequence[Operation], owed: Sequence[Record]
    ) -> None:
        create = bool(owed) or any(operation.creates for operation in batch)
        with journal.locked(create=create):
            for record in owed:
                journal.apply(decide_owed(journal.fold, record))
            for operation in batch:
                try:
                    operation.value = operation.step(journal)
                except StoreUnavailableError:
                    raise  # the disk, not the request: nothing of this batch is certain
                except Exception as exc:  # noqa: BLE001 - one bad request must not fail its neighbours
                    operation.error = exc

    def _sync_batch(
        self, journal: JournalFile, batch: Sequence[Operation], owed: Sequence[Record]
    ) -> None:
        for operation in batch:
            if not operation.syncs:
                operation.complete()
            elif operation.visible_early and self.failure is None:
                operation.show()
        if owed or any(operation.syncs for operation in batch):
            was_synced = journal.is_synced
            try:
                journal.sync()
            except StoreUnavailableError as exc:
                self._fail(journal.rollout_id, batch, exc, written=True)
                return
            if not was_synced:
                self.failure = None
            self.owed.settle(journal.rollout_id, owed)
            self.statistics.unsaved_marks = len(self.owed)
        for operation in batch:
            if not operation.done.done():
                operation.complete()

    def _fail(
        self, rollout_id: str, batch: Sequence[Operation], exc: Exception, *, written: bool
    ) -> None:
        if isinstance(exc, StoreUnavailableError) and not isinstance(exc, LockHeldError):
            self.failure = str(exc)
        for operation in batch:
            if operation.done.done():
                continue
            # Shown already: the call goes on although its intent is not on disk.
            shown = operation.visible.done()
            if operation.error is None:
                owed = operation.owed_unsynced if written and shown else operation.owed_unwritten
            else:
                owed = operation.owed_refused  # its error came with records that are lost, too
            self.owed.add(rollout_id, owed)
            operation.error = exc
            operation.complete()
        self.statistics.unsaved_marks = len(self.owed)
        logger.error(
            "capture store failed for rollout %s: %s",
            rollout_id,
            exc,
            extra={"action": "store_failed", "rollout_id": rollout_id},
        )


def _prepared(operation: Operation) -> bool:
    """Run what needs no lock; an operation that fails here is over."""
    if operation.prepare is None:
        return True
    try:
        operation.prepare()
    except BaseException as exc:  # noqa: BLE001 - the caller must hear of it, whatever it is
        operation.error = as_error(exc)
        operation.complete()
        return False
    return True


def as_error(exc: BaseException) -> Exception:
    """What a caller is told: a ``SystemExit`` of a lane's thread must not end the caller's."""
    return exc if isinstance(exc, Exception) else StoreError(f"the operation was ended by {exc!r}")


def decide_owed(fold: RolloutFold, record: Any) -> Decision:
    """What an owed record still means for the rollout as it is now."""
    if isinstance(record, Incomplete):
        return decide_incomplete(fold, record)
    assert isinstance(record, Cancel)
    return decide_cancel(fold, record, exact=True)
