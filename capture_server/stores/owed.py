"""Records that could not be written when they were due: kept in memory until the disk takes them.

Invariant: an owed record leaves this list only when it is on disk, its rollout is deleted or
retired, or the process ends. Until then the rollout counts as incomplete here, no snapshot of it
is given out, and a thread retries: recovery needs no hand and no traffic.

A process that dies meanwhile loses the list; what protects the rollout then is the intent, which
was on disk before the call began and now dangles.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from capture_server.stores.journal import Cancel, Incomplete, Record

_FIRST_WAIT_S: Final = 0.2
_LONGEST_WAIT_S: Final = 5.0


class OwedRecords:
    """By rollout; thread-safe. ``retry(rollout_id)`` must try to write what is owed."""

    def __init__(self, retry: Callable[[str], None]) -> None:
        self._retry = retry
        self._condition = threading.Condition()  # guards the fields below
        self._owed: dict[str, dict[tuple[str, str, str], Record]] = {}
        self._has_thread = False
        self._closed = False

    def add(self, rollout_id: str, records: Iterable[Record]) -> None:
        """Note them down (equal ones once) and see that they are retried."""
        with self._condition:
            for record in records:
                self._owed.setdefault(rollout_id, {}).setdefault(_key(record), record)
            if self._owed and not self._has_thread and not self._closed:
                self._has_thread = True
                threading.Thread(
                    target=self._keep_trying, name="token-capture-owed", daemon=True
                ).start()

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
            for record in records:
                left.pop(_key(record), None)
            if not left:
                self._owed.pop(rollout_id, None)

    def forget(self, rollout_id: str) -> None:
        """The rollout is gone."""
        with self._condition:
            self._owed.pop(rollout_id, None)

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


def _key(record: Record) -> tuple[str, str, str]:
    if isinstance(record, Incomplete):
        return record.TYPE, record.code, record.call
    assert isinstance(record, Cancel), "only marks and cancels are owed"
    return record.TYPE, "", record.call
