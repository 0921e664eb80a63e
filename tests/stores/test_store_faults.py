"""Faults between a decision and the disk: no mark, directory or spilled line is lost with them."""

from __future__ import annotations

import asyncio
import errno
import time

import pytest

from capture_server.stores.directories import Directories
from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.journal import seal
from capture_server.stores.lanes import Lanes
from capture_server.stores.operations import Operation
from capture_server.stores.spill import SpillLog
from middleware.errors import StoreError, StoreUnavailableError
from tests.stores.conftest import FaultyFileSystem
from tests.stores.remote_rig import remote, sidecar


class NotingFileSystem(FaultyFileSystem):
    """Remembers which directories were synced."""

    def __init__(self):
        super().__init__()
        self.synced = []

    def sync_directory(self, path):
        super().sync_directory(path)
        self.synced.append(path)

    def unlock(self, fd):
        self._called("unlock")
        super().unlock(fd)


async def paid(store):
    async with asyncio.timeout(20):
        while len(store._committer.owed):
            await asyncio.sleep(0.02)


def reasons_of(snapshot):
    return sorted((r.code, r.model_call_id) for r in snapshot.incomplete_reasons)


async def test_a_conflict_whose_mark_is_not_written_is_owed(faulty_store, fs, entry):
    """The first record stays; that there were two is known as soon as the disk works again."""
    await faulty_store.put(entry("c1", 0))
    fs.fail("write", errno.ENOSPC, times=-1)
    with pytest.raises(StoreUnavailableError):
        await faulty_store.put(entry("c1", 1))
    assert (await faulty_store.status("r1")).incomplete
    fs.heal()
    await paid(faulty_store)
    assert reasons_of(await faulty_store.freeze("r1")) == [("call_id_conflict", "c1")]


async def test_a_failed_delete_still_owes_the_marks(faulty_store, fs, entry):
    """What was not deleted is as incomplete as before."""
    await faulty_store.put(entry("c1"))
    fs.fail("write", errno.EIO, times=-1)
    fs.fail("unlink", errno.EIO, times=-1)
    with pytest.raises(StoreUnavailableError):
        await faulty_store.mark_incomplete("r1", "c1", "missing_token_ids")
    with pytest.raises(StoreUnavailableError):
        await faulty_store.delete("r1")
    fs.heal()
    await paid(faulty_store)
    assert reasons_of(await faulty_store.freeze("r1")) == [("missing_token_ids", "c1")]


# --- directories -------------------------------------------------------------------------------


async def test_every_new_directory_is_synced_in_its_parent(tmp_path, entry):
    """Root, its parents and the shard: a power failure takes none of them away."""
    fs = NotingFileSystem()
    store = TokenCaptureStore(tmp_path / "new" / "root", fs=fs)
    await store.put(entry())
    shard = store.path_for("r1").parent
    assert set(fs.synced) == {shard, tmp_path / "new" / "root", tmp_path / "new", tmp_path}
    await store.close()


async def test_a_directory_made_by_another_process_is_synced_once(tmp_path, entry):
    """It may have died between making the shard and syncing it."""
    first = TokenCaptureStore(tmp_path / "root")
    shard = first.path_for("r1").parent
    shard.mkdir(parents=True)
    fs = NotingFileSystem()
    store = TokenCaptureStore(tmp_path / "root", fs=fs)
    await store.put(entry())
    await store.put(entry("c2"))
    assert fs.synced == [shard, shard.parent]
    await first.close()
    await store.close()


def test_a_directory_whose_sync_failed_is_synced_next_time(tmp_path):
    """That it exists by then proves nothing."""
    fs = NotingFileSystem()
    directories = Directories(fs)
    directory = tmp_path / "a" / "b"
    directories.make(directory)
    fs.fail("sync_directory", errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        directories.sync_name(directory)
    directories.make(directory)
    directories.sync_name(directory)
    assert fs.synced == [tmp_path / "a", tmp_path]
    directories.sync_name(directory)
    assert len(fs.synced) == 2


def test_the_spills_directories_are_synced(tmp_path):
    """A spilled item's directory is as durable as the item, whoever made it."""
    fs = NotingFileSystem()
    log = SpillLog(tmp_path / "x" / "spill", fs=fs)
    log.add("r1", "mark", "c1", {})
    assert set(fs.synced) == {tmp_path / "x" / "spill", tmp_path / "x", tmp_path}
    log.close()


# --- threads and locks -------------------------------------------------------------------------


async def test_a_lock_that_cannot_be_given_back_is_a_typed_error(tmp_path, entry):
    """The descriptor is closed, and with it the lock goes; the record's fate is told."""
    fs = NotingFileSystem()
    store = TokenCaptureStore(tmp_path / "root", fs=fs)
    fs.fail("unlock", errno.EIO)
    with pytest.raises(StoreUnavailableError, match="cannot unlock"):
        await store.put(entry())
    await store.put(entry())
    await paid(store)
    assert [e.model_call_id for e in (await store.freeze("r1")).entries] == ["c1"]
    await store.close()


async def test_an_exit_in_a_step_ends_the_operation_only(file_store, entry):
    """The lane's thread goes on, and the caller gets an error that it can catch."""

    def leave(journal):
        raise SystemExit(3)

    with pytest.raises(StoreError, match="SystemExit"):
        await file_store._done("r1", Operation(step=leave, creates=True))
    with pytest.raises(StoreError, match="SystemExit"):
        await file_store._done(
            "r1", Operation(step=lambda j: None, prepare=lambda: leave(None), creates=True)
        )
    await file_store.put(entry())


def test_a_lanes_thread_survives_its_work():
    """Whatever a job raises, the lane's only thread serves the next one."""
    done = []

    def work(key, jobs):
        done.extend(jobs)
        if "bad" in jobs:
            raise SystemExit(3)

    lanes = Lanes(work, max_threads=1)
    lanes.submit("k", "bad")
    deadline = time.monotonic() + 10
    while done != ["bad"] and time.monotonic() < deadline:
        time.sleep(0.001)
    lanes.submit("k", "good")
    assert lanes.close(10.0) == 0
    assert done == ["bad", "good"]


# --- the spill ---------------------------------------------------------------------------------


def test_a_spilled_line_without_its_keys_is_set_aside(tmp_path, caplog):
    """It does not stop the others, and outlives the file that held it."""
    log = SpillLog(tmp_path / "spill")
    log.add("r1", "mark", "c1", {"a": 1})
    (path,) = (tmp_path / "spill").iterdir()
    log.close()
    odd = seal({"t": "spilled", "rollout_id": "r9"})
    path.write_bytes(odd + path.read_bytes())
    log = SpillLog(tmp_path / "spill")
    assert log.adopt() == 1
    for item in log.pending():
        log.settle(item)
    (aside,) = (tmp_path / "spill").iterdir()
    assert aside.read_bytes() == odd
    assert "not understood" in caplog.text
    log.close()


def test_a_spill_that_cannot_be_read_stays(tmp_path, fs):
    """An unreadable file is left for later."""
    log = SpillLog(tmp_path / "spill")
    log.add("r1", "mark", "c1", {"a": 1})
    log.close()
    log = SpillLog(tmp_path / "spill", fs=fs)
    fs.fail("read", errno.EIO)
    assert log.adopt() == 0
    assert log.adopt() == 1
    log.close()


@pytest.fixture
async def central(tmp_path):
    """A sidecar over a file store."""
    store = TokenCaptureStore(tmp_path / "store")
    async with sidecar(store) as made:
        yield made
    await store.close()


async def test_a_spilled_record_that_conflicts_masks(central, tmp_path, entry, monkeypatch):
    """Another payload came first: the replay is compared with it, not dropped."""
    client = remote(central, tmp_path / "spill")
    await client.begin_call("r1", "c1")
    await central.store.put(entry("c1", 0))
    await central.stop()
    monkeypatch.setattr("capture_server.stores.remote.AFTER_DISPATCH_S", 0.3)
    with pytest.raises(StoreUnavailableError, match="is sent again"):
        await client.put(entry("c1", 1))
    monkeypatch.undo()
    await central.start()
    assert reasons_of(await client.freeze("r1")) == [("call_id_conflict", "c1")]
    await client.close()


async def test_a_mark_with_a_lone_surrogate_is_taken(central, tmp_path):
    """What a model wrote may stand in a detail; neither a body nor a URL can hold it as it is."""
    client = remote(central, tmp_path / "spill")
    await client.begin_call("r1", "c1")
    await client.mark_incomplete("r1", "c1", "bad\ud800", "at \ud800")
    await client.begin_call("r1", "c2")
    await client.cancel_call("r1", "c2", "\udfff")
    (reason,) = (await client.freeze("r1")).incomplete_reasons
    assert (reason.code, reason.detail) == ("bad\\ud800", "at \\ud800")
    await client.close()


async def test_nobody_goes_on_before_the_spill_is_adopted(central, tmp_path, entry, monkeypatch):
    """Of two freezes at once both wait: the second one's rollout has a mark in the spill."""
    dead = remote(central, tmp_path / "spill")
    await dead.put(entry())
    dead._spill.add("r1", "mark", "c1", {"reason": "missing_token_ids", "detail": ""})
    await dead.close()
    client = remote(central, tmp_path / "spill")
    real = client._spill.adopt

    def slow():
        time.sleep(0.2)
        return real()

    monkeypatch.setattr(client._spill, "adopt", slow)
    _, snapshot = await asyncio.gather(client.freeze("r0"), client.freeze("r1"))
    assert reasons_of(snapshot) == [("missing_token_ids", "c1")]
    await client.close()
