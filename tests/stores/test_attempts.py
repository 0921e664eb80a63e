"""A cancel that comes late closes the intent of its own attempt, and of no other."""

from __future__ import annotations

import asyncio
import errno

import pytest

from capture_server.stores.attempts import OpenAttempts
from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.journal import Cancel, Intent, decode
from capture_server.stores.postgres import PostgresCaptureStore
from middleware.errors import CallIdConflictError, StoreUnavailableError
from tests.stores.remote_rig import remote, sidecar


async def paid(store):
    """Wait until nothing is owed any more."""
    async with asyncio.timeout(20):
        while len(store._committer.owed):
            await asyncio.sleep(0.02)


def reasons_of(snapshot):
    return sorted((r.code, r.model_call_id) for r in snapshot.incomplete_reasons)


def lines_of(store, rollout="r1"):
    lines = store.path_for(rollout).read_bytes().splitlines()
    return [record for line in lines if (record := decode(line)) is not None]


async def test_every_intent_gets_an_attempt(store, intent):
    """Two rollouts' intents are told apart although their callers named no attempt."""
    if not hasattr(store, "look"):
        pytest.skip("no fold to look at")
    for rollout in ("r1", "r2"):
        await (await store.open_intent(intent("c1", rollout_id=rollout))).wait_durable()
    found = [
        await store.look(rollout, lambda fold: fold.calls["c1"].attempt) for rollout in ("r1", "r2")
    ]
    assert all(found)
    assert found[0] != found[1]


async def test_a_late_cancel_closes_its_own_attempt_only(store, intent):
    """Neither another attempt's cancel nor a nameless late one closes a live intent."""
    await (await store.open_intent(intent("c1", attempt="a1"))).wait_durable()
    await store.cancel_attempt("r1", "c1", "a2")
    await store.cancel_attempt("r1", "c1", "")
    assert list((await store.status("r1")).open_intents) == ["c1"]
    await store.cancel_attempt("r1", "c1", "a1")
    assert not (await store.status("r1")).open_intents


async def test_a_repeated_attempt_that_was_cancelled_is_open_again(store, intent):
    """Its call is made, so that a freeze must miss its record."""
    repeated = intent("c1", attempt="a1")
    await (await store.open_intent(repeated)).wait_durable()
    await store.cancel_attempt("r1", "c1", "a1")
    await (await store.open_intent(repeated)).wait_durable()
    assert list((await store.status("r1")).open_intents) == ["c1"]
    assert reasons_of(await store.freeze("r1")) == [("dangling_intent", "c1")]


async def test_another_attempt_of_a_cancelled_call_is_refused(store, intent):
    """A cancelled id is used up for everybody else."""
    await (await store.open_intent(intent("c1", attempt="a1"))).wait_durable()
    await store.cancel_call("r1", "c1")
    with pytest.raises(CallIdConflictError):
        await store.open_intent(intent("c1", attempt="a2"))


@pytest.mark.parametrize("fault", ["open", "write", "sync"])
async def test_a_refused_intent_leaves_another_workers_call_open(
    faulty_store, fs, tmp_path, intent, fault
):
    """Worker A refuses a call, worker B takes it; what A owes does not close B's intent."""
    other = TokenCaptureStore(tmp_path / "store")
    fs.fail(fault, errno.EIO, times=-1)
    with pytest.raises(StoreUnavailableError):
        await (await faulty_store.open_intent(intent("c0", rollout_id="r0"))).wait_durable()
    with pytest.raises(StoreUnavailableError):
        await (await faulty_store.open_intent(intent())).wait_durable()
    if fault == "sync":  # the line may be in the file: its id is taken
        with pytest.raises(CallIdConflictError):
            await other.begin_call("r1", "c1")
    else:
        await other.begin_call("r1", "c1")
    fs.heal()
    await paid(faulty_store)
    await faulty_store.status("r1")
    expected = [] if fault == "sync" else ["c1"]
    assert list((await other.status("r1")).open_intents) == expected
    await other.close()


async def test_a_refusal_before_the_write_owes_nothing(faulty_store, fs, intent):
    """An intent that cannot be in the file needs no cancel."""
    fs.fail("open", errno.EMFILE, times=-1)
    with pytest.raises(StoreUnavailableError):
        await faulty_store.open_intent(intent())
    assert len(faulty_store._committer.owed) == 0


async def test_an_attempt_taken_by_another_worker_stays_open(faulty_store, fs, tmp_path, intent):
    """Refused here and sent again to a second worker: the first one must not cancel it."""
    other = TokenCaptureStore(tmp_path / "store")
    fs.fail("sync", errno.EIO, times=-1)
    with pytest.raises(StoreUnavailableError):
        await faulty_store.begin_call("r0", "x")
    with pytest.raises(StoreUnavailableError):
        await faulty_store.open_intent(intent(attempt="a1"))
    await (await other.open_intent(intent(attempt="a1"))).wait_durable()
    fs.heal()
    await paid(faulty_store)
    assert list((await other.status("r1")).open_intents) == ["c1"]
    await other.close()


async def test_an_owed_cancel_names_its_attempt(faulty_store, fs, entry):
    """A cancel that the disk refused closes the intent that this process opened."""
    await faulty_store.begin_call("r1", "c1")
    fs.fail("write", errno.ENOSPC, times=-1)
    with pytest.raises(StoreUnavailableError):
        await faulty_store.cancel_call("r1", "c1")
    fs.heal()
    await paid(faulty_store)
    records = lines_of(faulty_store)
    (opened,) = [r for r in records if isinstance(r, Intent)]
    (cancel,) = [r for r in records if isinstance(r, Cancel)]
    assert opened.attempt
    assert cancel.attempt == opened.attempt
    assert cancel.call == "c1"


async def test_a_deleted_rollouts_cancel_spares_its_next_use(file_store, tmp_path, intent):
    """The id of a rollout that was deleted is used again: the old call's cancel closes nothing."""
    other = TokenCaptureStore(tmp_path / "store")
    await file_store.begin_call("r1", "c1")
    await other.delete("r1")
    await other.begin_call("r1", "c1")
    await file_store.cancel_call("r1", "c1")
    assert list((await other.status("r1")).open_intents) == ["c1"]
    await other.close()


async def test_postgres_owes_a_cancel_to_its_own_attempt(own_server, killable, intent):
    """A store that lost the database does not close the call of one that kept it."""
    holder = PostgresCaptureStore(killable)
    refused = PostgresCaptureStore(killable, retry_for_s=0.3)
    await holder.begin_call("r1", "c1")
    own_server.kill()
    with pytest.raises(StoreUnavailableError):
        await refused.open_intent(intent())
    own_server.start()
    await paid(refused)
    assert list((await holder.status("r1")).open_intents) == ["c1"]
    await holder.close()
    await refused.close()


async def test_a_remote_cancel_of_unknown_fate_spares_another_process(
    tmp_path, intent, monkeypatch
):
    """Two engines with one call id: the one that got no answer cancels its own attempt only."""
    monkeypatch.setattr("capture_server.stores.remote.BEFORE_DISPATCH_S", 0.3)
    store = TokenCaptureStore(tmp_path / "store")
    async with sidecar(store) as made:
        first, second = remote(made, tmp_path / "s1"), remote(made, tmp_path / "s2")
        await first.begin_call("r1", "c1")
        real = store.open_intent

        async def hang(asked):
            await asyncio.sleep(0.6)
            return await real(asked)

        monkeypatch.setattr(store, "open_intent", hang)
        with pytest.raises(StoreUnavailableError):
            await second.open_intent(intent())
        async with asyncio.timeout(20):
            while len(second._spill):
                await asyncio.sleep(0.02)
        assert list((await store.status("r1")).open_intents) == ["c1"]
        await first.close()
        await second.close()
    await store.close()


async def test_a_remote_intent_refused_by_a_failing_sync_does_not_dangle(
    tmp_path, faulty_store, fs, intent, monkeypatch
):
    """The sidecar answered 503 and may have the line: the client cancels its attempt."""
    monkeypatch.setattr("capture_server.stores.remote.BEFORE_DISPATCH_S", 0.5)
    async with sidecar(faulty_store) as made:
        client = remote(made, tmp_path / "spill")
        fs.fail("sync", errno.EIO, times=-1)
        with pytest.raises(StoreUnavailableError):
            await faulty_store.begin_call("r0", "x")
        with pytest.raises(StoreUnavailableError):
            await client.open_intent(intent())
        fs.heal()
        async with asyncio.timeout(20):
            while len(client._spill) or (await faulty_store.status("r1")).open_intents:
                await asyncio.sleep(0.02)
        assert reasons_of(await faulty_store.freeze("r1")) == []
        await client.close()


def test_attempts_are_forgotten_when_their_call_ends():
    """A second end of one call knows no attempt."""
    attempts = OpenAttempts()
    attempts.opened("r1", "c1", "a1")
    assert ("r1", "c1") in attempts
    assert attempts.closed("r1", "c1") == "a1"
    assert attempts.closed("r1", "c1") == ""
