"""Lost connections, killed servers and races between processes: nothing lost, nothing doubled."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from capture_server.stores.postgres import PostgresCaptureStore
from capture_server.stores.spill import SpillLog
from middleware.errors import (
    CallIdConflictError,
    StoreUnavailableError,
    TokenCaptureFrozenError,
)
from tests.stores.dropping_proxy import dropping_proxy
from tests.stores.postgres_server import query

ENTRY = """
import asyncio, sys
from capture_server.stores.postgres import PostgresCaptureStore
from middleware.errors import StoreUnavailableError, TokenCaptureFrozenError
from middleware.protocols import CallIntent
from middleware.records import TokenEntry

def entry(rollout, call):
    return TokenEntry(rollout_id=rollout, model_call_id=call, prompt_token_ids=[1, 2, 3],
                      generation_token_ids=[4], generation_log_probs=[-0.5])
"""

RACER = (
    ENTRY
    + """
async def main(url, rounds):
    store = PostgresCaptureStore(url)
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(int(rounds)):
        try:
            await store.put(entry(f"r{i}", "c1"))
            print("kept", flush=True)
        except TokenCaptureFrozenError:
            print("refused", flush=True)
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""
)

PEER = (
    ENTRY
    + """
async def main(url, name):
    store = PostgresCaptureStore(url)
    for start in range(0, 60, 6):
        await asyncio.gather(*(store.put(entry("shared", f"{name}-{i}"))
                               for i in range(start, start + 6)))
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""
)


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


# --- ambiguous commits -------------------------------------------------------------------------


@pytest.fixture
async def through_proxy(database):
    """A store whose answers can be lost after the commit, and the proxy that loses them."""
    with dropping_proxy(database) as proxy:
        store = PostgresCaptureStore(proxy.url)
        yield store, proxy
        await store.close()


@pytest.mark.parametrize("times", [1, 3])
async def test_a_put_whose_answer_was_lost_is_stored_once(through_proxy, entry, database, times):
    """C46: committed, the connection dropped, sent again: one row, no conflict, no mark."""
    store, proxy = through_proxy
    proxy.drop(times)
    await store.put(entry())
    rows = query(database, "SELECT pos FROM token_capture_records")
    snapshot = await store.freeze("r1")

    assert proxy.dropped == times
    assert rows == [(0,)]
    assert (len(snapshot.entries), snapshot.incomplete, snapshot.version) == (1, False, 2)
    assert store.statistics().put_records == 1


async def test_every_operation_survives_a_lost_answer(through_proxy, entry, intent, database):
    """Also those that a second time would refuse: an intent is not taken for its own double."""
    store, proxy = through_proxy
    steps = [
        lambda: store.open_intent(intent("c1", "body")),
        lambda: store.put_choices([entry("c1.0"), entry("c1.1")], "c1"),
        lambda: store.note_delivery("r1", "c1", {"delivered": True}),
        lambda: store.open_intent(intent("c2", "body")),
        lambda: store.cancel_call("r1", "c2"),
        lambda: store.mark_incomplete("r1", "c3", "lost"),
        lambda: store.fence("r1"),
        lambda: store.freeze("r1"),
    ]
    results = []
    for step in steps:
        proxy.drop(1)
        results.append(await step())
    frozen = results[-1]
    expected = frozen.version

    assert proxy.dropped == len(steps)
    assert results[0].first_call
    assert (results[6], [e.delivered for e in frozen.entries]) == ([], [True, True])
    assert [r.code for r in frozen.incomplete_reasons] == ["lost"]
    assert frozen == await store.freeze("r1")
    proxy.drop(1)
    assert await store.drop("r1", snapshot_id=frozen.snapshot_id, version=expected)
    assert query(database, "SELECT count(*) FROM token_capture_records") == [(1,)]


async def test_a_changed_payload_after_a_lost_answer_is_a_conflict(through_proxy, entry):
    """C46: the same id with other tokens is an error, and the rollout is masked."""
    store, proxy = through_proxy
    proxy.drop(1)
    await store.put(entry(seed=1))
    proxy.drop(1)
    with pytest.raises(CallIdConflictError):
        await store.put(entry(seed=2))
    snapshot = await store.freeze("r1")

    assert [r.code for r in snapshot.incomplete_reasons] == ["call_id_conflict"]
    assert [e.prompt_token_ids[0] for e in snapshot.entries] == [1]


async def test_others_went_on_before_the_put_was_sent_again(through_proxy, entry, database):
    """The own append is recognised although the history has grown behind it."""
    store, _proxy = through_proxy
    other = PostgresCaptureStore(database)
    await store.put(entry("c1"))
    call = store._connections.call
    calls = 0

    def lose_the_first(work):
        nonlocal calls
        calls += 1
        result = call(work)
        if calls == 1:
            asyncio.run(other.put(entry("c3")))
            raise StoreUnavailableError("the answer was lost")
        return result

    store._connections.call = lose_the_first
    await store.put(entry("c2"))
    store._connections.call = call
    snapshot = await store.freeze("r1")
    await other.close()

    assert [e.model_call_id for e in snapshot.entries] == ["c1", "c2", "c3"]
    assert not snapshot.incomplete


async def test_concurrent_puts_over_a_bad_line(through_proxy, entry):
    """Batches and pipelines whose answers are lost: every put once, in every rollout."""
    store, proxy = through_proxy
    proxy.drop(5)
    await asyncio.gather(*(store.put(entry(f"c{i}", rollout_id=f"r{i % 12}")) for i in range(120)))
    frozen = [await store.freeze(f"r{i}") for i in range(12)]

    assert proxy.dropped == 5
    assert [len({e.model_call_id for e in s.entries}) for s in frozen] == [10] * 12
    assert [(len(s.entries), s.version, s.incomplete) for s in frozen] == [(10, 11, False)] * 12
    assert store.statistics().put_records == 120


# --- pipelines and batches ---------------------------------------------------------------------


async def test_concurrent_operations_share_round_trips(database, entry, monkeypatch):
    """Many rollouts at once take far fewer turns than operations."""
    store = PostgresCaptureStore(database)
    call, calls = store._connections.call, 0

    def counted(work):
        nonlocal calls
        calls += 1
        return call(work)

    monkeypatch.setattr(store._connections, "call", counted)
    await store.put(entry("c0", rollout_id="r0"))
    assert calls == 1  # one round trip
    await asyncio.gather(*(store.put(entry(f"c{i}", rollout_id=f"r{i}")) for i in range(1, 200)))
    assert calls < 100
    calls = 0
    await asyncio.gather(*(store.put(entry(f"x{i}", rollout_id="r0")) for i in range(100)))
    assert calls < 50
    await store.close()


async def test_one_bad_record_fails_alone(database, entry):
    """What cannot be written is refused; its neighbours in batch and pipeline are stored."""
    store = PostgresCaptureStore(database)
    bad = entry("bad", note=object())
    puts = [store.put(e) for e in (entry("c1"), bad, entry("c2"), entry("c1", rollout_id="r2"))]
    outcomes = await asyncio.gather(*puts, return_exceptions=True)
    kept = [e.model_call_id for e in (await store.freeze("r1")).entries]
    await store.close()

    assert [isinstance(o, Exception) for o in outcomes] == [False, True, False, False]
    assert kept == ["c1", "c2"]


async def test_a_held_row_blocks_its_own_rollout_only(database, entry):
    """Another transaction keeps one rollout's lock: the others go on."""
    import psycopg

    store = PostgresCaptureStore(database)
    await store.put(entry("c1"))
    with psycopg.connect(database) as holder:
        holder.execute("SELECT 1 FROM token_capture_rollouts WHERE rollout_id = 'r1' FOR UPDATE")
        waiting = asyncio.create_task(store.put(entry("c2")))
        for i in range(20):
            await store.put(entry("c1", rollout_id=f"free{i}"))
        assert not waiting.done()
        holder.rollback()
        await waiting
    await store.close()


# --- processes ---------------------------------------------------------------------------------


def test_put_and_freeze_race_between_processes(database):
    """Each put is in the snapshot or refused, never neither and never both."""
    rounds = 150
    racer = start(RACER, database, str(rounds))
    assert racer.stdout is not None and racer.stdin is not None
    assert racer.stdout.readline() == "ready\n"

    async def freeze_all():
        store = PostgresCaptureStore(database)
        racer.stdin.write("go\n")
        racer.stdin.flush()
        snapshots = [await store.freeze(f"r{i}") for i in range(rounds)]
        again = [await store.freeze(f"r{i}") for i in range(rounds)]
        await store.close()
        return snapshots, again

    snapshots, again = asyncio.run(freeze_all())
    outcomes = racer.communicate()[0].split()

    assert [len(s.entries) == 1 for s in snapshots] == [o == "kept" for o in outcomes]
    assert not any(s.incomplete for s in snapshots)
    assert snapshots == again


def test_processes_append_to_one_rollout(database):
    """Writers in several processes share a rollout without losing or doubling a record."""
    peers = [start(PEER, database, f"p{i}") for i in range(3)]
    assert [(peer.communicate()[0], peer.returncode) for peer in peers] == [("", 0)] * 3

    async def read():
        store = PostgresCaptureStore(database)
        snapshot = await store.freeze("shared")
        await store.close()
        return snapshot

    snapshot = asyncio.run(read())
    positions = query(database, "SELECT pos FROM token_capture_records ORDER BY pos")

    assert {f"p{p}-{i}" for p in range(3) for i in range(60)} == {
        e.model_call_id for e in snapshot.entries
    }
    assert (snapshot.version, snapshot.incomplete) == (181, False)
    assert [p for (p,) in positions] == list(range(181))


# --- a server that dies ------------------------------------------------------------------------


async def test_a_killed_server_loses_nothing_acknowledged(own_server, killable, entry, intent):
    """Killed in the middle of puts, again and again: all are acknowledged once it is back."""
    store = PostgresCaptureStore(killable, retry_for_s=40)
    stop = asyncio.Event()
    acknowledged: dict[str, list[str]] = {f"r{i}": [] for i in range(6)}

    async def write(rollout: str) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            call = f"c{number}"
            await store.open_intent(intent(call, rollout_id=rollout))
            await store.put(entry(call, rollout_id=rollout))
            acknowledged[rollout].append(call)

    writers = [asyncio.create_task(write(rollout)) for rollout in acknowledged]
    for _ in range(3):
        before = sum(map(len, acknowledged.values()))
        while sum(map(len, acknowledged.values())) < before + 30:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(own_server.kill)
        await asyncio.to_thread(own_server.start)
    stop.set()
    await asyncio.gather(*writers)
    other = PostgresCaptureStore(killable)
    frozen = {rollout: await other.freeze(rollout) for rollout in acknowledged}
    await other.close()
    await store.close()

    for rollout, calls in acknowledged.items():
        assert [e.model_call_id for e in frozen[rollout].entries] == calls
        assert (frozen[rollout].incomplete, frozen[rollout].version) == (False, 2 * len(calls) + 1)


async def test_while_the_server_is_away(own_server, killable, entry, intent, tmp_path):
    """Calls are refused, records fail with a mark that comes later, and nobody has to help."""
    spill = SpillLog(tmp_path)
    store = PostgresCaptureStore(killable, retry_for_s=0.2, spill=spill)
    await store.open_intent(intent("c1"))
    await asyncio.to_thread(own_server.kill)
    try:
        with pytest.raises(StoreUnavailableError):
            await store.open_intent(intent("c2"))
        with pytest.raises(StoreUnavailableError):
            await store.put(entry("c1"))
        await store.mark_incomplete("r2", "c9", "lost")  # kept on the local disk
        with pytest.raises(StoreUnavailableError):
            await store.freeze("r1")
        assert await store.healthy() is not None
        await store.close()
    finally:
        await asyncio.to_thread(own_server.start)
    again = PostgresCaptureStore(killable, spill=SpillLog(tmp_path))
    while await again.healthy() is not None:
        await asyncio.sleep(0.05)
    reasons = [
        (r.code, r.model_call_id)
        for rollout in ("r1", "r2")
        for r in (await again.freeze(rollout)).incomplete_reasons
    ]
    await again.close()

    assert reasons == [("store_failure", "c1"), ("lost", "c9")]


async def test_an_idle_store_reconnects(own_server, killable, entry):
    """Connections that died unnoticed cost a retry, not a call."""
    store = PostgresCaptureStore(killable)
    await asyncio.gather(*(store.put(entry(rollout_id=f"r{i}")) for i in range(20)))
    await asyncio.to_thread(own_server.kill)
    await asyncio.to_thread(own_server.start)
    await store.put(entry("c2", rollout_id="r1"))
    resolver = store.open_resolver()
    found = await resolver.resolve_call_id("r1", "c2")
    await store.close()

    assert found.match is not None


async def test_the_event_loop_never_waits(database, entry):
    """All database work happens in the store's threads."""
    store = PostgresCaptureStore(database)
    call, seen = store._connections.call, set()

    def watched(work):
        seen.add(threading.current_thread() is threading.main_thread())
        return call(work)

    store._connections.call = watched
    await store.put(entry())
    await store.freeze("r1")
    with pytest.raises(TokenCaptureFrozenError):
        await store.put(entry("c2"))
    await store.list_rollouts()
    await store.healthy()
    await store.open_resolver().resolve_call_id("r1", "c1")
    await store.close()

    assert seen == {False}
