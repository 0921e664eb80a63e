"""Counters of one store in one process; ``/metrics`` and the dashboard read them.

Approximate under threads (plain additions); nothing is decided by them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass(slots=True)
class StoreStatistics:
    """All counts since the store was opened."""

    writes: int = 0  # batches handed to the kernel
    bytes_written: int = 0
    syncs: int = 0  # of journals, without directories
    sync_seconds: float = 0.0
    put_records: int = 0
    late_records: int = 0  # refused after a fence
    conflicts: int = 0
    write_failures: int = 0  # writes or syncs that failed
    torn_tails: int = 0
    corrupt_places: int = 0
    rebuilt_files: int = 0  # after a failed sync
    unsaved_marks: int = 0  # gauge: marks that wait in memory for the disk
    # Called with the seconds of each sync, from the thread that did it.
    on_sync: Callable[[float], None] | None = field(default=None, repr=False)

    def synced(self, seconds: float) -> None:
        """Note one sync of a journal."""
        self.syncs += 1
        self.sync_seconds += seconds
        if self.on_sync is not None:
            self.on_sync(seconds)


@runtime_checkable
class CountingStore(Protocol):
    """A store that keeps ``StoreStatistics``."""

    def statistics(self) -> StoreStatistics:
        """Since it was opened, in this process."""


@runtime_checkable
class SpillingStore(Protocol):
    """A store with a local spill."""

    def spill_usage(self) -> tuple[int, int]:
        """Items waiting there, and the bytes that they take."""


def spill_usage(store: object) -> tuple[int, int]:
    """Items and bytes in the store's local spill; zeros if it has none."""
    return store.spill_usage() if isinstance(store, SpillingStore) else (0, 0)
