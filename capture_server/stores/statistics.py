"""Counters of one store in one process; ``/metrics`` and the dashboard read them.

Approximate under threads (plain additions); nothing is decided by them.
"""

from __future__ import annotations

from dataclasses import dataclass


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
