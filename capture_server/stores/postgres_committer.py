"""Runs queued operations against the database: decide, append, take the answer, retry.

Invariant: an operation succeeds only after its commit is acknowledged. Every rollout's append is
a transaction of its own, also where several share a round trip (pipeline), so that no rollout
fails with another, or waits for another's lock longer than the lock timeout. When the database
stays away, the operations fail and what their rollouts must still be told is owed (``owed``).

It decides nothing about rollouts (``decisions``) and knows no tables (``postgres_history``).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from capture_server.stores.committer import as_error, decide_owed
from capture_server.stores.decisions import Decision
from capture_server.stores.fold import RolloutFold
from capture_server.stores.journal import Record
from capture_server.stores.owed import OwedRecords
from capture_server.stores.postgres_connections import (
    Connections,
    DatabaseAwayError,
    PgConnection,
)
from capture_server.stores.postgres_history import APPEND, Batch, History, Operation, Row
from capture_server.stores.postgres_turns import Turns
from capture_server.stores.spill import SpillLog
from capture_server.stores.statistics import StoreStatistics
from middleware.errors import StoreClosedError, StoreError, StoreUnavailableError

logger = logging.getLogger(__name__)
T = TypeVar("T")
Answer = Sequence[Row] | Exception

_FIRST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 1.0


class PostgresCommitter:
    """The threads, the known histories and the health of one store in one process."""

    def __init__(
        self,
        connections: Connections,
        *,
        retry_for_s: float,
        max_cached: int,
        spill: SpillLog | None = None,
    ) -> None:
        self.statistics = StoreStatistics()
        self.failure: str | None = None  # why the last attempt failed; None: it did not
        self.owed = OwedRecords(self._retry_owed, spill)
        self._connections = connections
        self._retry_for_s = retry_for_s
        self._pid = os.getpid()
        self._closing = threading.Event()
        self._max_cached = max_cached
        self._histories: OrderedDict[str, History] = OrderedDict()
        self._lock = threading.Lock()  # guards the histories' places, not their content
        self._turns: Turns[Operation] = Turns(
            self._run_turn, max_threads=connections.target.max_connections
        )
        self.owed.adopt()

    def submit(self, rollout_id: str, operation: Operation) -> Operation:
        """Queue it behind the rollout's earlier operations.

        Raises:
            StoreClosedError: after ``close``.
            StoreError: in a forked child (threads and connections are not inherited).
        """
        if os.getpid() != self._pid:
            raise StoreError("this store was opened before a fork: open one in each process")
        self._turns.submit(rollout_id, operation)
        return operation

    def call(self, work: Callable[[PgConnection], T]) -> T:
        """Something that may run twice, outside the queue; retried while the database is away.

        Raises:
            StoreUnavailableError: it stayed away.
        """
        deadline = time.monotonic() + self._retry_for_s
        wait = _FIRST_WAIT_S
        while True:
            try:
                return self._connections.call(work)
            except StoreUnavailableError as exc:
                if time.monotonic() + wait > deadline or self._closing.wait(wait):
                    self.failure = str(exc)
                    raise
            wait = min(2 * wait, _LONGEST_WAIT_S)

    def forget(self, rollout_id: str) -> None:
        """The rollout was deleted here."""
        with self._lock:
            self._histories.pop(rollout_id, None)

    def close(self, timeout_s: float) -> None:
        """Finish what is queued, then release threads and connections. Idempotent."""
        self.owed.close()
        self._closing.set()  # from here on a failure is final
        given_up = self._turns.close(timeout_s)
        self._connections.close()
        if given_up or len(self.owed):
            logger.error(
                "store closed with %d operations unfinished and %d marks not in the database",
                given_up,
                len(self.owed),
                extra={"action": "store_close_incomplete"},
            )

    def _retry_owed(self, rollout_id: str) -> None:
        operation = Operation(decide=lambda fold: Decision())
        try:
            self.submit(rollout_id, operation).done.result()
        except StoreClosedError:
            return
        except Exception as exc:  # noqa: BLE001 - it stays owed, and the next round tries again
            logger.debug("still owed to %s: %s", rollout_id, exc)

    # --- one turn ----------------------------------------------------------------------------

    def _run_turn(self, turn: dict[str, list[Operation]]) -> None:
        runs = {rollout: _Run(self, rollout, operations) for rollout, operations in turn.items()}
        try:
            self._finish_runs(runs)
        except BaseException as exc:  # noqa: BLE001 - the callers must hear of it, whatever it is
            for rollout, run in runs.items():
                run.fail(as_error(exc))
                self._turns.release(rollout)

    def _finish_runs(self, runs: dict[str, _Run]) -> None:
        """Until none is left in ``runs``."""
        wait = _FIRST_WAIT_S
        while runs:
            batches = {rollout: run.batch for rollout, run in runs.items() if run.batch is not None}
            answers = self._exchange(list(batches.values()))
            is_away = False
            for (rollout, _), answer in zip(batches.items(), answers, strict=True):
                run = runs[rollout]
                final = self._closing.is_set() or time.monotonic() > run.since + self._retry_for_s
                is_away |= run.take(answer, final=final)
            for rollout in [rollout for rollout, run in runs.items() if run.batch is None]:
                del runs[rollout]
                self._turns.release(rollout)
            if is_away and runs:
                self._closing.wait(wait)
                wait = min(2 * wait, _LONGEST_WAIT_S)

    def _exchange(self, batches: Sequence[Batch]) -> list[Answer]:
        """Send all, and the answer or the error of each."""
        if len(batches) > 1:
            try:
                return list(self._connections.call(lambda c: _append_pipelined(c, batches)))
            except Exception as exc:  # noqa: BLE001 - whose fault it is shows one by one
                # What is committed already is recognised by its token.
                logger.debug("a pipeline of %d appends failed: %s", len(batches), exc)
        answers: list[Answer] = []
        for batch in batches:
            answer = self._append_one(batch)
            if isinstance(answer, DatabaseAwayError):
                # The others would wait for the same connection; they are asked again, too.
                return [*answers, *[answer] * (len(batches) - len(answers))]
            answers.append(answer)
        return answers

    def _append_one(self, batch: Batch) -> Answer:
        try:
            return self._connections.call(lambda c: _append(c, batch))
        except Exception as exc:  # noqa: BLE001 - the callers must hear of it, whatever it is
            return exc

    def history(self, rollout_id: str) -> History:
        """What is known of it; only the thread that works for the rollout may use it."""
        with self._lock:
            history = self._histories.get(rollout_id)
            if history is None:
                history = self._histories[rollout_id] = History(rollout_id, self.statistics)
            self._histories.move_to_end(rollout_id)
            while len(self._histories) > self._max_cached:
                self._histories.popitem(last=False)
            return history


class _Run:
    """One rollout's operations on their way through a turn; ``batch`` is None at the end."""

    def __init__(
        self, committer: PostgresCommitter, rollout_id: str, operations: Sequence[Operation]
    ) -> None:
        self.batch: Batch | None = None
        self._committer = committer
        self._rollout_id = rollout_id
        self._owed: Sequence[Record] = ()
        self.since = min(operation.since for operation in operations)
        self._left: deque[list[Operation]] = deque()
        shared = False
        for operation in operations:
            if not _prepared(operation):
                continue
            if not shared or operation.alone:
                self._left.append([])
            self._left[-1].append(operation)
            shared = not operation.alone
        self._next()

    def _next(self) -> None:
        if not self._left:
            self.batch = None
            return
        operations = self._left.popleft()
        self._owed = self._committer.owed.of(self._rollout_id)
        settling = [Operation(decide=_owed_decision(record)) for record in self._owed]
        try:
            history = self._committer.history(self._rollout_id)
            self.batch = Batch(history, [*settling, *operations])
        except Exception as exc:  # noqa: BLE001 - the callers must hear of it, whatever it is
            self._end(operations, exc)

    def take(self, answer: Answer, *, final: bool) -> bool:
        """Go on with an answer; True if the database is away and the same must be sent again."""
        assert self.batch is not None
        committer = self._committer
        if isinstance(answer, StoreUnavailableError):
            committer.statistics.write_failures += 1
            if isinstance(answer, DatabaseAwayError):
                committer.failure = str(answer)
            if not final:
                return True
        if isinstance(answer, Exception):
            return self._give_up(answer)
        try:
            done = self.batch.settle(answer)
        except Exception as exc:  # noqa: BLE001 - the callers must hear of it, whatever it is
            return self._give_up(exc)
        committer.failure = None
        if done:
            committer.owed.settle(self._rollout_id, self._owed)
            committer.statistics.unsaved_marks = len(committer.owed)
            for operation in self.batch.operations:
                _finish(operation, self.batch.history)
            self._next()
        return False

    def fail(self, exc: Exception) -> None:
        """Give up all that is left."""
        while self.batch is not None:
            self._give_up(exc)

    def _give_up(self, exc: Exception) -> bool:
        assert self.batch is not None
        self.batch.abandon()
        self._end(self.batch.operations, exc)
        return False

    def _end(self, operations: Sequence[Operation], exc: Exception) -> None:
        committer = self._committer
        for operation in operations:
            committer.owed.add(self._rollout_id, operation.owed)
            operation.error = exc
            operation.complete()
        committer.statistics.unsaved_marks = len(committer.owed)
        logger.error(
            "capture store failed for rollout %s: %s",
            self._rollout_id,
            exc,
            extra={"action": "store_failed", "rollout_id": self._rollout_id},
        )
        self._next()


def _append(connection: PgConnection, batch: Batch) -> Sequence[Row]:
    return connection.execute(APPEND, batch.parameters(), binary=True).fetchall()


def _append_pipelined(connection: PgConnection, batches: Sequence[Batch]) -> Sequence[Any]:
    with connection.pipeline():
        cursors = []
        for batch in batches:
            connection.execute("BEGIN")
            cursors.append(connection.execute(APPEND, batch.parameters(), binary=True))
            connection.execute("COMMIT")
    return [cursor.fetchall() for cursor in cursors]


def _owed_decision(record: Record) -> Callable[[RolloutFold], Decision]:
    return lambda fold: decide_owed(fold, record)


def _prepared(operation: Operation) -> bool:
    """Run what needs no database; an operation that fails here is over."""
    if operation.prepare is None:
        return True
    try:
        operation.prepare()
    except BaseException as exc:  # noqa: BLE001 - the caller must hear of it, whatever it is
        operation.error = as_error(exc)
        operation.complete()
        return False
    return True


def _finish(operation: Operation, history: History) -> None:
    if operation.finish is not None and operation.error is None:
        try:
            operation.result = operation.finish(history, operation.result)
        except Exception as exc:  # noqa: BLE001 - the caller must hear of it, whatever it is
            operation.error = exc
    operation.complete()
