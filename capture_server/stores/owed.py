"""Marks that could not be written when they were due: kept until the store's disk takes them.

Invariant: an owed record leaves this list only when it is on disk, or its rollout is deleted or
retired. Until then the rollout counts as incomplete here, no snapshot of it is given out, and a
thread retries: recovery needs no hand and no traffic.

With a ``SpillLog`` (on another disk) it also outlives the process; without one, a process that
dies loses the list. What protects the rollout then is the intent, which was on disk before the
call began and now dangles.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Final

from capture_server.stores.journal import Cancel, Incomplete, Record
from capture_server.stores.spill import SpilledItem, SpillLog
from middleware.errors import StoreError, StoreUnavailableError

logger = logging.getLogger(__name__)

_FIRST_WAIT_S: Final = 0.2
_LONGEST_WAIT_S: Final = 5.0


_SPILLED_TYPES: Final[dict[str, type[Incomplete] | type[Cancel]]] = {
    cls.TYPE: cls for cls in (Incomplete, Cancel)
}

_Key = tuple[str, str, str]


class OwedRecords:
    """By rollout; thread-safe. ``retry(rollout_id)`` must try to write what is owed."""

    def __init__(self, retry: Callable[[str], None], spill: SpillLog | None = None) -> None:
        self._retry = retry
        self._spill = spill
        self._condition = threading.Condition()  # guards the fields below
        self._owed: dict[str, dict[_Key, Record]] = {}
        self._spilled: dict[tuple[str, _Key], SpilledItem] = {}
        self._has_thread = False
        self._closed = False

    def spill_usage(self) -> tuple[int, int]:
        """Items in the spill, and the bytes that they take; zeros without one."""
        return (0, 0) if self._spill is None else (len(self._spill), self._spill.num_bytes)

    def add(self, rollout_id: str, records: Sequence[Record]) -> None:
        """Note them down (equal ones once) and see that they are retried."""
        fresh = []
        with self._condition:
            owed = self._owed.setdefault(rollout_id, {}) if records else {}
            for record in records:
                if _key(record) not in owed:
                    owed[_key(record)] = record
                    fresh.append(record)
            self._call_a_thread()
        for record in fresh:
            self._keep(rollout_id, record)

    def _call_a_thread(self) -> None:
        if self._owed and not self._has_thread and not self._closed:
            self._has_thread = True
            threading.Thread(
                target=self._keep_trying, name="token-capture-owed", daemon=True
            ).start()

    def _keep(self, rollout_id: str, record: Record) -> None:
        """Spill it, so that it outlives this process."""
        if self._spill is None:
            return
        body = asdict(record)
        try:
            item = self._spill.add(rollout_id, record.TYPE, body["call"], body)
        except StoreUnavailableError:
            return  # reported there; it stays owed in memory
        with self._condition:
            if _key(record) in self._owed.get(rollout_id, {}):
                self._spilled[rollout_id, _key(record)] = item
                return
        self._spill.settle(item)  # written in the meantime

    def adopt(self) -> None:
        """Owe what an earlier process left in the spill. Blocks."""
        if self._spill is None or not self._spill.adopt():
            return
        for item in self._spill.pending():
            try:
                record = _SPILLED_TYPES[item.kind](**self._spill.load(item))
            except (KeyError, TypeError, StoreError) as exc:
                logger.error("a spilled %s is not understood: %r", item.kind, exc)  # noqa: TRY400
                continue
            with self._condition:
                self._owed.setdefault(item.rollout_id, {})[_key(record)] = record
                self._spilled[item.rollout_id, _key(record)] = item
        with self._condition:
            self._call_a_thread()

    def is_safe(self, rollout_id: str, record: Record) -> bool:
        """Whether a record that was owed outlives this process: spilled, or written by now."""
        with self._condition:
            is_owed = _key(record) in self._owed.get(rollout_id, {})
            return not is_owed or (rollout_id, _key(record)) in self._spilled

    def of(self, rollout_id: str) -> Sequence[Record]:
        """What the rollout is owed now."""
        if not self._owed:  # the usual case, without the lock
            return ()
        with self._condition:
            return list(self._owed.get(rollout_id, {}).values())

    def settle(self, rollout_id: str, records: Iterable[Record]) -> None:
        """These are on disk."""
        with self._condition:
            left = self._owed.get(rollout_id, {})
            keys = [_key(record) for record in records]
            for key in keys:
                left.pop(key, None)
            if not left:
                self._owed.pop(rollout_id, None)
        self._let_go(rollout_id, keys)

    def forget(self, rollout_id: str) -> None:
        """The rollout is gone."""
        with self._condition:
            keys = list(self._owed.pop(rollout_id, {}))
        self._let_go(rollout_id, keys)

    def _let_go(self, rollout_id: str, keys: Iterable[_Key]) -> None:
        with self._condition:
            found = [self._spilled.pop((rollout_id, key), None) for key in keys]
        for item in found:
            if item is not None and self._spill is not None:
                self._spill.settle(item)

    def __len__(self) -> int:
        with self._condition:
            return sum(len(records) for records in self._owed.values())

    def retry_now(self) -> None:
        """Try everything once; blocks."""
        with self._condition:
            rollouts = list(self._owed)
        for rollout_id in rollouts:
            self._retry(rollout_id)

    def close(self) -> None:
        """Stop retrying."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        if self._spill is not None:
            self._spill.close()

    def _keep_trying(self) -> None:
        wait = _FIRST_WAIT_S
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closed, wait)
                if self._closed or not self._owed:
                    self._has_thread = False
                    return
            wait = min(2 * wait, _LONGEST_WAIT_S)
            self.retry_now()


def _key(record: Record) -> _Key:
    if isinstance(record, Incomplete):
        return record.TYPE, record.code, record.call
    assert isinstance(record, Cancel), "only marks and cancels are owed"
    return record.TYPE, "", record.call
