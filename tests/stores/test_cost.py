"""What a put costs: syncs, bytes, and the event loop's time."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.lanes import Lanes
from middleware.errors import StoreClosedError


async def test_one_sync_per_put_and_one_per_intent(faulty_store, fs, entry, intent):
    """After a rollout's first write, no directory is synced and nothing twice."""
    await faulty_store.put(entry("c0"))
    before = dict(fs.counts)
    for i in range(1, 6):
        await (await faulty_store.open_intent(intent(f"c{i}"))).wait_durable()
        await faulty_store.put(entry(f"c{i}"))
        await faulty_store.note_delivery("r1", f"c{i}", {"delivered": True})

    assert fs.counts["sync"] - before["sync"] == 10
    assert fs.counts["sync_directory"] - before["sync_directory"] == 0
    assert fs.counts["write"] - before["write"] == 15


async def test_cost_of_a_put_does_not_grow(faulty_store, fs, entry):
    """The 400th put writes as many bytes as the 1st, and reads nothing."""
    sizes = []
    await faulty_store.put(entry("c0000"))
    reads = fs.counts.get("read", 0)
    for i in range(1, 400):
        before = faulty_store.statistics().bytes_written
        await faulty_store.put(entry(f"c{i:04}", created_at=1.0))
        sizes.append(faulty_store.statistics().bytes_written - before)

    assert len(set(sizes)) == 1
    assert reads == fs.counts.get("read", 0)


async def test_concurrent_puts_of_a_rollout_share_syncs(faulty_store, fs, entry):
    """Group commit: one write and one sync for all that wait."""
    await faulty_store.put(entry("c"))
    before = fs.counts["sync"]
    await asyncio.gather(*(faulty_store.put(entry(f"c{i}")) for i in range(100)))

    assert fs.counts["sync"] - before < 20
    assert (await faulty_store.status("r1")).calls == 101


async def test_put_returns_only_after_its_sync(faulty_store, fs, entry, monkeypatch):
    """While the disk works, the caller waits and the event loop does not."""
    release, syncing = threading.Event(), threading.Event()

    def slow(fd: int) -> None:
        syncing.set()
        assert threading.current_thread() is not threading.main_thread()
        release.wait()

    monkeypatch.setattr(fs, "sync", slow)
    put = asyncio.create_task(faulty_store.put(entry()))
    await asyncio.to_thread(syncing.wait)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not put.done()
    release.set()
    await put


async def test_intent_returns_before_its_sync(faulty_store, fs, intent, monkeypatch):
    """It is visible to everyone at once; the ticket waits for the disk."""
    release = threading.Event()
    monkeypatch.setattr(fs, "sync", lambda fd: release.wait())
    ticket = await faulty_store.open_intent(intent("c1"))
    other = TokenCaptureStore(faulty_store.root)
    assert list((await other.status("r1")).open_intents) == ["c1"]
    durable = asyncio.create_task(ticket.wait_durable())
    await asyncio.sleep(0)
    assert not durable.done()
    release.set()
    await durable
    await other.close()


async def test_cancelled_caller_may_find_its_record_durable(faulty_store, fs, entry, monkeypatch):
    """Cancelling the wait cancels nothing on disk, and the retry is a no-op."""
    release, syncing = threading.Event(), threading.Event()

    def slow(fd: int) -> None:
        syncing.set()
        release.wait()

    monkeypatch.setattr(fs, "sync", slow)
    put = asyncio.create_task(faulty_store.put(entry()))
    await asyncio.to_thread(syncing.wait)
    put.cancel()
    with pytest.raises(asyncio.CancelledError):
        await put
    release.set()
    await faulty_store.put(entry())

    assert (await faulty_store.status("r1")).calls == 1


async def test_close_finishes_what_was_begun(faulty_store, fs, entry):
    """Nothing that was queued is dropped by an orderly close."""
    puts = [asyncio.create_task(faulty_store.put(entry(f"c{i}"))) for i in range(50)]
    await asyncio.sleep(0)
    await faulty_store.close()
    await asyncio.gather(*puts)
    again = TokenCaptureStore(faulty_store.root)

    assert (await again.status("r1")).calls == 50
    await again.close()


def test_lanes_keep_the_order_of_a_key_and_one_thread_per_key():
    """Jobs of a key never overlap and never overtake each other."""
    seen: dict[str, list[int]] = {}
    busy: set[str] = set()

    def work(key: str, jobs: list[int]) -> None:
        assert key not in busy
        busy.add(key)
        seen.setdefault(key, []).extend(jobs)
        time.sleep(0.0001)
        busy.discard(key)

    lanes = Lanes(work, max_threads=4)
    for i in range(400):
        lanes.submit(f"k{i % 7}", i)
    assert lanes.close(10) == 0
    assert {f"k{k}": [i for i in range(400) if i % 7 == k] for k in range(7)} == seen
    with pytest.raises(StoreClosedError):
        lanes.submit("k", 1)


def test_lanes_give_up_in_time():
    """A job that hangs is counted, not waited for for ever."""
    release = threading.Event()
    lanes = Lanes(lambda key, jobs: release.wait() and None, max_threads=1)
    lanes.submit("a", 1)
    lanes.submit("b", 2)
    assert lanes.close(0.05) == 2
    release.set()


async def test_evicted_journals_are_read_again(tmp_path, entry, monkeypatch):
    """A bound on cached journals bounds memory, not knowledge."""
    monkeypatch.setattr("capture_server.stores.journal_cache._MAX_JOURNALS", 2)
    store = TokenCaptureStore(tmp_path, max_open_files=1)
    for call in ("c1", "c2", "c3"):
        for rollout in ("a", "b", "c", "d"):
            await store.put(entry(call, rollout_id=rollout))

    assert [(await store.status(r)).calls for r in "abcd"] == [3, 3, 3, 3]
    assert len(store._committer._cache._slots) <= 2 + 1  # one may still be in use
    await store.close()
