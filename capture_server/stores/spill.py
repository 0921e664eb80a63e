r"""What could not be brought to its store, kept on a local disk until it can.

::

    <directory>/<random>.spill.jsonl        one file per process and store, locked while it is used

    {"t":"spilled","rollout_id":"r1","kind":"mark","call":"c1","body":{...},"crc":"..."}\n

Framing and checksums are the journal's (``journal.seal``). Invariant: an item is on disk when
``add`` returns, and stays there until ``settle``; items of a process that died are found by the
next one that opens the directory. Whoever settles must tolerate an item that comes twice: a
crash between sending and settling repeats it.

It knows nothing of stores and networks: what an item means is its owner's business
(``stores.remote``, ``stores.owed``).
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from capture_server.stores.directories import Directories
from capture_server.stores.filesystem import FileSystem
from capture_server.stores.journal import seal, unseal
from middleware.errors import ConfigurationError, StoreError, StoreUnavailableError

logger = logging.getLogger(__name__)

ENV_DIRECTORY: Final = "TOKEN_CAPTURE_SPILL_DIR"
DEFAULT_MAX_BYTES: Final = 1 << 30

_SUFFIX: Final = ".spill.jsonl"
_ASIDE_SUFFIX: Final = ".spill-aside"
_TYPE: Final = "spilled"
_CHUNK: Final = 1 << 20
_REMEDY: Final = f"free some space or set {ENV_DIRECTORY} to a directory on another disk"


@dataclass(frozen=True, slots=True, eq=False)
class SpilledItem:
    """One item; ``kind`` is its owner's word, its body is read back with ``SpillLog.load``."""

    rollout_id: str
    kind: str
    call: str
    file: _SpillFile = field(repr=False)
    start: int = field(repr=False)  # offset of its line
    length: int = field(repr=False)  # bytes, newline included


@dataclass(slots=True, eq=False)
class _SpillFile:
    path: Path
    fd: int
    size: int = 0
    items: dict[int, SpilledItem] = field(default_factory=dict)  # by offset, oldest first


class SpillLog:
    """The items that one store in one process could not deliver. Thread-safe.

    Nothing is written, and no directory made, before the first ``add``.
    """

    def __init__(
        self, directory: Path, *, max_bytes: int = DEFAULT_MAX_BYTES, fs: FileSystem | None = None
    ) -> None:
        self.directory = directory
        self.failure: str | None = None  # why the last ``add`` failed; None: it did not
        self._max_bytes = max_bytes
        self._fs = fs or FileSystem()
        self._directories = Directories(self._fs)
        self._io = threading.Lock()  # one write, removal or adoption at a time; held for the disk
        self._lock = threading.Lock()  # guards the list and its items; held for moments
        self._files: list[_SpillFile] = []
        self._own: _SpillFile | None = None  # guarded by ``_io``

    # --- writing -----------------------------------------------------------------------------

    def add(self, rollout_id: str, kind: str, call: str, body: Any) -> SpilledItem:
        """Keep an item; on disk on return. Blocks.

        Raises:
            StoreUnavailableError: it could not be kept, and is lost for this log.
        """
        form = {"t": _TYPE, "rollout_id": rollout_id, "kind": kind, "call": call, "body": body}
        line = seal(form)
        try:
            with self._io:
                item = self._append(line, rollout_id, kind, call)
        except OSError as exc:
            self.failure = f"cannot spill to {self.directory}: {exc.strerror or exc}; {_REMEDY}"
        except StoreUnavailableError as exc:
            self.failure = str(exc)
        else:
            self.failure = None
            return item
        logger.critical(
            "a %s of rollout %s could not be spilled: %s",
            kind,
            rollout_id,
            self.failure,
            extra={"action": "spill_failed", "rollout_id": rollout_id},
        )
        raise StoreUnavailableError(self.failure)

    def _append(self, line: bytes, rollout_id: str, kind: str, call: str) -> SpilledItem:
        held = self.num_bytes
        if held + len(line) > self._max_bytes:
            raise StoreUnavailableError(
                f"the spill in {self.directory} is full ({held} of {self._max_bytes} bytes): its "
                "store has been away for too long"
            )
        file = self._own or self._new_file()
        start = file.size
        try:
            view = memoryview(line)
            while view:
                view = view[self._fs.write(file.fd, view) :]
            self._fs.sync(file.fd)
        except OSError:
            # A file whose write or sync failed keeps what it has; the next item gets a new one.
            self._own = None
            if not file.items:
                self._remove(file)
            raise
        file.size += len(line)
        item = SpilledItem(rollout_id, kind, call, file, start, len(line))
        with self._lock:
            file.items[start] = item
        return item

    def _new_file(self) -> _SpillFile:
        self._directories.make(self.directory)
        path = self.directory / f"{secrets.token_hex(8)}{_SUFFIX}"
        file = _SpillFile(path, self._fs.open(path, create=True))
        with self._lock:
            self._files.append(file)
        try:
            self._fs.try_lock(file.fd)  # a name that nobody else knows: never refused
            self._fs.sync_directory(self.directory)
            self._directories.sync_name(self.directory)
        except OSError:
            self._remove(file)
            raise
        self._own = file
        return file

    # --- reading -----------------------------------------------------------------------------

    def pending(self, rollout_id: str | None = None) -> Sequence[SpilledItem]:
        """What is not settled, oldest first per process; of one rollout, or all."""
        if not self._files:  # the usual case, without the lock
            return ()
        with self._lock:
            return [
                item
                for file in self._files
                for item in file.items.values()
                if rollout_id in (None, item.rollout_id)
            ]

    def holds(self, rollout_id: str, kind: str, call: str) -> bool:
        """Whether such an item waits."""
        return any((item.kind, item.call) == (kind, call) for item in self.pending(rollout_id))

    def __len__(self) -> int:
        return len(self.pending())

    @property
    def num_bytes(self) -> int:
        """What the files hold, settled items of unfinished files included."""
        with self._lock:
            return sum(file.size for file in self._files)

    def load(self, item: SpilledItem) -> Any:
        """The body of a pending item. Blocks.

        Raises:
            StoreUnavailableError: the disk does not give it back now.
            StoreError: it was damaged, and is lost.
        """
        try:
            line = self._fs.read(item.file.fd, item.start, item.length)
        except OSError as exc:
            raise StoreUnavailableError(f"cannot read {item.file.path}: {exc}") from exc
        form = unseal(line[:-1])
        if form is None:
            raise StoreError(f"an item in {item.file.path} was damaged")
        return form["body"]

    # --- letting go --------------------------------------------------------------------------

    def settle(self, item: SpilledItem) -> None:
        """The item has reached its store (or means nothing any more). Blocks."""
        file = item.file
        with self._io:
            with self._lock:
                file.items.pop(item.start, None)
                is_done = not file.items and file in self._files
            if is_done:
                self._remove(file)

    def _remove(self, file: _SpillFile) -> None:
        with self._lock:
            self._files.remove(file)
        if self._own is file:
            self._own = None
        try:
            # Unlinked before the lock goes: nobody may adopt what is settled.
            self._fs.unlink(file.path)
            self._fs.sync_directory(self.directory)
        except OSError as exc:
            logger.warning("cannot remove %s: %s; it will be sent again", file.path, exc)
        self._fs.close(file.fd)

    def adopt(self) -> int:
        """Take over what processes that ended left here; return how many items. Blocks."""
        try:
            names = sorted(os.listdir(self.directory))  # noqa: PTH208 - names are enough
        except FileNotFoundError:
            return 0
        except OSError as exc:
            logger.error("cannot look into the spill %s: %s", self.directory, exc)  # noqa: TRY400
            return 0
        with self._io:
            own = {file.path.name for file in self._files}
            found = [n for n in names if n.endswith(_SUFFIX) and n not in own]
            return sum(self._adopt_file(self.directory / name) for name in found)

    def _adopt_file(self, path: Path) -> int:
        try:
            fd = self._fs.open(path, create=False)
        except OSError as exc:
            logger.warning("cannot adopt %s: %s", path, exc)
            return 0
        try:
            file = self._read_file(path, fd)
        except OSError as exc:
            logger.error("cannot adopt %s: %s", path, exc)  # noqa: TRY400
            file = None
        if file is None:
            self._fs.close(fd)
            return 0
        with self._lock:
            self._files.append(file)
        if not file.items:
            self._remove(file)
            return 0
        logger.warning(
            "%d spilled items of an earlier process are taken over",
            len(file.items),
            extra={"action": "spill_adopted", "path": str(path)},
        )
        return len(file.items)

    def _read_file(self, path: Path, fd: int) -> _SpillFile | None:
        if not self._fs.try_lock(fd) or self._fs.inode_at(path) != self._fs.size_and_inode(fd)[1]:
            return None  # its process lives, or another one was faster
        file = _SpillFile(path, fd, size=self._fs.size_and_inode(fd)[0])
        odd = []
        for start, line in self._lines(fd, file.size):
            form = unseal(line.rstrip(b"\n"))
            if form is None or form.get("t") != _TYPE:
                _report_damage(path, start, line)
                continue
            item = _item(form, file, start, len(line))
            if item is None:
                odd.append(line)
            else:
                file.items[start] = item
        if odd:
            self._set_aside(path, odd)
        return file

    def _set_aside(self, path: Path, lines: Sequence[bytes]) -> None:
        """Whole lines that are no item (of another version?) outlive the file that held them."""
        aside = path.with_name(path.name.removesuffix(_SUFFIX) + _ASIDE_SUFFIX)
        fd = self._fs.open_temporary(aside)
        try:
            view = memoryview(b"".join(lines))
            while view:
                view = view[self._fs.write(fd, view) :]
            self._fs.sync(fd)
            self._fs.sync_directory(self.directory)
        finally:
            self._fs.close(fd)
        logger.warning(
            "%d lines of %s are not understood; they are kept in %s",
            len(lines),
            path,
            aside,
            extra={"action": "spill_set_aside", "path": str(aside)},
        )

    def _lines(self, fd: int, size: int) -> Iterator[tuple[int, bytes]]:
        """Offset and bytes of each line; the last may lack its newline."""
        rest, start = b"", 0
        for offset in range(0, size, _CHUNK):
            *whole, rest = (rest + self._fs.read(fd, offset, min(_CHUNK, size - offset))).split(
                b"\n"
            )
            for line in whole:
                yield start, line + b"\n"
                start += len(line) + 1
        if rest:
            yield start, rest

    def close(self) -> None:
        """Give the files back; what is pending stays on disk for the next process. Idempotent."""
        with self._io, self._lock:
            for file in self._files:
                self._fs.close(file.fd)
            self._files.clear()
            self._own = None


def _item(form: dict[str, Any], file: _SpillFile, start: int, length: int) -> SpilledItem | None:
    rollout_id, kind, call = (form.get(key) for key in ("rollout_id", "kind", "call"))
    if not (isinstance(rollout_id, str) and isinstance(kind, str) and isinstance(call, str)):
        return None
    return SpilledItem(rollout_id, kind, call, file, start, length) if "body" in form else None


def _report_damage(path: Path, start: int, line: bytes) -> None:
    if not line.endswith(b"\n"):
        logger.warning("torn tail in %s: %d bytes that were never acknowledged", path, len(line))
        return
    logger.error(
        "a damaged line in %s at byte %d: one spilled item is lost",
        path,
        start,
        extra={"action": "spill_damaged", "path": str(path), "offset": start},
    )


def spill_directory(name: str, base: Path | None = None) -> Path:
    """Where the items of one store (its URL or root) wait.

    ``base``: None is TOKEN_CAPTURE_SPILL_DIR, else the state directory of the XDG specification:
    not below the store itself, whose disk may be what failed.

    Raises:
        ConfigurationError: this process has no home directory.
    """
    return (base or _default_base()) / hashlib.sha256(name.encode()).hexdigest()[:16]


def _default_base() -> Path:
    try:
        if configured := os.environ.get(ENV_DIRECTORY):
            return Path(configured).expanduser().absolute()
        state = Path(os.environ.get("XDG_STATE_HOME", ""))
        # The XDG specification ignores relative values.
        root = state if state.is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError as exc:
        raise ConfigurationError(
            f"this process has no home directory: set {ENV_DIRECTORY} to a local directory"
        ) from exc
    return root / "token-capture" / "spill"
