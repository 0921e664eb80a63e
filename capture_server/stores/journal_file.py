"""One rollout's journal on disk: lock, catch up, append, sync, replace, remove.

Invariant: under the lock the fold equals the file's whole lines, and what is appended starts
right behind the last whole line. After a failed write the tail is cut back before the next
append; after a failed sync the file is not trusted: its lines move to a new, synced file first.

Not thread-safe: the store runs one batch of a rollout at a time. Decides nothing (``fold``).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from capture_server.stores.decisions import Decision
from capture_server.stores.directories import Directories
from capture_server.stores.filesystem import FileSystem
from capture_server.stores.fold import RolloutFold
from capture_server.stores.journal import (
    FORMAT_VERSION,
    Entry,
    Header,
    Retired,
    Torn,
    encode,
    scan,
)
from capture_server.stores.known_lines import KnownLines
from capture_server.stores.statistics import StoreStatistics
from middleware.errors import StoreUnavailableError

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S: Final = 10.0


class LockHeldError(StoreUnavailableError):
    """Another process keeps one rollout's lock; the disk itself is well."""


class JournalFile:
    """The journal of one rollout, as this process knows it."""

    def __init__(
        self,
        path: Path,
        rollout_id: str,
        *,
        fs: FileSystem,
        clock: Callable[[], float],
        statistics: StoreStatistics,
        while_waiting: Callable[[], contextlib.AbstractContextManager[None]] = (
            contextlib.nullcontext
        ),
        directories: Directories | None = None,
    ) -> None:
        self.path = path
        self.rollout_id = rollout_id
        self._fs = fs
        self._clock = clock
        self._statistics = statistics
        self._while_waiting = while_waiting
        self._directories = directories or Directories(fs)
        self._fd: int | None = None
        self._trusted = True  # False after a failed sync
        self._pending = bytearray()  # lines of this batch, already folded, not yet written
        self._known = KnownLines(path, rollout_id, statistics)
        self._forget()

    def _forget(self) -> None:
        """Start over from an unread file."""
        self._known.forget()
        self._synced = 0  # everything before this offset is on disk
        self._directory_synced = False
        self._pending.clear()

    @property
    def fold(self) -> RolloutFold:
        """The state as of the last look."""
        return self._known.fold

    @property
    def is_open(self) -> bool:
        """Whether it holds a descriptor."""
        return self._fd is not None

    @property
    def is_trusted(self) -> bool:
        """False between a failed sync and the rebuild that follows it."""
        return self._trusted

    @property
    def uid(self) -> str:
        """Identity of this very file; "" while there is none."""
        spans = list(scan(self._known.header))
        record = spans[0].record if spans else None
        return record.uid if isinstance(record, Header) else ""

    @property
    def is_synced(self) -> bool:
        """Whether every folded line is on disk, and the file's name too."""
        return self._synced >= self._known.end and self._directory_synced and not self._pending

    def close(self) -> None:
        """Give the descriptor back. The fold stays and is checked when the file is reopened."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self._fs.close(fd)

    # --- the lock ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self, *, create: bool) -> Iterator[None]:
        """Hold the rollout's lock with the fold caught up; write what was appended, then leave.

        Without ``create``, a missing file gives an empty fold and nothing may be appended.

        Raises:
            StoreUnavailableError: the disk failed, or another process keeps the lock.
        """
        with self._translated("use"):
            self._acquire(create=create)
        try:
            with self._translated("use"):
                self._catch_up()
                if not self._trusted:
                    self._rebuild()
            yield
            self.flush()
        except BaseException:
            # Lines may be folded that never reached the file: read it again next time.
            self._forget_unwritten()
            raise
        finally:
            self._release()

    def _release(self) -> None:
        if self._fd is None:
            return
        try:
            with self._translated("unlock"):
                self._fs.unlock(self._fd)
        except StoreUnavailableError:
            self.close()  # the kernel's lock goes with the descriptor
            raise

    def _acquire(self, *, create: bool) -> None:
        while True:
            if self._fd is None and not self._open(create=create):
                return
            assert self._fd is not None
            self._wait_for_lock(self._fd)
            _, inode = self._fs.size_and_inode(self._fd)
            if self._fs.inode_at(self.path) == inode:
                return
            # Replaced or removed while we waited: that file is no part of the store any more.
            self.close()
            self._forget()

    def _wait_for_lock(self, fd: int) -> None:
        if self._fs.try_lock(fd):
            return
        with self._while_waiting():
            if not self._fs.lock(fd, LOCK_TIMEOUT_S):
                raise LockHeldError(
                    f"another process has kept the lock of {self.path} for {LOCK_TIMEOUT_S:g} s"
                )

    def _open(self, *, create: bool) -> bool:
        try:
            self._fd = self._fs.open(self.path, create=False)
        except FileNotFoundError:
            self._forget()
            if not create:
                return False
            self._directories.make(self.path.parent)
            self._fd = self._fs.open(self.path, create=True)
            return True
        # An inode number may be reused; the header's uid may not.
        if self._fs.read(self._fd, 0, len(self._known.header)) != self._known.header:
            self._forget()
        return True

    # --- reading -----------------------------------------------------------------------------

    def _catch_up(self) -> None:
        if self._fd is None:
            return
        size, _ = self._fs.size_and_inode(self._fd)
        if size < self._known.end:
            logger.error(
                "journal shrank; reading it again",
                extra={"action": "journal_shrank", "path": str(self.path)},
            )
            self._forget()
        if size > self._known.end:
            data = self._fs.read(self._fd, self._known.end, size - self._known.end)
            for _ in self._known.take(scan(data, self._known.end), data):
                pass

    def read_entries(self) -> list[Entry]:
        """All stored records, from the disk; the fold is made anew on the way.

        Call under ``locked``. The first of two records with one call id wins.
        """
        self.flush()
        if self._fd is None:
            return []
        with self._translated("read"):
            size, _ = self._fs.size_and_inode(self._fd)
            data = self._fs.read(self._fd, 0, size)
        synced, directory_synced = self._synced, self._directory_synced
        self._forget()
        self._synced, self._directory_synced = synced, directory_synced
        found: dict[str, Entry] = {}
        for span in self._known.take(scan(data), data):
            if isinstance(span.record, Entry):
                found.setdefault(span.record.call, span.record)
        return list(found.values())

    # --- appending ---------------------------------------------------------------------------

    def apply(self, decision: Decision) -> None:
        """Append the decision's records (written with the batch), then raise its error.

        Call under ``locked(create=True)``.
        """
        if decision.records:
            lines = [encode(record) for record in decision.records]  # may refuse: before folding
            if not self._known.header and not self._pending:
                self._pending += self._new_header()
            for record, line in zip(decision.records, lines, strict=True):
                self._pending += line
                self.fold.apply(record)
        if decision.error is not None:
            raise decision.error

    def _new_header(self) -> bytes:
        return encode(
            Header(
                rollout_id=self.rollout_id,
                uid=secrets.token_hex(8),
                v=FORMAT_VERSION,
                at=self._clock(),
            )
        )

    def flush(self) -> None:
        """Hand the pending lines to the kernel: all of them, or none and an error.

        Raises:
            StoreUnavailableError: with the errno's text; the file is as before, or its torn
                tail is found by whoever comes next.
        """
        if not self._pending:
            return
        assert self._fd is not None, "appending needs locked(create=True)"
        with self._translated("write"):
            size, _ = self._fs.size_and_inode(self._fd)
            self._drop_tail(size)
            self._write(self._fd, bytes(self._pending))
        self._known.appended(bytes(self._pending))
        self._pending.clear()

    def _drop_tail(self, size: int) -> None:
        """Cut a torn tail off; where that fails, name it in a line of its own."""
        assert self._fd is not None
        if size <= self._known.end:
            return
        try:
            self._fs.truncate(self._fd, self._known.end)
        except OSError as exc:
            logger.warning(
                "cannot cut the torn tail of %s (%s); isolating it",
                self.path,
                exc,
                extra={"action": "journal_tail_isolated", "path": str(self.path)},
            )
            torn = Torn(offset=self._known.end, length=size - self._known.end, at=self._clock())
            self._write(self._fd, b"\n" + encode(torn))
            self._known.isolated(self._fs.size_and_inode(self._fd)[0])

    def _write(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[self._fs.write(fd, view) :]
        except OSError:
            # If this fails too, the rest is a torn tail like any other.
            with contextlib.suppress(OSError):
                self._fs.truncate(fd, self._known.end)
            raise
        self._statistics.writes += 1
        self._statistics.bytes_written += len(data)

    def sync(self) -> None:
        """Return when every folded line is on disk. Needs no lock: nothing is appended here.

        Raises:
            StoreUnavailableError: the kernel may have dropped the data; the file is not trusted
                from now on, whatever a later sync says.
        """
        if self._fd is None or self.is_synced:
            return
        end, started = self._known.end, time.perf_counter()
        try:
            with self._translated("sync"):
                self._fs.sync(self._fd)
                if not self._directory_synced:
                    self._sync_names()
        except StoreUnavailableError:
            self._trusted = False
            raise
        self._directory_synced = True
        self._synced = end
        self._statistics.synced(time.perf_counter() - started)

    def _forget_unwritten(self) -> None:
        if self._pending:
            self._forget()

    # --- replacing ---------------------------------------------------------------------------

    def retire(self, tombstone: Retired) -> None:
        """Put header + tombstone in the file's place, durably. Call under ``locked``."""
        self.flush()
        with self._translated("retire"):
            self._replace(self._new_header() + encode(tombstone))

    def remove(self) -> bool:
        """Unlink the file, durably; False if there was none. Call under ``locked``."""
        if self._fd is None:
            return False
        # Lines of this batch stay pending: where the unlink fails, they are not taken for written.
        with self._translated("remove"):
            self._fs.unlink(self.path)
            # After the unlink the lock guards a file that nobody can find any more.
            self.close()
            self._forget()
            self._trusted = True
            self._fs.sync_directory(self.path.parent)
        return True

    def _rebuild(self) -> None:
        """Move the whole lines to a new file that is synced from its first byte."""
        if self._fd is None:
            self._trusted = True
            return
        size, _ = self._fs.size_and_inode(self._fd)
        data = self._fs.read(self._fd, 0, size)
        lines = [self._new_header()]
        spans = list(scan(data))
        for span, follower in zip(spans, [*spans[1:], None], strict=True):
            if span.record is None:
                # Corruption stays, for every reader to see; a torn tail goes.
                keep = follower is not None and not isinstance(follower.record, Torn)
            else:
                keep = not isinstance(span.record, Header | Torn)
            if keep:
                lines.append(data[span.start : span.end])
        self._replace(b"".join(lines))
        self._trusted = True
        self._statistics.rebuilt_files += 1
        logger.warning(
            "rebuilt %s after a failed sync",
            self.path,
            extra={"action": "journal_rebuilt", "path": str(self.path)},
        )

    def _replace(self, data: bytes) -> None:
        """Temporary file, sync, rename, directory sync; then fold the new file."""
        # The lock of the old file is held, so nobody else writes this name.
        temporary = self.path.parent / f".{self.path.name}.tmp"
        fd = self._fs.open_temporary(temporary)
        try:
            # Locked before it gets its name: whoever finds it has to wait for us.
            self._fs.lock(fd, LOCK_TIMEOUT_S)
            self._known.end = 0
            self._write(fd, data)
            self._fs.sync(fd)
            self._fs.rename(temporary, self.path)
        except BaseException:
            self._forget()
            self._fs.close(fd)
            with contextlib.suppress(OSError):
                self._fs.unlink(temporary)
            raise
        self.close()
        self._forget()
        self._fd = fd
        for _ in self._known.take(scan(data), data):
            pass
        self._synced = self._known.end
        # Directory sync after the rename: without it a crash may bring the old file back.
        self._sync_names()
        self._directory_synced = True

    def _sync_names(self) -> None:
        """The file's own and those of the directories above it."""
        self._fs.sync_directory(self.path.parent)
        self._directories.sync_name(self.path.parent)

    @contextlib.contextmanager
    def _translated(self, action: str) -> Iterator[None]:
        """``OSError`` becomes ``StoreUnavailableError``, here and nowhere else."""
        try:
            yield
        except OSError as exc:
            self._statistics.write_failures += 1
            raise StoreUnavailableError(
                f"cannot {action} {self.path}: {exc.strerror or exc}"
            ) from exc
