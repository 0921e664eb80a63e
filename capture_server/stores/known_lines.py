"""What a process knows of one journal: the fold of the lines it has read or written.

Invariant: ``fold`` holds exactly the whole lines before ``end``. Damage is judged here: behind it
a whole line means corruption (masked, reported with file and line), else it is a torn tail
(reported only). Does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from capture_server.stores.fold import RolloutFold
from capture_server.stores.journal import Header, Record, Span, Torn
from capture_server.stores.statistics import StoreStatistics
from middleware.errors import StoreError

logger = logging.getLogger(__name__)


class KnownLines:
    """See the module. ``header`` is line 1 as read: it tells two files at one path apart."""

    def __init__(self, path: Path, rollout_id: str, statistics: StoreStatistics) -> None:
        self._path = path
        self._rollout_id = rollout_id
        self._statistics = statistics
        self._reported_tail: tuple[int, int] | None = None
        self._reported_damage: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Start over from an unread file."""
        self.fold = RolloutFold(self._rollout_id)
        self.header: bytes = b""
        self.end = 0  # offset behind the last whole line
        self._num_lines = 0

    def appended(self, lines: bytes) -> None:
        """These lines, already folded, now stand behind ``end``."""
        if not self.header:
            self.header = lines[: lines.index(b"\n") + 1]
        self._num_lines += lines.count(b"\n")
        self.end += len(lines)

    def isolated(self, end: int) -> None:
        """A torn tail and the line that names it now stand before ``end``."""
        self._num_lines += 2
        self.end = end

    def take(self, spans: Iterator[Span], data: bytes) -> Iterator[Span]:
        """Fold what was scanned and pass it on; ``data`` starts at the first span."""
        damage: Span | None = None
        base = self.end
        for span in spans:
            if span.record is None:
                damage = span
                continue
            line = data[span.start - base : span.end - base]
            if damage is not None:
                self._take_damage(
                    damage, span.record, data[damage.start - base : span.start - base]
                )
                damage = None
            self._check_owner(span.record)
            if not self.header:
                self.header = line if isinstance(span.record, Header) else b"\n"
            self.fold.apply(span.record)
            self._num_lines += 1
            self.end = span.end
            yield span
        if damage is not None:
            self._report_torn_tail(damage)

    def _take_damage(self, damage: Span, follower: Record, damaged: bytes) -> None:
        line = self._num_lines + 1
        num_lines = damaged.count(b"\n")
        self._num_lines += num_lines
        if isinstance(follower, Torn) and follower.offset == damage.start:
            return
        detail = (
            f"{self._path.name} line {line}: {damage.end - damage.start} damaged bytes "
            f"at offset {damage.start}"
        )
        self.fold.apply_damage(detail, num_lines)
        if detail not in self._reported_damage:
            self._reported_damage.add(detail)
            self._statistics.corrupt_places += 1
            logger.error(
                "corrupt journal, the rollout is masked: %s",
                detail,
                extra={"action": "journal_corrupt", "path": str(self._path), "line": line},
            )

    def _check_owner(self, record: Record) -> None:
        if isinstance(record, Header) and record.rollout_id != self._rollout_id:
            raise StoreError(
                f"{self._path} belongs to rollout {record.rollout_id!r}, not "
                f"{self._rollout_id!r}: it was moved; put it back"
            )

    def _report_torn_tail(self, tail: Span) -> None:
        if self._reported_tail == (tail.start, tail.end):
            return
        self._reported_tail = (tail.start, tail.end)
        self._statistics.torn_tails += 1
        logger.warning(
            "torn tail of %d bytes in %s, never acknowledged; it is cut before the next append",
            tail.end - tail.start,
            self._path,
            extra={"action": "journal_torn_tail", "path": str(self._path), "offset": tail.start},
        )
