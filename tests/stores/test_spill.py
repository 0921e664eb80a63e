"""The local spill: durable, bounded, found again after a crash; and the file store's use of it."""

from __future__ import annotations

import asyncio
import errno
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.registry import open_store
from capture_server.stores.spill import SpillLog, spill_directory
from middleware.errors import StoreError, StoreUnavailableError


def names(log: SpillLog, rollout: str | None = None) -> list[str]:
    return [item.call for item in log.pending(rollout)]


def test_items_come_back_in_order(tmp_path):
    """Of one rollout or all; their bodies are what was given, odd JSON included."""
    log = SpillLog(tmp_path / "spill")
    bodies = [{"n": 1}, {"n": 2**80}, {"text": "\ud800"}, ["x"]]
    for i, body in enumerate(bodies):
        log.add(f"r{i % 2}", "mark", f"c{i}", body)

    assert [log.load(item) for item in log.pending()] == bodies
    assert (names(log), names(log, "r1"), len(log)) == (["c0", "c1", "c2", "c3"], ["c1", "c3"], 4)
    assert log.holds("r1", "mark", "c3")
    assert not log.holds("r0", "mark", "c3")
    assert not log.holds("r1", "record", "c3")
    log.close()


def test_nothing_exists_before_and_after(tmp_path):
    """No directory before the first item, no file after the last is settled."""
    directory = tmp_path / "state" / "spill"
    log = SpillLog(directory)
    assert log.adopt() == 0
    assert not directory.exists()
    items = [log.add("r1", "mark", f"c{i}", {}) for i in range(3)]
    assert len(list(directory.iterdir())) == 1
    assert log.num_bytes == sum(path.stat().st_size for path in directory.iterdir())
    for item in items:
        log.settle(item)
        log.settle(item)  # again means nothing
    assert list(directory.iterdir()) == []
    assert log.num_bytes == 0
    log.add("r1", "mark", "later", {})
    assert names(log) == ["later"]
    log.close()


def test_what_a_process_left_is_taken_over_once(tmp_path):
    """Not while it lives; settled items of a file that has others come again."""
    first = SpillLog(tmp_path)
    done = first.add("r1", "mark", "c1", {"n": 1})
    first.add("r1", "mark", "c2", {"n": 2})
    first.settle(done)
    second, third = SpillLog(tmp_path), SpillLog(tmp_path)
    assert second.adopt() == 0
    first.close()

    assert (second.adopt(), third.adopt()) == (2, 0)
    assert [second.load(item) for item in second.pending()] == [{"n": 1}, {"n": 2}]
    for item in second.pending():
        second.settle(item)
    assert list(tmp_path.iterdir()) == []
    second.close()
    third.close()


def test_a_killed_process_loses_no_acknowledged_item(tmp_path):
    """After kill -9 all that ``add`` returned for is found, and the torn rest is no item."""
    script = (
        "import sys, pathlib\n"
        "from capture_server.stores.spill import SpillLog\n"
        "log = SpillLog(pathlib.Path(sys.argv[1]))\n"
        "for i in range(10**9):\n"
        "    log.add('r1', 'mark', f'c{i}', {'pad': 'x' * 500})\n"
        "    print(i, flush=True)\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    for _ in range(20):
        writer.stdout.readline()
    writer.kill()
    acknowledged = 20 + len(writer.communicate()[0].split("\n")) - 1
    log = SpillLog(tmp_path)
    log.adopt()
    found = names(log)
    log.close()

    assert found[:acknowledged] == [f"c{i}" for i in range(acknowledged)]
    assert len(found) <= acknowledged + 1


@pytest.mark.parametrize("cut", range(0, 90, 7))
def test_a_torn_tail_is_no_item(tmp_path, cut):
    """A file cut at any byte gives its whole lines."""
    log = SpillLog(tmp_path)
    log.add("r1", "mark", "c1", {})
    whole = log.num_bytes
    log.add("r1", "mark", "c2", {})
    log.close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[: whole + cut])
    again = SpillLog(tmp_path)
    again.adopt()

    assert names(again) == ["c1"] + ["c2"] * (whole + cut >= 2 * whole)
    again.close()


def test_a_damaged_line_is_reported_and_the_others_live(tmp_path, caplog):
    """The loss of one item is an error in the log, never a wrong item."""
    log = SpillLog(tmp_path)
    for i in range(3):
        log.add("r1", "mark", f"c{i}", {"body": i})
    log.close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes().replace(b'"body":1', b'"body":7'))
    again = SpillLog(tmp_path)
    again.adopt()
    assert names(again) == ["c0", "c2"]
    item = again.pending()[0]
    path.write_bytes(b"#" * path.stat().st_size)
    with pytest.raises(StoreError):
        again.load(item)
    again.close()

    assert "spill_damaged" in {getattr(record, "action", "") for record in caplog.records}


def test_the_spill_is_bounded_and_loud(tmp_path, caplog):
    """What does not fit is refused with the reason, and is no failure once there is room."""
    log = SpillLog(tmp_path, max_bytes=300)
    kept = log.add("r1", "mark", "c1", {"pad": "x" * 150})
    with pytest.raises(StoreUnavailableError, match="is full"):
        log.add("r1", "mark", "c2", {"pad": "x" * 150})
    assert "is full" in (log.failure or "")
    log.settle(kept)
    log.add("r1", "mark", "c3", {})

    assert (log.failure, names(log)) == (None, ["c3"])
    assert [r.action for r in caplog.records if r.levelno == logging.CRITICAL] == ["spill_failed"]
    log.close()


@pytest.mark.parametrize("call", ["write", "sync", "open", "sync_directory"])
def test_a_failing_disk_loses_only_what_was_refused(tmp_path, fs, call):
    """The item is refused; earlier and later ones are whole, and no descriptor leaks."""
    log = SpillLog(tmp_path / "spill", fs=fs)
    fs.fail(call, errno.ENOSPC)
    with pytest.raises(StoreUnavailableError, match="TOKEN_CAPTURE_SPILL_DIR"):
        log.add("r1", "mark", "c0", {})
    log.add("r1", "mark", "c1", {})
    if call in ("write", "sync"):
        fs.short_write = 5
        fs.fail(call, errno.EIO)
        with pytest.raises(StoreUnavailableError):
            log.add("r1", "mark", "c2", {})
    log.add("r1", "mark", "c3", {})
    assert names(log) == ["c1", "c3"]
    log.close()
    again = SpillLog(tmp_path / "spill")
    again.adopt()

    # A refused item whose sync failed may be there after all: whoever sends it tolerates that.
    assert {"c1", "c3"} <= set(names(again)) <= {"c1", "c2", "c3"}
    again.close()


def test_the_default_place_is_not_the_stores(tmp_path, monkeypatch):
    """TOKEN_CAPTURE_SPILL_DIR, else the XDG state directory; one directory per store."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    place = spill_directory("file:///a")
    assert place.parent == tmp_path / "state" / "token-capture" / "spill"
    assert place != spill_directory("file:///b")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert spill_directory("x").is_relative_to(tmp_path / ".local" / "state")
    monkeypatch.setenv("TOKEN_CAPTURE_SPILL_DIR", str(tmp_path / "mine"))
    assert spill_directory("x").parent == tmp_path / "mine"
    assert spill_directory("x", Path("/other")).parent == Path("/other")


# --- the file store's marks --------------------------------------------------------------------


async def test_a_mark_outlives_disk_and_process(tmp_path, fs, entry):
    """The store's disk is full, the mark is spilled, the process dies: the next one writes it."""
    root, spill = tmp_path / "store", tmp_path / "spill"
    store = TokenCaptureStore(root, fs=fs, spill=SpillLog(spill))
    await store.put(entry("c1"))
    fs.fail("write", errno.ENOSPC, times=-1)
    await store.mark_incomplete("r1", "c9", "lost", "why")
    with pytest.raises(StoreUnavailableError):
        await store.put(entry("c2"))
    assert (await store.status("r1")).incomplete
    assert await store.healthy() is not None
    store._committer.owed.close()  # as a kill would leave it: nothing is retried any more
    later = TokenCaptureStore(root, spill=SpillLog(spill))
    async with asyncio.timeout(20):
        while list(spill.iterdir()):
            await asyncio.sleep(0.02)
    frozen = await later.freeze("r1")
    await later.close()
    fs.heal()
    await store.close()

    reasons = {(r.code, r.model_call_id, r.detail) for r in frozen.incomplete_reasons}
    assert ("lost", "c9", "why") in reasons
    assert ("store_failure", "c2") in {(code, call) for code, call, _ in reasons}


async def test_a_healed_disk_takes_the_marks_and_the_spill_is_empty(tmp_path, fs, entry):
    """No restart is needed, and nothing is written twice."""
    store = TokenCaptureStore(tmp_path / "store", fs=fs, spill=SpillLog(tmp_path / "spill"))
    fs.fail("write", errno.EIO, times=-1)
    await store.mark_incomplete("r1", "c1", "lost")
    await store.mark_incomplete("r1", "c1", "lost")
    assert len(list((tmp_path / "spill").iterdir())) == 1
    fs.heal()
    assert await store.healthy() is None
    assert list((tmp_path / "spill").iterdir()) == []
    snapshot = await store.freeze("r1")
    await store.close()

    assert [(r.code, r.model_call_id) for r in snapshot.incomplete_reasons] == [("lost", "c1")]


async def test_a_deleted_rollouts_marks_are_forgotten(tmp_path, fs):
    """An id that is used again does not inherit them."""
    store = TokenCaptureStore(tmp_path / "store", fs=fs, spill=SpillLog(tmp_path / "spill"))
    fs.fail("write", errno.EIO, times=-1)
    await store.mark_incomplete("r1", "c1", "lost")
    await store.delete("r1")
    fs.heal()
    assert list((tmp_path / "spill").iterdir()) == []
    assert (await store.status("r1")).state == "unknown"
    await store.close()


async def test_both_disks_failing_is_told(tmp_path, fs, caplog):
    """The mark is in memory only: the caller hears of it, and the log is critical."""
    spill = SpillLog(tmp_path / "spill", fs=fs)
    store = TokenCaptureStore(tmp_path / "store", fs=fs, spill=spill)
    fs.fail("write", errno.EIO, times=-1)
    with pytest.raises(StoreUnavailableError):
        await store.mark_incomplete("r1", "c1", "lost")
    assert await store.healthy() is not None
    fs.heal()
    assert await store.healthy() is None
    assert (await store.status("r1")).incomplete
    await store.close()

    assert logging.CRITICAL in {record.levelno for record in caplog.records}


async def test_store_urls_give_a_spill(tmp_path, entry):
    """A file store by URL has one, and it stays empty in good times."""
    store = open_store(str(tmp_path / "store"), spill_dir=tmp_path / "spill")
    await store.put(entry("c1"))
    await store.mark_incomplete("r1", "c2")
    await store.close()

    assert not (tmp_path / "spill").exists()
