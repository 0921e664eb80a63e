"""What concerns a whole root, not one rollout: listing, sweeping, probing the disk.

Invariant: nothing here writes to a journal; rollouts are changed through their own lanes only.
It runs in two threads of its own, so that a long listing delays no call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

from capture_server.stores.filesystem import FileSystem
from capture_server.stores.journal import (
    SUFFIX,
    Header,
    Incomplete,
    Record,
    is_hashed_name,
    scan,
)
from middleware.errors import StoreClosedError, StoreError, UnsupportedSchemaError
from middleware.protocols import IncompleteReason, RolloutStatus

logger = logging.getLogger(__name__)
T = TypeVar("T")

UNREADABLE_JOURNAL: Final = "unreadable_journal"

_HEADER_PROBE: Final = 1024  # bytes; a header line is shorter
_TOMBSTONE_BYTES: Final = 2048  # bytes; header + retired line are shorter
_CHUNK: Final = 64  # rollouts asked at once


class Housekeeper:
    """Work on a store's directories, off the event loop."""

    def __init__(self, root: Path, fs: FileSystem) -> None:
        self._root = root
        self._fs = fs
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="token-capture-housekeeping")

    def rollout_ids(self, prefix: str, *, after: str) -> Future[list[str]]:
        """Sorted ids behind ``after`` that start with ``prefix``."""
        return self._submit(self._rollout_ids, prefix, after)

    def _rollout_ids(self, prefix: str, after: str) -> list[str]:
        ids = (self._id_of(path) for path in self._journals())
        return sorted(r for r in ids if r is not None and r > after and r.startswith(prefix))

    def sweep(self, sweep_one: Callable[[str], Future[Any]]) -> Future[int]:
        """Call ``sweep_one`` for what may be a tombstone; count the True answers."""
        return self._submit(self._sweep, sweep_one)

    def _sweep(self, sweep_one: Callable[[str], Future[Any]]) -> int:
        candidates = (self._id_of(path) for path in self._journals() if _is_small(path))
        ids = iter([r for r in candidates if r is not None])
        swept = 0
        while chunk := list(islice(ids, _CHUNK)):
            for future in [sweep_one(rollout_id) for rollout_id in chunk]:
                try:
                    swept += bool(future.result())
                except StoreError as exc:  # one unreadable journal must not stop the others
                    logger.warning("not swept: %s", exc, extra={"action": "sweep_failed"})
        return swept

    def run(self, work: Callable[[], None]) -> Future[None]:
        """Do something that waits for lanes."""
        return self._submit(work)

    def probe(self) -> Future[str | None]:
        """Write and sync a small file; None if that works, else why not."""
        return self._submit(self._probe)

    def _probe(self) -> str | None:
        path = self._root / f".probe-{os.getpid()}"
        try:
            with contextlib.suppress(FileExistsError):
                self._fs.make_directory(self._root)
            fd = self._fs.open_temporary(path)
            try:
                self._fs.write(fd, memoryview(b"probe\n"))
                self._fs.sync(fd)
            finally:
                self._fs.close(fd)
            self._fs.unlink(path)
        except OSError as exc:
            return f"cannot write to {self._root}: {exc.strerror or exc}"
        return None

    def _journals(self) -> Iterator[Path]:
        try:
            directories = list(os.scandir(self._root))
        except FileNotFoundError:
            return
        for directory in directories:
            if directory.is_dir():
                with contextlib.suppress(FileNotFoundError), os.scandir(directory) as names:
                    for name in names:
                        if name.name.endswith(SUFFIX):
                            yield Path(name.path)

    def _id_of(self, path: Path) -> str | None:
        """From the name, or for hashed names from the header; None if that is damaged or gone."""
        if not is_hashed_name(path.name):
            return path.name.removesuffix(SUFFIX)
        try:
            fd = self._fs.open_read_only(path)
        except FileNotFoundError:
            return None
        try:
            head = self._fs.read(fd, 0, _HEADER_PROBE)
        finally:
            self._fs.close(fd)
        with contextlib.suppress(UnsupportedSchemaError):
            for span in scan(head[: head.find(b"\n") + 1]):
                if isinstance(span.record, Header):
                    return span.record.rollout_id
        return None

    def _submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        try:
            return self._executor.submit(work, *arguments)
        except RuntimeError as exc:
            raise StoreClosedError("the store is closed: this process is shutting down") from exc

    def close(self) -> None:
        """Wait for running work. Idempotent."""
        self._executor.shutdown()


def _is_small(path: Path) -> bool:
    try:
        return path.stat().st_size <= _TOMBSTONE_BYTES
    except FileNotFoundError:
        return False


async def page(
    ids: Sequence[str],
    status: Callable[[str], Awaitable[RolloutStatus]],
    *,
    state: str | None,
    limit: int,
) -> tuple[list[RolloutStatus], str | None]:
    """The first ``limit`` rollouts that are in ``state``, and a cursor if ids are left."""
    found: list[RolloutStatus] = []
    for start in range(0, len(ids), _CHUNK):
        chunk = ids[start : start + _CHUNK]
        rows = await asyncio.gather(*(_status_or_why_not(r, status) for r in chunk))
        for row in rows:
            if len(found) == limit:
                return found, found[-1].rollout_id
            if row.state != "unknown" and state in (None, row.state):
                found.append(row)
    return found, None


async def _status_or_why_not(
    rollout_id: str, status: Callable[[str], Awaitable[RolloutStatus]]
) -> RolloutStatus:
    """One journal that cannot be read is a masked row, not the end of the listing."""
    try:
        return await status(rollout_id)
    except StoreClosedError:
        raise
    except StoreError as exc:
        reason = IncompleteReason(code=UNREADABLE_JOURNAL, detail=str(exc))
        return RolloutStatus(
            rollout_id=rollout_id, state="open", incomplete=True, incomplete_reasons=[reason]
        )


def with_owed(status: RolloutStatus, owed: Sequence[Record]) -> RolloutStatus:
    """Add what this process knows but could not write yet."""
    reasons = [
        IncompleteReason(code=r.code, model_call_id=r.call, detail=r.detail, at=r.at)
        for r in owed
        if isinstance(r, Incomplete)
    ]
    if not reasons:
        return status
    return replace(
        status, incomplete=True, incomplete_reasons=[*status.incomplete_reasons, *reasons]
    )
