"""The sidecar goes away: what capture promises then, and what arrives when it is back."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from contextlib import asynccontextmanager

import httpx
import pytest

from capture_server.app import create_app
from capture_server.config import load_settings
from capture_server.in_thread import served_in_thread
from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.spill import SpillLog, spill_directory
from middleware.errors import StoreError, StoreUnavailableError
from middleware.records import canonical_bytes
from tests.http.capture_rig import CHAT, HELLO
from tests.http.upstream import chat, scripted_engine, whole
from tests.stores.remote_rig import Sidecar, remote, sidecar


@pytest.fixture(autouse=True)
def short_deadlines(monkeypatch):
    """Tests do not wait for a sidecar that they stopped; for one that runs on a busy machine they
    do."""

    def deadlines(seconds):
        monkeypatch.setattr("capture_server.stores.remote.BEFORE_DISPATCH_S", seconds)
        monkeypatch.setattr("capture_server.stores.remote.AFTER_DISPATCH_S", seconds)

    start, stop = Sidecar.start, Sidecar.stop

    async def started(made):
        deadlines(20.0)
        await start(made)

    async def stopped(made):
        await stop(made)
        deadlines(0.3)

    monkeypatch.setattr(Sidecar, "start", started)
    monkeypatch.setattr(Sidecar, "stop", stopped)
    monkeypatch.setattr("capture_server.stores.remote_replay._LONGEST_WAIT_S", 0.2)


@pytest.fixture
async def central(tmp_path):
    """A sidecar over a file store."""
    store = TokenCaptureStore(tmp_path / "store")
    async with sidecar(store) as made:
        yield made
    await store.close()


@pytest.fixture
def spill_files(tmp_path, central):
    """The files that wait."""
    directory = spill_directory(central.url, tmp_path / "spill")

    def look():
        return list(directory.iterdir()) if directory.exists() else []

    return look


@asynccontextmanager
async def opened(central, tmp_path, **options):
    store = remote(central, tmp_path / "spill", **options)
    try:
        yield store
    finally:
        await store.close()


async def until_empty(spill_files):
    async with asyncio.timeout(20):
        while spill_files():
            await asyncio.sleep(0.02)


def reasons_of(snapshot):
    return sorted((r.code, r.model_call_id) for r in snapshot.incomplete_reasons)


async def put_while_away(central, store, record):
    """An open call whose record finds the sidecar gone: as capture does it, with the mark."""
    await store.begin_call(record.rollout_id, record.model_call_id)
    await central.stop()
    with pytest.raises(StoreUnavailableError, match="is sent again"):
        await store.put(record)
    await store.mark_incomplete(record.rollout_id, record.model_call_id, "store_failure", "x")


# --- before dispatch ---------------------------------------------------------------------------


async def test_no_call_begins_without_the_sidecar(central, tmp_path, intent, spill_files):
    """Refused in bounded time, and the second time at once; nothing is left behind."""
    async with opened(central, tmp_path) as store:
        await central.stop()
        began = time.monotonic()
        with pytest.raises(StoreUnavailableError, match="no answer from the sidecar"):
            await store.open_intent(intent("c1"))
        first_s = time.monotonic() - began
        began = time.monotonic()
        with pytest.raises(StoreUnavailableError):
            await store.open_resolver().resolve_call_id("r1", "c0")
        again_s = time.monotonic() - began

    assert (first_s < 2, again_s < 1) == (True, True)
    assert spill_files() == []


async def test_an_intent_of_unknown_fate_is_closed_later(
    central, tmp_path, intent, spill_files, monkeypatch
):
    """It reached the sidecar, its answer did not reach us: the call that was refused must not
    dangle in the sidecar's store."""
    async with opened(central, tmp_path) as store:
        async with opened(central, tmp_path) as other:
            await other.open_intent(intent("c1", attempt="t1"))
        blackhole = socket.create_server(("127.0.0.1", 0))  # connects, and never answers
        port = blackhole.getsockname()[1]
        good, store._link.server = store._link.server, f"http://127.0.0.1:{port}"
        monkeypatch.setattr("capture_server.stores.remote.BEFORE_DISPATCH_S", 0.3)
        with pytest.raises(StoreUnavailableError):
            await store.open_intent(intent("c1", attempt="t1"))
        assert len(spill_files()) == 1
        store._link.server = good
        await until_empty(spill_files)
        frozen = await store.freeze("r1")
        blackhole.close()

    assert (frozen.incomplete, list(frozen.entries)) == (False, [])


# --- after generation --------------------------------------------------------------------------


async def test_a_spilled_record_arrives_before_the_freeze(central, tmp_path, entry, spill_files):
    """The rollout is whole: the record is there, and the mark of its absence was never needed."""
    record = entry("c1", note=2**80, text="\ud800")
    async with opened(central, tmp_path) as store:
        await put_while_away(central, store, record)
        assert len(spill_files()) == 1
        await central.start()
        await until_empty(spill_files)
        frozen = await store.freeze("r1")

    assert not frozen.incomplete
    assert [canonical_bytes(e) for e in frozen.entries] == [canonical_bytes(record)]


async def test_a_freeze_that_comes_first_masks(central, tmp_path, entry, spill_files):
    """The open intent dangles; the late record changes nothing any more and leaves the spill."""
    async with opened(central, tmp_path) as store:
        await put_while_away(central, store, entry("c1"))
        frozen = await central.store.freeze("r1")
        await central.start()
        await until_empty(spill_files)
        after = await store.freeze("r1")

    assert reasons_of(frozen) == [("dangling_intent", "c1")]
    assert (after.version, list(after.entries)) == (frozen.version, [])


async def test_a_later_call_of_the_rollout_waits_for_the_spill(central, tmp_path, entry, intent):
    """Order holds: the resolver knows the spilled record before the next call is decided."""
    async with opened(central, tmp_path) as store:
        await put_while_away(central, store, entry("c1", request_digest="a"))
        with pytest.raises(StoreUnavailableError):
            await store.open_intent(intent("c2", "b"))
        await central.start()
        found = await store.open_resolver().resolve_call_id("r1", "c1")
        ticket = await store.open_intent(intent("c2", "b"))

    assert found.match is not None
    assert not ticket.first_call


async def test_the_next_process_sends_what_the_last_one_spilled(
    central, tmp_path, entry, spill_files
):
    """Records and marks survive the engine's restart."""
    async with opened(central, tmp_path) as store:
        await put_while_away(central, store, entry("c1"))
        await store.mark_incomplete("r2", "c5", "lost", "why")
        await store.cancel_call("r3", "c6", "refused")
    await central.start()
    async with opened(central, tmp_path) as later:
        assert await later.healthy() is None  # the first use takes the files over
        await until_empty(spill_files)
        first, second = await later.freeze("r1"), await later.freeze("r2")

    assert (first.incomplete, len(first.entries)) == (False, 1)
    assert reasons_of(second) == [("lost", "c5")]
    assert second.incomplete_reasons[0].detail == "why"


async def test_a_spilled_record_never_gets_into_another_attempt(
    central, tmp_path, entry, spill_files
):
    """The id was deleted and used again: the stray record is dropped."""
    async with opened(central, tmp_path) as store:
        await put_while_away(central, store, entry("c1"))
        await central.store.delete("r1")
        await central.store.begin_call("r1", "new")
        await central.store.put(entry("new", seed=7))
        await central.start()
        await until_empty(spill_files)
        frozen = await store.freeze("r1")

    assert [e.model_call_id for e in frozen.entries] == ["new"]
    assert not frozen.incomplete


async def test_a_spilled_record_does_not_revive_a_deleted_rollout(
    central, tmp_path, entry, spill_files
):
    """Nothing stays behind under an id that nobody will ever clear."""
    async with opened(central, tmp_path) as store:
        await put_while_away(central, store, entry("c1"))
        await central.store.delete("r1")
        await central.start()
        await until_empty(spill_files)
        assert (await store.status("r1")).state == "unknown"


async def test_a_record_that_was_stored_after_all_is_no_conflict(
    central, tmp_path, entry, spill_files
):
    """Its answer was lost, so it was spilled: sent again it changes nothing."""
    async with opened(central, tmp_path) as store:
        await put_while_away(central, store, entry("c1"))
        await central.store.put(entry("c1"))
        before = await central.store.status("r1")
        await central.start()
        await until_empty(spill_files)
        after = await store.status("r1")

    assert (after.version, after.calls, after.incomplete) == (before.version, 1, False)


async def test_a_record_without_an_intent_is_not_spilled(central, tmp_path, entry, spill_files):
    """Nobody would miss it, so the mark has to say it; and it does, durably."""
    async with opened(central, tmp_path) as store:
        await central.stop()
        with pytest.raises(StoreUnavailableError) as caught:
            await store.put(entry("c1"))
        assert "sent again" not in str(caught.value)
        assert spill_files() == []
        await store.mark_incomplete("r1", "c1", "store_failure", "x")
        await central.start()
        await until_empty(spill_files)
        frozen = await store.freeze("r1")

    assert reasons_of(frozen) == [("store_failure", "c1")]


async def test_choices_are_spilled_together(central, tmp_path, entry, spill_files):
    """One item, one intent, all choices."""
    async with opened(central, tmp_path) as store:
        await store.begin_call("r1", "c1")
        await central.stop()
        with pytest.raises(StoreUnavailableError):
            await store.put_choices([entry("c1.0"), entry("c1.1", seed=3)], "c1")
        await central.start()
        await until_empty(spill_files)
        frozen = await store.freeze("r1")

    assert sorted(e.model_call_id for e in frozen.entries) == ["c1.0", "c1.1"]
    assert not frozen.incomplete


async def test_a_mark_after_the_freeze_moves_the_version(central, tmp_path, entry, spill_files):
    """A trainer that read the snapshot meanwhile cannot retire it as whole."""
    async with opened(central, tmp_path) as store:
        await store.put(entry("c1"))
        frozen = await store.freeze("r1")
        await central.stop()
        await store.mark_incomplete("r1", "c1", "lost")
        await central.start()
        await until_empty(spill_files)
        stale = await store.drop("r1", snapshot_id=frozen.snapshot_id, version=frozen.version)
        after = await store.freeze("r1")

    assert not stale
    assert (after.incomplete, after.version > frozen.version) == (True, True)


# --- the spill fails, too ----------------------------------------------------------------------


async def test_a_full_spill_is_loud(central, tmp_path, entry, caplog):
    """The mark is refused, the log is critical, health is red; it recovers without a hand."""
    async with opened(central, tmp_path, max_spill_bytes=10) as store:
        await store.begin_call("r1", "c1")
        await central.stop()
        with pytest.raises(StoreUnavailableError, match="is full"):
            await store.put(entry("c1"))
        with pytest.raises(StoreUnavailableError, match="is full"):
            await store.mark_incomplete("r1", "c1", "store_failure")
        assert "is full" in (await store.healthy() or "")
        await central.start()
        frozen = await store.freeze("r1")

    assert reasons_of(frozen) == [("dangling_intent", "c1")]
    assert logging.CRITICAL in {record.levelno for record in caplog.records}


async def test_a_damaged_item_does_not_stop_the_others(
    central, tmp_path, spill_files, caplog, monkeypatch
):
    """It is reported by name, and what follows is delivered."""
    load = SpillLog.load

    def damaged(log, item):
        if item.call == "c1":
            raise StoreError("damaged")
        return load(log, item)

    monkeypatch.setattr(SpillLog, "load", damaged)
    async with opened(central, tmp_path) as store:
        await central.stop()
        await store.mark_incomplete("r1", "c1", "lost")
        await store.mark_incomplete("r2", "c2", "lost")
        await central.start()
        await until_empty(spill_files)
        frozen = await store.freeze("r2")

    assert reasons_of(frozen) == [("lost", "c2")]
    assert "replay_refused" in {getattr(record, "action", "") for record in caplog.records}


async def test_a_refused_record_becomes_a_mark(central, tmp_path, entry, spill_files):
    """What the sidecar will never take masks the rollout instead of waiting for ever."""
    directory = spill_directory(central.url, tmp_path / "spill")
    await central.store.begin_call("r1", "c1")
    log = SpillLog(directory)
    log.add("r1", "records", "c1", {"v": 1, "entries": [{"broken": True}]})
    log.close()
    async with opened(central, tmp_path) as store:
        await store.healthy()
        await until_empty(spill_files)
        frozen = await store.freeze("r1")

    assert reasons_of(frozen) == [("store_failure", "c1")]


# --- through the whole middleware --------------------------------------------------------------


async def test_an_engine_node_serves_through_an_outage(central, tmp_path, spill_files):
    """Capture on one node, the store on another: 503 before compute while it is away, the running
    call is served to its end, and its rollout is whole when the sidecar is back in time."""
    generating = asyncio.Event()
    answer = whole(chat("hi", [11, 12], prompt=[1, 2]))
    async with scripted_engine([generating, answer]) as engine:
        settings = load_settings(
            upstream=engine.url, store=central.url, spill_dir=tmp_path / "spill"
        )
        async with (
            served_in_thread(create_app(settings)) as url,
            httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as agent,
        ):
            running = asyncio.create_task(agent.post(CHAT, json=HELLO))
            while not engine.seen:
                await asyncio.sleep(0.01)
            assert len((await central.store.status("r1")).open_intents) == 1
            await central.stop()
            generating.set()
            served = await running
            refused = await agent.post(CHAT, json=HELLO)
            ready = await agent.get("/readyz")
            await central.start()
            await until_empty(spill_files)
            status = await central.store.status("r1")

    assert served.status_code == 200
    assert served.json()["choices"][0]["message"]["content"] == "hi"
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "capture_unavailable")
    assert ready.status_code == 503
    assert len(engine.seen) == 1
    assert status.calls == 1
    assert (status.incomplete, list(status.open_intents)) == (False, [])


async def test_an_intent_that_the_sidecar_lost_masks(central, tmp_path, intent, spill_files):
    """It was acknowledged from memory, then the sidecar's machine lost power: the local spill
    knows of the call, and says so."""
    async with opened(central, tmp_path) as store:
        ticket = await store.open_intent(intent("c1"))
        await central.stop()
        await ticket.wait_durable()
        await central.store.delete("r1")  # what a power failure may do to an unsynced file
        await central.start()
        await until_empty(spill_files)
        frozen = await store.freeze("r1")

    assert reasons_of(frozen) == [("intent_lost", "c1")]


async def test_a_confirmed_intent_is_not_marked(central, tmp_path, entry, intent, spill_files):
    """The sidecar still has it: it comes to its disk, and the call goes on as if nothing was."""
    async with opened(central, tmp_path) as store:
        ticket = await store.open_intent(intent("c1"))
        await central.stop()
        await ticket.wait_durable()
        await central.start()
        await store.put(entry("c1"))  # the spilled intent goes first
        assert spill_files() == []
        frozen = await store.freeze("r1")

    assert (frozen.incomplete, len(frozen.entries)) == (False, 1)
