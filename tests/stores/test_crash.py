"""Named faults, injected below the store: what is acknowledged, masked, and found afterwards."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.journal import Closing, Header, Torn, encode, scan
from middleware.errors import (
    StoreError,
    StoreUnavailableError,
    TokenCaptureError,
    UnsupportedSchemaError,
)
from middleware.records import canonical_bytes


def reopened(store: TokenCaptureStore) -> TokenCaptureStore:
    """What another process would see."""
    return TokenCaptureStore(store.root)


async def frozen(store: TokenCaptureStore, rollout: str = "r1"):
    """Freeze as another process would; return call ids and reasons."""
    other = reopened(store)
    snapshot = await other.freeze(rollout)
    await other.close()
    return (
        sorted(e.model_call_id for e in snapshot.entries),
        [(r.code, r.model_call_id) for r in snapshot.incomplete_reasons],
    )


# --- torn tails and corruption ---------------------------------------------------------------


async def test_tail_torn_at_every_byte(tmp_path, entry, unsynced):
    """Cut anywhere in the last line: earlier records stay, the next append is whole."""
    store = TokenCaptureStore(tmp_path / "a")
    await store.put(entry("c1"))
    keep = store.path_for("r1").stat().st_size
    await store.put(entry("c2"))
    whole = store.path_for("r1").read_bytes()
    await store.close()
    for cut in range(keep, len(whole)):
        store = TokenCaptureStore(tmp_path / "b", fs=unsynced)
        store.path_for("r1").parent.mkdir(parents=True, exist_ok=True)
        store.path_for("r1").write_bytes(whole[:cut])
        store.append(entry("c3"))
        snapshot = store.freeze_now("r1")

        assert [e.model_call_id for e in snapshot.entries] == ["c1", "c3"], cut
        assert not snapshot.incomplete
        assert (cut > keep) == store.statistics().torn_tails
        assert all(s.record for s in scan(store.path_for("r1").read_bytes()))
        store.close_now()


async def test_file_torn_at_every_byte_of_its_first_write(tmp_path, entry, unsynced):
    """A rollout whose very first write tore is as good as new."""
    store = TokenCaptureStore(tmp_path / "a")
    await store.put(entry("c1"))
    whole = store.path_for("r1").read_bytes()
    await store.close()
    for cut in range(len(whole)):
        store = TokenCaptureStore(tmp_path / "b", fs=unsynced)
        store.path_for("r1").parent.mkdir(parents=True, exist_ok=True)
        store.path_for("r1").write_bytes(whole[:cut])
        assert (await store.status("r1")).state == "unknown"
        await store.put(entry("c2"))
        snapshot = await store.freeze("r1")
        assert (
            [e.model_call_id for e in snapshot.entries],
            snapshot.incomplete,
        ) == (["c2"], False)
        await store.close()


@pytest.mark.parametrize(
    "tail",
    [
        b'{"model_ca',
        b'{"t":"\xe5\xa5',
        b'{"x\n',
        b"\x00" * 4096,
        b"\n\n",
        b"rubbish\nmore rubbish\n",
        encode(Closing())[:-1],
    ],
    ids=["half", "half character", "half with newline", "NULs", "blank", "rubbish", "no newline"],
)
async def test_any_torn_tail_is_cut_and_reported(file_store, entry, caplog, tail):
    """It masks nothing, spoils no later record, and the operator hears of it."""
    await file_store.put(entry("c1"))
    with file_store.path_for("r1").open("ab") as journal:
        journal.write(tail)
    with caplog.at_level(logging.WARNING):
        await file_store.put(entry("c2"))

    assert [r.action for r in caplog.records] == ["journal_torn_tail"]
    assert file_store.statistics().torn_tails == 1
    assert await frozen(file_store) == (["c1", "c2"], [])


async def test_tail_that_cannot_be_cut_is_isolated(faulty_store, fs, entry):
    """Where truncating fails, a line says that the damage before it was a torn tail."""
    await faulty_store.put(entry("c1"))
    with faulty_store.path_for("r1").open("ab") as journal:
        journal.write(b'{"torn')
    fs.fail("truncate", times=-1)
    await faulty_store.put(entry("c2"))
    await faulty_store.put(entry("c3"))

    spans = list(scan(faulty_store.path_for("r1").read_bytes()))
    assert sum(isinstance(span.record, Torn) for span in spans) == 1
    assert await frozen(faulty_store) == (["c1", "c2", "c3"], [])


async def test_first_line_torn_and_isolated(faulty_store, fs, entry):
    """Even a torn header that cannot be cut costs nothing."""
    path = faulty_store.path_for("r1")
    path.parent.mkdir(parents=True)
    path.write_bytes(b'{"t":"jour')
    fs.fail("truncate", times=-1)
    await faulty_store.put(entry("c1"))
    await faulty_store.put(entry("c2"))

    assert await frozen(faulty_store) == (["c1", "c2"], [])


@pytest.mark.parametrize("line", range(4), ids=["header", "first", "second", "third"])
async def test_damage_in_the_middle_masks_this_rollout_only(file_store, entry, caplog, line):
    """It is reported with file and line; what stands behind it is read, others live on."""
    for call in ("c1", "c2", "c3", "c4"):
        await file_store.put(entry(call))
    await file_store.put(entry("c1", rollout_id="r2"))
    path = file_store.path_for("r1")
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line][:20] + b"#" + lines[line][21:]
    path.write_bytes(b"".join(lines))
    other = reopened(file_store)
    snapshot = await other.freeze("r1")
    (reason,) = snapshot.incomplete_reasons

    survivors = [f"c{i}" for i in range(1, 5) if i != line]
    assert survivors == sorted(e.model_call_id for e in snapshot.entries)
    assert reason.code == "corrupt_journal"
    assert f"r1.jsonl line {line + 1}:" in reason.detail
    assert "journal_corrupt" in [r.action for r in caplog.records]
    assert other.statistics().corrupt_places == 1
    await other.put(entry("c2", rollout_id="r2"))
    await other.close()
    assert await frozen(file_store, "r2") == (["c1", "c2"], [])


async def test_damage_that_came_after_the_freeze_makes_the_snapshot_stale(file_store, entry):
    """A trainer cannot retire what it did not see damaged."""
    for call in ("c1", "c2"):
        await file_store.put(entry(call))
    before = await file_store.freeze("r1")
    path = file_store.path_for("r1")
    path.write_bytes(path.read_bytes().replace(b'"call":"c1"', b'"call":"cX"', 1))
    after = await file_store.snapshot("r1")

    assert (before.incomplete, after.incomplete) == (False, True)
    assert not await file_store.drop("r1", snapshot_id=before.snapshot_id, version=before.version)


async def test_journal_of_another_rollout_is_refused(file_store, entry):
    """A file that was moved by hand never mixes two rollouts."""
    await file_store.put(entry())
    path = file_store.path_for("r2")
    path.parent.mkdir(exist_ok=True)
    shutil.copy(file_store.path_for("r1"), path)
    with pytest.raises(StoreError, match="belongs to rollout 'r1'"):
        await file_store.freeze("r2")


async def test_journal_of_a_newer_version_is_refused(file_store, entry):
    """A field that this version does not know may change what a token means."""
    path = file_store.path_for("r1")
    path.parent.mkdir(parents=True)
    path.write_bytes(encode(Header(rollout_id="r1", uid="u", v=2)))
    for attempt in (file_store.put(entry()), file_store.freeze("r1"), file_store.status("r1")):
        with pytest.raises(UnsupportedSchemaError, match="version 2"):
            await attempt


async def test_one_unreadable_journal_does_not_end_a_listing_or_a_sweep(file_store, entry):
    """It is listed as masked, with the reason; the others are listed and swept."""
    for rollout in ("a", "b", "c"):
        await file_store.put(entry(rollout_id=rollout))
    path = file_store.path_for("b")
    path.unlink()
    path.write_bytes(file_store.path_for("a").read_bytes())
    snapshot = await file_store.freeze("c")
    await file_store.drop("c", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    rows, _ = await file_store.list_rollouts()

    assert [(r.rollout_id, r.incomplete) for r in rows] == [("a", False), ("b", True), ("c", False)]
    assert [r.code for r in rows[1].incomplete_reasons] == ["unreadable_journal"]
    assert await file_store.sweep_retired(0) == 1


# --- failing writes --------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("short", [None, 10], ids=["nothing", "short"])
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "uncut"])
async def test_failed_put_masks_and_heals(faulty_store, fs, entry, code, short, cut):
    """The call's record is refused with the reason; later ones are whole; the hole is known."""
    await faulty_store.put(entry("c1"))
    fs.fail("write", code, times=-1)
    fs.short_write = short
    if not cut:
        fs.fail("truncate", errno.EIO, times=-1)
    with pytest.raises(StoreUnavailableError, match=r".jsonl: "):
        await faulty_store.put(entry("c2"))
    assert (await faulty_store.status("r1")).incomplete
    fs.heal()
    await faulty_store.put(entry("c3"))

    assert await frozen(faulty_store) == (["c1", "c3"], [("store_failure", "c2")])
    assert len(faulty_store._committer.owed) == 0


async def test_failed_intent_refuses_the_call_and_leaves_nothing(faulty_store, fs, entry, intent):
    """The call is refused before compute; the rollout stays whole."""
    await faulty_store.put(entry("c1"))
    fs.fail("write", errno.ENOSPC)
    fs.short_write = 30
    with pytest.raises(StoreUnavailableError, match="No space left"):
        await faulty_store.open_intent(intent("c2"))
    await faulty_store.put(entry("c3"))

    assert await frozen(faulty_store) == (["c1", "c3"], [])


async def test_mark_that_fails_with_the_put_is_not_lost(faulty_store, fs, entry):
    """Both fail, nothing else ever happens to the rollout: the mark is written all the same."""
    await faulty_store.put(entry("c1"))
    fs.fail("write", errno.ENOSPC, times=-1)
    with pytest.raises(StoreUnavailableError):
        await faulty_store.put(entry("c2"))
    with pytest.raises(StoreUnavailableError):
        await faulty_store.mark_incomplete("r1", "c2", "lost")
    assert faulty_store.is_incomplete("r1")
    assert "No space left" in (await faulty_store.healthy() or "")
    with pytest.raises(StoreUnavailableError):
        await faulty_store.freeze("r1")
    fs.heal()
    assert await faulty_store.healthy() is None

    assert await frozen(faulty_store) == (["c1"], [("store_failure", "c2"), ("lost", "c2")])


async def test_owed_marks_are_written_without_any_traffic(faulty_store, fs, entry):
    """Nobody asks, nobody calls: a thread retries until the disk takes the mark."""
    fs.fail("write", errno.ENOSPC, times=-1)
    with pytest.raises(StoreUnavailableError):
        await faulty_store.put(entry("c1"))
    fs.heal()
    async with asyncio.timeout(20):
        while len(faulty_store._committer.owed):
            await asyncio.sleep(0.02)

    assert await frozen(faulty_store) == ([], [("store_failure", "c1")])


async def test_the_disk_recovers_without_a_hand(faulty_store, fs, entry, intent):
    """After the fault is gone, new calls run and readiness returns."""
    fs.fail("sync", times=-1)
    fs.fail("write", errno.ENOSPC, times=-1)
    with pytest.raises(StoreUnavailableError):
        await faulty_store.begin_call("r2", "c1")
    assert await faulty_store.healthy() is not None
    fs.heal()
    assert await faulty_store.healthy() is None
    ticket = await faulty_store.open_intent(intent("c1"))
    await ticket.wait_durable()
    await faulty_store.put(entry("c1"))
    assert await frozen(faulty_store) == (["c1"], [])


async def test_one_rollouts_fault_does_not_fail_its_neighbours(faulty_store, fs, entry):
    """A batch that failed is one rollout's."""
    fs.fail("write", errno.EIO)
    with pytest.raises(StoreUnavailableError):
        await faulty_store.put(entry("c1"))
    await faulty_store.put(entry("c1", rollout_id="r2"))

    assert await frozen(faulty_store, "r2") == (["c1"], [])


# --- failing syncs ---------------------------------------------------------------------------


async def test_failed_sync_is_never_papered_over(faulty_store, fs, entry):
    """The retried put is acknowledged only from a new file that was synced as a whole."""
    await faulty_store.put(entry("c1"))
    inode = faulty_store.path_for("r1").stat().st_ino
    fs.fail("sync")
    with pytest.raises(StoreUnavailableError, match="sync"):
        await faulty_store.put(entry("c2"))
    before = dict(fs.counts)
    await faulty_store.put(entry("c2"))

    assert inode != faulty_store.path_for("r1").stat().st_ino
    assert fs.counts["rename"] == before.get("rename", 0) + 1
    assert fs.counts["sync"] > before["sync"]
    assert faulty_store.statistics().rebuilt_files == 1
    assert await frozen(faulty_store) == (["c1", "c2"], [("store_failure", "c2")])


async def test_no_acknowledgement_while_syncs_fail(faulty_store, fs, entry):
    """However often it is tried: fail closed."""
    await faulty_store.put(entry("c1"))
    fs.fail("sync", times=-1)
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            await faulty_store.put(entry("c2"))
    fs.heal()
    await faulty_store.put(entry("c2"))

    assert await frozen(faulty_store) == (["c1", "c2"], [("store_failure", "c2")])


async def test_repeated_put_waits_for_the_disk_itself(file_store, fs, entry, tmp_path):
    """A record that another process wrote but may not have synced is synced before the no-op."""
    first = TokenCaptureStore(tmp_path / "store", fs=fs)
    second_fs = type(fs)()
    second = TokenCaptureStore(tmp_path / "store", fs=second_fs)
    fs.fail("sync")
    with pytest.raises(StoreUnavailableError):
        await first.put(entry("c1"))
    await second.put(entry("c1"))

    assert second_fs.counts["sync"] == 1
    await second.put(entry("c1"))
    assert second_fs.counts["sync"] == 1
    await first.close()
    await second.close()


async def test_intent_that_cannot_be_synced_masks_and_the_next_call_is_refused(
    faulty_store, fs, intent, entry
):
    """The call is served; the next ones get nothing until a sync works again."""
    await faulty_store.put(entry("c0"))
    fs.fail("sync", times=-1)
    ticket = await faulty_store.open_intent(intent("c1"))
    with pytest.raises(StoreUnavailableError):
        await ticket.wait_durable()
    with pytest.raises(StoreUnavailableError):
        await faulty_store.open_intent(intent("c2"))
    with pytest.raises(StoreUnavailableError):
        await faulty_store.open_intent(intent("c1", rollout_id="r2"))
    fs.heal()
    await faulty_store.put(entry("c1"))
    await (await faulty_store.open_intent(intent("c3"))).wait_durable()
    await faulty_store.put(entry("c3"))
    assert await faulty_store.healthy() is None

    assert await frozen(faulty_store) == (["c0", "c1", "c3"], [("store_failure", "c1")])
    assert await frozen(faulty_store, "r2") == ([], [])


async def test_refused_intent_of_a_failed_sync_does_not_dangle(faulty_store, fs, entry, intent):
    """It reached the file but not the disk: it is cancelled as soon as that is possible."""
    await faulty_store.put(entry("c0"))
    fs.fail("sync", times=-1)
    with pytest.raises(StoreUnavailableError):
        await faulty_store.put(entry("cx", rollout_id="other"))
    with pytest.raises(StoreUnavailableError):
        await faulty_store.open_intent(intent("c1"))
    fs.heal()
    await faulty_store.put(entry("c2"))

    assert await frozen(faulty_store) == (["c0", "c2"], [])


async def test_failed_directory_sync_fails_the_put(faulty_store, fs, entry):
    """A file without a name on disk is no file."""
    fs.fail("sync_directory", times=-1)
    with pytest.raises(StoreUnavailableError):
        await faulty_store.put(entry("c1"))
    fs.heal()
    await faulty_store.put(entry("c1"))
    assert await frozen(faulty_store) == (["c1"], [("store_failure", "c1")])


@pytest.mark.parametrize("call", ["open_temporary", "write", "sync", "rename", "sync_directory"])
async def test_retirement_that_fails_can_be_repeated(faulty_store, fs, entry, call):
    """At no point of a failing retirement is the snapshot half gone."""
    await faulty_store.put(entry("c1"))
    snapshot = await faulty_store.freeze("r1")
    key = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
    fs.fail(call)
    with pytest.raises(StoreUnavailableError):
        await faulty_store.drop("r1", **key)
    if call != "sync_directory":  # by then the tombstone has its name
        assert [canonical_bytes(e) for e in snapshot.entries] == [
            canonical_bytes(e) for e in (await faulty_store.snapshot("r1")).entries
        ]
    assert await faulty_store.drop("r1", **key)
    assert (await faulty_store.status("r1")).state == "retired"
    assert not list(faulty_store.root.rglob(".*.tmp"))


async def test_failed_freeze_can_be_repeated(faulty_store, fs, entry):
    """The second freeze gives the fence that the first one wrote, or a first one."""
    await faulty_store.put(entry("c1"))
    for call in ("write", "sync", "read"):
        fs.fail(call)
        with pytest.raises(StoreUnavailableError):
            await faulty_store.freeze("r1")
    snapshot = await faulty_store.freeze("r1")

    assert snapshot == await faulty_store.freeze("r1")
    assert not snapshot.incomplete


async def test_failed_delete_can_be_repeated(faulty_store, fs, entry):
    """The id is free only when the name is gone."""
    await faulty_store.put(entry("c1"))
    fs.fail("unlink")
    with pytest.raises(StoreUnavailableError):
        await faulty_store.delete("r1")
    assert (await faulty_store.status("r1")).state == "open"
    assert await faulty_store.delete("r1")


async def test_root_without_permission_refuses_and_recovers(tmp_path, fs, entry):
    """A directory that cannot be made is like a full disk: refused, red, then well again."""
    store = TokenCaptureStore(tmp_path / "store", fs=fs)
    fs.fail("open", errno.EACCES, times=-1)
    with pytest.raises(StoreUnavailableError, match="Permission denied"):
        await store.begin_call("r1", "c1")
    fs.heal()
    await store.begin_call("r1", "c1")
    await store.put(entry("c1"))
    assert await frozen(store) == (["c1"], [])
    await store.close()


async def test_root_below_a_file_is_reported(tmp_path):
    """A root that can never be made says so on the first use and in readiness."""
    (tmp_path / "file").write_text("")
    store = TokenCaptureStore(tmp_path / "file" / "store")
    assert "Not a directory" in (await store.healthy() or "")
    with pytest.raises(TokenCaptureError):
        await store.begin_call("r1", "c1")
    await store.close()


async def test_file_removed_by_hand_is_noticed(file_store, entry):
    """A journal that vanishes under an open store is a new rollout, never a stale memory."""
    await file_store.put(entry("c1"))
    os.unlink(file_store.path_for("r1"))
    await file_store.put(entry("c2"))

    assert await frozen(file_store) == (["c2"], [])


@pytest.fixture
def dead_holder() -> str:
    """The name of a process that has ended."""
    code = "from capture_server.stores.holders import current_holder; print(current_holder())"
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert done.stdout.strip()
    return done.stdout.strip()


async def test_dead_holders_are_not_waited_for(file_store, intent, monkeypatch, dead_holder):
    """An intent whose process is gone dangles at once; others are waited for."""
    monkeypatch.setattr("capture_server.stores.file.current_holder", lambda: dead_holder)
    await file_store.open_intent(intent("dead"))
    monkeypatch.undo()
    await file_store.open_intent(intent("alive"))

    assert list(await file_store.fence("r1")) == ["alive"]
    assert {"dead", "alive"} == set((await file_store.status("r1")).open_intents)
