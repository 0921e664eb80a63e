"""One deliberately broken store per check of the kit: each breach is found, under its own name."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os

import pytest

from capture_server import conformance, conformance_checks
from capture_server.conformance import ConformanceError, run_conformance
from capture_server.conformance_processes import PROCESS_CHECKS
from capture_server.stores.lineage import MemoryLineageStore
from capture_server.stores.memory import MemoryCaptureStore
from middleware.errors import (
    CallIdConflictError,
    InvalidIdError,
    StoreError,
    TokenCaptureFrozenError,
)
from middleware.records import ParentResolutionStatus


class Broken(MemoryCaptureStore):
    """A whole store; each subclass breaks one promise."""

    def resolver(self):
        return MemoryLineageStore(self)

    async def retire_many(self, snapshots):
        return {r: await self.drop(r, snapshot_id=s, version=v) for r, (s, v) in snapshots.items()}

    async def delete_many(self, rollout_ids):
        return {rollout_id: await self.delete(rollout_id) for rollout_id in rollout_ids}


class LosesPuts(Broken):
    async def put(self, entry):
        pass


class StoresTwice(Broken):
    """Appends a repeated record once more."""

    def __init__(self):
        super().__init__()
        self.repeated = []

    async def put(self, entry):
        before = (await self.status(entry.rollout_id)).version
        await super().put(entry)
        if (await self.status(entry.rollout_id)).version == before:
            self.repeated.append(entry)

    async def freeze(self, rollout_id):
        snapshot = await super().freeze(rollout_id)
        more = [entry for entry in self.repeated if entry.rollout_id == rollout_id]
        return dataclasses.replace(snapshot, entries=[*snapshot.entries, *more])


class KeepsTheFirstSilently(Broken):
    """Acknowledges a second payload under one id."""

    async def put(self, entry):
        with contextlib.suppress(CallIdConflictError):
            await super().put(entry)


class FreezesAnew(Broken):
    """Each freeze is another snapshot."""

    num_freezes = 0

    async def freeze(self, rollout_id):
        self.num_freezes += 1
        snapshot = await super().freeze(rollout_id)
        return dataclasses.replace(snapshot, snapshot_id=f"s{self.num_freezes}")


class SwallowsLatePuts(Broken):
    """Acknowledges a record behind the fence and forgets it."""

    async def put(self, entry):
        with contextlib.suppress(TokenCaptureFrozenError):
            await super().put(entry)


class ForgetsMarks(Broken):
    async def mark_incomplete(self, rollout_id, model_call_id="", reason="", detail=""):
        pass


class ForgetsMarksWithoutACall(Broken):
    async def mark_incomplete(self, rollout_id, model_call_id="", reason="", detail=""):
        if model_call_id:
            await super().mark_incomplete(rollout_id, model_call_id, reason, detail)


class RetiresByVersionAlone(Broken):
    """Whatever snapshot is named."""

    async def drop(self, rollout_id, *, snapshot_id, version):
        frozen = await self.freeze(rollout_id)
        return await super().drop(rollout_id, snapshot_id=frozen.snapshot_id, version=version)


class TakesAnyId(Broken):
    """As if the id were no path to anywhere."""

    async def put(self, entry):
        with contextlib.suppress(InvalidIdError):
            await super().put(entry)


class FoldsCase(Broken):
    """As a store on a file system that does."""

    async def put(self, entry):
        await super().put(entry.model_copy(update={"rollout_id": entry.rollout_id.lower()}))

    async def freeze(self, rollout_id):
        return dataclasses.replace(await super().freeze(rollout_id.lower()), rollout_id=rollout_id)


class RefusesBigRecords(Broken):
    async def put(self, entry):
        if len(entry.prompt_token_ids) > 500:
            raise StoreError("too big")
        await super().put(entry)


class ChecksThenActs(Broken):
    """Looks at the fence, then writes without looking again."""

    async def put(self, entry):
        if (await self.status(entry.rollout_id)).state == "frozen":
            raise TokenCaptureFrozenError("frozen")
        for _ in range(5):
            await asyncio.sleep(0)
        with contextlib.suppress(TokenCaptureFrozenError):
            await super().put(entry)

    async def freeze(self, rollout_id):
        for _ in range(3):
            await asyncio.sleep(0)
        return await super().freeze(rollout_id)


class ForgetsIntents(Broken):
    async def begin_call(self, rollout_id, model_call_id):
        pass


class NeverCancels(Broken):
    async def cancel_call(self, rollout_id, model_call_id, reason=""):
        pass


class ReusesCallIds(Broken):
    async def begin_call(self, rollout_id, model_call_id):
        with contextlib.suppress(CallIdConflictError):
            await super().begin_call(rollout_id, model_call_id)


class EveryCallIsTheFirst(Broken):
    async def open_intent(self, intent):
        return dataclasses.replace(await super().open_intent(intent), first_call=True)


class LeavesTheIntentOpen(Broken):
    """Stores the choices, and forgets what they belong to."""

    async def put_choices(self, entries, intent_id):
        for entry in entries:
            await self.put(entry)


class TheLastNoteWins(Broken):
    """Also when it takes a delivery back."""

    async def note_delivery(self, rollout_id, model_call_id, notes):
        await super().note_delivery(rollout_id, model_call_id, notes)
        rollout = self._rollouts[rollout_id]
        if "delivered" in notes:
            rollout.fold.notes[model_call_id]["delivered"] = notes["delivered"]


class FencesNothing(Broken):
    """Names the open calls and lets new ones in."""

    async def fence(self, rollout_id):
        return (await self.status(rollout_id)).open_intents


class DeletesNothing(Broken):
    async def delete(self, rollout_id):
        return False


class HidesOpenCalls(Broken):
    """Its freezes see them."""

    async def status(self, rollout_id):
        return dataclasses.replace(await super().status(rollout_id), open_intents=())


class ListsEveryState(Broken):
    async def list_rollouts(self, *, state=None, prefix="", limit=100, cursor=""):
        return await super().list_rollouts(prefix=prefix, limit=limit, cursor=cursor)


class SweepsWhateverItsAge(Broken):
    async def sweep_retired(self, older_than_seconds):
        return await super().sweep_retired(-1)


class RetiresStaleOnesInBatches(Broken):
    """Asks for the current state instead of comparing with the one that was consumed."""

    async def retire_many(self, snapshots):
        now = [await self.freeze(rollout_id) for rollout_id in snapshots]
        return await super().retire_many({s.rollout_id: (s.snapshot_id, s.version) for s in now})


class Guesses(Broken):
    """Takes the only call there is for the parent of whatever is asked."""

    def resolver(self):
        class Guessing(MemoryLineageStore):
            async def resolve(self, rollout_id, request_items):
                found = await super().resolve(rollout_id, request_items)
                if found.status is ParentResolutionStatus.UNRESOLVED:
                    return await self.resolve_call_id(rollout_id, "c1")
                return found

        return Guessing(self)


class TakesSuffixesForPrompts(Broken):
    """Forgets that a record holds a delta."""

    async def put(self, entry):
        await super().put(entry.model_copy(update={"prompt_is_delta": False}))


BROKEN = {
    "put_and_read": LosesPuts,
    "idempotent_put": StoresTwice,
    "conflicting_put": KeepsTheFirstSilently,
    "freeze_idempotent": FreezesAnew,
    "late_put": SwallowsLatePuts,
    "marks": ForgetsMarks,
    "marks_without_a_call": ForgetsMarksWithoutACall,
    "drop": RetiresByVersionAlone,
    "hostile_ids": TakesAnyId,
    "similar_ids": FoldsCase,
    "big_entry": RefusesBigRecords,
    "put_freeze_race": ChecksThenActs,
    "intents": ForgetsIntents,
    "cancelled_intents": NeverCancels,
    "reused_call_ids": ReusesCallIds,
    "first_calls": EveryCallIsTheFirst,
    "choices": LeavesTheIntentOpen,
    "notes": TheLastNoteWins,
    "fence": FencesNothing,
    "delete": DeletesNothing,
    "status": HidesOpenCalls,
    "listing": ListsEveryState,
    "sweep": SweepsWhateverItsAge,
    "batches": RetiresStaleOnesInBatches,
    "lineage": Guesses,
    "delta_round_trip": TakesSuffixesForPrompts,
}


@pytest.fixture(autouse=True)
def small_big_entry(monkeypatch):
    """What a big record costs is tested elsewhere."""
    monkeypatch.setattr(conformance_checks, "BIG_TOKENS", 1000)


def names_of_all_checks():
    optional = [check for _, check in conformance_checks.OPTIONAL]
    checks = [*conformance_checks.CORE, *optional, *conformance_checks.LINEAGE]
    return [check.__name__.removeprefix("_") for check in checks]


def test_every_check_has_its_broken_store():
    """A new check cannot come without a store that fails it."""
    assert sorted(BROKEN) == sorted(names_of_all_checks())


@pytest.mark.parametrize("check", BROKEN)
async def test_the_breach_is_found_under_its_name(check):
    """Checks before it pass, so each broken store breaks nothing else first."""
    store = BROKEN[check]()
    with pytest.raises(ConformanceError) as caught:
        await run_conformance(lambda: store, lambda: store, store.resolver)

    assert caught.value.check_name == check
    assert caught.value.detail


async def test_the_unbroken_base_passes():
    """What is found above is the breach, not the base."""
    store = Broken()
    passed = await run_conformance(lambda: store, lambda: store, store.resolver)

    assert passed == names_of_all_checks()


def test_a_store_of_one_process_is_found_by_another(tmp_path, monkeypatch, capsys):
    """It claims to be shared, and is, in this process: only a fresh one sees that it is not."""
    (tmp_path / "claims_to_be_shared.py").write_text(
        "from capture_server.stores.lineage import MemoryLineageStore\n"
        "from capture_server.stores.memory import MemoryCaptureStore\n"
        "class Store(MemoryCaptureStore):\n"
        "    def is_process_shared(self): return True\n"
        "    def open_resolver(self): return MemoryLineageStore(self)\n"
        "    async def close(self): pass\n"
        "only = Store()\n"
        "def opened(): return only\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    assert conformance.main(["--store", "claims_to_be_shared:opened"]) == 1
    assert capsys.readouterr().err.startswith("FAIL fresh_process: another process sees b''")


LATE_PUTS_ARE_SWALLOWED = """
import contextlib, os, threading
from pathlib import Path
from capture_server.stores.file import TokenCaptureStore
from middleware.errors import TokenCaptureFrozenError

def is_elsewhere():
    return {where}

class Store(TokenCaptureStore):
    async def put(self, entry):
        with contextlib.suppress(*[TokenCaptureFrozenError] * is_elsewhere()):
            await super().put(entry)

def opened():
    return Store(Path({root!r}))
"""


@pytest.mark.parametrize(
    ("check", "where"),
    [
        ("race_of_threads", "threading.current_thread() is not threading.main_thread()"),
        ("race_of_processes", "os.getpid() != {pid}"),
    ],
    ids=["threads", "processes"],
)
async def test_a_fence_that_does_not_hold_elsewhere_is_found(check, where, tmp_path, monkeypatch):
    """Each breach fails its own check and passes the other two."""
    text = LATE_PUTS_ARE_SWALLOWED.format(
        where=where.format(pid=os.getpid()), root=str(tmp_path / "store")
    )
    (tmp_path / f"swallows_{check}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    failed = []
    for name, run in PROCESS_CHECKS:
        try:
            await run(f"swallows_{check}:opened")
        except ConformanceError as exc:
            failed.append((name, exc.check_name))

    assert failed == [(check, check)]
