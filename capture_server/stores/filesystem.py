"""Every system call of the file store, in one small class that tests replace to inject faults.

Invariant: no policy here; an ``OSError`` is passed on as it is.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final

_FIRST_WAIT_S: Final = 0.0002
_LONGEST_WAIT_S: Final = 0.01


class FileSystem:
    """The real one. Descriptors are plain ints; all paths are absolute."""

    def open(self, path: Path, *, create: bool) -> int:
        """Open for reading and appending.

        Raises:
            FileNotFoundError: it is not there and ``create`` is False.
        """
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return os.open(path, flags, 0o600)

    def open_read_only(self, path: Path) -> int:
        """Open for reading only: what a resolver and a listing need."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def open_temporary(self, path: Path) -> int:
        """Open an empty file for appending; a left-over of a crash is emptied."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_CREAT | os.O_TRUNC
        return os.open(path, flags, 0o600)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def write(self, fd: int, data: memoryview) -> int:
        """Append some of the bytes; return how many."""
        return os.write(fd, data)

    def read(self, fd: int, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes from ``offset``; fewer only at the end of the file."""
        parts = []
        while length > 0 and (part := os.pread(fd, length, offset)):
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def truncate(self, fd: int, length: int) -> None:
        """Cut the file to ``length`` bytes."""
        os.ftruncate(fd, length)

    def sync(self, fd: int) -> None:
        """Return when the file is on disk."""
        os.fsync(fd)

    def sync_directory(self, path: Path) -> None:
        """Return when the directory's names are on disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Atomically put one file in another's place."""
        os.replace(source, target)  # noqa: PTH105 - the one system call

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        os.unlink(path)  # noqa: PTH108 - the one system call

    def make_directory(self, path: Path) -> None:
        """Create it in its parent.

        Raises:
            FileExistsError: it is there already.
            FileNotFoundError: its parent is not.
        """
        path.mkdir(mode=0o700)

    def size_and_inode(self, fd: int) -> tuple[int, int]:
        """Of the open file."""
        stat = os.fstat(fd)
        return stat.st_size, stat.st_ino

    def inode_at(self, path: Path) -> int | None:
        """The inode that the path names now; None if there is none."""
        try:
            return os.stat(path).st_ino  # noqa: PTH116 - the one system call
        except FileNotFoundError:
            return None

    def try_lock(self, fd: int) -> bool:
        """Take the kernel's lock of the open file; False if another one holds it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def lock(self, fd: int, timeout_s: float) -> bool:
        """``try_lock`` until it succeeds or the time is over."""
        # Polled, not a blocking flock: a stopped process that holds the lock must not take
        # this thread with it. Holders keep it for one write, so the first waits are short.
        deadline = time.monotonic() + timeout_s
        wait = _FIRST_WAIT_S
        while not self.try_lock(fd):
            if time.monotonic() >= deadline:
                return False
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT_S)
        return True

    def unlock(self, fd: int) -> None:
        """Give the lock back."""
        fcntl.flock(fd, fcntl.LOCK_UN)
