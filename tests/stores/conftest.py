"""Builders shared by the store tests, and a file layer that fails on demand."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.filesystem import FileSystem
from capture_server.stores.memory import MemoryCaptureStore
from capture_server.stores.postgres import PostgresCaptureStore
from middleware.protocols import CallIntent
from middleware.records import TokenEntry
from tests.stores.postgres_server import (
    database,
    killable,
    migrated,
    own_server,
    server_url,
)

__all__ = ["database", "killable", "migrated", "own_server", "server_url"]  # fixtures


class FaultyFileSystem(FileSystem):
    """Counts calls; ``fail(name, ...)`` makes the next calls of that name raise."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.short_write: int | None = None  # bytes that a failing write still takes
        self._faults: dict[str, list[int]] = {}

    def fail(self, name: str, code: int = errno.EIO, times: int = 1) -> None:
        """Make the next ``times`` calls raise (-1: until ``heal``)."""
        self._faults[name] = [code, times]

    def heal(self) -> None:
        """No more faults."""
        self._faults.clear()
        self.short_write = None

    def _called(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
        fault = self._faults.get(name)
        if fault is not None and fault[1] != 0:
            fault[1] -= 1
            raise OSError(fault[0], os.strerror(fault[0]))

    def write(self, fd: int, data: memoryview) -> int:
        try:
            self._called("write")
        except OSError:
            if self.short_write:
                taken = super().write(fd, data[: self.short_write])
                self.short_write = None
                self._faults["write"][1] += 1  # the rest of this write fails
                return taken
            raise
        return super().write(fd, data)

    def truncate(self, fd: int, length: int) -> None:
        self._called("truncate")
        super().truncate(fd, length)

    def sync(self, fd: int) -> None:
        self._called("sync")
        super().sync(fd)

    def sync_directory(self, path: Path) -> None:
        self._called("sync_directory")
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._called("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._called("unlink")
        super().unlink(path)

    def open(self, path: Path, *, create: bool) -> int:
        self._called("open")
        return super().open(path, create=create)

    def open_temporary(self, path: Path) -> int:
        self._called("open_temporary")
        return super().open_temporary(path)

    def read(self, fd: int, offset: int, length: int) -> bytes:
        self._called("read")
        return super().read(fd, offset, length)


class UnsyncedFileSystem(FileSystem):
    """For tests that open hundreds of stores: nothing survives a power failure."""

    def sync(self, fd: int) -> None: ...

    def sync_directory(self, path: Path) -> None: ...


@pytest.fixture
def unsynced() -> FileSystem:
    """A file layer that is fast and forgets."""
    return UnsyncedFileSystem()


@pytest.fixture
def entry() -> Callable[..., TokenEntry]:
    """Build a small record: ``entry("c1", seed, rollout_id=...)``."""

    def build(call: str = "c1", seed: int = 0, **fields: Any) -> TokenEntry:
        values: dict[str, Any] = {
            "rollout_id": "r1",
            "model_call_id": call,
            "prompt_token_ids": [seed, 1, 2],
            "generation_token_ids": [7, seed],
            "generation_log_probs": [-0.5, -0.25],
        }
        return TokenEntry.model_validate(values | fields)

    return build


@pytest.fixture
def intent() -> Callable[..., CallIntent]:
    """Build an intent: ``intent("c1", "digest", rollout_id=...)``."""

    def build(call: str = "c1", digest: str = "", **fields: Any) -> CallIntent:
        values: dict[str, Any] = {
            "rollout_id": "r1", "model_call_id": call, "request_digest": digest, "created_at": 5.0,
        }  # fmt: skip
        return CallIntent(**(values | fields))

    return build


@pytest.fixture
def fs() -> FaultyFileSystem:
    """The file layer of ``faulty_store``."""
    return FaultyFileSystem()


@pytest.fixture
async def faulty_store(tmp_path: Path, fs: FaultyFileSystem):
    """A file store over ``fs``."""
    store = TokenCaptureStore(tmp_path / "store", fs=fs)
    yield store
    fs.heal()
    await store.close()


@pytest.fixture
async def file_store(tmp_path: Path):
    """A file store over the real file layer."""
    store = TokenCaptureStore(tmp_path / "store")
    yield store
    await store.close()


@pytest.fixture(params=["memory", "file", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path):
    """Every store of this package: one contract suite runs over them all."""
    made: Any
    if request.param == "memory":
        made = MemoryCaptureStore()
    elif request.param == "file":
        made = TokenCaptureStore(tmp_path / "store")
    else:
        made = PostgresCaptureStore(request.getfixturevalue("database"))
    yield made
    await made.close()
