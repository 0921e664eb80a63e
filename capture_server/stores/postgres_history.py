"""What a process knows of a rollout in the database, and batches of operations that extend it.

A rollout's records are a history that only grows; every append has a random token, and the token
of the last one, the head, names everything before it. An append says which head it continues.
If that is not the head any more, it writes nothing and brings back what others appended, and the
operations are decided again. So the rules (``decisions``) always see the state that they change.

Invariant: an append takes effect at most once. After a lost connection the very same append is
sent again; its own token in the answer tells that it had been committed. A history that is no
continuation of the known one (deleted and used again, or a failover that lost the end) is read
anew from its start.

Decides nothing itself, and does no I/O: statements go in and out as values.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

from psycopg.types.numeric import Int4, Int8

from capture_server.stores.decisions import Decision
from capture_server.stores.fold import RolloutFold
from capture_server.stores.journal import Entry, Frozen, Note, Record, Retired, decode
from capture_server.stores.postgres_records import row_of
from capture_server.stores.statistics import StoreStatistics
from middleware.errors import TokenCaptureError

logger = logging.getLogger(__name__)

APPEND: Final = (
    "SELECT o_pos, o_token, o_line FROM token_capture_append_v1("
    "%b::text, %b::bigint, %b::integer, %b::bigint, %b::text, %b::double precision, "
    "%b::boolean, %b::boolean, %b::bytea[], %b::bytea[])"
)
Row = tuple[int, int, bytes | None]  # position, token, line

_APPENDED: Final = -1  # position of the one row that answers an append that was done


@dataclass(slots=True)
class History:
    """One rollout as of the last look; ``head`` is None while there is no record."""

    rollout_id: str
    statistics: StoreStatistics
    fold: RolloutFold = field(init=False)
    head: int | None = None
    length: int = 0

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start over from an unread history."""
        self.fold = RolloutFold(self.rollout_id)
        self.head = None
        self.length = 0

    def take(self, rows: Sequence[Row]) -> None:
        """Fold records that stand behind the known ones."""
        for position, token, line in rows:
            record = decode((line or b"").removesuffix(b"\n"))
            if record is None:
                self._take_damage(position)
            else:
                self.fold.apply(record)
            self.head, self.length = token, position + 1

    def _take_damage(self, position: int) -> None:
        detail = f"the record at position {position} is damaged"
        self.fold.apply_damage(detail, 1)
        self.statistics.corrupt_places += 1
        logger.error(
            "corrupt record, rollout %s is masked: %s",
            self.rollout_id,
            detail,
            extra={"action": "record_corrupt", "rollout_id": self.rollout_id},
        )


def _running_future() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # from here on cancel() is refused
    return future


@dataclass(slots=True, kw_only=True, eq=False)
class Operation:
    """What to do with one rollout; it may be decided several times, on newer states.

    ``decide`` changes nothing. ``value`` is asked before the decided records are folded,
    ``answer`` after that; ``finish`` after the commit, to read more. ``owed`` is what the rollout
    must be told later if this fails. ``alone``: shares its append with no other operation.
    """

    decide: Callable[[RolloutFold], Decision]
    prepare: Callable[[], None] | None = None
    value: Callable[[RolloutFold], Any] = lambda fold: None
    answer: Callable[[RolloutFold, Any], Any] = lambda fold, value: value
    finish: Callable[[History, Any], Any] | None = None
    owed: Sequence[Record] = ()
    call: str = ""  # for log lines
    alone: bool = False
    since: float = field(default_factory=time.monotonic)
    done: Future[Any] = field(default_factory=_running_future)
    result: Any = None
    error: Exception | None = None

    def complete(self) -> None:
        """Let the caller go on."""
        if self.done.done():
            return
        if self.error is not None:
            self.done.set_exception(self.error)
        else:
            self.done.set_result(self.result)


@dataclass(slots=True)
class _Step:
    operation: Operation
    decision: Decision
    rows: Sequence[tuple[bytes, bytes | None]]
    value: Any = None


class Batch:
    """The operations of one append. ``parameters`` sends it, ``settle`` takes the answer."""

    def __init__(self, history: History, operations: Sequence[Operation]) -> None:
        self.history = history
        self.operations = operations
        self._decide()

    def parameters(self) -> Sequence[Any]:
        """For ``APPEND``; the same at every call until the answer is settled."""
        records = self._records()
        retired = next((r for r in records if isinstance(r, Retired)), None)
        is_frozen = any(isinstance(record, Frozen) for record in records)
        rows = [row for step in self._steps for row in step.rows]
        return (
            self.history.rollout_id,
            None if self._head is None else Int8(self._head),
            Int4(self._position),
            Int8(self._token),
            "retired" if retired else "frozen" if is_frozen else None,
            None if retired is None else retired.at,
            retired is not None,
            # Notes alone do not wait for the disk.
            any(not isinstance(record, Note) for record in records),
            [line for line, _ in rows],
            [arrays for _, arrays in rows],
        )

    def settle(self, rows: Sequence[Row]) -> bool:
        """True when the operations are done; else they were decided again and must be sent."""
        if rows and rows[0][0] == _APPENDED:
            self._appended()
            return True
        tail = self._behind_the_known(rows)
        if tail and tail[0][1] == self._token:
            # Sent before, and committed although no answer came. Others may have gone on.
            self._appended()
            self.history.take([row for row in tail if row[1] != self._token])
            return True
        if tail is None or self._is_ahead:
            self.history.forget()
        if tail is not None and self._position == self.history.length:
            self.history.take(tail)
        self._decide()
        return False

    def abandon(self) -> None:
        """Give up; whether the last append was committed stays unknown until the next look."""
        if self._is_ahead:
            self.history.forget()

    def _records(self) -> list[Record]:
        return [record for step in self._steps for record in step.decision.records]

    def _behind_the_known(self, rows: Sequence[Row]) -> Sequence[Row] | None:
        """The rows that continue what we know; None if they continue something else."""
        if self._head is None:
            return rows
        if not rows or rows[0][:2] != (self._position - 1, self._head):
            return None
        return rows[1:]

    def _decide(self) -> None:
        self._head, self._position = self.history.head, self.history.length
        self._token = secrets.randbits(63)
        self._steps: list[_Step] = []
        self._num_folded = 0
        self._is_ahead = False  # the fold holds records that are not known to be committed
        for operation in self.operations:
            self._fold_steps()
            self._steps.append(_decided(operation, self.history.fold))
            # The last one stays unfolded: a lone operation leaves the fold as it is known.

    def _fold_steps(self) -> None:
        fold = self.history.fold
        for step in self._steps[self._num_folded :]:
            for record in step.decision.records:
                fold.apply(record)
                self._is_ahead = True
            operation = step.operation
            operation.error = step.decision.error
            if operation.error is None:
                try:
                    operation.result = operation.answer(fold, step.value)
                except TokenCaptureError as exc:
                    operation.error = exc
        self._num_folded = len(self._steps)

    def _appended(self) -> None:
        history, records = self.history, self._records()
        if any(isinstance(record, Retired) for record in records):
            history.forget()
            self._position = 0
        self._fold_steps()
        if records:
            history.head, history.length = self._token, self._position + len(records)
        self._is_ahead = False
        history.statistics.writes += bool(records)
        for step in self._steps:
            self._report(step)

    def _report(self, step: _Step) -> None:
        """Count and log, once per operation that took effect."""
        statistics, decision = self.history.statistics, step.decision
        statistics.conflicts += bool(decision.error and decision.records)
        statistics.put_records += sum(isinstance(r, Entry) for r in decision.records)
        statistics.bytes_written += sum(
            len(line) + len(arrays or b"") for line, arrays in step.rows
        )
        if decision.late:
            statistics.late_records += 1
            logger.warning(
                "late record of call %r ignored: rollout %s is %s",
                step.operation.call,
                self.history.rollout_id,
                self.history.fold.state,
                extra={"action": "late_record", "rollout_id": self.history.rollout_id},
            )


def _decided(operation: Operation, fold: RolloutFold) -> _Step:
    try:
        decision = operation.decide(fold)
        rows = [row_of(record) for record in decision.records]
    except TokenCaptureError as exc:  # one bad record must not fail its neighbours
        return _Step(operation, Decision(error=exc), [])
    return _Step(operation, decision, rows, operation.value(fold))
