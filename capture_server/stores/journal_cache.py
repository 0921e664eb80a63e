"""The journals that this process has at hand, bounded in number, calls and open descriptors.

Invariant: a journal in use, or one whose sync failed, is not evicted; one that is evicted is read
again from its file when it is next needed. Rollout ids map to paths here and nowhere else.
"""

from __future__ import annotations

import contextlib
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from capture_server.stores.journal import journal_name
from capture_server.stores.journal_file import JournalFile

_MAX_JOURNALS: Final = 8192
_MAX_CALLS: Final = 200_000  # about 100 MB of folds
_FEWEST_OPEN: Final = 16
_MOST_OPEN: Final = 512


def default_max_open() -> int:
    """A quarter of the process's descriptors: connections need the rest."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_OPEN
    return max(_FEWEST_OPEN, min(_MOST_OPEN, soft // 4))


@dataclass(slots=True)
class _Slot:
    journal: JournalFile
    in_use: int = 0
    num_calls: int = 0  # as counted when it was last given back

    @property
    def can_go(self) -> bool:
        return not self.in_use and self.journal.is_trusted


class JournalCache:
    """Least recently used journals go first. Thread-safe."""

    def __init__(
        self, root: Path, make: Callable[[Path, str], JournalFile], *, max_open: int | None = None
    ) -> None:
        self._root = root
        self._make = make
        self._max_open = default_max_open() if max_open is None else max_open
        self._lock = threading.Lock()  # guards the fields below
        self._slots: OrderedDict[str, _Slot] = OrderedDict()
        self._open: OrderedDict[str, None] = OrderedDict()  # journals that hold a descriptor
        self._num_calls = 0

    def path_for(self, rollout_id: str) -> Path:
        """Where the rollout's journal stands. The id must be valid."""
        return self._root / journal_name(rollout_id)

    @contextlib.contextmanager
    def use(self, rollout_id: str) -> Iterator[JournalFile]:
        """Keep a rollout's journal in the cache for a while."""
        with self._lock:
            slot = self._slots.get(rollout_id)
            if slot is None:
                slot = _Slot(self._make(self.path_for(rollout_id), rollout_id))
                self._slots[rollout_id] = slot
            self._slots.move_to_end(rollout_id)
            slot.in_use += 1
        try:
            yield slot.journal
        finally:
            with self._lock:
                self._give_back(rollout_id, slot)

    def _give_back(self, rollout_id: str, slot: _Slot) -> None:
        slot.in_use -= 1
        num_calls = len(slot.journal.fold.calls)
        self._num_calls += num_calls - slot.num_calls
        slot.num_calls = num_calls
        self._open.pop(rollout_id, None)
        if slot.journal.is_open:
            self._open[rollout_id] = None
        self._trim()

    def _trim(self) -> None:
        for rollout_id in list(self._open) if len(self._open) > self._max_open else ():
            if len(self._open) <= self._max_open:
                break
            slot = self._slots[rollout_id]
            if not slot.in_use:
                slot.journal.close()
                del self._open[rollout_id]
        while len(self._slots) > _MAX_JOURNALS or self._num_calls > _MAX_CALLS:
            oldest = next((r for r, s in self._slots.items() if s.can_go), None)
            if oldest is None or len(self._slots) == 1:
                return
            self._discard(oldest)

    def _discard(self, rollout_id: str) -> None:
        slot = self._slots.pop(rollout_id)
        self._open.pop(rollout_id, None)
        self._num_calls -= slot.num_calls
        slot.journal.close()

    def close(self) -> None:
        """Close every journal that is not in use."""
        with self._lock:
            for rollout_id in [r for r, s in self._slots.items() if not s.in_use]:
                self._discard(rollout_id)
