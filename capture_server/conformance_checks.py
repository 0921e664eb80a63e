"""The checks of the conformance kit: one function per promise of the store contract.

Each takes a ``Kit`` and raises ``ConformanceError`` through ``kit.require``. Its docstring is the
promise. Invariant: a check touches only rollouts whose ids ``kit.rollout`` gave it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from capture_server.conformance_kit import Kit, make_entry
from capture_server.conformance_views import _batches, _listing, _status, _sweep
from middleware.errors import CallIdConflictError, InvalidIdError, TokenCaptureError
from middleware.lineage import stamp_continuation
from middleware.protocols import (
    CallIntent,
    TokenCaptureSnapshot,
)
from middleware.records import (
    ParentResolutionStatus,
    TokenEntry,
    TokenIds,
    canonical_bytes,
    stamp_lineage,
)

Check = Callable[[Kit], Awaitable[None]]

HOSTILE_IDS: Final = (
    "", ".", "..", "../x", "a/b", "a\\b", "%2e%2e%2fx", "a\x00b", "a\n", " a", ".hidden", "-a",
    "é", "a b", "x" * 201, "r1:s", "a+b",
)  # fmt: skip
_RACERS: Final = 16
BIG_TOKENS: Final = 2_500_000  # 10 MB of int32


def _payloads(entries: Sequence[TokenEntry]) -> list[bytes]:
    return sorted(map(canonical_bytes, entries))


# --- what every store must do ----------------------------------------------------------------


async def _put_and_read(kit: Kit) -> None:
    """Every record comes back from another handle, exactly."""
    sink, rollout = kit.sink(), kit.rollout()
    entries = [make_entry(rollout, f"c{i}", i) for i in range(3)]
    for entry in entries:
        await sink.put(entry)
    snapshot = await kit.source().freeze(rollout)
    kit.require(snapshot.rollout_id == rollout, "the snapshot names another rollout")
    kit.require(_payloads(snapshot.entries) == _payloads(entries), "records changed or are missing")
    kit.require(not snapshot.incomplete, "a whole rollout is called incomplete")


async def _idempotent_put(kit: Kit) -> None:
    """The same record again, from any handle, changes nothing."""
    rollout = kit.rollout()
    for _ in range(3):
        await kit.sink().put(make_entry(rollout, "c1"))
    snapshot = await kit.source().freeze(rollout)
    kit.require(len(snapshot.entries) == 1, f"{len(snapshot.entries)} copies of one call id")
    kit.require(not snapshot.incomplete, "a repeated put made the rollout incomplete")


async def _conflicting_put(kit: Kit) -> None:
    """Another payload under a used id fails and masks the rollout."""
    sink, rollout = kit.sink(), kit.rollout()
    await sink.put(make_entry(rollout, "c1", 1))
    failed = await kit.refused(kit.sink().put(make_entry(rollout, "c1", 2)))
    kit.require(failed, "a second payload under one call id was accepted")
    snapshot = await kit.source().freeze(rollout)
    kit.require(snapshot.incomplete, "conflicting payloads did not mask the rollout")


async def _freeze_idempotent(kit: Kit) -> None:
    """Two freezes name one snapshot; an unknown rollout is fenced, too."""
    rollout = kit.rollout()
    first, second = await kit.source().freeze(rollout), await kit.source().freeze(rollout)
    kit.require(not first.entries, "an unknown rollout has records")
    same = (first.snapshot_id, first.version) == (second.snapshot_id, second.version)
    kit.require(same, "freezing twice gave two snapshots")
    kit.require(bool(first.snapshot_id), "the snapshot has no id")


async def _late_put(kit: Kit) -> None:
    """A put after freeze fails, or shows in the version so that retiring fails."""
    sink, source, rollout = kit.sink(), kit.source(), kit.rollout()
    await sink.put(make_entry(rollout, "c1"))
    frozen = await source.freeze(rollout)
    failed = await kit.refused(sink.put(make_entry(rollout, "late")))
    after = await source.freeze(rollout)
    if failed:
        kit.require(after.version == frozen.version, "a refused put changed the version")
        kit.require(not after.incomplete, "a late put masked a frozen rollout")
        kit.require(len(after.entries) == 1, "a refused put is in the snapshot")
    else:
        kit.require(after.version != frozen.version, "a late put succeeded without a trace")


async def _marks(kit: Kit) -> None:
    """A mark masks, also on an unknown rollout and after freeze, where it moves the version."""
    sink, source, rollout = kit.sink(), kit.source(), kit.rollout()
    await kit.sink().mark_incomplete(kit.rollout(".unknown"), "c1")
    kit.require((await source.freeze(kit.rollout(".unknown"))).incomplete, "a mark was lost")
    await sink.put(make_entry(rollout, "c1"))
    frozen = await source.freeze(rollout)
    await sink.mark_incomplete(rollout, "c1")
    after = await source.freeze(rollout)
    kit.require(after.incomplete, "a mark after freeze was lost")
    kit.require(after.version != frozen.version, "a mark after freeze did not move the version")
    stale = await source.drop(rollout, snapshot_id=frozen.snapshot_id, version=frozen.version)
    kit.require(not stale, "a stale snapshot could be retired")


async def _marks_without_a_call(kit: Kit) -> None:
    """A mark that names no call masks, also after freeze, where it moves the version."""
    sink, source, rollout = kit.sink(), kit.source(), kit.rollout()
    await sink.put(make_entry(rollout, "c1"))
    frozen = await source.freeze(rollout)
    await kit.sink().mark_incomplete(rollout)
    after = await source.freeze(rollout)
    kit.require(after.incomplete, "a mark without a call was lost after freeze")
    kit.require(after.version != frozen.version, "the mark did not move the version")


async def _drop(kit: Kit) -> None:
    """Only the exact frozen state can be retired; the fence outlives it."""
    sink, source, rollout = kit.sink(), kit.source(), kit.rollout()
    await sink.put(make_entry(rollout, "c1"))
    frozen = await source.freeze(rollout)
    name, version = frozen.snapshot_id, frozen.version
    wrong = await source.drop(rollout, snapshot_id=name + "x", version=version)
    kit.require(not wrong, "another snapshot's id was accepted")
    wrong = await source.drop(rollout, snapshot_id=name, version=version + 1)
    kit.require(not wrong, "another version was accepted")
    kit.require(len((await source.freeze(rollout)).entries) == 1, "a failed drop removed records")
    dropped = await kit.source().drop(rollout, snapshot_id=name, version=version)
    kit.require(dropped, "the consumed snapshot could not be retired")
    failed = await kit.refused(kit.sink().put(make_entry(rollout, "late")))
    kit.require(failed, "a late writer found no fence behind a retired rollout")


async def _hostile_ids(kit: Kit) -> None:
    """Ids that break the rule are refused, as rollout and as call."""
    sink, source = kit.sink(), kit.source()
    for hostile in HOSTILE_IDS:
        entry = make_entry("r", "c")
        bad_rollout = entry.model_copy(update={"rollout_id": hostile})
        bad_call = make_entry(kit.rollout(), "c").model_copy(update={"model_call_id": hostile})
        attempts = ((sink.put, bad_rollout), (sink.put, bad_call), (source.freeze, hostile))
        for attempt, argument in attempts:
            failed = await kit.refused(attempt(argument), (InvalidIdError, ValueError))
            kit.require(failed, f"id {hostile!r} was accepted")


async def _similar_ids(kit: Kit) -> None:
    """Ids that differ in case, by a suffix, or at their far end never share records."""
    base = kit.rollout()
    long = (base + "x" * 200)[:199]
    ids = [base, base.upper(), base + ".tokens", base + "_a", base + "-a", long + "a", long + "b"]
    sink, source = kit.sink(), kit.source()
    for index, rollout in enumerate(ids):
        await sink.put(make_entry(rollout, "c1", index))
    for index, rollout in enumerate(ids):
        entries = (await source.freeze(rollout)).entries
        same = _payloads(entries) == [canonical_bytes(make_entry(rollout, "c1", index))]
        kit.require(same, f"rollout {rollout!r} does not hold exactly its own record")


async def _big_entry(kit: Kit) -> None:
    """A record of 10 MB is stored like any other."""
    entry = make_entry(kit.rollout(), "c1", prompt=BIG_TOKENS)
    await kit.sink().put(entry)
    snapshot = await kit.source().freeze(kit.rollout())
    kit.require(_payloads(snapshot.entries) == [canonical_bytes(entry)], "a big record changed")


async def _put_freeze_race(kit: Kit) -> None:
    """Each put that races a freeze is in the snapshot or was refused (or moved the version)."""
    rollout = kit.rollout()
    calls = [f"c{i}" for i in range(_RACERS)]
    sinks = [kit.sink() for _ in range(4)]

    async def racer(index: int) -> bool:
        await asyncio.sleep(0)
        return not await kit.refused(
            sinks[index % 4].put(make_entry(rollout, calls[index], index)), TokenCaptureError
        )

    racers = [asyncio.create_task(racer(i)) for i in range(_RACERS)]
    frozen: TokenCaptureSnapshot = await kit.source().freeze(rollout)
    acknowledged = {c for c, ok in zip(calls, await asyncio.gather(*racers), strict=True) if ok}
    kept = {entry.model_call_id for entry in frozen.entries}
    after = await kit.source().freeze(rollout)
    moved = after.version != frozen.version
    kit.require(acknowledged <= kept or moved, "an acknowledged put is in no snapshot")
    kit.require(kept <= acknowledged, "a refused put is in the snapshot")


# --- optional methods ------------------------------------------------------------------------


async def _intents(kit: Kit) -> None:
    """An intent without a record dangles at freeze; a record closes it."""
    sink, source = kit.sink(), kit.source()
    closed, dangling = kit.rollout(".closed"), kit.rollout(".dangling")
    await sink.begin_call(closed, "c1")
    await sink.put(make_entry(closed, "c1"))
    kit.require(not (await source.freeze(closed)).incomplete, "a record did not close its intent")
    await sink.begin_call(dangling, "c1")
    kit.require((await source.freeze(dangling)).incomplete, "a lost call was not seen")
    late = await kit.refused(kit.sink().begin_call(dangling, "c2"), TokenCaptureError)
    kit.require(late, "a call could begin on a frozen rollout")


async def _cancelled_intents(kit: Kit) -> None:
    """A cancelled intent does not dangle, from whichever handle it was cancelled."""
    rollout = kit.rollout()
    await kit.sink().begin_call(rollout, "c1")
    await kit.sink().cancel_call(rollout, "c1", "refused")
    await kit.sink().cancel_call(rollout, "never-begun", "refused")
    snapshot = await kit.source().freeze(rollout)
    kit.require(not snapshot.incomplete, "a cancelled call masked the rollout")
    kit.require(not snapshot.entries, "a cancelled call left a record")


async def _reused_call_ids(kit: Kit) -> None:
    """A call id is good for one call."""
    sink, rollout = kit.sink(), kit.rollout()
    await sink.begin_call(rollout, "c1")
    again = await kit.refused(kit.sink().begin_call(rollout, "c1"), CallIdConflictError)
    kit.require(again, "an open call's id was given out again")
    await sink.put(make_entry(rollout, "c2"))
    again = await kit.refused(kit.sink().begin_call(rollout, "c2"), CallIdConflictError)
    kit.require(again, "a stored call's id was given out again")


async def _first_calls(kit: Kit) -> None:
    """``first_call`` holds until a call with another body is held."""
    sink, rollout = kit.sink(), kit.rollout()

    async def first(call: str, digest: str) -> bool:
        intent = CallIntent(rollout_id=rollout, model_call_id=call, request_digest=digest)
        ticket = await sink.open_intent(intent)
        await ticket.wait_durable()
        return bool(ticket.first_call)

    kit.require(await first("c1", "other"), "the first call is not called first")
    await sink.cancel_call(rollout, "c1", "refused")
    kit.require(await first("c2", "body"), "a cancelled call still counts")
    kit.require(await first("c3", "body"), "a retry of the first call is not called first")
    kit.require(not await first("c4", "another"), "a second call is called first")


async def _choices(kit: Kit) -> None:
    """The choices of one request are stored together and close its one intent."""
    sink, rollout = kit.sink(), kit.rollout()
    await sink.begin_call(rollout, "c1")
    choices = [make_entry(rollout, f"c1.{i}", i) for i in range(3)]
    await sink.put_choices(choices, "c1")
    await sink.put_choices(choices, "c1")
    snapshot = await kit.source().freeze(rollout)
    kit.require(_payloads(snapshot.entries) == _payloads(choices), "choices are missing or doubled")
    kit.require(not snapshot.incomplete, "the choices did not close their intent")


async def _notes(kit: Kit) -> None:
    """Notes are merged when read, true wins, and they move no version."""
    sink, rollout = kit.sink(), kit.rollout()
    await sink.put(make_entry(rollout, "c1"))
    for notes in ({"delivered": True, "sink_ms": 2.0}, {"delivered": False}):
        await sink.note_delivery(rollout, "c1", notes)
    frozen = await kit.source().freeze(rollout)
    await sink.note_delivery(rollout, "c1", {"sink_ms": 9.0})
    after = await kit.source().freeze(rollout)
    entry = after.entries[0]
    noted = (entry.delivered, (entry.timings or {}).get("sink_ms"))
    kit.require(noted == (True, 2.0), f"notes were merged wrongly: {noted}")
    kit.require(after.version == frozen.version, "a note moved the version of a frozen rollout")


async def _fence(kit: Kit) -> None:
    """A fenced rollout takes records of open calls but no new calls."""
    sink, rollout = kit.sink(), kit.rollout()
    await sink.begin_call(rollout, "c1")
    kit.require(list(await kit.sink().fence(rollout)) == ["c1"], "the open intent is not named")
    late = await kit.refused(sink.begin_call(rollout, "c2"), TokenCaptureError)
    kit.require(late, "a fenced rollout took a new call")
    await sink.put(make_entry(rollout, "c1"))
    kit.require(list(await kit.sink().fence(rollout)) == [], "a closed intent is still named")
    kit.require(not (await kit.source().freeze(rollout)).incomplete, "an open call was lost")


async def _delete(kit: Kit) -> None:
    """A deleted rollout's id can be used again and knows nothing of the past."""
    sink, source, rollout = kit.sink(), kit.source(), kit.rollout()
    await sink.put(make_entry(rollout, "c1"))
    await source.freeze(rollout)
    await sink.delete(rollout)
    await kit.sink().put(make_entry(rollout, "c1", 7))
    entries = (await kit.source().freeze(rollout)).entries
    kept = _payloads(entries) == [canonical_bytes(make_entry(rollout, "c1", 7))]
    kit.require(kept, "two attempts were mixed")


# --- lineage ---------------------------------------------------------------------------------


def _turns(rollout: str) -> tuple[list[dict[str, Any]], TokenEntry, list[dict[str, Any]]]:
    """A first request, its record, and the request that continues it."""
    first = [{"role": "user", "content": "What is 2 + 2?"}]
    entry = make_entry(rollout, "c1", 4)
    stamp_lineage(entry, None, parent_resolution=ParentResolutionStatus.ROOT)
    entry = stamp_continuation(entry, first)
    continued = [*first, *entry.output_items, {"role": "user", "content": "And 3 + 3?"}]
    return first, entry, continued


async def _lineage(kit: Kit) -> None:
    """After ``put`` any resolver proves the parent; a rewritten history proves none."""
    sink, early, rollout = kit.sink(), kit.resolver(), kit.rollout()
    first, entry, continued = _turns(rollout)
    root = await early.resolve(rollout, first)
    kit.require(root.status is ParentResolutionStatus.ROOT, "a first request is no root")
    await sink.put(entry)
    for resolver in (early, kit.resolver()):
        found = await resolver.resolve(rollout, continued)
        resolved = found.match is not None and found.match.model_call_id == "c1"
        kit.require(resolved, f"the parent was not found ({found.status.value} {found.reason})")
        assert found.match is not None
        tokens = [*entry.prompt_token_ids, *entry.generation_token_ids]
        kit.require(
            list(found.match.cumulative_token_ids) == tokens, "the parent's tokens are wrong"
        )
        rewritten = [{"role": "user", "content": "What is 1 + 1?"}, *continued[1:]]
        wrong = await resolver.resolve(rollout, rewritten)
        kit.require(wrong.match is None, "a rewritten history resolved to the old parent")
        elsewhere = await resolver.resolve(kit.rollout(".other"), continued)
        kit.require(elsewhere.match is None, "a parent was found in another rollout")


async def _delta_round_trip(kit: Kit) -> None:
    """A delta record comes back as it was, and its full tokens through the resolver."""
    sink, rollout = kit.sink(), kit.rollout()
    _, parent, request = _turns(rollout)
    child = make_entry(rollout, "c2", 9)
    child.prompt_is_delta = True
    cumulative = TokenIds.concat(
        parent.prompt_token_ids, parent.generation_token_ids,
        child.prompt_token_ids, child.generation_token_ids,
    )  # fmt: skip
    child.parent_call_id, child.parent_resolution = "c1", ParentResolutionStatus.RESOLVED
    stamp_lineage(child, "c1", cumulative=cumulative)
    child = stamp_continuation(child, request)
    for entry in (parent, child):
        await sink.put(entry)
    third = [*request, *child.output_items, {"role": "user", "content": "go on"}]
    found = await kit.resolver().resolve(rollout, third)
    whole = found.match is not None and found.match.cumulative_token_ids == cumulative
    kit.require(whole, "the full tokens of a delta record were not rebuilt")
    snapshot = await kit.source().freeze(rollout)
    same = _payloads(snapshot.entries) == _payloads([parent, child])
    kit.require(same, "a delta record changed on the way")


CORE: Final[tuple[Check, ...]] = (
    _put_and_read, _idempotent_put, _conflicting_put, _freeze_idempotent, _late_put, _marks,
    _marks_without_a_call, _drop, _hostile_ids, _similar_ids, _big_entry, _put_freeze_race,
)  # fmt: skip
OPTIONAL: Final[tuple[tuple[tuple[str, ...], Check], ...]] = (
    (("begin_call",), _intents),
    (("begin_call", "cancel_call"), _cancelled_intents),
    (("begin_call",), _reused_call_ids),
    (("open_intent", "cancel_call"), _first_calls),
    (("begin_call", "put_choices"), _choices),
    (("note_delivery",), _notes),
    (("begin_call", "fence"), _fence),
    (("delete",), _delete),
    (("begin_call", "status"), _status),
    (("list_rollouts",), _listing),
    (("sweep_retired",), _sweep),
    (("retire_many", "delete_many"), _batches),
)
LINEAGE: Final[tuple[Check, ...]] = (_lineage, _delta_round_trip)
