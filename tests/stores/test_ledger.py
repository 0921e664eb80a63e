"""The ledger of external staging over every store: contract, faults, fences, processes."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from capture_server.staging.ledger import StoreLedger
from capture_server.staging.records import CallRecord, CaptureLedgerCommit, RolloutManifest
from capture_server.stores.file import TokenCaptureStore
from capture_server.stores.journal import LedgerRow, decode, encode
from capture_server.stores.lineage import FileLineageStore
from capture_server.stores.memory import MemoryCaptureStore
from middleware.errors import (
    CallIdConflictError,
    InvalidIdError,
    StoreUnavailableError,
    TokenCaptureFrozenError,
)
from middleware.lineage import InMemoryLineageStore
from middleware.protocols import CallIntent

USER = {"role": "user", "content": "q"}
MODES = {True: "text", False: "token_in"}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def conversation(*calls: str) -> list[dict[str, Any]]:
    """What an agent sends after these answers."""
    return [USER, *(item for call in calls for item in (said(call), USER))]


def commit(call: str, *before: str, rollout_id: str = "r1", **more: Any) -> CaptureLedgerCommit:
    """The row of a call that continues ``before``, root first."""
    root = not before
    values: dict[str, Any] = {
        "model_call_id": call, "parent_call_id": None if root else before[-1],
        "prev_len": 2 * len(before), "delta_len": 2, "cum_len": 2 * len(before) + 2,
        "weight_version": 1, "digest": "0" * 64, "extras_digest": "0" * 64,
        "staging_key": f"{rollout_id}/{call}", "mode": MODES[root],
        "chain_hash": f"{len(before):064x}", "cumulative_hash": "1" * 64,
        "response_id": f"resp-{call}", "admitted_at": 1.0 + len(before),
    }  # fmt: skip
    return CaptureLedgerCommit(
        rollout_id=rollout_id,
        record=CallRecord(**(values | more)),
        staging_chain=tuple(f"{rollout_id}/{earlier}" for earlier in before),
        request_items=conversation(*before),
        response_items=[said(call)],
    )


async def manifest(ledger: Any, rollout_id: str = "r1") -> RolloutManifest:
    return RolloutManifest.model_validate(await ledger.manifest(rollout_id))


async def calls(ledger: Any) -> list[str]:
    return [row.model_call_id for row in (await manifest(ledger)).records]


async def failures(ledger: Any, rollout_id: str = "r1") -> list[tuple[str, str]]:
    found = (await manifest(ledger, rollout_id)).failures
    return [(failure.model_call_id, failure.reason) for failure in found]


@pytest.fixture
def ledger(store: Any) -> StoreLedger:
    """Over memory, file and PostgreSQL."""
    return StoreLedger(store)


# --- contract ------------------------------------------------------------------------------------


async def test_rows_come_back_as_they_were_committed(ledger: StoreLedger) -> None:
    """In commit order, equal in every field; nothing of the conversation or of tokens."""
    commits = [commit("a"), commit("b", "a"), commit("c", "a", "b")]
    assert not await ledger.has_rows("r1")
    for one in commits:
        await ledger.record(one)
    assert await ledger.has_rows("r1")
    assert (await manifest(ledger)).records == [one.record for one in commits]
    assert await failures(ledger) == []


async def test_a_row_is_written_once(ledger: StoreLedger) -> None:
    """The same again is a no-op; other content is an error, the first stays, the rollout fails."""
    await ledger.record(commit("a"))
    await ledger.record(commit("a"))
    assert await failures(ledger) == []
    for other in (
        commit("a", weight_version=2),
        commit("a").model_copy(update={"response_items": [said("else")]}),
        commit("a").model_copy(update={"staging_chain": ("x",)}),
    ):
        with pytest.raises(CallIdConflictError):
            await ledger.record(other)
    assert (await manifest(ledger)).records == [commit("a").record]
    assert await failures(ledger) == [("a", "call_id_conflict")]


async def test_failures_are_idempotent_and_never_resolve(ledger: StoreLedger) -> None:
    """The first reason of a call stays in the manifest; no request continues it."""
    for reason in ("worker_capture_failed", "worker_capture_failed", "unresolved_parent"):
        await ledger.record_failure("r1", "a", reason)
    assert await failures(ledger) == [("a", "worker_capture_failed")]
    assert await ledger.has_rows("r1")
    found = await ledger.resolve("r1", conversation("a"))
    assert (found.status.value, found.reason) == ("unresolved", "no_match")


async def test_a_request_resolves_to_its_row(ledger: StoreLedger) -> None:
    """With its position, its chain hash, and the staging keys from the root on."""
    await ledger.record(commit("a"))
    await ledger.record(commit("b", "a"))
    assert (await ledger.resolve("r1", [USER])).status.value == "root"
    match = (await ledger.resolve("r1", conversation("a", "b"))).match
    assert match is not None
    assert (match.model_call_id, match.prev_len) == ("b", 4)
    assert match.staging_chain == ("r1/a", "r1/b")
    assert match.chain_hash == f"{1:064x}"
    assert (await ledger.resolve("r2", conversation("a"))).reason == "no_match"
    assert (await ledger.resolve("r1", conversation("a", "z"))).reason == "no_match"
    with pytest.raises(ValueError):
        await ledger.resolve("r1", [{"role": "user", "content": 5}])


async def test_two_different_calls_with_one_answer_are_ambiguous(ledger: StoreLedger) -> None:
    """Never guessed; identical sequences count as one."""
    twin = commit("a2").model_copy(update={"response_items": [said("a")]})
    await ledger.record(commit("a"))
    await ledger.record(twin)
    assert (await ledger.resolve("r1", conversation("a"))).match is not None
    other = commit("a3", cumulative_hash="2" * 64)
    await ledger.record(other.model_copy(update={"response_items": [said("a")]}))
    assert (await ledger.resolve("r1", conversation("a"))).reason == "ambiguous"


@pytest.mark.parametrize("own_key", [False, True])
async def test_chains_of_a_frameworks_own_are_kept(ledger: StoreLedger, own_key: bool) -> None:
    """Keys that are not those of the rows, with or without the call's own at the end."""
    chain = ("shard-1/x", "shard-2/y", *(("r1/a",) if own_key else ()))
    await ledger.record(commit("a").model_copy(update={"staging_chain": chain}))
    await ledger.record(
        commit("b", "a").model_copy(update={"staging_chain": ("shard-1/x", "shard-2/y", "r1/a")})
    )
    match = (await ledger.resolve("r1", conversation("a", "b"))).match
    assert match is not None
    assert match.staging_chain == ("shard-1/x", "shard-2/y", "r1/a", "r1/b")


async def test_rows_without_an_id_or_a_hash_become_failures(ledger: StoreLedger) -> None:
    """However they got there."""
    for call, field in (("a", "response_id"), ("b", "chain_hash"), ("c", "cumulative_hash")):
        record = CallRecord.model_construct(**{**dict(commit(call).record), field: None})
        await ledger.record(
            CaptureLedgerCommit.model_construct(
                rollout_id="r1", record=record, staging_chain=(), request_items=[USER],
                response_items=[said(call)],
            )
        )  # fmt: skip
    assert await calls(ledger) == []
    assert await failures(ledger) == [
        ("a", "ledger_row_missing_response_id"),
        ("b", "ledger_row_missing_chain_hash"),
        ("c", "ledger_row_missing_chain_hash"),
    ]


async def test_unhashable_items_are_refused(ledger: StoreLedger) -> None:
    """Nothing is stored of them."""
    with pytest.raises(ValueError):
        await ledger.record(commit("a").model_copy(update={"request_items": [{"content": 5}]}))
    assert not await ledger.has_rows("r1")


async def test_hostile_ids_never_reach_a_path(ledger: StoreLedger) -> None:
    """Rollout ids are checked before anything else."""
    with pytest.raises(InvalidIdError):
        await ledger.record(commit("a", rollout_id="../x"))
    with pytest.raises(InvalidIdError):
        await ledger.manifest("../x")


# --- custody: intents, fences, tombstones --------------------------------------------------------


async def test_a_row_closes_its_intent(ledger: StoreLedger, store: Any) -> None:
    """And a failure does; what neither closed is a failure once frozen."""
    for call in ("a", "b", "c"):
        await store.open_intent(CallIntent(rollout_id="r1", model_call_id=call))
    await ledger.record(commit("a"))
    await ledger.record_failure("r1", "b", "worker_capture_failed")
    status = await store.status("r1")
    assert (status.open_intents, status.calls) == (["c"], 1)
    assert status.resolutions == {"root": 1, "resolved": 0, "unresolved": 0}
    snapshot = await store.freeze("r1")
    assert (list(snapshot.entries), snapshot.incomplete) == ([], True)
    assert await failures(ledger) == [
        ("b", "worker_capture_failed"),
        ("c", "request_finished_without_staged_coordinates"),
    ]


async def test_whatever_masks_a_rollout_stands_in_its_manifest(
    ledger: StoreLedger, store: Any
) -> None:
    """A finalizer that reads nothing else must hear of it."""
    await ledger.record(commit("a"))
    await store.mark_incomplete("r1", "z", reason="unobserved_path")
    await store.mark_incomplete("r1", reason="store_failure")
    assert await failures(ledger) == [("z", "unobserved_path"), ("unknown", "store_failure")]


async def test_frozen_rollouts_take_no_rows_but_failures(ledger: StoreLedger, store: Any) -> None:
    """A late failure shows in the version of the snapshot."""
    await ledger.record(commit("a"))
    frozen = await store.freeze("r1")
    with pytest.raises(TokenCaptureFrozenError):
        await ledger.record(commit("b", "a"))
    await ledger.record(commit("a"))  # sent again: known
    await ledger.record_failure("r1", "b", "worker_capture_failed")
    assert (await store.snapshot("r1")).version > frozen.version
    assert not await store.drop("r1", snapshot_id=frozen.snapshot_id, version=frozen.version)
    assert await calls(ledger) == ["a"]


@pytest.mark.parametrize("frozen_first", [False, True])
async def test_retire_keeps_a_fence(ledger: StoreLedger, store: Any, frozen_first: bool) -> None:
    """Later rows and failures are discarded; after delete the id is free again."""
    await ledger.record(commit("a"))
    if frozen_first:
        await store.freeze("r1")
    await ledger.retire("r1")
    await ledger.retire("r1")
    await ledger.record(commit("b", "a"))
    await ledger.record_failure("r1", "c", "worker_capture_failed")
    assert (await store.status("r1")).state == "retired"
    assert not await ledger.has_rows("r1")
    assert (await calls(ledger), await failures(ledger)) == ([], [])
    await ledger.delete("r1")
    await ledger.record(commit("b"))
    assert await calls(ledger) == ["b"]


async def test_an_unknown_rollout_can_be_retired(ledger: StoreLedger) -> None:
    """A late writer then finds the fence."""
    await ledger.retire("r1")
    await ledger.record(commit("a"))
    assert await calls(ledger) == []


async def test_a_trainers_drop_retires_the_ledger(ledger: StoreLedger, store: Any) -> None:
    """The conditional way, with the snapshot it consumed."""
    await ledger.record(commit("a"))
    frozen = await store.freeze("r1")
    assert await store.drop("r1", snapshot_id=frozen.snapshot_id, version=frozen.version)
    assert await calls(ledger) == []


async def test_many_calls_at_once(ledger: StoreLedger) -> None:
    """Concurrent rows, repeats and failures of one rollout: each once, none lost."""
    commits = [commit(f"c{n}") for n in range(40)]
    await asyncio.gather(
        *(ledger.record(one) for one in commits * 2),
        *(ledger.record_failure("r1", f"f{n % 10}", "worker_capture_failed") for n in range(40)),
    )
    assert sorted(await calls(ledger)) == sorted(f"c{n}" for n in range(40))
    assert sorted(call for call, _ in await failures(ledger)) == sorted(f"f{n}" for n in range(10))


async def test_rows_race_a_freeze(ledger: StoreLedger, store: Any) -> None:
    """What was acknowledged is in the frozen ledger, what was refused is not."""
    kept: list[str] = []

    async def write(number: int) -> None:
        try:
            await ledger.record(commit(f"c{number}"))
        except TokenCaptureFrozenError:
            return
        kept.append(f"c{number}")

    writers = [asyncio.create_task(write(number)) for number in range(30)]
    await asyncio.sleep(0)
    await store.freeze("r1")
    await asyncio.gather(*writers)
    assert sorted(await calls(ledger)) == sorted(kept)


async def test_the_cost_of_a_row_does_not_grow(tmp_path: Path) -> None:
    """The hundredth row of a chain takes the bytes of the tenth, however long the conversation."""
    store = TokenCaptureStore(tmp_path)
    ledger = StoreLedger(store)
    sizes = []
    names = [f"c{number:03}" for number in range(100)]
    for number, name in enumerate(names):
        before = store.statistics().bytes_written
        await ledger.record(commit(name, *names[:number]))
        sizes.append(store.statistics().bytes_written - before)
    match = (await ledger.resolve("r1", conversation(*names))).match
    await store.close()
    assert sizes[99] - sizes[10] < 20
    assert match is not None
    assert match.staging_chain == tuple(f"r1/{name}" for name in names)


# --- the file store's faults ---------------------------------------------------------------------


@pytest.mark.parametrize("call", ["write", "sync"])
async def test_a_row_that_is_not_on_disk_is_not_acknowledged(
    faulty_store: TokenCaptureStore, fs: Any, call: str
) -> None:
    """EIO: an error now, a failure in the manifest, and masked when the disk is back."""
    ledger = StoreLedger(faulty_store)
    await ledger.record(commit("a"))
    fs.fail(call, errno.EIO, times=1)
    with pytest.raises(StoreUnavailableError):
        await ledger.record(commit("b", "a"))
    assert ("b", "store_failure") in await failures(ledger)
    fs.heal()
    await ledger.record(commit("c", "a"))
    assert ("b", "store_failure") in await failures(ledger)
    assert "c" in await calls(ledger)


async def test_a_short_write_leaves_no_half_row(faulty_store: TokenCaptureStore, fs: Any) -> None:
    """The disk is full in the middle of a line: neighbours stay readable."""
    ledger = StoreLedger(faulty_store)
    await ledger.record(commit("a"))
    fs.fail("write", errno.ENOSPC, times=1)
    fs.short_write = 100
    with pytest.raises(StoreUnavailableError):
        await ledger.record(commit("b", "a"))
    fs.heal()
    await ledger.record(commit("c", "a"))
    assert await calls(ledger) == ["a", "c"]


async def test_a_failure_that_is_not_on_disk_is_owed(
    faulty_store: TokenCaptureStore, fs: Any
) -> None:
    """It stands in the manifest at once and reaches the disk later."""
    ledger = StoreLedger(faulty_store)
    await ledger.record(commit("a"))
    fs.fail("write", errno.EIO, times=-1)
    with pytest.raises(StoreUnavailableError):
        await ledger.record_failure("r1", "b", "worker_capture_failed")
    assert await failures(ledger) == [("b", "worker_capture_failed")]
    fs.heal()
    assert await faulty_store.healthy() is None
    fresh = TokenCaptureStore(faulty_store.root)
    assert await failures(StoreLedger(fresh)) == [("b", "worker_capture_failed")]
    await fresh.close()


async def test_a_torn_row_was_never_there(tmp_path: Path) -> None:
    """The file cut within its last line: the row before it stands, the next one fits."""
    store = TokenCaptureStore(tmp_path)
    ledger = StoreLedger(store)
    await ledger.record(commit("a"))
    await ledger.record(commit("b", "a"))
    path = store.path_for("r1")
    await store.close()
    data = path.read_bytes()
    for cut in (1, 50, 400):
        path.write_bytes(data[:-cut])
        again = TokenCaptureStore(tmp_path)
        assert await calls(StoreLedger(again)) == ["a"]
        await StoreLedger(again).record(commit("b", "a"))
        assert await calls(StoreLedger(again)) == ["a", "b"]
        assert await failures(StoreLedger(again)) == []
        await again.close()


async def test_a_damaged_row_masks_its_rollout(tmp_path: Path) -> None:
    """A flipped byte in the middle: the row is gone, and the manifest says why."""
    store = TokenCaptureStore(tmp_path)
    ledger = StoreLedger(store)
    await ledger.record(commit("a"))
    await ledger.record(commit("b"))
    path = store.path_for("r1")
    await store.close()
    data = bytearray(path.read_bytes())
    at = data.index(b'"ledger_row"') + 40
    data[at] ^= 1
    path.write_bytes(data)
    again = TokenCaptureStore(tmp_path)
    assert await calls(StoreLedger(again)) == ["b"]
    assert await failures(StoreLedger(again)) == [("unknown", "corrupt_journal")]
    await again.close()


async def test_the_journals_line_is_plain_json(tmp_path: Path) -> None:
    """One line per row, decoded to what was written; no conversation in it."""
    store = TokenCaptureStore(tmp_path)
    await StoreLedger(store).record(commit("a"))
    lines = store.path_for("r1").read_bytes().splitlines()
    await store.close()
    row = decode(lines[1])
    assert isinstance(row, LedgerRow)
    assert CallRecord.model_validate(row.row) == commit("a").record
    assert encode(row) == lines[1] + b"\n"
    assert b'"content"' not in lines[1]


# --- several workers -----------------------------------------------------------------------------


@pytest.fixture(params=["file", "postgres"])
async def workers(request: pytest.FixtureRequest, tmp_path: Path):
    """Two stores on one medium, as two workers have them."""
    pair: list[Any]
    if request.param == "file":
        pair = [TokenCaptureStore(tmp_path / "store") for _ in range(2)]
    else:
        from capture_server.stores.postgres import PostgresCaptureStore

        database = request.getfixturevalue("database")
        pair = [PostgresCaptureStore(database) for _ in range(2)]
    yield pair
    for store in pair:
        await store.close()


async def test_every_worker_sees_a_row_at_once(workers: list[Any]) -> None:
    """What one recorded, the other resolves, lists and refuses to overwrite; retire too."""
    here, there = (StoreLedger(store) for store in workers)
    assert here.is_process_shared()
    names: list[str] = []
    for number in range(6):
        writer, reader = (here, there) if number % 2 else (there, here)
        await writer.record(commit(f"c{number}", *names))
        names.append(f"c{number}")
        match = (await reader.resolve("r1", conversation(*names))).match
        assert match is not None
        assert match.staging_chain == tuple(f"r1/{name}" for name in names)
        assert await calls(reader) == names
    with pytest.raises(CallIdConflictError):
        await there.record(commit("c5", weight_version=9))
    await here.retire("r1")
    await there.record(commit("late"))
    assert await calls(there) == []


_WRITER = """
import asyncio, sys
from tests.stores.test_ledger import commit
from capture_server.staging.ledger import StoreLedger
from capture_server.stores.file import TokenCaptureStore

async def main(root, name):
    ledger = StoreLedger(TokenCaptureStore(root))
    for number in range(10**9):
        await ledger.record(commit(f"{name}-{number}"))
        print(f"{name}-{number}", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_killed_workers_lose_no_acknowledged_row(tmp_path: Path) -> None:
    """kill -9 of two writers at any moment: every row they acknowledged is there, whole."""
    acknowledged: list[str] = []
    for run in range(3):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", _WRITER, str(tmp_path), f"w{run}{name}"],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            )
            for name in "ab"
        ]
        for writer in writers:
            assert writer.stdout is not None
            acknowledged += [writer.stdout.readline().strip() for _ in range(10 + run)]
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            rest = writer.communicate(timeout=10)[0]
            # A last line may be cut; what is whole was acknowledged.
            acknowledged += rest.split("\n")[:-1]
    store = TokenCaptureStore(tmp_path)
    found = await calls(StoreLedger(store))
    assert await failures(StoreLedger(store)) == []
    await store.close()
    assert set(acknowledged) <= set(found)
    assert len(found) == len(set(found))


# --- the seed's resolvers are ledgers too --------------------------------------------------------


async def test_the_file_lineage_store_is_a_ledger(tmp_path: Path) -> None:
    """Rows of one instance resolve in another, and in the store's own ledger."""
    one, other = FileLineageStore(tmp_path), FileLineageStore(tmp_path)
    assert not await one.has_rows("r1")
    await one.record(commit("a"))
    assert (await other.resolve("r1", conversation("a"))).match is not None
    await other.record(commit("b", "a"))
    match = (await one.resolve("r1", conversation("a", "b"))).match
    assert match is not None
    assert (match.staging_chain, match.prev_len) == (("r1/a", "r1/b"), 4)
    await one.record_failure("r1", "c", "worker_capture_failed")
    store = TokenCaptureStore(tmp_path)
    assert await other.manifest("r1") == await StoreLedger(store).manifest("r1")
    await other.retire("r1")
    assert (await one.resolve("r1", conversation("a"))).reason == "no_match"
    await one.delete("r1")
    assert not await other.has_rows("r1")
    for closing in (one, other, store):
        await closing.close()


async def test_both_ledgers_in_memory_agree() -> None:
    """The resolver's own rows and a store's give one manifest and one parent."""
    resolver, stored = InMemoryLineageStore(), StoreLedger(MemoryCaptureStore())
    for ledger in (resolver, stored):
        await ledger.record(commit("a"))
        await ledger.record(commit("b", "a"))
        await ledger.record_failure("r1", "c", "worker_capture_failed")
    assert await resolver.manifest("r1") == await stored.manifest("r1")
    items = conversation("a", "b")
    assert await resolver.resolve("r1", items) == await stored.resolve("r1", items)
