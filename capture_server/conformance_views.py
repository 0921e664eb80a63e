"""The checks of what operators and trainers look at and clear: status, lists, tombstones, batches.

Each takes a ``Kit``; see ``conformance_checks``. Invariant: no check removes anything of a rollout
that is not its own, so that the kit may run on a store in use.
"""

from __future__ import annotations

from typing import Final

from capture_server.conformance_kit import Kit, make_entry

_OLDER_THAN_ANY_S: Final = 1e9  # 31 years: no tombstone of anybody is that old
_NUM_LISTED: Final = 5


async def _status(kit: Kit) -> None:
    """The status says at every step what a freeze would say."""
    sink, rollout = kit.sink(), kit.rollout()

    async def state() -> str:
        return str((await kit.sink().status(rollout)).state)

    kit.require(await state() == "unknown", "a rollout that nobody wrote to is known")
    await sink.begin_call(rollout, "c1")
    await sink.begin_call(rollout, "c2")
    await sink.put(make_entry(rollout, "c1"))
    seen = await kit.sink().status(rollout)
    counts = (seen.calls, list(seen.open_intents), seen.prompt_tokens, seen.generated_tokens)
    kit.require(seen.state == "open", f"an open rollout is called {seen.state}")
    kit.require(counts == (1, ["c2"], 8, 3), f"calls, open intents or tokens are wrong: {counts}")
    await sink.mark_incomplete(rollout, "c2")
    kit.require((await kit.sink().status(rollout)).incomplete, "a marked rollout is called whole")
    frozen, seen = await kit.source().freeze(rollout), await kit.sink().status(rollout)
    named = (seen.state, seen.snapshot_id, seen.version, seen.incomplete)
    expected = ("frozen", frozen.snapshot_id, frozen.version, True)
    kit.require(named == expected, f"the status {named} is not the snapshot's {expected}")
    await sink.drop(rollout, snapshot_id=frozen.snapshot_id, version=frozen.version)
    kit.require(await state() == "retired", "a retired rollout is called something else")


async def _listing(kit: Kit) -> None:
    """Pages show every rollout once, in id order, and none of another prefix or state."""
    sink, prefix = kit.sink(), kit.rollout(".")
    rollouts = [f"{prefix}{number}" for number in range(_NUM_LISTED)]
    for rollout in [*rollouts, kit.rollout("-other")]:
        await sink.put(make_entry(rollout, "c1"))
    await kit.source().freeze(rollouts[1])

    async def listed(state: str | None) -> list[str]:
        found: list[str] = []
        cursor: str | None = ""
        while cursor is not None:
            page, cursor = await kit.sink().list_rollouts(
                state=state, prefix=prefix, limit=2, cursor=cursor
            )
            found += [row.rollout_id for row in page]
            kit.require(len(found) <= _NUM_LISTED, "the pages do not end or repeat themselves")
        return found

    found = await listed(None)
    kit.require(found == rollouts, f"{found} are listed, not {rollouts}")
    found = await listed("frozen")
    kit.require(found == [rollouts[1]], f"listed as frozen: {found}, not {rollouts[1]!r} alone")


async def _sweep(kit: Kit) -> None:
    """A sweep leaves the tombstones that are younger than it was told."""
    sink, rollout = kit.sink(), kit.rollout()
    await sink.put(make_entry(rollout, "c1"))
    frozen = await kit.source().freeze(rollout)
    await sink.drop(rollout, snapshot_id=frozen.snapshot_id, version=frozen.version)
    await sink.sweep_retired(_OLDER_THAN_ANY_S)
    failed = await kit.refused(kit.sink().put(make_entry(rollout, "late")))
    kit.require(failed, "a sweep of old tombstones removed a young one")


async def _batches(kit: Kit) -> None:
    """A batch does to each rollout what the single call does, and says so for each."""
    sink = kit.sink()
    current, stale, gone = (kit.rollout(f".{name}") for name in ("current", "stale", "gone"))
    snapshots = {}
    for rollout in (current, stale, gone):
        await sink.put(make_entry(rollout, "c1"))
        frozen = await kit.source().freeze(rollout)
        snapshots[rollout] = (frozen.snapshot_id, frozen.version)
    await sink.mark_incomplete(stale, "c1")
    deleted = await sink.delete_many([gone])
    kit.require(deleted == {gone: True}, f"delete_many says {deleted}")
    named = {rollout: snapshots[rollout] for rollout in (current, stale)}
    retired = await sink.retire_many(named)
    kit.require(retired == {current: True, stale: False}, f"retire_many says {retired}")
    kept = len((await kit.source().freeze(stale)).entries)
    kit.require(kept == 1, "a stale snapshot was retired by a batch")
    failed = await kit.refused(kit.sink().put(make_entry(current, "late")))
    kit.require(failed, "a batch left no fence behind a retired rollout")
    empty = not (await kit.source().freeze(gone)).entries
    kit.require(empty, "a batch did not delete")
